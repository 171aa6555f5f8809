"""The report in words, tables and a figure, described once, and written as text and Markdown."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, product
from operator import attrgetter
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from lightning_taskinfo._tables import text_table
from lightning_taskinfo.certificates.certificate import percent, round_up
from lightning_taskinfo.transfer.overlap import is_far

if TYPE_CHECKING:
    from lightning_taskinfo.plotting import Axes, Figure
    from lightning_taskinfo.transfer.report import Comparison, Measure, Result, TransferReport

VERDICTS = ("helps", "hurts", "cannot tell")
PROOFS = {"stochastic": "randomised", "network": "the network itself", "test_set": "by test labels"}
HELD = {  # columns of what networks hold: name in the report's table, scale, format
    "source accuracy, %": ("source_accuracy", 100, ".1f"),
    "information before, nats": ("information_before", 1, ",.1f"),
    "information after, nats": ("information_after", 1, ",.1f"),
    "information added, nats": ("information_added", 1, ",.1f"),
    "Fisher trace before": ("fisher_trace_before", 1, ".4g"),
    "Fisher trace after": ("fisher_trace_after", 1, ".4g"),
}

Row = dict[str, str]  # of a table: its cells by the titles of their columns
Values = dict[str, Any]


# Tables


def tables(report: "TransferReport", confidence: float) -> dict[str, list[Row]]:
    """Return the rows of all tables for which there are numbers, by their headings."""
    held = []
    for row in report.table(confidence):
        cells = _about(row["labels"], row["method"])
        for title, (key, scale, form) in HELD.items():
            cells[title] = _number(row[key], scale, form)
        held.append(cells)
    found = {
        "Did it help?": main_table(report, confidence, report.measures),
        "What can be certified": _measured_table(report, "certificate", _bounds),
        "What the networks hold": _filled(held),
        "Before fine-tuning: what the features miss": _measured_table(report, "overlap", _missed),
    }
    return {heading: rows for heading, rows in found.items() if rows}


def main_table(
    report: "TransferReport",
    confidence: float,
    measures: Sequence["Measure"],
) -> list[Row]:
    """What was measured and the gains, one row for each number of labels and method."""
    shown = []
    for row in report.table(confidence):
        cells = _about(row["labels"], row["method"]) | {"seeds": f"{row['seeds']}"}
        for measure in measures:
            title = f"{measure.value}, {'%' if measure.share else measure.unit}"
            cells[title.removesuffix(", ")] = _estimate(row, measure.value, measure)
        for baseline, measure in product(("scratch", "standard"), measures):
            title = f"gain over {baseline}: {measure.name}, {measure.unit}".removesuffix(", ")
            cells[title] = _estimate(row, f"over_{baseline}_{measure.name}", measure, "+")
        shown.append(cells)
    return _filled(shown)


def _measured_table(
    report: "TransferReport",
    name: str,
    described: Callable[[list[Values], Sequence[int]], list[Row]],
) -> list[Row]:
    """Rows that describe what was measured beside training."""
    rows = []
    for labels, method, results in report.cells():
        if values := _measured(results, name):
            rows += [_about(labels, method) | row for row in described(values, report.labels)]
    return _filled(rows)


def _about(labels: int, method: str) -> Row:
    return {"labels": f"{labels}", "method": method}


def _filled(rows: Sequence[Row]) -> list[Row]:
    """Rows without the columns in which nothing is; none if they have but labels and method."""
    titles = {title for row in rows for title in row if row[title]}
    kept = [{title: row[title] for title in row if title in titles} for row in rows]
    return kept if len(titles) > 2 else []


def _measured(results: Iterable["Result"], name: str) -> list[Values]:
    values = [getattr(result, name) for result in results]
    return [value for value in values if value]


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
    digits = 1 if measure.share else 3
    return _number(value, measure.scale, f"{sign}.{digits}f")


def _number(value: float | None, scale: float, form: str) -> str:
    return "" if value is None else format(scale * value, form).replace("-", "−")


def _bounds(certificates: Sequence[Values], _measured_labels: Sequence[int]) -> list[Row]:
    """Upper bounds, rounded up."""
    row = {}
    for name, proof in PROOFS.items():
        row[f"{proof}, %"] = _range([round_up(bound, 3) for bound in _known(certificates, name)])
    valid = sum(one["valid"] for one in certificates)
    return [row | {"valid": f"{valid} of {len(certificates)}"}]


def _known(certificates: Iterable[Values], name: str) -> list[float]:
    return [one[name] for one in certificates if one[name] is not None]


def _missed(overlaps: Sequence[Values], measured_labels: Sequence[int]) -> list[Row]:
    """Share of the target labels' variance that the features of each layer miss."""
    rows = []
    for place, layer in enumerate(overlaps[0]["layers"]):
        shares, errors = (
            _range([one[key][place] for one in overlaps]) for key in ("outside", "standard_error")
        )
        row = {"layer": layer, "outside, %": shares, "standard error, %": errors}
        row["predicted to hurt from, labels"] = _onset(overlaps, measured_labels)
        rows.append(row)
    return rows


