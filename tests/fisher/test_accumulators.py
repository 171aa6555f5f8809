import math

import pytest
import torch

from lightning_taskinfo.fisher.accumulators import Gram, TraceSums
from lightning_taskinfo.fisher.terms import Gradients


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


class Outer(Gradients):
    """Gradients that are products of two vectors."""

    def __init__(self, left, right) -> None:
        super().__init__(left.unsqueeze(2) * right.unsqueeze(1))
        self.pair = left, right

    def one_product(self):
        return self.pair


@pytest.mark.parametrize("reached", [(0, 1, 2), (0, 1), (0,), (1,), (2,), (0, 2), ()], ids=str)
@pytest.mark.parametrize("kinds", [(Outer, Outer, Outer), (Gradients, Outer, Gradients)], ids=str)
def test_a_gram_matrix_of_chunks_some_of_which_no_gradient_reaches(kinds, reached):
    torch.manual_seed(0)
    chunks = [slice(0, 3), slice(3, 4), slice(4, 6)]
    left, right, vector = (torch.randn(6, size, dtype=torch.float64) for size in (4, 5, 2))
    whole = torch.zeros(6, 22, dtype=torch.float64)
    products = Gram(torch.zeros(6, 6, dtype=torch.float64), {"matrix", "vector"})
    for number, some in enumerate(chunks):
        products.add(some, "vector", Gradients(vector[some]))
        whole[some, 20:] = vector[some]
        if number in reached:
            found = Outer(left[some], right[some])
            whole[some, :20] = found.gradients.flatten(1)
            is_pair = kinds[number] is Outer
            products.add(some, "matrix", found if is_pair else Gradients(found.gradients))
    products.close()
    torch.testing.assert_close(products.gram, whole @ whole.T)
    assert not products.kept
    assert not products.postponed
