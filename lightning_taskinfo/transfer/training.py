"""One training of a transfer: any process can run it, or go on where another was killed, with the same numbers."""

import logging
import signal
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from lightning_taskinfo._files import atomic_path, check_archive, read_result, write_tensors
from lightning_taskinfo._lightning import NAMESPACES, Callback, LightningModule, Trainer
from lightning_taskinfo._warn import first_line
from lightning_taskinfo.transfer.logs import Row, RunLog
from lightning_taskinfo.transfer.sampling import generators_kept, reseed

Stage = Literal["pretrain", "scratch", "fine_tune"]
SCRATCH = "scratch"
ADVICE = "Delete it to train that stage again."
NOISE = (
    ".*does not have many workers.*",
    ".*LeafSpec.*",
    ".*No .*dataloader.*",
    ".*in eval mode.*",
)
"""What Lightning warns of that many small trainings need not hear."""


class Fitted(NamedTuple):
    """What a training leaves: a row of metrics an epoch, and those of the test."""

    curve: list[Row]
    test: Row


@dataclass(frozen=True)
class Job:
    """A module at its start, ready to be trained.

    Attributes:
        module: The module.
        seeds: What all randomness is drawn from, together with the epoch.
        fit: What the Trainer's ``fit`` is called with: a data module or loaders.
        test: What its ``test`` is called with; ``None`` for no test.
        options: Of the Trainer.
        weights: Returns what is kept of the trained module.
        after: Returns what is found after training, under names of
            :class:`~lightning_taskinfo.transfer.report.Result`, and what is logged of it.
        before: What is logged before training.
        ours: Whether the module is ours, and not the user's: then what it logs has our prefix, and
            its checkpoints are whole.
    """

    module: Any
    seeds: tuple[int, ...]
    fit: Mapping[str, Any]
    test: Mapping[str, Any] | None
    options: Mapping[str, Any]
    weights: Callable[[], dict[str, Tensor]]
    after: Callable[[Fitted], tuple[dict[str, Any], dict[str, Any]]]
    before: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False


class Recipe(ABC):
    """What is trained, and how: the user's own module from their starts, or the ready parts from starts made here.

    Attributes:
        title: What to call the transfer.
        namespace: Whose modules they are.
        configuration: What decides the numbers.
        labels: Numbers of target labels.
        seeds: The seeds.
        seconds: Estimate of the time of a training, if there is one.
        origins: Where the weights of each start of the user's come from, in words.
    """

    title: str
    namespace: str
    configuration: dict[str, Any]
    labels: Sequence[int]
    seeds: Sequence[int]
    seconds: float | None = None
    origins: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def trials(self, root: Path, log: RunLog) -> list["Trial"]:
        """Return all trainings, each after the one that it needs."""

    @abstractmethod
    def job(self, trial: "Trial") -> Job:
        """Return what a training trains."""

    def store(self, root: Path) -> None:  # noqa: B027 - most have nothing to write
        """Write what all trainings read into the folder of the transfer."""


@dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        recipe: Knows what is trained.
        root: The folder of the transfer.
        log: Where metrics go.
        name: A name that is good for a file.
        stage: ``"pretrain"``, ``"scratch"`` or ``"fine_tune"``.
        method: What the report calls it.
        labels: Number of target labels.
        seed: The seed.
        start: Name of the start.
        way: Name of the way to adapt.
        needs: Name of the pretraining whose weights it starts from.
    """

    recipe: Recipe = field(repr=False)
    root: Path
    log: RunLog = field(repr=False)
    name: str
    stage: Stage
    method: str
    labels: int
    seed: int
    start: str = SCRATCH
    way: str = "full"
    needs: str | None = None

    @property
    def description(self) -> str:
        """What it is, in words."""
        if self.stage == "pretrain":
            return f"pretrain {self.start}, seed {self.seed}"
        return f"{self.method}, {self.labels} labels, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.root / "stages" / self.name

    @property
    def pretrained(self) -> Path:
        """The file of the weights that it starts from."""
        return self.root / "stages" / str(self.needs) / "weights.pt"

    def result(self, name: str | None = None) -> Path:
        """Return the file with the result of this training, or of another."""
        return self.root / "results" / f"{name or self.name}.json"

    def run(self) -> dict[str, Any]:
        """Train, test, and return the result in JSON-like values; files of a killed run are continued from.

        The global generators, which are the user's where this is the user's process, stay as they
        were.
        """
        begun = time.perf_counter()
        log = RunLog() if self.stage == "pretrain" else self.log
        settings = {
            "method": self.method,
            "labels": self.labels,
            "seed": self.seed,
            "start": self.start,
            "adapt": self.way,
        }
        before: list[Row] = []  # epochs of the pretraining stand in the log of all that need it
        if self.needs and self.result(self.needs).exists():
            before = read_result(self.result(self.needs))["curve"]
        with generators_kept():
            job = self.recipe.job(self)
            with log.run(self.name, settings, before, own_module=job.ours) as run:
                run.log(job.before, step=0)
                fitted = fit_stage(job, self.folder, self.recipe.namespace, run.logger)
                found, logged = job.after(fitted)
                run.log({"target": found["test"], **logged})
                run.end(fitted.curve)
            write_tensors(self.folder / "weights.pt", job.weights())
        seconds = time.perf_counter() - begun
        return {**found, "curve": fitted.curve, "seconds": seconds}


class EpochKeeper(Callback):
    """Seeds every epoch from (seed, stage, epoch), keeps its metrics, and writes a checkpoint after it.

    Writing takes at most a twentieth of the time: after a slow write, epochs go by until the next.

    Args:
        folder: Where ``last.ckpt`` goes.
        parts: What the random generators are seeded from, before the epoch.
        lean: Whether parts that are frozen run as in evaluation, and stay out of the checkpoint.
    """

    def __init__(self, folder: Path, parts: tuple[int, ...], *, lean: bool) -> None:
        self.folder = folder
        self.parts = parts
        self.lean = lean
        self.curve: list[Row] = []
        self._frozen: set[str] = set()
        self._next_write = 0.0

    @property
    def state_key(self) -> str:
        """Key in checkpoints, whatever the folder is."""
        return "EpochKeeper"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember what is frozen from the beginning: a start knows those weights."""
        if self.lean:
            parameters = pl_module.named_parameters()
            self._frozen = {name for name, p in parameters if not p.requires_grad}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let frozen parts run as in evaluation: no dropout, and statistics of batch normalisation that stay."""
        if not self.lean:
            return
        for part in pl_module.modules():
            trained = [parameter.requires_grad for parameter in part.parameters()]
            if trained and not any(trained):
                part.eval()

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Seed; earlier hooks come before Lightning itself has drawn what it draws."""
        if batch_idx == 0:
            reseed(*self.parts, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the epoch's metrics, then everything."""
        # The last ones too: Lightning forgets them when a run goes on.
        row = {}
        if self.curve:
            row.update(self.curve[-1])
        for name, value in trainer.callback_metrics.items():
            row[name] = float(value)
        row["epoch"] = trainer.current_epoch + 1
        self.curve.append(row)
        begun = time.monotonic()
        if begun >= self._next_write:
            save_checkpoint(trainer, self.folder / "last.ckpt")
            ended = time.monotonic()
            if self.lean:
                self._next_write = ended + 20 * (ended - begun)

    def on_save_checkpoint(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        """Leave out what a run knows without it: arguments, of any kind, and weights that were never trained."""
        if self.lean:
            for name in ("hyper_parameters", "hparams_name", "hparams_type"):
                checkpoint.pop(name, None)
            for name, parameter in pl_module.named_parameters():
                if name in self._frozen and not parameter.requires_grad:
                    checkpoint["state_dict"].pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics so far."""
        return {"curve": self.curve}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the metrics of the epochs before."""
        self.curve = [dict(row) for row in state_dict["curve"]]


def fit_stage(job: Job, folder: Path, namespace: str, logger: Any = None) -> Fitted:
    """Train from the last finished epoch in ``folder`` if there is one, and test.

    Args:
        job: What to train; the weights of its module are the trained ones afterwards.
        folder: Of this training alone.
        namespace: Whose Trainer: that of the module.
        logger: For the Trainer; ``None`` for none.

    Raises:
        ValueError: If the checkpoint is damaged. It is left as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / "last.ckpt"
    keeper = EpochKeeper(folder, job.seeds, lean=not job.ours)
    if keeper.lean:
        job.module.strict_loading = False  # what is frozen is not in the checkpoint
    callbacks = [*job.options.get("callbacks", []), keeper]
    options = {**job.options, "logger": logger or False, "callbacks": callbacks}
    with quiet(), interruptible():
        trainer = make_trainer(namespace, options)
        checkpoint = None
        if last.exists():
            check_archive(last, advice=ADVICE)  # before Lightning says so
            checkpoint = str(last)
        trainer.fit(job.module, **job.fit, ckpt_path=checkpoint)
        found: Mapping[str, float] = {}
        if job.test is not None:
            found, *_ = trainer.test(job.module, **job.test, verbose=False)
    test = {name: float(value) for name, value in found.items()}
    return Fitted(keeper.curve, test)


def make_trainer(namespace: str, options: Mapping[str, Any]) -> Trainer:
    """Return a Trainer that draws and writes nothing by itself."""
    usual = {"devices": 1, "log_every_n_steps": 10, "num_sanity_val_steps": 0, **options}
    trainer: Trainer = NAMESPACES[namespace].Trainer(
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **usual,
    )
    return trainer


def check_accelerator(accelerator: str, namespace: str) -> None:
    """Raise a ``ValueError`` if Lightning finds no such accelerator on this machine."""
    try:
        with quiet():
            make_trainer(namespace, {"accelerator": accelerator, "logger": False})
    except Exception as error:  # of a kind of its own for each
        reason = first_line(error)
        raise ValueError(
            f"`accelerator` must be one that Lightning finds here, got {accelerator!r} ({reason})."
        ) from error


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write a checkpoint beside its place and move it there, so that a killed process leaves the one before.

    No two processes write beside it under the same name: one of a killed run may be at work still,
    on another machine.
    """
    with atomic_path(path) as beside:
        trainer.save_checkpoint(beside)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C be a ``KeyboardInterrupt``: a Trainer ends the process instead, and is deaf to Ctrl-C from then on."""
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as end:
        if not isinstance(end.__context__, KeyboardInterrupt):
            raise
        if main:
            signal.signal(signal.SIGINT, handler)
        raise KeyboardInterrupt from None


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning from telling what a run of many small trainings need not hear."""
    names = ("pytorch_lightning", "lightning.pytorch", "lightning.fabric")
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        for message in NOISE:
            warnings.filterwarnings("ignore", message=message)
        ours = "pytorch_lightning|lightning"
        warnings.filterwarnings("ignore", category=UserWarning, module=ours)
        try:
            for name in names:
                logging.getLogger(name).setLevel(logging.WARNING)
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
