"""Small tables of results: aligned text for ``print``, HTML for notebooks."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any, TypeAlias

Cells: TypeAlias = tuple[list[str], list[list[str]]]


class Tabled:
    """A result that prints itself: a table, remarks where there is cause for them, and one sentence.

    Subclasses have ``_cells`` and ``reading``; those with a ``to_dict`` can be written as JSON.
    """

    def _cells(self) -> Cells:
        """Return column names and rows, as they are shown."""
        raise NotImplementedError

    def _remarks(self) -> list[str]:
        """Return what a reader of the table must know."""
        return []

    def reading(self) -> str:
        """Return the result as one sentence."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        raise NotImplementedError

    def to_json(self, **options: Any) -> str:
        """Return everything as JSON; ``options`` go to ``json.dumps``."""
        return json.dumps(self.to_dict(), **options)

    def __str__(self) -> str:
        columns, rows = self._cells()
        table = text_table(columns, rows)
        lines = [table, *self._remarks(), self.reading()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_table(*self._cells(), self.reading())


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return cells in aligned columns, the first to the left and the others to the right.

    Example:
        >>> print(text_table(["layer", "nats"], [["body", "12"], ["head", "3"]]))
        layer  nats
        body     12
        head      3
    """
    table = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    lines = []
    for row in table:
        aligned = list(map(str.rjust, row, widths))
        aligned[0] = row[0].ljust(widths[0])
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], sentence: str = "") -> str:
    """Return cells as an HTML table, with a sentence below it.

    Example:
        >>> html_table(["layer"], [["a<b"]])
        '<table><thead><tr><th>layer</th></tr></thead><tbody><tr><td>a&lt;b</td></tr></tbody></table>'
    """
    head = _html_row("th", columns)
    body = "".join(_html_row("td", row) for row in rows)
    below = f"<p>{escape(sentence)}</p>" if sentence else ""
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{below}"


def _html_row(tag: str, cells: Sequence[str]) -> str:
    row = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{row}</tr>"
