"""A file of a user's own: a LightningModule, a DataModule, and functions; ``conftest.py`` copies it as ``mine.py``."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(pl.LightningModule):
    """A small classifier of points.

    Args:
        width: Hidden units.
        rate: Learning rate.
    """

    def __init__(self, width: int, rate: float = 0.5):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)


class Nested(Net):
    """A network that is given a part of itself."""

    def __init__(self, first: nn.Module, width: int = 6):
        super().__init__(width)
        self.net[0] = first


class Data(pl.LightningDataModule):
    """Points whose class is their largest coordinate.

    Args:
        batch_size: Samples in a batch.
        shift: Added to all inputs: another way to prepare them.
    """

    def __init__(self, batch_size: int = 16, shift: float = 0.0):
        super().__init__()
        self.batch_size = batch_size
        self.shift = shift

    def setup(self, stage):
        self.stage = stage

    def loader(self, seed, samples):
        x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
        data = TensorDataset(x + self.shift, x[:, :3].argmax(1))
        return DataLoader(data, batch_size=self.batch_size, shuffle=self.stage == "fit")

    def train_dataloader(self):
        return self.loader(0, 120)

    def test_dataloader(self):
        return self.loader(1, 60)

    def predict_dataloader(self):
        return self.loader(2, 200)


class Split(Data):
    """Its training and test samples are parts of one set, split anew at every set-up."""

    def setup(self, stage):
        super().setup(stage)
        x = torch.arange(40.0)[:, None].expand(40, 4)
        self.parts = random_split(TensorDataset(x, torch.arange(40) % 3), [20, 20])

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=20)

    def test_dataloader(self):
        return DataLoader(self.parts[1], batch_size=20)


class FewInputs(Data):
    """Its fresh inputs are too few."""

    def predict_dataloader(self):
        return self.loader(2, 3)


class UsedInputs(Data):
    """Its fresh inputs are those of the training."""

    def predict_dataloader(self):
        return self.train_dataloader()


class Broken(Data):
    """Its loader fails."""

    def train_dataloader(self):
        raise KeyError("no such file")


class Moved(Data):
    """It prepares inputs where only a Trainer asks it to."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x + 1, y


class Untested(pl.LightningDataModule):
    """It has no test samples."""

    def train_dataloader(self):
        data = Data()
        data.setup("fit")
        return data.train_dataloader()


def untyped(width=6):
    """Return a plain network, and say so nowhere."""
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def number():
    """Return something else."""
    return 3


def failing():
    """Fail in a way of its own."""
    raise KeyError("weights")
