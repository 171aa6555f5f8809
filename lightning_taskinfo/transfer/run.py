"""Pretrain, fine-tune, compare with scratch, report."""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lightning_taskinfo._arguments import checked_arguments
from lightning_taskinfo._cells import check_executor, run_cells
from lightning_taskinfo._files import claim_folder
from lightning_taskinfo._lightning import DEFAULT, NAMESPACES
from lightning_taskinfo._progress import Progress
from lightning_taskinfo._warn import warn
from lightning_taskinfo.transfer._progress import following
from lightning_taskinfo.transfer.backbones import Backbone, backbone_name, feature_dim, make_backbone
from lightning_taskinfo.transfer.data import TransferDataModule
from lightning_taskinfo.transfer.measure import onset_of
from lightning_taskinfo.transfer.methods import PENALTIES, Stage, check_weights, parse_method
from lightning_taskinfo.transfer.report import TransferReport
from lightning_taskinfo.transfer.runlog import LoggerKind, RunLog
from lightning_taskinfo.transfer.sampling import generators_kept
from lightning_taskinfo.transfer.stages import Cell, Experiment, Stages, run_cell
from lightning_taskinfo.transfer.training import check_accelerator

Done = Callable[[Cell, Mapping[str, Any]], None]
VERSION = 2  # of the files in a folder: raise it when the same configuration would give other numbers


