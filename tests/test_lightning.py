"""Trainer and LightningCLI of both namespaces take our callbacks, save their state and log through them."""

import sys
from importlib import import_module
from inspect import isabstract
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn
from torch.utils.data import DataLoader

from lightning_taskinfo import FisherTrace, callbacks
from lightning_taskinfo._lightning import NAMESPACES, Callback, LightningDataModule
from tests.callbacks.runs import digits, read_csv

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{message}")
    for message in (
        "LeafSpec",
        "smaller than the logging interval",
        "LightningCLI's args",
        "No seed found",
        "deprecated",
    )
]
namespaces = pytest.mark.parametrize("namespace", NAMESPACES)


def make_module(namespace):
    """Return a LightningModule class of that namespace."""

    class Module(NAMESPACES[namespace].LightningModule):
        def __init__(self, width: int = 6):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def train_dataloader(self):
            return DataLoader(digits(), batch_size=8)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return Module


def quiet(folder):
    return {
        "default_root_dir": str(folder),
        "accelerator": "cpu",
        "max_epochs": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def check(folder, callback, logger):
    """The callback's state is in the checkpoint, and its numbers in the logger's file."""
    (path,) = folder.rglob("*.ckpt")
    assert (
        torch.load(path, weights_only=False)["callbacks"]["FisherTrace"]["history"]
        == callback.history
    )
    stored = [row["fisher_trace"] for row in read_csv(logger) if "fisher_trace" in row]
    assert stored == pytest.approx([row["fisher_trace"] for row in callback.history])
    assert len(stored) == 3


def test_both_namespaces_are_tested():
    assert set(NAMESPACES) == {"lightning.pytorch", "pytorch_lightning"}
    assert all(issubclass(Callback, package.Callback) for package in NAMESPACES.values())
    assert all(
        issubclass(LightningDataModule, package.LightningDataModule)
        for package in NAMESPACES.values()
    )


@namespaces
@pytest.mark.parametrize(
    "given", [lambda callback: [callback], lambda callback: callback], ids=["list", "bare"]
)
def test_trainer(tmp_path, namespace, given):
    callback = FisherTrace(every_n_steps=2)
    logger = import_module(f"{namespace}.loggers").CSVLogger(tmp_path)
    trainer = NAMESPACES[namespace].Trainer(
        callbacks=given(callback), logger=logger, **quiet(tmp_path)
    )
    trainer.fit(make_module(namespace)())
    check(tmp_path, callback, logger)


def run_cli(namespace, folder, *arguments):
    cli = import_module(f"{namespace}.cli").LightningCLI
    logger = f"{namespace}.loggers.CSVLogger"
    options = [
        f"--trainer.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in quiet(folder).items()
    ]
    log = [f"--trainer.logger={logger}", f"--trainer.logger.save_dir={folder}"]
    return cli(
        make_module(namespace), args=["fit", *options, *log, *arguments], save_config_callback=None
    ).trainer


COMMANDS = {
    "appended": [
        "--trainer.callbacks+=lightning_taskinfo.FisherTrace",
        "--trainer.callbacks.every_n_steps=2",
    ],
    "bare": [
        "--trainer.callbacks=lightning_taskinfo.FisherTrace",
        "--trainer.callbacks.every_n_steps=2",
    ],
    "list": [
        '--trainer.callbacks=[{"class_path": "lightning_taskinfo.FisherTrace", "init_args": {"every_n_steps": 2}}]'
    ],
}


@namespaces
@pytest.mark.parametrize("command", COMMANDS)
def test_cli(tmp_path, namespace, command):
    trainer = run_cli(namespace, tmp_path, *COMMANDS[command])
    (callback,) = (callback for callback in trainer.callbacks if isinstance(callback, FisherTrace))
    assert callback.every_n_steps == 2
    check(tmp_path, callback, trainer.logger)


@namespaces
def test_cli_shows_every_argument(namespace, capsys):
    cli = import_module(f"{namespace}.cli").LightningCLI
    with pytest.raises(SystemExit):
        cli(
            make_module(namespace),
            args=["fit", "--trainer.callbacks.help=lightning_taskinfo.FisherTrace"],
        )
    shown = capsys.readouterr().out
    for argument in ("every_n_steps", "max_samples", "labels", "at_start", "batch_fn", "seed"):
        assert f".{argument} " in shown


@namespaces
def test_cli_refuses_a_wrong_value(tmp_path, namespace, capsys):
    with pytest.raises(SystemExit):
        run_cli(namespace, tmp_path, *COMMANDS["appended"], "--trainer.callbacks.labels=true")
    assert "labels" in capsys.readouterr().err


def test_other_modules_do_not_import_lightning():
    package = Path(sys.modules["lightning_taskinfo"].__file__).parent
    assert [
        p.name for p in package.rglob("*.py") if "import lightning.pytorch" in p.read_text()
    ] == []


NEEDED = {"PACBayesCertificate": {"prior_origin": "random initialisation"}}
PROBES = [
    kind
    for kind in vars(callbacks).values()
    if isinstance(kind, type) and issubclass(kind, callbacks.Probe) and not isabstract(kind)
]


@pytest.mark.parametrize("kind", PROBES)
def test_configuration_files_make_every_callback(kind):
    """Options that a callback fixes are not asked of files, which would give them twice."""
    parser = ArgumentParser()
    parser.add_argument("--callback", type=Callback)
    arguments = {"max_samples": 20, **NEEDED.get(kind.__name__, {})}
    words = {"class_path": f"lightning_taskinfo.{kind.__name__}", "init_args": arguments}
    made = parser.instantiate_classes(parser.parse_object({"callback": words})).callback
    assert type(made) is kind
    assert made.max_samples == 20
