"""The report in words and tables, described once, and written as text, Markdown and HTML.

The page of HTML is whole in itself: nothing in it is fetched.
"""

import base64
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from itertools import groupby, product
from operator import attrgetter
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import lightning_taskinfo
from lightning_taskinfo._tables import text_table
from lightning_taskinfo.certificates.certificate import percent, round_up
from lightning_taskinfo.transfer.overlap import is_far

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_taskinfo.transfer.report import Comparison, Measure, Result, TransferReport

GAIN = "gain over"  # how the titles of columns with verdicts begin
VERDICTS = {"helps": "green", "hurts": "red", "cannot tell": "yellow"}
PROOFS = {"stochastic": "randomised", "network": "the network itself", "test_set": "by test labels"}
HELD = {  # columns of what networks hold: name in the report's table, scale, format
    "source accuracy, %": ("source_accuracy", 100, ".1f"),
    "information before, nats": ("information_before", 1, ",.1f"),
    "information after, nats": ("information_after", 1, ",.1f"),
    "information added, nats": ("information_added", 1, ",.1f"),
    "Fisher trace before": ("fisher_trace_before", 1, ".4g"),
    "Fisher trace after": ("fisher_trace_after", 1, ".4g"),
}
FIGURES = r"accuracy|information_\d+"  # names of their files; the number is that of labels

Row = dict[str, str]  # of a table: its cells by the titles of their columns; one may hold a verdict
Values = dict[str, Any]


def tables(report: "TransferReport", confidence: float) -> dict[str, tuple[str, list[Row]]]:
    """Return caption and rows of all tables for which there are numbers, by their headings."""
    held, certified, missed = [], [], []
    for row, (labels, method, results) in zip(report.table(), report.cells(), strict=True):
        about = {"labels": f"{labels}", "method": method}
        held.append(dict(about))
        for title, (key, scale, form) in HELD.items():
            held[-1][title] = _number(row[key], scale, form)
        if certificates := _measured(results, "certificate"):
            certified.append(about | _bounds(certificates))
        if overlaps := _measured(results, "overlap"):
            missed += [about | layer for layer in _missed(overlaps, report.labels)]
    found = {
        "Did it help?": (
            f"Means over seeds [{100 * confidence:g} % interval]",
            main_table(report, confidence),
        ),
        "What can be certified": (
            "Upper bounds on the true error, mean (range) over seeds",
            _filled(certified),
        ),
        "What the networks hold": ("Estimates, means over seeds", _filled(held)),
        "Before fine-tuning: what the features miss": ("Mean (range) over seeds", _filled(missed)),
    }
    return {heading: table for heading, table in found.items() if table[1]}


def _filled(rows: Sequence[Row]) -> list[Row]:
    """Rows without the columns in which nothing is; none if they have but labels and method."""
    titles = {title for row in rows for title in row if row[title]}
    kept = [{title: row[title] for title in row if title in titles} for row in rows]
    return kept if len(titles) > 2 else []


def _measured(results: Iterable["Result"], name: str) -> list[Values]:
    values = [getattr(result, name) for result in results]
    return [value for value in values if value]


def main_table(
    report: "TransferReport",
    confidence: float,
    *,
    short: bool = False,
) -> list[Row]:
    """What was measured and the gains, one row for each number of labels and method.

    Args:
        report: The report.
        confidence: Of the intervals.
        short: Whether to show the first measure alone, and no seeds.
    """
    measures = report.measures[: 1 if short else None]
    shown = []
    for row in report.table(confidence):
        cells = {name: str(row[name]) for name in ("labels", "method", "seeds")}
        if short:
            del cells["seeds"]
        for measure in measures:
            title = f"{measure.value}, {'%' if measure.share else measure.unit}"
            cells[title.removesuffix(", ")] = _estimate(row, measure.value, measure)
        for baseline, measure in product(("scratch", "standard"), measures):
            title = f"{GAIN} {baseline}: {measure.name}, {measure.unit}".removesuffix(", ")
            cells[title] = _estimate(row, f"over_{baseline}_{measure.name}", measure, "+")
        shown.append(cells)
    return _filled(shown)


def _estimate(
    row: Values,
    key: str,
    measure: "Measure",
    sign: str = "",
) -> str:
    """Mean and interval, and of a gain the verdict, with the reason where there is no interval."""
    mean, low, high = (_shown(row[f"{key}{end}"], measure, sign) for end in ("", "_low", "_high"))
    reason = row.get(f"{key}_reason")
    words = [
        mean,
        f"[{low}, {high}]" if low else "",
        row.get(f"{key}_verdict"),
        f"({reason})" if reason else "",
    ]
    return " ".join(filter(None, words))


def _shown(value: float | None, measure: "Measure", sign: str) -> str:
    digits = 1 if measure.share else 3
    return _number(value, measure.scale, f"{sign}.{digits}f")


def _number(value: float | None, scale: float, form: str) -> str:
    if value is None:
        return ""
    return format(scale * value, form).replace("-", "−")


