"""The kernel discrepancy as a penalty."""

import pytest
import torch
from torch import nn

from lightning_taskinfo.functional.discrepancy import mk_mmd
from lightning_taskinfo.regularizers import MultiKernelMMD


def test_the_penalty_is_weight_times_the_discrepancy():
    source, target = torch.randn(6, 3), torch.randn(4, 3) + 1
    regularizer = MultiKernelMMD(weight=0.5)
    assert regularizer(source, target).item() == pytest.approx(0.5 * mk_mmd(source, target).item())
    assert regularizer.value.item() == pytest.approx(mk_mmd(source, target).item())


def test_a_hundred_steps_lower_it():
    def train(weight: float) -> float:
        torch.manual_seed(0)
        net, regularizer = nn.Linear(4, 3), MultiKernelMMD(weight=weight)
        source, target = torch.randn(32, 4), torch.randn(48, 4) + 2
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(100):
            loss = nn.functional.cross_entropy(net(source), source[:, :3].argmax(1))
            optimizer.zero_grad()
            (loss + regularizer(net(source), net(target))).backward()
            optimizer.step()
        return mk_mmd(net(source), net(target)).item()

    assert train(weight=3.0) < 0.5 * train(weight=0.0)


def test_autocast_does_not_reach_it():
    source, target = torch.randn(6, 3), torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = MultiKernelMMD()(source, target)
    assert torch.equal(inside, MultiKernelMMD()(source, target))


@pytest.mark.parametrize(
    ("source", "target", "match"),
    [
        (
            torch.zeros(1, 3),
            torch.zeros(4, 3),
            r"`source` .* of at least 2, got \[\(1, 3\), \(4, 3\)\]",
        ),
        (
            torch.zeros(4, 3),
            torch.zeros(0, 3),
            r"`target` .* of at least 2, got \[\(4, 3\), \(0, 3\)\]",
        ),
        (torch.zeros(4, 3), torch.zeros(4, 2), r"must have shapes .* got \[\(4, 3\), \(4, 2\)\]"),
        (
            torch.zeros(4, 3),
            torch.full((4, 3), torch.nan),
            "`target` must be finite, got 12 values",
        ),
    ],
)
def test_refuses_features(source, target, match):
    with pytest.raises(ValueError, match=match):
        MultiKernelMMD()(source, target)
