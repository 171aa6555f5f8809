"""Where pictures may go."""

from pathlib import Path


def check_picture(argument: str, path: Path) -> None:
    """Raise a ``ValueError`` for a file that no picture is written to, before the work that it would show."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"`{argument}` must end in .png, .pdf or .svg, got {path}.")
