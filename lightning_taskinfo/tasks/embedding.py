"""Embedded tasks: compared, and drawn on a map."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_taskinfo._tables import Cells, Logged
from lightning_taskinfo.functional.task_embedding import classical_scaling, embedding_distance
from lightning_taskinfo.plotting import Drawn, Given, figure_and_axes, plot_bars


@dataclass(frozen=True, eq=False)
class TaskEmbedding(Logged):
    """What the filters of a network matter to a task, as ``Task2Vec.embed`` returns it.

    Args:
        name: What to call the task.
        vector: Mean diagonal Fisher information of each filter, float64, shape ``[F]``.
        layers: Names of the weights that the filters belong to, in the order of ``vector``.
        sizes: Number of filters of each.
        network: Fingerprint of the network; embeddings by different networks cannot be compared.
        labels: Whose labels: ``"exact"`` expectation over the model's, or ``"sampled"`` from it.
        samples: Number of samples behind the Fisher information.
        num_classes: Number of classes of the task.
        test_error: Share of test samples that the fitted head gets wrong; NaN where there were
            none.

    Example:
        >>> vector = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        >>> task = TaskEmbedding("sign", vector, ("0.weight",), (3,), "a network", "exact", samples=60, num_classes=2)
        >>> task.norm
        7.0
    """

    log_key = "task2vec"
    name: str
    vector: Tensor
    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    network: str
    labels: str
    samples: int
    num_classes: int
    test_error: float = math.nan

    @property
    def norm(self) -> float:
        """Sum of the entries, their L1 norm: how much the task depends on the network's weights."""
        return self.vector.sum().item()

    @property
    def layer_norms(self) -> dict[str, float]:
        """The part of each layer in :attr:`norm`."""
        parts = zip(self.layers, self.vector.split(list(self.sizes)), strict=True)
        return {layer: part.sum().item() for layer, part in parts}

    def reading(self) -> str:
        """Return one sentence on what the task depends on."""
        norms = self.layer_norms
        largest = max(norms, key=norms.__getitem__)
        share = norms[largest] / self.norm if self.norm else 0.0
        tested = f" Its head has a test error of {self.test_error:.1%}."
        if math.isnan(self.test_error):
            tested = ""
        return f"{self.name} depends most on {largest}, with {share:.0%} of the norm {self.norm:.3g}.{tested}"

    def _cells(self) -> Cells:
        rows = zip(self.sizes, self.layer_norms.items(), strict=True)
        cells = [[layer, f"{size}", f"{norm:.3g}"] for size, (layer, norm) in rows]
        return ["layer", "filters", "norm"], cells

    def plot(self, ax: Given = None) -> Drawn:
        """Draw the norm of each layer; :func:`plot_task_map` draws several tasks.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        return plot_bars(self.layer_norms, xlabel=f"norm of the embedding of {self.name}", ax=ax)

    def _scalars(self) -> dict[str, float]:
        return {"norm": self.norm, "test_error": self.test_error}


def embedding_distances(embeddings: Sequence[TaskEmbedding]) -> Tensor:
    r"""Symmetric distances between all tasks, shape ``[K, K]``.

    Args:
        embeddings: Of one network.

    Raises:
        ValueError: If there is no embedding, one is zero, or they are not of one network.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> common = (("0.weight",), (2,), "a network", "exact", 60, 2)
        >>> embedding_distances([TaskEmbedding(name, vector, *common) for name, vector in zip("abc", vectors)])
        tensor([[0., 0., 1.],
                [0., 0., 1.],
                [1., 1., 0.]], dtype=torch.float64)
    """
    if not embeddings:
        raise ValueError("`embeddings` must hold at least one embedding, got none.")
    networks = {embedding.network for embedding in embeddings}
    if len(networks) > 1:
        raise ValueError(f"`embeddings` must be of one network, got {sorted(networks)}.")
    empty = [embedding.name for embedding in embeddings if not embedding.norm]
    if empty:
        raise ValueError(f"`embeddings` must not be zero, which has no direction, got {empty}.")
    vectors = torch.stack([embedding.vector for embedding in embeddings])  # [K, F]
    return embedding_distance(vectors[:, None], vectors[None])


def plot_task_map(
    embeddings: Sequence[TaskEmbedding],
    *,
    ax: Given = None,
) -> Drawn:
    """Draw tasks as points of a plane whose distances come near their symmetric distances.

    The title says how much of the distances' spread the plane shows.

    Args:
        embeddings: Of one network.
        ax: Axes to draw on; a new figure if not given.

    Returns:
        The figure and its axes.
    """
    points, share = classical_scaling(embedding_distances(embeddings))
    fig, ax = figure_and_axes(ax, size=(6, 4))
    for embedding, (x, y) in zip(embeddings, points.tolist(), strict=True):
        name = embedding.name
        label = name if len(name) <= 30 else f"…{name[-29:]}"  # paths leave room for the picture
        ax.scatter(x, y, s=40, label=label)
    # Names at the points would overlap for similar tasks.
    ax.legend(
        fontsize=8,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    ax.set_title(f"tasks by their Fisher information ({share:.0%} of the spread)", fontsize=10)
    ax.set_aspect("equal", adjustable="datalim")
    ax.margins(0.2)
    return fig, ax


def embedding_rows(embeddings: Sequence[TaskEmbedding]) -> list[dict[str, Any]]:
    """Return one row per task: size, norm, test error, and the nearest source among the others.

    Distances of tasks are a heuristic for transfer, not a prediction: a near task can still hurt.

    Args:
        embeddings: Of one network.
    """
    distances = embedding_distances(embeddings).fill_diagonal_(math.inf)
    rows = []
    for embedding, from_each in zip(embeddings, distances, strict=True):
        row = {
            "task": embedding.name,
            "classes": embedding.num_classes,
            "norm": embedding.norm,
            "test_error": embedding.test_error,
        }
        if len(embeddings) > 1:
            nearest = int(from_each.argmin())
            row["nearest_source"] = embeddings[nearest].name
            row["distance"] = from_each[nearest].item()
        rows.append(row)
    return rows
