"""Figures of a transfer experiment: every function returns ``(figure, axes)`` and needs neither pyplot nor a screen."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_taskinfo.transfer.results import Interval, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_taskinfo.transfer.report import TransferReport

TARGET = ("fine_tune", "scratch")  # stages that train on the target
VALUES = {
    "val_accuracy": ("validation accuracy, %", 100), "val_loss": ("validation loss, nats", 1),
    "train_loss": ("training loss, nats", 1),
}  # fmt: skip
MOMENTS = {  # of information in the weights: label, colour, marker
    "before": ("before fine-tuning", "tab:blue", "o"),
    "after": ("after", "tab:orange", "o"),
    "added": ("added by fine-tuning", "tab:green", "D"),
}


def plot_accuracy(
    report: "TransferReport", *, confidence: float = 0.95, ax: "Axes | None" = None
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
    methods, counts, measure = report.methods, report.labels, report.measures[0]
    ax = (
        _grid(1, 1, 6.4, 1.1 + len(methods) * (0.22 + 0.17 * len(counts)))[0][0]
        if ax is None
        else ax
    )
    for index, labels in enumerate(counts):
        color, offset = (
            _shade(index, len(counts)),
            (index - (len(counts) - 1) / 2) * 0.7 / len(counts),
        )
        for row, method in enumerate(methods):
            values = [result.test[measure.value] for result in report.cell(method, labels).values()]
            if seeds := [measure.scale * value for value in values]:
                interval = report.summary(method, labels, measure.value, confidence)
                _interval(ax, interval, seeds, row + offset, color, measure.scale)
                if method == "scratch":
                    ax.axvline(
                        sum(seeds) / len(seeds), color=color, linestyle=":", linewidth=1, zorder=0
                    )
        ax.plot([], [], "o", color=color, label=f"{labels}")
    only = f" ({counts[0]} target labels)" if len(counts) == 1 else ""
    ax.set_yticks(range(len(methods)), methods)
    ax.set(
        ylim=(len(methods) - 0.5, -0.5),
        xlabel=f"{measure.value} on the target test set{', %' * measure.share}{only}",
    )
    single = len({row.seed for row in report.results}) == 1
    title = (
        "one seed, no interval"
        if single
        else f"mean and {100 * confidence:g} % interval; short strokes: seeds"
    )
    ax.set_title(title, fontsize="small", loc="left")
    if not only:
        ax.legend(frameon=False, title="target labels", loc="center left", bbox_to_anchor=(1, 0.5))
    _tidy(ax)
    return ax.figure, ax  # type: ignore[return-value]


def plot_learning_curves(
    report: "TransferReport", *, stages: Iterable[str] = TARGET, values: Sequence[str] | None = None
) -> tuple["Figure", list[list["Axes"]]]:
    """Draw learning curves, one column a number of labels, one row a value: mean, and the range over seeds as a band.

    Args:
        report: What to draw.
        stages: Stages to draw, ``"pretrain"``, ``"fine_tune"`` or ``"scratch"``.
        values: Names of what to draw, of those in the curves; accuracy and loss on the validation samples where there
            are any, the training loss otherwise.

    Returns:
        The figure and its axes, by row and column.

    Raises:
        ValueError: If there are no such curves.
    """
    from matplotlib.ticker import MaxNLocator

    stages, counts = tuple(stages), report.labels
    found = [point for row in report.results for point in row.curves if point["stage"] in stages]
    if not found:
        raise ValueError(f"`report` must hold curves of the stages {list(stages)}, got none.")
    if values is None:
        names = list(
            dict.fromkeys(
                name for point in found for name in point if name not in ("stage", "epoch")
            )
        )
        values = [name for name in ("val_accuracy", "val_loss") if name in names]
        values = values or ["train_loss" if "train_loss" in names else names[0]]
    width, height = max(5.0, 1.2 + 2.6 * len(counts)), 0.8 + 2.2 * len(values)
    axes = _grid(len(values), len(counts), width, height, sharex=True, sharey="row")
    styles = _styles(report.methods)
    for axes_row, value in zip(axes, values, strict=True):
        title, scale = VALUES.get(value, (value, 1))
        for ax, labels in zip(axes_row, counts, strict=True):
            for method in report.methods:
                points = _by_epoch(report.cell(method, labels).values(), stages, value, scale)
                _band(ax, points, method, styles[method])
            _tidy(ax)
        axes_row[0].set_ylabel(title)
    for ax, labels in zip(axes[0], counts, strict=True):
        ax.set_title(f"{labels} target labels", fontsize="medium")
    for ax in axes[-1]:
        ax.set_xlabel("epoch")
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    single = len({row.seed for row in report.results}) == 1
    _legend_below(axes, "one seed" if single else "mean over seeds; band: smallest to largest")
    return axes[0][0].figure, axes  # type: ignore[return-value]


def plot_information(
    report: "TransferReport", labels: int | None = None
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
    labels = report.labels[0] if labels is None else labels
    means = {method: layer_information(report, method, labels) for method in report.methods}
    means = {method: moments for method, moments in means.items() if moments}
    if not means:
        raise ValueError(
            f"`labels` must be a number of labels at which information was measured, got {labels}."
        )
    layers = list(
        dict.fromkeys(
            name for moments in means.values() for values in moments.values() for name in values
        )
    )
    rows = math.ceil(len(means) / 4)
    columns = math.ceil(len(means) / rows)
    grid = _grid(
        rows,
        columns,
        2.2 + 2.0 * columns,
        0.9 + rows * (0.6 + 0.24 * len(layers)),
        sharex=True,
        sharey=True,
    )
    axes = [ax for axes_row in grid for ax in axes_row]
    for ax in axes[len(means) :]:
        ax.remove()
    for index, (ax, (method, moments)) in enumerate(zip(axes, means.items(), strict=False)):
        _dumbbells(ax, layers, moments)
        ax.set_title(method, fontsize="small")
        ax.tick_params(labelbottom=index + columns >= len(means), labelsize="small")
    nats = [
        value
        for moments in means.values()
        for values in moments.values()
        for value in values.values()
    ]
    axes[0].set_yticks(range(len(layers)), layers)
    axes[0].set(
        xlim=(0.6 * min(nats) if min(nats) >= 1 else 0, 1.7 * max(nats)),
        ylim=(len(layers) - 0.5, -0.5),
    )
    title = f"information in the weights by layer, nats ({labels} target labels)"
    axes[0].figure.suptitle(title, fontsize="medium")
    _legend_below(grid, "")
    return axes[0].figure, axes[: len(means)]  # type: ignore[return-value]


def layer_information(
    report: "TransferReport", method: str, labels: int
) -> dict[str, dict[str, float]]:
    """Return nats by layer, mean over seeds, for those of before, after and added that were measured."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in report.cell(method, labels).values():
        for moment in MOMENTS:
            measured = (row.information or {}).get(moment) or {}
            for layer, nats in measured.get("layers", {}).items():
                if nats is not None and math.isfinite(nats):
                    found.setdefault(moment, {}).setdefault(layer, []).append(nats)
    return {
        moment: {layer: sum(nats) / len(nats) for layer, nats in layers.items()}
        for moment, layers in found.items()
    }


