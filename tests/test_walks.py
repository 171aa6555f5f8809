"""The maps in CONTRIBUTING.md are those of the code as it is."""

import importlib.util
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
