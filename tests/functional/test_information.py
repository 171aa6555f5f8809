"""Information in the weights against ``torch.distributions``, a numerical minimiser and P1's limit."""

import math
from fractions import Fraction

import pytest
import torch
from scipy import optimize, stats
from torch.distributions import Normal, kl_divergence

from benchmarks.evidence_width import evidence_prior_std
from lightning_taskinfo.functional import information
from lightning_taskinfo.functional.information import (
    information_in_weights,
    label_entropy,
    post_variance,
    terms_by_group,
)


@pytest.fixture
def weights():
    g = torch.Generator().manual_seed(0)
    curvature = torch.rand(40, generator=g, dtype=torch.float64).mul(12).exp() - 1  # 0 … e¹²
    return curvature, torch.randn(40, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("prior_std", [0.03, 2.0])
@pytest.mark.parametrize("beta", [0.2, 1.0, 50.0])
def test_kl_matches_torch_distributions(weights, prior_std, beta):
    h, delta = weights
    post = Normal(delta, post_variance(h, prior_std=prior_std, beta=beta).sqrt())
    expected = kl_divergence(post, Normal(torch.zeros_like(h), prior_std)).sum()
    torch.testing.assert_close(
        information_in_weights(h, delta, prior_std=prior_std, beta=beta).kl, expected
    )


def test_a_sweep_gives_what_each_width_gives_alone_however_the_weights_are_cut(
    weights, monkeypatch
):
    h, delta = (part.view(8, 5) for part in weights)
    monkeypatch.setattr(information, "BLOCK", 7)
    stds = [0.01, 0.3, 4.0]
    distances = {"w": delta.square().sum().item(), "b": 0.0}
    curvatures = {"w": h, "b": h[:0], "frozen": h}
    for std, results in zip(
        stds, terms_by_group(curvatures, distances, prior_stds=stds, beta=0.2), strict=True
    ):
        assert results["b"].kl == 0, "of no weights"
        assert results.keys() == distances.keys()
        result = results["w"]
        post = Normal(delta, post_variance(h, prior_std=std, beta=0.2).sqrt())
        torch.testing.assert_close(
            result.kl, kl_divergence(post, Normal(torch.zeros_like(h), std)).sum()
        )
        torch.testing.assert_close(result.curvature_penalty, 0.5 * (h * post.variance).sum())
        torch.testing.assert_close(result.effective_parameters, (1 - post.variance / std**2).sum())
    with pytest.raises(ValueError, match=r"`prior_std` must be positive, got -1\.0"):
        terms_by_group(curvatures, distances, prior_stds=[1.0, -1.0], beta=0.2)


@pytest.mark.parametrize("largest", [1e-9, 1.0, 1e18, 1e20, 1e300])
@pytest.mark.parametrize("n", [1, 49])
def test_no_gain_is_too_small_or_too_large(largest, n):
    """Against fractions and Python's own ``log1p``."""
    g = torch.Generator().manual_seed(n)
    gains = largest * torch.rand(n, generator=g, dtype=torch.float64).mul(-2).exp()
    terms = information_in_weights(gains, torch.zeros_like(gains), prior_std=1.0)
    logarithms = math.fsum(math.log1p(r) for r in gains.tolist())
    known = [Fraction(r) / (1 + Fraction(r)) for r in gains.tolist()]
    assert terms.effective_parameters.item() == pytest.approx(float(sum(known)), rel=1e-14)
    assert terms.kl.item() == pytest.approx(
        0.5 * (logarithms - float(sum(known))), rel=1e-12, abs=1e-15 * logarithms
    )
    assert terms.objective().item() == pytest.approx(0.5 * logarithms, rel=1e-14)


@pytest.mark.parametrize("h", [0.1, 7.0, 900.0])
@pytest.mark.parametrize("beta", [0.2, 5.0])
def test_the_variance_is_the_numerical_minimiser(h, beta):
    prior_std = 0.7

    def objective(log_variance):
        v = math.exp(log_variance) / prior_std**2
        return 0.5 * h * math.exp(log_variance) + 0.5 * beta * (v - 1 - math.log(v))

    found = optimize.minimize_scalar(
        objective, bounds=(-30, 5), method="bounded", options={"xatol": 1e-12}
    )
    h_ = torch.tensor(h, dtype=torch.float64)
    assert post_variance(h_, prior_std=prior_std, beta=beta).item() == pytest.approx(
        math.exp(found.x), rel=1e-6
    )
    value = information_in_weights(
        h_, torch.zeros_like(h_), prior_std=prior_std, beta=beta
    ).objective()
    assert value.item() == pytest.approx(found.fun, rel=1e-10)


@pytest.mark.parametrize("beta", [0.2, 1.0, 50.0])
def test_penalty_and_information_add_up_to_the_log_determinant(weights, beta):
    (h, delta), prior_std = weights, 0.3
    together = (
        0.5
        * beta
        * (delta.square().sum() / prior_std**2 + (1 + prior_std**2 * h / beta).log().sum())
    )
    information = information_in_weights(h, delta, prior_std=prior_std, beta=beta)
    torch.testing.assert_close(information.objective(), together)
    variance = post_variance(h, prior_std=prior_std, beta=beta)
    torch.testing.assert_close(information.curvature_penalty, 0.5 * (h * variance).sum())


def test_a_wide_prior_gives_the_log_determinant_of_the_fisher(weights):
    h, delta = weights
    n, beta, prior_std, k = 500, 2.0, 1e7, len(h)
    fisher = h / n + 0.01
    limit = 0.5 * fisher.log().sum() + 0.5 * k * (math.log(prior_std**2) + math.log(n / beta) - 1)
    torch.testing.assert_close(
        information_in_weights(n * fisher, delta, prior_std=prior_std, beta=beta).kl, limit
    )


def test_effective_parameters_run_from_none_to_all(weights):
    h, delta = weights
    count = [
        information_in_weights(h + 0.1, delta, prior_std=s).effective_parameters.item()
        for s in (1e-9, 0.1, 1, 1e9)
    ]
    assert count == sorted(count)
    assert count[0] == pytest.approx(0, abs=1e-8)
    assert count[-1] == pytest.approx(40)


def test_a_million_unfelt_weights_hold_almost_nothing():
    """Each holds r²/4; the textbook form in float32 would return rounding errors instead."""
    h = torch.full((1_000_000,), 1e-6)
    kl = information_in_weights(h, torch.zeros_like(h), prior_std=1.0).kl.item()
    assert kl == pytest.approx(1e6 * 1e-12 / 4, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prior_std": 0.0}, "`prior_std` must be positive, got 0.0"),
        ({"prior_std": 1.0, "beta": -1.0}, "`beta` must be positive, got -1.0"),
    ],
)
def test_refuses_non_positive(weights, arguments, message):
    with pytest.raises(ValueError, match=message):
        information_in_weights(*weights, **arguments)


