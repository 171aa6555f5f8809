"""A labelled source, a target with few labels and many unlabelled inputs, and the loaders of every stage."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from lightning_taskinfo._files import StrPath, digest
from lightning_taskinfo._lightning import LightningDataModule
from lightning_taskinfo._ranges import check_choice, check_counts, check_values
from lightning_taskinfo.data import ArrayData, load_task
from lightning_taskinfo.data.arrays import KEYS, as_images
from lightning_taskinfo.transfer.ready.module import Shape, Stage
from lightning_taskinfo.transfer.sampling import (
    Draw,
    EpochSampler,
    Loader,
    chosen_rows,
    whole_batch,
)

CHUNK = 4096  # images resized at once


@dataclass(eq=False)
class ImageSamples(Dataset[Any]):
    """Images with their index, and with their labels where they have any, a whole batch at a time.

    Args:
        x: Images, uint8, shape ``[N, C, H, W]``, which come out as floats from 0 to 1.
        y: Their classes, or ``None``: then there is nothing here that knows them.
        index: What each sample is called in the ensemble of its predictions.
    """

    x: Tensor
    y: Tensor | None
    index: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, draws: Sequence[Draw | int]) -> tuple[Any, Tensor]:
        """Return ``((x, y), index)`` of a batch, or ``(x, index)`` where there are no labels."""
        rows = [draw if isinstance(draw, int) else draw[-1] for draw in draws]
        x = self.x[rows].float() / 255
        return (x if self.y is None else (x, self.y[rows])), self.index[rows]


class TransferDataModule(LightningDataModule):
    """Loaders for semi-supervised transfer, all of them decided by one seed.

    Training batches are ``{"labeled": (x, y), "unlabeled": x}``, with ``"labeled_index"`` and
    ``"unlabeled_index"`` beside them: source labels and target inputs while pretraining, target
    labels and target inputs while fine-tuning. The shorter of the two is gone through again until
    the longer one ends. The test set is the source's test split while pretraining, the target's
    while fine-tuning.

    Images are kept in memory. Those of the target are brought to the source's shape: one channel is
    replicated, several are averaged, and height and width are resized. The unlabelled inputs are
    those of all target samples; their labels are dropped when the data is split, and nothing that
    reaches a model knows them. An index names the same sample in both parts of a batch.

    Args:
        source: An :class:`~lightning_taskinfo.data.ArrayData`; or a name or path as in
            :func:`~lightning_taskinfo.data.load_task`.
        target: The same.
        labels: Number of target labels to train on, in equal shares for the classes.
        unlabeled: Further target inputs without labels, bytes of shape ``[M, C, H, W]``,
            ``[M, H, W, C]`` or ``[M, H, W]``, in place of the target's own training inputs.
        max_source: At most this many source samples, and
        max_unlabeled: at most this many unlabelled inputs, chosen by the seed.
        image_shape: Channels, height and width to bring all images to; the source's where ``None``.
        batch_size: Samples in a labelled batch, and in an unlabelled one.
        seed: Decides split and order.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> data = TransferDataModule("digits", "letters", labels=50, batch_size=32)
        >>> data.setup("fit")
        >>> len(data.labeled), data.labeled.y.bincount().tolist()
        (50, [5, 5, 5, 5, 5, 5, 5, 5, 5, 5])
    """

    def __init__(
        self,
        source: ArrayData | StrPath = "digits",
        target: ArrayData | StrPath = "letters",
        *,
        labels: int = 50,
        unlabeled: Any = None,
        max_source: int | None = None,
        max_unlabeled: int | None = None,
        image_shape: Shape | None = None,
        batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_counts(labels=labels)
        check_values(
            "at least 2",
            batch_size=batch_size,
            max_source=max_source,
            max_unlabeled=max_unlabeled,
        )
        self.arguments: dict[str, Any] = {
            "source": source,
            "target": target,
            "labels": labels,
            "unlabeled": None if unlabeled is None else as_images("unlabeled", unlabeled),
            "max_source": max_source,
            "max_unlabeled": max_unlabeled,
            "image_shape": image_shape,
            "batch_size": batch_size,
            "seed": seed,
        }
        self.batch_size = batch_size
        self.seed = seed
        self.stage = "pretrain"
        self._ready = False

    def replaced(self, **changes: Any) -> "TransferDataModule":
        """Return a module with some arguments changed, such as ``seed`` and ``labels``."""
        return type(self)(**{**self.arguments, **changes})

    def tasks(self) -> dict[str, ArrayData]:
        """Return source and target as they are, before they are split."""
        return {name: as_task(name, self.arguments[name]) for name in ("source", "target")}

    def setup(self, stage: str | None = None) -> None:
        """Load and split, once."""
        if self._ready:
            return
        given = self.arguments
        source, target = self.tasks().values()
        self.image_shape = tuple(given["image_shape"] or source.image_shape)
        self.source_classes = source.num_classes
        self.target_classes = target.num_classes
        x = target.x_train
        labels = given["labels"]
        order = chosen_rows(torch.from_numpy(target.y_train), len(x), [labels], self.seed)
        self.source = self.samples(source.x_train, source.y_train, most=given["max_source"])
        self.source_test = self.samples(source.x_test, source.y_test)
        self.labeled = self.samples(x, target.y_train, order[:labels])
        self.target_test = self.samples(target.x_test, target.y_test)
        # The unlabelled inputs do not depend on the number of labels: one pretraining serves them
        # all. Those of their own have indices after the target's.
        first = 0
        if given["unlabeled"] is not None:
            x, first = given["unlabeled"], len(x)
        self.unlabeled = self.samples(x, most=given["max_unlabeled"], first=first)
        self.num_indices = first + len(x)
        self._ready = True

    def samples(
        self,
        x: Any,
        y: Any = None,
        rows: Any = None,
        *,
        most: int | None = None,
        first: int = 0,
    ) -> ImageSamples:
        """Return images of some rows, or at most so many, in the common shape; indices are counted from ``first``."""
        if rows is None:
            shuffled = np.random.default_rng(self.seed).permutation(len(x))
            rows = np.sort(shuffled[:most])
        images = fit_images(torch.from_numpy(x[rows]), self.image_shape)
        labels = None if y is None else torch.from_numpy(y[rows])
        return ImageSamples(images, labels, first + torch.from_numpy(rows))

    def describe(self) -> dict[str, Any]:
        """Return what decides the data but for seed and number of labels, in JSON-like values; arrays as a digest."""
        used = dict(self.arguments)
        del used["seed"], used["labels"]
        arrays = {"unlabeled": used.pop("unlabeled")}
        for name, task in self.tasks().items():
            used[name] = f"{task.name}, {task.num_classes} classes"
            arrays |= {f"{name}.{key}": getattr(task, key) for key in KEYS}
        known = [(name, torch.from_numpy(x)) for name, x in arrays.items() if x is not None]
        return {**used, "sha256": digest(known)}

    def use(self, stage: Stage) -> "TransferDataModule":
        """Choose the loaders: ``"pretrain"`` or ``"fine_tune"``."""
        check_choice(["pretrain", "fine_tune"], stage=stage)
        self.stage = stage
        return self

    def train_dataloader(self) -> Any:
        """Return the labelled and the unlabelled loader, which Lightning combines in its mode ``max_size_cycle``."""
        labeled = self.source if self.stage == "pretrain" else self.labeled
        return {
            "labeled": self._loader(labeled, 0),
            "unlabeled": self._loader(self.unlabeled, 1),
        }

    def test_dataloader(self) -> Loader:
        """Return the target's test split, or the source's while pretraining."""
        samples = self.source_test if self.stage == "pretrain" else self.target_test
        return DataLoader(samples, max(self.batch_size, 256), collate_fn=whole_batch)

    def unlabeled_dataloader(self) -> Loader:
        """Return the unlabelled inputs once, in order, for :meth:`Lautum.fit_inputs`."""
        return DataLoader(self.unlabeled, self.batch_size, collate_fn=whole_batch)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Put the indices beside the samples."""
        if not isinstance(batch, dict):  # test
            samples, _ = batch
            return samples
        parts = {name: part for name, (part, _) in batch.items()}
        return parts | {f"{name}_index": index for name, (_, index) in batch.items()}

    def _loader(self, samples: ImageSamples, number: int) -> Loader:
        ranks = getattr(self.trainer, "world_size", 1)
        seed = 2 * self.seed + number
        return DataLoader(
            samples,
            self.batch_size,
            sampler=EpochSampler(len(samples), seed=seed),
            collate_fn=whole_batch,
            # A batch of one sample has no covariance; but a rank whose share fills no batch must
            # have one.
            drop_last=len(samples) // ranks > self.batch_size,
        )


