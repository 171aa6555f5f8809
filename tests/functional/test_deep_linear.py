"""Closed forms of transfer against drawn datasets, quadrature and the equations they solve."""

import math

import pytest
import torch

from lightning_taskinfo.functional.deep_linear import (
    _layer_product,
    fine_tuning_boundary,
    fine_tuning_risk,
    fine_tuning_transferability,
    layer_product,
    linear_transfer_risk,
    linear_transferability,
    negative_transfer_interval,
    scratch_risk,
)

ANGLES = torch.linspace(0, math.pi, 13, dtype=torch.float64)
GAMMAS = torch.tensor([0.1, 0.4, 0.8, 1.2, 3.0], dtype=torch.float64)
SIGMAS = torch.tensor([0.0, 0.2, 1.0], dtype=torch.float64)


def f64(value):
    return torch.tensor(value, dtype=torch.float64)


def draw(theta, n, d, sigma, repetitions=4000):
    """Source, target, inputs and noisy labels of many small datasets, with nothing but ``randn``."""
    g = torch.Generator().manual_seed(0)
    source, target = torch.zeros(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    source[0], target[0], target[1] = 1.0, math.cos(theta), math.sin(theta)
    inputs = torch.randn(repetitions, n, d, generator=g, dtype=torch.float64)
    noise = torch.randn(repetitions, n, generator=g, dtype=torch.float64)
    return source, target, inputs, inputs @ target + sigma * noise


def assert_mean(draws, expected):
    """The mean lies within three standard errors of what is expected."""
    error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - expected) <= 3 * error + 1e-12, (draws.mean(), expected, error)


@pytest.mark.parametrize("sigma", [0.0, 0.7])
@pytest.mark.parametrize(("n", "d"), [(1, 8), (4, 12), (24, 10)])
def test_scratch_risk_is_the_mean_over_minimum_norm_solutions(n, d, sigma):
    _, target, inputs, labels = draw(0.5, n, d, sigma)
    beta = (torch.linalg.pinv(inputs) @ labels.unsqueeze(-1)).squeeze(-1)
    assert_mean((beta - target).square().sum(-1), scratch_risk(f64(n / d), sigma, dimension=d))


def test_scratch_risk_tends_to_the_printed_formula():
    for gamma in GAMMAS.tolist():
        printed = (
            ((1 - gamma) ** 2 + gamma * 0.25) / (1 - gamma) if gamma < 1 else 0.25 / (gamma - 1)
        )
        assert scratch_risk(f64(gamma), 0.5).item() == pytest.approx(printed)
        assert scratch_risk(f64(gamma), 0.5, dimension=10**9).item() == pytest.approx(
            printed, rel=1e-7
        )


def test_scratch_risk_at_the_threshold():
    assert scratch_risk(1.0, 0.0).item() == 0.0
    assert scratch_risk(1.0, 0.1).item() == math.inf
    assert scratch_risk(torch.tensor([0.9, 1.0, 1.1]), 0.1, dimension=10).tolist() == [math.inf] * 3


@pytest.mark.parametrize(("theta", "sigma", "n"), [(0.0, 0.5, 5), (1.0, 0.0, 8), (2.5, 1.0, 30)])
def test_linear_transfer_risk_is_the_mean_over_regressions_on_the_source_feature(theta, sigma, n):
    source, target, inputs, labels = draw(theta, n, 3, sigma, repetitions=20_000)
    feature = (inputs @ source).unsqueeze(-1)
    last = torch.linalg.lstsq(feature, labels.unsqueeze(-1)).solution.squeeze(-1)  # [R, 1]
    expected = linear_transfer_risk(f64(theta), sigma, n)
    assert_mean((last * source - target).square().sum(-1), expected)


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_layers_balance(depth):
    gamma, sigma = torch.meshgrid(GAMMAS[:3], SIGMAS, indexing="ij")
    b = _layer_product(gamma, sigma, depth + 1).pow(
        1 / depth
    )  # depth + 1 layers, so that the root can be undone
    norm = gamma + gamma * sigma.square() / (1 - gamma)
    torch.testing.assert_close(b.square(), norm * b.pow(-2 * depth) + 1 - gamma)


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
@pytest.mark.parametrize("unseen", [0.0, 1e-6, 0.3, 2.0])
@pytest.mark.parametrize("scratch", [0.0, 1e-6, 0.7, 50.0])
def test_the_product_is_that_of_a_root_found_by_bisection(scratch, unseen, depth):
    low, high = 0.0, 100.0
    for _ in range(200):
        x = (low + high) / 2
        if x**depth > unseen * x ** (depth - 1) + scratch:
            high = x
        else:
            low = x
    found = layer_product(f64(scratch), f64(unseen), depth)
    assert found.item() == pytest.approx(high ** ((depth - 1) / 2), rel=1e-9, abs=1e-15)


def test_two_layers_have_a_quadratic():
    gamma, sigma, theta = f64(0.6), f64(0.8), ANGLES
    S = gamma + gamma * sigma**2 / (1 - gamma)
    b = (0.5 * ((1 - gamma) + ((1 - gamma) ** 2 + 4 * S).sqrt())).sqrt()
    expected = scratch_risk(gamma, sigma) + (1 - gamma) * (b**2 - 2 * b * theta.cos())
    torch.testing.assert_close(fine_tuning_risk(theta, gamma, sigma), expected)
    assert fine_tuning_boundary(gamma, sigma).cos().item() == pytest.approx(b.item() / 2)


