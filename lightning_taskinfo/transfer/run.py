"""Pretrain, fine-tune, compare with scratch, report."""

import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import numpy as np

from lightning_taskinfo._cells import check_executor, run_cells
from lightning_taskinfo._files import claim_folder
from lightning_taskinfo._lightning import DEFAULT, NAMESPACES
from lightning_taskinfo._progress import Progress
from lightning_taskinfo._warn import warn
from lightning_taskinfo.transfer.logs import LoggerKind, RunLog, following
from lightning_taskinfo.transfer.own import (
    OwnOptions,
    Planned,
    check_different,
    check_trainer,
    check_travels,
    plan_own,
    whole_numbers,
)
from lightning_taskinfo.transfer.ready.backbones import (
    Backbone,
    backbone_name,
    feature_dim,
    make_backbone,
)
from lightning_taskinfo.transfer.ready.data import TransferDataModule
from lightning_taskinfo.transfer.ready.methods import PENALTIES, Stage, check_weights, parse_method
from lightning_taskinfo.transfer.ready.stages import Cell, Experiment, Stages, onset_of, run_cell
from lightning_taskinfo.transfer.report import TransferReport
from lightning_taskinfo.transfer.results import Result
from lightning_taskinfo.transfer.sampling import generators_kept
from lightning_taskinfo.transfer.starts import MakeModule
from lightning_taskinfo.transfer.training import check_accelerator

Done = Callable[[Any, Mapping[str, Any]], None]
VERSION = (
    2  # of the files in a folder: raise it when the same configuration would give other numbers
)


