"""Distances equal their closed form, do not depend on where they are computed, and go on where they stopped."""

import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock

import numpy as np
import pytest
import torch
from torch import nn

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.functional.likelihood import Categorical
from lightning_taskinfo.tasks.distance import DistanceMatrix, MultiHead, Union, solve, task_distance
from lightning_taskinfo.tasks.training import Training
from tests.tasks import regression

QUICK = Training(pretrain_steps=5, steps=5, draws=2)


def trunk():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU())


def some_tasks(sizes=(40, 40, 24)):
    """Two classes, three classes, and two classes of fewer samples."""
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    sign = (x > 0).long()
    labels = {"one": sign[:, 0], "two": sign[:, 0] + sign[:, 1], "few": sign[:, 2]}
    return {name: (x[:n], y[:n]) for (name, y), n in zip(labels.items(), sizes, strict=True)}


measure = partial(
    task_distance,
    some_tasks(),
    1.0,
    trunk_fn=trunk,
    training=QUICK,
    seeds=(0, 1),
)


def union(first, second):
    return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])


REGRESSION = {
    "trunk_fn": regression.line,
    "head_fn": regression.no_head,
    "prior_std": 1.0,
}
FIRST, SECOND = regression.data(0), regression.data(0, weights=(1.5, -0.5, 1.0))


def exact_distance():
    """Information of the first task at β = 2, and the distance to the second, both in closed form."""
    kl, _ = regression.closed_form(*FIRST, 2.0)
    both, _ = regression.closed_form(*union(FIRST, SECOND), 4.0)  # β · N₁₂ / N₁
    itself, _ = regression.closed_form(*union(FIRST, FIRST), 4.0)
    assert itself == pytest.approx(kl, rel=1e-5)  # so d(D→D) = 0
    return kl, both - kl


def test_is_exact_for_linear_regression():
    """No heads: all weights are shared, and the union of the two orthogonal designs is one."""
    training = Training(pretrain_steps=300, learning_rate=0.1, batch_size=40)
    matrix = task_distance(
        {"first": FIRST, "second": SECOND}, 2.0, likelihood="gaussian", training=training, seeds=(0,),
        workers=0, **REGRESSION,
    )  # fmt: skip
    found = torch.stack([matrix.information[0, 0], matrix.distances[0, 0, 1]])
    torch.testing.assert_close(found, torch.tensor(exact_distance()).double(), rtol=1e-3, atol=1e-3)
    assert matrix.distances[0].diagonal().abs().max() < 1e-3


def test_a_fixed_beta_would_call_twice_the_data_a_distance():
    """What the scaling is for: at fixed β, d(D→D) is ½ log 2 for every weight that the data determine."""
    fixed = (
        regression.closed_form(*union(FIRST, FIRST), 1e-3)[0]
        - regression.closed_form(*FIRST, 1e-3)[0]
    )
    assert fixed == pytest.approx(1.5 * math.log(2), rel=1e-3)


def make_union(tasks, seed=0, beta=2.0):
    return Union(
        [(x.numpy(), y.numpy()) for x, y in tasks],
        seed,
        trunk_fn=trunk,
        head_fn=nn.Linear,
        beta=beta,
        prior_std=0.1,
        likelihood=Categorical(),
        training=QUICK,
    )


def test_each_part_is_priced_by_the_samples_that_reach_it():
    data = list(some_tasks().values())
    union = make_union([data[0], data[2]])
    assert union.betas() == {"trunk": 2.0 * 64 / 40, "head_0": 2.0, "head_1": 2.0 * 24 / 40}
    assert union.fit().training.batch_size == round(QUICK.batch_size * 64 / 40)


def test_a_sample_sees_its_own_head_only():
    torch.manual_seed(0)
    net = MultiHead({"trunk": trunk(), "head_0": nn.Linear(6, 2), "head_1": nn.Linear(6, 3)})
    x, task = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
    outputs = net((x, task))
    for n in range(5):
        own = net[f"head_{task[n]}"](net["trunk"](x[n : n + 1]))[0].softmax(-1)
        torch.testing.assert_close(outputs[n].softmax(-1)[: len(own)], own)
    assert (outputs.softmax(-1)[task == 0, 2] == 0).all()


