"""Runs with the user's own module: from each start, adapted in each way, on a few labels of the target."""

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_taskinfo._batches import outputs_of, read_batch, take
from lightning_taskinfo._files import write_tensors
from lightning_taskinfo._lightning import NAMESPACES, Callback
from lightning_taskinfo._observe import observing
from lightning_taskinfo.transfer.adapt import Adapt, adapted, check_way, way_name
from lightning_taskinfo.transfer.logs import RunLog
from lightning_taskinfo.transfer.results import Result
from lightning_taskinfo.transfer.sampling import Rows, generators_kept
from lightning_taskinfo.transfer.starts import (
    SCRATCH,
    Given,
    MakeModule,
    Start,
    make_module,
    read_start,
)
from lightning_taskinfo.transfer.target import Target, chosen_rows, read_target
from lightning_taskinfo.transfer.training import fit_stage, make_trainer, quiet

VERSION = (
    1  # of the files in a folder: raise it when the same configuration would give other numbers
)
STREAM = 5  # of random numbers
OWN_METRICS = {False: "error", True: "squared error"}  # by whether targets are real numbers
TRIED = 3  # training steps to estimate a time from
RESERVED = (
    "logger",
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
    "default_root_dir",
)


@dataclass(frozen=True)
class OwnPlan:
    """All that the runs of one transfer share.

    Attributes:
        folder: Where runs keep their files.
        starts: The starts by name, scratch first.
        ways: The ways to adapt by name.
        target: The target data.
        rows: By seed, rows of training samples: the first ``n`` are the labelled ones.
        metric: Name of the logged test metric; ``None`` for the error of the outputs.
        trainer: Options of Lightning's Trainer.
        log: Where a run's metrics go.
        accelerator: Where to train.
    """

    folder: Path
    starts: Mapping[str, Start]
    ways: Mapping[str, Adapt]
    target: Target
    rows: Mapping[int, Rows]
    metric: str | None
    trainer: Mapping[str, Any]
    log: RunLog = field(default_factory=RunLog)
    accelerator: str = "cpu"

    def cells(self, labels: Sequence[int]) -> dict[str, "OwnCell"]:
        """Return all runs by name: scratch in full, the others in every way."""
        pairs = [(name, way) for name in self.starts if name != SCRATCH for way in self.ways]
        cells = [
            OwnCell(self, start, way, count, seed)
            for seed in self.rows
            for count in labels
            for start, way in [(SCRATCH, "full"), *pairs]
        ]
        return {cell.name: cell for cell in cells}


@dataclass(frozen=True)
class OwnCell:
    """One run: a start, a way to adapt it, a number of labels and a seed."""

    plan: OwnPlan
    start: str
    way: str
    labels: int
    seed: int

    stage = "fine_tune"
    source = None
    epochs = 1

    @property
    def name(self) -> str:
        """A name that is good for a file."""
        return f"{self.start}-{self.way}-{self.labels}-seed{self.seed}"

    @property
    def method(self) -> str:
        """What the report calls it."""
        if self.start == SCRATCH or len(self.plan.ways) == 1:
            return self.start
        return f"{self.start}, {self.way}"

    @property
    def description(self) -> str:
        """What it is, in words."""
        return f"{self.start}, {self.way}, {self.labels} labels, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.plan.folder / "stages" / self.name

    def module(self) -> Any:
        """Return the module, ready to be trained."""
        start = self.plan.starts[self.start]
        way = "full" if self.start == SCRATCH else self.plan.ways[self.way]
        return adapted(start.module(self.seed), way, start.fresh)

    def loaders(self) -> dict[str, Any]:
        """Return the loaders of the training."""
        target = self.plan.target
        rows = self.plan.rows[self.seed][: self.labels]
        loaders: dict[str, Any] = {"train_dataloaders": target.train_loader(rows, self.seed)}
        validation = target.validation_loader()
        if validation is not None and _validates(self.plan.trainer):
            loaders["val_dataloaders"] = validation
        return loaders

    def run(self) -> dict[str, Any]:
        """Train, test, and return the result in JSON-like values; files of a killed run are continued from."""
        begun = time.perf_counter()
        module = self.module()
        settings = {
            "start": self.start,
            "adapt": self.way,
            "labels": self.labels,
            "seed": self.seed,
        }
        loader = self.plan.target.test_loader()
        with self.plan.log.run(self.name, settings, (), own_module=False) as run:
            fitted = fit_stage(
                module,
                folder=self.folder,
                seeds=(self.seed, STREAM),
                fit=self.loaders(),
                test={"dataloaders": loader} if self.plan.metric else None,
                options=_options(self.plan, logger=run.logger),
                namespace=namespace_of(module),
                lean=True,
            )
            test = (
                {self.plan.metric: fitted.test[self.plan.metric]}
                if self.plan.metric
                else own_error(module, loader)
            )
            run.log({f"target/{name}": value for name, value in test.items()})
            run.end(fitted.curve)
        trained = {
            name: p.detach().cpu() for name, p in module.named_parameters() if p.requires_grad
        }
        write_tensors(self.folder / "weights.pt", trained)
        return {
            "test": test,
            "curve": fitted.curve,
            "trained": sum(p.numel() for p in trained.values()),
            "seconds": time.perf_counter() - begun,
        }


