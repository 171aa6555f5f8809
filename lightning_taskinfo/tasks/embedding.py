"""Embedded tasks: kept on disk, compared, drawn, and recommended as sources of transfer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_taskinfo._files import StrPath, read_result, write_result
from lightning_taskinfo._ranges import check_values
from lightning_taskinfo._tables import Cells, Tabled
from lightning_taskinfo._wandb import log_once
from lightning_taskinfo.functional.task_embedding import (
    PlanarMap,
    asymmetric_embedding_distance,
    classical_scaling,
    embedding_distance,
)
from lightning_taskinfo.plotting import Drawn, Given, figure_and_axes, plot_bars

ALPHA = 0.15


@dataclass(frozen=True, eq=False)
class TaskEmbedding(Tabled):
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

    Raises:
        ValueError: If the vector has a negative or infinite entry.

    Example:
        >>> vector = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        >>> task = TaskEmbedding("sign", vector, ("0.weight",), (3,), "a network", "exact", samples=60, num_classes=2)
        >>> task.norm
        7.0
    """

    name: str
    vector: Tensor
    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    network: str
    labels: str
    samples: int
    num_classes: int
    test_error: float = math.nan

    def __post_init__(self) -> None:
        check_values("non-negative and finite", vector=self.vector)
        if len(self.vector) != sum(self.sizes):
            raise ValueError(
                f"`vector` must have an entry for each filter, {sum(self.sizes)} by `sizes`, got {len(self.vector)}."
            )

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
        """Draw the norm of each layer; ``plot_map`` and others draw several tasks.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        return plot_bars(self.layer_norms, xlabel=f"norm of the embedding of {self.name}", ax=ax)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**vars(self), "vector": self.vector.tolist()}

    def save(self, path: StrPath) -> None:
        """Write a JSON file with a checksum, atomically, that :meth:`load` reads.

        Args:
            path: The file to write or replace; its folder must exist.
        """
        write_result(path, self.to_dict())

    @classmethod
    def load(cls, path: StrPath) -> "TaskEmbedding":
        """Return what :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is no such file, or damaged.
        """
        values = read_result(path)
        try:
            values["vector"] = torch.tensor(values["vector"], dtype=torch.float64)
            values["layers"] = tuple(values["layers"])
            values["sizes"] = tuple(values["sizes"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no embedding of a task ({error}).") from error


class Recommendation(NamedTuple):
    """A source task for a target.

    Attributes:
        source: Name of the source.
        distance: Its distance to the target.
    """

    source: str
    distance: float


def embedding_distances(embeddings: Sequence[TaskEmbedding], *, alpha: float = 0.0) -> Tensor:
    r"""Distances between all tasks, from the one of the row to the one of the column, shape ``[K, K]``.

    Args:
        embeddings: Of one network.
        alpha: How much the complexity of the source counts: 0, for a symmetric matrix of distances,
            unless told otherwise, while :func:`nearest_source` prefers complex sources a little.
            See :func:`~lightning_taskinfo.functional.task_embedding.asymmetric_embedding_distance`;
            the trivial task's Fisher information is the geometric mean of the embeddings' mean
            entries, so that their common scale does not matter.

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
    sources, targets = vectors[:, None], vectors[None]
    if not alpha:
        return embedding_distance(sources, targets)
    trivial = vectors.mean(1).log().mean().exp().item()
    return asymmetric_embedding_distance(sources, targets, trivial=trivial, alpha=alpha)


def nearest_source(
    target: TaskEmbedding,
    sources: Sequence[TaskEmbedding],
    *,
    alpha: float = ALPHA,
) -> list[Recommendation]:
    """Recommend sources of transfer to a target, the nearest first; the target itself is left out, by its name.

    Distances of tasks are a heuristic for transfer, not a prediction: a near task can still hurt.

    Args:
        target: The task to learn.
        sources: Tasks that networks were trained on.
        alpha: How much the complexity of a source speaks for it; 0 for the symmetric distance.

    Raises:
        ValueError: If there is no source, or they are not of the target's network.

    Example:
        >>> vectors = torch.tensor([[1.0, 2.0], [1.0, 3.0], [3.0, 1.0]], dtype=torch.float64)
        >>> common = (("0.weight",), (2,), "a network", "exact", 60, 2)
        >>> a, b, c = (TaskEmbedding(name, vector, *common) for name, vector in zip("abc", vectors))
        >>> [recommendation.source for recommendation in nearest_source(a, [a, b, c])]
        ['b', 'c']
    """
    others = [source for source in sources if source.name != target.name]
    if not others:
        names = [source.name for source in sources]
        raise ValueError(f"`sources` must hold a task other than the target, got {names}.")
    distances = embedding_distances([target, *others], alpha=alpha)[1:, 0].tolist()
    found = [Recommendation(s.name, d) for s, d in zip(others, distances, strict=True)]
    return sorted(found, key=lambda recommendation: recommendation.distance)


