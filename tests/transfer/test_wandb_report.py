"""The summary run has table, images and numbers, as the terminal tool reads them from an offline run."""

import json
import math

import pytest

from lightning_taskinfo.transfer.report import TransferReport, log_to_wandb
from tests.offline_runs import inspect, records_of
from tests.transfer.results import METHODS, minimal, report


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_the_run_has_table_images_numbers_and_its_group(tmp_path):
    import wandb

    experiment = report(METHODS[:2], seeds=2, measured=False)
    with wandb.init(mode="offline", dir=tmp_path / "other", project="other") as another:
        run = log_to_wandb(
            experiment, project="test", group="mine", mode="offline", folder=tmp_path / "new"
        )
        another.log({"still": 1})
    assert run.parent == tmp_path / "new" / "wandb"
    records = records_of(run)
    (item,) = [record["history"]["item"] for record in records if record["type"] == "history"]
    (about,) = [record["run"] for record in records if record["type"] == "run"]
    assert (about["project"], about["run_group"], about["job_type"]) == ("test", "mine", "summary")
    rows = experiment.table()
    assert item["taskinfo/standard/50_labels/accuracy"] == pytest.approx(rows[1]["accuracy"])
    assert item["taskinfo/standard/50_labels/over_scratch_accuracy_low"] == pytest.approx(
        rows[1]["over_scratch_accuracy_low"]
    )
    assert "taskinfo/scratch/50_labels/over_scratch_accuracy" not in item
    for name in ("accuracy",):
        assert (
            (run / "files" / item[f"taskinfo/figures/{name}.path"])
            .read_bytes()
            .startswith(b"\x89PNG")
        )
        assert item[f"taskinfo/figures/{name}.width"] >= 700  # or the text cannot be read
    table = json.loads((run / "files" / item["taskinfo/results.path"]).read_text())
    assert table["columns"] == list(rows[0])
    assert [row[:2] for row in table["data"]] == [[50, "scratch"], [50, "standard"]]
    assert (
        table["data"][1][list(rows[0]).index("over_scratch_accuracy_verdict")]
        == rows[1]["over_scratch_accuracy_verdict"]
    )


def test_the_summary_of_a_bare_report(tmp_path):
    experiment = TransferReport(
        [minimal("lautum", 50, 0, 0.625, loss=math.nan)], {"pair": "a→b"}, "bare"
    )
    run = log_to_wandb(experiment, project="test", mode="offline", folder=tmp_path)
    seen = json.loads(inspect(run, "--summary"))
    assert (seen["name"], seen["config"]) == ("bare: summary", {"pair": "a→b"})
    numbers = {
        key: value for key, value in seen["summary"].items() if key.startswith("taskinfo/lautum/")
    }
    assert numbers == {
        "taskinfo/lautum/50_labels/seeds": 1,
        "taskinfo/lautum/50_labels/accuracy": 0.625,
        "taskinfo/lautum/50_labels/loss": "NaN",
    }
