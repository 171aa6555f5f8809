"""The user's own recipe: their module, from each of their starts, adapted in each way, on a few target labels."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_taskinfo._batches import moved, outputs_of, read_batch
from lightning_taskinfo._batches.hugging_face import IGNORED
from lightning_taskinfo._files import write_tensors
from lightning_taskinfo._lightning import NAMESPACES, Callback
from lightning_taskinfo._observe import observing, trainable_parameters
from lightning_taskinfo.transfer.adapt import Adapt, adapted, check_way, way_name
from lightning_taskinfo.transfer.cells import SCRATCH, Cell, Job, Recipe
from lightning_taskinfo.transfer.certified import Certified, check_classes, start_prior
from lightning_taskinfo.transfer.logs import RunLog
from lightning_taskinfo.transfer.sampling import Rows, generators_kept
from lightning_taskinfo.transfer.starts import Given, MakeModule, Start, make_module, read_start
from lightning_taskinfo.transfer.target import Target, chosen_rows, read_target
from lightning_taskinfo.transfer.training import Fitted, make_trainer, quiet

VERSION = 1  # of the files in a folder: raise it when the same configuration gives other numbers
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
class Own(Recipe):
    """Trainings of the user's module.

    Attributes:
        starts: The starts by name, scratch first.
        ways: The ways to adapt by name.
        target: The target data.
        rows: By seed, rows of training samples: the first ``n`` are the labelled ones.
        metric: Name of the logged test metric; ``None`` for the error of the outputs.
        trainer: Options of Lightning's Trainer.
        certify: Whether the true error of every trained network is bounded.
    """

    starts: Mapping[str, Start]
    ways: Mapping[str, Adapt]
    target: Target
    rows: Mapping[int, Rows]
    metric: str | None
    trainer: Mapping[str, Any]
    certify: bool

    def cells(self, root: Path, log: RunLog) -> list[Cell]:
        """Return all trainings, scratch in full and the others in every way; none carries the weights of its start."""
        starts = {name: start.stored(root / "starts" / name) for name, start in self.starts.items()}
        stored = replace(self, starts=starts)
        pairs = [(name, way) for name in self.starts if name != SCRATCH for way in self.ways]
        return [
            stored.cell(start, way, count, seed, root, log)
            for seed in self.seeds
            for count in self.labels
            for start, way in [(SCRATCH, "full"), *pairs]
        ]

    def cell(self, start: str, way: str, labels: int, seed: int, root: Path, log: RunLog) -> Cell:
        """Return one training."""
        one = start == SCRATCH or len(self.ways) == 1
        return Cell(
            self,
            root,
            log,
            name=f"{start}-{way}-{labels}-seed{seed}",
            stage="scratch" if start == SCRATCH else "fine_tune",
            method=start if one else f"{start}, {way}",
            labels=labels,
            seed=seed,
            start=start,
            way=way,
        )

    def parts(self) -> dict[str, dict[str, Any]]:
        """Return what tells each start from others of its name."""
        with generators_kept():
            return {f"starts/{name}": {"weights": s.digest()} for name, s in self.starts.items()}

    def store(self, root: Path) -> None:
        """Write the weights of the starts."""
        for name, start in self.starts.items():
            path = root / "starts" / name / "weights.pt"
            if start.weights and not path.exists():
                write_tensors(path, start.weights)

    def job(self, cell: Cell) -> Job:
        """Return a start, adapted, with the loaders of its labelled samples."""
        start, target = self.starts[cell.start], self.target
        way = "full" if cell.start == SCRATCH else self.ways[cell.way]
        module = adapted(start.module(cell.seed), way, start.fresh)
        rows = self.rows[cell.seed][: cell.labels]
        fit: dict[str, Any] = {"train_dataloaders": target.train_loader(rows, cell.seed)}
        validation = target.validation_loader()
        if validation is not None and _validates(self.trainer):
            fit["val_dataloaders"] = validation
        loader = target.test_loader()

        prior = None
        if self.certify:
            prior = start_prior(module, cell.start, scratch=cell.start == SCRATCH)

        def after(fitted: Fitted) -> tuple[dict[str, Any], dict[str, Any]]:
            test = fitted.test if self.metric else own_error(module, loader)
            found: dict[str, Any] = {
                "test": {self.metric: test[self.metric]} if self.metric else test
            }
            if prior is None:
                return found, {}
            samples = Certified(target, self.rows[cell.seed], cell.labels)
            found["certificate"] = samples.bounds(module, prior, cell.seed)
            return found, {"certified": found["certificate"]}

        return Job(
            module,
            seeds=(cell.seed, STREAM),
            fit=fit,
            test=None if self.metric is None else {"dataloaders": loader},
            options=self._options(),
            weights=lambda: {n: p.detach().cpu() for n, p in trainable_parameters(module).items()},
            after=after,
        )

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"accelerator": self.accelerator, "devices": 1}
        options |= {"log_every_n_steps": 10, **self.trainer}
        if "max_steps" in options:
            options.setdefault("max_epochs", -1)
        options["callbacks"] = deepcopy(list(options.get("callbacks", [])))
        return options

    def tried(self) -> tuple[str, float]:
        """Train from the last start for a few steps and test it on one batch.

        Returns:
            Name of the metric, and an estimate of the seconds of one training.

        Raises:
            ValueError: If the module does not log the metric, or training fails.
        """
        labels = max(self.labels)
        cell = self.cell(
            [*self.starts][-1], next(iter(self.ways)), labels, self.seeds[0], Path(), RunLog()
        )
        job = self.job(cell)
        loader, options, clock = self.target.test_loader(), dict(job.options), Clock()
        steps, epochs = options.get("max_steps", -1), options.get("max_epochs")
        options |= {"max_steps": TRIED, "max_epochs": -1, "limit_test_batches": 1}
        options |= {"limit_val_batches": 0, "callbacks": [*options["callbacks"], clock]}
        try:
            with quiet():
                trainer = make_trainer(self.namespace, {**options, "logger": False})
                trainer.fit(job.module, train_dataloaders=job.fit["train_dataloaders"])
                begun = time.perf_counter()
                if self.metric is None:
                    logged: Mapping[str, float] = own_error(job.module, loader, 1)
                else:
                    logged = trainer.test(job.module, dataloaders=loader, verbose=False)[0]
            test = (time.perf_counter() - begun) * max(1, len(loader))
        except ValueError:
            raise
        except Exception as error:  # of the user's own module
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ValueError(
                f"`model` must make a module that can be trained on `data`, but {reason}"
            ) from error
        if self.metric is not None and self.metric not in logged:
            raise ValueError(
                f"`metric` must be one that the module logs in its test_step, got {self.metric!r}; it logs "
                f"{', '.join(logged) or 'none'}."
            )
        wanted = steps if steps > 0 else (epochs or 1) * math.ceil(labels / self.target.batch_size)
        return self.metric or next(iter(logged)), wanted * clock.each + test


def own_recipe(
    make: MakeModule,
    data: Any,
    starts: Mapping[str, Given],
    ways: Sequence[Adapt],
    labels: Sequence[int] | None,
    seeds: Sequence[int],
    *,
    metric: str | None,
    mode: str | None,
    trainer: Mapping[str, Any],
    batch_size: int | None,
    accelerator: str,
    certify: bool,
) -> Own:
    """Read starts, ways to adapt and data, and see that they fit and can be trained, before anything is written.

    Raises:
        ValueError: If something does not fit.
    """
    if isinstance(make, str) or not callable(make):
        raise TypeError(
            f"`model` must be a function that makes your LightningModule beside `starts`, got {make!r}."
        )
    trainer = check_trainer(trainer)
    target = read_target(data, batch_size)
    counts = [len(target.train)] if labels is None else labels
    with generators_kept():
        read = _read_starts(make, starts)
        named = _checked_ways(ways, [start for name, start in read.items() if name != SCRATCH])
        found, fingerprint = target.labels()
        rows = {seed: chosen_rows(found, len(target.train), counts, seed) for seed in seeds}
        module = read[SCRATCH].module(0)
        for start in {start.make: start for start in read.values()}.values():
            _check_range(found, start.module(0), target)
        if certify:  # equal shares of classes would be no independent draws
            check_classes(found)
            rows = {
                seed: np.random.default_rng(seed).permutation(len(target.train)) for seed in seeds
            }
            for chosen in rows.values():
                Certified(target, chosen, max(counts)).check(module)
        recipe = Own(
            f"{type(module).__name__} from {', '.join(starts)}",
            namespace_of(module),
            {},
            counts,
            seeds,
            accelerator,
            None,
            read,
            named,
            target,
            rows,
            metric,
            trainer,
            certify,
        )
        name, seconds = recipe.tried()
    configuration = {
        "version": VERSION,
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "data": {"training": fingerprint, "samples": len(target.train), "test": len(target.test)},
        "batch_size": target.batch_size,
        "trainer": {name: _plain(value) for name, value in trainer.items()},
        "metric": name,
        "mode": mode,
        **({"certify": True} if certify else {}),
    }
    return replace(recipe, configuration=configuration, seconds=seconds)


def _read_starts(make: MakeModule, starts: Mapping[str, Given]) -> dict[str, Start]:
    """Scratch, and the user's starts."""
    if not starts:
        raise ValueError("`starts` must hold at least one start beside scratch, got none.")
    for name in starts:
        if name == SCRATCH or not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            rule = "names of letters, digits, dots, dashes and underscores other than 'scratch'"
            raise ValueError(f"`starts` must have {rule}, got {name!r}.")
    make_module(make)
    read = {name: read_start(name, given, make) for name, given in starts.items()}
    return {SCRATCH: Start(SCRATCH, make, {}), **read}


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


def _check_range(labels: Tensor | None, module: Any, target: Target) -> None:
    """Raise a ``ValueError`` for a class that a module has no output for, where that can be seen."""
    if labels is None or labels.is_floating_point():
        return
    try:
        with observing(module), torch.no_grad():
            inputs, _ = read_batch(next(iter(target.test_loader())), module)
            outputs = outputs_of(module, inputs)
    except Exception:  # what is wrong with it is said when it is trained
        return
    classes = outputs.shape[-1]
    odd = labels[(labels >= classes) | ((labels < 0) & (labels != IGNORED))]
    if outputs.ndim == 2 and len(odd):
        raise ValueError(
            f"`data` must have classes from 0 to {classes - 1}, the outputs of {type(module).__name__}, "
            f"got {int(odd[0])}."
        )


def _plain(value: Any) -> Any:
    known = isinstance(value, str | int | float | bool) or value is None
    return value if known else repr(type(value))


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
            batch = moved(batch, module.device)
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


def _validates(trainer: Mapping[str, Any]) -> bool:
    """Whether the user asked for validation: epochs of a few labels are too short for it to be the default."""
    return bool({"limit_val_batches", "check_val_every_n_epoch", "val_check_interval"} & {*trainer})
