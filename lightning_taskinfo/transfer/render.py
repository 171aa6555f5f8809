"""The report in words, tables and a figure, described once, and written as text and Markdown."""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby, product
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lightning_taskinfo._tables import text_table
from lightning_taskinfo.certificates.certificate import percent
from lightning_taskinfo.plotting import Panels, plot_intervals

if TYPE_CHECKING:
    from lightning_taskinfo.transfer.report import Comparison, Measure, Result, TransferReport

PROOFS = {"stochastic": "randomised", "network": "the network itself", "test_set": "by test labels"}
MEASURED = {  # columns of means over seeds: attribute of a result, and key in it
    "source_accuracy": ("source", "accuracy"),
    "information_before": ("information", "before"),
    "information_after": ("information", "after"),
    "information_added": ("information", "added"),
    "fisher_trace_before": ("fisher_trace", "before"),
    "fisher_trace_after": ("fisher_trace", "after"),
    "features_miss": ("overlap", "outside"),
}

Row = dict[str, str]  # of a table: its cells by the titles of their columns
Values = dict[str, Any]


# Tables


def main_table(report: "TransferReport", measures: Sequence["Measure"]) -> list[Row]:
    """What was measured and the gains, one row for each number of labels and method."""
    shown = []
    for row in report.table():
        cells = {key: f"{row[key]}" for key in ("labels", "method", "seeds")}
        for measure in measures:
            title = f"{measure.name}, {'%' if measure.share else measure.unit}"
            cells[title.removesuffix(", ")] = _estimate(row, measure.name, measure)
        for baseline, measure in product(("scratch", "standard"), measures):
            title = f"gain over {baseline}: {measure.name}, {measure.unit}".removesuffix(", ")
            cells[title] = _estimate(row, f"over_{baseline}_{measure.name}", measure, "+")
        shown.append(cells)
    return _filled(shown)


def held_table(report: "TransferReport") -> list[Row]:
    """What was measured beside it, means over seeds; nothing if nothing was."""
    rows = []
    for row in report.table():
        cells = {key: f"{row[key]}" for key in ("labels", "method")}
        for key in MEASURED:
            cells[key.replace("_", " ")] = _number(row[key], ".4g")
        rows.append(cells)
    return _filled(rows)


def _filled(rows: Sequence[Row]) -> list[Row]:
    """Rows without the columns in which nothing is; none if they have but labels and method."""
    titles = {title for row in rows for title in row if row[title]}
    kept = [{title: row[title] for title in row if title in titles} for row in rows]
    return kept if len(titles) > 2 else []


def _estimate(
    row: Values,
    key: str,
    measure: "Measure",
    sign: str = "",
) -> str:
    """Mean and interval, and of a gain the verdict, with the reason where there is no interval."""
    mean, low, high = (_shown(row[f"{key}{end}"], measure, sign) for end in ("", "_low", "_high"))
    words = [mean, f"[{low}, {high}]" if low else "", row.get(f"{key}_verdict")]
    if reason := row.get(f"{key}_reason"):
        words.append(f"({reason})")
    return " ".join(word for word in words if word)


def _shown(value: float | None, measure: "Measure", sign: str) -> str:
    scaled = None if value is None else measure.scale * value
    return _number(scaled, f"{sign}.{1 if measure.share else 3}f")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form).replace("-", "−")


# Sentences


def findings(report: "TransferReport") -> list[str]:
    """What is certified, where each start comes from, what is missing, and advice."""
    lines = []
    for labels, method, results in report.cells():
        certificates = _measured(results, "certificate")
        lines += [f"{labels} labels, {method}, {text}." for text in _certified(certificates)]
    if certificates := _measured(report.results, "certificate"):
        sure = min(one["confidence"] for one in certificates)
        trusted = _joined(certificates, "assumptions")
        lines.append(
            f"Each bound holds with a probability of {sure:.2f}, if this is true: {trusted}."
        )
    lines += [f"Start {name}: {origin}." for name, origin in report.starts.items()]
    if "scratch" not in report.methods:
        lines.append(
            "No run from scratch is among the results: whether transfer helps cannot be said."
        )
    measure = report.measures[0]
    over_scratch = [
        gain
        for gain in report.transferability()
        if (gain.baseline, gain.measure) == ("scratch", measure.name)
    ]
    if over_scratch:
        lines.append(f"Advice: {_advice(over_scratch, measure)}.")
    return lines


def _measured(results: Iterable["Result"], name: str) -> list[Values]:
    values = [getattr(result, name) for result in results]
    return [value for value in values if value]


def _certified(certificates: Sequence[Values]) -> list[str]:
    """The largest of the bounds that may be claimed, rounded up; and why others may not."""
    valid = [one for one in certificates if one["valid"]]
    proofs = []
    for name, proof in PROOFS.items():
        if bounds := [one[name] for one in valid if one[name] is not None]:
            proofs.append(f"{percent(max(bounds))} ({proof})")
    said = []
    if proofs:
        said.append(f"certified, the largest bound of a seed: {', '.join(proofs)}")
    if len(valid) < len(certificates):
        claimed = f"certified in {len(valid)} of {len(certificates)} seeds"
        said.append(f"{claimed}. Not valid where: {_joined(certificates, 'reasons')}")
    return said


def _joined(certificates: Sequence[Values], key: str) -> str:
    return "; ".join(dict.fromkeys(text for one in certificates for text in one[key]))