def _range(shares: Sequence[float]) -> str:
    """Mean, smallest and largest of some shares, in percent."""
    if not shares:
        return ""
    mean, low, high = (f"{100 * of(shares):.1f}" for of in (fmean, min, max))
    return f"{mean} ({low} to {high})" if len(shares) > 1 else mean


def _onset(overlaps: Sequence[Values], measured_labels: Sequence[int]) -> str:
    """Median over seeds, from the lowest lower to the highest upper end, and a word if it is far from all labels."""
    found = [one["onset"] for one in overlaps if one.get("onset")]
    if not found:
        return ""
    lows, middles, highs = (
        [math.inf if end is None else end for end in ends] for ends in zip(*found, strict=True)
    )
    onset = median(middles)
    span = (min(lows), onset, max(highs))
    low, middle, high = (f"{value:,.0f}".replace("inf", "∞") for value in span)
    far = ", extrapolated far" if is_far(onset, measured_labels) else ""
    return f"{middle} [{low}, {high}]{far}"


# Sentences


def findings(report: "TransferReport", confidence: float) -> list[str]:
    """One sentence for each number of labels and baseline, and for each start; what is missing; and advice."""
    gains = sorted(report.transferability(confidence), key=attrgetter("labels"))
    lines = []
    for (labels, baseline), group in groupby(gains, attrgetter("labels", "baseline")):
        members = list(group)
        said: Row = {}
        for measure in report.measures:
            words = _words([gain for gain in members if gain.measure == measure.name])
            said[measure.name] = "the same" if words in said.values() else words
        parts = "; ".join(f"by the {name} {words}" for name, words in said.items())
        lines.append(f"{labels} labels, against {baseline}: {parts}.")
    for labels, method, results in report.cells():
        valid = [one for one in _measured(results, "certificate") if one["valid"]]
        proofs = []
        for name, proof in PROOFS.items():
            if bounds := _known(valid, name):
                proofs.append(f"{percent(max(bounds))} ({proof})")
        if proofs:
            largest = f"certified, the largest bound of a seed: {', '.join(proofs)}"
            lines.append(f"{labels} labels, {method}, {largest}.")
    lines += [f"Start {name}: {origin}." for name, origin in report.starts.items()]
    if "scratch" not in report.methods:
        lines.append(
            "No run from scratch is among the results: whether transfer helps cannot be said."
        )
    measure = report.measures[0]
    by_it = [gain for gain in gains if gain.measure == measure.name]
    if over_scratch := [gain for gain in by_it if gain.baseline == "scratch"]:
        lines.append(f"Advice: {_advice(over_scratch, measure)}.")
    return lines


