"""Docstrings speak Sphinx (``:math:`` and friends); turn what mkdocs would print raw into Markdown."""

import re
import textwrap
from typing import Any

import griffe

ROLE = re.compile(r":(?P<role>[a-z]+):`(?P<text>[^`]+)`")
DIRECTIVE = re.compile(
    r"^(?P<indent> *)\.\. math::(?P<inline>.*)\n(?P<body>(?:(?P=indent) +\S.*\n|[ \t]*\n)*)", re.M
)
CITATION = re.compile(r"(?P<key>\[[^\[\]]+\])_(?!\w)")
EXAMPLE = re.compile(
    r"^( *)Example:(?=\n\s+>>>)", re.M
)  # by its plural name it is known to hold code
FOOTNOTE = re.compile(r"^( *)\.\. (\[[^\[\]]+\]) ", re.M)


def to_markdown(text: str) -> str:
    r"""Return a docstring with equations as LaTeX code and references to objects as code.

    >>> to_markdown("The trace of :math:`F`, see :func:`~a.b.fisher_trace`.")
    'The trace of `F`, see `fisher_trace`.'
    >>> print(to_markdown(".. math:: x^2\nMore."))
    ```latex
    x^2
    ```
    <BLANKLINE>
    More.
    """
    text = EXAMPLE.sub(r"\1Examples:", DIRECTIVE.sub(_equation, text + "\n"))
    text = ROLE.sub(
        lambda m: f"`{m['text'] if m['role'] == 'math' else _shortened(m['text'])}`", text
    )
    return FOOTNOTE.sub(r"\1\2 ", CITATION.sub(r"\g<key>", text)).rstrip("\n")


def _shortened(target: str) -> str:
    return target.rpartition(".")[2] if target.startswith("~") else target


def _equation(match: re.Match[str]) -> str:
    lines = f"{match['inline'].strip()}\n{textwrap.dedent(match['body'])}".strip("\n")
    return textwrap.indent(f"```latex\n{lines}\n```\n\n", match["indent"])


class SphinxToMarkdown(griffe.Extension):
    """Rewrite every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of ``obj``."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
