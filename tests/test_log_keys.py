"""The tables of log keys in the documentation are what real runs log: no key is missing there, and none is made up."""

import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import (
    FisherTrace,
    HardSamples,
    InformationInWeights,
    LocalMinimum,
    PACBayesCertificate,
    rank_starts,
)
from lightning_taskinfo import callbacks as every
from lightning_taskinfo.transfer import PENALTIES, log_to_wandb, transfer
from tests.offline_runs import records_of
from tests.penalised_net import WEIGHTS, Net
from tests.penalised_net import fit as fit_penalised
from tests.transfer.results import report
from tests.transfer.test_certified import run as run_own
from tests.transfer.tiny import STAGES, tiny_data, tiny_net

PAGE = Path(__file__).parents[1] / "docs" / "wandb.md"
OF_LIGHTNING = {"epoch", "step", "trainer/global_step"}
HEADLINES = (
    "fisher_trace", "squared_gradient_norm", "squared_displacement", "local_minimum/gamma", "certificate_bound",
    "certificate_risk",
)  # fmt: skip
PLACES = {  # what may stand for a name in angle brackets
    "layer": r"[\w.]+", "std": r"[\d.e-]+", "penalty": "|".join(PENALTIES), "method": r"[\w+]+",
    "metric": r"[\w/]+", "start": r"[\w ]+",
    "number": r"\d+", "column": r"\w+", "structure": "isotropic|diagonal|neuron|oracle", "task": r"[\w:]+",
}  # fmt: skip


def documented(heading):
    """Return the keys of a table as patterns, by how they are written; a headline's once for each."""
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    cells = re.findall(r"^\| (`.+?) \|", section, re.M)
    written = [key for cell in cells for key in re.findall("`([^`]+)`", cell)]
    keys = [
        key.replace("<headline>", name)
        for key in written
        for name in (HEADLINES if "<headline>" in key else [""])
    ]
    return {
        key: re.compile(re.sub("<([^>]+)>", lambda m: f"({PLACES[m[1]]})", key)) for key in keys
    }


def check(heading, logged, *others):
    """Every logged key is in the table, or in one of the others; every key of the table is logged."""
    patterns = documented(heading)
    allowed = [p for table in (heading, *others) for p in documented(table).values()]
    unknown = {key for key in logged if not any(p.fullmatch(key) for p in allowed)}
    assert not unknown, f"add these to the table {heading!r} of docs/wandb.md"
    assert all(key.startswith("taskinfo/") for key in logged)
    never = {key for key, p in patterns.items() if not any(map(p.fullmatch, logged))}
    assert not never, f"the table {heading!r} of docs/wandb.md has these, which nothing logs"


class FakeSummary:
    """A run of W&B whose summary only keeps the keys that it is given."""

    def __init__(self, keys):
        self.keys, self.summary = keys, self

    def update(self, values):
        self.keys |= set(values)

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("taskinfo/*", "trainer/global_step")


class Recorder(Logger):
    """Keeps the keys of all that a W&B logger is given: numbers, pictures and tables."""

    name, version = "recorder", 0

    def __init__(self):
        super().__init__()
        self.keys = set()
        self.run = FakeSummary(self.keys)

    @property
    def experiment(self):
        return self.run

    def log_metrics(self, metrics, step=None):
        self.keys |= set(metrics) - OF_LIGHTNING

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_table(self, key, columns, data, step):
        self.keys.add(key)

    def log_image(self, key, images, step):
        self.keys.add(key)


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_callbacks():
    callbacks = [
        FisherTrace(every_n_steps=2),
        HardSamples(every_n_steps=2, name="every_step"),
        InformationInWeights(),
        LocalMinimum(max_samples=20, draws=3),
        PACBayesCertificate(prior_origin="random initialisation", draws=10, betas=(1.0,)),
    ]
    public = {name: getattr(every, name) for name in every.__all__}
    names = {name for name, kind in public.items() if issubclass(kind, every.Probe)} - {"Probe"}
    assert names == {type(callback).__name__ for callback in callbacks}, "log each of them here"
    logger = Recorder()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=logger, callbacks=callbacks, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        Classifier(),
        DataLoader(TensorDataset(torch.randn(32, 4), torch.arange(32) % 3), batch_size=8),
    )
    named = {key for key in logger.keys if key.startswith("taskinfo/every_step/")}
    assert named  # a callback with a name puts it in front
    check("Callbacks", {key.replace("taskinfo/every_step/", "taskinfo/") for key in logger.keys})


