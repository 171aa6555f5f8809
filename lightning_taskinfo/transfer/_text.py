"""The report in words and tables: what every format shows, and the two that are plain text."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_taskinfo.transfer._notes import caption, findings, notes
from lightning_taskinfo.transfer.overlap import is_far

if TYPE_CHECKING:
    from lightning_taskinfo.transfer.report import Measure, TransferReport

GAIN = "gain over"  # how the titles of columns with verdicts begin
COLORS = {"helps": "green", "hurts": "red", "cannot tell": "yellow"}


class TextTable(NamedTuple):
    """A table as text; the last word of a cell may be a verdict."""

    header: list[str]
    rows: list[list[str]]


def main_table(report: "TransferReport", confidence: float, measures: Sequence["Measure"] | None = None) -> TextTable:
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
        columns[measure.title] = [_estimate(row, measure.value, measure.scale, form) for row in rows]
    for baseline in ("scratch", "standard"):
        for measure in measures:
            form = "+.1f" if measure.share else "+.3f"
            cells = [_estimate(row, f"over_{baseline}_{measure.name}", measure.scale, form) for row in rows]
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
    columns = {title: column for title, column in columns.items() if any(row[column[0]] is not None for row in rows)}
    if not columns:
        return None
    cells = [[_number(row[key], scale, form) for key, scale, form in columns.values()] for row in rows]
    ids = [[str(row["labels"]), row["method"]] for row in rows]
    return TextTable(["labels", "method", *columns], [[*i, *c] for i, c in zip(ids, cells, strict=True)])


def overlap_table(report: "TransferReport") -> TextTable | None:
    """Share of the target labels' variance that the features of each layer miss, mean and range over seeds."""
    rows = []
    for labels, method in ((labels, method) for labels in report.labels for method in report.methods):
        overlaps = [row["overlap"] for row in report.cell(method, labels).values() if row["overlap"]]
        onset = _onset([overlap["onset"] for overlap in overlaps if overlap.get("onset")], report.labels)
        for layer in dict.fromkeys(layer for overlap in overlaps for layer in overlap["layers"]):
            shares, errors = (
                [dict(zip(overlap["layers"], overlap[key], strict=True)).get(layer) for overlap in overlaps]
                for key in ("outside", "standard_error")
            )
            rows.append([str(labels), method, layer, _range(shares), _range(errors), onset])
    header = ["labels", "method", "layer", "outside, %", "standard error, %", "predicted to hurt from, labels"]
    known = any(row[-1] for row in rows)  # a prediction needs two numbers of labels
    return TextTable(header if known else header[:-1], rows if known else [row[:-1] for row in rows]) if rows else None


def to_markdown(report: "TransferReport", confidence: float, figures: Iterable[str]) -> str:
    """The whole report, with the figures as PNG files beside it."""
    main, information, overlap = main_table(report, confidence), information_table(report), overlap_table(report)
    parts = [
        f"# {_escaped(report.name)}",
        "\n".join(f"- {_escaped(line)}" for line in findings(report, confidence)),
        _markdown(main),
        *(f"![{caption(name)}]({name}.png)" for name in figures),
        *(["## What the networks hold", _markdown(information)] if information else []),
        *(["## Before fine-tuning: what the features miss", _markdown(overlap)] if overlap else []),
        "## What the numbers mean, and what not",
        "\n".join(f"- **{term}.** {_escaped(text)}" for term, text in notes(report, confidence).items()),
        "## Configuration",
        f"```json\n{json.dumps(report.configuration, indent=1, ensure_ascii=False)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def to_terminal(report: "TransferReport", confidence: float, width: int | None) -> str:
    """The gains by the first measure as a table, and the findings, which speak of the others too."""
    table = main_table(report, confidence, report.measures[:1])
    drawn = _rich(report.name, table, width) if find_spec("rich") else f"{report.name}\n{_columns(table)}\n"
    return drawn + "\n".join(findings(report, confidence))


def _estimate(row: dict[str, Any], key: str, scale: float, form: str) -> str:
    """Mean and interval, and of a gain the verdict, with the reason where there is no interval."""
    words = [_number(row[key], scale, form)]
    if row[f"{key}_low"] is not None:
        words.append("[{}, {}]".format(*(_number(row[f"{key}_{end}"], scale, form) for end in ("low", "high"))))
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
    lows, middles, highs = ([math.inf if end is None else end for end in ends] for ends in zip(*onsets, strict=True))
    ends = (min(lows), median(middles), max(highs))
    low, middle, high = (f"{value:,.0f}".replace("inf", "∞") for value in ends)
    return f"{middle} [{low}, {high}]" + (", extrapolated far" if is_far(ends[1], measured) else "")


def _escaped(text: str) -> str:
    """Text in which Markdown sees no markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))


def _markdown(table: TextTable) -> str:
    lines = [table.header, ["---"] * len(table.header), *([_escaped(cell) for cell in row] for row in table.rows)]
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
        table = TextTable([_in_lines(name) for name in table.header], [list(map(_in_lines, r)) for r in table.rows])
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
    return 1 + sum(3 + max(len(line) for cell in column for line in cell.split("\n")) for column in columns)


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
