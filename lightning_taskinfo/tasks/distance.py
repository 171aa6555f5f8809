"""How far is it from one task to another? What a network must learn in addition, in nats; not symmetric."""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from itertools import count, product
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from lightning_taskinfo._cells import check_executor, run_cells
from lightning_taskinfo._files import claim_folder
from lightning_taskinfo._progress import Progress, shown
from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo._warn import warn
from lightning_taskinfo.certificates.samples import Data, read_tensors
from lightning_taskinfo.functional.likelihood import Likelihood, as_likelihood
from lightning_taskinfo.tasks._pairs import Cell, HeadFn, Method, Plan, solve
from lightning_taskinfo.tasks._sweep import digest, network_digest
from lightning_taskinfo.tasks.matrix import DistanceMatrix
from lightning_taskinfo.tasks.training import ModelFn, Training


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
    folder: str | os.PathLike[str] | None = None,
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
        executor: Where trainings run, see :func:`~lightning_taskinfo._cells.run_cells`.
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
    seeds = range(seeds) if isinstance(seeds, int | np.integer) else [int(seed) for seed in seeds]
    _check(tasks, beta, prior_center, prior_std, method, seeds)
    check_executor(executor, workers)
    data = [_read(name, task) for name, task in tasks.items()]
    if executor is None and workers != 0:  # an executor may have ways of its own, as Dask has
        _check_travels(trunk_fn=trunk_fn, head_fn=head_fn)
    plan = Plan(
        trunk_fn,
        head_fn,
        method,
        beta,
        prior_center,
        prior_std,
        as_likelihood(likelihood),
        training or Training(),
    )
    for one in data:  # here and now, where an error is seen as it is
        cell = Cell.of(plan, [one], seeds[0])
        cell.samples().check(cell.model())
    if folder is not None:
        claim_folder(folder, _configuration(plan, tasks, data), results=["seed-*.json"])
    sizes = [len(targets) for _, targets in data]
    wanted = {(seed, _trained(parts, sizes)) for seed in seeds for parts in _pairs(len(data))}
    cells = {
        _name(seed, parts): Cell.of(plan, [data[i] for i in parts], seed)
        for seed, parts in sorted(wanted)
    }
    with shown(progress, "task_distance", len(cells)) as tell:
        counting = _counting(tell, len(cells))
        found = run_cells(
            solve, cells, folder=folder, executor=executor, workers=workers, on_done=counting
        )
    by_seed = [
        _distances(sizes, {parts: found[_name(s, parts)] for s, parts in wanted if s == seed})
        for seed in seeds
    ]
    measured = {
        key: torch.tensor([one[key] for one in by_seed], dtype=torch.float64) for key in by_seed[0]
    }
    return DistanceMatrix(tuple(tasks), method, beta, tuple(sizes), tuple(seeds), **measured)


def _read(name: str, task: Data) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a task."""
    inputs, targets = read_tensors(task, argument=f"tasks[{name!r}]")
    found = targets.unique()
    if not targets.is_floating_point() and len(found) and len(found) <= found.max():
        warn(
            f"Task {name!r} has no samples of some classes from 0 to {int(found.max())}; do its labels count from 1?"
        )
    return inputs, targets


def _check_travels(**functions: Callable[..., Any]) -> None:
    """Raise a ``ValueError`` for functions that other processes cannot import, before anything is trained."""
    for argument, function in functions.items():
        try:
            pickle.dumps(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            wanted = "a function at the top of a module, or `workers` 0"
            raise ValueError(
                f"`{argument}` must be {wanted}, got {function!r}, which cannot be pickled."
            ) from error


def _distances(sizes: list[int], found: Mapping[tuple[int, ...], Any]) -> dict[str, Any]:
    """Distances, new heads, and information and objective of each task alone, for one seed."""
    K = len(sizes)
    alone = [found[i,] for i in range(K)]
    information = [cell["kl"]["trunk"] + cell["kl"]["heads.0"] for cell in alone]
    distances, new_head = ([[0.0] * K for _ in range(K)] for _ in range(2))
    for i, j in product(range(K), repeat=2):
        parts = _trained((i, j), sizes)
        kl = found[parts]["kl"]
        known = parts.index(i)
        distances[i][j] = kl["trunk"] + kl[f"heads.{known}"] - information[i]
        new_head[i][j] = kl[f"heads.{1 - known}"]
    objective = [cell["objective"] for cell in alone]
    return {
        "distances": distances,
        "new_head": new_head,
        "information": information,
        "objective": objective,
    }


def _pairs(K: int) -> list[tuple[int, ...]]:
    """Every task alone, and every ordered pair."""
    return [*((i,) for i in range(K)), *product(range(K), repeat=2)]


def _trained(parts: tuple[int, ...], sizes: list[int]) -> tuple[int, ...]:
    """Return which training serves a pair: tasks of one size have the same β either way, and are trained once."""
    return tuple(sorted(parts)) if len({sizes[i] for i in parts}) == 1 else parts


def _name(seed: int, parts: tuple[int, ...]) -> str:
    return f"seed-{seed}_task-{'-'.join(map(str, parts))}"


def _counting(progress: Progress | None, total: int) -> Callable[[str, Any], None] | None:
    if progress is None:
        return None
    numbers = count(1)
    return lambda name, _: progress(next(numbers), total, name)


def _configuration(
    plan: Plan, tasks: Mapping[str, Data], data: list[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    """What decides the numbers of a cell; not the seeds, so that more of them can be added."""
    values: dict[str, Any] = {
        "method": plan.method,
        "beta": plan.beta,
        "prior_center": plan.prior_center,
        "prior_std": plan.prior_std,
    }
    values |= {"likelihood": repr(plan.likelihood), "training": asdict(plan.training)}
    first = Cell.of(plan, data[:1], 0)
    values |= {"network": network_digest(first.model(), first.samples().inputs)}
    return {**values, "tasks": {name: digest(pair) for name, pair in zip(tasks, data, strict=True)}}


def _check(
    tasks: Mapping[str, Data],
    beta: float,
    prior_center: str,
    prior_std: float,
    method: str,
    seeds: Sequence[int],
) -> None:
    if not tasks:
        raise ValueError("`tasks` must hold at least one task, got none.")
    check_positive(beta=beta, prior_std=prior_std)
    if method not in get_args(Method):
        raise ValueError(f"`method` must be one of {', '.join(get_args(Method))}, got {method!r}.")
    if prior_center not in ("initial", "zero"):
        raise ValueError(f"`prior_center` must be 'initial' or 'zero', got {prior_center!r}.")
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"`seeds` must be different numbers, at least one, got {list(seeds)}.")
