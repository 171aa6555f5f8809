"""Figures of a transfer experiment: every function returns ``(figure, axes)`` and needs neither pyplot nor a screen."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_taskinfo.functional.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_taskinfo.transfer.report import Measure, Result, TransferReport

MOMENTS = {  # of information in the weights: label, colour, marker
    "before": ("before fine-tuning", "tab:blue", "o"),
    "after": ("after", "tab:orange", "o"),
    "added": ("added by fine-tuning", "tab:green", "D"),
}


def plot_accuracy(
    report: "TransferReport",
    *,
    confidence: float = 0.95,
    ax: "Axes | None" = None,
) -> tuple["Figure", "Axes"]:
    """Draw the target test accuracy, or the metric, of every method: mean and interval, one colour a number of labels.

    Short strokes are the seeds; a dotted line continues the mean of training from scratch.

    Args:
        report: What to draw.
        confidence: Probability that an interval covers.
        ax: Draw here instead of in a new figure.

    Returns:
        The figure and its axes.
    """
    from lightning_taskinfo.plotting import figure_and_axes

    methods = report.methods
    counts = report.labels
    measure = report.measures[0]
    height_of_method = 0.22 + 0.17 * len(counts)
    height = 1.1 + len(methods) * height_of_method
    figure, ax = figure_and_axes(ax, size=(6.4, height))
    colors = _shades(counts)
    middle = (len(counts) - 1) / 2
    for labels, method, results in report.cells():
        place = counts.index(labels) - middle
        y = methods.index(method) + place * 0.7 / len(counts)
        interval = report.summary(method, labels, measure.value, confidence)
        _draw_cell(ax, y, colors[labels], measure, results, interval)
    for labels, color in colors.items():
        ax.plot([], [], "o", color=color, label=f"{labels}")
    ax.set_yticks(range(len(methods)), methods)
    ax.set_ylim(len(methods) - 0.5, -0.5)
    _name_axes(ax, report, confidence)
    if len(counts) > 1:
        ax.legend(
            frameon=False,
            title="target labels",
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def _shades(counts: Sequence[int]) -> dict[int, Any]:
    """A colour for each number of labels, from dark to light."""
    from matplotlib import colormaps

    shades = colormaps["viridis"]
    last = max(1, len(counts) - 1)
    colors = {}
    for place, labels in enumerate(counts):
        colors[labels] = shades(0.3 + 0.45 * place / last)
    return colors


def _draw_cell(
    ax: "Axes",
    y: float,
    color: Any,
    measure: "Measure",
    results: Sequence["Result"],
    interval: Interval,
) -> None:
    """The seeds of one method and number of labels, their mean and its interval."""
    seeds = [measure.scale * result.test[measure.value] for result in results]
    mean = sum(seeds) / len(seeds)
    ax.plot(seeds, [y] * len(seeds), "|", color=color, alpha=0.6, markersize=7)
    if interval.low is not None and interval.high is not None:
        low = measure.scale * interval.low
        high = measure.scale * interval.high
        ax.plot([low, high], [y, y], color=color, linewidth=1.5)
    ax.plot([mean], [y], "o", color=color, markersize=6)
    if results[0].method == "scratch":
        ax.axvline(mean, color=color, linestyle=":", linewidth=1, zorder=0)


def _name_axes(ax: "Axes", report: "TransferReport", confidence: float) -> None:
    measure = report.measures[0]
    label = f"{measure.value} on the target test set"
    if measure.share:
        label += ", %"
    if len(report.labels) == 1:
        label += f" ({report.labels[0]} target labels)"
    ax.set_xlabel(label)
    title = f"mean and {100 * confidence:g} % interval; short strokes: seeds"
    if len({row.seed for row in report.results}) == 1:
        title = "one seed, no interval"
    ax.set_title(title, fontsize="small", loc="left")


def plot_information(
    report: "TransferReport",
    labels: int | None = None,
) -> tuple["Figure", list["Axes"]]:
    """Draw the information in the weights of each layer before and after fine-tuning, and what it added.

    Means over seeds, one panel a method. The scale is logarithmic above 1 nat and linear below.

    Args:
        report: What to draw.
        labels: Number of target labels; the smallest by default.

    Returns:
        The figure and its axes, one for each method that was measured.

    Raises:
        ValueError: If nothing was measured at this number of labels.
    """
    from matplotlib.figure import Figure

    if labels is None:
        labels = report.labels[0]
    found = {}
    for method in report.methods:
        moments = layer_information(report, method, labels)
        if moments:
            found[method] = moments
    if not found:
        raise ValueError(
            f"`labels` must be a number of labels at which information was measured, got {labels}."
        )
    layers: list[str] = []
    nats: list[float] = []
    for moments in found.values():
        for values in moments.values():
            layers += [layer for layer in values if layer not in layers]
            nats += values.values()
    rows = math.ceil(len(found) / 4)
    columns = math.ceil(len(found) / rows)
    width = 2.2 + 2.0 * columns
    height_of_row = 0.6 + 0.24 * len(layers)
    height = 0.9 + rows * height_of_row
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    axes = list(panels.flat)
    for ax in axes[len(found) :]:
        ax.remove()
    axes = axes[: len(found)]
    for index, method in enumerate(found):
        ax = axes[index]
        _dumbbells(ax, layers, found[method])
        ax.set_title(method, fontsize="small")
        is_lowest = index + columns >= len(found)
        ax.tick_params(labelbottom=is_lowest, labelsize="small")
    first = axes[0]
    first.set_yticks(range(len(layers)), layers)
    first.set_ylim(len(layers) - 0.5, -0.5)
    left = 0.6 * min(nats) if min(nats) >= 1 else 0
    first.set_xlim(left, 1.7 * max(nats))
    title = f"information in the weights by layer, nats ({labels} target labels)"
    figure.suptitle(title, fontsize="medium")
    handles, names = first.get_legend_handles_labels()
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": len(names)}
    figure.legend(handles, names, frameon=False, fontsize="small", **place)
    return figure, axes


def layer_information(
    report: "TransferReport",
    method: str,
    labels: int,
) -> dict[str, dict[str, float]]:
    """Return nats by layer, mean over seeds, for those of before, after and added that were measured."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in report.cell(method, labels).values():
        for moment, measured in (row.information or {}).items():
            layers = (measured or {}).get("layers", {})
            for layer, nats in layers.items():
                if nats is not None and math.isfinite(nats):
                    of_moment = found.setdefault(moment, {})
                    of_moment.setdefault(layer, []).append(nats)
    means: dict[str, dict[str, float]] = {}
    for moment, by_layer in found.items():
        means[moment] = {}
        for layer, seeds in by_layer.items():
            means[moment][layer] = sum(seeds) / len(seeds)
    return means


