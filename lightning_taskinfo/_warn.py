"""Warnings point to the line of the user that led to them, and messages quote errors in one line."""

import sys
import warnings

BETWEEN = {  # packages whose frames are nobody's call
    "contextlib",
    "functools",
    "importlib",
    "jsonargparse",
    "lightning",
    "lightning_fabric",
    "lightning_taskinfo",
    "lightning_utilities",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
}


class TaskInfoWarning(UserWarning):
    """What every warning of this package is, so that all can be filtered at once."""


def warn(message: str) -> None:
    """Warn, at the innermost call that is neither this package's nor a framework's.

    Python 3.12 has ``skip_file_prefixes`` for this; older versions need the number of frames
    between.

    Args:
        message: What to say.
    """
    frame = sys._getframe(1)
    level = 2  # 1 is this function, 2 its caller
    while frame.f_back is not None:
        package, *_ = str(frame.f_globals.get("__name__")).split(".")
        if package not in BETWEEN:
            break
        frame = frame.f_back
        # `warnings.warn` does not count those.
        if "importlib._bootstrap" not in frame.f_code.co_filename:
            level += 1
    warnings.warn(message, TaskInfoWarning, stacklevel=level)


def first_line(error: BaseException) -> str:
    """Return what an error says in its first line."""
    return str(error).partition("\n")[0]


def reason_of(error: BaseException) -> str:
    """Return the kind of an error and what it says in its first line."""
    return f"{type(error).__name__}: {first_line(error)}"