def _bounds(certificates: Sequence[Values]) -> Row:
    """Upper bounds, rounded up."""
    row = {}
    for name, proof in PROOFS.items():
        bounds = [round_up(bound, 3) for bound in _known(certificates, name)]
        row[f"{proof}, %"] = _range(bounds)
    valid = sum(one["valid"] for one in certificates)
    return {**row, "valid": f"{valid} of {len(certificates)}"}


def _known(certificates: Iterable[Values], name: str) -> list[float]:
    return [one[name] for one in certificates if one[name] is not None]


def _missed(overlaps: Sequence[Values], measured: Sequence[int]) -> list[Row]:
    """Share of the target labels' variance that the features of each layer miss."""
    onset = _onset(overlaps, measured)
    rows = []
    for place, layer in enumerate(overlaps[0]["layers"]):
        outside, error = (
            _range([one[name][place] for one in overlaps]) for name in ("outside", "standard_error")
        )
        row = {"layer": layer, "outside, %": outside, "standard error, %": error}
        rows.append({**row, "predicted to hurt from, labels": onset})
    return rows


def _range(shares: Sequence[float]) -> str:
    """Mean, smallest and largest of some shares, in percent."""
    if not shares:
        return ""
    mean, low, high = (f"{100 * of(shares):.1f}" for of in (fmean, min, max))
    return f"{mean} ({low} to {high})" if len(shares) > 1 else mean


def _onset(overlaps: Sequence[Values], measured: Sequence[int]) -> str:
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
    far = ", extrapolated far" if is_far(onset, measured) else ""
    return f"{middle} [{low}, {high}]{far}"


def caption(figure: str) -> str:
    """Return what a figure shows, by the name of its file.

    Example:
        >>> caption("information_50")
        'Information in the weights by layer, before and after fine-tuning, with 50 target labels'
    """
    _, _, labels = figure.partition("_")
    if not labels:
        return "Results on the target test set, by method and number of target labels"
    shown = "Information in the weights by layer, before and after fine-tuning"
    return f"{shown}, with {labels} target labels"


def findings(report: "TransferReport", confidence: float) -> list[str]:
    """One sentence for each number of labels and baseline, and for each start; what is missing; and advice."""
    gains = report.transferability(confidence)
    gains.sort(key=attrgetter("labels"))
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
    first = [gain for gain in gains if gain.measure == measure.name]
    over_scratch = [gain for gain in first if gain.baseline == "scratch"]
    if over_scratch:
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
        here = {
            gain.verdict: gain for gain in sorted(group, key=lambda gain: gain.gain.mean or 0.0)
        }
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
        """Each bound holds by itself with a probability of at least {sure:.2f}; of several, the one that was picked \
for being the smallest does not. Randomised: a network whose weights are drawn anew for every prediction, by \
PAC-Bayes with the start's weights as the prior's centre, where frozen weights cost nothing and a fresh head has its \
random centre. The network itself: the same, and how often the two disagree on inputs that served nothing else. By \
test labels: the binomial bound on the test set. Could not be checked: {trusted}.{invalid}""",
    ),
    "What the features miss": (
        "overlap",
        """Share of the target labels' variance that a linear read-out of the frozen features leaves unexplained on \
held-out samples, before fine-tuning: mean over seeds, smallest and largest. The number of labels from which linear \
transfer is predicted to hurt follows from it and from a power law fitted to training from scratch at two numbers of \
labels or more: median over seeds, and the ends that all intervals reach.""",
    ),
}


def to_markdown(
    report: "TransferReport",
    confidence: float,
    figures: Iterable[str],
) -> str:
    """The whole report, with the figures as PNG files beside it."""
    (_, (_, main)), *others = tables(report, confidence).items()
    said = notes(report, confidence).items()
    parts = [
        f"# {_escaped(report.name)}",
        "\n".join(f"- {_escaped(line)}" for line in findings(report, confidence)),
        _markdown(main),
        *(f"![{caption(name)}]({name}.png)" for name in figures),
        *(f"## {heading}\n\n{_markdown(rows)}" for heading, (_, rows) in others),
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


def to_terminal(
    report: "TransferReport",
    confidence: float,
    width: int | None,
) -> str:
    """The gains by the first measure as a table, and the findings, which speak of the others too."""
    rows = main_table(report, confidence, short=True)
    counts = {len(results) for _, _, results in report.cells()}
    seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    title = f"{report.name}, {seeds} seed{'s' * (max(counts) > 1)}"
    if any("[" in cell for row in rows for cell in row.values()):
        title += f", {100 * confidence:g} % intervals"
    drawn = f"{title}\n{text_table([*rows[0]], [[*row.values()] for row in rows])}\n"
    if find_spec("rich"):
        drawn = _rich(title, rows, width)
    return drawn + "\n".join(findings(report, confidence))


def _rich(title: str, rows: Sequence[Row], width: int | None) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=width)
    unlimited = console.options.update(max_width=10_000)
    shapes: list[Callable[[str], str]] = [str, _in_lines]
    for shape in shapes:  # the first that fits, or the last
        drawn = Table(title=Text(title), pad_edge=shape is str)
        for name in rows[0]:
            drawn.add_column(Text(shape(name)), overflow="fold")
        for row in rows:
            cells = [Text(shape(cell)) for cell in row.values()]
            for cell, (verdict, color) in product(cells[2:], VERDICTS.items()):
                cell.highlight_words([verdict], color)
            drawn.add_row(*cells)
        if console.measure(drawn, options=unlimited).maximum <= console.width:
            break
    with console.capture() as capture:
        console.print(drawn)
    return capture.get()