def transfer(
    model: Backbone | MakeModule,
    data: Any,
    *,
    starts: Mapping[str, Any] | None = None,
    adapt: Sequence[Any] | str = ("full",),
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    trainer: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    methods: Sequence[str] | None = None,
    stages: Stages | None = None,
    weights: Mapping[str, float] | None = None,
    labels: Sequence[int] | int | None = None,
    seeds: Sequence[int] | int = 3,
    folder: str | os.PathLike[str] | None = None,
    logger: LoggerKind = "none",
    project: str = "lightning-taskinfo",
    name: str | None = None,
    executor: Executor | None = None,
    workers: int | None = 0,
    accelerator: str = "cpu",
    namespace: str = DEFAULT,
    progress: Progress | bool = True,
    on_done: Done | None = None,
) -> TransferReport:
    """Train on a few target labels from every start and from scratch, and report which start helps.

    With ``starts``, the module, the data and the starts are yours. Each start is adapted in every way, for every number
    of labels and seed, beside training your module from scratch. A seed decides the labelled samples, the fresh
    weights and the order of the batches, and is shared by all starts, so that they are compared in pairs.

    Without ``starts``, they are made here: for every method, a network is pretrained on the source of a
    :class:`TransferDataModule` beside unlabelled target inputs, gets a new head, and is fine-tuned on the target's
    labels by ``stages``.

    With a ``folder``, every run keeps its last finished epoch and its result there. A run that was killed goes on
    where it was and ends with the same numbers; a finished one is read, not repeated; starts, ways to adapt, methods,
    labels and seeds can be added; anything else that changes the numbers is refused, with what differs. Where it runs
    (processes, accelerator, namespace) and what it logs to may change.

    Args:
        model: With ``starts``: a function without arguments that makes your LightningModule, with its own optimizers
            and loss. Without: the backbone, a name in :data:`lightning_taskinfo.transfer.BACKBONES`, or a function (or
            class) at the top of a module that makes a network for an image shape.
        data: With ``starts``: the target, as a LightningDataModule, datasets ``{"train": …, "test": …}``, with
            ``"validation"`` or not, or arrays ``(inputs, targets)`` in place of a dataset. Labelled samples are chosen
            from its training set, in equal shares for the classes where targets are classes. Without: source and
            target, as a :class:`TransferDataModule`.
        starts: Starts by name: the path of a checkpoint or of a state dict, a state dict, or a function that makes a
            LightningModule of any architecture. A head that does not fit ``model`` is fresh.
        adapt: How starts are adapted: ``"full"``; ``"linear"``, the head alone; ``"lora"``, low-rank adapters, by peft;
            the name of a layer, which is frozen with all before it; or a function that freezes what it likes in the
            module it is given.
        metric: Name of a metric that the module logs in its ``test_step``; where ``None``, the error of its outputs on
            the test set, or their mean squared error where targets are real numbers.
        mode: Whether the metric is better lower, ``"min"``, or higher, ``"max"``; by its name where ``None``.
        trainer: Options of Lightning's Trainer, such as ``{"max_steps": 300}``; 20 epochs where there is no length.
        batch_size: Samples in a training batch; that of the data module, or 32, where ``None``.
        methods: Without ``starts``: see :class:`TransferClassifier`; ``["standard"]`` where ``None``.
        stages: Without ``starts``: how long and how each stage trains.
        weights: Without ``starts``: weights of the penalties by name, where not those of
            :data:`lightning_taskinfo.transfer.WEIGHTS`; of those too that are to be added later to the same ``folder``.
        labels: Numbers of target labels; all training samples, or that of ``data``, where ``None``.
        seeds: The seeds, or how many.
        folder: Where everything is kept; nowhere where ``None``. On several machines it must be a shared one, at the
            same path.
        logger: What each run logs to.
        project: Project in Weights & Biases.
        name: What to call the experiment: its title, and its group in Weights & Biases.
        executor: Runs the cells in other processes: a :class:`concurrent.futures.ProcessPoolExecutor`, or Dask's
            ``client.get_executor()`` with ``threads_per_worker=1``.
        workers: Processes of our own pool where there is no ``executor``; 0 for this process alone, ``None`` for as
            many as there are cores. A script that uses processes needs ``if __name__ == "__main__":``.
        accelerator: Lightning's accelerator of each cell, which has one device.
        namespace: ``"pytorch_lightning"`` or ``"lightning.pytorch"``; a module of your own has its own.
        progress: Whether to say how many runs there are, and to draw a bar where standard error is a terminal or a
            notebook, and write a line a training elsewhere; or a function, called with the number of finished
            trainings, their total and a label.
        on_done: Called with each finished training and its result.

    Returns:
        The report.

    Raises:
        ValueError: If an argument is out of range, the data or a start do not fit, a checkpoint in ``folder`` is
            damaged, or ``folder`` belongs to another configuration.
        RuntimeError: If a cell fails, with its name.

    Example::

        report = transfer(
            MyModule, target, starts={"mnist": "mnist.ckpt", "wiki": state_dict}, adapt=["full", "linear"],
            labels=[50, 200], seeds=5, metric="test_error", trainer={"max_steps": 300}, folder="runs/letters",
        )
        report.save("runs/letters/report")

        data = TransferDataModule("digits", "letters", labels=50)
        report = transfer("small_cnn", data, methods=["standard", "lautum"], seeds=3, folder="runs/ready")
    """
    if namespace not in NAMESPACES:
        raise ValueError(f"`namespace` must be one of {', '.join(NAMESPACES)}, got {namespace!r}.")
    check_executor(executor, workers)
    if (
        executor is None
    ):  # whose machines may have others; before a file is read, whose warnings are told once
        check_accelerator(accelerator, namespace)
    if folder is None and logger in ("csv", "wandb_offline"):
        raise ValueError(f"`folder` must be given for the files of `logger` {logger!r}, got None.")
    ready = {"methods": methods, "stages": stages, "weights": weights}
    own = {"metric": metric, "mode": mode, "trainer": trainer, "batch_size": batch_size}
    other, given = ("with", ready) if starts is not None else ("without", own)
    if unused := [argument for argument, value in given.items() if value is not None]:
        raise ValueError(
            f"`{unused[0]}` must be left out {other} `starts`, got {given[unused[0]]!r}."
        )
    if starts is None:
        grid = _Grid(("standard",) if methods is None else methods, labels, seeds, data)
        planned = _plan_ready(
            model, data, grid, stages or Stages(), weights or {}, namespace, accelerator
        )
    else:
        ways = [adapt] if isinstance(adapt, str) else list(adapt)
        options = OwnOptions(metric, mode, check_trainer(trainer or {}), batch_size, accelerator)
        planned = plan_own(
            cast(MakeModule, model), data, starts, ways, labels, _seeds(seeds), options
        )
    title = name or planned.title
    with TemporaryDirectory() as temporary:
        place = Path(
            temporary if folder is None else folder
        ).absolute()  # a worker's current folder is another
        group = (
            group_name(title, folder) if folder is not None else f"{title} {uuid.uuid4().hex[:6]}"
        )
        log = RunLog(logger, project, group, place / "logs", namespace)
        cells = planned.cells(place, log)
        if workers != 0 and executor is None:
            check_travels(cells)
        if progress is True:
            sys.stderr.write(
                f"transfer: {announced(len(cells), planned.seconds, workers, executor)}\n"
            )
        claim_folder(place, planned.configuration, results=["results/*", "stages/*"])
        for part, configuration in planned.parts.items():  # what may be added to, but not changed
            claim_folder(place / part, configuration)
        planned.store(place)
        with following([*cells.values()], progress) as finished:
            told = [finished, on_done] if on_done is not None else [finished]
            results = _run(cells, place, executor, workers, told)
    return TransferReport(planned.results(cells, results), planned.configuration, title)


