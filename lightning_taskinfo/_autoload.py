"""Callbacks for every Trainer of a process, named in an environment variable.

``TASKINFO_CALLBACKS=FisherTrace python train.py`` watches a run whose code stays as it is.
"""

import inspect
import os
from typing import Any

import lightning_taskinfo
from lightning_taskinfo._lightning import Callback, LightningModule, Trainer

VARIABLE = "TASKINFO_CALLBACKS"


def callbacks_factory() -> list[Callback]:
    """Return the callbacks that ``TASKINFO_CALLBACKS`` names, each with its defaults; none where it is unset.

    Lightning calls this entry point whenever a Trainer is made.

    Raises:
        ValueError: If a name is not a callback of this package, or one that needs arguments.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    return [_autoloaded(name)() for name in dict.fromkeys(filter(None, names))]


def _goes_alone(what: Any) -> bool:
    """Whether it is a callback whose arguments all have a default."""
    if not (isinstance(what, type) and issubclass(what, Callback)):
        return False
    parameters = inspect.signature(what).parameters.values()
    return all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in parameters)


def _autoloaded(name: str) -> type[Callback]:
    base: Any = getattr(lightning_taskinfo, name, None)
    if not _goes_alone(base):
        known = [public for public in lightning_taskinfo.__all__ if _goes_alone(getattr(lightning_taskinfo, public))]
        raise ValueError(
            f"`{VARIABLE}` must name callbacks of lightning_taskinfo that need no argument ({', '.join(known)}), "
            f"separated by commas; got {name!r}."
        )

    class Autoloaded(base):
        @property
        def state_key(self) -> str:
            return f"{super().state_key} of {VARIABLE}"

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
            if any(isinstance(callback, base) and callback is not self for callback in callbacks):
                # A new list: Lightning is iterating over the old one.
                trainer.callbacks = [callback for callback in callbacks if callback is not self]  # type: ignore[attr-defined]
            else:
                super().setup(trainer, pl_module, stage)

    Autoloaded.__name__ = Autoloaded.__qualname__ = base.__name__
    return Autoloaded
