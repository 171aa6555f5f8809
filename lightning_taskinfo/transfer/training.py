"""One stage of training that a killed process continues from its last finished epoch, with the same numbers."""

import logging
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lightning_taskinfo._files import atomic_path, check_archive, read_tensors
from lightning_taskinfo._lightning import NAMESPACES, Callback, LightningModule, Trainer
from lightning_taskinfo.transfer.adapt import frozen_modules
from lightning_taskinfo.transfer.sampling import reseed

Row = dict[str, float]


class Fitted(NamedTuple):
    """What a stage leaves: a row of metrics an epoch, and those of the test."""

    curve: list[Row]
    test: Row


class EpochKeeper(Callback):
    """Seeds every epoch from (seed, stage, epoch), keeps its metrics, and writes a checkpoint after it.

    Writing takes at most a twentieth of the time: after a slow write, epochs go by until the next.

    Args:
        folder: Where ``last.ckpt`` goes.
        parts: What the random generators are seeded from, before the epoch.
        lean: Whether parts that are frozen run as in evaluation, and stay out of the checkpoint.
    """

    def __init__(self, folder: Path, parts: tuple[int, ...], *, lean: bool = False) -> None:
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
            self._frozen = {name for name, p in pl_module.named_parameters() if not p.requires_grad}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let frozen parts run as in evaluation: no dropout, and statistics of batch normalisation that stay."""
        for part in frozen_modules(pl_module) if self.lean else ():
            part.eval()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed; earlier hooks come before Lightning itself has drawn what it draws."""
        if batch_idx == 0:
            reseed(*self.parts, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the epoch's metrics, then everything."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        before = self.curve[-1] if self.curve else {}  # Lightning forgets them when a run goes on
        self.curve.append({**before, **metrics, "epoch": trainer.current_epoch + 1})
        begun = time.monotonic()
        if begun >= self._next_write:
            save_checkpoint(trainer, self.folder / "last.ckpt")
            ended = time.monotonic()
            self._next_write = ended + 20 * (ended - begun) if self.lean else 0.0

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
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


def fit_stage(
    module: LightningModule,
    *,
    folder: Path,
    seeds: tuple[int, ...],
    fit: Mapping[str, Any],
    test: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    namespace: str,
    lean: bool = False,
) -> Fitted:
    """Train from the last finished epoch in ``folder`` if there is one, and test.

    Args:
        module: What to train; its weights are the trained ones afterwards.
        folder: Of this stage alone.
        seeds: What all randomness is drawn from, together with the epoch.
        fit: What the Trainer's ``fit`` is called with: a data module or loaders.
        test: What its ``test`` is called with; ``None`` for no test.
        options: Of the Trainer.
        namespace: Whose Trainer: that of ``module``.
        lean: See :class:`EpochKeeper`.

    Raises:
        ValueError: If the checkpoint is damaged. It is left as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / "last.ckpt"
    keeper = EpochKeeper(folder, seeds, lean=lean)
    if lean:
        module.strict_loading = False  # what is frozen is not in the checkpoint
    with quiet():
        trainer = make_trainer(
            namespace, {**options, "callbacks": [*options.get("callbacks", []), keeper]}
        )
        if last.exists():
            check_archive(
                last, advice="Delete it to train that stage again."
            )  # before Lightning says so
        with interruptible():
            trainer.fit(module, **fit, ckpt_path=str(last) if last.exists() else None)
            found = trainer.test(module, **test, verbose=False)[0] if test is not None else {}
    return Fitted(keeper.curve, {name: float(value) for name, value in found.items()})


def make_trainer(namespace: str, options: Mapping[str, Any]) -> Trainer:
    """Return a Trainer that draws and writes nothing by itself."""
    ours = {"num_sanity_val_steps": 0, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer: Trainer = NAMESPACES[namespace].Trainer(**ours, enable_model_summary=False, **options)
    return trainer


def check_accelerator(accelerator: str, namespace: str) -> None:
    """Raise a ``ValueError`` if Lightning finds no such accelerator on this machine."""
    try:
        with quiet():
            NAMESPACES[namespace].Trainer(
                accelerator=accelerator, devices=1, logger=False, enable_checkpointing=False
            )
    except Exception as error:  # of a kind of its own for each
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"`accelerator` must be one that Lightning finds here, got {accelerator!r} ({reason})."
        ) from error


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


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write a checkpoint beside its place and move it there, so that a killed process leaves the one before.

    No two processes write beside it under the same name: one of a killed run may be at work still,
    on another machine.
    """
    with atomic_path(path) as beside:
        trainer.save_checkpoint(beside)


def load_weights(path: Path) -> Any:
    """Return what a file of tensors holds.

    Raises:
        ValueError: If it is damaged; the message names it.
    """
    return read_tensors(path, advice="Delete it to train that stage again.")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning from telling what a run of many small trainings need not hear."""
    loggers = [
        logging.getLogger(name)
        for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric")
    ]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in (
            ".*does not have many workers.*",
            ".*LeafSpec.*",
            ".*No .*dataloader.*",
            ".*in eval mode.*",
        ):
            warnings.filterwarnings("ignore", message=message)
        warnings.filterwarnings(
            "ignore", category=UserWarning, module="pytorch_lightning|lightning"
        )
        try:
            for logger in loggers:
                logger.setLevel(logging.WARNING)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
