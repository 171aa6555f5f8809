"""Numbers, figure, table and summary reach whatever loggers there are, as their own files say."""

import csv
import json
import time
from pathlib import Path

import pytest
from pytorch_lightning.loggers import CSVLogger, WandbLogger
from torch.utils.data import DataLoader

from lightning_taskinfo.callbacks import FisherTrace
from lightning_taskinfo.callbacks.report import summary
from tests.callbacks.runs import PROBES, Classifier, digits, fit, make_trainer, read_csv
from tests.offline_runs import records_of


def steady():
    return Classifier(dropout=0.0)


def wandb_records(folder):
    """Return folder and records of each offline run, the oldest first, as the terminal tool reads them."""
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    return [(run, records_of(run)) for run in runs]


def items(records, kind):
    return [record[kind]["item"] for record in records if record["type"] == kind]


def updates(records, kind):
    """Return what summary or configuration have in the end."""
    return together(record[kind].get("update", {}) for record in records if record["type"] == kind)


def definitions(records):
    return [record["metric"] for record in records if record["type"] == "metric"]


def together(parts):
    return {key: value for part in parts for key, value in part.items()}


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.usefixtures("offline")
def test_an_offline_wandb_run_has_numbers_image_table_and_settings(tmp_path):
    probes = [probe(every_n_steps=2, name=None) for probe in PROBES.values()]
    named = FisherTrace(labels="exact", forward_fn=forward, data="train", name="mine")
    logger, model = WandbLogger(save_dir=tmp_path, project="test"), Classifier()
    trainer = make_trainer(
        tmp_path, *probes, named, logger=logger, max_epochs=1, log_every_n_steps=1
    )
    trainer.fit(model, DataLoader(digits(), batch_size=8))
    trainer.fit_loop.max_epochs = 2  # a second fit with the same logger
    trainer.fit(model, DataLoader(digits(), batch_size=8))
    logger.experiment.finish()
    ((run, records),) = wandb_records(tmp_path)
    history, summaries = items(records, "history"), updates(records, "summary")
    ours = {
        key for item in history for key in item if not key.startswith(("_", "trainer/", "epoch"))
    }
    assert all(key.startswith("taskinfo/") for key in ours)
    for probe in probes:
        name = probe.headline[0]
        key = f"taskinfo/{name}"
        stored = {item["trainer/global_step"]: item[key] for item in history if key in item}
        assert stored == {row["step"]: pytest.approx(row[name]) for row in probe.history}
        assert len(stored) == len([item for item in history if key in item]) == 4
        last = together(history)
        (image,) = last[f"{key}_figure.filenames"]
        assert (run / "files" / image).read_bytes().startswith(b"\x89PNG")
        table = json.loads((run / "files" / last[f"{key}_table.path"]).read_text())
        assert table["columns"] == list(probe.history[0])
        assert [row[0] for row in table["data"]] == [2, 4, 6, 8]
        for end, value in summary(probe.history, [name]).items():
            assert summaries[f"taskinfo/{end}"] == pytest.approx(value)
            assert f"taskinfo/{end}" not in last, "it is no series"
    assert any(r.get("glob_name") == "taskinfo/*" for r in definitions(records))
    stored = updates(records, "config")
    assert stored["taskinfo/InformationInWeights/prior_center"] == "initial"
    assert stored["taskinfo/FisherTrace/every_n_steps"] == 2
    assert stored["taskinfo/FisherTrace(mine)/labels"] == "exact"
    assert stored["taskinfo/FisherTrace(mine)/every_n_steps"] == 100
    assert stored["taskinfo/FisherTrace(mine)/forward_fn"] == "forward"


def forward(module, inputs):
    return module(inputs)


