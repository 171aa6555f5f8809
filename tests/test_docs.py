"""The documentation lists every public module, reads Sphinx's roles as Markdown, and builds without a warning."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_public_modules_are_listed_once_and_private_ones_not():
    found = list(load("hooks").public_modules())
    assert len(found) == len(set(found))
    assert {"lightning_taskinfo.fisher", "lightning_taskinfo.functional.likelihood"} <= set(found)
    assert not any(part.startswith("_") for name in found for part in name.split("."))
    assert "lightning_taskinfo.fisher.measure" not in found  # its package has an `__all__`


def test_the_marker_becomes_sections():
    hooks = load("hooks")
    assert hooks.MARKER in (DOCS / "api.md").read_text()
    text = hooks.on_page_markdown(f"# API\n{hooks.MARKER}\n")
    assert re.findall("^::: (.+)$", text, re.M) == list(hooks.public_modules())
    assert hooks.on_page_markdown("# Another page") == "# Another page"


def test_every_stored_benchmark_is_shown_as_a_table():
    hooks = load("hooks")
    page = (DOCS / "benchmarks.md").read_text()
    shown = {name.partition(".")[0] for name in hooks.RESULT.findall(page)}
    by_others = {"phase_diagram_20"}  # the same grid with fewer repetitions
    stored = {path.stem for path in hooks.RESULTS.iterdir()}
    evidence = {stem for stem in stored if stem.startswith("evidence_")}
    assert stored - evidence == shown | by_others
    evidence_page = (DOCS / "evidence.md").read_text()
    for stem in evidence:
        assert f"benchmarks/evidence/{stem.removeprefix('evidence_')}.py" in evidence_page
    for section in hooks.on_page_markdown(page).split("\n## ")[1:]:
        assert len(re.findall(r"^\| .+ \|$", section, re.M)) > 2, section


def test_every_question_has_a_short_answer():
    for row in load("hooks").summary():
        assert len(row["answer"]) < 400, row


def test_the_benchmark_of_task2vec_still_agrees_with_its_loop(monkeypatch):
    monkeypatch.syspath_prepend(DOCS.parent / "benchmarks")
    benchmark = importlib.import_module("task2vec")
    assert benchmark.disagreement("mlp", 3) < 1e-9


@pytest.mark.parametrize(
    ("sphinx", "markdown"),
    [
        ("of :math:`F_w`.", "of `F_w`."),
        ("see :func:`~a.b.f` and :class:`C`", "see `f` and `C`"),
        ("as ``x`` is", "as ``x`` is"),
        ("One.\n\n.. math:: x^2\n\nTwo.", "One.\n\n```latex\nx^2\n```\n\nTwo."),
        (
            "  .. math::\n      x\n        + y\n\n  Two.",
            "  ```latex\n  x\n    + y\n  ```\n\n  Two.",
        ),
        ("in [Tahir, C]_.\n\n.. [Tahir, C] *Features*", "in [Tahir, C].\n\n[Tahir, C] *Features*"),
    ],
)
def test_sphinx_becomes_markdown(sphinx, markdown):
    pytest.importorskip("griffe")
    assert load("griffe_sphinx").to_markdown(sphinx) == markdown


@pytest.mark.slow
def test_builds_without_a_warning_and_asks_nobody(tmp_path):
    pytest.importorskip("mkdocstrings")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api.html").read_text()
    assert 'id="lightning_taskinfo.fisher.fisher_trace"' in page
    assert ":math:" not in page
    assert not re.findall(r'(?:src|<link[^>]* href)="https?://[^"]+', page)
