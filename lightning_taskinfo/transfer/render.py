"""The report in words and tables: what it says, as plain text, Markdown and a page of HTML."""

import base64
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning_taskinfo
from lightning_taskinfo.functional.paired import student_quantile
from lightning_taskinfo.transfer.overlap import is_far

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_taskinfo.transfer.report import Comparison, Measure, TransferReport

GAIN = "gain over"  # how the titles of columns with verdicts begin
COLORS = {"helps": "green", "hurts": "red", "cannot tell": "yellow"}


class TextTable(NamedTuple):
    """A table as text; the last word of a cell may be a verdict."""

    header: list[str]
    rows: list[list[str]]


def main_table(
    report: "TransferReport", confidence: float, measures: Sequence["Measure"] | None = None
) -> TextTable:
    """What was measured and the gains, one row for each number of labels and method."""
    rows = report.table(confidence)
    columns = {
        "labels": [str(row["labels"]) for row in rows],
        "method": [row["method"] for row in rows],
        "seeds": [str(row["seeds"]) for row in rows],
    }
    measures = measures or report.measures
    for measure in measures:
        form = ".1f" if measure.share else ".3f"
        columns[measure.title] = [
            _estimate(row, measure.value, measure.scale, form) for row in rows
        ]
    for baseline in ("scratch", "standard"):
        for measure in measures:
            form = "+.1f" if measure.share else "+.3f"
            cells = [
                _estimate(row, f"over_{baseline}_{measure.name}", measure.scale, form)
                for row in rows
            ]
            if any(cells):
                unit = f", {measure.unit}" if measure.unit else ""
                columns[f"{GAIN} {baseline}: {measure.name}{unit}"] = cells
    return TextTable(list(columns), [list(cells) for cells in zip(*columns.values(), strict=True)])


def information_table(report: "TransferReport") -> TextTable | None:
    """What the networks hold before and after fine-tuning, means over seeds; None where nothing was measured."""
    columns = {
        "source accuracy, %": ("source_accuracy", 100, ".1f"),
        "information before, nats": ("information_before", 1, ",.1f"),
        "information after, nats": ("information_after", 1, ",.1f"),
        "information added, nats": ("information_added", 1, ",.1f"),
        "Fisher trace before": ("fisher_trace_before", 1, ".4g"),
        "Fisher trace after": ("fisher_trace_after", 1, ".4g"),
    }
    rows = report.table()
    columns = {
        title: column
        for title, column in columns.items()
        if any(row[column[0]] is not None for row in rows)
    }
    if not columns:
        return None
    cells = [
        [_number(row[key], scale, form) for key, scale, form in columns.values()] for row in rows
    ]
    ids = [[str(row["labels"]), row["method"]] for row in rows]
    return TextTable(
        ["labels", "method", *columns], [[*i, *c] for i, c in zip(ids, cells, strict=True)]
    )


def overlap_table(report: "TransferReport") -> TextTable | None:
    """Share of the target labels' variance that the features of each layer miss, mean and range over seeds."""
    rows = []
    for labels, method in (
        (labels, method) for labels in report.labels for method in report.methods
    ):
        overlaps = [row.overlap for row in report.cell(method, labels).values() if row.overlap]
        onset = _onset(
            [overlap["onset"] for overlap in overlaps if overlap.get("onset")], report.labels
        )
        for layer in dict.fromkeys(layer for overlap in overlaps for layer in overlap["layers"]):
            shares, errors = (
                [
                    dict(zip(overlap["layers"], overlap[key], strict=True)).get(layer)
                    for overlap in overlaps
                ]
                for key in ("outside", "standard_error")
            )
            rows.append([str(labels), method, layer, _range(shares), _range(errors), onset])
    header = [
        "labels",
        "method",
        "layer",
        "outside, %",
        "standard error, %",
        "predicted to hurt from, labels",
    ]
    known = any(row[-1] for row in rows)  # a prediction needs two numbers of labels
    return (
        TextTable(header if known else header[:-1], rows if known else [row[:-1] for row in rows])
        if rows
        else None
    )


