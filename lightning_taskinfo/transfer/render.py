"""The report in words and tables: what it says, as plain text, Markdown and a page of HTML."""

import base64
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning_taskinfo
from lightning_taskinfo.certificates.reading import percent, round_up
from lightning_taskinfo.functional.paired import student_quantile
from lightning_taskinfo.transfer.overlap import is_far

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_taskinfo.transfer.report import Comparison, Measure, TransferReport
    from lightning_taskinfo.transfer.results import Result

GAIN = "gain over"  # how the titles of columns with verdicts begin
COLORS = {"helps": "green", "hurts": "red", "cannot tell": "yellow"}


class TextTable(NamedTuple):
    """A table as text; the last word of a cell may be a verdict."""

    caption: str
    header: list[str]
    rows: list[list[str]]


def main_table(
    report: "TransferReport", confidence: float, measures: Sequence["Measure"] | None = None
) -> TextTable:
    """What was measured and the gains, one row for each number of labels and method."""
    rows = report.table(confidence)
    columns = {name: [str(row[name]) for row in rows] for name in ("labels", "method", "seeds")}
    measures = measures or report.measures
    for measure in measures:
        columns[measure.title] = [_estimate(row, measure.value, measure) for row in rows]
    for baseline in ("scratch", "standard"):
        for measure in measures:
            cells = [
                _estimate(row, f"over_{baseline}_{measure.name}", measure, "+") for row in rows
            ]
            unit = f", {measure.unit}" if measure.unit else ""
            columns[f"{GAIN} {baseline}: {measure.name}{unit}"] = cells
    kept = {title: cells for title, cells in columns.items() if any(cells)}
    caption = f"Means over seeds [{100 * confidence:g} % interval]"
    return TextTable(caption, list(kept), [list(row) for row in zip(*kept.values(), strict=True)])


HELD = {  # columns of what networks hold: name in the report's table, scale, format
    "source accuracy, %": ("source_accuracy", 100, ".1f"),
    "information before, nats": ("information_before", 1, ",.1f"),
    "information after, nats": ("information_after", 1, ",.1f"),
    "information added, nats": ("information_added", 1, ",.1f"),
    "Fisher trace before": ("fisher_trace_before", 1, ".4g"),
    "Fisher trace after": ("fisher_trace_after", 1, ".4g"),
}


def information_table(report: "TransferReport") -> TextTable | None:
    """What the networks hold before and after fine-tuning, means over seeds; None where nothing was measured."""
    rows = report.table()
    known = {
        title: column
        for title, column in HELD.items()
        if any(row[column[0]] is not None for row in rows)
    }
    if not known:
        return None
    cells = [
        [str(row["labels"]), row["method"], *(_number(row[k], scale, f) for k, scale, f in known.values())]
        for row in rows
    ]  # fmt: skip
    return TextTable("Estimates, means over seeds", ["labels", "method", *known], cells)


def overlap_table(report: "TransferReport") -> TextTable | None:
    """Share of the target labels' variance that the features of each layer miss, mean and range over seeds."""
    rows = []
    for labels, method, results in _cells(report):
        overlaps = [result.overlap for result in results if result.overlap]
        onsets = [overlap["onset"] for overlap in overlaps if overlap.get("onset")]
        onset = _onset(onsets, report.labels)
        for place, layer in enumerate(overlaps[0]["layers"] if overlaps else ()):
            shares = _range([overlap["outside"][place] for overlap in overlaps])
            errors = _range([overlap["standard_error"][place] for overlap in overlaps])
            rows.append([str(labels), method, layer, shares, errors, onset])
    if not rows:
        return None
    header = ["labels", "method", "layer", "outside, %", "standard error, %"]
    header.append("predicted to hurt from, labels")
    kept = len(header) if any(row[-1] for row in rows) else -1  # it needs two numbers of labels
    return TextTable("Mean (range) over seeds", header[:kept], [row[:kept] for row in rows])


PROOFS = {"stochastic": "randomised", "network": "the network itself", "test_set": "by test labels"}


def certificate_table(report: "TransferReport") -> TextTable | None:
    """Upper bounds on the true error, rounded up, mean and range over seeds; None where none were asked for."""
    rows = []
    for labels, method, results in _cells(report):
        found = [result.certificate for result in results if result.certificate]
        if found:
            bounds = [
                _range([round_up(bound, 3) for bound in _known(found, name)]) for name in PROOFS
            ]
            valid = len([one for one in found if one["valid"]])
            rows.append([str(labels), method, *bounds, f"{valid} of {len(found)}"])
    if not rows:
        return None
    header = ["labels", "method", *(f"{proof}, %" for proof in PROOFS.values()), "valid"]
    return TextTable("Upper bounds on the true error, mean (range) over seeds", header, rows)