def _dumbbells(ax: "Axes", layers: list[str], moments: dict[str, dict[str, float]]) -> None:
    """One line per layer from before to after, and what was added as a mark of its own."""
    before = moments.get("before", {})
    after = moments.get("after", {})
    for row, layer in enumerate(layers):
        if layer in before and layer in after:
            ends = [before[layer], after[layer]]
            ax.plot(ends, [row, row], color="0.6", linewidth=1.5, zorder=1)
    for moment, (label, color, marker) in MOMENTS.items():
        values = moments.get(moment, {})
        rows = [row for row, layer in enumerate(layers) if layer in values]
        nats = [values[layers[row]] for row in rows]
        ax.plot(nats, rows, marker, color=color, markersize=5, label=label)
    ax.set_xscale("symlog", linthresh=1)
    ax.grid(axis="y", color="0.5", alpha=0.2, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def draw_all(report: "TransferReport", *, confidence: float = 0.95) -> dict[str, "Figure"]:
    """Return every figure for which the report has numbers, by the name of its file."""
    accuracy, _ = plot_accuracy(report, confidence=confidence)
    figures = {"accuracy": accuracy}
    for labels in report.labels:
        if any(layer_information(report, method, labels) for method in report.methods):
            information, _ = plot_information(report, labels)
            figures[f"information_{labels}"] = information
    return figures
