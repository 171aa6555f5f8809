"""Warnings point to the line of the user that led to them, not into this package or a framework between the two."""

import sys
import warnings

BETWEEN = {  # packages whose frames are nobody's call
    *("lightning_taskinfo", "torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric"),
    *("lightning_utilities", "jsonargparse", "contextlib", "functools"),
}


class TaskInfoWarning(UserWarning):
    """What every warning of this package is, so that all can be filtered at once."""


def warn(message: str) -> None:
    """Warn, at the innermost call that is neither this package's nor a framework's.

    Args:
        message: What to say.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in BETWEEN:
        frame = frame.f_back
    told = frame.f_globals
    module, registry = str(told.get("__name__", "__main__")), told.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, TaskInfoWarning, frame.f_code.co_filename, frame.f_lineno, module, registry, told)