def task_map(embeddings: Sequence[TaskEmbedding]) -> PlanarMap:
    """Return the tasks as points of a plane, by classical scaling of their symmetric distances.

    Args:
        embeddings: Of one network.
    """
    return classical_scaling(embedding_distances(embeddings))


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
    fig, ax = figure_and_axes(ax, size=(6, 4))
    points, share = task_map(embeddings)
    _scatter(ax, embeddings, points.tolist())
    ax.set_title(f"tasks by their Fisher information ({share:.0%} of the spread)", fontsize=10)
    ax.set_aspect("equal", adjustable="datalim")
    ax.margins(0.2)
    return fig, ax


def plot_difficulty(
    embeddings: Sequence[TaskEmbedding],
    *,
    ax: Given = None,
) -> Drawn:
    """Draw the test error of each task's fitted head against the norm of its embedding.

    Args:
        embeddings: Those without a test error are left out.
        ax: Axes to draw on; a new figure if not given.

    Returns:
        The figure and its axes.

    Raises:
        ValueError: If no embedding has a test error.
    """
    tested = [embedding for embedding in embeddings if not math.isnan(embedding.test_error)]
    if not tested:
        raise ValueError("`embeddings` must have a test error, got none that has.")
    fig, ax = figure_and_axes(ax, size=(6, 4), frame=False)
    places = [(embedding.norm, 100 * embedding.test_error) for embedding in tested]
    _scatter(ax, tested, places)
    ax.set(xscale="log", xlabel="norm of the embedding", ylabel="test error of the head (%)")
    ax.margins(0.15)
    return fig, ax


def embedding_rows(
    embeddings: Sequence[TaskEmbedding], *, alpha: float = ALPHA
) -> list[dict[str, Any]]:
    """Return one row per task: size, norm, test error, place on the map, and the nearest source among the others.

    Args:
        embeddings: Of one network.
        alpha: How much the complexity of a source speaks for it, see
            :func:`~lightning_taskinfo.tasks.embedding.nearest_source`.
    """
    rows = []
    places = task_map(embeddings).points.tolist()
    for embedding, (x, y) in zip(embeddings, places, strict=True):
        row: dict[str, Any] = {
            "task": embedding.name,
            "classes": embedding.num_classes,
            "samples": embedding.samples,
            "norm": embedding.norm,
            "test_error": embedding.test_error,
            "x": x,
            "y": y,
        }
        if len(embeddings) > 1:
            best = nearest_source(embedding, embeddings, alpha=alpha)[0]
            row |= {"nearest_source": best.source, "distance": best.distance}
        rows.append(row)
    return rows


def log_embeddings(
    run: Any,
    embeddings: Sequence[TaskEmbedding],
    *,
    alpha: float = ALPHA,
    key: str = "task2vec",
) -> None:
    """Log figures as images, rows and distances as tables, and norms and errors as scalars to a run of W&B.

    Args:
        run: What ``wandb.init()`` returns, or the ``experiment`` of Lightning's ``WandbLogger``.
        embeddings: Of one network.
        alpha: How much the complexity of a source speaks for it.
        key: What stands before the names, behind ``taskinfo/``.

    Example::

        with wandb.init(project="tasks") as run:
            log_embeddings(run, [Task2Vec().embed(load_task(name), name=name) for name in ("digits", "letters")])
    """
    rows = embedding_rows(embeddings, alpha=alpha)
    scalars = {f"norm/{row['task']}": row["norm"] for row in rows}
    figures = {"map": plot_task_map(embeddings)[0]}
    tested = [row for row in rows if not math.isnan(row["test_error"])]
    for row in tested:
        scalars[f"test_error/{row['task']}"] = row["test_error"]
    if tested:
        figures["difficulty"] = plot_difficulty(embeddings)[0]
    names = [embedding.name for embedding in embeddings]
    distances = embedding_distances(embeddings, alpha=alpha).tolist()
    from_each = [[name, *row] for name, row in zip(names, distances, strict=True)]
    tables = {
        "tasks": (list(rows[0]), [list(row.values()) for row in rows]),
        "distances": (["from", *names], from_each),
    }
    log_once(run, key, scalars=scalars, figures=figures, tables=tables)


def _scatter(
    ax: Any,
    embeddings: Sequence[TaskEmbedding],
    places: Sequence[Sequence[float]],
) -> None:
    """Draw a point per task, named in the legend: names at the points would overlap for similar tasks."""
    from matplotlib import colormaps

    for i, (embedding, place) in enumerate(zip(embeddings, places, strict=True)):
        name = embedding.name
        label = name if len(name) <= 30 else f"…{name[-29:]}"  # paths leave room for the picture
        color = colormaps["tab20"](i % 20)
        ax.scatter(*place, s=40, color=color, alpha=0.9, label=label)
    ax.legend(
        fontsize=8,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
