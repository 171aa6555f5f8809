"""Simulated transfer against theory, pseudo-inverses, and gradient descent on the layers themselves."""

import math

import pytest
import torch

from benchmarks.descent import descend, pretrained_layers, product, small_layers
from benchmarks.evidence.linear_students import (
    draw_tasks,
    minimum_norm,
    ridge_transfer_risk,
    simulate_transfer,
)
from lightning_taskinfo.functional.deep_linear import (
    fine_tuning_risk,
    linear_transfer_risk,
    scratch_risk,
)

ANGLES = torch.tensor([0.0, 0.6, math.pi / 2], dtype=torch.float64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=[(6, 10), (15, 10)], ids=["n<d", "n>d"])
def draws(request):
    n, d = request.param
    return draw_tasks(ANGLES, n, 0.5, dimension=d, repetitions=4, generator=seeded())


def test_teachers_are_unit_vectors_at_the_angles(draws):
    torch.testing.assert_close(draws.source.norm(dim=-1), torch.ones(4, dtype=torch.float64))
    cosines = torch.einsum("rd,rad->ra", draws.source, draws.target)
    torch.testing.assert_close(cosines, ANGLES.cos().expand(4, 3))


def test_solutions_are_those_of_the_pseudo_inverse(draws):
    solution, unseen = minimum_norm(draws)
    inverse = torch.linalg.pinv(draws.inputs)
    torch.testing.assert_close(solution, (inverse @ draws.labels).mT)
    projection = inverse @ draws.inputs
    seen = projection @ draws.source.unsqueeze(-1)
    torch.testing.assert_close(unseen, draws.source.unsqueeze(1) - seen.mT)


def two_layers_tuned(gamma, sigma, d):
    """Risk of two fine-tuned layers by the quadratic formula: theory and simulation share a solver for any depth."""
    unseen = max(0.0, 1 - gamma)
    noise = sigma**2 * min(gamma, 1) / (abs(1 - gamma) - 1 / d)
    scratch = min(gamma, 1) + noise
    b = math.sqrt(0.5 * (unseen + math.sqrt(unseen**2 + 4 * scratch)))
    return unseen + noise + unseen * (b**2 - 2 * b * ANGLES.cos())


@pytest.mark.parametrize("sigma", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [0.3, 0.7, 2.0])
def test_means_agree_with_theory(gamma, sigma):
    d, repetitions = 100, 100
    risks = simulate_transfer(
        ANGLES, gamma, sigma, dimension=d, repetitions=repetitions, generator=seeded(1)
    )
    theory = {
        "scratch": scratch_risk(torch.tensor(gamma, dtype=torch.float64), sigma, dimension=d),
        "linear": linear_transfer_risk(ANGLES, sigma, gamma * d),
        "fine_tune": two_layers_tuned(gamma, sigma, d),
    }
    torch.testing.assert_close(
        theory["fine_tune"], fine_tuning_risk(ANGLES, gamma, sigma, dimension=d)
    )
    for name, expected in theory.items():
        values = getattr(risks, name)
        assert values.shape == (3, repetitions)
        error = values.std(-1) / repetitions**0.5
        assert ((values.mean(-1) - expected).abs() <= 3 * error + 1e-12).all(), name


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gradient_descent_ends_where_fine_tuning_is_said_to_end(depth):
    """The gap is that of a finite learning rate: it halves with the rate."""
    theta, n, d = torch.tensor([1.0], dtype=torch.float64), 10, 20
    setup = {"dimension": d, "repetitions": 5}
    draws = draw_tasks(theta, n, 0.7, **setup, generator=seeded())
    said = simulate_transfer(theta, n / d, 0.7, **setup, depth=depth, generator=seeded()).fine_tune[
        0
    ]
    covariance, cross = (
        draws.inputs.mT @ draws.inputs / n,
        (draws.inputs.mT @ draws.labels).squeeze(-1) / n,
    )
    start = pretrained_layers(draws.source, depth, width=3, generator=seeded())
    gaps = []
    for rate in (0.02, 0.01):
        layers = descend(
            start, cross, covariance, learning_rate=rate, max_steps=30_000, tolerance=1e-6
        )
        risk = (product(layers) - draws.target[:, 0]).square().sum(-1)
        gaps.append((risk - said).abs().max().item())
    if depth == 1:  # linear: no rate moves the part that the samples do not see
        assert max(gaps) < 1e-4
    else:
        assert gaps[0] < 0.02
        assert gaps[1] == pytest.approx(gaps[0] / 2, rel=0.1)


