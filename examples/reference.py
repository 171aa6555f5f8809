"""The plain classifier and data module that the examples start from."""

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, random_split

from lightning_taskinfo.data import ArrayData


class Classifier(pl.LightningModule):
    """A small convolutional network: ``features`` to transfer, and a linear ``head`` for the task.

    Args:
        image_shape: Channels, height and width of an image; height and width at least 8.
        num_classes: Number of classes.
        width: Channels of the first convolution.
        lr: Learning rate.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num_classes: int,
        *,
        width: int = 16,
        lr: float = 1e-3,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.features = nn.Sequential(
            nn.Conv2d(image_shape[0], width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * (image_shape[1] // 4) * (image_shape[2] // 4), 64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def _evaluate(self, split: str, batch: tuple[Tensor, Tensor]) -> None:
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(-1) == y).float().mean()
        self.log_dict(
            {f"{split}_loss": cross_entropy(logits, y), f"{split}_accuracy": accuracy},
            prog_bar=True,
        )


class ArrayDataModule(pl.LightningDataModule):
    """Loaders for an :class:`ArrayData`; a share of its training split is kept for validation.

    Args:
        data: The dataset.
        batch_size: Samples in a batch.
        val_fraction: Share of the training split that is validated on instead.
        seed: Seed of that split.
    """

    def __init__(
        self, data: ArrayData, *, batch_size: int = 64, val_fraction: float = 0.2, seed: int = 0
    ):
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(seed)
        self.train, self.val = random_split(
            data.train(), [1 - val_fraction, val_fraction], generator
        )
        self.test = data.test()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.batch_size)
