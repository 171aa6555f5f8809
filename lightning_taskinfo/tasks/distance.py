r"""How far is it from one task to another? What a network must learn in addition, in nats; not symmetric.

The disjoint union of two tasks is a trunk that both share with a head for each. The divergence of
each part is weighted by :math:`\beta` times the number of samples that reach it, over the number of
samples of the first task: the trunk of a union of :math:`N_{12}` samples has :math:`\beta N_{12}/N_1`, the
head of task :math:`i` has :math:`\beta N_i/N_1`. That is one :math:`\beta` for the mean of the loss that a
part sees, and the minimisers for :math:`D` and for :math:`D \sqcup D` are then the same, in any network.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, count, permutations, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_taskinfo._files import StrPath, claim_folder
from lightning_taskinfo._nested import described
from lightning_taskinfo._observe import trainable_parameters, weights_now
from lightning_taskinfo._parallel import check_executor, check_travels, run_jobs
from lightning_taskinfo._progress import Progress, shown
from lightning_taskinfo._random import seed_from
from lightning_taskinfo._ranges import check_positive, check_seed
from lightning_taskinfo._tables import Cells, Logged
from lightning_taskinfo._warn import warn
from lightning_taskinfo.certificates.samples import Data
from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.functional.information import information_in_weights
from lightning_taskinfo.functional.likelihood import Categorical, Likelihood, as_likelihood
from lightning_taskinfo.plotting import Drawn, Given, figure_and_axes
from lightning_taskinfo.tasks.training import (
    CHUNK,
    Fit,
    ModelFn,
    Training,
    build,
    first_answers,
    read_task,
)

HeadFn = Callable[[int, int], nn.Module]
Numbers = dict[str, float]
Array = np.ndarray[Any, Any]
Pair = tuple[Tensor, Tensor]
IMPOSSIBLE = -1e4  # the logit of a class that a task does not have: its probability is exactly 0


@dataclass(frozen=True, eq=False)
class DistanceMatrix(Logged):
    r"""Distances between ``K`` tasks, in nats: what a network that knows one must learn to know both.

    .. math:: d_\beta(D_1 \to D_2) = \mathrm{KL}(Q_{12}\|P) - \mathrm{KL}(Q_1\|P)

    Rows are the task that is known, columns the one that is added. Trunk and the known task's head count, the new head
    does not. Estimates can be negative, and the diagonal, which would be 0 for perfect training, is
    measured like the rest.

    Attributes:
        names: Names of the tasks.
        beta: Weight of the divergence beside the sum of the known task's loss.
        samples: Number of samples of each task.
        seeds: Seeds of the ``S`` repetitions.
        distances: Of each seed, shape ``[S, K, K]``, float64.
        information: :math:`\mathrm{KL}(Q_1\|P)` of each task alone, shape ``[S, K]``.
    """

    log_key = "task_distance"
    names: tuple[str, ...]
    beta: float
    samples: tuple[int, ...]
    seeds: tuple[int, ...]
    distances: Tensor
    information: Tensor

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
        squares = (self.distances - self.mean).square().sum(0)
        return (squares / (S - 1) / S).sqrt()

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

    def reading(self) -> str:
        """Return one sentence on the nearest pair of different tasks."""
        K = len(self.names)
        if K == 1:
            return f"{self.names[0]} is {self._cell(0, 0)} nats from itself; 0 would be exact."
        i, j = min(permutations(range(K), 2), key=lambda pair: self.mean[pair].item())
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
            rows.append([name, *(self._cell(i, j) for j in range(len(self.names)))])
        return ["nats from, to", *self.names], rows

    def _remarks(self) -> list[str]:
        tasks = ", ".join(self.unfinished())
        remark = f"Not to be trusted: {tasks} should be at distance 0 from itself; set more `training.pretrain_steps`."
        return [remark] if tasks else []

    def _scalars(self) -> dict[str, float]:
        pairs = product(range(len(self.names)), repeat=2)
        return {f"{self.names[i]}→{self.names[j]}": self.mean[i, j].item() for i, j in pairs}

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON; an error that a single seed cannot give is ``None``."""
        error = self.standard_error.tolist() if len(self.seeds) > 1 else None
        return {**super().to_dict(), "mean": self.mean.tolist(), "standard_error": error}

    def plot(self, ax: Given = None) -> Drawn:
        """Draw the mean distances as colours with numbers and standard errors.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        tasks = range(len(self.names))
        side = 1.6 + 0.9 * len(tasks)
        fig, ax = figure_and_axes(ax, size=(side + 0.8, side))
        image = ax.imshow(self.mean.numpy(), cmap="viridis_r", alpha=0.5)
        fig.colorbar(image, ax=ax, label="distance (nats)", shrink=0.8)
        for i, j in product(tasks, repeat=2):
            text = self._cell(i, j).replace(" ± ", "\n±")
            ax.text(
                j,
                i,
                text,
                ha="center",
                va="center",
                fontsize=8,
            )
        ax.set_xticks(tasks, self.names, rotation=30, ha="right")
        ax.set_yticks(tasks, self.names)
        ax.set(xlabel="to: the task that is added", ylabel="from: the task that is known")
        ax.set_title(rf"$d_\beta$ from row to column, $\beta = {self.beta:g}$")
        return fig, ax


class MultiHead(nn.ModuleDict):
    """The ``trunk`` of all tasks and a head for each, ``head_0`` and so on; the input carries the index of its task.

    The trunk makes features ``[N, F]`` of inputs, and a head outputs ``[N, C]`` of features.
    """

    def forward(self, inputs: Pair) -> Tensor:
        """Return the outputs of each sample's own head, filled up to the widest, shape ``[N, C]``."""
        x, task = inputs
        features = self["trunk"](x)
        outputs = [head(features) for name, head in self.items() if name != "trunk"]
        width = max(output.shape[1] for output in outputs)
        padded = []
        for output in outputs:
            missing = width - output.shape[1]
            padded.append(nn.functional.pad(output, (0, missing), value=IMPOSSIBLE))
        return torch.stack(padded, 1)[torch.arange(len(x)), task]


