"""ReLU students: closed-form distances against drawn inputs, steps against autograd, and when transfer hurts."""

import pytest
import torch

from benchmarks.evidence.students import (
    ReLUNetworks,
    fit_last_layer,
    random_networks,
    simulate_student_teacher,
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
