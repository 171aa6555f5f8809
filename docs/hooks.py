"""Write the list of public modules into ``api.md``, so that a new module is documented as soon as it exists."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "lightning_taskinfo"
MARKER = "<!-- modules -->"


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
    targets = [t for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign) for t in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace the marker by one section a module (an mkdocs event)."""
    return markdown.replace(MARKER, "\n".join(map(_section, public_modules()))) if MARKER in markdown else markdown


def _section(name: str) -> str:
    options = "    options: {show_root_heading: false, show_root_toc_entry: false}"
    return f"## {name.removeprefix('lightning_taskinfo.')}\n\n::: {name}\n{options}\n"
