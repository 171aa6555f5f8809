"""The report in words and tables: what it says, as plain text and Markdown."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_taskinfo._tables import text_table
from lightning_taskinfo.certificates.certificate import percent, round_up
from lightning_taskinfo.functional.intervals import student_quantile
from lightning_taskinfo.transfer.overlap import is_far

if TYPE_CHECKING:
    from lightning_taskinfo.transfer.report import Comparison, Measure, TransferReport

GAIN = "gain over"  # how the titles of columns with verdicts begin
COLORS = {"helps": "green", "hurts": "red", "cannot tell": "yellow"}
PROOFS = {"stochastic": "randomised", "network": "the network itself", "test_set": "by test labels"}
HELD = {  # columns of what networks hold: name in the report's table, scale, format
    "source accuracy, %": ("source_accuracy", 100, ".1f"),
    "information before, nats": ("information_before", 1, ",.1f"),
    "information after, nats": ("information_after", 1, ",.1f"),
    "information added, nats": ("information_added", 1, ",.1f"),
    "Fisher trace before": ("fisher_trace_before", 1, ".4g"),
    "Fisher trace after": ("fisher_trace_after", 1, ".4g"),
}
MANY = 5  # seeds from which more of them narrow an interval slowly
CAPTIONS = {  # name of the figure's file -> what it shows; `information_50` is that with 50 labels
    "accuracy": "Results on the target test set, by method and number of target labels",
    "information": "Information in the weights by layer, before and after fine-tuning",
}


class TextTable(NamedTuple):
    """A table as text, whose first two columns say of what the others are; a cell may hold a verdict."""

    caption: str
    header: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, caption: str, columns: Mapping[str, Sequence[str]]) -> "TextTable":
        """Return the table of some columns; one without anything in it is left out."""
        kept = {title: cells for title, cells in columns.items() if any(cells)}
        rows = [[*row] for row in zip(*kept.values(), strict=True)]
        return cls(caption, [*kept], rows)

    def begins(self) -> list[bool]:
        """Whether each row begins another group than the one above."""
        begins = []
        above = self.rows[0][0] if self.rows else ""
        for first, *_ in self.rows:
            begins.append(first != above)
            above = first
        return begins


def main_table(report: "TransferReport", confidence: float, *, short: bool = False) -> TextTable:
    """What was measured and the gains, one row for each number of labels and method.

    Args:
        report: The report.
        confidence: Of the intervals.
        short: Whether to show the first measure alone, and no seeds where all have as many.
    """
    rows = report.table(confidence)
    names = ["labels", "method", "seeds"]
    measures = report.measures
    if short:
        measures = measures[:1]
        numbers = {row["seeds"] for row in rows}
        if len(numbers) < 2:
            names.remove("seeds")
    columns = _texts(rows, names)
    for measure in measures:
        columns[measure.title] = [_estimate(row, measure.value, measure) for row in rows]
    for baseline in ("scratch", "standard"):
        for measure in measures:
            key = f"over_{baseline}_{measure.name}"
            unit = f", {measure.unit}" if measure.unit else ""
            cells = [_estimate(row, key, measure, "+") for row in rows]
            columns[f"{GAIN} {baseline}: {measure.name}{unit}"] = cells
    return TextTable.of(f"Means over seeds [{100 * confidence:g} % interval]", columns)


def _texts(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[str]]:
    """Columns of the rows as they are."""
    return {name: [str(row[name]) for row in rows] for name in names}


def information_table(report: "TransferReport") -> TextTable:
    """What the networks hold before and after fine-tuning, means over seeds."""
    rows = report.table()
    columns = _texts(rows, ["labels", "method"])
    for title, (key, scale, form) in HELD.items():
        columns[title] = [_number(row[key], scale, form) for row in rows]
    return TextTable.of("Estimates, means over seeds", columns)


def overlap_table(report: "TransferReport") -> TextTable:
    """Share of the target labels' variance that the features of each layer miss, mean and range over seeds."""
    header = ["labels", "method", "layer", "outside, %", "standard error, %"]
    header.append("predicted to hurt from, labels")  # which needs two numbers of labels
    columns: dict[str, list[str]] = {title: [] for title in header}
    for labels, method, results in report.cells():
        overlaps = [result.overlap for result in results if result.overlap]
        if not overlaps:
            continue
        onsets = [one["onset"] for one in overlaps if one.get("onset")]
        onset = _onset(onsets, report.labels)
        for place, layer in enumerate(overlaps[0]["layers"]):
            shares = _range([overlap["outside"][place] for overlap in overlaps])
            errors = _range([overlap["standard_error"][place] for overlap in overlaps])
            row = (str(labels), method, layer, shares, errors, onset)
            for title, cell in zip(header, row, strict=True):
                columns[title].append(cell)
    return TextTable.of("Mean (range) over seeds", columns)


