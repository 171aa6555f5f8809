"""Information in the weights, transfer and certificates for PyTorch Lightning."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:  # what type checkers see; `tests/test_import.py` keeps it equal to `_EXPORTS`
    from lightning_taskinfo._observe import observing as observing
    from lightning_taskinfo._observe import trainable_parameters as trainable_parameters
    from lightning_taskinfo.transfer.overlap import FeatureOverlap as FeatureOverlap
    from lightning_taskinfo.transfer.overlap import feature_overlap as feature_overlap

_EXPORTS = {  # public name -> the module that defines it, imported when the name is first used
    "FeatureOverlap": "transfer.overlap",
    "feature_overlap": "transfer.overlap",
    "observing": "_observe",
    "trainable_parameters": "_observe",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
