"""Every public name says what it takes, and shows it: in a doctest, an example or the documentation."""

import inspect
import re
from pathlib import Path

import pytest

import lightning_taskinfo

ROOT = Path(__file__).parents[1]
SHOWN = "".join(p.read_text() for p in [*ROOT.glob("examples/*.py"), ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
NAMES = sorted(lightning_taskinfo._EXPORTS)


def parameters(name):
    """Return the names of what a public function or class is called with; those of a mixin's are the module's own."""
    found = getattr(lightning_taskinfo, name)
    if name.endswith("Mixin"):
        return []
    return [p.name for p in inspect.signature(found).parameters.values() if p.name not in ("self", "args", "kwargs")]


@pytest.mark.parametrize("name", NAMES)
def test_has_a_docstring_that_names_every_argument(name):
    text = inspect.getdoc(getattr(lightning_taskinfo, name))
    assert text
    documented = set(re.findall(r"^ {4}\**(\w+):", text, re.M))
    assert not set(parameters(name)) - documented


@pytest.mark.parametrize("name", NAMES)
def test_has_an_example(name):
    text = inspect.getdoc(getattr(lightning_taskinfo, name)) or ""
    assert ">>>" in text or "Example::" in text or re.search(rf"\b{name}\b", SHOWN)
