"""The only import of Lightning: bases that both ``lightning.pytorch`` and ``pytorch_lightning`` accept.

The two packages hold the same code under two names, and each refuses the other's classes. A
callback or data module of ours therefore derives from both where both are installed. A
``LightningModule`` cannot have two bases (it fails under ``pytorch_lightning``): ready-made modules
are base-free mixins, made concrete once a namespace.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

NAMESPACES: dict[str, ModuleType] = {
    name: import_module(name)
    for name in ("lightning.pytorch", "pytorch_lightning")
    if find_spec(name.split(".")[0])
}
if not NAMESPACES:
    raise ModuleNotFoundError(
        "Install `pytorch-lightning` or `lightning` to use the Lightning side of this package."
    )

DEFAULT = [*NAMESPACES][-1]

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
else:
    # Types to annotate with; a user's own objects come from either namespace.
    LightningModule = NAMESPACES[DEFAULT].LightningModule
    Trainer = NAMESPACES[DEFAULT].Trainer

    class Callback(*(namespace.Callback for namespace in NAMESPACES.values())):
        """A callback that the Trainer and the LightningCLI of every installed namespace accept."""

    class LightningDataModule(
        *(namespace.LightningDataModule for namespace in NAMESPACES.values())
    ):
        """A data module that the Trainer and the LightningCLI of every installed namespace accept."""


def module_classes(mixin: type, name: str) -> dict[str, type]:
    """Return a LightningModule of ``mixin`` for each installed namespace; a module cannot have both as bases."""
    told = {"__module__": mixin.__module__, "__doc__": mixin.__doc__}
    classes = {}
    for namespace, module in NAMESPACES.items():
        classes[namespace] = type(name, (mixin, module.LightningModule), dict(told))
    return classes