def draw_all(report: "TransferReport", *, confidence: float = 0.95) -> dict[str, "Figure"]:
    """Return every figure for which the report has numbers, by the name of its file."""
    figures = {"accuracy": plot_accuracy(report, confidence=confidence)[0]}
    if any(
        point["stage"] in TARGET and len(point) > 2
        for row in report.results
        for point in row.curves
    ):
        figures["curves"] = plot_learning_curves(report)[0]
    for labels in report.labels:
        if any(layer_information(report, method, labels) for method in report.methods):
            figures[f"information_{labels}"] = plot_information(report, labels)[0]
    return figures


def _interval(
    ax: "Axes", interval: Interval, seeds: list[float], y: float, color: Any, scale: float
) -> None:
    """Mean, interval where there is one, and the seeds."""
    ax.plot(seeds, [y] * len(seeds), "|", color=color, alpha=0.6, markersize=7)
    if interval.low is not None and interval.high is not None:
        ax.plot([scale * interval.low, scale * interval.high], [y, y], color=color, linewidth=1.5)
    ax.plot([sum(seeds) / len(seeds)], [y], "o", color=color, markersize=6)


def _by_epoch(
    rows: Iterable[Result], stages: Sequence[str], value: str, scale: float
) -> dict[int, list[float]]:
    """Values of all seeds by epoch; what is missing or not finite is left out."""
    points: dict[int, list[float]] = {}
    for point in (point for row in rows for point in row.curves):
        if (
            point["stage"] in stages
            and point.get(value) is not None
            and math.isfinite(point[value])
        ):
            points.setdefault(point["epoch"], []).append(scale * point[value])
    return dict(sorted(points.items()))


