"""A run's log: offline where it is asked for, and what it holds."""

import os

import pytest
import wandb

from lightning_taskinfo.transfer.training import RunLog, flatten, log_numbers
from tests.ranks import forked


def log_twice(folder):
    """Log one run of somebody else's, then one of ours; W&B reads the environment once a process."""
    with (folder / "stderr").open("w") as printed:
        os.dup2(printed.fileno(), 2)
    wandb.init(mode="offline", dir=folder, project="earlier").finish()
    with RunLog("wandb_offline", folder=folder).run("mine", {"seed": 0}) as logger:
        log_numbers(logger, {"before": {"total": 1.0}})


def test_offline_runs_stay_offline_in_a_process_that_has_used_wandb(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    process = forked(log_twice, tmp_path)
    process.join()
    printed = (tmp_path / "stderr").read_text()
    assert process.exitcode == 0, printed
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    assert "anonymous" not in printed  # what Lightning's own call makes W&B say


def test_what_is_no_number_is_not_logged():
    assert flatten({"a": {"b": 1, "c": "text", "d": None}, "e": [1.0]}) == {"a/b": 1.0}


def test_unknown_kind():
    with pytest.raises(
        ValueError, match="`logger` must be one of none, wandb, wandb_offline, got 'paper'"
    ):
        RunLog("paper")
