"""Write the list of public modules into ``api.md``, and the stored results into ``benchmarks.md``."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from re import Match
from re import compile as pattern
from typing import Any

PACKAGE = Path(__file__).parents[1] / "lightning_taskinfo"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MARKER = "<!-- modules -->"
RESULT = pattern(r"<!-- results: (\S+) -->")
HEADING = pattern(r"(?m)^#+ ")


def public_modules(folder: Path = PACKAGE) -> Iterator[str]:
    """Yield the dotted names to document: a package that has an ``__all__`` speaks for its modules."""
    for path in sorted(folder.iterdir()):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if path.name.startswith("_"):
            continue
        if path.suffix == ".py":
            yield name
        elif (path / "__init__.py").is_file():
            if _has_all(path / "__init__.py"):
                yield name
            else:
                yield from public_modules(path)


def _has_all(path: Path) -> bool:
    targets = [
        t
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        for t in node.targets
    ]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace the markers (an mkdocs event)."""
    if MARKER in markdown:
        markdown = markdown.replace(MARKER, "\n".join(map(_section, public_modules())))
    return RESULT.sub(_stored, markdown)


def _section(name: str) -> str:
    options = "    options: {show_root_heading: false, show_root_toc_entry: false}"
    return f"## {name.removeprefix('lightning_taskinfo.')}\n\n::: {name}\n{options}\n"


def _stored(match: Match[str]) -> str:
    """Return a stored table as Markdown; headings go below those of the page."""
    path = RESULTS / match[1]
    if path.suffix == ".md":
        return HEADING.sub("### ", path.read_text())
    return table(rows(json.loads(path.read_text())))


def rows(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a stored result: its own, or those of its callbacks, its checks or its regularisers."""
    if "rows" in stored:
        return stored["rows"]
    if "results" in stored:
        return [
            {
                "network": network,
                "watched by": name,
                "epoch over plain epoch": ratio["wall"],
                "range": " to ".join(map(_shown, ratio["wall_range"])),
                "share of the callbacks' own methods": ratio["own"],
                "step over plain step": ratio.get("by_steps", {}).get("median", ""),
            }
            for network, result in stored["results"].items()
            for name, ratio in result["ratios"].items()
        ]
    if "summary" in stored:
        shown = ("cells", "cells_beyond_3", "largest")
        return [
            {"compared": name} | {key: row[key] for key in shown}
            for name, row in stored["summary"].items()
        ]
    return [
        {"penalty": penalty, "network": network, "step over plain step": values[penalty]["ratio"]}
        for penalty, networks in stored.items()
        for network, values in (networks.items() if isinstance(networks, dict) else ())
        if isinstance(values, dict) and "ratio" in values.get(penalty, {})
    ]


def table(found: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table, numbers with three digits; what a row does not have stays empty.

    >>> print(table([{"network": "mlp", "ratio": 1.23456}, {"network": "cnn", "weights": 7}]))
    | network | ratio | weights |
    | --- | --- | --- |
    | mlp | 1.23 |  |
    | cnn |  | 7 |
    """
    columns = list(dict.fromkeys(column for row in found for column in row))
    cells = [[_shown(row.get(column, "")) for column in columns] for row in found]
    return "\n".join(
        f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *cells]
    )


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
