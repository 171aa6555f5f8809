"""The report as a page of HTML that is whole in itself: nothing in it is fetched."""

import base64
import io
import json
import re
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

import lightning_taskinfo
from lightning_taskinfo.transfer.render import GAIN, TextTable, caption, findings, notes, tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_taskinfo.transfer.report import TransferReport

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
    title = escape(report.name)
    body = "\n".join(_sections(report, confidence, figures))
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
    report: "TransferReport",
    confidence: float,
    figures: Mapping[str, "Figure"],
) -> list[str]:
    lines = [f"<li>{escape(line)}</li>" for line in findings(report, confidence)]
    sections = [f"<ul>{''.join(lines)}</ul>"]
    for heading, table in tables(report, confidence).items():
        sections.append(_section(heading, _table(table)))
    if figures:  # behind the first table
        drawn = [_figure(report, name, figure) for name, figure in figures.items()]
        sections.insert(2, _section("Figures", "\n".join(drawn)))
    terms = []
    for term, text in notes(report, confidence).items():
        terms.append(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>")
    meaning = f"<dl>{''.join(terms)}</dl>"
    sections.append(_section("What the numbers mean, and what not", meaning))
    configuration = json.dumps(report.configuration, indent=2, ensure_ascii=False)
    shown = _scrolled(f"<pre>{escape(configuration)}</pre>", "Configuration")
    sections.append(_section("Configuration", shown))
    return sections


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>"


def _scrolled(content: str, name: str) -> str:
    """What may be wider than a phone scrolls by itself, with the keyboard too."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}">{content}</div>'


def _table(table: TextTable) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in table.header)
    rows = []
    for row, begins in zip(table.rows, table.begins(), strict=True):
        first = ' class="first"' * begins
        cells = "".join(map(_cell, table.header, row))
        rows.append(f"<tr{first}>{cells}</tr>")
    body = "\n".join(rows)
    about = escape(table.caption)
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
    # In rem: a phone scrolls rather than shrink the text beyond reading.
    width = 7 * figure.get_figwidth()
    size = f"min-width: {min(width, 34):.0f}rem; max-width: {width:.0f}rem"
    about = caption(name)
    where = "the first table" if name == "accuracy" else "report.json"
    words = f"{about}. Methods: {', '.join(report.methods)}. The numbers are in {where}."
    image = f'<img src="{_data_url(figure)}" alt="{escape(words)}" style="{size}" />'
    return f"<figure>{_scrolled(image, about)}<figcaption>{escape(about)}</figcaption></figure>"


def _data_url(figure: "Figure") -> str:
    """The figure as SVG, in letters; the same figure gives the same."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "taskinfo"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"
