"""ReLU students: closed-form distances against drawn inputs, steps against autograd, and when transfer hurts."""

import math

import pytest
import torch

from benchmarks.evidence.students import (
    ReLUNetworks,
    ablate,
    fit_last_layer,
    random_networks,
    relu_kernel,
    simulate_student_teacher,
    span_norms,
    squared_distance,
    train_networks,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def pair():
    return random_networks(3, 6, 4, generator=seeded()), random_networks(
        3, 5, 4, generator=seeded(1)
    )


def samples(networks, n, seed=2):
    inputs = torch.randn(3, n, 4, generator=seeded(seed), dtype=torch.float64)
    return inputs, networks(inputs)


def test_outputs_are_means_over_neurons(pair):
    networks, _ = pair
    inputs, outputs = samples(networks, 7)
    for r in range(3):
        for i in range(7):
            neurons = [
                c * max(0.0, float(w @ inputs[r, i]))
                for w, c in zip(networks.weights[r], networks.coefficients[r], strict=True)
            ]
            assert outputs[r, i].item() == pytest.approx(float(sum(neurons)) / 6)


def test_distance_is_the_mean_squared_difference(pair):
    networks, others = pair
    inputs, outputs = samples(networks, 100_000)
    squares = (outputs - others(inputs)).square()
    error = squares.std(-1) / 100_000**0.5
    assert ((squares.mean(-1) - squared_distance(networks, others)).abs() < 3 * error).all()
    assert (squared_distance(networks, networks) < 1e-15).all()


def test_a_step_is_that_of_autograd_times_the_width(pair):
    networks, others = pair
    inputs, labels = samples(others, 9)
    leaves = [t.clone().requires_grad_() for t in (networks.weights, networks.coefficients)]
    loss = 0.5 * (ReLUNetworks(*leaves)(inputs) - labels).square().mean(-1).sum()
    gradients = torch.autograd.grad(loss, leaves)
    after = train_networks(networks, [(inputs, labels)], learning_rate=0.1)
    torch.testing.assert_close(after.weights, networks.weights - 0.1 * 6 * gradients[0])
    torch.testing.assert_close(after.coefficients, networks.coefficients - 0.1 * 6 * gradients[1])


def test_last_layer_is_ridge_regression(pair):
    networks, others = pair
    inputs, labels = samples(others, 9)
    fitted = fit_last_layer(networks, inputs, labels, ridge=0.1)
    rows = (9 * 0.1) ** 0.5 * torch.eye(6, dtype=torch.float64).expand(
        3, 6, 6
    )  # ridge as more samples
    design = torch.cat([networks.features(inputs), rows], 1)
    right = torch.cat([labels, torch.zeros(3, 6, dtype=torch.float64)], 1).unsqueeze(-1)
    torch.testing.assert_close(
        fitted.coefficients / 6, torch.linalg.lstsq(design, right).solution.squeeze(-1)
    )
    assert fitted.weights is networks.weights


@pytest.mark.parametrize(
    ("fraction", "n", "helps"), [(0.0, 40, True), (0.75, 40, False), (0.0, 150, True)]
)
def test_linear_transfer_helps_iff_scratch_is_above_the_out_of_span_norm(fraction, n, helps):
    sizes = {"dimension": 6, "teacher_width": 4, "student_width": 20, "repetitions": 8}
    risks = simulate_student_teacher(fraction, n, **sizes, steps=500, generator=seeded())
    gain = risks.scratch - risks.linear
    assert (gain.mean() > 2 * gain.std() / 8**0.5).item() is helps
    assert (-gain.mean() > 2 * gain.std() / 8**0.5).item() is not helps
    assert (risks.scratch.mean() > risks.outside.mean()).item() is helps
    assert (
        risks.linear >= risks.outside
    ).all()  # the projection is the best that the features can do


def test_a_source_with_all_features_leaves_nothing_outside():
    risks = simulate_student_teacher(0.0, 30, steps=20, repetitions=2, generator=seeded())
    assert (risks.outside_source < 1e-12).all()


def test_a_generator_repeats_draws_and_leaves_the_global_one_alone():
    state = torch.get_rng_state()
    first, again = (
        simulate_student_teacher(0.5, 5, sigma=0.1, steps=3, generator=seeded()) for _ in range(2)
    )
    assert torch.equal(first.fine_tune, again.fine_tune)
    assert torch.equal(state, torch.get_rng_state())


def test_refuses(pair):
    with pytest.raises(ValueError, match="`learning_rate` must be positive, got 0"):
        train_networks(pair[0], [], learning_rate=0.0)
    with pytest.raises(ValueError, match="`ridge` must be positive, got 0"):
        fit_last_layer(pair[0], torch.ones(3, 1, 4).double(), torch.ones(3, 1).double(), ridge=0.0)
    with pytest.raises(ValueError, match="`fraction` must be in"):
        simulate_student_teacher(1.0, 5)


# Projections on ReLU features against numerical integration over Gaussian inputs.


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


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
    ],
)
def test_refuses_what_is_outside_the_domain(call, message):
    with pytest.raises(ValueError, match=message):
        call()