def test_refuses_other_shapes_and_negative_curvature():
    with pytest.raises(
        ValueError, match=r"`displacement` must have the shape of `curvature`, got \[3\] for \[2\]"
    ):
        information_in_weights(torch.ones(2), torch.ones(3), prior_std=1.0)
    with pytest.raises(ValueError, match=r"`curvature` must be non-negative, got -1\.0"):
        post_variance(-torch.ones(2), prior_std=1.0)


def test_the_two_parts_of_the_kl_add_up(weights):
    h, delta = weights
    for std in (0.01, 0.3, 5.0):
        terms = information_in_weights(h, delta, prior_std=std, beta=0.7)
        assert terms.displacement.item() == pytest.approx(
            delta.square().sum().item() / (2 * std**2)
        )
        v = 1 / (1 + std**2 * h / 0.7)
        assert terms.curvature.item() == pytest.approx(
            0.5 * (v - 1 - v.log()).sum().item(), rel=1e-6
        )
        assert terms.kl.item() == pytest.approx((terms.displacement + terms.curvature).item())


def test_a_code_length_pays_for_the_choice(weights):
    h, delta = weights
    terms = information_in_weights(h, delta, prior_std=1.0, beta=0.5)
    assert terms.code_length(3.0).item() == pytest.approx(3.0 + 0.5 * terms.kl.item())
    assert terms.code_length(3.0, choices=17).item() == pytest.approx(
        3.0 + 0.5 * (terms.kl.item() + math.log(17))
    )


@pytest.mark.parametrize("beta", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_evidence_root_has_the_smallest_quadratic_objective(weights, beta, scale):
    h, delta = weights
    root = evidence_prior_std(scale * h, delta, beta=beta)
    near = [root * 1.01**j for j in range(-300, 301)]
    objectives = [
        information_in_weights(scale * h, delta, prior_std=std, beta=beta).objective().item()
        for std in near
    ]
    assert near[min(range(len(near)), key=objectives.__getitem__)] == pytest.approx(root, rel=0.011)
    effective = information_in_weights(
        scale * h, delta, prior_std=root, beta=beta
    ).effective_parameters.item()
    assert root**2 * effective == pytest.approx(delta.square().sum().item(), rel=1e-9)


def test_the_evidence_root_where_plain_iteration_oscillates():
    h, delta = torch.tensor([1e-8, 1e8]).double(), torch.tensor([1e-4, 30.0]).double()
    root = evidence_prior_std(h, delta)
    effective = information_in_weights(h, delta, prior_std=root).effective_parameters.item()
    assert root**2 * effective == pytest.approx(delta.square().sum().item(), rel=1e-6)


def test_the_evidence_root_in_its_limits(weights):
    h, delta = weights
    assert evidence_prior_std(h, torch.zeros_like(delta)) == 0.0, "nothing has moved"
    assert math.isnan(evidence_prior_std(torch.zeros_like(h), delta)), "no curvature"
    assert math.isnan(evidence_prior_std(h[:0], torch.ones(1)))
    tiny = evidence_prior_std(
        torch.tensor([1e-200], dtype=torch.float64), torch.tensor([1e-110], dtype=torch.float64)
    )
    assert tiny == pytest.approx(1e-5, rel=1e-6), "λ⁴h = βΔ² where λ²h is small"
    with pytest.raises(ValueError, match="`beta` must"):
        evidence_prior_std(h, delta, beta=math.nan)


def test_label_entropy_against_scipy_and_its_bias():
    generator = torch.Generator().manual_seed(0)
    counts = [
        row.bincount(minlength=12) for row in torch.randint(10, (400, 100), generator=generator)
    ]
    assert label_entropy(counts[0]) == pytest.approx(stats.entropy(counts[0].numpy()) + 9 / 200)
    mean = sum(map(label_entropy, counts)) / len(counts)
    assert mean == pytest.approx(math.log(10), abs=0.005), (
        "without the correction it is 0.045 too small"
    )
    assert math.isnan(label_entropy(torch.zeros(3)))