def test_pretraining_from_a_small_start_ends_in_balanced_layers_of_rank_one():
    source = draw_tasks(ANGLES, 1, 0.0, dimension=6, repetitions=3, generator=seeded()).source
    layers = descend(
        small_layers(3, 6, 2, width=4, scale=1e-4, generator=seeded(), dtype=torch.float64),
        source,
        learning_rate=0.05,
    )
    torch.testing.assert_close(product(layers), source)
    for layer, known in zip(layers, pretrained_layers(source, 2, width=4), strict=True):
        torch.testing.assert_close(
            torch.linalg.svdvals(layer), torch.linalg.svdvals(known), rtol=0, atol=1e-3
        )


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_step_of_descent_is_that_of_autograd(depth):
    layers = small_layers(2, 5, depth, width=3, scale=1.0, generator=seeded(), dtype=torch.float64)
    inputs, cross = (
        torch.randn(2, *s, generator=seeded(1), dtype=torch.float64) for s in ((5, 5), (5,))
    )
    covariance = inputs @ inputs.mT
    leaves = [layer.clone().requires_grad_() for layer in layers]
    beta = product(leaves)
    loss = 0.5 * torch.einsum("rd,rde,re->", beta, covariance, beta) - (beta * cross).sum()
    expected = [
        leaf - 0.01 * grad
        for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves), strict=True)
    ]
    after = descend(layers, cross, covariance, learning_rate=0.01, max_steps=1)
    for got, want in zip(after, expected, strict=True):
        torch.testing.assert_close(got, want.detach())


def test_ridge_shrinks_linear_transfer_towards_nothing():
    risks = simulate_transfer(ANGLES, 2.0, 0.0, dimension=20, ridge=1e9, generator=seeded())
    torch.testing.assert_close(risks.linear, torch.ones_like(risks.linear))
    plain, shrunk = (
        simulate_transfer(ANGLES[0], 2.0, 0.0, ridge=r, generator=seeded()).linear
        for r in (0.0, 0.1)
    )
    assert plain.max() < 1e-12 < shrunk.min()


def test_a_generator_repeats_draws_and_leaves_the_global_one_alone():
    state = torch.get_rng_state()
    first, again = (
        simulate_transfer(0.3, 0.5, 0.1, dimension=8, generator=seeded()).fine_tune
        for _ in range(2)
    )
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    assert first.dtype == torch.float32


def test_descent_leaves_its_start_alone_and_says_when_it_diverges():
    start = pretrained_layers(torch.tensor([[0.6, 0.8]]), 2)
    copies = [layer.clone() for layer in start]
    descend(start, torch.tensor([[1.0, 0.0]]), max_steps=3)
    assert all(torch.equal(layer, copy) for layer, copy in zip(start, copies, strict=True))
    with pytest.raises(RuntimeError, match=r"diverged; `learning_rate` must be below 100\.0"):
        descend(start, torch.tensor([[1.0, 0.0]]), learning_rate=100.0)
    with pytest.raises(ValueError, match="`learning_rate` must be positive, got 0"):
        descend(start, torch.tensor([[1.0, 0.0]]), learning_rate=0.0)


@pytest.mark.parametrize(("name", "least"), [("n", 1), ("dimension", 2), ("repetitions", 1)])
def test_refuses_empty_draws(name, least):
    arguments = {"n": 3, "dimension": 4, "repetitions": 2, name: 0}
    with pytest.raises(ValueError, match=f"`{name}` must be at least {least}, got 0"):
        draw_tasks(ANGLES, arguments.pop("n"), 0.0, **arguments)


@pytest.mark.parametrize("n", [2.5, 3, 10, 500])
@pytest.mark.parametrize("ridge", [1e-3, 0.1, 2.0])
def test_ridge_agrees_with_quadrature(n, ridge):
    from scipy.integrate import quad
    from scipy.stats import chi2

    theta, sigma = 0.7, 0.3
    inside, outside = math.cos(theta) ** 2, math.sin(theta) ** 2

    def integrand(t):
        q = math.exp(t)
        shrunk, gain = (n * ridge / (q + n * ridge)) ** 2, q / (q + n * ridge) ** 2
        return (inside * shrunk + (sigma**2 + outside) * gain) * chi2.pdf(q, n) * q

    mean = quad(
        integrand, -60, math.log(40 * n + 200), points=[math.log(n)], limit=1000, epsabs=1e-12
    )[0]
    assert ridge_transfer_risk(
        torch.tensor(theta, dtype=torch.float64), sigma, n, ridge
    ).item() == pytest.approx(outside + mean, abs=1e-9)


def test_ridge_only_hurts_with_many_samples_and_helps_a_little_with_few():
    ridges = torch.tensor([0.0, 0.01, 0.1, 1.0, 10.0], dtype=torch.float64)
    for theta in torch.tensor([0.0, 0.5, 1.2], dtype=torch.float64):
        printed = 1 - theta.cos() ** 2 * (1 + 2 * ridges) / (1 + ridges) ** 2
        risks = ridge_transfer_risk(theta, 1.0, math.inf, ridges)
        torch.testing.assert_close(risks, printed)
        assert (risks.diff() > 0).all()
        many = ridge_transfer_risk(theta, 1.0, 1e9, ridges)
        torch.testing.assert_close(many, risks, rtol=0, atol=1e-7)
    few = ridge_transfer_risk(theta, 1.0, 10.0, torch.tensor([0.0, 0.05]))
    assert few[1] < few[0]
    plain = linear_transfer_risk(theta, 1.0, 10.0)
    torch.testing.assert_close(ridge_transfer_risk(theta, 1.0, 10.0, 0.0), plain)
