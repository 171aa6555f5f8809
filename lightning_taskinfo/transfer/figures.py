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
    height = 1.1 + len(methods) * (0.22 + 0.17 * len(counts))
    figure, ax = figure_and_axes(ax, size=(6.4, height))
    colors = _shades(counts)
    for labels, method, results in report.cells():
        place = counts.index(labels) - (len(counts) - 1) / 2
        y = methods.index(method) + place * 0.7 / len(counts)
        interval = report.summary(method, labels, report.measures[0].value, confidence)
        _draw_cell(ax, y, colors[labels], report.measures[0], results, interval)
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
    return {labels: shades(0.3 + 0.45 * place / last) for place, labels in enumerate(counts)}


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
        ends = [measure.scale * interval.low, measure.scale * interval.high]
        ax.plot(ends, [y, y], color=color, linewidth=1.5)
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

    labels = report.labels[0] if labels is None else labels
    found = {method: layer_information(report, method, labels) for method in report.methods}
    found = {method: moments for method, moments in found.items() if moments}
    if not found:
        raise ValueError(
            f"`labels` must be a number of labels at which information was measured, got {labels}."
        )
    parts = [values for moments in found.values() for values in moments.values()]
    layers = list(dict.fromkeys(layer for values in parts for layer in values))
    nats = [value for values in parts for value in values.values()]
    rows = math.ceil(len(found) / 4)
    columns = math.ceil(len(found) / rows)
    height = 0.9 + rows * (0.6 + 0.24 * len(layers))
    figure = Figure(figsize=(2.2 + 2.0 * columns, height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for ax in axes[len(found) :]:
        ax.remove()
    for index, (ax, (method, moments)) in enumerate(zip(axes, found.items(), strict=False)):
        _dumbbells(ax, layers, moments)
        ax.set_title(method, fontsize="small")
        ax.tick_params(labelbottom=index + columns >= len(found), labelsize="small")
    axes[0].set_yticks(range(len(layers)), layers)
    axes[0].set_ylim(len(layers) - 0.5, -0.5)
    axes[0].set_xlim(0.6 * min(nats) if min(nats) >= 1 else 0, 1.7 * max(nats))
    title = f"information in the weights by layer, nats ({labels} target labels)"
    figure.suptitle(title, fontsize="medium")
    handles, names = axes[0].get_legend_handles_labels()
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": len(names)}
    figure.legend(handles, names, frameon=False, fontsize="small", **place)
    return figure, axes[: len(found)]


def layer_information(
    report: "TransferReport",
    method: str,
    labels: int,
) -> dict[str, dict[str, float]]:
    """Return nats by layer, mean over seeds, for those of before, after and added that were measured."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in report.cell(method, labels).values():
        for moment, measured in (row.information or {}).items():
            for layer, nats in (measured or {}).get("layers", {}).items():
                if nats is not None and math.isfinite(nats):
                    found.setdefault(moment, {}).setdefault(layer, []).append(nats)
    return {
        moment: {layer: sum(nats) / len(nats) for layer, nats in layers.items()}
        for moment, layers in found.items()
    }


def _dumbbells(ax: "Axes", layers: list[str], moments: dict[str, dict[str, float]]) -> None:
    """One line per layer from before to after, and what was added as a mark of its own."""
    before, after = moments.get("before", {}), moments.get("after", {})
    for row, layer in enumerate(layers):
        if layer in before and layer in after:
            ax.plot([before[layer], after[layer]], [row, row], color="0.6", linewidth=1.5, zorder=1)
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
    figures = {"accuracy": plot_accuracy(report, confidence=confidence)[0]}
    for labels in report.labels:
        if any(layer_information(report, method, labels) for method in report.methods):
            figures[f"information_{labels}"] = plot_information(report, labels)[0]
    return figures
