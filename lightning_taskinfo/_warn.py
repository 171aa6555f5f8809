"""Warnings point to the line of the user that led to them, not into this package or a framework between the two."""

import sys
import warnings

BETWEEN = {  # packages whose frames are nobody's call
    *(
        "lightning_taskinfo",
        "torch",
        "torchmetrics",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
    ),
    *("lightning_utilities", "jsonargparse", "contextlib", "functools", "importlib"),
}


class TaskInfoWarning(UserWarning):
    """What every warning of this package is, so that all can be filtered at once."""


def warn(message: str) -> None:
    """Warn, at the innermost call that is neither this package's nor a framework's.

    Args:
        message: What to say.
    """
    frame = sys._getframe(1)
    level = 2  # 1 is this function, 2 its caller
    while frame.f_back is not None and _package(frame.f_globals) in BETWEEN:
        frame = frame.f_back
        if (
            "importlib._bootstrap" not in frame.f_code.co_filename
        ):  # `warnings.warn` does not count those
            level += 1
    warnings.warn(message, TaskInfoWarning, stacklevel=level)


def _package(told: dict[str, object]) -> str:
    return str(told.get("__name__")).partition(".")[0]
