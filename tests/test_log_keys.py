"""The table of log keys in the documentation is what real runs log: no key is missing in it, and none is made up."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from packaging.version import Version
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import FisherTrace, InformationInWeights, LocalMinimum, PACBayesCertificate
from lightning_taskinfo.transfer import transfer
from tests.penalised_net import WEIGHTS, Net
from tests.penalised_net import fit as fit_penalised
from tests.transfer.tiny import STAGES, tiny_data, tiny_net

PAGE = Path(__file__).parents[1] / "docs" / "wandb.md"
OF_LIGHTNING = {"epoch", "step", "created_at", "trainer/global_step"}


def documented(heading):
    """Return the keys of a table as patterns, by how they are written."""
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    cells = re.findall(r"^\| (`.+?) \|", section, re.M)
    keys = [key for cell in cells for key in re.findall("`([^`]+)`", cell)]
    return {key: re.compile(re.sub("<[^>]+>", ".+", re.escape(key))) for key in keys}


def check(heading, logged):
    patterns = documented(heading)
    assert {key for key in logged if not any(p.fullmatch(key) for p in patterns.values())} == set()
    assert {key for key, p in patterns.items() if not any(map(p.fullmatch, logged))} == set()


def csv_keys(logger):
    header = (Path(logger.log_dir) / "metrics.csv").read_text().partition("\n")[0]
    return set(header.split(",")) - OF_LIGHTNING


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


def test_callbacks(tmp_path):
    callbacks = [
        FisherTrace(every_n_steps=2),
        FisherTrace(every_n_steps=2, data="train_step", labels="empirical", name="every_step"),
        InformationInWeights(),
        LocalMinimum(max_samples=20, draws=3),
        PACBayesCertificate(prior_origin="random initialisation", draws=10, betas=(1.0,)),
    ]
    logger = CSVLogger(tmp_path)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=logger, callbacks=callbacks, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(TensorDataset(torch.randn(32, 4), torch.arange(32) % 3), batch_size=8))
    logger.save()
    check("Callbacks", {key.removeprefix("every_step/") for key in csv_keys(logger)})


def test_penalties(tmp_path):
    logger = CSVLogger(tmp_path)
    fit_penalised(Net(WEIGHTS), logger=logger, max_epochs=1, log_every_n_steps=1)
    logger.save()
    check("Penalties", csv_keys(logger))


@pytest.mark.slow
def test_transfer(tmp_path):
    if Version(version("wandb")) < Version("0.31"):
        pytest.skip("`wandb leet inspect --json`, with which the run is read, came with wandb 0.31")
    data = tiny_data(labels=30, validation=12)
    transfer(tiny_net, data, methods=["standard"], seeds=1, stages=STAGES, folder=tmp_path, logger="wandb_offline")
    logged = set()
    for run in (tmp_path / "logs" / "wandb").glob("offline-run-*"):
        command = [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", run]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        items = [r["history"]["item"] for r in map(json.loads, printed.splitlines()) if r["type"] == "history"]
        logged |= {key for item in items for key in item if not key.startswith("_")}
    assert logged
    logged -= OF_LIGHTNING | {key for key in logged if key == "loss/likelihood"}
    check("Transfer", logged)
