"""What P1 says of real tasks, on embedded digits and letters."""

import math
from itertools import pairwise

import pytest
import torch

from lightning_taskinfo.tasks.complexity import structure_function
from lightning_taskinfo.tasks.distance import task_distance
from lightning_taskinfo.tasks.ready import network_for, prepare_task, trunk_of
from lightning_taskinfo.tasks.training import Training

pytestmark = pytest.mark.slow
BETAS = (
    10.0,
    3.0,
    1.0,
    0.3,
    0.1,
    0.03,
)  # below, 200 steps are too few for random labels: slope 0.039 at 0.01 to 0.03


def trace(spec, n=300, seed=0):
    task = prepare_task(spec, max_samples=n, seed=seed)
    training = Training(pretrain_steps=200, steps=200, draws=200)
    return structure_function(network_for(task), task.data, BETAS, training=training, seed=seed)


@pytest.fixture(scope="module")
def random_labels():
    return [trace("digits:random-labels", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def true_labels():
    return trace("digits")


@pytest.mark.timeout(900)
def test_random_labels_are_paid_for_in_full(random_labels):
    """On average over labelings, E_Q[L] + KL is at least N log|Y|: nothing about them can be known before."""
    total = torch.tensor(
        [[e + t for e, t in zip(c.loss, c.kl, strict=True)] for c in random_labels]
    ).double()
    error = torch.tensor([c.loss_error for c in random_labels]).double().square().mean(
        0
    ).sqrt() / math.sqrt(3)
    assert (total.mean(0) + 2 * error >= 300 * math.log(10)).all()


@pytest.mark.timeout(900)
def test_the_slope_is_the_price(random_labels, true_labels):
    """Between two minimisers the curve falls by no more than the higher price, and no less than the lower one.

    Three standard errors: there are 20 comparisons.
    """
    for curve in (*random_labels, true_labels):
        points = zip(curve.betas, curve.kl, curve.loss, curve.loss_error, strict=True)
        for (high, t, e, a), (low, u, f, b) in pairwise(points):
            slope, error = (e - f) / (u - t), math.hypot(a, b) / abs(u - t)
            assert low - 3 * error <= slope <= high + 3 * error, (high, low, slope, error)


@pytest.mark.timeout(900)
def test_random_labels_are_worth_less_than_true_ones(random_labels, true_labels):
    critical = true_labels.critical_beta()
    for curve in random_labels:
        found = curve.critical_beta()
        assert (BETAS[-1] if found is None else found) < critical / 5


@pytest.mark.timeout(900)
def test_complex_tasks_are_nearer_to_simple_ones_than_the_other_way_round():
    tasks = {spec: prepare_task(spec, max_samples=280) for spec in ("digits", "digits:only-0-1")}
    matrix = task_distance(
        {name: task.data for name, task in tasks.items()}, 0.1, seeds=(0, 1), workers=0,
        trunk_fn=trunk_of(network_for(tasks["digits"])), training=Training(pretrain_steps=200),
    )  # fmt: skip
    assert (matrix.distances[:, 0, 1] < matrix.distances[:, 1, 0]).all()
    assert (matrix.distances.diagonal(dim1=1, dim2=2).abs() < 0.05 * matrix.information).all()