@pytest.mark.parametrize("depth", [2, 4])
def test_fine_tuning_is_the_printed_formula_without_noise_only(depth):
    theta, gamma = ANGLES[:, None], GAMMAS
    printed = scratch_risk(gamma, 0.0) + (1 - gamma).clamp(min=0) * (1 - 2 * theta.cos())
    torch.testing.assert_close(fine_tuning_risk(theta, gamma, 0.0, depth=1), printed)
    torch.testing.assert_close(fine_tuning_risk(theta, gamma, 0.0, depth=depth), printed)
    gap = fine_tuning_risk(theta, gamma, 1.0, depth=depth) - fine_tuning_risk(
        theta, gamma, 1.0, depth=1
    )
    assert (gap[:, gamma < 1].abs() > 1e-3).all()
    assert (gap[:, gamma > 1] == 0).all()


def test_fine_tuning_turns_negative_at_sixty_degrees_without_noise_and_earlier_with_it():
    torch.testing.assert_close(fine_tuning_boundary(GAMMAS[:3], 0.0), f64(math.pi / 3).expand(3))
    edge = fine_tuning_boundary(GAMMAS[:3], 1.0)
    assert (edge < math.pi / 3).all()
    assert (fine_tuning_transferability(edge - 1e-6, GAMMAS[:3], 1.0) > 0).all()
    assert (fine_tuning_transferability(edge + 1e-6, GAMMAS[:3], 1.0) < 0).all()
    assert fine_tuning_boundary(torch.tensor([0.99999, 1.0]), 3.0).tolist()[0] == 0.0
    assert fine_tuning_boundary(1.5, 0.0).isnan()


@pytest.mark.parametrize("sigma", [0.0, 0.2, 0.5, 0.99, 1.0, 2.0])
def test_interval_holds_the_signs_of_linear_transfer(sigma):
    gamma = torch.linspace(0.0101, 5, 997, dtype=torch.float64)
    lower, upper, onset = (edge.unsqueeze(-1) for edge in negative_transfer_interval(ANGLES, sigma))
    predicted = ((gamma > lower) & (gamma < upper)) | (
        gamma > onset
    )  # comparisons with NaN are false
    torch.testing.assert_close(
        predicted, linear_transferability(ANGLES[:, None], gamma, sigma) < -1e-12
    )
    exists = sigma < 1 - ANGLES.cos().abs()
    assert torch.equal(lower.squeeze(-1).isfinite(), exists)
    assert torch.equal(upper.squeeze(-1).isfinite(), exists)


def test_a_band_around_the_threshold_is_anomalously_positive():
    lower, upper, onset = negative_transfer_interval(f64(math.pi / 2), 0.2)
    assert lower == pytest.approx(0, abs=1e-12)
    assert upper < 1 < onset
    inside = torch.stack([upper + 1e-6, f64(1.0), onset - 1e-6])
    assert (linear_transferability(math.pi / 2, inside, 0.2) > 0).all()
    assert negative_transfer_interval(0.0, 0.2).onset == math.inf
    assert negative_transfer_interval(f64(1.0), 0.0).upper.item() == pytest.approx(1.0)


def test_transferability_is_the_difference_of_risks():
    theta, gamma = ANGLES[:, None], GAMMAS
    fine = scratch_risk(gamma, 0.5) - fine_tuning_risk(theta, gamma, 0.5, depth=3)
    torch.testing.assert_close(fine_tuning_transferability(theta, gamma, 0.5, depth=3), fine)
    linear = scratch_risk(gamma, 0.5) - linear_transfer_risk(theta, 0.5, math.inf)
    torch.testing.assert_close(linear_transferability(theta, gamma, 0.5), linear)


def test_numbers_take_the_dtype_of_tensors_without_rounding():
    assert scratch_risk(f64(2.0), 0.1).item() == 0.1**2
    assert scratch_risk(0.5, torch.tensor(0.1)).dtype == torch.float32
    assert scratch_risk(2, 1).dtype == torch.float32
    assert scratch_risk(torch.tensor(0.5, dtype=torch.bfloat16), 0.1).dtype == torch.bfloat16
    assert fine_tuning_risk(ANGLES[:, None], GAMMAS, 0.2).shape == (13, 5)


def test_gradients():
    theta, gamma, sigma = (
        f64([a, b]).requires_grad_() for a, b in ((0.3, 1.2), (0.3, 0.7), (0.2, 0.9))
    )
    assert torch.autograd.gradcheck(lambda *a: fine_tuning_risk(*a, depth=3), (theta, gamma, sigma))
    assert torch.autograd.gradcheck(linear_transferability, (theta, gamma, sigma))
    assert torch.autograd.gradcheck(lambda t, s: linear_transfer_risk(t, s, 9.0), (theta, sigma))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scratch_risk(0.0, 1.0), r"`gamma` must be positive, got 0.0"),
        (
            lambda: scratch_risk(torch.tensor([1.0, math.inf]), 1.0),
            r"`gamma` must be positive, got inf",
        ),
        (lambda: scratch_risk(1.0, -1.0), r"`sigma` must be non-negative and finite, got -1.0"),
        (lambda: scratch_risk(1.0, 1.0, dimension=0), r"`dimension` must be at least 1, got 0"),
        (lambda: linear_transfer_risk(4.0, 0.0, 9), r"`theta` must be in \[0, pi\], got 4.0"),
        (lambda: linear_transfer_risk(1.0, 0.0, 2), r"`n` must be greater than 2, got 2.0"),
        (
            lambda: fine_tuning_risk(1.0, 0.5, math.nan),
            r"`sigma` must be non-negative and finite, got nan",
        ),
        (lambda: fine_tuning_risk(1.0, 0.5, 0.0, depth=0), r"`depth` must be at least 1, got 0"),
        (lambda: negative_transfer_interval(-0.1, 0.0), r"`theta` must be in \[0, pi\], got -0.1"),
    ],
)
def test_refuses_what_is_outside_the_domain(call, message):
    with pytest.raises(ValueError, match=message):
        call()
