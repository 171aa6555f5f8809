"""Information in the weights, transfer and certificates for PyTorch Lightning."""

import ast
from importlib import import_module
from pkgutil import get_data

__version__ = "0.1.0"

_MODULES = (
    "callbacks", "certificates", "data", "distributions", "fisher", "functional", "mixins", "plotting", "regularizers",
    "tasks", "transfer", "variational",
)  # fmt: skip
_IMPORTS = ast.parse(get_data(__name__, "__init__.pyi") or b"").body  # what type checkers read
_EXPORTS = {  # public names, and the modules they are imported from when first used
    alias.name: str(node.module)
    for node in _IMPORTS
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> object:
    if name in _MODULES:  # so that `lightning_taskinfo.transfer(…)` needs no import of its own
        return import_module(f"{__name__}.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