def test_the_fisher_of_two_heads_equals_the_loop():
    union = make_union(list(some_tasks().values())[:2])
    found, loop = (
        fisher_diagonal(union.model(), union.fit().inputs, labels="exact", chunk_size=size)
        for size in (None, 1)
    )
    for name, value in loop.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_heads_of_one_size_start_alike_and_seeds_start_apart():
    one, _, few = some_tasks().values()
    first, other = (make_union([one, few], seed).model() for seed in (0, 1))
    assert torch.equal(first["head_0"].weight, first["head_1"].weight)
    assert not torch.equal(first["head_0"].weight, other["head_0"].weight)


@pytest.fixture(scope="module")
def here():
    return measure(workers=0)


def test_every_entry_is_the_difference_of_two_trainings(here):
    data = list(some_tasks().values())
    for i, j in ((0, 1), (1, 0), (2, 0), (2, 2)):
        kl = solve(make_union([data[i], data[j]], 1, beta=1.0))
        alone = solve(make_union([data[i]], 1, beta=1.0))
        # Tasks of one size share a training in either order, so that the order of samples may differ from this one.
        tolerance = {"rel": 1e-6} if (i, j) != (1, 0) else {"abs": 3.0}
        expected = kl["trunk"] + kl["head_0"] - alone["trunk"] - alone["head_0"]
        assert here.distances[1, i, j].item() == pytest.approx(expected, **tolerance)
        assert here.information[1, i].item() == pytest.approx(alone["trunk"] + alone["head_0"])


def test_another_process_gives_the_same_numbers(here):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as executor:
        assert measure(executor=executor).to_dict() == here.to_dict()


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_numbers(here):
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        assert measure(executor=client.get_executor()).to_dict() == here.to_dict()


class Interrupted(Exception):
    pass


def test_an_interrupted_matrix_continues_and_takes_more_seeds(here, tmp_path):
    def stop(done, total, label):
        if done == 5:
            raise Interrupted

    with pytest.raises(Interrupted):
        measure(workers=0, folder=tmp_path, seeds=(0,), progress=stop)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("seed-*.json")}
    assert len(times) == 5
    seen = []
    resumed = measure(workers=0, folder=tmp_path, progress=lambda *progress: seen.append(progress))
    assert resumed.to_dict() == here.to_dict()
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert [(done, total) for done, total, _ in seen] == [
        (n, 22) for n in range(1, 23)
    ]  # 3 + 9 - 1 shared, twice


def test_a_folder_belongs_to_one_matrix(here, tmp_path):
    measure(workers=0, folder=tmp_path, seeds=(0,))
    with pytest.raises(
        ValueError, match=r"`folder` must be new or of the same configuration.*\n.*prior_std"
    ):
        measure(workers=0, folder=tmp_path, prior_std=0.2)
    turned = dict(reversed(some_tasks().items()))
    with pytest.raises(ValueError, match=r"same configuration.*\n  order"):
        task_distance(turned, 1.0, folder=tmp_path, workers=0, **measure.keywords)
    x, y = some_tasks()["two"]
    relabelled = {**some_tasks(), "two": (x, 2 - y)}
    with pytest.raises(ValueError, match=r"same configuration.*\n  tasks\.two\.data: "):
        task_distance(relabelled, 1.0, folder=tmp_path, workers=0, **measure.keywords)


def matrix(seeds=2):
    values = torch.arange(4.0 * seeds, dtype=torch.float64).reshape(seeds, 2, 2)
    return DistanceMatrix(
        ("a", "b"),
        1.0,
        (8, 8),
        tuple(range(seeds)),
        values,
        values[:, 0],
    )


def test_mean_and_error():
    found = matrix()
    assert found.mean.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    torch.testing.assert_close(found.standard_error, torch.full((2, 2), 2.0).double())  # ±2√2 / √2
    read = json.loads(found.to_json())
    assert read["distances"][1] == [[4.0, 5.0], [6.0, 7.0]]
    assert json.loads(matrix(1).to_json())["standard_error"] is None
    assert matrix(1).standard_error.isnan().all()


