"""The binomial bound against scipy, the betting one against brute force over means; how often both are violated."""

import math

import pytest
import torch
from scipy.stats import beta, binom

from lightning_taskinfo.functional.pac_bayes import binary_kl_inverse
from lightning_taskinfo.functional.tail_bounds import (
    MAX_BET,
    betting_interval,
    betting_upper_bound,
    binomial_log_tail,
    binomial_upper_bound,
    most_errors_below,
)

COUNTS = [(0, 1), (0, 400), (3, 10), (46, 400), (9, 10), (1_200, 10_000), (30_000, 90_000)]


@pytest.mark.parametrize(("errors", "n"), COUNTS)
@pytest.mark.parametrize("delta", [0.05, 1e-6])
def test_is_the_clopper_pearson_bound(errors, n, delta):
    expected = beta.ppf(1 - delta, errors + 1, n - errors)
    assert binomial_upper_bound(errors, n, delta).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(("errors", "n"), COUNTS)
def test_the_tail_is_that_of_scipy(errors, n):
    near = torch.tensor([0.0, 1e-6, 0.9, 1.0, 1.1], dtype=torch.float64)  # scipy's own underflows
    p = (near * (errors + 1) / n).clamp(max=1.0)
    expected = torch.from_numpy(binom.logcdf(errors, n, p.numpy()))
    torch.testing.assert_close(binomial_log_tail(errors, n, p), expected, rtol=1e-8, atol=1e-8)


def test_only_errors_prove_nothing():
    assert binomial_upper_bound(7, 7, 0.05) == 1.0


@pytest.mark.parametrize("n", [1, 20, 100])
def test_most_errors_below_is_the_last_of_a_loop(n):
    proved = [binomial_upper_bound(k, n, 0.05).item() for k in range(n + 1)]
    for bound in (0.01, 0.0295, 0.03, 0.145, 0.5, 0.999, 1.0):
        last = sum(value <= bound for value in proved) - 1
        assert most_errors_below(bound, n, 0.05) == last, bound


def test_violated_at_most_as_often_as_promised():
    """The exact probability that the bound lies below the truth, for errors of every size."""
    n, delta = 60, 0.1
    bounds = torch.stack([binomial_upper_bound(k, n, delta) for k in range(n + 1)])
    for truth in torch.linspace(0.01, 0.99, 50).tolist():
        weights = torch.from_numpy(binom.pmf(range(n + 1), n, truth))
        assert weights[bounds < truth].sum() <= delta


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: binomial_upper_bound(3, 2, 0.05), r"`errors` .*`n` = 2, got 3"),
        (lambda: binomial_upper_bound(-1, 2, 0.05), r"`errors` .*got -1"),
        (lambda: binomial_upper_bound(0, 0, 0.05), r"`n` .*got 0"),
        (lambda: binomial_upper_bound(0, 2, 1.0), r"`delta` .*got 1\.0"),
        (lambda: most_errors_below(0.1, 2, 0.0), r"`delta` .*got 0\.0"),
        (lambda: binomial_log_tail(0, 2, math.nan), r"`p` .*got nan"),
    ],
)
def test_messages(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def dumb_capital(x, mean, delta):
    """The bettor's capital, draw by draw, with stakes from the draws so far."""
    capital, seen = 1.0, []
    for value in x:
        averages = [(0.5 + sum(seen[: t + 1])) / (t + 2) for t in range(len(seen))]
        variance = (0.25 + sum((s - a) ** 2 for s, a in zip(seen, averages, strict=True))) / (
            len(seen) + 1
        )
        stake = min(MAX_BET, math.sqrt(2 * math.log(2 / delta) / (len(x) * variance)))
        capital *= 1 + stake * (mean - value)
        seen.append(value)
    return capital


@pytest.mark.parametrize("delta", [0.01, 0.3])
def test_the_ends_are_where_the_capital_reaches_its_goal(delta):
    x = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 2
    low, high = (end.item() for end in betting_interval(x, delta))
    assert dumb_capital(x.tolist(), high, delta) == pytest.approx(2 / delta)
    assert dumb_capital((1 - x).tolist(), 1 - low, delta) == pytest.approx(2 / delta)


def test_one_end_alone_needs_half_the_doubt():
    x = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 2
    assert betting_upper_bound(x, 0.05) == betting_interval(x, 0.1)[1]


@pytest.mark.parametrize("draw", ["coin", "skewed", "rare"])
def test_misses_the_mean_at_most_as_often_as_promised(draw):
    g, delta, repeats = torch.Generator().manual_seed(1), 0.2, 400
    misses = 0
    for _ in range(repeats):
        u = torch.rand(80, generator=g, dtype=torch.float64)
        x, mean = {
            "coin": ((u < 0.3).double(), 0.3),
            "skewed": (u**3, 0.25),
            "rare": ((u < 0.03).double(), 0.03),
        }[draw]
        low, high = betting_interval(x, delta)
        misses += not low <= mean <= high
    assert misses <= delta * repeats


def test_narrower_than_the_interval_that_knows_the_mean_only():
    """A binomial of 32 tosses a draw: a few times narrower. Single tosses: about the same."""
    g = torch.Generator().manual_seed(2)
    for tosses, factor in ((32, 0.4), (1, 1.3)):
        x = (torch.rand(1000, tosses, generator=g) < 0.05).double().mean(1)
        low, high = betting_interval(x, 0.01)
        known = binary_kl_inverse(x.mean(), math.log(2 / 0.01) / 1000)
        assert high - x.mean() < factor * (known - x.mean())
        assert low <= x.mean() <= high


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_draws_that_are_all_alike(value):
    low, high = betting_interval(torch.full((50,), value), 0.05)
    assert 0 <= low <= value <= high <= 1
    assert (low, high) != (0, 1)


def test_one_draw_says_nothing():
    assert [end.item() for end in betting_interval(torch.tensor([0.3]), 0.01)] == pytest.approx(
        [0, 1], abs=1e-15
    )


def test_refuses_what_is_no_vector_of_draws_or_no_probability():
    with pytest.raises(ValueError, match=r"`values` must be a vector of draws, got shape \[2, 1\]"):
        betting_interval(torch.zeros(2, 1), 0.1)
    with pytest.raises(ValueError, match=r"`values` must be a vector of draws, got shape \[0\]"):
        betting_interval(torch.zeros(0), 0.1)
    with pytest.raises(ValueError, match=r"`values` must be in \[0, 1\], got 1\.5"):
        betting_interval(torch.tensor([0.1, 1.5]), 0.1)
    with pytest.raises(ValueError, match=r"`delta` must be in \(0, 1\), got 0\.0"):
        betting_interval(torch.zeros(2), 0.0)