def announced(
    runs: int, seconds: float | None, workers: int | None, executor: Executor | None
) -> str:
    """Return how many runs there are, and how long they may take.

    Example:
        >>> announced(24, 10.0, 2, None)
        '24 trainings of about 10 s, about 2 min in 2 processes'
    """
    if seconds is None:
        return f"{runs} trainings"
    each = f"{runs} trainings of about {max(1, round(seconds))} s"
    if executor is not None:
        return each
    count = 1 if workers == 0 else min(workers or os.cpu_count() or 1, runs)
    minutes = runs * seconds / count / 60
    long = f"{minutes:.0f} min" if minutes >= 1 else f"{60 * minutes:.0f} s"
    return f"{each}, about {long} in {count} process{'es' * (count > 1)}"


def _nothing(place: Path) -> None:
    """The ready parts have nothing to write before their runs."""


def _plan_ready(
    model: Any,
    data: TransferDataModule,
    grid: "_Grid",
    stages: Stages,
    weights: Mapping[str, float],
    namespace: str,
    accelerator: str,
) -> Planned:
    """The runs of the ready parts: starts are pretrained here."""
    grid.check_used(weights)
    all_weights = check_weights(weights)
    source, target = data.tasks()
    grid.check(data, model)
    configuration = {
        "version": VERSION,
        "backbone": backbone_name(model, argument="model"),
        "data": data.describe(),
        "stages": asdict(stages),
        "weights": all_weights,
    }

    def cells(place: Path, log: RunLog) -> dict[str, Any]:
        arguments = data.settled().arguments
        return grid.cells(
            Experiment(place, model, arguments, stages, all_weights, log, namespace, accelerator)
        )

    results = partial(_results, stages=stages)
    return Planned(
        f"{source.name} → {target.name}", configuration, {}, cells, _nothing, results, None
    )


def group_name(title: str, folder: str | os.PathLike[str]) -> str:
    """Return the group in Weights & Biases of an experiment and its folder.

    Args:
        title: Name of the experiment, such as that of its report.
        folder: Folder of the transfer.

    Example:
        >>> group_name("digits → letters", "runs/first")
        'digits → letters (first)'
    """
    return f"{title} ({Path(folder).absolute().name})"


class _Grid:
    """Methods, numbers of labels and seeds, checked."""

    def __init__(
        self, methods: Sequence[str], labels: Any, seeds: Any, data: TransferDataModule
    ) -> None:
        if not isinstance(data, TransferDataModule):
            raise TypeError(
                f"`data` must be a TransferDataModule where there are no `starts`, got a {type(data).__name__}; "
                "`starts` takes your own module, data and checkpoints."
            )
        if isinstance(methods, str):
            raise ValueError(
                f"`methods` must be a list of methods, got {methods!r}; one alone is [{methods!r}]."
            )
        self.methods = [method for method in dict.fromkeys(methods) if method != "scratch"]
        for method in self.methods:
            parse_method(method, argument="methods")
        rows = data.arguments["labels"]
        self.given_rows = not isinstance(rows, int)
        if self.given_rows and labels is not None:
            raise ValueError("`labels` must be left out where `data` names the labelled rows.")
        counts = (len(rows) if self.given_rows else rows) if labels is None else labels
        self.labels = whole_numbers(counts)
        self.seeds = _seeds(seeds)
        given: dict[str, list[Any]] = {"methods": self.methods, "labels": self.labels}
        for argument, values in given.items():
            check_different(argument, values)

    def check_used(self, weights: Mapping[str, float]) -> None:
        """Warn of weights that no method has a use for."""
        used = {penalty for method in self.methods for penalty in parse_method(method)}
        if unused := [
            penalty for penalty in weights if penalty in PENALTIES and penalty not in used
        ]:
            warn(
                f"`weights` of {', '.join(unused)} are not used by `methods` {', '.join(self.methods)}."
            )

    def check(self, data: TransferDataModule, model: Backbone) -> None:
        """Split for every number of labels and make a network, so that what cannot be is said before a file is made."""
        for count in self.labels:
            changes = {} if self.given_rows else {"labels": count}
            ready = data.replaced(seed=self.seeds[0], **changes)
            ready.setup()
        with generators_kept():
            network = make_backbone(model, ready.image_shape, argument="model")
            feature_dim(network, ready.image_shape, argument="model")

    def cells(self, experiment: Experiment) -> dict[str, Cell]:
        """All cells by name, pretraining and scratch first."""
        most = max(self.labels)
        cells = [
            Cell(experiment, "pretrain", method, most, seed)
            for seed in self.seeds
            for method in self.methods
        ]
        pairs = [(count, seed) for seed in self.seeds for count in self.labels]
        cells += [Cell(experiment, "scratch", "scratch", count, seed) for count, seed in pairs]
        cells += [
            Cell(experiment, "fine_tune", method, n, seed)
            for n, seed in pairs
            for method in self.methods
        ]
        return {cell.name: cell for cell in cells}