@dataclass(frozen=True)
class Union:
    """One task, or the disjoint union of two, and how to train on it: everything that another process needs.

    Args:
        parts: Inputs and targets of each task, as arrays, which can be pickled anywhere.
        seed: Seed of everything.

    The others are arguments of :func:`task_distance`.
    """

    parts: Sequence[tuple[Array, Array]]
    seed: int
    trunk_fn: ModelFn
    head_fn: HeadFn
    beta: float
    prior_std: float
    likelihood: Likelihood
    training: Training

    @property
    def sizes(self) -> list[int]:
        """Number of samples of each task."""
        return [len(y) for _, y in self.parts]

    def fit(self) -> Fit:
        """The network at its start, and all samples, each with the index of its task.

        Batches have ``batch_size`` samples of the first task on average.
        """
        inputs, targets = zip(*self.parts, strict=True)
        x = torch.from_numpy(np.concatenate(inputs))
        y = torch.from_numpy(np.concatenate(targets))
        sizes = torch.tensor(self.sizes)
        task = torch.arange(len(sizes)).repeat_interleave(sizes)
        size = round(self.training.batch_size * len(y) / self.sizes[0])
        training = replace(self.training, batch_size=size)
        return Fit(self.model(), (x, task), y, self.likelihood, training)

    def model(self) -> MultiHead:
        """The network at its start; heads of one size start alike, whatever their task."""
        trunk = build(self.trunk_fn, self.seed, argument="trunk_fn")
        inputs = torch.from_numpy(self.parts[0][0])
        features = first_answers(trunk, inputs, argument="tasks")
        if not isinstance(features, Tensor) or features.ndim != 2:
            raise ValueError(
                f"`trunk_fn` must make a network that returns features [N, F], got {described(features)}."
            )
        modules = {"trunk": trunk}
        for index, (_, targets) in enumerate(self.parts):
            outputs = targets[0].size
            if isinstance(self.likelihood, Categorical):
                outputs = max(2, int(targets.max()) + 1)
            make = partial(self.head_fn, features.shape[1], outputs)
            modules[f"head_{index}"] = build(make, seed_from(self.seed, 1), argument="head_fn")
        return MultiHead(modules)

    def betas(self) -> dict[str, float]:
        """The weight of the divergence of each part."""
        samples = {"trunk": sum(self.sizes)}
        for index, n in enumerate(self.sizes):
            samples[f"head_{index}"] = n
        return {part: self.beta * n / self.sizes[0] for part, n in samples.items()}