def as_task(argument: str, what: Any) -> ArrayData:
    """Return the task that ``what`` stands for.

    Args:
        argument: What the caller calls it, for messages.
        what: An :class:`ArrayData`; or a name or path.

    Raises:
        TypeError: If it is none of these.
        ValueError: If there is no such file.
    """
    if isinstance(what, str | os.PathLike):
        return load_task(what)
    if not isinstance(what, ArrayData):
        raise TypeError(
            f"`{argument}` must be an ArrayData, or the name or path of one, got {type(what).__name__}."
        )
    return what


def fit_images(x: Tensor, shape: Shape) -> Tensor:
    """Return images in the shape that the other task has: channels replicated or averaged, then resized.

    Args:
        x: Images, uint8, shape ``[N, C, H, W]``.
        shape: Channels, height and width to come out.

    Raises:
        ValueError: If the channels differ, and neither number is 1.

    Example:
        >>> fit_images(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), (3, 16, 16)).shape
        torch.Size([5, 3, 16, 16])
    """
    channels, *size = shape
    own = x.shape[1]
    if own != channels and 1 not in (channels, own):
        raise ValueError(f"`image_shape` must have {own} channels or 1, got {channels}.")
    if tuple(x.shape[1:]) == shape:
        return x
    fitted = []
    for part in x.split(CHUNK):
        y = part.float()
        if channels == 1:
            y = y.mean(1, keepdim=True)
        y = y.expand(-1, channels, -1, -1)
        if list(y.shape[2:]) != size:
            y = interpolate(y, size, mode="bilinear", antialias=True, align_corners=False)
        fitted.append(y.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(fitted)
