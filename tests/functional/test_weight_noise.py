"""Hand-written gradients of noisy weights against what autograd derives from the plain formulas."""

import pytest
import torch
from torch import Tensor

from lightning_taskinfo.functional import weight_noise
from lightning_taskinfo.functional.gaussian import gaussian_kl_diag
from lightning_taskinfo.functional.weight_noise import (
    NoisyGaussian,
    isotropic_kl,
    noisy_weight,
    standard_normal_,
)


@pytest.fixture
def moments() -> list[Tensor]:
    """Mean, log-variance and a third tensor, in float64."""
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 4, generator=g, dtype=torch.float64).requires_grad_(i < 2) for i in range(3)
    ]


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
    torch.testing.assert_close(
        near.double(), exact, rtol=1e-3, atol=0
    )  # the leading term is rho²/4


def test_many_float32_entries_are_summed_accurately():
    g = torch.Generator().manual_seed(0)
    mean, log_variance, prior_mean = (torch.randn(200_000, generator=g) for _ in range(3))
    prior = torch.tensor(-1.0)
    exact = gaussian_kl_diag(*(t.double() for t in (mean, log_variance, prior_mean, prior)))
    torch.testing.assert_close(
        isotropic_kl(mean, log_variance, prior_mean, prior).double(), exact, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    "function", [noisy_weight, lambda *m: isotropic_kl(*m, torch.tensor(0.5).double())]
)
def test_second_derivatives(moments, function):
    assert torch.autograd.gradgradcheck(function, moments)


@pytest.mark.parametrize(
    "function", [noisy_weight, lambda *m: isotropic_kl(*m, torch.tensor(0.5).double())]
)
def test_works_under_function_transforms(moments, function):
    mean, log_variance, third = (m.detach() for m in moments)
    slope = torch.func.grad(
        lambda mean, log_variance: function(mean, log_variance, third).sum(), argnums=(0, 1)
    )
    means = torch.stack([mean, mean + 1])
    mapped = torch.func.vmap(slope, in_dims=(0, None))(means, log_variance)
    expected = [slope(m, log_variance) for m in means]
    for i in range(2):
        torch.testing.assert_close(mapped[i], torch.stack([gradients[i] for gradients in expected]))


PRIOR = torch.tensor(0.5, dtype=torch.float64)


def together(mean, log_variance, noise):
    """A sample and a divergence that share their backward pass; the noise serves as the prior's mean, too."""
    gaussian = NoisyGaussian(mean, log_variance)
    return gaussian.sample(noise).sin().sum() + 0.3 * gaussian.kl(noise, PRIOR)


def apart(mean, log_variance, noise):
    weight = mean + (0.5 * log_variance).exp() * noise
    flat = [m.flatten() for m in (mean, log_variance, noise)]
    return weight.sin().sum() + 0.3 * gaussian_kl_diag(*flat, PRIOR)


@pytest.mark.parametrize("block", [5, 2**17])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_sample_and_its_divergence_share_a_backward_pass(moments, monkeypatch, block, transposed):
    monkeypatch.setattr(weight_noise, "_BLOCK", block)
    moments = [m.detach().mT if transposed else m.detach() for m in moments]
    moments = [m.requires_grad_(i < 2) for i, m in enumerate(moments)]
    torch.testing.assert_close(together(*moments), apart(*moments))
    for one, other in zip(
        *(torch.autograd.grad(f(*moments), moments[:2]) for f in (together, apart)), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert torch.autograd.gradcheck(together, moments)
    assert torch.autograd.gradgradcheck(together, moments)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1)])
def test_the_two_may_run_backward_one_after_the_other(moments, order):
    mean, log_variance, noise = moments
    gaussian = NoisyGaussian(mean, log_variance)
    loss, kl = gaussian.sample(noise).sum(), gaussian.kl(noise, PRIOR)
    for i in order:
        (loss, kl)[i].backward(retain_graph=True)
    weight = mean + (0.5 * log_variance).exp() * noise
    flat = [m.flatten() for m in (mean, log_variance, noise)]
    plain = weight.sum() * order.count(0) + gaussian_kl_diag(*flat, PRIOR) * order.count(1)
    for parameter, expected in zip(
        (mean, log_variance), torch.autograd.grad(plain, moments[:2]), strict=True
    ):
        torch.testing.assert_close(parameter.grad, expected)