def _words(group: Sequence["Comparison"]) -> str:
    """Which methods help, which hurt, and of which nothing can be said, and why."""
    parts = []
    for verdict in VERDICTS:
        members = [gain for gain in group if gain.verdict == verdict]
        reasons = sorted({gain.gain.reason for gain in members} - {""})
        why = f" ({'; '.join(reasons)})" if reasons else ""
        if members:
            names = ", ".join(gain.method for gain in members)
            parts.append(f"“{verdict}” for {names}{why}")
    return ", ".join(parts)


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
        said.append(f"with {labels} labels {what}")
    return "; ".join(said)


def notes(report: "TransferReport", confidence: float) -> Row:
    """What each number means, by term: only of what the report shows."""
    comparisons = len(report.transferability(confidence))
    certificates = _measured(report.results, "certificate")
    trusted, reasons = (
        "; ".join(dict.fromkeys(text for one in certificates for text in one[key]))
        for key in ("assumptions", "reasons")
    )
    units = {"points": " (in percentage points)", "nats": " (cross-entropy in nats)", "": ""}
    risks = [f"as {measure.name}{units[measure.unit]}" for measure in report.measures]
    values = {
        "level": f"{100 * confidence:g}",
        "wrong": f"{100 * (1 - confidence):.2g}",
        "risks": " or ".join(risks),
        "comparisons": comparisons,
        "sure": min((one["confidence"] for one in certificates), default=0.0),
        "trusted": trusted,
        "invalid": f" Not valid where: {reasons}." if reasons else "",
    }
    said = {}
    for term, (name, text) in MEANINGS.items():
        if _measured(report.results, name):
            said[term] = text.format(**values)
    if not comparisons:
        said["Gains"] = "None: there is no baseline among the results to compare with."
    return said


MEANINGS = {  # by term: attribute of a result that has to be there, and what it means
    "Intervals": (
        "test",
        """Student's t intervals at {level} % over seeds, for normally distributed values. They say how sure the \
mean over seeds is, not how far one more run may lie from it; with two or three seeds they are wide. Seeds that all \
gave the same have no interval. One seed has no interval, and no verdict rests on it.""",
    ),
    "Gains": (
        "test",
        """T = R(baseline) − R(method), the risk R on the target test set {risks}, from differences between runs of \
the same seed, which share their split. Positive is better. Over scratch: does transfer help at all? Over standard: \
does the method add anything to plain fine-tuning?""",
    ),
    "Helps, hurts, cannot tell": (
        "test",
        """Where the interval of the gain lies: above 0, below 0, or neither. “Cannot tell” does not mean that there \
is no difference. There are {comparisons} comparisons here, and the intervals are not corrected for their number: of \
comparisons without any true difference, about {wrong} % are still called one way or the other.""",
    ),
    "Information in the weights": (
        "information",
        """An estimate in nats: the KL divergence of a Gaussian around the trained weights, as wide as the curvature \
of the loss allows, from the pre-distribution of the configuration. Before and after are measured from the \
initialisation, added from the pretrained weights, so that added is not after minus before. It depends on the width \
of the pre-distribution and on the data it is measured on: compare it between networks of one report, not across \
reports. It certifies nothing.""",
    ),
    "Fisher trace": (
        "fisher_trace",
        """Mean over samples of the squared gradient norm of the log-likelihood: how sharply the predictions depend \
on the weights. It is no measure of quality.""",
    ),
    "What can be certified": (
        "certificate",
        """Upper bounds on the true error: mean over seeds, smallest and largest. Each bound holds by itself \
with a probability of at least {sure:.2f}; of several, the one that was picked for being the smallest does not. \
Randomised: a network whose weights are drawn anew for every prediction, by PAC-Bayes with the start's weights as \
the prior's centre, where frozen weights cost nothing and a fresh head has its random centre. The network itself: \
the same, and how often the two disagree on inputs that served nothing else. By test labels: the binomial bound on \
the test set. Could not be checked: {trusted}.{invalid}""",
    ),
    "What the features miss": (
        "overlap",
        """Share of the target labels' variance that a linear read-out of the frozen features leaves unexplained on \
held-out samples, before fine-tuning: mean over seeds, smallest and largest. The number of labels from which linear \
transfer is predicted to hurt follows from it and from a power law fitted to training from scratch at two numbers of \
labels or more: median over seeds, and the ends that all intervals reach.""",
    ),
}


