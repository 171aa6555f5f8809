"""Every structure against dense linear algebra in float64, and Σ* against a numerical minimiser."""

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from lightning_taskinfo.distributions import (
    IsotropicGaussian,
    diagonal_curvature,
    kronecker_curvature,
    post_distribution,
)
from lightning_taskinfo.fisher import KroneckerFactors
from tests.distributions.conftest import isotropic

BETA = 0.7


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors.values()])


def start(net, std=0.4):
    """A pre-distribution elsewhere, with another width in each layer."""
    center = {name: 0.1 * torch.ones_like(p) for name, p in net.named_parameters()}
    return IsotropicGaussian(
        center, prior_std={n: std * (1 + 2 * n.startswith("2")) for n in center}
    )


def dense_normal(gaussian, covariance):
    return MultivariateNormal(flat(gaussian.mean), covariance)


def dense_prior(pre):
    return dense_normal(
        pre, torch.diag(flat({n: torch.full_like(m, pre.std[n]) for n, m in pre.mean.items()}) ** 2)
    )


def dense_posterior(case, pre):
    precision = case.dense / BETA + dense_prior(pre).precision_matrix
    return MultivariateNormal(flat(dict(case.net.named_parameters())), precision_matrix=precision)


def test_kl_matches_dense_linear_algebra(case):
    pre = start(case.net)
    post, dense = (
        post_distribution(case.net, pre, case.curvature, beta=BETA),
        dense_posterior(case, pre),
    )
    exact = {"rtol": 1e-8, "atol": 1e-8}
    torch.testing.assert_close(post.kl(pre), kl_divergence(dense, dense_prior(pre)), **exact)


def test_kl_to_another_pre_distribution_than_its_own(case):
    pre, other = start(case.net), start(case.net, std=1.5)
    post, dense = (
        post_distribution(case.net, pre, case.curvature, beta=BETA),
        dense_posterior(case, pre),
    )
    torch.testing.assert_close(
        post.kl(other), kl_divergence(dense, dense_prior(other)), rtol=1e-8, atol=1e-8
    )


def test_draws_have_the_dense_mean_and_covariance(case):
    pre = start(case.net)
    post, dense = (
        post_distribution(case.net, pre, case.curvature, beta=BETA),
        dense_posterior(case, pre),
    )
    g, n = torch.Generator().manual_seed(0), 4000
    draws = torch.stack([flat(post.sample(g)) for _ in range(n)])
    covariance = dense.covariance_matrix
    deviation = (draws.mean(0) - dense.mean) / (covariance.diagonal() / n).sqrt()
    assert deviation.abs().max() < 4.5
    variances = covariance.diagonal()
    standard_error = ((variances[:, None] * variances + covariance**2) / n).sqrt()
    assert ((draws.T.cov() - covariance) / standard_error).abs().max() < 5
    white = (draws - dense.mean) @ torch.linalg.cholesky(
        dense.precision_matrix
    )  # no direction is hidden by others
    edge = (1 + (white.shape[1] / n) ** 0.5) ** 2 - 1  # of the eigenvalues, by Marchenko and Pastur
    assert (torch.linalg.eigvalsh(white.T.cov()) - 1).abs().max() < 1.5 * edge


def test_the_covariance_minimises_penalty_plus_information():
    """½tr(HΣ) + β·KL over all Cholesky factors, by BFGS, for one layer of six weights."""
    net = nn.Linear(3, 2, bias=False).double()
    A, B = torch.eye(3).double() + 0.5, torch.tensor([[2.0, 0.6], [0.6, 1.0]]).double()
    pre = IsotropicGaussian(
        {n: torch.zeros_like(p) for n, p in net.named_parameters()}, prior_std=0.8
    )
    post = post_distribution(
        net, pre, kronecker_curvature({"weight": KroneckerFactors(B, A)}), beta=BETA
    )
    H = torch.kron(B, A)
    shift = flat(dict(net.named_parameters())).square().sum() / 0.8**2
    lower = torch.tril_indices(6, 6)

    def objective(entries):
        L = torch.zeros(6, 6, dtype=torch.float64)
        values = torch.tensor(entries, requires_grad=True)
        S = (factor := L.index_put(tuple(lower), values)) @ factor.T
        kl = 0.5 * (
            S.trace() / 0.8**2
            - 6
            + shift
            - 2 * factor.diagonal().abs().log().sum()
            + 12 * np.log(0.8)
        )
        value = 0.5 * (H @ S).trace() + BETA * kl
        value.backward()
        return value.item(), values.grad.numpy()

    found = optimize.minimize(
        objective, torch.eye(6)[tuple(lower)].double().numpy(), jac=True, tol=1e-12
    )
    assert 0.5 * (H @ dense(post)).trace() + BETA * post.kl(pre) == pytest.approx(
        found.fun, abs=1e-8
    )


def dense(post):
    """The covariance of a block Gaussian, from its basis."""
    (block,) = post.blocks.values()
    basis = torch.kron(block.left, block.right)
    return basis @ torch.diag(block.eigenvalues.flatten()) @ basis.T


