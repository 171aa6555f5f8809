"""The binomial tail and its inversion against scipy, and how often the bound is violated."""

import math

import pytest
import torch
from scipy.stats import beta, binom

from lightning_taskinfo.functional.intervals import (
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


@pytest.mark.parametrize("bound", [0.01, 0.0295, 0.03, 0.145, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("n", [1, 20, 100])
def test_most_errors_below_is_the_last_of_a_loop(bound, n):
    proved = [binomial_upper_bound(k, n, 0.05).item() <= bound for k in range(n + 1)]
    assert most_errors_below(bound, n, 0.05) == sum(proved) - 1


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
