"""Projections on ReLU features against numerical integration over Gaussian inputs."""

import math

import pytest
import torch

from lightning_taskinfo.functional.features import (
    ablate,
    fit_power_law,
    relu_kernel,
    span_norms,
    transfer_onset,
)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(*shape, seed=0):
    weights = randn(*shape, seed=seed)
    return weights / weights.norm(dim=-1, keepdim=True)


def circle(points=20_000):
    """Directions and weights that integrate functions of degree two over Gaussian inputs in the plane."""
    angle = 2 * math.pi * torch.arange(points, dtype=torch.float64) / points
    return torch.stack([angle.cos(), angle.sin()], -1), torch.full(
        (points,), 2.0 / points, dtype=torch.float64
    )


def sphere(points=300):
    """The same in space: the mean over the sphere of a function of degree two, times the mean of the radius squared."""
    height = (
        torch.arange(points, dtype=torch.float64) + 0.5
    ) * 2 / points - 1  # uniform on the sphere
    angle = 2 * math.pi * torch.arange(2 * points, dtype=torch.float64) / (2 * points)
    z, a = (t.flatten() for t in torch.meshgrid(height, angle, indexing="ij"))
    radius = (1 - z.square()).sqrt()
    return torch.stack([radius * a.cos(), radius * a.sin(), z], -1), torch.full_like(
        z, 3.0 / z.numel()
    )


RULES = {2: circle, 3: sphere}


@pytest.mark.parametrize("dimension", [2, 3])
def test_kernel_is_the_mean_product(dimension):
    weights, others = randn(4, dimension), randn(5, dimension, seed=1)
    others[0] = -3 * weights[0]  # opposite
    others[1] = 2 * weights[1]  # parallel
    others[2] = 0
    points, rule = RULES[dimension]()
    numerical = ((points @ weights.T).relu() * rule[:, None]).T @ (points @ others.T).relu()
    torch.testing.assert_close(relu_kernel(weights, others), numerical, rtol=0, atol=2e-4)


def test_kernel_is_the_mean_product_in_many_dimensions():
    weights, inputs = randn(3, 12), randn(200_000, 12, seed=1)
    features = (inputs @ weights.T).relu()
    products = features.unsqueeze(1) * features.unsqueeze(2)
    error = products.std(0) / len(inputs) ** 0.5
    assert ((products.mean(0) - relu_kernel(weights, weights)).abs() < 3 * error).all()


@pytest.mark.parametrize("dimension", [2, 3])
@pytest.mark.parametrize(("width", "target_width"), [(1, 3), (3, 2), (4, 6)])
def test_norms_agree_with_weighted_least_squares_over_gaussian_inputs(
    dimension, width, target_width
):
    model, target, c = (
        unit(width, dimension),
        unit(target_width, dimension, seed=1),
        randn(target_width, seed=2),
    )
    points, rule = RULES[dimension]()
    features, values = (points @ model.T).relu(), (points @ target.T).relu() @ c / target_width
    root = rule.sqrt()
    fitted = torch.linalg.lstsq(features * root[:, None], (values * root)[:, None]).solution
    residual = values - (features @ fitted).squeeze(-1)
    total, inside, outside = span_norms(model, target, c)
    assert total.item() == pytest.approx((rule @ values.square()).item(), abs=1e-3)
    assert outside.item() == pytest.approx((rule @ residual.square()).item(), abs=1e-3)
    assert inside.item() == pytest.approx((rule @ (values - residual).square()).item(), abs=1e-3)
    assert total.item() == pytest.approx((inside + outside).item())


def test_nothing_is_outside_when_the_target_has_no_other_features():
    target, c = unit(3, 6, 10), randn(3, 6, seed=1)
    extra = torch.cat(
        [unit(3, 4, 10, seed=2), 2.5 * target, target], 1
    )  # rescaled and repeated: a singular kernel
    total, inside, outside = span_norms(extra, target, c)
    assert total.shape == (3,)
    assert (outside < 1e-12).all()
    torch.testing.assert_close(inside, total)
    assert (span_norms(extra[:, :4], target, c).outside > 1e-3).all()


def test_outside_grows_with_the_ablated_fraction():
    target, c = unit(20, 10), randn(20, seed=1)
    fractions = torch.linspace(0, 0.95, 20).tolist()
    kept = [
        ablate(target, fraction, generator=torch.Generator().manual_seed(3))
        for fraction in fractions
    ]
    outside = torch.stack([span_norms(model, target, c).outside for model in kept])
    assert outside[0] < 1e-12
    assert (outside.diff() > 0).all()


def test_ablation_keeps_rows_and_is_nested():
    weights = torch.arange(20.0).reshape(10, 2)
    few, many = (ablate(weights, f, generator=torch.Generator().manual_seed(0)) for f in (0.7, 0.2))
    assert few.shape == (3, 2)
    assert many.shape == (8, 2)
    assert (
        set(map(tuple, few.tolist()))
        < set(map(tuple, many.tolist()))
        < set(map(tuple, weights.tolist()))
    )
    assert torch.equal(ablate(weights, 0.0), weights)


def test_power_law_is_recovered_and_crossed_where_predicted():
    n = torch.tensor([10, 30, 100, 1000])
    amplitude, exponent = fit_power_law(n, 3.0 * n.double() ** -0.8)
    assert amplitude.item() == pytest.approx(3.0)
    assert exponent.item() == pytest.approx(0.8)
    onset = transfer_onset(torch.tensor([0.0, 0.01, 5.0], dtype=torch.float64), amplitude, exponent)
    assert onset[0] == math.inf
    torch.testing.assert_close(
        3.0 * onset[1:] ** -0.8, torch.tensor([0.01, 5.0], dtype=torch.float64)
    )


def test_power_law_is_least_squares_between_logarithms():
    n, risk = torch.tensor([2.0, 5.0, 9.0, 20.0], dtype=torch.float64), randn(3, 4).exp()
    design = torch.stack([torch.ones(4, dtype=torch.float64), -n.log()], -1)
    solution = torch.linalg.lstsq(design, risk.log().T).solution
    amplitude, exponent = fit_power_law(n, risk)
    torch.testing.assert_close(amplitude, solution[0].exp())
    torch.testing.assert_close(exponent, solution[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: span_norms(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)),
            r"`coefficients` must have one entry a target feature \(2\), got 3",
        ),
        (
            lambda: ablate(torch.ones(4, 3), 1.0),
            r"`fraction` must be in \[0, 1\) and leave a feature of 4, got 1.0",
        ),
        (
            lambda: ablate(torch.ones(4, 3), 0.9),
            r"`fraction` must be .* leave a feature of 4, got 0.9",
        ),
        (lambda: ablate(torch.ones(4, 3), -0.1), r"`fraction` must be in .*, got -0.1"),
        (
            lambda: fit_power_law(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])),
            "`risk` must be positive, got 0.0",
        ),
        (
            lambda: fit_power_law(torch.tensor([0.0, 2.0]), torch.ones(2)),
            "`n` must be positive, got 0.0",
        ),
        (
            lambda: fit_power_law(torch.ones(2), torch.ones(2)),
            "`n` must have at least two different values",
        ),
        (lambda: transfer_onset(torch.ones(1), 0.0, 1.0), "`amplitude` must be positive, got 0.0"),
        (lambda: transfer_onset(torch.ones(1), 1.0, -1.0), "`exponent` must be positive, got -1.0"),
    ],
)
def test_refuses_what_is_outside_the_domain(call, message):
    with pytest.raises(ValueError, match=message):
        call()
