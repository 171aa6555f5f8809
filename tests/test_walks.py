"""The maps in CONTRIBUTING.md are those of the code as it is."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def walks():
    spec = importlib.util.spec_from_file_location("walks", ROOT / "docs" / "walks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
def test_the_maps_are_true(walks):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    written = text.partition(walks.BEGIN)[2].partition(walks.END)[0]
    assert written == walks.section(), "run `python docs/walks.py --write`"


def test_what_computes_a_number_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Where a number is computed")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        module = ""
        for name in re.findall(r"`([\w.]+)`", row):
            path = name.split(".")
            if len(path) > 1:
                module = "lightning_taskinfo." + ".".join(path[:2])
                path = path[2:]
            found = importlib.import_module(module)
            for part in path:
                found = getattr(found, part)
            assert callable(found), name