def _known(certificates: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    return [one[name] for one in certificates if one[name] is not None]


def _cells(report: "TransferReport") -> Iterable[tuple[int, str, list["Result"]]]:
    for labels in report.labels:
        for method in report.methods:
            yield labels, method, list(report.cell(method, labels).values())


def tables(report: "TransferReport", confidence: float) -> dict[str, TextTable]:
    """Return all tables for which there are numbers, by their headings."""
    found = {
        "Did it help?": main_table(report, confidence),
        "What can be certified": certificate_table(report),
        "What the networks hold": information_table(report),
        "Before fine-tuning: what the features miss": overlap_table(report),
    }
    return {heading: table for heading, table in found.items() if table is not None}


def _estimate(row: dict[str, Any], key: str, measure: "Measure", sign: str = "") -> str:
    """Mean and interval, and of a gain the verdict, with the reason where there is no interval."""
    form = f"{sign}.1f" if measure.share else f"{sign}.3f"
    mean, *ends = (
        _number(row[name], measure.scale, form) for name in (key, f"{key}_low", f"{key}_high")
    )
    words = [mean, f"[{', '.join(ends)}]" if all(ends) else "", row.get(f"{key}_verdict") or ""]
    if reason := row.get(f"{key}_reason"):
        words.append(f"({reason})")
    return " ".join(word for word in words if word)


def _number(value: float | None, scale: float, form: str) -> str:
    return "" if value is None else format(scale * value, form).replace("-", "−")


def _range(shares: Sequence[float]) -> str:
    """Mean, smallest and largest of some shares, in percent."""
    percents = [100 * share for share in shares]
    if not percents:
        return ""
    mean = f"{sum(percents) / len(percents):.1f}"
    return mean if len(percents) == 1 else f"{mean} ({min(percents):.1f} to {max(percents):.1f})"


def _onset(onsets: Sequence[Sequence[float | None]], measured: Sequence[int]) -> str:
    """Median over seeds, from the lowest lower to the highest upper end, and a word if it is far from all labels."""
    if not onsets:
        return ""
    lows, middles, highs = (
        [math.inf if end is None else end for end in ends] for ends in zip(*onsets, strict=True)
    )
    ends = (min(lows), median(middles), max(highs))
    low, middle, high = (f"{value:,.0f}".replace("inf", "∞") for value in ends)
    return f"{middle} [{low}, {high}]" + (", extrapolated far" if is_far(ends[1], measured) else "")


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
    caption, header, rows = main_table(report, confidence, report.measures[:1])
    title, place = report.name, header.index("seeds")
    if len(counts := {row[place] for row in rows}) == 1:
        count = counts.pop()
        title += f", {count} seed{'s' * (count != '1')}"
        header, *rows = ([*row[:place], *row[place + 1 :]] for row in (header, *rows))
    table = TextTable(caption, header, rows)
    drawn = _rich(title, table, width) if find_spec("rich") else f"{title}\n{_columns(table)}\n"
    return drawn + "\n".join(findings(report, confidence))


def _columns(table: TextTable) -> str:
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    lines = [table.header, ["-" * width for width in widths], *table.rows]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _rich(title: str, table: TextTable, width: int | None) -> str:
    from rich.console import Console

    console = Console(width=width)
    wide = _drawn(title, table, pad_edge=True)
    unlimited = console.options.update(max_width=10_000)
    if console.measure(wide, options=unlimited).maximum > console.width:
        rows = [[_in_lines(cell) for cell in row] for row in table.rows]
        header = [_in_lines(cell) for cell in table.header]
        wide = _drawn(title, TextTable(table.caption, header, rows), pad_edge=False)
    with console.capture() as capture:
        console.print(wide)
    return capture.get()


def _drawn(title: str, table: TextTable, *, pad_edge: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(title), pad_edge=pad_edge)
    for name in table.header:
        drawn.add_column(Text(name), overflow="fold")
    last = ""
    for row in table.rows:
        if last and row[0] != last:
            drawn.add_section()
        drawn.add_row(*map(_colored, table.header, row))
        last = row[0]
    return drawn


def _in_lines(cell: str) -> str:
    """Break a cell where a reader would: a method at its plus, an estimate before its interval and its verdict."""
    cell = re.sub(r"(?<=[a-z]\+)(?=[a-z])|(?<=:) ", "\n", cell.replace(f"{GAIN} ", f"{GAIN}\n"))
    return re.sub(rf" (?=\[|\(|{'|'.join(COLORS)})", "\n", cell)


def _colored(title: str, cell: str) -> Any:
    from rich.text import Text

    text = Text(cell)
    for verdict, color in COLORS.items() if title.startswith(GAIN) else ():
        text.highlight_words([verdict], color)
    return text


MANY = 5  # seeds from which more of them narrow an interval slowly
CAPTIONS = {  # name of the figure's file -> what it shows; `information_50` is that with 50 labels
    "accuracy": "Results on the target test set, by method and number of target labels",
    "information": "Information in the weights by layer, before and after fine-tuning",
}


def caption(name: str) -> str:
    """Return what a figure shows, by the name of its file.

    Example:
        >>> caption("information_50")
        'Information in the weights by layer, before and after fine-tuning, with 50 target labels'
    """
    kind, _, labels = name.partition("_")
    return CAPTIONS[kind] + (f", with {labels} target labels" if labels else "")


def findings(report: "TransferReport", confidence: float) -> list[str]:
    """One sentence for each number of labels and baseline; and what is missing."""
    gains = report.transferability(confidence)
    lines = []
    for labels in report.labels:
        for baseline in dict.fromkeys(gain.baseline for gain in gains):
            group = [gain for gain in gains if (gain.labels, gain.baseline) == (labels, baseline)]
            if group:
                words = {
                    m.name: _words([g for g in group if g.measure == m.name])
                    for m in report.measures
                }
                first, *others = words.items()
                said = [f"by the {first[0]} {first[1]}"]
                said += [
                    f"by the {name} {'the same' if also == first[1] else also}"
                    for name, also in others
                ]
                lines.append(f"{labels} labels, against {baseline}: {'; '.join(said)}.")
    few = min(
        (gain.gain.n for gain in gains if gain.verdict == "cannot tell" and not gain.gain.reason),
        default=MANY,
    )
    if few < MANY:
        reach, later = (student_quantile(confidence, n - 1) / math.sqrt(n) for n in (few, MANY))
        lines.append(
            f"With {few} seeds an interval reaches {reach:.1f} standard deviations of a seed's gain to each side, with "
            f"{MANY} it is {later:.1f}: where it cannot tell, add seeds; a `folder` keeps those that are done."
        )
    lines += _proved(report)
    if "scratch" not in report.methods:
        lines.append(
            "No run from scratch is among the results: whether transfer helps cannot be said."
        )
    return lines


def _proved(report: "TransferReport") -> list[str]:
    """What the valid certificates say, in the worst case over seeds."""
    said: dict[int, list[str]] = {}
    for labels, method, results in _cells(report):
        valid = [one.certificate for one in results if one.certificate and one.certificate["valid"]]
        bounds = {proof: _known(valid, name) for name, proof in PROOFS.items()}
        proofs = [f"{percent(max(known))} ({proof})" for proof, known in bounds.items() if known]
        if proofs:
            said.setdefault(labels, []).append(f"{method} {', '.join(proofs)}")
    return [
        f"{labels} labels, certified, the largest bound of a seed: {'; '.join(parts)}."
        for labels, parts in said.items()
    ]


def notes(report: "TransferReport", confidence: float) -> dict[str, str]:
    """What each number means, by term: only of what the report shows."""
    counts = sorted({len(report.cell(m, n)) for m in report.methods for n in report.labels} - {0})
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    values = " and ".join(measure.value for measure in report.measures)
    said = {
        f"{values[0].upper()}{values[1:]}": "Means over seeds on the target test set"
        + (
            "; the loss is the mean cross-entropy in nats."
            if report.measures[-1].unit == "nats"
            else "."
        ),
        "Seeds": f"{seeds} for each method and number of labels."
        + (" One seed has no interval, and no verdict rests on it." if counts[0] == 1 else ""),
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
    for verdict in ("helps", "hurts", "cannot tell"):
        members = [gain for gain in group if gain.verdict == verdict]
        if members:
            names = ", ".join(gain.method for gain in members)
            reasons = sorted({gain.gain.reason for gain in members} - {""})
            parts.append(
                f"“{verdict}” for {names}" + (f" ({'; '.join(reasons)})" if reasons else "")
            )
    return ", ".join(parts)


CLASSES = {"helps": "helps", "hurts": "hurts", "cannot tell": "unsure"}
# The browser itself is told to fetch nothing, whatever stands in the page.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5a636b; --paper: #ffffff; --card: #f4f6f8; --line: #d5dade;
  --helps: #0f6437; --hurts: #a3231b; --unsure: #6b5300; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #a2abb3; --paper: #14171a; --card: #1d2226;
  --line: #384047; --helps: #6fdc9c; --hurts: #ff9d92; --unsure: #e6c65c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; overflow-wrap: anywhere; margin: 1rem 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.5rem; }
ul { padding-left: 1.2rem; } li { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 0.5rem; }
.scroll:focus-visible { outline: 2px solid var(--soft); }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 0.5rem; color: var(--soft); }
th, td { text-align: left; vertical-align: top; padding: 0.35rem 0.5rem; border-top: 1px solid var(--line); }
thead th { background: var(--card); vertical-align: bottom; }
tbody th { font-weight: 600; white-space: nowrap; }
td b, td span { white-space: nowrap; } .helps { color: var(--helps); } .hurts { color: var(--hurts); }
.unsure { color: var(--unsure); }
tr.first > * { border-top: 2px solid var(--soft); }
figure { margin: 1.5rem 0; } figure .scroll { padding: 0.5rem; }
figure img { display: block; width: 100%; height: auto; margin: 0 auto; }
@media (prefers-color-scheme: dark) { figure img { filter: invert(0.92) hue-rotate(180deg); } }
figcaption { color: var(--soft); font-size: 0.9rem; margin-top: 0.4rem; }
dt { font-weight: 600; margin-top: 0.8rem; } dd { margin: 0; max-width: 48rem; }
pre { margin: 0; padding: 0.75rem; font-size: 0.85rem; background: var(--card); }
footer { color: var(--soft); font-size: 0.85rem; margin: 3rem 0 1rem; }
@media print { .scroll { overflow: visible; } }
"""


def to_html(report: "TransferReport", confidence: float, figures: Mapping[str, "Figure"]) -> str:
    """Return the page with these figures; it is well-formed XML too."""
    title, body = escape(report.name), "\n".join(_sections(report, confidence, figures))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta http-equiv="Content-Security-Policy" content="{POLICY}" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta name="color-scheme" content="light dark" />
<title>{title}</title>
<link rel="icon" href="data:," />
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<footer>Report of a transfer experiment, by lightning-taskinfo {escape(lightning_taskinfo.__version__)}.</footer>
</body>
</html>
"""


def _sections(
    report: "TransferReport", confidence: float, figures: Mapping[str, "Figure"]
) -> list[str]:
    lines = "".join(f"<li>{escape(line)}</li>" for line in findings(report, confidence))
    first, *others = (
        _section(heading, _table(table)) for heading, table in tables(report, confidence).items()
    )
    drawn = "\n".join(_figure(report, name, figure) for name, figure in figures.items())
    said = notes(report, confidence).items()
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in said)
    configuration = escape(json.dumps(report.configuration, indent=2, ensure_ascii=False))
    return [
        f"<ul>{lines}</ul>",
        first,
        *([_section("Figures", drawn)] if figures else []),
        *others,
        _section("What the numbers mean, and what not", f"<dl>{terms}</dl>"),
        _section("Configuration", _scrolled(f"<pre>{configuration}</pre>", "Configuration")),
    ]


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _scrolled(content: str, name: str) -> str:
    """What may be wider than a phone scrolls by itself, with the keyboard too."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">{content}</div>'


def _table(table: TextTable) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in table.header)
    rows, last = [], ""
    for row in table.rows:
        first = ' class="first"' if last and row[0] != last else ""
        rows.append(f"<tr{first}>{''.join(map(_cell, table.header, row))}</tr>")
        last = row[0]
    body, about = "\n".join(rows), escape(table.caption)
    return _scrolled(
        f"<table><caption>{about}</caption><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>",
        table.caption,
    )


def _cell(title: str, cell: str) -> str:
    text = escape(cell)
    if title == "method":
        return f'<th scope="row">{text}</th>'
    text = re.sub(r"(\[.*\])", r"<span>\1</span>", text)
    if title.startswith(GAIN):
        for verdict, name in CLASSES.items():
            text = text.replace(verdict, f'<b class="{name}">{verdict}</b>')
    return f"<td>{text}</td>"


def _figure(report: "TransferReport", name: str, figure: "Figure") -> str:
    """A figure in black on nothing; the style inverts it where the reader prefers the dark."""
    width = (
        7 * figure.get_figwidth()
    )  # in rem; a phone scrolls rather than shrink the text beyond reading
    size = f"min-width: {min(width, 34):.0f}rem; max-width: {width:.0f}rem"
    image = f'<img src="{_data_url(figure)}" alt="{escape(_alternative(report, name))}" style="{size}" />'
    return f"<figure>{_scrolled(image, caption(name))}<figcaption>{escape(caption(name))}</figcaption></figure>"


def _alternative(report: "TransferReport", name: str) -> str:
    where = "the first table" if name == "accuracy" else "report.json"
    return f"{caption(name)}. Methods: {', '.join(report.methods)}. The numbers are in {where}."


def _data_url(figure: "Figure") -> str:
    """The figure as SVG, in letters; the same figure gives the same."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "taskinfo"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