def test_a_mean_that_changed_before_the_backward_pass_is_refused_where_it_is_needed(moments):
    mean = moments[0]
    expected = torch.autograd.grad(noisy_weight(*moments).sum(), moments[:2])
    loss, sample = together(*moments), noisy_weight(*moments)
    with torch.no_grad():
        mean.add_(1)
    with pytest.raises(
        RuntimeError, match="changed in place between its divergence and the backward pass"
    ):
        loss.backward()
    for found, before in zip(torch.autograd.grad(sample.sum(), moments[:2]), expected, strict=True):
        assert torch.equal(found, before)


def test_serves_its_own_tensors_as_they_were(moments):
    mean, log_variance, _ = moments
    gaussian = NoisyGaussian(mean, log_variance)
    assert gaussian.serves(mean, log_variance)
    assert not gaussian.serves(mean.clone(), log_variance)
    with torch.no_grad():
        assert not gaussian.serves(mean, log_variance)  # it would have no graph
        log_variance.mul_(2)
    assert not gaussian.serves(mean, log_variance)


@pytest.mark.parametrize("low", [-40.0, -1.0, -1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_quick_way_loses_no_accuracy(low, dtype):
    """Far below the prior's variance a power of two takes the place of ``expm1``, at most a few roundings away."""
    rho = torch.linspace(1.5 * low, low, 5000, dtype=torch.float64).to(dtype)
    mean = torch.zeros(5000, dtype=dtype)
    parameters = [mean.clone().requires_grad_(), rho.clone().requires_grad_()]
    value = isotropic_kl(*parameters, mean, torch.zeros((), dtype=dtype))
    exact = rho.double().expm1()
    resolution = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        value.double(),
        0.5 * (exact - rho.double()).sum(),
        rtol=resolution + 1e-3 * (low > -0.5),
        atol=0,
    )
    slope = torch.autograd.grad(value, parameters)[1]
    torch.testing.assert_close(slope.double(), 0.5 * exact, rtol=resolution, atol=0)
    deviation = noisy_weight(mean, rho, torch.ones_like(mean))
    torch.testing.assert_close(
        deviation.double(), (0.5 * rho.double()).exp(), rtol=8 * resolution, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_resolution(dtype):
    rho = torch.linspace(-12, -0.5, 5000).to(dtype)
    mean = torch.zeros_like(rho)
    deviation = noisy_weight(mean, rho, torch.ones_like(rho))
    torch.testing.assert_close(
        deviation.double(), (0.5 * rho.double()).exp(), rtol=2 * torch.finfo(dtype).eps, atol=0
    )


@pytest.mark.parametrize("shape", [(3,), (30, 7), (7, 50)])
def test_noise_is_drawn_as_it_is_written(monkeypatch, shape):
    monkeypatch.setattr(weight_noise, "_BLOCK", 64)
    mean = torch.zeros(shape, dtype=torch.float64)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    drawn = NoisyGaussian(mean, mean).sample(generators[0])
    assert torch.equal(drawn, standard_normal_(torch.empty_like(mean), generators[1]))


def test_draws_are_standard_normal():
    noise = standard_normal_(torch.empty(400_000), torch.Generator().manual_seed(0)).double()
    for power, expected in ((1, 0), (2, 1), (3, 0), (4, 3)):
        powers = noise**power
        assert abs(powers.mean() - expected) < 4 * powers.std() / 400_000**0.5
    edge = (
        noise[2**17 - 1 : -1 : 2**17] * noise[2**17 :: 2**17]
    )  # a block does not begin as the one before ended
    assert edge.abs().max() < 16
    assert len(set(noise[:: 2**17].tolist())) == 4
