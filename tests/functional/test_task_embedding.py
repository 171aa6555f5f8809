"""Distances of embeddings against scipy, and the properties they must have; scaling against points in a plane."""

import pytest
import torch
from scipy.spatial.distance import cosine, pdist, squareform

from lightning_taskinfo.functional.task_embedding import (
    classical_scaling,
    embedding_distance,
)


@pytest.fixture
def embeddings():
    """Five non-negative embeddings over many decades, float64."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(5, 40, generator=g, dtype=torch.float64).mul(3).exp()


def reference(a, b):
    return cosine((a / (a + b)).numpy(), (b / (a + b)).numpy())


def test_matches_scipy(embeddings):
    expected = [[reference(a, b) for b in embeddings] for a in embeddings]
    found = embedding_distance(embeddings[:, None], embeddings[None])
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_is_symmetric_zero_on_the_diagonal_and_between_0_and_1(embeddings):
    distances = embedding_distance(embeddings[:, None], embeddings[None])
    assert torch.equal(distances, distances.T)
    assert torch.equal(distances.diagonal(), torch.zeros(5, dtype=torch.float64))
    assert (distances >= 0).all()
    assert (distances <= 1).all()


@pytest.mark.parametrize("factor", [1e-30, 0.3, 1e30])
def test_is_blind_to_scale(embeddings, factor):
    """A task is as near to itself times a factor as rounding allows, and a common factor changes nothing."""
    a, b = embeddings[:2]
    assert embedding_distance(a, factor * a) < 1e-30
    torch.testing.assert_close(embedding_distance(factor * a, factor * b), embedding_distance(a, b))


def test_a_factor_on_one_of_two_different_tasks_matters(embeddings):
    a, b = embeddings[:2]
    assert abs(embedding_distance(100 * a, b) - embedding_distance(a, b)) > 0.01


def test_filters_without_information_do_not_count(embeddings):
    a, b = (torch.cat([e, torch.zeros(7, dtype=torch.float64)]) for e in embeddings[:2])
    torch.testing.assert_close(embedding_distance(a, b), embedding_distance(*embeddings[:2]))


def test_is_not_estimable_for_an_embedding_without_direction(embeddings):
    assert embedding_distance(torch.zeros_like(embeddings[0]), embeddings[0]).isnan()


def test_scaling_finds_points_again():
    points = torch.randn(
        6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ) * torch.tensor([3.0, 1])
    distances = torch.from_numpy(squareform(pdist(points.numpy())))
    found, share = classical_scaling(distances)
    torch.testing.assert_close(torch.from_numpy(squareform(pdist(found.numpy()))), distances)
    assert share.item() == pytest.approx(1)
    assert found[:, 0].norm() > found[:, 1].norm()


def test_a_plane_is_less_than_space():
    corners = torch.cartesian_prod(*torch.tensor([[0.0, 4.0], [0.0, 2.0], [0.0, 1.0]]).double())
    distances = torch.from_numpy(squareform(pdist(corners.numpy())))
    found, share = classical_scaling(distances)
    torch.testing.assert_close(found.abs(), torch.tensor([2.0, 1.0]).double().expand(8, 2))
    assert share.item() == pytest.approx(20 / 21)  # of the squares of half the sides


@pytest.mark.parametrize("k", [1, 2])
def test_an_axis_that_is_not_needed_is_zero(k):
    found, share = classical_scaling(torch.ones(k, k).double() - torch.eye(k).double())
    assert found.shape == (k, 2)
    assert (found[:, k - 1 :].abs() < 1e-7).all()
    assert share.item() == pytest.approx(1)


@pytest.mark.parametrize(
    "distances", [torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.zeros(2, 3)], ids=["other", "wide"]
)
def test_scaling_refuses(distances):
    with pytest.raises(ValueError, match="`distances` must be a symmetric matrix, got the shape"):
        classical_scaling(distances)