def _in_lines(cell: str) -> str:
    """Break a cell where a reader would: a method at its plus, an estimate before its interval and its verdict."""
    cell = re.sub(r"(?<=[a-z]\+)(?=[a-z])|(?<=:) ", "\n", cell.replace(f"{GAIN} ", f"{GAIN}\n"))
    return re.sub(rf" (?=\[|\(|{'|'.join(VERDICTS)})", "\n", cell)


# The browser itself is told to fetch nothing, whatever stands in the page.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5a636b; --paper: #ffffff; --card: #f4f6f8; --line: #d5dade;
  --helps: #0f6437; --hurts: #a3231b; --cannot: #6b5300; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #a2abb3; --paper: #14171a; --card: #1d2226;
  --line: #384047; --helps: #6fdc9c; --hurts: #ff9d92; --cannot: #e6c65c; } }
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
.cannot { color: var(--cannot); }
figure { margin: 1.5rem 0; } figure .scroll { padding: 0.5rem; }
figure img { display: block; width: 100%; height: auto; margin: 0 auto; }
@media (prefers-color-scheme: dark) { figure img { filter: invert(0.92) hue-rotate(180deg); } }
figcaption { color: var(--soft); font-size: 0.9rem; margin-top: 0.4rem; }
dt { font-weight: 600; margin-top: 0.8rem; } dd { margin: 0; max-width: 48rem; }
pre { margin: 0; padding: 0.75rem; font-size: 0.85rem; background: var(--card); }
footer { color: var(--soft); font-size: 0.85rem; margin: 3rem 0 1rem; }
@media print { .scroll { overflow: visible; } }
"""


def to_html(
    report: "TransferReport",
    confidence: float,
    figures: Mapping[str, "Figure"],
) -> str:
    """Return the page with these figures; it is well-formed XML too."""
    found = "".join(f"<li>{escape(line)}</li>" for line in findings(report, confidence))
    sections = [f"<ul>{found}</ul>"]
    for heading, (about, rows) in tables(report, confidence).items():
        sections.append(_section(heading, _scrolled(_table(about, rows), about)))
    if figures:  # behind the first table
        drawn = [_figure(report, name, figure) for name, figure in figures.items()]
        sections.insert(2, _section("Figures", "\n".join(drawn)))
    terms = ""
    for term, text in notes(report, confidence).items():
        terms += f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>"
    sections.append(_section("What the numbers mean, and what not", f"<dl>{terms}</dl>"))
    configuration = json.dumps(report.configuration, indent=2, ensure_ascii=False)
    shown = _scrolled(f"<pre>{escape(configuration)}</pre>", "Configuration")
    sections.append(_section("Configuration", shown))
    title = escape(report.name)
    body = "\n".join(sections)
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


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _scrolled(content: str, name: str) -> str:
    """What may be wider than a phone scrolls by itself, with the keyboard too."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">{content}</div>'


def _table(about: str, rows: Sequence[Row]) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in rows[0])
    body = "\n".join(f"<tr>{''.join(map(_cell, row, row.values()))}</tr>" for row in rows)
    top = f"<caption>{escape(about)}</caption><thead><tr>{head}</tr></thead>"
    return f"<table>{top}\n<tbody>\n{body}\n</tbody></table>"


def _cell(title: str, cell: str) -> str:
    text = escape(cell)
    if title == "method":
        return f'<th scope="row">{text}</th>'
    text = re.sub(r"(\[.*\])", r"<span>\1</span>", text)
    if title.startswith(GAIN):
        for verdict in VERDICTS:
            text = text.replace(verdict, f'<b class="{verdict.split()[0]}">{verdict}</b>')
    return f"<td>{text}</td>"


def _figure(
    report: "TransferReport",
    name: str,
    figure: "Figure",
) -> str:
    """A figure as SVG, in black on nothing; the style inverts it where the reader prefers the dark."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "taskinfo"}):  # the same figure gives the same
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    source = f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    # In rem: a phone scrolls rather than shrink the text beyond reading.
    width = 7 * figure.get_figwidth()
    size = f"min-width: {min(width, 34):.0f}rem; max-width: {width:.0f}rem"
    about = caption(name)
    words = escape(f"{about}. Methods: {', '.join(report.methods)}.")
    image = f'<img src="{source}" alt="{words}" style="{size}" />'
    return f"<figure>{_scrolled(image, about)}<figcaption>{escape(about)}</figcaption></figure>"
