"""Closed forms for Gaussians against ``torch.distributions``, and the properties a divergence must have."""

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from lightning_taskinfo.functional.gaussian import gaussian_kl_diag, lautum_from_correlations


def reference(mean_q: Tensor, logvar_q: Tensor, mean_p: Tensor, logvar_p: Tensor) -> Tensor:
    q, p = (
        Independent(Normal(m, (0.5 * s).exp()), 1)
        for m, s in ((mean_q, logvar_q), (mean_p, logvar_p))
    )
    return kl_divergence(q, p)


@pytest.fixture
def moments(request: pytest.FixtureRequest) -> tuple[Tensor, ...]:
    """Random ``(mean_q, logvar_q, mean_p, logvar_p)`` in float64; the shape comes from the test."""
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(request.param, generator=g, dtype=torch.float64) for _ in range(4))


@pytest.mark.parametrize("moments", [(1,), (7,), (3, 7), (2, 3, 7)], ids=str, indirect=True)
def test_matches_torch_distributions(moments):
    torch.testing.assert_close(gaussian_kl_diag(*moments), reference(*moments))


@pytest.mark.parametrize("moments", [(7,)], indirect=True)
def test_zero_exactly_at_equality(moments):
    mean, logvar, *_ = moments
    assert gaussian_kl_diag(mean, logvar, mean, logvar).item() == 0.0


@pytest.mark.parametrize("moments", [(7,)], indirect=True)
def test_invariant_under_a_common_affine_map(moments):
    mean_q, logvar_q, mean_p, logvar_p = moments
    scale, shift = 3.0, -2.0
    mapped = gaussian_kl_diag(
        scale * mean_q + shift,
        logvar_q + 2 * torch.tensor(scale).log(),
        scale * mean_p + shift,
        logvar_p + 2 * torch.tensor(scale).log(),
    )
    torch.testing.assert_close(mapped, gaussian_kl_diag(*moments))


@pytest.mark.parametrize("rho", [1e-3, -1e-3, 1e-2])
def test_accurate_in_float32_when_q_is_close_to_p(rho):
    """The leading term is rho^2/4; the textbook form loses it to cancellation, ``expm1`` does not."""
    zero = torch.zeros(1)
    exact = gaussian_kl_diag(*(t.double() for t in (zero, zero + rho, zero, zero)))
    torch.testing.assert_close(
        gaussian_kl_diag(zero, zero + rho, zero, zero).double(), exact, rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("moments", [(4,)], indirect=True)
def test_gradients(moments):
    assert torch.autograd.gradcheck(gaussian_kl_diag, tuple(m.requires_grad_() for m in moments))


def test_a_scalar_prior_broadcasts():
    mean, zero = torch.ones(5), torch.tensor(0.0)
    assert gaussian_kl_diag(mean, zero, zero, zero).item() == pytest.approx(2.5)


def blocks(D: int, K: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """``(cov_x, cov_w, cov_xw)`` of a random joint covariance, and so consistent with each other."""
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(D + K, 2 * (D + K), generator=g, dtype=torch.float64)
    joint = root @ root.T / (D + K)
    return joint[:D, :D], joint[D:, D:], joint[:D, D:]


def canonical_correlations(cov_x: Tensor, cov_w: Tensor, cov_xw: Tensor) -> Tensor:
    """Singular values of the whitened cross-covariance; any square root of the covariances does."""
    chol_x, chol_w = torch.linalg.cholesky(cov_x), torch.linalg.cholesky(cov_w)
    half = torch.linalg.solve_triangular(chol_x, cov_xw, upper=False)
    return torch.linalg.svdvals(torch.linalg.solve_triangular(chol_w, half.T, upper=False))


def lautum_information(cov_x: Tensor, cov_w: Tensor, cov_xw: Tensor) -> Tensor:
    return lautum_from_correlations(canonical_correlations(cov_x, cov_w, cov_xw).square())


def joint_and_product(
    cov_x: Tensor, cov_w: Tensor, cov_xw: Tensor
) -> tuple[MultivariateNormal, MultivariateNormal]:
    mean = torch.zeros(cov_x.shape[-1] + cov_w.shape[-1], dtype=cov_x.dtype)
    joint = torch.cat([torch.cat([cov_x, cov_xw], 1), torch.cat([cov_xw.T, cov_w], 1)])
    return MultivariateNormal(mean, joint), MultivariateNormal(mean, torch.block_diag(cov_x, cov_w))


@pytest.mark.parametrize(("D", "K"), [(1, 1), (5, 2), (2, 5), (4, 4)])
def test_lautum_is_the_kl_of_product_to_joint(D, K):
    joint, product = joint_and_product(*blocks(D, K))
    expected = kl_divergence(product, joint)
    torch.testing.assert_close(lautum_information(*blocks(D, K)), expected, rtol=1e-8, atol=1e-8)


def test_independent_parts_share_nothing_and_have_a_gradient():
    cross = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    value = lautum_information(torch.eye(3).double(), torch.eye(2).double(), cross)
    value.backward()
    assert value.item() == 0.0
    assert torch.equal(cross.grad, torch.zeros_like(cross))


def test_gradient_of_the_cross_covariance():
    cov_x, cov_w, cov_xw = blocks(4, 2)
    assert torch.autograd.gradcheck(
        lambda c: lautum_information(cov_x, cov_w, c), (cov_xw.clone().requires_grad_(),)
    )
