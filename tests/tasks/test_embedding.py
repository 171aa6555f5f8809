"""Embeddings on disk, their distances, the nearest source, and their pictures and tables."""

import json
import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Generator

from lightning_taskinfo.functional.task_embedding import (
    asymmetric_embedding_distance,
    embedding_distance,
)
from lightning_taskinfo.tasks import TaskEmbedding, embedding_distances, nearest_source
from lightning_taskinfo.tasks.embedding import (
    embedding_rows,
    log_embeddings,
    plot_difficulty,
    plot_task_map,
    task_map,
)


def make(name, vector, **changes):
    vector = torch.as_tensor(vector, dtype=torch.float64)
    fields = {
        "layers": ("a.weight", "b.weight"),
        "sizes": (1, len(vector) - 1),
        "network": "0123",
        "labels": "exact",
    }
    fields |= {"samples": 100, "num_classes": 3, "test_error": 0.25}
    return TaskEmbedding(name=name, vector=vector, **fields | changes)


@pytest.fixture
def tasks():
    """Four tasks; the third is the first with a little noise, the fourth has no test error."""
    g = Generator().manual_seed(0)
    a, b, noise, d = torch.randn(4, 12, generator=g, dtype=torch.float64)
    vectors = {"a": a.exp(), "b": (3 * b).exp(), "near a": (a + 0.1 * noise).exp(), "d": d.exp()}
    errors = {"a": 0.1, "b": 0.3, "near a": 0.12, "d": math.nan}
    return [make(name, vector, test_error=errors[name]) for name, vector in vectors.items()]


def test_the_norm_is_the_sum_of_the_layers():
    embedding = make("a", [1.0, 2.0, 4.0])
    assert embedding.norm == 7.0
    assert embedding.layer_norms == {"a.weight": 1.0, "b.weight": 6.0}


def test_comes_back_from_disk_bit_for_bit(tmp_path, tasks):
    for saved in tasks:
        saved.save(tmp_path / "task.json")  # replaces the one before
        loaded = TaskEmbedding.load(tmp_path / "task.json")
        assert torch.equal(loaded.vector, saved.vector)
        for field in ("name", "layers", "sizes", "network", "labels", "samples", "num_classes"):
            assert getattr(loaded, field) == getattr(saved, field)
        assert loaded.test_error == saved.test_error or math.isnan(saved.test_error)
    assert [path.name for path in tmp_path.iterdir()] == ["task.json"]


@pytest.mark.parametrize("damage", ["cut", "other", "negative"])
def test_refuses_files_that_are_not_embeddings(tmp_path, damage):
    path = tmp_path / "task.json"
    make("a", [1.0, 2.0]).save(path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "other":
        path.write_text("{}")
    else:
        path.write_text(path.read_text().replace("2.0", "-2.0"))
    with pytest.raises(ValueError, match=r"task\.json: not as it was written"):
        TaskEmbedding.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        TaskEmbedding.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ([1.0, -2.0], "`vector` must be non-negative and finite, got -2.0"),
        ([1.0, math.nan], "`vector` must be non-negative and finite, got nan"),
    ],
)
def test_refuses_vectors(vector, message):
    with pytest.raises(ValueError, match=message):
        make("a", vector)


def test_refuses_sizes_that_do_not_fit():
    with pytest.raises(
        ValueError, match="`vector` must have an entry for each filter, 3 by `sizes`, got 2"
    ):
        make("a", [1.0, 2.0], sizes=(1, 2))


def test_distances_are_those_of_all_pairs(tasks):
    symmetric = embedding_distances(tasks)
    corrected = embedding_distances(tasks, alpha=0.5)
    means = [e.vector.mean().log().item() for e in tasks]
    trivial = math.exp(sum(means) / len(means))  # their geometric mean
    for i, source in enumerate(tasks):
        for j, target in enumerate(tasks):
            assert symmetric[i, j] == embedding_distance(source.vector, target.vector)
            expected = asymmetric_embedding_distance(
                source.vector, target.vector, trivial=trivial, alpha=0.5
            )
            torch.testing.assert_close(corrected[i, j], expected)
    assert torch.equal(symmetric, symmetric.T)
    assert torch.equal(symmetric.diagonal(), torch.zeros(4, dtype=torch.float64))


