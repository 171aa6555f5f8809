import math

import pytest
import torch

from lightning_taskinfo.fisher.accumulators import TraceSums


def test_trace_sums_have_a_standard_error():
    norms = {"a.weight": torch.tensor([1.0, 3.0, 8.0]), "a.bias": torch.tensor([1.0, 0.0, 1.0])}
    total = 2 * torch.tensor([2.0, 3.0, 9.0]).double()
    trace, error, layers = TraceSums.of(norms, scale=2.0).compute()
    assert trace == pytest.approx(total.mean().item())
    assert error == pytest.approx(total.std().item() / 3**0.5)
    assert layers == {"a": pytest.approx(trace)}


def test_trace_sums_of_many_samples():
    norms = {name: torch.rand(700) for name in ("a.weight", "a.bias", "b.weight")}
    totals = torch.stack([*norms.values()]).double().sum(0)
    trace, error, layers = TraceSums.of(norms).compute()
    assert trace == pytest.approx(totals.mean().item())
    assert error == pytest.approx(totals.std().item() / 700**0.5)
    assert layers["b"] == pytest.approx(norms["b.weight"].double().mean().item())


def test_trace_sums_add_up_over_processes_and_need_two_samples():
    parts = [torch.tensor([1.0, 3.0]), torch.tensor([8.0])]
    first, second = (TraceSums.of({"a.weight": part, "b.weight": 2 * part}) for part in parts)
    whole = TraceSums.of({"a.weight": torch.cat(parts), "b.weight": 2 * torch.cat(parts)}).compute()
    sums = [a + b for a, b in zip(first.sums, second.sums, strict=True)]
    assert first._replace(sums=sums).compute() == whole
    assert whole[2] == {"a": pytest.approx(4.0), "b": pytest.approx(8.0)}
    assert math.isnan(second.compute()[1])