def test_without_curvature_it_is_the_pre_distribution(net):
    pre = start(net)
    zeros = {name: torch.zeros_like(mean) for name, mean in pre.mean.items()}
    post, other = post_distribution(pre.mean, pre, diagonal_curvature(zeros)), start(net, std=1.5)
    torch.testing.assert_close(post.kl(other), kl_divergence(dense_prior(pre), dense_prior(other)))
    draws = torch.stack([flat(post.sample(torch.Generator().manual_seed(i))) for i in range(2000)])
    error = flat({n: torch.full_like(m, pre.std[n]) for n, m in pre.mean.items()}) / 2000**0.5
    assert ((draws.mean(0) - 0.1) / error).abs().max() < 4.5
    assert ((draws.std(0) / 2000**0.5 - error) / error).abs().max() < 4.5 / 4000**0.5


def test_no_curvature_leaves_the_prior_and_much_curvature_no_noise(net):
    pre = start(net)
    for size, variance in ((0.0, None), (1e20, 0.0)):
        h = {name: torch.full_like(p, size) for name, p in net.named_parameters()}
        post = post_distribution(dict(pre.mean), pre, diagonal_curvature(h))
        if variance is None:
            assert post.kl(pre).item() == 0.0
        else:
            assert (flat(post.sample()) - 0.1).abs().max() < 1e-8


def test_the_same_seed_draws_the_same_network(case):
    post = post_distribution(case.net, start(case.net), case.curvature)
    one, two = (post.sample(torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_weights_come_back_even_after_an_exception(case):
    post = post_distribution(case.net, start(case.net), case.curvature)
    before = {
        name: (p, p.data_ptr(), p.detach().clone()) for name, p in case.net.named_parameters()
    }

    def fail():
        with post.with_weights(case.net, torch.Generator().manual_seed(0)) as drawn:
            assert not torch.equal(drawn[0].weight, before["0.weight"][2])
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    for name, parameter in case.net.named_parameters():
        assert parameter is before[name][0]
        assert parameter.data_ptr() == before[name][1]
        assert torch.equal(parameter, before[name][2])


def test_a_tied_weight_is_drawn_once():
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False))
    net[2].weight = net[0].weight
    h = {name: torch.ones_like(p) for name, p in net.named_parameters()}
    post = post_distribution(net, IsotropicGaussian(net, prior_std=1.0), diagonal_curvature(h))
    with post.with_weights(net):
        assert torch.equal(net[0].weight, net[2].weight)
    assert list(post.mean) == ["0.weight"]


def test_draws_keep_dtype_and_the_mean_does_not_follow_the_module(net):
    net = net.float()
    pre = IsotropicGaussian(net, prior_std=1.0)
    post = post_distribution(
        net, pre, diagonal_curvature({n: torch.ones_like(p) for n, p in net.named_parameters()})
    )
    mean = pre.mean["0.weight"].clone()
    with torch.no_grad():
        net[0].weight.zero_()
    assert torch.equal(pre.mean["0.weight"], mean)
    assert post.sample()["0.weight"].dtype == torch.float32
    assert post.kl(pre).dtype == torch.float64


def test_messages(net):
    h = {name: torch.ones_like(p) for name, p in net.named_parameters()}
    pre = IsotropicGaussian(net, prior_std=1.0)
    with pytest.raises(ValueError, match=r"`beta` must be positive, got 0\.0"):
        post_distribution(net, pre, diagonal_curvature(h), beta=0.0)
    with pytest.raises(ValueError, match=r"`prior_std` must be positive, got -1\.0"):
        IsotropicGaussian(net, prior_std=-1.0)
    blocks = diagonal_curvature(h)
    with pytest.raises(KeyError, match=r"2\.bias"):
        post_distribution(net, pre, {n: block for n, block in blocks.items() if n != "2.bias"})
    with pytest.raises(ValueError, match="`curvature` must be non-negative, got -1"):
        post_distribution(net, pre, diagonal_curvature({**h, "2.bias": -torch.ones(2)}))
    with pytest.raises(
        ValueError, match=r"`pre` must have the same parameters, got a difference in \['0.bias'\]"
    ):
        isotropic(net, 1.0).kl(
            IsotropicGaussian(
                {n: p for n, p in net.named_parameters() if n != "0.bias"}, prior_std=1.0
            )
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_draws_around_half_precision_weights_are_not_rounded(dtype):
    """At w = 1 neighbours in bfloat16 are 0.004 apart, so that rounding would change a deviation of 0.001."""
    mean, n = {"w": torch.ones(20_000, dtype=dtype)}, 20_000
    drawn = isotropic(mean, 1e-3).sample(torch.Generator().manual_seed(0))["w"].double() - 1
    assert drawn.std().item() == pytest.approx(1e-3, rel=4 / (2 * n) ** 0.5)


def test_a_half_precision_network_is_float32_while_it_holds_a_draw():
    net = (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(torch.bfloat16).eval()
    )
    net[2].requires_grad_(False)
    before = {
        name: (value, value.clone()) for name, value in net.state_dict(keep_vars=True).items()
    }
    post = isotropic(net, 1e-3)
    with post.with_weights(net, torch.Generator().manual_seed(0)):
        assert net(torch.ones(2, 3)).dtype == torch.float32
        drawn = post.sample(torch.Generator().manual_seed(0))["0.weight"]
        assert torch.equal(net[0].weight, drawn)
    for name, value in net.state_dict(keep_vars=True).items():
        assert value is before[name][0], name
        assert value.dtype == before[name][1].dtype
        assert torch.equal(value, before[name][1]), name
