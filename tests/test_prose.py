"""Phrases that were hard to read, and what was written instead, do not come back."""

import re

import pytest

from tests.pages import PAGES, ROOT

TEXTS = [
    *PAGES,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(ROOT.glob("lightning_taskinfo/**/*.py")),
    *sorted(ROOT.glob("examples/*.py")),
]
INSTEAD = {
    r"react to them": "be sensitive to",
    r"tell of each other": "information shared by",
    r"certificate speaks of": "a certificate covers",
    r"on (your|the user's) word": "the assumptions it could not check",
    r"needs to be said": "no configuration is needed",
    r"steps? back": "takes precedence; does nothing more",
    r"how far it is\b": "progress",
    r"can mend": "fixes",
    r"does not travel": "cannot be pickled",
    r"came by layer": "received more than one gradient",
    r"in the order in which they are to be": "ordered by",
    r"\b(a|one) (line|row|dict|value|mapping) an? (training|task|name|point|measurement|epoch)\b": "per",
}


@pytest.mark.parametrize("phrase", INSTEAD)
def test_hard_phrases_are_gone(phrase):
    found = {
        path.relative_to(ROOT).as_posix(): match[0]
        for path in TEXTS
        if (match := re.search(phrase, re.sub(r"\s+", " ", path.read_text())))
    }
    assert not found, f"write: {INSTEAD[phrase]}"