def to_markdown(report: "TransferReport", confidence: float, figures: Iterable[str]) -> str:
    """The whole report, with the figures as PNG files beside it."""
    main, information, overlap = (
        main_table(report, confidence),
        information_table(report),
        overlap_table(report),
    )
    parts = [
        f"# {_escaped(report.name)}",
        "\n".join(f"- {_escaped(line)}" for line in findings(report, confidence)),
        _markdown(main),
        *(f"![{caption(name)}]({name}.png)" for name in figures),
        *(["## What the networks hold", _markdown(information)] if information else []),
        *(["## Before fine-tuning: what the features miss", _markdown(overlap)] if overlap else []),
        "## What the numbers mean, and what not",
        "\n".join(
            f"- **{term}.** {_escaped(text)}" for term, text in notes(report, confidence).items()
        ),
        "## Configuration",
        f"```json\n{json.dumps(report.configuration, indent=1, ensure_ascii=False)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def to_terminal(report: "TransferReport", confidence: float, width: int | None) -> str:
    """The gains by the first measure as a table, and the findings, which speak of the others too."""
    table = main_table(report, confidence, report.measures[:1])
    drawn = (
        _rich(report.name, table, width)
        if find_spec("rich")
        else f"{report.name}\n{_columns(table)}\n"
    )
    return drawn + "\n".join(findings(report, confidence))


def _estimate(row: dict[str, Any], key: str, scale: float, form: str) -> str:
    """Mean and interval, and of a gain the verdict, with the reason where there is no interval."""
    words = [_number(row[key], scale, form)]
    if row[f"{key}_low"] is not None:
        words.append(
            "[{}, {}]".format(
                *(_number(row[f"{key}_{end}"], scale, form) for end in ("low", "high"))
            )
        )
    if verdict := row.get(f"{key}_verdict"):
        words.append(f"{verdict} ({reason})" if (reason := row[f"{key}_reason"]) else verdict)
    return " ".join(words).strip()


def _number(value: float | None, scale: float, form: str) -> str:
    return "" if value is None else format(scale * value, form).replace("-", "−")


def _range(shares: Sequence[float | None]) -> str:
    """Mean, smallest and largest of the shares that are known, in percent."""
    known = [100 * share for share in shares if share is not None]
    mean = f"{sum(known) / len(known):.1f}"
    return mean if len(known) == 1 else f"{mean} ({min(known):.1f} to {max(known):.1f})"


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


def _escaped(text: str) -> str:
    """Text in which Markdown sees no markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


def _markdown(table: TextTable) -> str:
    lines = [
        table.header,
        ["---"] * len(table.header),
        *([_escaped(cell) for cell in row] for row in table.rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _columns(table: TextTable) -> str:
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
    lines = [table.header, ["-" * width for width in widths], *table.rows]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _rich(title: str, table: TextTable, width: int | None) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=width)
    if (tight := _width(table) > console.width) and (seeds := _same_seeds(table)):
        title, table = f"{title}, {seeds}", _without(table, "seeds")
    if tight:
        table = TextTable(
            [_in_lines(name) for name in table.header],
            [list(map(_in_lines, r)) for r in table.rows],
        )
    drawn = Table(title=Text(title), pad_edge=not tight)
    for name in table.header:
        drawn.add_column(Text(name), overflow="fold")
    last: Sequence[str] = ()
    for row in table.rows:
        if last and row[0] != last[0]:
            drawn.add_section()
        drawn.add_row(*map(_colored, table.header, row))
        last = row
    with console.capture() as capture:
        console.print(drawn)
    return capture.get()


def _width(table: TextTable) -> int:
    """Columns of the terminal that a table with frames takes if no line is broken."""
    columns = zip(table.header, *table.rows, strict=True)
    return 1 + sum(
        3 + max(len(line) for cell in column for line in cell.split("\n")) for column in columns
    )


def _same_seeds(table: TextTable) -> str:
    """How many seeds all rows have; empty where they differ."""
    counts = {row[table.header.index("seeds")] for row in table.rows}
    if len(counts) != 1:
        return ""
    count = counts.pop()
    return "1 seed" if count == "1" else f"{count} seeds"


def _without(table: TextTable, name: str) -> TextTable:
    place = table.header.index(name)
    header, *rows = ([*row[:place], *row[place + 1 :]] for row in (table.header, *table.rows))
    return TextTable(header, rows)


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
    "curves": "Learning curves on the target, by method and number of target labels",
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
    if "scratch" not in report.methods:
        lines.append(
            "No run from scratch is among the results: whether transfer helps cannot be said."
        )
    return lines


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
    if any(row.overlap for row in report.results):
        said["What the features miss"] = (
            "Share of the target labels' variance that a linear read-out of the frozen features leaves unexplained on "
            "held-out samples, before fine-tuning: mean over seeds, smallest and largest. The number of labels from "
            "which linear transfer is predicted to hurt follows from it and from a power law fitted to training from "
            "scratch at two numbers of labels or more: median over seeds, and the ends that all intervals reach."
        )
    return said


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
) -> Iterator[str]:
    yield (
        "<ul>"
        + "".join(f"<li>{escape(line)}</li>" for line in findings(report, confidence))
        + "</ul>"
    )
    about = f"Means over seeds [{100 * confidence:g} % interval]"
    yield _section("Did it help?", _table(main_table(report, confidence), about))
    if figures:
        yield _section(
            "Figures", "\n".join(_figure(report, name, figure) for name, figure in figures.items())
        )
    if information := information_table(report):
        yield _section("What the networks hold", _table(information, "Estimates, means over seeds"))
    if overlap := overlap_table(report):
        yield _section(
            "Before fine-tuning: what the features miss", _table(overlap, "Mean (range) over seeds")
        )
    terms = (
        f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>"
        for term, text in notes(report, confidence).items()
    )
    yield _section("What the numbers mean, and what not", f"<dl>{''.join(terms)}</dl>")
    configuration = escape(json.dumps(report.configuration, indent=2, ensure_ascii=False))
    yield _section("Configuration", _scrolled(f"<pre>{configuration}</pre>", "Configuration"))


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _scrolled(content: str, name: str) -> str:
    """What may be wider than a phone scrolls by itself, with the keyboard too."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">{content}</div>'


def _table(table: TextTable, name: str) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in table.header)
    rows = []
    for index, row in enumerate(table.rows):
        first = ' class="first"' if index and row[0] != table.rows[index - 1][0] else ""
        cells = "".join(map(_cell, table.header, row))
        rows.append(f"<tr{first}>{cells}</tr>")
    body = "\n".join(rows)
    return _scrolled(
        f"<table><caption>{escape(name)}</caption><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>",
        name,
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
