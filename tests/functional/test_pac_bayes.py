"""The bounds against scipy and exact binomial tails, their order, their limits and their extremes."""

import math

import pytest
import torch
from scipy import optimize, stats

from lightning_taskinfo.functional.pac_bayes import (
    binary_kl,
    binary_kl_inverse,
    catoni_bound,
    kl_bound,
    union_bound_price,
)

BOUNDS = [kl_bound, catoni_bound]
PROBABILITIES = [0.0, 1e-12, 1e-4, 0.03, 0.5, 0.9, 1 - 1e-9, 1.0]


def dumb_kl(q, p):
    terms = [(q, p), (1 - q, 1 - p)]
    return sum(0.0 if a == 0 else math.inf if b == 0 else a * math.log(a / b) for a, b in terms)


@pytest.mark.parametrize("q", PROBABILITIES)
@pytest.mark.parametrize("p", PROBABILITIES)
def test_binary_kl_matches_the_textbook(q, p):
    assert binary_kl(q, p).item() == pytest.approx(dumb_kl(q, p), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("step", [1e-3, 1e-6, 1e-9, -1e-6])
def test_binary_kl_keeps_its_digits_where_both_are_close(step):
    q = 0.3
    series = step**2 / (2 * q * (1 - q)) - step**3 * (1 / (3 * q**2) - 1 / (3 * (1 - q) ** 2))
    assert binary_kl(q, q + step).item() == pytest.approx(series, rel=max(5e-6, 1e-15 / abs(step)))


def test_the_inverse_is_the_inverse():
    q = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None]
    p = torch.linspace(0, 1, 97, dtype=torch.float64)
    above = (p >= q) & (p < 1)
    again = binary_kl_inverse(q.expand_as(above)[above], binary_kl(q, p)[above])
    torch.testing.assert_close(again, p.expand_as(above)[above], rtol=0, atol=1e-10)


@pytest.mark.parametrize("q", [0.0, 0.01, 0.4, 0.99])
@pytest.mark.parametrize("bound", [1e-8, 1e-3, 0.1, 0.3])
def test_the_inverse_matches_a_root_finder(q, bound):
    root = optimize.brentq(lambda p: dumb_kl(q, p) - bound, q, 1 - 1e-16, xtol=1e-15)
    assert binary_kl_inverse(q, bound).item() == pytest.approx(
        root, abs=1e-8
    )  # the textbook form loses the rest


def test_the_inverse_never_falls_short():
    """Rounded up: the divergence at the answer is at least the bound, or the answer is 1."""
    q, bound = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = binary_kl_inverse(q, bound)
    assert bool(((binary_kl(q, p) >= bound) | (p == 1)).all())


def test_the_inverse_at_the_ends():
    torch.testing.assert_close(
        binary_kl_inverse(0.0, 0.3), torch.tensor(-math.expm1(-0.3), dtype=torch.float64)
    )
    assert binary_kl_inverse(0.2, 0.0).item() == pytest.approx(0.2, abs=1e-15)
    assert binary_kl_inverse(1.0, 0.1).item() == binary_kl_inverse(0.5, 1e8).item() == 1.0


