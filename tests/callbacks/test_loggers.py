"""Numbers, figure, table and summary reach whatever loggers there are, as their own files say."""

import csv
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from pytorch_lightning.loggers import CSVLogger, WandbLogger
from torch.utils.data import DataLoader

from lightning_taskinfo.callbacks import FisherTrace
from tests.callbacks.runs import PROBES, Classifier, digits, fit, make_trainer, read_csv


def wandb_history(folder):
    """Return the items of an offline run's history, as the terminal tool reads them."""
    (run,) = (folder / "wandb").glob("offline-run-*")
    if Version(version("wandb")) < Version("0.31"):
        pytest.skip("`wandb leet inspect --json`, with which the run is read, came with wandb 0.31")
    command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", run]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = map(json.loads, printed.splitlines())
    return run, [record["history"]["item"] for record in records if record["type"] == "history"]


def test_an_offline_wandb_run_has_numbers_image_and_table(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    probes = [probe(every_n_steps=2, name=None) for probe in PROBES.values()]
    logger, model = WandbLogger(save_dir=tmp_path, project="test"), Classifier()
    trainer = make_trainer(tmp_path, *probes, logger=logger, max_epochs=1, log_every_n_steps=1)
    trainer.fit(model, DataLoader(digits(), batch_size=8))
    trainer.fit_loop.max_epochs = 2  # a second fit with the same logger
    trainer.fit(model, DataLoader(digits(), batch_size=8))
    logger.experiment.finish()
    run, items = wandb_history(tmp_path)
    for probe in probes:
        name = probe.headline[0]
        stored = {item["trainer/global_step"]: item[name] for item in items if name in item}
        assert stored == {row["step"]: pytest.approx(row[name]) for row in probe.history}
        assert len(stored) == len([item for item in items if name in item]) == 4
        last = {key: value for item in items for key, value in item.items()}
        assert last[f"{name}_last"] == pytest.approx(probe.history[-1][name])
        (image,) = last[f"{name}_figure.filenames"]
        assert (run / "files" / image).read_bytes().startswith(b"\x89PNG")
        table = json.loads((run / "files" / last[f"{name}_table.path"]).read_text())
        assert table["columns"] == list(probe.history[0])
        assert [row[0] for row in table["data"]] == [2, 4, 6, 8]


def test_csv_gets_files_beside_its_metrics(tmp_path):
    callback, logger = FisherTrace(every_n_steps=2, name="mine"), CSVLogger(tmp_path)
    fit(tmp_path, callback, logger=logger)
    folder = Path(logger.log_dir)
    assert (folder / "mine_fisher_trace_figure.png").read_bytes().startswith(b"\x89PNG")
    with open(folder / "mine_fisher_trace_table.csv", newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert rows == callback.history
    stored = {key: value for row in read_csv(logger) for key, value in row.items()}
    traces = [row["fisher_trace"] for row in callback.history]
    for key, value in {"first": traces[0], "last": traces[-1], "min": min(traces), "max": max(traces)}.items():
        assert stored[f"mine/fisher_trace_{key}"] == pytest.approx(value)


def test_tensorboard_gets_image_and_text(tmp_path):
    pytest.importorskip("tensorboard")
    from pytorch_lightning.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback, logger = FisherTrace(every_n_steps=2), TensorBoardLogger(tmp_path)
    fit(tmp_path, callback, logger=logger)
    events = EventAccumulator(logger.log_dir).Reload()
    assert [event.step for event in events.Scalars("fisher_trace")] == [2, 4, 6, 8]
    assert events.Images("fisher_trace_figure")
    assert any("fisher_trace_table" in tag for tag in events.Tags()["tensors"])


def test_several_loggers_and_none(tmp_path):
    callback, loggers = FisherTrace(every_n_steps=4), [CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")]
    fit(tmp_path, callback, logger=loggers)
    for logger in loggers:
        assert [row["step"] for row in read_csv(logger) if "fisher_trace" in row] == [4, 8]
    fit(tmp_path, callback, logger=False)
    fit(tmp_path, callback, fast_dev_run=True)


def test_a_report_that_fails_is_a_warning(tmp_path):
    class Unplottable(FisherTrace):
        def plot(self, *, ax=None):
            raise OSError("no space left")

    callback, logger = Unplottable(every_n_steps=4), CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match=r"could not measure at step 8 \(OSError: no space left\)"):
        fit(tmp_path, callback, logger=logger)
