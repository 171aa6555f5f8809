"""Hand-written gradients of noisy weights against what autograd derives from the plain formulas."""

import pytest
import torch
from torch import Tensor

from lightning_taskinfo.functional.gaussian import gaussian_kl_diag
from lightning_taskinfo.functional.weight_noise import isotropic_kl, noisy_weight


@pytest.fixture
def moments() -> list[Tensor]:
    """Mean, log-variance and a third tensor, in float64."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=g, dtype=torch.float64).requires_grad_(i < 2) for i in range(3)]


def test_a_sample_is_mean_plus_deviation_times_noise(moments):
    mean, log_variance, noise = moments
    plain = mean + (0.5 * log_variance).exp() * noise
    torch.testing.assert_close(noisy_weight(mean, log_variance, noise), plain)
    assert torch.autograd.gradcheck(noisy_weight, moments)


def test_no_deviation_is_the_mean_and_has_no_gradient_but_its():
    mean, noise = torch.ones(3, requires_grad=True), torch.randn(3)
    log_variance = torch.full((3,), -torch.inf, requires_grad=True)
    weight = noisy_weight(mean, log_variance, noise)
    assert torch.equal(weight, mean)
    gradients = torch.autograd.grad(weight.sum(), [mean, log_variance])
    assert torch.equal(gradients[0], torch.ones(3))
    assert torch.equal(gradients[1], torch.zeros(3))


@pytest.mark.parametrize("prior", [-1.5, 0.0, 2.0])
def test_the_divergence_is_the_general_one(moments, prior):
    mean, log_variance, prior_mean = moments
    prior = torch.tensor(prior, dtype=torch.float64)
    flat = [m.flatten() for m in (mean, log_variance, prior_mean)]
    torch.testing.assert_close(isotropic_kl(*moments, prior), gaussian_kl_diag(*flat, prior))
    assert torch.autograd.gradcheck(isotropic_kl, (*moments, prior))


def test_the_divergence_is_zero_exactly_at_the_prior_and_accurate_near_it():
    zero = torch.zeros(4)
    assert isotropic_kl(zero, zero - 3, zero, torch.tensor(-3.0)).item() == 0.0
    exact = isotropic_kl(*(t.double() for t in (zero, zero + 1e-3, zero, torch.tensor(0.0))))
    near = isotropic_kl(zero, zero + 1e-3, zero, torch.tensor(0.0))
    torch.testing.assert_close(near.double(), exact, rtol=1e-3, atol=0)  # the leading term is rho²/4


def test_many_float32_entries_are_summed_accurately():
    g = torch.Generator().manual_seed(0)
    mean, log_variance, prior_mean = (torch.randn(200_000, generator=g) for _ in range(3))
    prior = torch.tensor(-1.0)
    exact = gaussian_kl_diag(*(t.double() for t in (mean, log_variance, prior_mean, prior)))
    torch.testing.assert_close(isotropic_kl(mean, log_variance, prior_mean, prior).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", [noisy_weight, lambda *m: isotropic_kl(*m, torch.tensor(0.5).double())])
def test_second_derivatives(moments, function):
    assert torch.autograd.gradgradcheck(function, moments)


@pytest.mark.parametrize("function", [noisy_weight, lambda *m: isotropic_kl(*m, torch.tensor(0.5).double())])
def test_works_under_function_transforms(moments, function):
    mean, log_variance, third = (m.detach() for m in moments)
    slope = torch.func.grad(lambda mean, log_variance: function(mean, log_variance, third).sum(), argnums=(0, 1))
    means = torch.stack([mean, mean + 1])
    mapped = torch.func.vmap(slope, in_dims=(0, None))(means, log_variance)
    expected = [slope(m, log_variance) for m in means]
    for i in range(2):
        torch.testing.assert_close(mapped[i], torch.stack([gradients[i] for gradients in expected]))
