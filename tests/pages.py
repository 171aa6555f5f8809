"""The README and the pages of the documentation, and the code and the commands in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\S*)\n(?P<text>.*?)^```$", re.M | re.S)
PYTHON, SHELL, OTHER = {"python", "diff"}, {"bash"}, {"text", "yaml"}


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, languages):
    return [match for match in BLOCK.finditer(page.read_text()) if match["language"] in languages]


def commands():
    """Return every command of a shell block, without its comment, and the page that it is first found on."""
    found = {}
    for page in PAGES:
        for match in blocks(page, SHELL):
            for line in filter(None, match["text"].splitlines()):
                for part in line.split(" && "):
                    found.setdefault(re.sub(r"\s+# .*", "", part), name_of(page))
    return found


COMMANDS = commands()
