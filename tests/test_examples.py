"""Every example runs, quickly, and leaves the figure and the run that it speaks of."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[1]
SCRIPTS = [path for path in sorted(ROOT.glob("examples/*.py")) if '"--fast"' in path.read_text()]


def run(script, out):
    """Run an example with ``--fast`` in a process of its own, and return what it printed."""
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, "--fast", "--out", out]
    done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wandb_metrics(run_folder):
    """Return the last value of everything in the history of an offline run."""
    if Version(version("wandb")) < Version("0.31"):
        pytest.skip("`wandb leet inspect --json`, with which the run is read, came with wandb 0.31")
    wandb = Path(sys.executable).with_name("wandb")
    done = subprocess.run([wandb, "leet", "inspect", "--json", run_folder], capture_output=True, text=True, check=True)
    records = map(json.loads, done.stdout.splitlines())
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    return {key: value for item in items for key, value in item.items()}


def test_there_are_examples():
    assert ROOT / "examples" / "demo.py" in SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_runs_and_draws(script, tmp_path):
    printed = run(script, tmp_path)
    figures = list(tmp_path.glob("*.png"))
    assert figures
    assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in figures)
    if script.stem == "demo":
        check_demo(printed, tmp_path)


def check_demo(printed, out):
    (run_folder,) = (out / "wandb").glob("offline-run-*")
    metrics = wandb_metrics(run_folder)
    assert {"train_loss", "val_loss", "val_accuracy", "test_accuracy"} <= metrics.keys()
    assert (run_folder / "files" / metrics["curves.filenames"][0]).is_file()
    assert f"Test accuracy: {metrics['test_accuracy']:.3f}" in printed
    assert metrics["test_accuracy"] > 0.4  # a tenth by chance
    assert f"wandb leet {run_folder}" in printed
    assert str(out / "curves.png") in printed


def test_the_yaml_example_logs_what_it_lists(tmp_path):
    command = [sys.executable, ROOT / "examples" / "watch.py", "fit", "--config", ROOT / "examples" / "watch.yaml"]
    command += ["--trainer.max_epochs=1", f"--trainer.logger.init_args.save_dir={tmp_path}"]
    command += [f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (metrics,) = tmp_path.rglob("metrics.csv")
    columns = set(metrics.read_text().splitlines()[0].split(","))
    assert {"fisher_trace", "every_step/fisher_trace_train_step", "information_nats", "local_minimum/gamma"} <= columns
    assert len(list(tmp_path.rglob("*_figure.png"))) == 4
