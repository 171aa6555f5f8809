"""Callbacks for every Trainer of a process, named in an environment variable.

``TASKINFO_CALLBACKS=FisherTrace python train.py`` watches a run whose code stays as it is.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import lightning_taskinfo
from lightning_taskinfo._lightning import Callback, LightningModule, Trainer
from lightning_taskinfo._warn import warn

VARIABLE = "TASKINFO_CALLBACKS"
ALONE = ("FisherTrace", "HardSamples", "InformationInWeights", "LocalMinimum")


def callbacks_factory() -> list[Callback]:
    """Return the callbacks that ``TASKINFO_CALLBACKS`` names, each with its defaults; none where it is unset.

    Lightning calls this entry point whenever a Trainer is made. A callback that cannot work with a
    script's module or batches warns and does nothing more: the script runs as it would without it.

    Raises:
        ValueError: If a name is not a callback of this package, or one that needs arguments.
    """
    named = os.environ.get(VARIABLE, "").split(",")
    names = dict.fromkeys(name.strip() for name in named)
    return [_autoloaded(name)() for name in names if name]


def _autoloaded(name: str) -> type[Callback]:
    if name not in ALONE:
        raise ValueError(
            f"`{VARIABLE}` must name callbacks of lightning_taskinfo that need no argument ({', '.join(ALONE)}), "
            f"separated by commas; got {name!r}."
        )
    base: Any = getattr(lightning_taskinfo, name)

    class Autoloaded(base):
        stepped_back = False
        checked = False  # a batch was read: what fails from now on is a gap in the history

        @property
        def state_key(self) -> str:
            return f"{super().state_key} of {VARIABLE}"

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            self.stepped_back = self.checked = False
            callbacks = trainer.callbacks  # type: ignore[attr-defined]
            others = [callback for callback in callbacks if callback is not self]
            if any(isinstance(callback, base) for callback in others):
                # A new list: Lightning is iterating over the old one.
                trainer.callbacks = others  # type: ignore[attr-defined]
            else:
                super().setup(trainer, pl_module, stage)

    Autoloaded.__name__ = Autoloaded.__qualname__ = base.__name__
    for hook in dir(base):
        own = getattr(base, hook)
        if hook.startswith("on_") and own is not getattr(Callback, hook, None):
            setattr(Autoloaded, hook, _stepping_back(own))
    return Autoloaded


def _stepping_back(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a callback's hook after whose failure the callback does nothing any more, on all processes."""

    @functools.wraps(hook)
    def safe(self: Any, trainer: Trainer, *arguments: Any, **named: Any) -> None:
        if self.stepped_back:
            return
        reason = ""
        try:
            hook(self, trainer, *arguments, **named)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        succeeded = not reason
        # Nobody waits for one that has stepped back.
        if not self.checked and trainer.world_size > 1:
            succeeded = trainer.strategy.reduce_boolean_decision(succeeded)
        self.checked = self.checked or hook.__name__ == "on_train_batch_start"
        if not succeeded:
            self.stepped_back = True
            reason = reason or "another process failed"
            warn(f"{self.state_key} cannot watch this training and is switched off ({reason})")

    return safe