class Planned(NamedTuple):
    """What is to be run.

    Attributes:
        title: What to call it.
        configuration: What decides the numbers.
        parts: The same of what can be added to: configurations by a folder for each.
        cells: Makes the runs by name for a folder and a log.
        store: Writes what all runs read into a folder.
        results: Makes the results of a report of runs and what they returned.
        seconds: Estimate of the time of a run, if there is one.
    """

    title: str
    configuration: dict[str, Any]
    parts: dict[str, dict[str, Any]]
    cells: Callable[[Path, RunLog], dict[str, Any]]
    store: Callable[[Path], None]
    results: Callable[[Mapping[str, Any], Mapping[str, Any]], list[Result]]
    seconds: float | None


@dataclass(frozen=True)
class OwnOptions:
    """What decides how the user's module is trained and tested; arguments of :func:`transfer`."""

    metric: str | None
    mode: str | None
    trainer: Mapping[str, Any]
    batch_size: int | None
    accelerator: str


def plan_own(
    make: MakeModule,
    data: Any,
    starts: Mapping[str, Given],
    ways: Sequence[Adapt],
    labels: Sequence[int] | int | None,
    seeds: Sequence[int],
    options: OwnOptions,
) -> Planned:
    """Read starts, ways to adapt and data, and see that they fit and can be trained, before anything is written.

    Raises:
        ValueError: If something does not fit.
    """
    if isinstance(make, str) or not callable(make):
        raise TypeError(
            f"`model` must be a function that makes your LightningModule beside `starts`, got {make!r}."
        )
    target = read_target(data, options.batch_size)
    counts = whole_numbers(len(target.train) if labels is None else labels)
    check_different("labels", counts)
    with generators_kept():
        read = _read_starts(make, starts)
        named = _checked_ways(ways, [start for name, start in read.items() if name != SCRATCH])
        found, fingerprint = target.labels()
        rows = {seed: chosen_rows(found, len(target.train), counts, seed) for seed in seeds}
        module = read[SCRATCH].module(0)
        parts = {f"starts/{name}": {"weights": start.digest()} for name, start in read.items()}
    settings = (options.metric, options.trainer)
    plan = OwnPlan(Path(), read, named, target, rows, *settings, accelerator=options.accelerator)
    metric, seconds = try_out(plan, max(counts))
    configuration = {
        "version": VERSION,
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "data": {"training": fingerprint, "samples": len(target.train), "test": len(target.test)},
        "batch_size": target.batch_size,
        "trainer": {name: _plain(value) for name, value in options.trainer.items()},
        "metric": metric,
        "mode": options.mode,
    }

    def cells(place: Path, log: RunLog) -> dict[str, Any]:
        own_log = replace(log, namespace=namespace_of(module))
        stored = {name: start.stored(place / "starts" / name) for name, start in read.items()}
        return replace(plan, folder=place, starts=stored, log=own_log).cells(counts)

    def store(place: Path) -> None:
        for name, start in read.items():
            path = place / "starts" / name / "weights.pt"
            if start.weights and not path.exists():
                write_tensors(path, start.weights)

    return Planned(
        f"{type(module).__name__} from {', '.join(starts)}",
        configuration,
        parts,
        cells,
        store,
        _results,
        seconds,
    )