def test_a_common_scale_changes_no_distance(tasks):
    scaled = [make(e.name, 1e-6 * e.vector) for e in tasks]
    for alpha in (0.0, 0.5):
        torch.testing.assert_close(
            embedding_distances(scaled, alpha=alpha), embedding_distances(tasks, alpha=alpha)
        )


def test_the_nearest_source_is_first_and_never_the_target(tasks):
    ranked = nearest_source(tasks[0], tasks, alpha=0)
    assert ranked[0].source == "near a"
    assert len(ranked) == 3
    assert [r.distance for r in ranked] == sorted(r.distance for r in ranked)
    assert ranked[0].distance == embedding_distance(tasks[2].vector, tasks[0].vector)


def test_complexity_speaks_for_a_source(tasks):
    """With a large alpha the source with the most uneven information wins, however far it is."""
    assert nearest_source(tasks[0], tasks, alpha=100.0)[0].source == "b"


def test_distances_need_one_network(tasks):
    with pytest.raises(
        ValueError, match=r"`embeddings` must be of one network, got \['0123', '4567'\]"
    ):
        embedding_distances([tasks[0], make("e", tasks[0].vector, network="4567")])
    with pytest.raises(ValueError, match="`embeddings` must hold at least one embedding, got none"):
        embedding_distances([])
    with pytest.raises(
        ValueError, match=r"`sources` must hold a task other than the target, got \['a'\]"
    ):
        nearest_source(tasks[0], tasks[:1])


def test_the_map_shows_the_tasks_where_they_are(tasks):
    fig, ax = plot_task_map(tasks)
    assert [point.get_label() for point in ax.collections] == ["a", "b", "near a", "d"]
    assert np.array_equal(
        [point.get_offsets()[0] for point in ax.collections], task_map(tasks).points.numpy()
    )
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b", "near a", "d"]
    assert isinstance(fig, Figure)


def test_a_single_task_is_a_map_too():
    assert len(plot_task_map([make("a", [1.0, 2.0])])[1].collections) == 1


def test_difficulty_shows_norm_and_test_error_of_those_that_have_one(tasks):
    figure = Figure()
    ax = figure.subplots()
    assert plot_difficulty(tasks, ax=ax) == (figure, ax)
    places = [point.get_offsets()[0].tolist() for point in ax.collections]
    assert places == [[e.norm, 100 * e.test_error] for e in tasks[:3]]
    with pytest.raises(ValueError, match="`embeddings` must have a test error, got none that has"):
        plot_difficulty(tasks[3:])


def test_rows_hold_place_norm_and_nearest_source(tasks):
    rows = embedding_rows(tasks, alpha=0)
    assert [row["task"] for row in rows] == ["a", "b", "near a", "d"]
    assert [rows[0]["norm"], rows[0]["nearest_source"]] == [tasks[0].norm, "near a"]
    assert [[row["x"], row["y"]] for row in rows] == task_map(tasks).points.tolist()
    assert "nearest_source" not in embedding_rows(tasks[:1])[0]


def test_a_run_of_wandb_gets_images_tables_and_scalars(tmp_path, tasks, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=tmp_path, project="embeddings")
    try:
        log_embeddings(run, tasks, alpha=0.2)
        summary = dict(run.summary)
    finally:
        run.finish()
    assert summary["taskinfo/task2vec/norm/b"] == tasks[1].norm
    assert summary["taskinfo/task2vec/test_error/a"] == 0.1
    assert "taskinfo/task2vec/test_error/d" not in summary
    assert {summary[f"taskinfo/task2vec/{key}"]["_type"] for key in ("map", "difficulty")} == {
        "image-file"
    }
    files = {path.name.split("_")[0]: path for path in tmp_path.rglob("*.table.json")}
    distances = json.loads(files["distances"].read_text())
    assert distances["columns"] == ["from", "a", "b", "near a", "d"]
    assert [row[1:] for row in distances["data"]] == embedding_distances(tasks, alpha=0.2).tolist()
    assert len(json.loads(files["tasks"].read_text())["data"]) == 4


@pytest.mark.parametrize("alpha", [0.0, 0.15])
def test_an_embedding_of_zeros_has_no_distance(tasks, alpha):
    nothing = make("nothing", torch.zeros_like(tasks[0].vector).tolist())
    with pytest.raises(ValueError, match=r"`embeddings` must not be zero.*got \['nothing'\]"):
        embedding_distances([*tasks, nothing], alpha=alpha)
