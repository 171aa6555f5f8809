"""A run's log: offline where it is asked for, and what it holds."""

import subprocess
import sys

import pytest

from lightning_taskinfo.transfer.logs import RunLog, flatten

CODE = """
import os, pathlib, sys, wandb
folder = pathlib.Path(sys.argv[1])
wandb.init(mode="offline", dir=folder, project="earlier").finish()  # W&B has read the environment
from lightning_taskinfo.transfer.logs import RunLog
with RunLog("wandb_offline", folder=folder).run("mine", {"seed": 0}, [{"epoch": 1, "train_loss": 2.0}]) as run:
    run.log({"before": {"total": 1.0}})
"""


def test_offline_runs_stay_offline_in_a_process_that_has_used_wandb(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    assert "anonymous" not in done.stderr  # what Lightning's own call makes W&B say


def test_what_is_no_number_is_not_logged():
    assert flatten({"a": {"b": 1, "c": "text", "d": None}, "e": [1.0]}) == {"a/b": 1.0}


def test_unknown_kind():
    with pytest.raises(
        ValueError, match="`logger` must be one of none, csv, wandb, wandb_offline, got 'paper'"
    ):
        RunLog("paper")