def _read_starts(make: MakeModule, starts: Mapping[str, Given]) -> dict[str, Start]:
    """Scratch, and the user's starts."""
    if not starts:
        raise ValueError("`starts` must hold at least one start beside scratch, got none.")
    for name in starts:
        if name == SCRATCH or not name or not {*name} <= _PLAIN:
            rule = "names of letters, digits, dots, dashes and underscores other than 'scratch'"
            raise ValueError(f"`starts` must have {rule}, got {name!r}.")
    make_module(make, argument="model")
    return {
        SCRATCH: Start(SCRATCH, make, {}),
        **{name: read_start(name, starts[name], make) for name in starts},
    }


def _checked_ways(ways: Sequence[Adapt], starts: Sequence[Start]) -> dict[str, Adapt]:
    """Ways to adapt by name, each tried on each start."""
    named = {way_name(way): way for way in ways}
    if not named or len(named) < len(ways):
        raise ValueError(
            f"`adapt` must be at least one way, each once, got {[way_name(way) for way in ways]}."
        )
    for start in starts:
        for way in named.values():
            module = start.module(0)
            check_way(way, module)
            adapted(module, way, start.fresh)
    return named


def _results(cells: Mapping[str, OwnCell], found: Mapping[str, Any]) -> list[Result]:
    """One result for every run."""
    return [
        Result(
            cell.method,
            cell.labels,
            cell.seed,
            found[name]["test"],
            curves=[{"stage": cell.stage, **point} for point in found[name]["curve"]],
            seconds={cell.stage: found[name]["seconds"]},
        )
        for name, cell in cells.items()
    ]


def whole_numbers(given: Any) -> list[int]:
    """One number or several as a list of Python's own, which names of files and JSON know."""
    return [int(given)] if np.ndim(given) == 0 else [int(number) for number in given]


def check_different(argument: str, values: Sequence[Any]) -> None:
    """Raise a ``ValueError`` for an empty list, or one that repeats a value."""
    if not values:
        raise ValueError(
            f"`{argument}` must not be empty{' beside scratch' * (argument == 'methods')}."
        )
    if len({*values}) < len(values):
        raise ValueError(f"`{argument}` must not repeat a value, got {list(values)}.")


def _plain(value: Any) -> Any:
    return (
        value if isinstance(value, str | int | float | bool) or value is None else repr(type(value))
    )


_PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def try_out(plan: OwnPlan, labels: int) -> tuple[str, float]:
    """Train a run for a few steps and test it on one batch.

    Returns:
        Name of the metric, and an estimate of the seconds of one run.

    Raises:
        ValueError: If the module does not log the metric, or training fails.
    """
    cell = OwnCell(plan, [*plan.starts][-1], next(iter(plan.ways)), labels, next(iter(plan.rows)))
    with generators_kept(), quiet():
        module = cell.module()
        loaders = cell.loaders()
        options = _options(plan, logger=False)
        steps, epochs = options.get("max_steps", -1), options.get("max_epochs")
        options |= {
            "max_steps": TRIED,
            "max_epochs": -1,
            "limit_test_batches": 1,
            "limit_val_batches": 0,
        }
        clock = Clock()
        trainer = make_trainer(
            namespace_of(module), {**options, "callbacks": [*options["callbacks"], clock]}
        )
        loader = plan.target.test_loader()
        try:
            trainer.fit(module, train_dataloaders=loaders["train_dataloaders"])
            begun = time.perf_counter()
            if plan.metric:
                logged = trainer.test(module, dataloaders=loader, verbose=False)[0]
            else:
                logged = own_error(module, loader, 1)
            test = (time.perf_counter() - begun) * max(1, len(loader))
        except ValueError:
            raise
        except Exception as error:  # of the user's own module
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ValueError(
                f"`model` must make a module that can be trained on `data`, but {reason}"
            ) from error
        if plan.metric and plan.metric not in logged:
            raise ValueError(
                f"`metric` must be one that the module logs in its test_step, got {plan.metric!r}; it logs "
                f"{', '.join(logged) or 'none'}."
            )
    wanted = steps if steps > 0 else (epochs or 1) * math.ceil(labels / plan.target.batch_size)
    return plan.metric or next(iter(logged)), wanted * clock.each + test


