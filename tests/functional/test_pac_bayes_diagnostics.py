"""Lemma 4.2 against a numerical minimiser and its limits."""

import math

import pytest
import torch
from scipy import optimize

from lightning_taskinfo.functional.pac_bayes import oracle_complexity


def dumb_objective(log_variances, h, delta, beta):
    prior, post = (math.exp(value) for value in log_variances)
    kl = 0.5 * (post / prior - 1 - math.log(post / prior) + delta**2 / prior)
    return 0.5 * h * post + beta * kl


@pytest.mark.parametrize("h", [0.01, 2.0, 500.0])
@pytest.mark.parametrize("delta", [0.03, 1.0, -4.0])
@pytest.mark.parametrize("beta", [0.1, 3.0])
def test_matches_a_numerical_minimisation(h, delta, beta):
    found = optimize.minimize(
        dumb_objective,
        (0.0, 0.0),
        args=(h, delta, beta),
        method="Nelder-Mead",
        options={"xatol": 1e-10, "fatol": 1e-14},
    )
    oracle = oracle_complexity(torch.tensor(h), torch.tensor(delta), beta=beta)
    h, delta = torch.tensor(h).double().item(), torch.tensor(delta).double().item()
    assert oracle.objective.item() == pytest.approx(found.fun, rel=1e-7)
    variances = oracle.prior_variance.item(), oracle.post_variance.item()
    assert dumb_objective([math.log(v) for v in variances], h, delta, beta) == pytest.approx(
        oracle.objective.item(), rel=1e-12
    )
    assert oracle.kl.item() == pytest.approx(
        (oracle.objective.item() - 0.5 * h * variances[1]) / beta, rel=1e-9
    )


@pytest.mark.parametrize(("h", "delta"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1e-300, 1e-300)])
def test_what_did_not_move_or_is_not_felt_costs_nothing(h, delta):
    oracle = oracle_complexity(torch.tensor(h, dtype=torch.float64), torch.tensor(delta), beta=1.0)
    assert oracle.objective.item() == pytest.approx(0, abs=1e-100)
    assert oracle.kl.item() == pytest.approx(0, abs=1e-100)


def test_small_and_large_limits():
    """β√u per weight as u → 0, (β/2)(1 + log u) as u → ∞; finite at the ends of float64."""
    small, large = (
        oracle_complexity(torch.tensor(u).double(), torch.ones(1), beta=2.0) for u in (2e-12, 2e12)
    )
    assert small.objective.item() == pytest.approx(2.0 * 1e-6, rel=1e-5)
    assert large.objective.item() == pytest.approx(1 + math.log(1e12), rel=1e-9)
    assert math.isfinite(
        oracle_complexity(
            torch.tensor(1e300, dtype=torch.float64), torch.ones(1), beta=1.0
        ).objective
    )


def test_it_adds_up_over_weights_and_scales_with_the_loss():
    h, delta = torch.rand(2, 50, generator=torch.Generator().manual_seed(0))
    whole = oracle_complexity(h, delta, beta=0.3).objective
    parts = sum(oracle_complexity(a, b, beta=0.3).objective for a, b in zip(h, delta, strict=True))
    torch.testing.assert_close(whole, parts)
    torch.testing.assert_close(
        oracle_complexity(100 * h.double(), delta, beta=30.0).objective, 100 * whole
    )


def test_no_isotropic_prior_does_better():
    from lightning_taskinfo.functional.information import information_in_weights

    h, delta = torch.rand(2, 50, generator=torch.Generator().manual_seed(0))
    oracle = oracle_complexity(h, delta, beta=0.3).objective
    for prior_std in (0.01, 0.1, 1.0, 10.0):
        assert information_in_weights(h, delta, prior_std=prior_std, beta=0.3).objective() > oracle


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: oracle_complexity(torch.ones(1), torch.ones(1), beta=0.0),
            "`beta` must be positive, got 0.0",
        ),
        (
            lambda: oracle_complexity(-torch.ones(1), torch.ones(1), beta=1.0),
            "`curvature` must be non-negative, got -1",
        ),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()