def test_the_picture_has_a_number_with_its_error_in_every_cell():
    _, ax = matrix().plot()
    assert [text.get_text() for text in ax.texts] == ["2\n±2", "3\n±2", "4\n±2", "5\n±2"]
    assert [text.get_text() for text in matrix(1).plot()[1].texts] == ["0", "1", "2", "3"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]


def test_refuses_seeds_that_are_no_whole_numbers():
    with pytest.raises(TypeError, match=r"`seed` must be a whole number, got 0\.2"):
        task_distance(
            some_tasks(), 1.0, trunk_fn=trunk, workers=0, training=QUICK, seeds=(0.2, 1.9)
        )


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"tasks": {}}, "`tasks` must hold at least one task, got none"),
        ({"beta": 0.0}, r"`beta` must be positive, got 0\.0\."),
        ({"prior_std": -0.1}, r"`prior_std` must be positive, got -0\.1\."),
        ({"seeds": (1, 1)}, r"`seeds` must be different numbers, at least one, got \[1, 1\]"),
        ({"seeds": (0, -(2**63) - 1)}, r"`seed` must be at least -2\*\*63"),
    ],
)
def test_refuses_arguments(arguments, match):
    values = {"tasks": some_tasks(), "beta": 1.0, **arguments}
    with pytest.raises(ValueError, match=match):
        task_distance(
            values.pop("tasks"),
            values.pop("beta"),
            trunk_fn=trunk,
            workers=0,
            training=QUICK,
            **values,
        )


def test_numbers_of_numpy_are_seeds():
    for seeds in (np.int64(2), np.arange(2)):
        found = task_distance(some_tasks(), 1.0, trunk_fn=trunk, training=QUICK, seeds=seeds)
        assert found.seeds == (0, 1)
        assert {type(seed) for seed in found.seeds} == {int}


def test_refuses_targets_that_would_broadcast():
    tasks = {name: (x, y.float()) for name, (x, y) in some_tasks().items()}
    with pytest.raises(ValueError, match=r"must have the outputs' shape \[40, 1\], got \[40\]"):
        task_distance(tasks, 1.0, trunk_fn=trunk, workers=0, training=QUICK, likelihood="gaussian")


@pytest.mark.parametrize("argument", ["trunk_fn", "head_fn"])
def test_refuses_what_makes_no_network_by_the_name_of_its_argument(argument, tmp_path):
    arguments = {"trunk_fn": trunk, argument: lambda *_: None}
    with pytest.raises(ValueError, match=f"`{argument}` must return a network, got NoneType"):
        task_distance(some_tasks(), 1.0, training=QUICK, folder=tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_refuses_a_network_for_a_trunk():
    with pytest.raises(
        ValueError, match="`trunk_fn` must be a function that makes a network, got a Sequential"
    ):
        task_distance(some_tasks(), 1.0, trunk_fn=trunk(), training=QUICK)


def test_a_task_far_from_itself_is_named(here):
    """Beyond three standard errors, 1 nat each, and one per cent of 200 nats."""
    distances = torch.zeros(2, 3, 3, dtype=torch.float64)
    distances[:, 1, 1], distances[:, 2, 2] = torch.tensor([5.0, 3.0]), torch.tensor([3.0, 1.0])
    matrix = replace(here, distances=distances, information=torch.full((2, 3), 200.0).double())
    assert matrix.unfinished() == (here.names[1],)
    assert replace(matrix, information=10 * matrix.information).unfinished() == ()
    assert replace(matrix, distances=distances[:1]).unfinished() == (
        here.names[1],
        here.names[2],
    )  # without an error


def test_a_folder_belongs_to_one_network(tmp_path):
    measure(workers=0, folder=tmp_path)
    with pytest.raises(ValueError, match="network"):
        measure(
            workers=0, folder=tmp_path, trunk_fn=lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        )


@pytest.mark.parametrize("argument", ["trunk_fn", "head_fn"])
@pytest.mark.parametrize(
    "function",
    [lambda *sizes: nn.Flatten(), partial(nn.Flatten, Lock())],
    ids=["without a name", "with a lock"],
)
def test_a_function_that_does_not_travel_is_refused_before_anything_is_trained(argument, function):
    with pytest.raises(
        ValueError, match="`workers` must be 0 where `trunk_fn` or `head_fn` cannot be pickled"
    ):
        measure(**{argument: function}, workers=2)


@pytest.mark.parametrize(
    ("tasks", "match"),
    [
        (
            {"first": "digits"},
            r"`tasks\['first'\]` must be .* got 'digits'; `tasks.prepare_task\('digits'\).data`",
        ),
        (
            {"first": (torch.full((9, 4), math.nan), torch.zeros(9).long())},
            r"`tasks\['first'\]` must be finite, got 36",
        ),
    ],
)
def test_names_the_task_whose_data_are_wrong(tasks, match):
    with pytest.raises(ValueError, match=match):
        task_distance(tasks, 1.0, trunk_fn=trunk, training=QUICK)


def test_warns_of_classes_without_samples():
    x, y = some_tasks()["one"]
    with pytest.warns(
        TaskInfoWarning, match="Task 'a' has no samples of some classes from 0 to .*count from 1"
    ):
        task_distance({"a": (x, y + 1)}, 1.0, trunk_fn=trunk, training=QUICK, seeds=1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.bool])
