"""Embedded tasks: kept on disk, compared, and recommended as sources of transfer."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_taskinfo._files import atomic_write, digest
from lightning_taskinfo._tables import Tabled
from lightning_taskinfo.functional.task_embedding import (
    PlanarMap,
    asymmetric_embedding_distance,
    classical_scaling,
    embedding_distance,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALPHA = 0.15


@dataclass(frozen=True, eq=False)
class TaskEmbedding(Tabled):
    """What the filters of a probe matter to a task, as :class:`~lightning_taskinfo.tasks.task2vec.Task2Vec` returns it.

    Args:
        name: What to call the task.
        vector: Mean diagonal Fisher information of each filter, float64, shape ``[F]``.
        layers: Names of the weights that the filters belong to, in the order of ``vector``.
        sizes: Number of filters of each.
        probe: Fingerprint of the probe; embeddings of different probes cannot be compared.
        labels: Whose labels: ``"exact"`` expectation over the model's, or ``"sampled"`` from it.
        samples: Number of samples behind the Fisher information.
        num_classes: Number of classes of the task.
        test_error: Share of test samples that the fitted head gets wrong; NaN where there were
            none.

    Raises:
        ValueError: If the vector has not the sizes' length, or has a negative or infinite entry.

    Example:
        >>> vector = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        >>> task = TaskEmbedding("sign", vector, ("0.weight",), (3,), "probe", "exact", samples=60, num_classes=2)
        >>> task.norm
        7.0
    """

    name: str
    vector: Tensor
    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    probe: str
    labels: str
    samples: int
    num_classes: int
    test_error: float = math.nan

    def __post_init__(self) -> None:
        if self.vector.shape != (sum(self.sizes),) or len(self.sizes) != len(self.layers):
            raise ValueError(
                f"`vector` must have the {sum(self.sizes)} filters of `sizes`, got the shape {list(self.vector.shape)}."
            )
        if not ((self.vector >= 0) & self.vector.isfinite()).all():
            raise ValueError(
                f"`vector` must be finite and at least 0, got {self.vector.min().item()}."
            )

    @property
    def norm(self) -> float:
        """Sum of the entries, their L1 norm: how much the task depends on the probe's weights."""
        return self.vector.sum().item()

    @property
    def layer_norms(self) -> dict[str, float]:
        """The part of each layer in :attr:`norm`."""
        return {
            n: part.sum().item()
            for n, part in zip(self.layers, self.vector.split(list(self.sizes)), strict=True)
        }

    def reading(self) -> str:
        """Return one sentence on what the task depends on."""
        norms = self.layer_norms
        largest = max(norms, key=lambda name: norms[name])
        share = norms[largest] / self.norm if self.norm else 0.0
        error = (
            ""
            if math.isnan(self.test_error)
            else f" Its head has a test error of {self.test_error:.1%}."
        )
        return f"{self.name} depends most on {largest}, with {share:.0%} of the norm {self.norm:.3g}.{error}"

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        rows = zip(self.layers, self.sizes, self.layer_norms.values(), strict=True)
        return ["layer", "filters", "norm"], [
            [n, str(size), f"{norm:.3g}"] for n, size, norm in rows
        ]

    def plot(self, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
        """Draw the norm of each layer; ``plot_map`` and others draw several tasks.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        from lightning_taskinfo.plotting import plot_bars

        return plot_bars(self.layer_norms, xlabel=f"norm of the embedding of {self.name}", ax=ax)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an npz file of plain arrays, atomically, that :meth:`load` reads.

        Args:
            path: The file to write or replace; its folder must exist.
        """
        arrays: dict[str, Any] = {
            name: np.asarray(getattr(self, name)) for name in self.__dataclass_fields__
        }
        with atomic_write(path) as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TaskEmbedding":
        """Return what :meth:`save` wrote; nothing is unpickled.

        Args:
            path: The file.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is no such file, or damaged.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"`path` must be a saved embedding, but there is no file at {path}."
            )
        try:
            with path.open("rb") as file:
                arrays = {
                    key: np.asarray(value)
                    for key, value in np.load(file, allow_pickle=False).items()
                }
            fields = {
                key: arrays[key].tolist() for key in cls.__dataclass_fields__ if key != "vector"
            }
            fields |= {key: tuple(fields[key]) for key in ("layers", "sizes")}
            return cls(vector=torch.from_numpy(arrays["vector"]), **fields)
        except Exception as error:  # zip, zlib and numpy each have words of their own for damage
            raise ValueError(f"{path}: not a readable task embedding ({error}).") from error


class Recommendation(NamedTuple):
    """A source task for a target.

    Attributes:
        source: Name of the source.
        distance: Its distance to the target.
    """

    source: str
    distance: float


def embedding_distances(
    embeddings: Sequence[TaskEmbedding], *, alpha: float = 0.0, trivial: float | None = None
) -> Tensor:
    r"""Distances between all tasks, from the one of the row to the one of the column, shape ``[K, K]``.

    Args:
        embeddings: Of one probe.
        alpha: How much the complexity of the source counts: 0, for a symmetric matrix of distances,
            unless told otherwise, while :func:`nearest_source` prefers complex sources a little.
            See :func:`~lightning_taskinfo.functional.task_embedding.asymmetric_embedding_distance`.
        trivial: Fisher information of the trivial task, which only matters with ``alpha``; where
            ``None`` the geometric mean of the embeddings' mean entries, so that their common scale
            does not matter.

    Raises:
        ValueError: If there is no embedding, or they are not of one probe.

    Example:
        >>> vectors = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> common = (("0.weight",), (2,), "probe", "exact", 60, 2)
        >>> embedding_distances([TaskEmbedding(name, vector, *common) for name, vector in zip("abc", vectors)])
        tensor([[0., 0., 1.],
                [0., 0., 1.],
                [1., 1., 0.]], dtype=torch.float64)
    """
    vectors = _stacked(embeddings)  # [K, F]
    sources, targets = vectors[:, None], vectors[None]
    if not alpha:
        return embedding_distance(sources, targets)
    scale = vectors.mean(1).log().mean().exp().item() if trivial is None else trivial
    return asymmetric_embedding_distance(sources, targets, trivial=scale, alpha=alpha)


def nearest_source(
    target: TaskEmbedding,
    sources: Sequence[TaskEmbedding],
    *,
    alpha: float = ALPHA,
    trivial: float | None = None,
) -> list[Recommendation]:
    """Recommend sources of transfer to a target, the nearest first; the target itself is left out, by its name.

    Distances of tasks are a heuristic for transfer, not a prediction: a near task can still hurt.

    Args:
        target: The task to learn.
        sources: Tasks that networks were trained on.
        alpha: How much the complexity of a source speaks for it; 0 for the symmetric distance.
        trivial: As in :func:`embedding_distances`, by default from all given embeddings.

    Raises:
        ValueError: If there is no source, or they are not of the target's probe.

    Example:
        >>> vectors = torch.tensor([[1.0, 2.0], [1.0, 3.0], [3.0, 1.0]], dtype=torch.float64)
        >>> common = (("0.weight",), (2,), "probe", "exact", 60, 2)
        >>> a, b, c = (TaskEmbedding(name, vector, *common) for name, vector in zip("abc", vectors))
        >>> [recommendation.source for recommendation in nearest_source(a, [a, b, c])]
        ['b', 'c']
    """
    others = [source for source in sources if source.name != target.name]
    if not others:
        raise ValueError(
            f"`sources` must hold a task other than the target, got {[s.name for s in sources]}."
        )
    distances = embedding_distances([target, *others], alpha=alpha, trivial=trivial)[1:, 0].tolist()
    found = [Recommendation(source.name, d) for source, d in zip(others, distances, strict=True)]
    return sorted(found, key=lambda recommendation: recommendation.distance)


def task_map(embeddings: Sequence[TaskEmbedding]) -> PlanarMap:
    """Return the tasks as points of a plane, by classical scaling of their symmetric distances.

    Args:
        embeddings: Of one probe.
    """
    return classical_scaling(embedding_distances(embeddings))


def fingerprint(module: nn.Module, leave_out: str) -> str:
    """Return a short hash of all parameters and buffers but those below ``leave_out``, names included."""
    state = sorted(module.state_dict().items())
    return digest((name, x) for name, x in state if not name.startswith(f"{leave_out}."))


def _stacked(embeddings: Sequence[TaskEmbedding]) -> Tensor:
    if not embeddings:
        raise ValueError("`embeddings` must hold at least one embedding, got none.")
    probes = {(embedding.probe, embedding.layers) for embedding in embeddings}
    if len(probes) > 1:
        raise ValueError(
            f"`embeddings` must be of one probe, got {sorted(probe for probe, _ in probes)}."
        )
    return torch.stack([embedding.vector for embedding in embeddings])