class Clock(Callback):
    """Takes the time from one training step to the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        """Look at the clock."""
        self.ends.append(time.perf_counter())

    @property
    def each(self) -> float:
        """Seconds of a step, without those of the first, which prepares."""
        return (self.ends[-1] - self.ends[0]) / max(1, len(self.ends) - 1)


@torch.no_grad()
def own_error(module: Any, loader: DataLoader[Any], batches: int | None = None) -> dict[str, float]:
    """Return the share of wrong classes on the test set, or the mean squared error where targets are real numbers.

    Raises:
        ValueError: If a batch cannot be read.
    """
    total = count = 0.0
    real = False
    with observing(module):
        for number, batch in enumerate(loader):
            if batches is not None and number >= batches:
                break
            batch = take(batch, lambda tensor: tensor.to(module.device))
            inputs, targets = read_batch(batch, module)
            if targets is None:
                raise ValueError(
                    "`metric` must be given where the targets of a test batch are not plain."
                )
            outputs = outputs_of(module, inputs)
            real = targets.is_floating_point()
            losses = _losses(outputs, targets, real=real)
            total += float(losses.sum())
            count += losses.numel()
    return {OWN_METRICS[real]: total / count}


def _losses(outputs: Tensor, targets: Tensor, *, real: bool) -> Tensor:
    if real:
        return (outputs.reshape(targets.shape) - targets).square().double()
    if outputs.ndim < 2 or outputs.ndim != targets.ndim + 1:
        raise ValueError(
            f"`metric` must be given where outputs are no scores of classes, got outputs {list(outputs.shape)} for "
            f"targets {list(targets.shape)}."
        )
    kept = targets >= 0  # -100 marks what does not count
    return (outputs.argmax(-1) != targets)[kept].double()


def namespace_of(module: Any) -> str:
    """Return whose LightningModule it is."""
    return next(
        name for name, space in NAMESPACES.items() if isinstance(module, space.LightningModule)
    )


def check_trainer(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the Trainer, with a length.

    Raises:
        ValueError: If one of them is ours to set.
    """
    if taken := [name for name in RESERVED if name in trainer]:
        raise ValueError(f"`trainer` must leave {taken[0]} to transfer, got {trainer[taken[0]]!r}.")
    length = {} if {"max_epochs", "max_steps", "max_time"} & {*trainer} else {"max_epochs": 20}
    return {**length, **trainer}


def check_travels(cells: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` for what other processes cannot import, before anything is trained."""
    try:
        pickle.dumps(next(iter(cells.values())))
    except Exception as error:  # what cannot be pickled says so in many ways
        raise ValueError(
            "`workers` must be 0 where `model`, a start, `adapt` or `data` cannot be pickled; functions and "
            f"classes at the top of a module can ({str(error).partition(chr(10))[0]})."
        ) from error


def _options(plan: OwnPlan, *, logger: Any) -> dict[str, Any]:
    options = {
        "accelerator": plan.accelerator,
        "devices": 1,
        "log_every_n_steps": 10,
        **plan.trainer,
    }
    if "max_steps" in options:
        options.setdefault("max_epochs", -1)
    options["callbacks"] = deepcopy(list(options.get("callbacks", [])))
    options["logger"] = logger or False
    return options


def _validates(trainer: Mapping[str, Any]) -> bool:
    """Whether the user asked for validation: epochs of a few labels are too short for it to be the default."""
    return bool({"limit_val_batches", "check_val_every_n_epoch", "val_check_interval"} & {*trainer})
