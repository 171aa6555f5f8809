"""Small tables of results: aligned text for ``print``, and the same in notebooks."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from lightning_taskinfo._wandb import Rows, log_once

Cells = tuple[list[str], list[list[str]]]


class Tabled:
    """A result that prints itself: a table, remarks where there is cause for them, and one sentence.

    Subclasses have ``_cells``, the names of columns and the rows as they are shown, and ``reading``,
    the result as one sentence.
    """

    _cells: Any
    reading: Any

    def _remarks(self) -> list[str]:
        """Return what a reader of the table must know."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            name: value.tolist() if hasattr(value, "tolist") else value
            for name, value in vars(self).items()
        }

    def to_json(self, **options: Any) -> str:
        """Return everything as JSON; ``options`` go to ``json.dumps``."""
        return json.dumps(self.to_dict(), **options)

    def __str__(self) -> str:
        lines = [text_table(*self._cells()), *self._remarks(), self.reading()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class Logged(Tabled):
    """A result that also draws itself, and can be logged to W&B."""

    plot: Any
    _scalars: Any  # the numbers to compare W&B runs by
    log_key: str  # what the names in a W&B run begin with, before the name of the task

    def table(self) -> Rows:
        """Return column names and rows, as they are logged."""
        return self._cells()

    def log(self, run: Any) -> None:
        """Log the figure as an image, the table, and the main numbers to a W&B run.

        Args:
            run: What ``wandb.init()`` returned, or a WandbLogger's ``experiment``.
        """
        figures = {"figure": self.plot()[0]}
        tables = {"table": self.table()}
        key = f"{self.log_key}/{getattr(self, 'name', '')}".rstrip("/")
        log_once(run, key, scalars=self._scalars(), figures=figures, tables=tables)


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