def _advice(over_scratch: Sequence["Comparison"], measure: "Measure") -> str:
    """What to take for each number of labels: what helps most over scratch, or scratch itself."""
    said = []
    for labels, group in groupby(over_scratch, attrgetter("labels")):
        ordered = sorted(group, key=lambda gain: gain.gain.mean or 0.0)
        here = {gain.verdict: gain for gain in ordered}
        what = "nothing was seen to help: train from scratch, or add seeds"
        if best := here.get("helps"):
            by = f"{_shown(best.gain.mean, measure, '+')} {measure.unit}".strip()
            what = f"take {best.method} ({by} over scratch)"
        elif [*here] == ["hurts"]:
            what = "train from scratch"
        elif {gain.gain.reason for gain in ordered} == {"one seed"}:
            what = "one seed cannot tell: add seeds"
        said.append(f"with {labels} labels {what}")
    return "; ".join(said)


MEANING = """\
- **Intervals.** Student's t intervals over seeds, for normally distributed values. They say how sure the mean over \
seeds is, not how far one more run may lie from it; with two or three seeds they are wide. Seeds that all gave the \
same have no interval. One seed has no interval, and no verdict rests on it.
- **Gains.** T = R(baseline) − R(method), the risk R on the target test set, from differences between runs of the \
same seed, which share their split. Positive is better. Over scratch: does transfer help at all? Over standard: does \
the method add anything to plain fine-tuning? Without a baseline among the results there are none.
- **Helps, hurts, cannot tell.** Where the interval of the gain lies: above 0, below 0, or neither. “Cannot tell” \
does not mean that there is no difference. The intervals are not corrected for their number: of comparisons without \
any true difference, a share is still called one way or the other.
- **Information in the weights.** An estimate in nats: the KL divergence of a Gaussian around the trained weights, as \
wide as the curvature of the loss allows, from the pre-distribution of the configuration. Before and after are \
measured from the initialisation, added from the pretrained weights, so that added is not after minus before. It \
depends on the width of the pre-distribution and on the data it is measured on: compare it between networks of one \
report, not across reports. It certifies nothing.
- **Fisher trace.** Mean over samples of the squared gradient norm of the log-likelihood: how sharply the predictions \
depend on the weights. It is no measure of quality.
- **Features miss.** Share of the target labels' variance that a linear read-out of the frozen features of the last \
layer leaves unexplained on held-out samples, before fine-tuning.
- **Certified.** Upper bounds on the true error. Each bound of a seed holds by itself; of several, the one that was \
picked for being the smallest does not. Randomised: a network whose weights are drawn anew for every prediction, by \
PAC-Bayes with the start's weights as the prior's centre, where frozen weights cost nothing and a fresh head has its \
random centre. The network itself: the same, and how often the two disagree on inputs that served nothing else. By \
test labels: the binomial bound on the test set."""


# Text and Markdown


def to_markdown(report: "TransferReport", picture: str) -> str:
    """The whole report, with the figure as a file beside it."""
    parts = [
        f"# {_escaped(report.name)}",
        "\n".join(f"- {_escaped(line)}" for line in findings(report)),
        _markdown(main_table(report, report.measures)),
    ]
    if picture:
        parts.append(f"![{CAPTION}]({picture})")
    if held := held_table(report):
        parts += ["## What was measured beside it, means over seeds", _markdown(held)]
    parts.append(f"## What the numbers mean, and what not\n\n{MEANING}\n")
    return "\n\n".join(parts)


def _escaped(text: str) -> str:
    """Text in which Markdown sees no markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


def _markdown(rows: Sequence[Row]) -> str:
    lines = [[*rows[0]], ["---"] * len(rows[0])]
    lines += [[_escaped(cell) for cell in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_terminal(report: "TransferReport") -> str:
    """The gains by the first measure as a table, and the findings."""
    rows = main_table(report, report.measures[:1])
    lines = [
        f"{report.name}, {100 * report.confidence:g} % intervals",
        text_table([*rows[0]], [[*row.values()] for row in rows]),
    ]
    return "\n".join(lines + findings(report))


# The figure

CAPTION = "Results on the target test set, by method and number of target labels"


def plot_results(report: "TransferReport") -> Panels:
    """Draw the target test accuracy, or the metric, of every method: mean and interval, one panel a number of labels.

    Short strokes are the seeds; a dotted line continues the mean of training from scratch.
    """
    from matplotlib.figure import Figure

    measure = report.measures[0]
    count = len(report.labels)
    size = (2.6 + 2.2 * count, 1.7 + 0.24 * len(report.methods))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    (panels,) = figure.subplots(1, count, sharex=True, sharey=True, squeeze=False)
    for ax, labels in zip(panels, report.labels, strict=True):
        ends = []  # lower ends, means and upper ends, NaN where there are none
        for place, method in enumerate(report.methods):
            found = report.summary(method, labels, measure)
            known = (found.low, found.mean, found.high)
            ends.append([math.nan if end is None else measure.scale * end for end in known])
            seeds = report.values(method, labels, measure).values()
            values = [measure.scale * value for value in seeds]
            ax.plot(values, [place] * len(values), "|", color="C0", alpha=0.6)
            if method == "scratch":
                ax.axvline(ends[place][1], color="0.5", linestyle=":", zorder=0)
        plot_intervals(report.methods, *zip(*ends, strict=True), xlabel="", ax=ax)
        ax.set_title(f"{labels} target labels", fontsize="medium")
    figure.supxlabel(f"{measure.name} on the target test set{', %' * measure.share}")
    figure.suptitle(f"mean and {100 * report.confidence:g} % interval; short strokes: seeds")
    return figure, [*panels]
