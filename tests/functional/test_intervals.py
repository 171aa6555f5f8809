"""Intervals and gains against scipy, their coverage in simulations, and the cases in which there is none."""

import math

import pytest
import torch
from scipy import stats

from lightning_taskinfo.functional.intervals import (
    Interval,
    mean_interval,
    paired_gain,
    paired_interval,
    student_quantile,
    wilson_interval,
)


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


def test_equal_losses_differ_by_zero():
    same = torch.tensor([0.0, 1.0] * 10)
    assert paired_interval(same, same) == (0, 0, 0)


def test_ends_change_sides_with_the_order():
    a, b = torch.tensor([1.0, 1, 1, 1, 0, 0, 1, 1]), torch.tensor([0.0, 0, 0, 1, 0, 1, 0, 0])
    low, mean, high = paired_interval(a, b)
    assert paired_interval(b, a) == pytest.approx((-high, -mean, -low))


@pytest.mark.parametrize("n", [20, 40, 100])
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


def sample(n, *, seed=0):
    return torch.randn(
        n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).tolist()


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 10, 31, 100])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, 0.9999])
def test_reach_is_scipys_quantile(confidence, degrees):
    assert student_quantile(confidence, degrees) == pytest.approx(
        stats.t.ppf(0.5 + confidence / 2, degrees), rel=1e-9
    )


@pytest.mark.parametrize("n", [2, 3, 5, 10])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_mean_interval_is_scipys(n, confidence):
    values = sample(n)
    interval = mean_interval(values, confidence=confidence)
    expected = stats.ttest_1samp(values, 0).confidence_interval(confidence)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert interval.mean == pytest.approx(sum(values) / n)
    assert (interval.n, interval.reason) == (n, "")


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_gain_is_scipys_paired_test(n):
    baseline, method = sample(n), sample(n, seed=1)
    gain = paired_gain(dict(enumerate(baseline)), dict(enumerate(method)), confidence=0.9)
    expected = stats.ttest_rel(baseline, method).confidence_interval(0.9)
    assert (gain.low, gain.high) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_gain_pairs_by_seed_and_leaves_out_the_rest():
    """In another order, with a seed too many on either side: the same gain as of the pairs alone."""
    pairs = paired_gain({0: 0.5, 1: 0.6, 2: 0.9}, {0: 0.3, 1: 0.5, 2: 0.6})
    shuffled = paired_gain({2: 0.9, 7: 99.0, 0: 0.5, 1: 0.6}, {1: 0.5, 8: -99.0, 2: 0.6, 0: 0.3})
    assert shuffled.n == 3
    assert (shuffled.mean, shuffled.low, shuffled.high) == pytest.approx(
        (pairs.mean, pairs.low, pairs.high)
    )


def test_covers_as_often_as_it_says():
    """2000 intervals from five normal values each: the share that covers is binomial."""
    values = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    intervals = [mean_interval(row, confidence=0.9) for row in values.tolist()]
    covered = sum(i.low < 0 < i.high for i in intervals)
    assert abs(covered - 1800) < 3 * math.sqrt(2000 * 0.9 * 0.1)


@pytest.mark.parametrize(
    ("values", "mean", "reason"),
    [
        ([], None, "no seed"),
        ([0.3], 0.3, "one seed"),
        ([0.25, 0.25, 0.25], 0.25, "all seeds gave the same"),
        ([1.0, math.inf], math.inf, "a value is not finite"),
        ([1.0, math.nan], math.nan, "a value is not finite"),
        ([math.inf, -math.inf], math.nan, "a value is not finite"),
    ],
)
def test_no_interval_has_a_reason(values, mean, reason):
    interval = mean_interval(values)
    assert interval.mean == pytest.approx(mean, nan_ok=True)
    assert (interval.low, interval.high, interval.n, interval.reason) == (
        None,
        None,
        len(values),
        reason,
    )
    assert interval.verdict == "cannot tell"


def test_rounding_is_not_spread():
    """Two test sets of 100: the gains are one sample each, and differ by rounding alone."""
    gain = paired_gain({0: 0.6, 1: 0.71}, {0: 0.59, 1: 0.7})
    assert gain.reason == "all seeds gave the same"
    assert gain.mean == pytest.approx(0.01)
    assert paired_gain({0: 0.6, 1: 0.71}, {0: 0.59, 1: 0.69}).reason == ""


def test_gain_without_a_common_seed():
    assert paired_gain({0: 0.5}, {1: 0.5}) == Interval(None, None, None, 0, "no seed in common")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.2, "helps"),
        (-0.2, -0.1, "hurts"),
        (-0.1, 0.2, "cannot tell"),
        (0.0, 0.1, "cannot tell"),
    ],
)
def test_verdict_is_where_the_interval_lies(low, high, verdict):
    assert Interval((low + high) / 2, low, high, 3).verdict == verdict


def test_interval_is_cut_at_what_is_possible():
    interval = mean_interval([0.5, 0.9], bounds=(0.0, 1.0))
    assert (interval.low, interval.high) == (0.0, 1.0)
    gain = paired_gain({0: 0.5, 1: 0.9}, {0: 0.9, 1: 0.5}, bounds=(-1.0, 1.0))
    assert (gain.low, gain.high) == (-1.0, 1.0)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95])
def test_refuses_a_confidence_that_is_none(confidence):
    with pytest.raises(ValueError, match=f"`confidence` must be in .*, got {confidence}"):
        student_quantile(confidence, 3)


def test_refuses_no_degrees():
    with pytest.raises(ValueError, match="`degrees` must be at least 1, got 0"):
        student_quantile(0.95, 0)