# Text and Markdown


def to_markdown(
    report: "TransferReport",
    confidence: float,
    figures: Iterable[str],
) -> str:
    """The whole report, with figures as PNG files beside it."""
    (_, main), *others = tables(report, confidence).items()
    said = notes(report, confidence).items()
    parts = [
        f"# {_escaped(report.name)}",
        "\n".join(f"- {_escaped(line)}" for line in findings(report, confidence)),
        _markdown(main),
        *(f"![{CAPTION}]({name}.png)" for name in figures),
        *(f"## {heading}\n\n{_markdown(rows)}" for heading, rows in others),
        "## What the numbers mean, and what not",
        "\n".join(f"- **{term}.** {_escaped(text)}" for term, text in said),
        "## Configuration",
        f"```json\n{json.dumps(report.configuration, indent=1, ensure_ascii=False)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Text in which Markdown sees no markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


def _markdown(rows: Sequence[Row]) -> str:
    lines = [[*rows[0]], ["---"] * len(rows[0])]
    lines += [[_escaped(cell) for cell in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_terminal(report: "TransferReport", confidence: float) -> str:
    """The gains by the first measure as a table, and the findings, which speak of the others too."""
    rows = main_table(report, confidence, report.measures[:1])
    intervals = f"{100 * confidence:g} % intervals"
    lines = [
        f"{report.name}, {intervals}",
        text_table([*rows[0]], [[*row.values()] for row in rows]),
    ]
    return "\n".join(lines + findings(report, confidence))


# The figure

CAPTION = "Results on the target test set, by method and number of target labels"


def plot_accuracy(report: "TransferReport", confidence: float) -> tuple["Figure", list["Axes"]]:
    """Draw the target test accuracy, or the metric, of every method: mean and interval, one panel a number of labels.

    Short strokes are the seeds; a dotted line continues the mean of training from scratch.
    """
    from matplotlib.figure import Figure

    from lightning_taskinfo.plotting import plot_intervals

    measure = report.measures[0]
    methods = report.methods
    rows = math.ceil(len(report.labels) / 4)
    columns = math.ceil(len(report.labels) / rows)
    size = (2.6 + 2.2 * columns, 1.1 + rows * (0.6 + 0.24 * len(methods)))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for ax, labels in zip(panels.flat, report.labels, strict=False):
        ends = []  # lower ends, means and upper ends, NaN where there are none
        for place, method in enumerate(methods):
            found = report.summary(method, labels, measure, confidence)
            known = (found.low, found.mean, found.high)
            ends.append([math.nan if end is None else measure.scale * end for end in known])
            seeds = report.values(method, labels, measure).values()
            values = [measure.scale * value for value in seeds]
            ax.plot(values, [place] * len(values), "|", color="C0", alpha=0.6)
            if method == "scratch":
                ax.axvline(ends[place][1], color="0.5", linestyle=":", zorder=0)
        plot_intervals(methods, *zip(*ends, strict=True), xlabel="", ax=ax)
        ax.set_title(f"{labels} target labels", fontsize="medium")
    for ax in panels.flat[len(report.labels) :]:
        ax.set_axis_off()
    figure.supxlabel(f"{measure.value} on the target test set{', %' * measure.share}")
    figure.suptitle(f"mean and {100 * confidence:g} % interval; short strokes: seeds")
    return figure, [*panels.flat][: len(report.labels)]
