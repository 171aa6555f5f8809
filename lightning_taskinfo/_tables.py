"""Small tables of results: aligned text for ``print``, HTML for notebooks."""

from collections.abc import Sequence
from html import escape


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return cells in aligned columns, the first to the left and the others to the right.

    Example:
        >>> print(text_table(["layer", "nats"], [["body", "12"], ["head", "3"]]))
        layer  nats
        body     12
        head      3
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    lines = []
    for first, *others in (columns, *rows):
        aligned = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:{widths[0]}}", *aligned]).rstrip())
    return "\n".join(lines)


class Tabled:
    """A result that prints as a table with a sentence below it, and shows both in notebooks."""

    def _cells(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return names of columns, and rows of cells."""
        raise NotImplementedError

    def reading(self) -> str:
        """Return the sentence."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{text_table(*self._cells())}\n{self.reading()}"

    def _repr_html_(self) -> str:
        return html_table(*self._cells(), self.reading())


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], sentence: str = "") -> str:
    """Return cells as an HTML table, with a sentence below it.

    Example:
        >>> html_table(["layer"], [["a<b"]])
        '<table><thead><tr><th>layer</th></tr></thead><tbody><tr><td>a&lt;b</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    below = f"<p>{escape(sentence)}</p>" if sentence else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
