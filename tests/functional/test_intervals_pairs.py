"""Intervals against scipy, and their coverage in simulations."""

import pytest
import torch
from scipy import stats

from lightning_taskinfo.functional.intervals import paired_interval, wilson_interval


@pytest.mark.parametrize(("wrong", "n"), [(0, 20), (3, 20), (10, 20), (20, 20), (120, 1000)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_wilson_is_that_of_scipy(wrong, n, confidence):
    expected = stats.binomtest(wrong, n).proportion_ci(confidence, method="wilson")
    assert wilson_interval(wrong / n, n, confidence) == pytest.approx((expected.low, expected.high))


def test_paired_interval_of_real_losses_is_students():
    generator = torch.Generator().manual_seed(0)
    for n in (10, 50):
        a, b = torch.randn(2, n, generator=generator, dtype=torch.float64)
        expected = stats.ttest_rel(a, b).confidence_interval(0.95)
        low, mean, high = paired_interval(a, b)
        assert mean == pytest.approx((a - b).mean().item())
        assert high - low == pytest.approx(expected.high - expected.low, rel=1e-3)
        assert 0.5 * (low + high) == pytest.approx(mean)


def test_equal_losses_have_an_interval_around_zero():
    same = torch.tensor([0.0, 1.0] * 10)
    low, mean, high = paired_interval(same, same)
    assert mean == 0
    assert low < 0 < high
    assert -low == pytest.approx(high)


def test_ends_change_sides_with_the_order():
    a, b = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 1]), torch.tensor([0.0, 0, 0, 1, 0, 1, 0, 0])
    low, mean, high = paired_interval(a, b)
    assert paired_interval(b, a) == pytest.approx((-high, -mean, -low))


@pytest.mark.parametrize("n", [20, 100])
def test_paired_interval_of_errors_covers(n):
    """2,000 pairs of dependent errors with a true difference of 0.1."""
    generator = torch.Generator().manual_seed(0)
    common = torch.rand(2000, n, generator=generator)
    a, b = (common < 0.4).double(), ((common < 0.2) | ((common > 0.4) & (common < 0.5))).double()
    ends = [paired_interval(x, y) for x, y in zip(a, b, strict=True)]
    covered = sum(low <= 0.1 <= high for low, _, high in ends) / 2000
    assert covered > 0.95 - 3 * (0.95 * 0.05 / 2000) ** 0.5


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_refuses_what_is_no_probability(confidence):
    with pytest.raises(ValueError, match=f"`confidence` .*{confidence}"):
        wilson_interval(0.5, 10, confidence)
