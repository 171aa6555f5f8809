"""Numbers, figure, table and summary reach whatever loggers there are, as their own files say."""

import csv
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from pytorch_lightning.loggers import CSVLogger, WandbLogger
from torch.utils.data import DataLoader

from lightning_taskinfo.callbacks import FisherTrace
from lightning_taskinfo.callbacks._report import summary
from tests.callbacks.runs import PROBES, Classifier, digits, fit, make_trainer, read_csv


def steady():
    return Classifier(dropout=0.0)


def wandb_histories(folder):
    """Return folder and history of each offline run, the oldest first, as the terminal tool reads them."""
    if Version(version("wandb")) < Version("0.31"):
        pytest.skip("`wandb leet inspect --json`, with which the run is read, came with wandb 0.31")
    runs = []
    for run in sorted((folder / "wandb").glob("offline-run-*")):
        command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", run]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        records = map(json.loads, printed.splitlines())
        runs.append((run, [record["history"]["item"] for record in records if record["type"] == "history"]))
    return runs


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.usefixtures("offline")
def test_an_offline_wandb_run_has_numbers_image_and_table(tmp_path):
    probes = [probe(every_n_steps=2, name=None) for probe in PROBES.values()]
    logger, model = WandbLogger(save_dir=tmp_path, project="test"), Classifier()
    trainer = make_trainer(tmp_path, *probes, logger=logger, max_epochs=1, log_every_n_steps=1)
    trainer.fit(model, DataLoader(digits(), batch_size=8))
    trainer.fit_loop.max_epochs = 2  # a second fit with the same logger
    trainer.fit(model, DataLoader(digits(), batch_size=8))
    logger.experiment.finish()
    ((run, items),) = wandb_histories(tmp_path)
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


@pytest.mark.usefixtures("offline")
def test_a_resumed_wandb_run_goes_on_where_it_stopped(tmp_path):
    """Offline, the second part of a run is a folder of its own with the same id, which ``wandb sync`` joins."""

    def part(epochs, **arguments):
        callback = FisherTrace(every_n_steps=2)
        logger = WandbLogger(save_dir=tmp_path, project="test", id="watched", resume="allow")
        loader = DataLoader(digits(), batch_size=8)
        trainer = fit(tmp_path, callback, model=steady, loader=loader, logger=logger, max_epochs=epochs, **arguments)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        logger.experiment.finish()
        return callback.history

    part(1)
    time.sleep(1)  # the folders are named by the second
    history = part(2, ckpt_path=tmp_path / "end.ckpt")
    runs = wandb_histories(tmp_path)
    assert [run.name.rpartition("-")[2] for run, _ in runs] == ["watched", "watched"]
    stored = [[item for item in items if "fisher_trace" in item] for _, items in runs]
    assert [[item["trainer/global_step"] for item in items] for items in stored] == [[2, 4], [6, 8]]
    values = [item["fisher_trace"] for items in stored for item in items]
    assert values == pytest.approx([row["fisher_trace"] for row in history])
    run, items = runs[1]
    last = {key: value for item in items for key, value in item.items()}
    table = json.loads((run / "files" / last["fisher_trace_table.path"]).read_text())
    assert [row[0] for row in table["data"]] == [2, 4, 6, 8]
    assert last["fisher_trace_first"] == pytest.approx(history[0]["fisher_trace"])
    assert len([item for item in items if "fisher_trace_figure.filenames" in item]) == 1


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

    callback, logger = FisherTrace(every_n_steps=2, name="mine"), TensorBoardLogger(tmp_path)
    fit(tmp_path, callback, logger=logger, log_every_n_steps=3)
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir).Reload()
    columns = [name for name in callback.history[0] if name != "step"]
    for name in columns:
        stored = [(event.step, event.value) for event in events.Scalars(f"mine/{name}")]
        assert stored == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in callback.history]
    for end, value in summary(callback.history, ["fisher_trace"]).items():
        assert [(event.step, event.value) for event in events.Scalars(f"mine/{end}")] == [(8, pytest.approx(value))]
    (image,) = events.Images("mine/fisher_trace_figure")
    assert image.step == 8
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert image.width > image.height > 100
    (text,) = events.Tensors("mine/fisher_trace_table/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert lines[0] == f"| step | {' | '.join(columns)} |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 2", "| 4", "| 6", "| 8"]


def test_several_loggers_and_none(tmp_path):
    callback, loggers = FisherTrace(every_n_steps=4), [CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")]
    fit(tmp_path, callback, logger=loggers)
    for logger in loggers:
        assert [row["step"] for row in read_csv(logger) if "fisher_trace" in row] == [4, 8]
        assert any("fisher_trace_last" in row for row in read_csv(logger))
        assert (Path(logger.log_dir) / "fisher_trace_table.csv").exists()
    fit(tmp_path, FisherTrace(every_n_steps=4), logger=False)
    fit(tmp_path, FisherTrace(every_n_steps=4), fast_dev_run=True)


def test_a_report_that_fails_is_a_warning(tmp_path):
    class Unplottable(FisherTrace):
        def plot(self, *, ax=None):
            raise OSError("no space left")

    callback, logger = Unplottable(every_n_steps=4), CSVLogger(tmp_path)
    with pytest.warns(UserWarning, match=r"could not measure at step 8 \(OSError: no space left\)"):
        fit(tmp_path, callback, logger=logger)