def _band(ax: "Axes", points: dict[int, list[float]], label: str, style: dict[str, Any]) -> None:
    """Mean over seeds by epoch, and the range."""
    epochs, seeds = list(points), points.values()
    ax.plot(
        epochs, [sum(values) / len(values) for values in seeds], label=label, linewidth=1.5, **style
    )
    low, high = [min(values) for values in seeds], [max(values) for values in seeds]
    ax.fill_between(epochs, low, high, color=style["color"], alpha=0.12, linewidth=0)


def _dumbbells(ax: "Axes", layers: Sequence[str], moments: dict[str, dict[str, float]]) -> None:
    """One line a layer from before to after, and what was added as a mark of its own."""
    before, after = moments.get("before", {}), moments.get("after", {})
    for row, layer in enumerate(layers):
        if layer in before and layer in after:
            ax.plot([before[layer], after[layer]], [row, row], color="0.6", linewidth=1.5, zorder=1)
    for moment, (label, color, marker) in MOMENTS.items():
        values = moments.get(moment, {})
        known = [(values[layer], row) for row, layer in enumerate(layers) if layer in values]
        ax.plot(
            [x for x, _ in known],
            [y for _, y in known],
            marker,
            color=color,
            markersize=5,
            label=label,
        )
    ax.set_xscale("symlog", linthresh=1)
    ax.grid(axis="y", color="0.5", alpha=0.2, linewidth=0.6)
    _tidy(ax)


def _styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Training from scratch in grey and dashed, the others in colours, the second round of them dash-dotted."""
    colors = [f"C{index}" for index in (0, 1, 2, 3, 4, 5, 6, 8, 9)]
    styles: dict[str, dict[str, Any]] = {}
    for index, method in enumerate(name for name in methods if name != "scratch"):
        styles[method] = {"color": colors[index % 9], "linestyle": "-" if index < 9 else "-."}
    return {**styles, "scratch": {"color": "0.5", "linestyle": "--"}}


def _shade(index: int, count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](0.3 + 0.45 * index / max(1, count - 1))


def _grid(rows: int, columns: int, width: float, height: float, **share: Any) -> list[list["Axes"]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure.subplots(rows, columns, squeeze=False, **share).tolist()


def _legend_below(axes: list[list["Axes"]], title: str) -> None:
    """One legend for all axes, each entry once."""
    entries: dict[str, Any] = {}
    for ax in (ax for axes_row in axes for ax in axes_row if ax.figure is not None):
        handles, labels = ax.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure = axes[0][0].figure
    columns = max(1, min(len(entries), int(figure.get_figwidth() / 1.9)))  # type: ignore[union-attr]
    figure.legend(
        entries.values(), entries, loc="outside lower center", ncols=columns, frameon=False, title=title or None,
        fontsize="small", title_fontsize="small",
    )  # fmt: skip


def _tidy(ax: "Axes") -> None:
    ax.spines[["top", "right"]].set_visible(False)