@pytest.mark.usefixtures("offline")
def test_a_resumed_wandb_run_goes_on_where_it_stopped(tmp_path):
    """Offline, the second part of a run is a folder of its own with the same id, which ``wandb sync`` joins."""

    def part(epochs, **arguments):
        callback = FisherTrace(every_n_steps=2)
        logger = WandbLogger(save_dir=tmp_path, project="test", id="watched", resume="allow")
        loader = DataLoader(digits(), batch_size=8)
        trainer = fit(
            tmp_path,
            callback,
            model=steady,
            loader=loader,
            logger=logger,
            max_epochs=epochs,
            **arguments,
        )
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        logger.experiment.finish()
        return callback.history

    part(1)
    time.sleep(1)  # the folders are named by the second
    history = part(2, ckpt_path=tmp_path / "end.ckpt")
    runs = wandb_records(tmp_path)
    assert [run.name.rpartition("-")[2] for run, _ in runs] == ["watched", "watched"]
    key = "taskinfo/fisher_trace"
    stored = [[item for item in items(records, "history") if key in item] for _, records in runs]
    assert [[item["trainer/global_step"] for item in part] for part in stored] == [[2, 4], [6, 8]]
    values = [item[key] for part in stored for item in part]
    assert values == pytest.approx([row["fisher_trace"] for row in history])
    run, records = runs[1]
    last = together(items(records, "history"))
    table = json.loads((run / "files" / last[f"{key}_table.path"]).read_text())
    assert [row[0] for row in table["data"]] == [2, 4, 6, 8]
    assert updates(records, "summary")[f"{key}_first"] == pytest.approx(history[0]["fisher_trace"])
    assert (
        len([item for item in items(records, "history") if f"{key}_figure.filenames" in item]) == 1
    )


def test_csv_gets_files_beside_its_metrics(tmp_path):
    callback, logger = FisherTrace(every_n_steps=2, name="mine"), CSVLogger(tmp_path)
    fit(tmp_path, callback, logger=logger)
    folder = Path(logger.log_dir)
    assert (folder / "mine_fisher_trace_figure.png").read_bytes().startswith(b"\x89PNG")
    with open(folder / "mine_fisher_trace_table.csv", newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert rows == callback.history
    with open(folder / "mine_fisher_trace_summary.csv", newline="") as file:
        stored = {name: float(value) for name, value in [*csv.reader(file)][1:]}
    ends = summary(callback.history, ["fisher_trace"])
    assert stored == {f"taskinfo/mine/{name}": pytest.approx(value) for name, value in ends.items()}
    with open(folder / "metrics.csv", newline="") as file:
        columns = next(csv.reader(file))
    assert {name for name in columns if not name.startswith("taskinfo/mine/")} <= {"epoch", "step"}
    assert not any("_first" in name for name in columns)
    assert "taskinfo/FisherTrace(mine)/max_samples: 128" in (folder / "hparams.yaml").read_text()


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
        stored = [(event.step, event.value) for event in events.Scalars(f"taskinfo/mine/{name}")]
        assert stored == [
            (row["step"], pytest.approx(row[name], rel=1e-6)) for row in callback.history
        ]
    assert {tag for tag in events.Tags()["scalars"] if not tag.startswith("taskinfo/mine/")} <= {
        "epoch",
        "hp_metric",
    }
    assert "hp_metric" not in events.Tags()["scalars"], "settings are no metric"

    def text(tag):
        (event,) = events.Tensors(f"taskinfo/{tag}/text_summary")
        return event.tensor_proto.string_val[0].decode().splitlines()

    ends = [line.split(" | ")[0] for line in text("mine/fisher_trace_summary")[2:]]
    assert ends == [
        f"| taskinfo/mine/{name}" for name in summary(callback.history, ["fisher_trace"])
    ]
    assert "| taskinfo/FisherTrace(mine)/every_n_steps | 2 |" in text("FisherTrace(mine)/settings")
    (image,) = events.Images("taskinfo/mine/fisher_trace_figure")
    assert image.step == 8
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert image.width > image.height > 100
    lines = text("mine/fisher_trace_table")
    assert lines[0] == f"| step | {' | '.join(columns)} |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 2", "| 4", "| 6", "| 8"]


def test_few_layers_are_series_and_all_are_in_the_table(tmp_path):
    callback, logger = FisherTrace(every_n_steps=4, max_layers=2), CSVLogger(tmp_path)
    fit(tmp_path, callback, logger=logger)
    series = {name for row in read_csv(logger) for name in row if name.startswith("fisher_trace/")}
    assert series == {"fisher_trace/net.0", "fisher_trace/net.7"}, "the first and the last"
    table = (Path(logger.log_dir) / "fisher_trace_table.csv").read_text().splitlines()[0].split(",")
    assert [name for name in table if name.startswith("fisher_trace/")] == [
        f"fisher_trace/net.{i}" for i in (0, 1, 4, 5, 7)
    ]


def test_several_loggers_and_none(tmp_path):
    callback, loggers = (
        FisherTrace(every_n_steps=4),
        [CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b")],
    )
    fit(tmp_path, callback, logger=loggers)
    for logger in loggers:
        assert [row["step"] for row in read_csv(logger) if "fisher_trace" in row] == [4, 8]
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