def certificate_table(report: "TransferReport") -> TextTable:
    """Upper bounds on the true error, rounded up, mean and range over seeds."""
    rows = []
    for labels, method, results in report.cells():
        found = [result.certificate for result in results if result.certificate]
        if not found:
            continue
        row = [str(labels), method]
        for name in PROOFS:
            bounds = [round_up(bound, 3) for bound in _known(found, name)]
            row.append(_range(bounds))
        row.append(f"{sum(one['valid'] for one in found)} of {len(found)}")
        rows.append(row)
    proofs = [f"{proof}, %" for proof in PROOFS.values()]
    header = ["labels", "method", *proofs, "valid"]
    return TextTable("Upper bounds on the true error, mean (range) over seeds", header, rows)


def _known(certificates: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [one[name] for one in certificates if one[name] is not None]


def tables(report: "TransferReport", confidence: float) -> dict[str, TextTable]:
    """Return all tables for which there are numbers, by their headings."""
    found = {
        "Did it help?": main_table(report, confidence),
        "What can be certified": certificate_table(report),
        "What the networks hold": information_table(report),
        "Before fine-tuning: what the features miss": overlap_table(report),
    }
    filled = {}
    for name, table in found.items():
        if table.rows and len(table.header) > 2:
            filled[name] = table
    return filled


def _estimate(row: dict[str, Any], key: str, measure: "Measure", sign: str = "") -> str:
    """Mean and interval, and of a gain the verdict, with the reason where there is no interval."""
    form = f"{sign}.1f" if measure.share else f"{sign}.3f"
    mean = _number(row[key], measure.scale, form)
    low = _number(row[f"{key}_low"], measure.scale, form)
    high = _number(row[f"{key}_high"], measure.scale, form)
    words = [mean]
    if low and high:
        words.append(f"[{low}, {high}]")
    words.append(row.get(f"{key}_verdict") or "")
    if reason := row.get(f"{key}_reason"):
        words.append(f"({reason})")
    return " ".join(word for word in words if word)


def _number(value: float | None, scale: float, form: str) -> str:
    if value is None:
        return ""
    return format(scale * value, form).replace("-", "−")


def _range(shares: Sequence[float]) -> str:
    """Mean, smallest and largest of some shares, in percent."""
    percents = [100 * share for share in shares]
    if not percents:
        return ""
    mean = f"{sum(percents) / len(percents):.1f}"
    if len(percents) == 1:
        return mean
    return f"{mean} ({min(percents):.1f} to {max(percents):.1f})"


def _onset(onsets: Sequence[Sequence[float | None]], measured: Sequence[int]) -> str:
    """Median over seeds, from the lowest lower to the highest upper end, and a word if it is far from all labels."""
    if not onsets:
        return ""
    finite = []
    for ends in onsets:
        known = [math.inf if end is None else end for end in ends]
        finite.append(known)
    lows, middles, highs = zip(*finite, strict=True)
    onset = median(middles)
    span = (min(lows), onset, max(highs))
    low, middle, high = (f"{value:,.0f}".replace("inf", "∞") for value in span)
    far = ", extrapolated far" if is_far(onset, measured) else ""
    return f"{middle} [{low}, {high}]{far}"


def to_markdown(report: "TransferReport", confidence: float, figures: Iterable[str]) -> str:
    """The whole report, with the figures as PNG files beside it."""
    (_, main), *others = tables(report, confidence).items()
    said = notes(report, confidence).items()
    parts = [
        f"# {_escaped(report.name)}",
        "\n".join(f"- {_escaped(line)}" for line in findings(report, confidence)),
        _markdown(main),
        *(f"![{caption(name)}]({name}.png)" for name in figures),
        *(f"## {heading}\n\n{_markdown(table)}" for heading, table in others),
        "## What the numbers mean, and what not",
        "\n".join(f"- **{term}.** {_escaped(text)}" for term, text in said),
        "## Configuration",
        f"```json\n{json.dumps(report.configuration, indent=1, ensure_ascii=False)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Text in which Markdown sees no markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


def _markdown(table: TextTable) -> str:
    rows = [[_escaped(cell) for cell in row] for row in table.rows]
    lines = [table.header, ["---"] * len(table.header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_terminal(report: "TransferReport", confidence: float, width: int | None) -> str:
    """The gains by the first measure as a table, and the findings, which speak of the others too."""
    table = main_table(report, confidence, short=True)
    title = report.name
    if "seeds" not in table.header:
        count = len(next(report.cells())[2])
        title += f", {count} seed{'s' * (count != 1)}"
    if any("[" in cell for row in table.rows for cell in row):
        title += f", {100 * confidence:g} % intervals"
    drawn = f"{title}\n{text_table(table.header, table.rows)}\n"
    if find_spec("rich"):
        drawn = _rich(title, table, width)
    return drawn + "\n".join(findings(report, confidence))


def _rich(title: str, table: TextTable, width: int | None) -> str:
    from rich.console import Console

    console = Console(width=width)
    drawn = _drawn(title, table, pad_edge=True)
    unlimited = console.options.update(max_width=10_000)
    if console.measure(drawn, options=unlimited).maximum > console.width:
        header = [_in_lines(cell) for cell in table.header]
        rows = [[_in_lines(cell) for cell in row] for row in table.rows]
        narrow = TextTable(table.caption, header, rows)
        drawn = _drawn(title, narrow, pad_edge=False)
    with console.capture() as capture:
        console.print(drawn)
    return capture.get()


def _drawn(title: str, table: TextTable, *, pad_edge: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title), pad_edge=pad_edge)
    for name in table.header:
        drawn.add_column(Text(name), overflow="fold")
    for row, begins in zip(table.rows, table.begins(), strict=True):
        if begins:
            drawn.add_section()
        cells = [Text(cell) for cell in row]
        for name, cell in zip(table.header, cells, strict=True):
            if name.startswith(GAIN):
                for verdict, color in COLORS.items():
                    cell.highlight_words([verdict], color)
        drawn.add_row(*cells)
    return drawn


def _in_lines(cell: str) -> str:
    """Break a cell where a reader would: a method at its plus, an estimate before its interval and its verdict."""
    cell = re.sub(r"(?<=[a-z]\+)(?=[a-z])|(?<=:) ", "\n", cell.replace(f"{GAIN} ", f"{GAIN}\n"))
    return re.sub(rf" (?=\[|\(|{'|'.join(COLORS)})", "\n", cell)


def caption(name: str) -> str:
    """Return what a figure shows, by the name of its file.

    Example:
        >>> caption("information_50")
        'Information in the weights by layer, before and after fine-tuning, with 50 target labels'
    """
    kind, _, labels = name.partition("_")
    return CAPTIONS[kind] + (f", with {labels} target labels" if labels else "")


def advice(report: "TransferReport", confidence: float) -> list[str]:
    """One sentence on what to take for each number of labels: what helps most over scratch, or scratch itself."""
    measure = report.measures[0]
    gains: dict[int, list[Comparison]] = {}
    for gain in report.transferability(confidence):
        if gain.baseline == "scratch" and gain.measure == measure.name:
            gains.setdefault(gain.labels, []).append(gain)
    said = []
    for labels, here in sorted(gains.items()):
        helping = [gain for gain in here if gain.verdict == "helps"]
        if helping:
            best = max(helping, key=lambda gain: gain.gain.mean or 0.0)
            form = "+.1f" if measure.share else "+.3f"
            by = _number(best.gain.mean, measure.scale, form)
            gained = f"{by} {measure.unit}".strip()
            what = f"take {best.method} ({gained} over scratch)"
        elif all(gain.verdict == "hurts" for gain in here):
            what = "train from scratch"
        else:
            what = "nothing was seen to help: train from scratch, or add seeds"
        said.append(f"with {labels} labels {what}")
    return [f"Advice: {'; '.join(said)}."] if said else []


def findings(report: "TransferReport", confidence: float) -> list[str]:
    """One sentence for each number of labels and baseline, and for each start; what is missing; and advice."""
    gains = report.transferability(confidence)
    groups: dict[tuple[int, str], list[Comparison]] = {}
    for gain in sorted(gains, key=lambda gain: gain.labels):
        group = groups.setdefault((gain.labels, gain.baseline), [])
        group.append(gain)
    lines = []
    for (labels, baseline), group in groups.items():
        said: dict[str, str] = {}
        for measure in report.measures:
            measured = [gain for gain in group if gain.measure == measure.name]
            words = _words(measured)
            if words in said.values():
                said[measure.name] = "the same"
            else:
                said[measure.name] = words
        parts = "; ".join(f"by the {name} {words}" for name, words in said.items())
        lines.append(f"{labels} labels, against {baseline}: {parts}.")
    few = MANY
    for gain in gains:
        if gain.verdict == "cannot tell" and not gain.gain.reason:
            few = min(few, gain.gain.n)
    if few < MANY:
        reach = student_quantile(confidence, few - 1) / math.sqrt(few)
        later = student_quantile(confidence, MANY - 1) / math.sqrt(MANY)
        lines.append(
            f"With {few} seeds an interval reaches {reach:.1f} standard deviations of a seed's gain to each side, with "
            f"{MANY} it is {later:.1f}: where it cannot tell, add seeds; a `folder` keeps those that are done."
        )
    lines += _proved(report)
    lines += [f"Start {name}: {origin}." for name, origin in report.starts.items()]
    if "scratch" not in report.methods:
        lines.append(
            "No run from scratch is among the results: whether transfer helps cannot be said."
        )
    return lines + advice(report, confidence)


def _proved(report: "TransferReport") -> list[str]:
    """What the valid certificates say, in the worst case over seeds."""
    said: dict[int, list[str]] = {}
    for labels, method, results in report.cells():
        found = [one.certificate for one in results if one.certificate]
        valid = [certificate for certificate in found if certificate["valid"]]
        proofs = []
        for name, proof in PROOFS.items():
            bounds = _known(valid, name)
            if bounds:
                proofs.append(f"{percent(max(bounds))} ({proof})")
        if proofs:
            said.setdefault(labels, []).append(f"{method} {', '.join(proofs)}")
    return [
        f"{labels} labels, certified, the largest bound of a seed: {'; '.join(parts)}."
        for labels, parts in said.items()
    ]


def notes(report: "TransferReport", confidence: float) -> dict[str, str]:
    """What each number means, by term: only of what the report shows."""
    counts = [len(results) for _, _, results in report.cells()]
    fewest = min(counts)
    most = max(counts)
    seeds = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    values = " and ".join(measure.value for measure in report.measures)
    nats = "; the loss is the mean cross-entropy in nats" * (report.measures[-1].unit == "nats")
    one = " One seed has no interval, and no verdict rests on it." * (fewest == 1)
    said = {
        f"{values[0].upper()}{values[1:]}": f"Means over seeds on the target test set{nats}.",
        "Seeds": f"{seeds} for each method and number of labels.{one}",
        "Intervals": f"Student's t intervals at {100 * confidence:g} % over seeds, for normally distributed values. "
        "They say how sure the mean over seeds is, not how far one more run may lie from it; with two or three seeds "
        "they are wide. Seeds that all gave the same have no interval.",
    }
    return said | _gain_notes(report, confidence) | _measurement_notes(report)


def _gain_notes(report: "TransferReport", confidence: float) -> dict[str, str]:
    comparisons = report.transferability(confidence)
    if not comparisons:
        return {"Gains": "None: there is no baseline among the results to compare with."}
    return {
        "Gains": f"T = R(baseline) − R(method), the risk R {_risks(report)}, from differences "
        "between runs of the same seed, which share their split. Positive is better. Over scratch: does "
        "transfer help at all? Over standard: does the method add anything to plain fine-tuning?",
        "Helps, hurts, cannot tell": "Where the interval of the gain lies: above 0, below 0, or neither. “Cannot tell” "
        f"does not mean that there is no difference. There are {len(comparisons)} comparisons here, and the intervals "
        "are not corrected for their number: of comparisons without any true difference, about "
        f"{100 * (1 - confidence):.2g} % are still called one way or the other.",
    }


def _risks(report: "TransferReport") -> str:
    shown = {"points": " (in percentage points)", "nats": " (in nats)", "": ""}
    return " or ".join(f"as {measure.name}{shown[measure.unit]}" for measure in report.measures)


def _measurement_notes(report: "TransferReport") -> dict[str, str]:
    said = {}
    if any(row.information for row in report.results):
        said["Information in the weights"] = (
            "An estimate in nats: the KL divergence of a Gaussian around the trained weights, as wide as the curvature "
            "of the loss allows, from the pre-distribution of the configuration. Before and after are measured from "
            "the initialisation, added from the pretrained weights, so that added is not after minus before. It "
            "depends on the width of the pre-distribution and on the data it is measured on: compare it between "
            "networks of one report, not across reports. It certifies nothing."
        )
    if any(row.fisher_trace for row in report.results):
        said["Fisher trace"] = (
            "Mean over samples of the squared gradient norm of the log-likelihood: how sharply the predictions depend "
            "on the weights. It is no measure of quality."
        )
    certificates = [row.certificate for row in report.results if row.certificate]
    if certificates:
        said["What can be certified"] = _about_certificates(certificates)
    if any(row.overlap for row in report.results):
        said["What the features miss"] = (
            "Share of the target labels' variance that a linear read-out of the frozen features leaves unexplained on "
            "held-out samples, before fine-tuning: mean over seeds, smallest and largest. The number of labels from "
            "which linear transfer is predicted to hurt follows from it and from a power law fitted to training from "
            "scratch at two numbers of labels or more: median over seeds, and the ends that all intervals reach."
        )
    return said


def _about_certificates(certificates: Sequence[Mapping[str, Any]]) -> str:
    """What the bounds speak of, what was taken on trust, and why some may not be claimed."""
    trusted = dict.fromkeys(text for one in certificates for text in one["assumptions"])
    reasons = dict.fromkeys(text for one in certificates for text in one["reasons"])
    said = (
        f"Each bound holds by itself with a probability of at least {certificates[0]['confidence']:.2f}; of several, "
        "the one that was picked for being the smallest does not. Randomised: a network whose weights are drawn anew "
        "for every prediction, by PAC-Bayes with the start's weights as the prior's centre, where frozen weights cost "
        "nothing and a fresh head has its random centre. The network itself: the same, and how often the two disagree "
        "on inputs that served nothing else. By test labels: the binomial bound on the test set. Could not be checked: "
        f"{'; '.join(trusted)}."
    )
    return said + (f" Not valid where: {'; '.join(reasons)}." if reasons else "")


def _words(group: "list[Comparison]") -> str:
    """Which methods help, which hurt, and of which nothing can be said, and why."""
    parts = []
    for verdict in COLORS:
        members = [gain for gain in group if gain.verdict == verdict]
        if not members:
            continue
        part = f"“{verdict}” for {', '.join(gain.method for gain in members)}"
        reasons = {gain.gain.reason for gain in members} - {""}
        if reasons:
            part += f" ({'; '.join(sorted(reasons))})"
        parts.append(part)
    return ", ".join(parts)
