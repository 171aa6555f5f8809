"""Figures of what was measured: every function returns ``(figure, axes)`` and needs neither pyplot nor a screen."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "figure_pixels",
    "plot_bars",
    "plot_curves",
    "plot_intervals",
    "plot_ranking",
]


Drawn: TypeAlias = "tuple[Figure, Axes]"
Panels: TypeAlias = "tuple[Figure, Sequence[Axes]]"
Given: TypeAlias = "Axes | None"  # axes to draw on, or a new figure


def plot_curves(
    history: Iterable[Mapping[str, float]],
    names: Sequence[str] | None = None,
    *,
    x: str = "step",
    ylabel: str = "",
    ax: Given = None,
) -> Drawn:
    """Draw measurements over the course of a training, one line per name.

    Args:
        history: One mapping per measurement, as in the ``history`` of a callback or the rows of a
            CSV logger; a row may lack a name or hold NaN for it, and is then left out of that line.
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
        keys = dict.fromkeys(key for row in rows for key in row)
        names = [name for name in keys if name != x]
    fig, ax = figure_and_axes(ax, frame=False)
    for name in names:
        pairs = [(row.get(x, math.nan), row.get(name, math.nan)) for row in rows]
        points = [pair for pair in pairs if not any(map(math.isnan, pair))]
        if not points:
            raise ValueError(f"`names` must have been measured together with {x!r}, got {name!r}.")
        marker = "." if len(points) < 50 else ""
        ax.plot(*zip(*points, strict=True), marker=marker, label=name)
    ax.set(xlabel=x, ylabel=ylabel)
    ax.legend(frameon=False)
    return fig, ax


def plot_ranking(
    scores: Sequence[float],
    *,
    k: int = 50,
    ylabel: str = "",
    ax: Given = None,
) -> Drawn:
    """Draw the scores of samples by rank, with the first ``k`` marked.

    Args:
        scores: The largest first.
        k: How many are marked.
        ylabel: Label of the vertical axis.
        ax: Draw here instead of in a new figure.

    Returns:
        The figure and its axes.

    Example:
        >>> fig, ax = plot_ranking([3.0, 1.0, 0.5], k=1, ylabel="loss")
        >>> [line.get_label() for line in ax.get_lines()]
        ['all samples', 'first 1']
    """
    fig, ax = figure_and_axes(ax, frame=False)
    ranks = range(1, len(scores) + 1)
    ax.plot(ranks, scores, color="0.6", label="all samples")
    ax.plot(ranks[:k], scores[:k], color="C3", linewidth=3, label=f"first {len(ranks[:k])}")
    ax.set(xlabel="rank of the sample", ylabel=ylabel)
    ax.legend(frameon=False)
    return fig, ax


def plot_bars(
    values: Mapping[str, float],
    *,
    xlabel: str,
    ax: Given = None,
) -> Drawn:
    """Draw one horizontal bar for each value, with the number beside it.

    Args:
        values: The values by name, drawn from top to bottom.
        xlabel: What the values are.
        ax: Draw here instead of in a new figure.

    Returns:
        The figure and its axes.

    Example:
        >>> fig, ax = plot_bars({"body": 3.0, "head": 1.0}, xlabel="nats")
        >>> [float(bar.get_width()) for bar in ax.patches]
        [3.0, 1.0]
    """
    fig, ax = figure_and_axes(ax, size=_rows(values), frame=False)
    bars = ax.barh([*values], [*values.values()])
    ax.bar_label(bars, fmt="{:.3g}", padding=3)
    ax.margins(x=0.15)
    ax.invert_yaxis()
    ax.set_xlabel(xlabel)
    return fig, ax


def plot_intervals(
    names: Sequence[str],
    low: Sequence[float],
    middle: Sequence[float],
    high: Sequence[float],
    *,
    xlabel: str,
    ax: Given = None,
) -> Drawn:
    """Draw one point with its interval for each name; what is not finite is left out.

    Args:
        names: Drawn from top to bottom.
        low: Lower ends.
        middle: The points.
        high: Upper ends.
        xlabel: What the values are.
        ax: Draw here instead of in a new figure.

    Returns:
        The figure and its axes.

    Example:
        >>> fig, ax = plot_intervals(["body", "head"], [1.0, 2.0], [2.0, 3.0], [3.0, math.inf], xlabel="nats")
        >>> [line.get_xdata().tolist() for line in ax.get_lines()]
        [[1.0, 3.0], [2.0], [3.0]]
    """
    fig, ax = figure_and_axes(ax, size=_rows(names), frame=False)
    for place, ends in enumerate(zip(low, high, strict=True)):
        if all(map(math.isfinite, ends)):
            ax.plot(ends, [place, place], color="C0")
        if math.isfinite(middle[place]):
            ax.plot([middle[place]], [place], "o", color="C0")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlabel(xlabel)
    return fig, ax


def _rows(names: Collection[str]) -> tuple[float, float]:
    """Size of a figure with one row per name, in inches."""
    return 6, 1 + 0.35 * len(names)


def figure_pixels(figure: "Figure") -> Tensor:
    """Return a figure as pixels, ``[height, width, 3]`` bytes.

    Args:
        figure: A figure of matplotlib.

    Example:
        >>> fig, ax = plot_curves([{"step": 1, "loss": 2.0}])
        >>> figure_pixels(fig).shape
        torch.Size([350, 500, 3])
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.array(canvas.buffer_rgba()))[..., :3]


def figure_and_axes(
    ax: Any,
    *,
    size: tuple[float, float] = (5, 3.5),
    frame: bool = True,
) -> tuple[Any, Any]:
    """Return the given axes with their figure, or those of a new one.

    Args:
        ax: Axes to draw on, or ``None``.
        size: Width and height of a new figure, in inches.
        frame: Whether the axes are framed on all four sides.
    """
    from matplotlib.figure import Figure

    if ax is None:
        ax = Figure(figsize=size, layout="constrained").add_subplot()
    if not frame:
        ax.spines[["top", "right"]].set_visible(False)
    return ax.figure, ax


def check_picture(argument: str, path: Path | None) -> None:
    """Raise a ``ValueError`` for a file that no picture is written to, before the work that it would show."""
    if path is not None and path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"`{argument}` must end in .png, .pdf or .svg, got {path}.")