def test_classes_of_any_integer_type_are_the_same(dtype):
    x, y = some_tasks()["one"]
    found, same = (
        task_distance({"a": (x, labels)}, 1.0, trunk_fn=trunk, training=QUICK, seeds=1)
        for labels in (y, y.to(dtype))
    )
    assert found.to_dict() == same.to_dict()


def with_batch_norm():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3))


def half_frozen():
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6))
    network[0].requires_grad_(False)
    return network


@pytest.mark.parametrize("trunk_fn", [with_batch_norm, half_frozen])
def test_the_trained_network_is_measured_in_eval_mode_and_frozen_weights_hold_nothing(trunk_fn):
    first, second = (
        task_distance(some_tasks(), 1.0, trunk_fn=trunk_fn, training=QUICK, seeds=1)
        for _ in range(2)
    )
    assert first.to_dict() == second.to_dict()
    assert first.information.isfinite().all()


class Both(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize(
    ("change", "trunk_fn", "likelihood", "match"),
    [
        (
            lambda x, y: (x, y),
            partial(nn.Linear, 3, 6),
            "categorical",
            r"`tasks` must hold inputs that the network takes, got torch.float32 \[40, 4\]",
        ),
        (
            lambda x, y: (x[:, :3], y),
            nn.Flatten,
            "categorical",
            r"`tasks` must have inputs of one shape and type, got .*\[3\].*\[4\]",
        ),
        (
            lambda x, y: (x, y * 0 - 100),
            trunk,
            "categorical",
            r"`tasks\['b'\]` must hold a label that counts, got none",
        ),
        (
            lambda x, y: (x, x[:, :3]),
            trunk,
            "gaussian",
            r"`tasks` must have targets of one shape and type, got .*\[2\].*\[3\]",
        ),
        (lambda x, y: (x, y), partial(Both, 4, 6), "categorical", "`trunk_fn` must .*got tuple"),
        (
            lambda x, y: (x, y),
            partial(nn.Flatten, 0),
            "categorical",
            r"`trunk_fn` must .* features \[N, F\], got .*\[8\]",
        ),
    ],
)
def test_refuses_before_anything_is_trained(change, trunk_fn, likelihood, match):
    x, y = some_tasks()["one"]
    tasks = {"a": (x, y if likelihood == "categorical" else x[:, :2]), "b": change(x, y)}
    with pytest.raises(ValueError, match=match):
        task_distance(tasks, 1.0, trunk_fn=trunk_fn, training=QUICK, likelihood=likelihood)