@checked_arguments
def transfer(
    model: Backbone,
    data: TransferDataModule,
    *,
    methods: Sequence[str] = ("standard",),
    labels: Sequence[int] | int | None = None,
    seeds: Sequence[int] | int = 3,
    stages: Stages | None = None,
    weights: Mapping[str, float] | None = None,
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
    """Pretrain on the source, fine-tune on the target, train from scratch beside it, and report whether it helped.

    For every method, number of labels and seed: a network is pretrained on the labelled source beside unlabelled target
    inputs, gets a new head, and is fine-tuned on the target's labels. Training from scratch starts from the same
    initial weights, with the same labels and the same number of steps. A seed decides split, initial weights and order,
    and is shared by all methods, so that they are compared in pairs.

    With a ``folder``, every stage keeps its last finished epoch and its result there. A run that was killed goes on
    where it was and ends with the same numbers; a finished one is read, not repeated; methods, labels and seeds
    can be added; anything else that changes the numbers is refused, with what differs. Where it runs (processes,
    accelerator, namespace) and what it logs to may change.

    Args:
        model: The backbone: a name in :data:`lightning_taskinfo.transfer.BACKBONES`, or a function (or class) at the
            top of a module that makes a network for an image shape.
        data: Source and target.
        methods: See :class:`TransferClassifier`. ``"scratch"`` is always run.
        labels: Numbers of target labels; that of ``data`` where ``None``.
        seeds: The seeds, or how many.
        stages: How long and how each stage trains.
        weights: Weights of the penalties by name, where not those of :data:`lightning_taskinfo.transfer.WEIGHTS`; of
            those too that are to be added later to the same ``folder``.
        folder: Where everything is kept; nowhere where ``None``. On several machines it must be a shared one, at the
            same path.
        logger: What each run logs to.
        project: Project in Weights & Biases.
        name: What to call the experiment: its title, and its group in Weights & Biases. Source → target where ``None``.
        executor: Runs the cells in other processes: a :class:`concurrent.futures.ProcessPoolExecutor`, or Dask's
            ``client.get_executor()`` with ``threads_per_worker=1``.
        workers: Processes of our own pool where there is no ``executor``; 0 for this process alone, ``None`` for as
            many as there are cores. A script that uses processes needs ``if __name__ == "__main__":``.
        accelerator: Lightning's accelerator of each cell, which has one device.
        namespace: ``"pytorch_lightning"`` or ``"lightning.pytorch"``.
        progress: Whether to draw a bar where standard error is a terminal or a notebook, and write a line a training
            elsewhere; or a function, called with the number of finished trainings, their total and a label.
        on_done: Called with each finished training and its result.

    Returns:
        The report.

    Raises:
        ValueError: If an argument is out of range, the data do not fit, a checkpoint in ``folder`` is damaged, or
            ``folder`` belongs to another configuration.
        RuntimeError: If a cell fails, with its name.

    Example::

        data = TransferDataModule("digits", "letters", labels=50)
        report = transfer("small_cnn", data, methods=["standard", "lautum"], seeds=3, folder="runs/letters")
        report.save("runs/letters/report")
    """
    grid = _Grid(methods, labels, seeds, data)
    if namespace not in NAMESPACES:
        raise ValueError(f"`namespace` must be one of {', '.join(NAMESPACES)}, got {namespace!r}.")
    check_executor(executor, workers)
    if executor is None:  # whose machines may have others; before a file is read, whose warnings are told once
        check_accelerator(accelerator, namespace)
    grid.check_used(weights or {})
    stages, weights = stages or Stages(), check_weights(weights or {})
    source, target = data.tasks()
    title = name or f"{source.name} → {target.name}"
    if folder is None and logger in ("csv", "wandb_offline"):
        raise ValueError(f"`folder` must be given for the files of `logger` {logger!r}, got None.")
    grid.check(data, model)
    configuration = {
        "version": VERSION,
        "backbone": backbone_name(model, argument="model"),
        "data": data.describe(),
        "stages": asdict(stages),
        "weights": weights,
    }
    with TemporaryDirectory() as temporary:
        place = Path(temporary if folder is None else folder).absolute()  # a worker's current folder is another
        group = group_name(title, folder) if folder is not None else f"{title} {uuid.uuid4().hex[:6]}"
        log = RunLog(logger, project, group, place / "logs", namespace)
        claim_folder(place, configuration, results=["results/*", "stages/*"])
        experiment = Experiment(place, model, data.settled().arguments, stages, weights, log, namespace, accelerator)
        cells = grid.cells(experiment)
        with following([*cells.values()], progress) as finished:
            told = [finished, on_done] if on_done is not None else [finished]
            results = _run(cells, place, executor, workers, told)
    return TransferReport(_rows(cells, results, stages), configuration, title)


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

    def __init__(self, methods: Sequence[str], labels: Any, seeds: Any, data: TransferDataModule) -> None:
        if isinstance(methods, str):
            raise ValueError(f"`methods` must be a list of methods, got {methods!r}; one alone is [{methods!r}].")
        self.methods = [method for method in dict.fromkeys(methods) if method != "scratch"]
        for method in self.methods:
            parse_method(method, argument="methods")
        rows = data.arguments["labels"]
        self.given_rows = not isinstance(rows, int)
        if self.given_rows and labels is not None:
            raise ValueError("`labels` must be left out where `data` names the labelled rows.")
        counts = (len(rows) if self.given_rows else rows) if labels is None else labels
        self.labels = _whole_numbers(counts)
        if np.ndim(seeds) == 0 and seeds < 1:
            raise ValueError(f"`seeds` must be at least 1, got {seeds}.")
        self.seeds = list(range(seeds)) if np.ndim(seeds) == 0 else _whole_numbers(seeds)
        if any(seed < 0 for seed in self.seeds):
            raise ValueError(f"`seeds` must not be negative, got {min(self.seeds)}.")
        given: dict[str, list[Any]] = {"methods": self.methods, "labels": self.labels, "seeds": self.seeds}
        for argument, values in given.items():
            if not values:
                raise ValueError(f"`{argument}` must not be empty{' beside scratch' * (argument == 'methods')}.")
            if len({*values}) < len(values):
                raise ValueError(f"`{argument}` must not repeat a value, got {values}.")

    def check_used(self, weights: Mapping[str, float]) -> None:
        """Warn of weights that no method has a use for."""
        used = {penalty for method in self.methods for penalty in parse_method(method)}
        if unused := [penalty for penalty in weights if penalty in PENALTIES and penalty not in used]:
            warn(f"`weights` of {', '.join(unused)} are not used by `methods` {', '.join(self.methods)}.")

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
        cells = [Cell(experiment, "pretrain", method, most, seed) for seed in self.seeds for method in self.methods]
        pairs = [(count, seed) for seed in self.seeds for count in self.labels]
        cells += [Cell(experiment, "scratch", "scratch", count, seed) for count, seed in pairs]
        cells += [Cell(experiment, "fine_tune", method, n, seed) for n, seed in pairs for method in self.methods]
        return {cell.name: cell for cell in cells}


def _whole_numbers(given: Any) -> list[int]:
    """One number or several as a list of Python's own, which names of files and JSON know."""
    return [int(given)] if np.ndim(given) == 0 else [int(number) for number in given]


def _run(
    cells: Mapping[str, Cell], place: Path, executor: Executor | None, workers: int | None, told: Sequence[Done]
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
        options: dict[str, Any] = {"folder": place / "results", "executor": executor, "workers": workers}
        results |= run_cells(run_cell, wave, on_done=done, **options)
    return results


def _forget_lost(cells: Mapping[str, Cell]) -> None:
    """Let a pretraining be done again whose weights are gone while a stage still has to start from them."""
    for cell in cells.values():
        unfinished = cell.stage == "fine_tune" and not cell.experiment.result(cell.name).exists()
        if unfinished and not (cell.source.folder / "weights.pt").exists():
            cell.experiment.result(cell.source.name).unlink(missing_ok=True)


def _rows(cells: Mapping[str, Cell], results: Mapping[str, Any], stages: Stages) -> list[dict[str, Any]]:
    """One row for every method, number of labels and seed, as the report takes it."""
    scratch = [cell for cell in cells.values() if cell.stage == "scratch"]
    rows = []
    for name, cell in cells.items():
        if cell.stage == "pretrain":
            continue
        curve = {c.labels: results[c.name]["missed_share"] for c in scratch if c.seed == cell.seed}
        rows.append(_row(cell, results[name], results.get(cell.source.name), curve, stages))
    return rows


def _row(cell: Cell, own: Any, source: Any, scratch: Mapping[int, float], stages: Stages) -> dict[str, Any]:
    pretrained = cell.stage == "fine_tune"
    parts: list[tuple[Stage, Any]] = [("pretrain", source)] if pretrained else []
    parts.append((cell.stage, own))
    overlap = own["overlap"]
    if overlap is not None:
        overlap = {**overlap, "onset": onset_of(overlap, cell.labels, scratch)}
    last = own["curve"][-1]
    return {
        "method": cell.method,
        "labels": cell.labels,
        "seed": cell.seed,
        "test": own["test"],
        "validation": {key: last.get(f"val_{key}") for key in ("accuracy", "loss")} if "val_loss" in last else None,
        "source": source["source"] if pretrained else None,
        "curves": [_curve_row(stage, row) for stage, result in parts for row in result["curve"]],
        "information": own["information"],
        "fisher_trace": own["fisher_trace"],
        "overlap": overlap,
        "epochs": {stage: stages.epochs(stage) for stage, _ in parts},
        "seconds": {stage: result["seconds"] for stage, result in parts},
    }


def _curve_row(stage: str, row: Mapping[str, float]) -> dict[str, Any]:
    kept = {key: row[key] for key in ("epoch", "train_loss", "val_loss", "val_accuracy") if key in row}
    return {"stage": stage, **kept}
