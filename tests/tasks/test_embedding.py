"""Distances of embeddings, the nearest source, and their pictures and tables."""

import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Generator

from lightning_taskinfo.functional.task_embedding import (
    classical_scaling,
    embedding_distance,
)
from lightning_taskinfo.tasks import TaskEmbedding, embedding_distances, plot_task_map
from lightning_taskinfo.tasks.embedding import embedding_rows


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


def test_distances_are_those_of_all_pairs(tasks):
    symmetric = embedding_distances(tasks)
    for i, source in enumerate(tasks):
        for j, target in enumerate(tasks):
            assert symmetric[i, j] == embedding_distance(source.vector, target.vector)
    assert torch.equal(symmetric, symmetric.T)
    assert torch.equal(symmetric.diagonal(), torch.zeros(4, dtype=torch.float64))


def test_a_common_scale_changes_no_distance(tasks):
    scaled = [make(e.name, 1e-6 * e.vector) for e in tasks]
    torch.testing.assert_close(embedding_distances(scaled), embedding_distances(tasks))


def test_distances_need_one_network(tasks):
    with pytest.raises(
        ValueError, match=r"`embeddings` must be of one network, got \['0123', '4567'\]"
    ):
        embedding_distances([tasks[0], make("e", tasks[0].vector, network="4567")])
    with pytest.raises(ValueError, match="`embeddings` must hold at least one embedding, got none"):
        embedding_distances([])


def test_the_map_shows_the_tasks_where_they_are(tasks):
    fig, ax = plot_task_map(tasks)
    assert [point.get_label() for point in ax.collections] == ["a", "b", "near a", "d"]
    points, _ = classical_scaling(embedding_distances(tasks))
    assert np.array_equal([point.get_offsets()[0] for point in ax.collections], points.numpy())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b", "near a", "d"]
    assert isinstance(fig, Figure)


def test_a_single_task_is_a_map_too():
    assert len(plot_task_map([make("a", [1.0, 2.0])])[1].collections) == 1


def test_an_embedding_of_zeros_has_no_distance(tasks):
    nothing = make("nothing", torch.zeros_like(tasks[0].vector).tolist())
    with pytest.raises(ValueError, match=r"`embeddings` must not be zero.*got \['nothing'\]"):
        embedding_distances([*tasks, nothing])


def test_rows_hold_norm_and_nearest_source(tasks):
    rows = embedding_rows(tasks)
    assert [row["task"] for row in rows] == ["a", "b", "near a", "d"]
    assert [rows[0]["norm"], rows[0]["nearest_source"]] == [tasks[0].norm, "near a"]
    assert rows[0]["distance"] == embedding_distance(tasks[2].vector, tasks[0].vector)
    assert "nearest_source" not in embedding_rows(tasks[:1])[0]