@pytest.mark.parametrize("risk", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("kl", [0.0, 3.0, 1e3, 1e8])
@pytest.mark.parametrize("n", [8, 60_000, 10**9])
def test_bounds_are_finite_and_ordered(risk, kl, n):
    kl_ = kl_bound(risk, kl, n, 0.05)
    mcallester = risk + math.sqrt((kl + math.log(2 * math.sqrt(n) / 0.05)) / (2 * n))
    assert risk <= kl_ <= 1
    assert kl_ <= mcallester + 1e-12  # Pinsker
    # P2's equation 3 follows from McAllester's for n >= 8
    assert (
        mcallester <= risk + math.sqrt((kl + math.log(2 * (n - 1) / 0.05)) / (2 * (n - 1))) + 1e-12
    )
    assert all(math.isfinite(bound(risk, kl, n, 0.05)) for bound in BOUNDS)


@pytest.mark.parametrize("bound", BOUNDS)
def test_bounds_grow_with_risk_kl_and_confidence_and_shrink_with_n(bound):
    base = bound(0.1, 50.0, 1000, 0.05)
    assert bound(0.2, 50.0, 1000, 0.05) > base
    assert bound(0.1, 60.0, 1000, 0.05) > base
    assert bound(0.1, 50.0, 1000, 0.01) > base
    assert bound(0.1, 50.0, 2000, 0.05) < base
    assert bound(0.1, 50.0, 10**9, 0.05).item() == pytest.approx(
        0.2 if bound is catoni_bound else 0.1, abs=1e-3
    )


def test_the_kl_bound_by_its_definition():
    risk, kl, n, delta = 0.1, 50.0, 1000, 0.05
    assert binary_kl(risk, kl_bound(risk, kl, n, delta)).item() == pytest.approx(
        (kl + math.log(2 * math.sqrt(n) / delta)) / n, rel=1e-12
    )


def test_the_catoni_bound_by_hand_and_its_best_parameter():
    """At the best β the linear bound is McAllester's square root in another dress, up to the log term."""
    assert catoni_bound(0.5, 0.0, 8, math.exp(-1), beta=1.0).item() == pytest.approx(
        (8 * 0.5 + 1) / 4
    )
    betas = torch.logspace(-0.2, 3, 400)
    best = catoni_bound(0.2, 100.0, 10_000, 0.05, beta=betas).min().item()
    assert (
        kl_bound(0.2, 100.0, 10_000, 0.05).item()
        < best
        < 0.2 + 2 * math.sqrt(2 * 0.2 * 103 / 10_000)
    )


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("error", [0.02, 0.3])
def test_bounds_hold_for_one_fixed_classifier_by_exact_binomial_tails(bound, error):
    """With KL = 0 the chance of a violation is a sum of binomial probabilities: it must stay below delta."""
    n, delta = 200, 0.1
    risks = torch.arange(n + 1) / n
    violated = bound(risks, 0.0, n, delta) < error
    assert stats.binom.pmf(range(n + 1), n, error)[violated.numpy()].sum() <= delta


def test_bounds_broadcast_and_compute_in_float64():
    value = kl_bound(torch.tensor([0.1, 0.2]), torch.tensor([[1.0], [2.0]]), 100, 0.05)
    assert value.shape == (2, 2)
    assert value.dtype == torch.float64


def test_prices_spend_exactly_delta():
    index = torch.arange(1, 10**6)
    assert (-union_bound_price(index)).exp().sum().item() == pytest.approx(1, abs=2e-6)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 1.0, 10, 0.1), r"`risk` must be in \[0, 1\], got 1.5"),
        ((math.nan, 1.0, 10, 0.1), r"`risk` must be in \[0, 1\], got nan"),
        ((0.5, -1.0, 10, 0.1), "`kl` must be non-negative, got -1.0"),
        ((0.5, 1.0, 7, 0.1), "`n` must be at least 8, got 7.0"),
        ((0.5, 1.0, 10, 0.0), r"`delta` must be in \(0, 1\), got 0.0"),
    ],
)
def test_refuses_what_the_theorems_do_not_cover(bound, arguments, message):
    with pytest.raises(ValueError, match=message):
        bound(*arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: catoni_bound(0.1, 1.0, 10, 0.1, beta=0.5), "`beta` must be above 0.5, got 0.5"),
        (lambda: binary_kl(-0.1, 0.5), r"`q` must be in \[0, 1\], got -0.1"),
        (lambda: binary_kl(0.1, 1.5), r"`p` must be in \[0, 1\], got 1.5"),
        (lambda: binary_kl_inverse(2.0, 0.5), r"`q` must be in \[0, 1\], got 2.0"),
        (lambda: binary_kl_inverse(0.1, -1.0), "`bound` must be non-negative, got -1.0"),
        (lambda: union_bound_price(0), "`index` must be at least 1, got 0.0"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()
