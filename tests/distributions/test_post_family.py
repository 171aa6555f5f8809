"""Gaussians around a network: their draws, and their expected loss against brute force."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo._random import seed_from
from lightning_taskinfo.distributions import CurvatureBlock, kronecker_curvature, post_family
from lightning_taskinfo.distributions.post_family import (
    Noises,
    PostFamily,
    losses_with_noise,
    standard_noise,
)
from lightning_taskinfo.fisher import fisher_diagonal, kronecker_factors
from lightning_taskinfo.fisher.kron import KroneckerFactors


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)


def loss_of(net, data):
    x, y = data
    return lambda: cross_entropy(net(x), y, reduction="sum").item()


def losses_under(net, data, draw, noises):
    """Losses of both signs of each noise, shape [noises, 2]."""
    rows = []
    for seed in range(noises):
        noise = standard_noise(dict(net.named_parameters()), seed)
        rows.append(losses_with_noise(net, loss_of(net, data), draw, noise))
    return torch.tensor(rows)


def family_of(net, data, beta=1.0):
    h = fisher_diagonal(net, data[0], labels="exact")
    blocks = {name: CurvatureBlock(24 * part) for name, part in h.items()}
    return PostFamily(blocks, dict.fromkeys(h, 1.0), beta)


@pytest.mark.parametrize("prior_std", [0.1, 1.0])
def test_the_measured_loss_is_that_of_brute_force(net, data, prior_std):
    family = family_of(net, data)
    pairs = losses_under(net, data, family.draw(prior_std), noises=400).mean(1)

    brute, start = [], {name: p.detach().clone() for name, p in net.named_parameters()}
    generator = torch.Generator().manual_seed(9)
    for _ in range(4000):  # Σ = β (h + β/λ²)⁻¹, weight by weight
        for name, p in net.named_parameters():
            std = (1 / (family.curvature[name].eigenvalues + 1 / prior_std**2)).sqrt()
            p.data = start[name] + std * torch.randn(p.shape, generator=generator)
        brute.append(loss_of(net, data)())
    brute = torch.tensor(brute)
    error = math.hypot(pairs.std().item() / 400**0.5, brute.std().item() / 4000**0.5)
    assert abs(pairs.mean().item() - brute.mean().item()) < 3 * error
    assert error < 0.05 * brute.mean().item()


def test_both_signs_cancel_what_is_linear_in_the_noise(net, data):
    family = family_of(net, data)
    rows = losses_under(net, data, family.draw(0.1), noises=50)
    assert rows.shape == (50, 2)
    assert rows.mean(1).var() < 0.2 * rows.flatten().var()


def test_the_weights_come_back_bit_for_bit_even_after_an_error(net, data):
    family = family_of(net, data)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in net.named_parameters()}
    weights = dict(net.named_parameters())

    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        losses_with_noise(net, fails, family.draw(1.0), standard_noise(weights, seed=0))
    losses_under(net, data, family.draw(1.0), noises=1)
    for name, p in net.named_parameters():
        assert p.data_ptr() == before[name][0]
        assert torch.equal(p, before[name][1])
        assert p.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_draw_is_the_weight_and_shaped_noise_in_every_precision(dtype):
    weight = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    noise = standard_noise({"w": weight}, seed=0)["w"]
    h = torch.tensor([0.0, 1.0, 100.0])
    drawn = PostFamily({"w": CurvatureBlock(h)}, {"w": 1.0}, 2.0).draw(0.5)("w", weight, noise)
    wanted = weight.double() + noise.double() * (2 / (h.double() + 2 / 0.5**2)).sqrt()
    assert drawn.dtype == noise.dtype
    torch.testing.assert_close(drawn.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_signs_of_the_noise_are_tried(dtype):
    """On either side of the weight at the same distance, as far as its precision goes."""
    net = nn.Linear(1, 1, bias=False).to(dtype)
    net.weight.data.fill_(3.0)
    noise = {"weight": torch.tensor([[0.25]])}
    plus, minus = losses_with_noise(net, net.weight.item, lambda _, w, part: w + 2 * part, noise)
    assert (plus, minus) == (3.5, 2.5)


def test_noise_with_kronecker_factors_has_their_covariance(net, data):
    factors = kronecker_factors(net, data[0], labels="exact")
    weights = {name: p.detach() for name, p in net.named_parameters()}
    curvature = kronecker_curvature(factors, scale=24)
    draw = PostFamily(curvature, dict.fromkeys(weights, 1.0), 0.5).draw(0.7)
    for name, block in factors.items():
        H = (
            24
            * (
                block.rows if block.columns is None else torch.kron(block.rows, block.columns)
            ).double()
        )
        wanted = 0.5 * torch.linalg.inv(H + 0.5 / 0.7**2 * torch.eye(len(H), dtype=H.dtype))
        size = weights[name].numel()
        zero = torch.zeros_like(weights[name])
        root = torch.stack(
            [draw(name, zero, e.view_as(zero)).flatten() for e in torch.eye(size)], 1
        )
        torch.testing.assert_close(root @ root.T, wanted.float(), rtol=1e-4, atol=1e-5)


def test_factors_that_are_diagonals_need_no_basis():
    values, rows, columns = KroneckerFactors(
        torch.tensor([1.0, 2.0]), torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    ).eigen()
    assert rows is None
    whole = columns @ torch.diag(values[0]) @ columns.T
    torch.testing.assert_close(whole.float(), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    block = CurvatureBlock(values, rows, columns)
    draw = PostFamily({"w": block}, {"w": 4.0}, 1.0).draw(1e6)
    H = torch.kron(torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    zero = torch.zeros(2, 2)
    root = torch.stack([draw("w", zero, e.view(2, 2)).flatten() for e in torch.eye(4)], 1)
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(H), rtol=1e-4, atol=1e-4)


def test_a_numbered_noise_is_the_same_each_time_also_after_its_use(net):
    weights = dict(net.named_parameters())
    noises = Noises(seed=3)
    for number in (0, 1, 0):
        expected = standard_noise(weights, seed_from(3, number))
        noise = noises.noise(number, weights)
        torch.testing.assert_close(noise, expected, rtol=0, atol=0)
        blocks = {name: CurvatureBlock(w.detach() ** 2) for name, w in weights.items()}
        draw = PostFamily(blocks, {}, 1.0).draw(1.0)
        losses_with_noise(net, lambda: 0.0, draw, noise)
    fewer = {"0.weight": weights["0.weight"]}
    noise = noises.noise(1, fewer)
    torch.testing.assert_close(noise, standard_noise(fewer, seed_from(3, 1)), rtol=0, atol=0)


def test_noises_are_kept_as_long_as_they_are_small(net, monkeypatch):
    weights = dict(net.named_parameters())
    size = sum(4 * p.numel() for p in weights.values())
    monkeypatch.setattr(post_family, "KEPT", 2 * size)
    noises = Noises(seed=0)
    for number in range(3):
        noises.noise(number, weights)
    assert [*noises.kept] == [0, 1]
    larger = {name: torch.zeros(2 * p.numel()) for name, p in weights.items()}
    for number in range(2):  # those of other weights make room
        noise = noises.noise(number, larger)
        assert {name: part.shape for name, part in noise.items()} == {
            name: part.shape for name, part in larger.items()
        }
    assert [*noises.kept] == [0]
