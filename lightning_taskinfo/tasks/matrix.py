"""A matrix of distances between tasks, with its uncertainty."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_taskinfo._tables import html_table, text_table
from lightning_taskinfo._wandb import log_once
from lightning_taskinfo.tasks._pairs import Method

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class DistanceMatrix:
    r"""Distances between ``K`` tasks, in nats: what a network that knows one must learn to know both.

    .. math:: d_\beta(D_1 \to D_2) = \mathrm{KL}(Q_{12}\|P) - \mathrm{KL}(Q_1\|P)

    Rows are the task that is known, columns the one that is added. Trunk and the known task's head count; the new head
    is in :attr:`new_head`. Estimates can be negative, and the diagonal, which would be 0 for perfect training, is
    measured like the rest.

    Attributes:
        names: Names of the tasks.
        method: ``"variational"`` or ``"laplace"``.
        beta: Weight of the divergence beside the sum of the known task's loss.
        samples: Number of samples of each task.
        seeds: Seeds of the ``S`` repetitions.
        distances: Of each seed, shape ``[S, K, K]``, float64.
        new_head: Information in the new task's head, shape ``[S, K, K]``.
        information: :math:`\mathrm{KL}(Q_1\|P)` of each task alone, shape ``[S, K]``.
        objective: :math:`C_\beta` of each task alone, shape ``[S, K]``.
    """

    names: tuple[str, ...]
    method: Method
    beta: float
    samples: tuple[int, ...]
    seeds: tuple[int, ...]
    distances: Tensor
    new_head: Tensor
    information: Tensor
    objective: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean over seeds, shape ``[K, K]``."""
        return self.distances.mean(0)

    @property
    def standard_error(self) -> Tensor:
        """Standard error of the mean over seeds, shape ``[K, K]``; NaN for a single seed.

        It covers what starts, batches and noise do, not which samples stand for a task.
        """
        return standard_error(self.distances)

    def unfinished(self) -> tuple[str, ...]:
        """Return the tasks whose trainings stopped short of their minimum, or ended in different ones.

        That is where a task's distance to itself is beyond three standard errors and one per cent of its information,
        instead of 0. Where none is, a training may still have stopped short.
        """
        itself, error = self.mean.diagonal().abs(), self.standard_error.diagonal().nan_to_num()
        far = (itself > 3 * error) & (itself > 0.01 * self.information.mean(0))
        return tuple(name for name, is_far in zip(self.names, far.tolist(), strict=True) if is_far)

    def table(self) -> tuple[list[str], list[list[str | float]]]:
        """Return column names and one row for each ordered pair."""
        columns = ["from", "to", "distance", "standard_error", "new_head"]
        values = [t.tolist() for t in (self.mean, self.standard_error, self.new_head.mean(0))]
        K = range(len(self.names))
        return columns, [
            [self.names[i], self.names[j], *(v[i][j] for v in values)] for i in K for j in K
        ]

    def reading(self) -> str:
        """Return one sentence on the nearest pair of different tasks."""
        pairs = [row for row in self.table()[1] if row[0] != row[1]]
        if not pairs:
            return f"{self.names[0]} is {self._cell(0, 0)} nats from itself; 0 would be exact."
        nearest = min(pairs, key=lambda row: float(row[2]))
        i, j = (self.names.index(str(name)) for name in nearest[:2])
        return f"A network that knows {nearest[0]} needs the fewest further nats for {nearest[1]}: {self._cell(i, j)}."

    def _cell(self, i: int, j: int) -> str:
        distance = f"{self.mean[i, j].item():,.0f}"
        if len(self.seeds) < 2:
            return distance
        return f"{distance} ± {self.standard_error[i, j].item():,.0f}"

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        tasks = range(len(self.names))
        rows = [[self.names[i], *(self._cell(i, j) for j in tasks)] for i in tasks]
        return ["nats from, to", *self.names], rows

    def __str__(self) -> str:
        return f"{text_table(*self._cells())}\n{self.reading()}"

    def _repr_html_(self) -> str:
        return html_table(*self._cells(), self.reading())

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON; an error that a single seed cannot give is ``None``."""
        values = {
            key: getattr(self, key) for key in ("names", "method", "beta", "samples", "seeds")
        }
        measured = ("mean", "distances", "new_head", "information", "objective")
        error = self.standard_error.tolist() if len(self.seeds) > 1 else None
        return {
            **values,
            "standard_error": error,
            **{key: getattr(self, key).tolist() for key in measured},
        }

    def to_json(self, **options: Any) -> str:
        """Return everything as JSON; ``options`` go to ``json.dumps``."""
        return json.dumps(self.to_dict(), **options)

    def plot(self, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
        """Draw the mean distances as colours with numbers and standard errors."""
        from lightning_taskinfo.tasks._task_plots import plot_distances

        title = rf"$d_\beta$ from row to column, {self.method}, $\beta = {self.beta:g}$"
        return plot_distances(self.names, self.mean, self.standard_error, title=title, ax=ax)

    def log(self, run: Any, *, key: str = "task_distance") -> None:
        """Log figure (as an image), table and scalars to a W&B run.

        Args:
            run: What ``wandb.init()`` returned, or a WandbLogger's ``experiment``.
            key: What stands before the names, behind ``taskinfo/``.
        """
        columns, rows = self.table()
        scalars = {f"{row[0]}→{row[1]}": float(row[2]) for row in rows}
        figures, tables = {"figure": self.plot()[0]}, {"table": (columns, rows)}
        log_once(run, key, scalars=scalars, figures=figures, tables=tables)


def standard_error(values: Tensor) -> Tensor:
    """Return the standard error of the mean over axis 0; NaN where there is only one value."""
    if len(values) < 2:
        return torch.full_like(values[0], torch.nan)
    return values.std(0) / len(values) ** 0.5
