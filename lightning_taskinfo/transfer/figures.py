"""Figures of a transfer experiment: every function returns ``(figure, axes)`` and needs neither pyplot nor a screen."""

import math
from collections import defaultdict
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_taskinfo.transfer.report import TransferReport

MOMENTS = {  # of information in the weights: label, colour, marker
    "before": ("before fine-tuning", "tab:blue", "o"),
    "after": ("after", "tab:orange", "o"),
    "added": ("added by fine-tuning", "tab:green", "D"),
}
Moments = dict[str, dict[str, float]]  # nats by moment and layer


def plot_accuracy(report: "TransferReport", confidence: float) -> tuple["Figure", "Axes"]:
    """Draw the target test accuracy, or the metric, of every method: mean and interval, one colour a number of labels.

    Short strokes are the seeds; a dotted line continues the mean of training from scratch.
    """
    from matplotlib import colormaps

    from lightning_taskinfo.plotting import figure_and_axes

    methods, counts = report.methods, report.labels
    measure = report.measures[0]
    height = 1.1 + len(methods) * (0.22 + 0.17 * len(counts))
    figure, ax = figure_and_axes(None, size=(6.4, height))
    last = len(counts) - 1
    dots = {}
    for labels, method, results in report.cells():
        place = counts.index(labels)
        color = colormaps["viridis"](0.3 + 0.45 * place / max(1, last))
        y = methods.index(method) + (place - last / 2) * 0.7 / len(counts)
        values = [measure.scale * result.test[measure.value] for result in results]
        mean = fmean(values)
        ax.plot(values, [y] * len(values), "|", color=color, alpha=0.6, markersize=7)
        interval = report.summary(method, labels, measure.value, confidence)
        if interval.low is not None and interval.high is not None:
            ends = [measure.scale * end for end in (interval.low, interval.high)]
            ax.plot(ends, [y, y], color=color, linewidth=1.5)
        dots[labels] = ax.plot([mean], [y], "o", color=color, markersize=6)[0]
        if method == "scratch":
            ax.axvline(mean, color=color, linestyle=":", linewidth=1, zorder=0)
    ax.set_yticks(range(len(methods)), methods)
    ax.set_ylim(len(methods) - 0.5, -0.5)
    shown = f"{measure.value} on the target test set{', %' * measure.share}"
    if last:
        beside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
        ax.legend(dots.values(), dots, frameon=False, title="target labels", **beside)
    else:
        shown += f" ({counts[0]} target labels)"
    ax.set_xlabel(shown)
    title = f"mean and {100 * confidence:g} % interval; short strokes: seeds"
    if len({row.seed for row in report.results}) == 1:
        title = "one seed, no interval"
    ax.set_title(title, fontsize="small", loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def layer_information(report: "TransferReport", labels: int) -> dict[str, Moments]:
    """Return nats by method, moment and layer, mean over seeds, of those that were measured."""
    found: dict[str, Moments] = {}
    for count, method, results in report.cells():
        for moment in MOMENTS if count == labels else ():
            nats = defaultdict(list)
            for result in results:
                measured = (result.information or {}).get(moment) or {"layers": {}}
                for layer, value in measured["layers"].items():
                    if math.isfinite(value):
                        nats[layer].append(value)
            if nats:
                means = {layer: fmean(values) for layer, values in nats.items()}
                found.setdefault(method, {})[moment] = means
    return found


def plot_information(report: "TransferReport", labels: int) -> tuple["Figure", list["Axes"]]:
    """Draw the information in the weights of each layer before and after fine-tuning, and what it added.

    Means over seeds, one panel a method. The scale is logarithmic above 1 nat and linear below.
    """
    from matplotlib.figure import Figure

    found = layer_information(report, labels)
    every = [values for moments in found.values() for values in moments.values()]
    layers = list(dict.fromkeys(layer for values in every for layer in values))
    rows = math.ceil(len(found) / 4)
    columns = math.ceil(len(found) / rows)
    size = (2.2 + 2.0 * columns, 0.9 + rows * (0.6 + 0.24 * len(layers)))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for ax in panels.flat[len(found) :]:
        ax.remove()
    for ax, (method, moments) in zip(panels.flat, found.items(), strict=False):
        values = {}
        for moment in MOMENTS:
            measured = moments.get(moment, {})
            values[moment] = [measured.get(layer, math.nan) for layer in layers]
        ax.hlines(range(len(layers)), values["before"], values["after"], color="0.6", zorder=1)
        for moment, (label, color, marker) in MOMENTS.items():
            ax.plot(values[moment], layers, marker, color=color, markersize=5, label=label)
        ax.set_title(method, fontsize="small")
        ax.tick_params(labelbottom=True, labelsize="small")
        ax.set_xscale("symlog", linthresh=1)
        ax.grid(axis="y", color="0.5", alpha=0.2, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]
    first.set_ylim(len(layers) - 0.5, -0.5)
    nats = [value for values in every for value in values.values()]
    first.set_xlim(0.6 * min(nats) if min(nats) >= 1 else 0, 1.7 * max(nats))
    title = f"information in the weights by layer, nats ({labels} target labels)"
    figure.suptitle(title, fontsize="medium")
    handles, names = first.get_legend_handles_labels()
    below = {"frameon": False, "fontsize": "small", "ncols": len(names)}
    figure.legend(handles, names, loc="outside lower center", **below)
    return figure, figure.axes


def draw_all(report: "TransferReport", confidence: float) -> dict[str, "Figure"]:
    """Return every figure for which the report has numbers, by the name of its file."""
    figures = {"accuracy": plot_accuracy(report, confidence)[0]}
    for labels in report.labels:
        if layer_information(report, labels):
            figures[f"information_{labels}"] = plot_information(report, labels)[0]
    return figures