def task_distance(
    tasks: Mapping[str, Data],
    beta: float,
    *,
    trunk_fn: ModelFn,
    head_fn: HeadFn = nn.Linear,
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

    Plain weights are trained, held to the prior as the divergence would hold the means of :math:`Q`, and the rest is
    taken from the diagonal of their Fisher information, in closed form: exact where the loss is quadratic.

    Args:
        tasks: Data of each task by name: ``(inputs, targets)``, a dataset of such pairs, or a loader over one. All
            inputs have one shape.
        beta: Weight of the divergence beside the **sum** of the known task's loss.
        trunk_fn: Makes the shared part, from inputs to features ``[N, F]``. Other processes import it: define it at
            the top of a module, or use :func:`functools.partial` of such a function.
        head_fn: Makes a head from the numbers of features and outputs.
        prior_std: Standard deviation of the pre-distribution, whose mean is each network's own start.
        likelihood: What outputs mean, as for :func:`~lightning_taskinfo.fisher.fisher_trace`.
        training: How long and how fast to train; of its steps those of ``pretrain_steps`` are made.
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
    for seed in seeds:
        check_seed(seed)
    seeds = [int(seed) for seed in seeds]
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"`seeds` must be different numbers, at least one, got {seeds}.")
    if not tasks:
        raise ValueError("`tasks` must hold at least one task, got none.")
    check_positive(beta=beta, prior_std=prior_std)
    check_executor(executor, workers)
    meaning = as_likelihood(likelihood)
    union = partial(
        Union,
        trunk_fn=trunk_fn,
        head_fn=head_fn,
        beta=beta,
        prior_std=prior_std,
        likelihood=meaning,
        training=training or Training(),
    )
    check_travels(union, "`trunk_fn` or `head_fn`", executor, workers)
    data = [_read(name, task, meaning) for name, task in tasks.items()]
    for index, what in enumerate(("inputs", "targets")):
        kinds = {f"{pair[index].dtype} {list(pair[index].shape[1:])}" for pair in data}
        if len(kinds) > 1:
            raise ValueError(
                f"`tasks` must have {what} of one shape and type, got {', '.join(sorted(kinds))}."
            )
    arrays = [(x.numpy(), y.numpy()) for x, y in data]
    fits = {name: union([task], 0).fit() for name, task in zip(tasks, arrays, strict=True)}
    for name, fit in fits.items():  # here, where an error is seen as it is
        fit.check(f"tasks[{name!r}]")
    if folder is not None:  # the seeds are no part of it: more can be added
        known = {name: fit.configuration() for name, fit in fits.items()}
        made = {"beta": beta, "prior_std": prior_std, "order": [*tasks], "tasks": known}
        claim_folder(folder, made, results=["seed-*.json"])
    sizes = [len(targets) for _, targets in data]
    wanted = set()
    for i, j in product(range(len(data)), repeat=2):
        wanted |= {(i,), _trained(i, j, sizes)}
    jobs = {}
    for seed, parts in product(seeds, sorted(wanted)):
        jobs[_name(seed, parts)] = union([arrays[i] for i in parts], seed)
    with shown(progress, "task_distance", len(jobs)) as tell:
        numbers = count(1)
        found = run_jobs(
            solve,
            jobs,
            folder=folder,
            executor=executor,
            workers=workers,
            on_done=lambda name, _: tell(next(numbers), len(jobs), name),
        )
    return DistanceMatrix(
        tuple(tasks),
        beta,
        tuple(sizes),
        tuple(seeds),
        *_measured(found, sizes, seeds),
    )


def _measured(
    found: Mapping[str, Numbers],
    sizes: list[int],
    seeds: list[int],
) -> tuple[Tensor, Tensor]:
    """Distances, and information in each task alone, from that in the parts of all trainings."""
    S, K = len(seeds), len(sizes)
    distances = torch.zeros(S, K, K, dtype=torch.float64)
    information = torch.zeros(S, K, dtype=torch.float64)
    for (s, seed), i, j in product(enumerate(seeds), range(K), range(K)):
        information[s, i] = sum(found[_name(seed, (i,))].values())
        parts = _trained(i, j, sizes)
        both = found[_name(seed, parts)]
        known = both["trunk"] + both[f"head_{parts.index(i)}"]
        distances[s, i, j] = known - information[s, i]
    return distances, information


def _trained(i: int, j: int, sizes: list[int]) -> tuple[int, int]:
    """Return which training serves a pair: tasks of one size have the same β either way, and are trained once."""
    if j < i and sizes[i] == sizes[j]:
        return j, i
    return i, j


def _name(seed: int, parts: tuple[int, ...]) -> str:
    return f"seed-{seed}_task-{'-'.join(map(str, parts))}"


def solve(union: Union) -> Numbers:
    """Train, and return the information in each part, in nats."""
    fit = union.fit()
    start = weights_now(fit.model)
    betas = union.betas()
    weights = {name: betas[name.split(".")[0]] for name in start}

    def penalty() -> Tensor:
        """What weights pay for leaving their start: their means' share of β times the divergence."""
        terms = []
        for name, p in trainable_parameters(fit.model).items():
            terms.append(weights[name] * (p - start[name]).square().sum())
        return torch.stack(terms).sum() / (2 * union.prior_std**2)

    fit.minimise(penalty, seed_from(union.seed, 2), noisy=False)
    F = fisher_diagonal(
        fit.model.eval(),
        fit.inputs,
        labels="exact",
        likelihood=union.likelihood,
        chunk_size=CHUNK,
    )
    kl = dict.fromkeys(betas, 0.0)
    for name, weight in weights_now(fit.model).items():
        found = information_in_weights(
            len(fit.targets) * F[name],
            weight - start[name],
            prior_std=union.prior_std,
            beta=weights[name],
        )
        kl[name.split(".")[0]] += found.kl.item()
    return kl


def _read(name: str, task: Data, likelihood: Likelihood) -> Pair:
    """Return inputs and targets of a task."""
    inputs, targets = read_task(task, likelihood, argument=f"tasks[{name!r}]")
    found = targets.unique()
    if not targets.is_floating_point() and len(found) and len(found) <= found.max():
        warn(
            f"Task {name!r} has no samples of some classes from 0 to {int(found.max())}; do its labels count from 1?"
        )
    return inputs, targets
