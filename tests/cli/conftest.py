"""A user's folder: a file with a LightningModule and a DataModule, and checkpoints of a training."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lightning_taskinfo._lightning import NAMESPACES
from tests.cli.user_file import Data, Net

FILE = Path(__file__).with_name("user_file.py")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """``start.ckpt`` and ``trained.ckpt`` of a network of width 6, as Lightning writes them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    model = Net(6)
    trainer = NAMESPACES["pytorch_lightning"].Trainer(
        max_epochs=20,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.strategy.connect(model)
    trainer.save_checkpoint(folder / "start.ckpt")
    trainer.fit(model, Data())
    trainer.save_checkpoint(folder / "trained.ckpt")
    return folder


@pytest.fixture
def mine(tmp_path, monkeypatch, checkpoints):
    """The user's file, imported from the folder that commands are called in."""
    shutil.copy(FILE, tmp_path / "mine.py")
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        module = importlib.import_module("mine")
    monkeypatch.delitem(sys.modules, "mine")
    return module


@pytest.fixture
def trained(mine):
    """The network with its trained weights."""
    return mine.Net.load_from_checkpoint("trained.ckpt", weights_only=True).cpu()
