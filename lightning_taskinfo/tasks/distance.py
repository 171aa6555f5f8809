"""How far is it from one task to another? What a network must learn in addition, in nats; not symmetric."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from itertools import compress, count, permutations, product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_taskinfo._files import StrPath, claim_folder, digest
from lightning_taskinfo._parallel import check_executor, run_jobs
from lightning_taskinfo._progress import Progress, shown
from lightning_taskinfo._tables import Cells, Tabled
from lightning_taskinfo._wandb import log_once
from lightning_taskinfo._warn import warn
from lightning_taskinfo.certificates.samples import Data, read_pair
from lightning_taskinfo.functional.likelihood import Likelihood, as_likelihood
from lightning_taskinfo.plotting import figure_and_axes
from lightning_taskinfo.tasks.training import ModelFn, Training, network_digest
from lightning_taskinfo.tasks.union import HeadFn, Method, Settings, Union, solve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class DistanceMatrix(Tabled):
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
        S = len(self.distances)
        if S < 2:
            return torch.full_like(self.distances[0], torch.nan)
        return self.distances.std(0) / S**0.5

    def unfinished(self) -> tuple[str, ...]:
        """Return the tasks whose trainings stopped short of their minimum, or ended in different ones.

        That is where a task's distance to itself is beyond three standard errors and one per cent of its information,
        instead of 0. Where none is, a training may still have stopped short.
        """
        itself = self.mean.diagonal().abs()
        error = self.standard_error.diagonal().nan_to_num()
        information = self.information.mean(0)
        far = (itself > 3 * error) & (itself > 0.01 * information)
        return tuple(compress(self.names, far.tolist()))

    def table(self) -> tuple[list[str], list[list[str | float]]]:
        """Return column names and one row for each ordered pair."""
        columns = ["from", "to", "distance", "standard_error", "new_head"]
        new_head = self.new_head.mean(0)
        measured = torch.stack([self.mean, self.standard_error, new_head])
        values = measured.flatten(1).T.tolist()  # [K * K, 3]
        rows: list[list[str | float]] = []
        pairs = product(self.names, repeat=2)
        for pair, row in zip(pairs, values, strict=True):
            rows.append([*pair, *row])
        return columns, rows

    def reading(self) -> str:
        """Return one sentence on the nearest pair of different tasks."""
        K = len(self.names)
        if K == 1:
            return f"{self.names[0]} is {self._cell(0, 0)} nats from itself; 0 would be exact."
        mean = self.mean
        pairs = permutations(range(K), 2)
        i, j = min(pairs, key=lambda pair: mean[pair].item())
        known, added = self.names[i], self.names[j]
        return f"A network that knows {known} needs the fewest further nats for {added}: {self._cell(i, j)}."

    def _cell(self, i: int, j: int) -> str:
        distance = f"{self.mean[i, j].item():,.0f}"
        if len(self.seeds) < 2:
            return distance
        return f"{distance} ± {self.standard_error[i, j].item():,.0f}"

    def _cells(self) -> Cells:
        rows = []
        for i, name in enumerate(self.names):
            distances = [self._cell(i, j) for j in range(len(self.names))]
            rows.append([name, *distances])
        return ["nats from, to", *self.names], rows

    def _remarks(self) -> list[str]:
        tasks = ", ".join(self.unfinished())
        if not tasks:
            return []
        return [
            f"Not to be trusted: {tasks} should be at distance 0 from itself; set more `training.steps`."
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON; an error that a single seed cannot give is ``None``."""
        values: dict[str, Any] = dict(vars(self))
        values["mean"] = self.mean
        values["standard_error"] = None
        if len(self.seeds) > 1:
            values["standard_error"] = self.standard_error
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value.tolist()
        return values

    def plot(self, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
        """Draw the mean distances as colours with numbers and standard errors.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        mean = self.mean
        error = self.standard_error
        tasks = range(len(self.names))
        side = 1.6 + 0.9 * len(self.names)
        fig, ax = figure_and_axes(ax, size=(side + 0.8, side))
        image = ax.imshow(mean.numpy(), cmap="viridis_r")
        fig.colorbar(image, ax=ax, label="distance (nats)", shrink=0.8)
        middle = 0.5 * (mean.min() + mean.max())
        for row, column in product(tasks, repeat=2):
            value = mean[row, column]
            spread = error[row, column]
            text = f"{round(value.item())}"
            if spread.isfinite():
                text += f"\n±{spread:.0f}"
            color = "white" if value > middle else "black"
            ax.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
        ax.set_xticks(tasks, self.names, rotation=30, ha="right")
        ax.set_yticks(tasks, self.names)
        ax.set(xlabel="to: the task that is added", ylabel="from: the task that is known")
        ax.set_title(rf"$d_\beta$ from row to column, {self.method}, $\beta = {self.beta:g}$")
        return fig, ax

    def log(self, run: Any, *, key: str = "task_distance") -> None:
        """Log figure (as an image), table and scalars to a W&B run.

        Args:
            run: What ``wandb.init()`` returned, or a WandbLogger's ``experiment``.
            key: What stands before the names, behind ``taskinfo/``.
        """
        columns, rows = self.table()
        scalars = {f"{row[0]}→{row[1]}": float(row[2]) for row in rows}
        figure, _ = self.plot()
        figures = {"figure": figure}
        tables = {"table": (columns, rows)}
        log_once(run, key, scalars=scalars, figures=figures, tables=tables)


def task_distance(
    tasks: Mapping[str, Data],
    beta: float,
    *,
    trunk_fn: ModelFn,
    method: Method = "laplace",
    head_fn: HeadFn = nn.Linear,
    prior_center: Literal["initial", "zero"] = "initial",
    prior_std: float = 0.1,
    likelihood: str | Likelihood = "categorical",
    training: Training | None = None,
    seeds: Sequence[int] | int = 3,
    folder: StrPath | None = None,
    executor: Executor | None = None,
    workers: int | None = 0,
    progress: Progress | bool = True,
) -> DistanceMatrix:
    r"""Measure the distance between all ordered pairs of tasks, each task to itself included.

    .. math:: d_\beta(D_1 \to D_2) = \mathrm{KL}(Q_{12}\|P) - \mathrm{KL}(Q_1\|P)

    :math:`Q_1` minimises :math:`E_Q[L_{D_1}] + \beta\,\mathrm{KL}(Q\|P)`, and :math:`Q_{12}` the same for the disjoint
    union: a trunk that both tasks share, and a head for each. With :math:`\beta` fixed, twice the data would count as a
    distance; so the trunk's divergence gets :math:`\beta N_{12}/N_1` and a head's :math:`\beta` times the samples that
    reach it over :math:`N_1`, after which :math:`d(D \to D) = 0` for exact minimisers. Batches grow with the union,
    so that all trainings make the same number of passes over the data.

    Args:
        tasks: Data of each task by name: ``(inputs, targets)``, a dataset of such pairs, or a loader over one. All
            inputs have one shape.
        beta: Weight of the divergence beside the **sum** of the known task's loss.
        trunk_fn: Makes the shared part, from inputs to features ``[N, F]``. Other processes import it: define it at
            the top of a module, or use :func:`functools.partial` of such a function.
        method: ``"laplace"`` trains plain weights, held to the prior as the divergence would, and takes the rest from
            the diagonal of their Fisher information, in closed form; ``"variational"`` trains noisy weights, which
            takes longer to come to its end.
        head_fn: Makes a head from the numbers of features and outputs.
        prior_center: Mean of the pre-distribution: each network's own start, or zero.
        prior_std: Its standard deviation.
        likelihood: What outputs mean, as for :func:`~lightning_taskinfo.fisher.fisher_trace`.
        training: How long and how fast to train.
        seeds: The seeds, or how many; each repeats everything with another start, other batches and other noise.
        folder: Keeps every finished training; a call that was interrupted continues, also with more seeds. Refused if
            it belongs to other tasks, another network or other settings.
        executor: Where trainings run, see :func:`~lightning_taskinfo._parallel.run_jobs`.
        workers: Processes of our own pool where there is no ``executor``; 0 for this process alone, ``None`` for as
            many as there are cores. A script that uses processes needs ``if __name__ == "__main__":``.
        progress: Whether to draw a bar where standard error is a terminal or a notebook; or a function, called with the
            number of finished trainings, their total and a label.

    Returns:
        Distances with standard errors over seeds, and plots.

    Raises:
        ValueError: If an argument is out of its range, or the folder belongs to something else.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(64, 2, generator=g)
        >>> tasks = {"left": (x, (x[:, 0] < 0).long()), "above": (x, (x[:, 1] > 0).long())}
        >>> quick = Training(pretrain_steps=20, steps=20)
        >>> matrix = task_distance(tasks, 1.0, trunk_fn=nn.Flatten, training=quick, seeds=[0], workers=0)
        >>> matrix.distances.shape
        torch.Size([1, 2, 2])

    References:
        Achille, Paolini, Mbeng, Soatto, *The information complexity of learning tasks, their structure and their
        distance*, section 6.
    """
    if isinstance(seeds, int | np.integer):
        seeds = range(seeds)
    seeds = [int(seed) for seed in seeds]
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"`seeds` must be different numbers, at least one, got {seeds}.")
    if not tasks:
        raise ValueError("`tasks` must hold at least one task, got none.")
    check_executor(executor, workers)
    data = [_read(name, task) for name, task in tasks.items()]
    if executor is None and workers != 0:  # an executor may have ways of its own, as Dask has
        _check_importable(trunk_fn=trunk_fn, head_fn=head_fn)
    settings = Settings(
        trunk_fn=trunk_fn,
        head_fn=head_fn,
        method=method,
        beta=beta,
        prior_center=prior_center,
        prior_std=prior_std,
        likelihood=as_likelihood(likelihood),
        training=training or Training(),
    )
    for one in data:  # here and now, where an error is seen as it is
        union = Union.of(settings, [one], seeds[0])
        union.data().check(union.model())
    if folder is not None:
        claim_folder(folder, _configuration(settings, tasks, data), results=["seed-*.json"])
    sizes = [len(targets) for _, targets in data]
    K = range(len(data))
    wanted: set[tuple[int, ...]] = {(i,) for i in K}
    for pair in product(K, repeat=2):
        wanted.add(_trained(pair, sizes))
    jobs = {}
    for seed, parts in product(seeds, sorted(wanted)):
        own = [data[i] for i in parts]
        jobs[_name(seed, parts)] = Union.of(settings, own, seed)
    with shown(progress, "task_distance", len(jobs)) as tell:
        numbers = count(1)

        def on_done(name: str, _: Any) -> None:
            tell(next(numbers), len(jobs), name)

        found = run_jobs(
            solve,
            jobs,
            folder=folder,
            executor=executor,
            workers=workers,
            on_done=on_done,
        )
    measured = _measured(found, sizes, seeds)
    return DistanceMatrix(tuple(tasks), method, beta, tuple(sizes), tuple(seeds), **measured)


def _read(name: str, task: Data) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a task."""
    inputs, targets = read_pair(task, argument=f"tasks[{name!r}]")
    found = targets.unique()
    if not targets.is_floating_point() and len(found) and len(found) <= found.max():
        warn(
            f"Task {name!r} has no samples of some classes from 0 to {int(found.max())}; do its labels count from 1?"
        )
    return inputs, targets


def _check_importable(**functions: Callable[..., Any]) -> None:
    """Raise a ``ValueError`` for functions that other processes cannot import, before anything is trained."""
    for argument, function in functions.items():
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            wanted = "a function at the top of a module, or `workers` 0"
            raise ValueError(
                f"`{argument}` must be {wanted}, got {function!r}, which cannot be pickled."
            ) from error


def _measured(
    found: Mapping[str, Any],
    sizes: list[int],
    seeds: Sequence[int],
) -> dict[str, Tensor]:
    """Distances, new heads, and information and objective of each task alone, from all trainings."""
    S = len(seeds)
    K = len(sizes)
    distances = torch.zeros(S, K, K, dtype=torch.float64)
    new_head = torch.zeros(S, K, K, dtype=torch.float64)
    information = torch.zeros(S, K, dtype=torch.float64)
    objective = torch.zeros(S, K, dtype=torch.float64)
    for s, seed in enumerate(seeds):
        for i in range(K):
            alone = found[_name(seed, (i,))]
            kl = alone["kl"]
            information[s, i] = kl["trunk"] + kl["heads.0"]
            objective[s, i] = alone["objective"]
        for i, j in product(range(K), repeat=2):
            parts = _trained((i, j), sizes)
            known = parts.index(i)
            kl = found[_name(seed, parts)]["kl"]
            both = kl["trunk"] + kl[f"heads.{known}"]
            distances[s, i, j] = both - information[s, i]
            new_head[s, i, j] = kl[f"heads.{1 - known}"]
    return {
        "distances": distances,
        "new_head": new_head,
        "information": information,
        "objective": objective,
    }


def _trained(parts: tuple[int, ...], sizes: list[int]) -> tuple[int, ...]:
    """Return which training serves a pair: tasks of one size have the same β either way, and are trained once."""
    same = len({sizes[i] for i in parts}) == 1
    return tuple(sorted(parts)) if same else parts


def _name(seed: int, parts: tuple[int, ...]) -> str:
    return f"seed-{seed}_task-{'-'.join(map(str, parts))}"


def _configuration(
    settings: Settings,
    tasks: Mapping[str, Data],
    data: list[tuple[Tensor, Tensor]],
) -> dict[str, Any]:
    """What decides the numbers of a training; not the seeds, so that more of them can be added."""
    first = Union.of(settings, data[:1], 0)
    fingerprints = {}
    for name, (x, y) in zip(tasks, data, strict=True):
        fingerprints[name] = digest([("inputs", x), ("targets", y)])
    return {
        "method": settings.method,
        "beta": settings.beta,
        "prior_center": settings.prior_center,
        "prior_std": settings.prior_std,
        "likelihood": repr(settings.likelihood),
        "training": asdict(settings.training),
        "network": network_digest(first.model(), first.data().inputs),
        "tasks": fingerprints,
    }