def test_penalties():
    logger = Recorder()
    fit_penalised(Net(WEIGHTS), logger=logger, max_epochs=1, log_every_n_steps=1)
    check("Penalties", logger.keys)
    assert {key.split("/")[1] for key in logger.keys} == {"loss_without_penalties", *PENALTIES}


def keys_of(run):
    """Return the keys of an offline run: of its series, pictures and tables, and of its summary."""
    records = records_of(run)
    parts = [r["history"]["item"] for r in records if r["type"] == "history"]
    parts += [r["summary"].get("update", {}) for r in records if r["type"] == "summary"]
    found = {key for part in parts for key in part if not key.startswith("_")}
    assert found
    objects = {
        key.removesuffix("._type") for key in found if key.endswith("._type")
    }  # pictures and tables
    return {next((name for name in objects if key.startswith(f"{name}.")), key) for key in found}


def steps_of(run, key):
    """Return the values of the horizontal axis that W&B is told for a key, and the axis itself."""
    records = records_of(run)
    metrics = [r["metric"] for r in records if r["type"] == "metric"]
    globs = [m for m in metrics if fnmatch(key, m.get("glob_name", "")) and "step_metric" in m]
    axis = max(globs, key=lambda metric: len(metric["glob_name"]))["step_metric"]
    items = [r["history"]["item"] for r in records if r["type"] == "history"]
    return axis, [item.get(axis) for item in items if key in item]


@pytest.mark.slow
def test_transfer(tmp_path):
    methods = ["standard", "temporal_ensembling+information+local_minimum"]
    data = tiny_data(labels=30)
    stages = replace(STAGES, fine_tune_epochs=20)  # steps enough for Lightning to log some
    transfer(
        tiny_net,
        data,
        methods=methods,
        seeds=1,
        stages=stages,
        folder=tmp_path,
        logger="wandb_offline",
    )
    runs = sorted((tmp_path / "logs" / "wandb").glob("offline-run-*"))
    logged = set().union(*map(keys_of, runs)) - OF_LIGHTNING
    plain = {"train_loss", "test_loss", "test_accuracy"}
    assert plain <= logged
    check("Transfer", logged - plain, "Penalties")
    assert steps_of(runs[-1], "taskinfo/before/information/total") == ("trainer/global_step", [0])
    assert {
        f"taskinfo/{name}/added_to_loss"
        for name in ("temporal_ensembling", "information", "local_minimum")
    } <= logged


@pytest.mark.slow
def test_report(tmp_path):
    run = log_to_wandb(report(), project="test", mode="offline", folder=tmp_path)
    check("Report", keys_of(run))


def test_transfer_of_an_own_module(tmp_path):
    run_own(tmp_path, adapt=["linear"], logger="wandb_offline")
    runs = (tmp_path / "logs" / "wandb").glob("offline-run-*")
    logged = set().union(*map(keys_of, runs)) - OF_LIGHTNING - {"train_loss"}
    check("Transfer of your own module", logged)


def test_ranking_of_starts(tmp_path):
    wandb = pytest.importorskip("wandb")
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    ranking = rank_starts(
        {"a net": Classifier().net, "b": Classifier().net}, (x, y), progress=False
    )
    with wandb.init(mode="offline", dir=tmp_path, project="test") as run:
        ranking.log(run)
    check("Ranking of starts", keys_of(Path(run.dir).parent))


def test_tasks(tmp_path):
    wandb = pytest.importorskip("wandb")
    from tests.test_tables import CURVE, EMBEDDING, matrix

    with wandb.init(mode="offline", dir=tmp_path) as run:
        for result in (CURVE, EMBEDDING, matrix()):
            result.log(run)
    logged = keys_of(next(tmp_path.glob("wandb/offline-run-*")))
    check("Tasks", logged)
    assert "taskinfo/task_distance/a→b" in logged
