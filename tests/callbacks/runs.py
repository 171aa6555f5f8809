"""Small trainings to watch: everything an observer could disturb, in a second."""

import csv
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_taskinfo.callbacks import FisherTrace, InformationInWeights, LocalMinimum

PROBES = {
    "FisherTrace": FisherTrace,
    "InformationInWeights": InformationInWeights,
    "LocalMinimum": LocalMinimum,
}
"""Every probe, for the tests that all of them have to pass."""


class Frozen(nn.BatchNorm1d):
    """A batch norm that stays in eval mode, whatever it is told; Lightning tells it nothing when a fit starts."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.eval()

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


class Classifier(pl.LightningModule):
    """Batch norm, a frozen one, dropout, and a scheduler with a state."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(8, 6),
            Frozen(6),
            nn.Tanh(),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Noisy(Dataset):
    """Samples whose transform draws from torch's, numpy's and Python's global generators, and counts itself."""

    def __init__(self, n: int = 32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = (
            torch.randn(n, 4, generator=generator),
            torch.randint(3, (n,), generator=generator),
        )
        self.read = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        noise = torch.rand(4) + torch.from_numpy(np.random.rand(4)).float() + random.random()  # noqa: NPY002
        return self.x[index] + 0.1 * noise + 1e-3 * self.read, self.y[index]


def seed_everything(seed: int = 0) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]  # noqa: NPY002


def make_trainer(folder: Path, *callbacks: Any, **arguments: Any) -> pl.Trainer:
    defaults = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pl.Trainer(
            default_root_dir=folder,
            callbacks=list(callbacks),
            accelerator="cpu",
            enable_model_summary=False,
            **{**defaults, **arguments},
        )


def fit(
    folder: Path,
    *callbacks: Any,
    model: Any = None,
    loader: Any = None,
    val: Any = None,
    ckpt_path: Any = None,
    **arguments: Any,
) -> pl.Trainer:
    """Train on 32 samples in batches of 8, from a fixed seed; returns the trainer."""
    seed_everything()
    model = model if isinstance(model, nn.Module) else (model or Classifier)()  # made after seeding
    loader = DataLoader(digits(), batch_size=8, shuffle=True) if loader is None else loader
    trainer = make_trainer(folder, *callbacks, **arguments)
    with warnings.catch_warnings():
        for message in (
            "many workers",
            "in eval mode",
            "LeafSpec",
            "No positive class",
            "no `val_dataloader`",
        ):
            warnings.filterwarnings("ignore", f".*{message}")
        warnings.filterwarnings("ignore", ".*logging interval|.*smaller than the logging")
        trainer.fit(model, loader, val, ckpt_path=ckpt_path)
    return trainer


def digits(n: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)
    )


def read_csv(logger: CSVLogger) -> list[dict[str, float]]:
    """Return what a CSV logger stored; the names of ours without what all of them begin with."""
    with open(Path(logger.log_dir, "metrics.csv"), newline="") as file:
        rows = [
            {key: float(value) for key, value in row.items() if value}
            for row in csv.DictReader(file)
        ]
    return [{key.removeprefix("taskinfo/"): value for key, value in row.items()} for row in rows]


def same(a: Any, b: Any, where: str = "") -> None:
    """Assert that two checkpoints are equal, bit for bit."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}/{i}")
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    else:
        assert a == b, where