def _seeds(given: Any) -> list[int]:
    """The seeds, or as many as asked for."""
    if np.ndim(given) == 0 and given < 1:
        raise ValueError(f"`seeds` must be at least 1, got {given}.")
    seeds = list(range(given)) if np.ndim(given) == 0 else whole_numbers(given)
    if odd := [seed for seed in seeds if not 0 <= seed < 2**32]:
        raise ValueError(f"`seeds` must be between 0 and 2**32 - 1, got {odd[0]}.")
    check_different("seeds", seeds)
    return seeds


def _run(
    cells: Mapping[str, Any],
    place: Path,
    executor: Executor | None,
    workers: int | None,
    told: Sequence[Done],
) -> dict[str, Any]:
    """Run what needs nothing first, then what starts from it; a finished stage's checkpoints are not needed."""

    def done(name: str, result: Any) -> None:
        for checkpoint in cells[name].folder.glob("last.ckpt*"):
            checkpoint.unlink(missing_ok=True)
        for tell in told:
            tell(cells[name], result)

    _forget_lost(cells)
    results: dict[str, Any] = {}
    for stages in (("pretrain", "scratch"), ("fine_tune",)):
        wave = {name: cell for name, cell in cells.items() if cell.stage in stages}
        if not wave:
            continue
        options: dict[str, Any] = {
            "folder": place / "results",
            "executor": executor,
            "workers": workers,
        }
        results |= run_cells(run_cell, wave, on_done=done, **options)
    return results


def _forget_lost(cells: Mapping[str, Any]) -> None:
    """Let a pretraining be done again whose weights are gone while a stage still has to start from them."""
    for cell in cells.values():
        if cell.source is None or cell.stage != "fine_tune":
            continue
        unfinished = not cell.experiment.result(cell.name).exists()
        if unfinished and not (cell.source.folder / "weights.pt").exists():
            cell.experiment.result(cell.source.name).unlink(missing_ok=True)


def _results(
    cells: Mapping[str, Cell], found: Mapping[str, Any], *, stages: Stages
) -> list[Result]:
    """One result for every method, number of labels and seed."""
    scratch = [cell for cell in cells.values() if cell.stage == "scratch"]
    results = []
    for name, cell in cells.items():
        if cell.stage == "pretrain":
            continue
        curve = {c.labels: found[c.name]["missed_share"] for c in scratch if c.seed == cell.seed}
        results.append(_result(cell, found[name], found.get(cell.source.name), curve, stages))
    return results


def _result(
    cell: Cell, own: Any, source: Any, scratch: Mapping[int, float], stages: Stages
) -> Result:
    pretrained = cell.stage == "fine_tune"
    parts: list[tuple[Stage, Any]] = [("pretrain", source)] if pretrained else []
    parts.append((cell.stage, own))
    overlap = own["overlap"]
    if overlap is not None:
        overlap = {**overlap, "onset": onset_of(overlap, cell.labels, scratch)}
    last = own["curve"][-1]
    return Result(
        cell.method,
        cell.labels,
        cell.seed,
        test=own["test"],
        validation={key: last[f"val_{key}"] for key in ("accuracy", "loss")}
        if "val_loss" in last
        else None,
        source=source["source"] if pretrained else None,
        curves=[_curve_row(stage, row) for stage, result in parts for row in result["curve"]],
        information=own["information"],
        fisher_trace=own["fisher_trace"],
        overlap=overlap,
        epochs={stage: stages.epochs(stage) for stage, _ in parts},
        seconds={stage: result["seconds"] for stage, result in parts},
    )


def _curve_row(stage: str, row: Mapping[str, float]) -> dict[str, Any]:
    kept = {
        key: row[key] for key in ("epoch", "train_loss", "val_loss", "val_accuracy") if key in row
    }
    return {"stage": stage, **kept}
