"""Figures of what was measured: every function returns ``(figure, axes)`` and needs neither pyplot nor a screen."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_curves(
    history: Iterable[Mapping[str, float]],
    names: Sequence[str] | None = None,
    *,
    x: str = "step",
    ylabel: str = "",
    ax: "Axes | None" = None,
) -> tuple["Figure", "Axes"]:
    """Draw measurements over the course of a training, one line a name.

    Args:
        history: One mapping a measurement, as in the ``history`` of a callback or the rows of a CSV logger; a row
            may lack a name or hold NaN for it, and is then left out of that line.
        names: What to draw; everything in ``history`` but ``x`` where not given.
        x: The name of the horizontal axis.
        ylabel: Label of the vertical axis.
        ax: Draw here instead of in a new figure.

    Returns:
        The figure and its axes.

    Raises:
        ValueError: If a name was never measured together with ``x``.

    Example:
        >>> fig, ax = plot_curves([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}], ylabel="nats")
        >>> [line.get_label() for line in ax.get_lines()]
        ['loss']
    """
    rows = list(history)
    if names is None:
        names = [name for name in dict.fromkeys(key for row in rows for key in row) if name != x]
    ax = _axes() if ax is None else ax
    for name in names:
        points = [(row[x], row[name]) for row in rows if not any(math.isnan(row.get(k, math.nan)) for k in (x, name))]
        if not points:
            raise ValueError(f"`names` must have been measured together with {x!r}, got {name!r}.")
        ax.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else "", label=name)
    ax.set_xlabel(x)
    ax.set_ylabel(ylabel)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return ax.figure, ax  # type: ignore[return-value]  # a subfigure, where the given axes lie in one


def _axes() -> "Axes":
    from matplotlib.figure import Figure

    return Figure(figsize=(5, 3.5), layout="constrained").subplots()
