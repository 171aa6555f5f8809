"""A labelled source, a target with few labels and many unlabelled inputs, and the loaders of every stage."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

from lightning_taskinfo._files import StrPath, digest
from lightning_taskinfo._lightning import LightningDataModule
from lightning_taskinfo._nested import described
from lightning_taskinfo._ranges import check_finite
from lightning_taskinfo._warn import first_line, warn
from lightning_taskinfo.data import ArrayData, load_task
from lightning_taskinfo.data.arrays import KEYS, as_labels, channels_last, warn_of_absent
from lightning_taskinfo.data.names import EMBEDDED
from lightning_taskinfo.transfer.ready.module import Shape
from lightning_taskinfo.transfer.sampling import (
    Draw,
    EpochSampler,
    Loader,
    count_or_rows,
    split_target,
    whole_batch,
)

CHUNK = 4096  # images resized at once
DataStage = Literal["pretrain", "fine_tune"]


class Images(NamedTuple):
    """Images in memory, bytes or floats, with their classes.

    Attributes:
        x: Images, uint8 from 0 to 255 or floats, shape ``[N, C, H, W]``.
        y: Their classes, int64, shape ``[N]``.
    """

    x: Tensor
    y: Tensor


class ImageTask(NamedTuple):
    """A classification task: a training and a test split, with a name."""

    name: str
    num_classes: int
    train: Images
    test: Images


@dataclass(eq=False)
class ImageSamples(Dataset[Any]):
    """Images with their index, and with their labels where they have any, a whole batch at a time.

    Args:
        x: Images, uint8 or float, shape ``[N, C, H, W]``. Bytes come out as floats from 0 to 1.
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
        x = self.x[rows]
        if x.dtype == torch.uint8:
            x = x.float() / 255
        return (x if self.y is None else (x, self.y[rows])), self.index[rows]


class TransferDataModule(LightningDataModule):
    """Loaders for semi-supervised transfer, all of them decided by one seed.

    Training batches are ``{"labeled": (x, y), "unlabeled": x}``, with ``"labeled_index"`` and
    ``"unlabeled_index"`` beside them: source labels and target inputs while pretraining, target
    labels and target inputs while fine-tuning. The shorter of the two is gone through again until
    the longer one ends. While pretraining, the source's test split validates; while fine-tuning,
    the target's validation samples. The target's test split is the test set.

    Images are kept in memory. Those of the target are brought to the source's shape: one channel is
    replicated, several are averaged, and height and width are resized. The unlabelled inputs are
    those of all target samples but the validation's; their labels are dropped when the data is
    split, and nothing that reaches a model knows them. An index names the same sample in both parts
    of a batch.

    Args:
        source: An :class:`~lightning_taskinfo.data.ArrayData`; a name as in
            :func:`~lightning_taskinfo.data.load_dataset`, or an npz file; or a pair
            of datasets, training and test, of images ``[C, H, W]``, ``[H, W, C]`` or ``[H, W]`` and
            classes. Whole numbers from 0 to 255 are bytes, which come out between 0 and 1; other
            images are used as they are.
        target: The same.
        labels: Number of target labels to train on, in equal shares for the classes; or the rows of
            the target's training split whose labels may be used.
        validation: Number of target samples, or rows, whose labels are looked at but never trained
            on; a tenth of the training split, at most 1,000, where ``None``.
        unlabeled: Further target inputs without labels, an array of shape ``[M, C, H, W]``,
            ``[M, H, W, C]`` or ``[M, H, W]``, in place of the target's own training inputs.
        max_source: At most this many source samples, and
        max_unlabeled: at most this many unlabelled inputs, chosen by the seed.
        image_shape: Channels, height and width to bring all images to; the source's where ``None``.
        batch_size: Samples in a labelled batch, and in an unlabelled one.
        seed: Decides split and order.
        data_dir: Where names are looked up; ``TASKINFO_DATA_DIR`` where ``None``.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument is of another kind.

    Example:
        >>> data = TransferDataModule("digits", "letters", labels=50, batch_size=32)
        >>> data.setup("fit")
        >>> len(data.labeled), data.labeled.y.bincount().tolist()
        (50, [5, 5, 5, 5, 5, 5, 5, 5, 5, 5])
    """

    def __init__(
        self,
        source: Any = "digits",
        target: Any = "letters",
        *,
        labels: int | Sequence[int] = 50,
        validation: int | Sequence[int] | None = None,
        unlabeled: Any = None,
        max_source: int | None = None,
        max_unlabeled: int | None = None,
        image_shape: Shape | None = None,
        batch_size: int = 64,
        seed: int = 0,
        data_dir: StrPath | None = None,
    ) -> None:
        super().__init__()
        labels = count_or_rows("labels", labels)
        if validation is not None:
            validation = count_or_rows("validation", validation)
        if unlabeled is not None:
            unlabeled = as_images("unlabeled", unlabeled)
        self.arguments: dict[str, Any] = {
            "source": source,
            "target": target,
            "labels": labels,
            "validation": validation,
            "unlabeled": unlabeled,
            "max_source": max_source,
            "max_unlabeled": max_unlabeled,
            "image_shape": image_shape,
            "batch_size": batch_size,
            "seed": seed,
            "data_dir": data_dir,
        }
        for argument in ("batch_size", "max_source", "max_unlabeled"):
            value = self.arguments[argument]
            if value is not None and value < 2:
                raise ValueError(f"`{argument}` must be at least 2, got {value}.")
        self.batch_size = batch_size
        self.seed = seed
        self.stage: DataStage = "pretrain"
        self._ready = False

    def replaced(self, **changes: Any) -> "TransferDataModule":
        """Return a module with some arguments changed, such as ``seed`` and ``labels``."""
        return type(self)(**{**self.arguments, **changes})

    def settled(self) -> "TransferDataModule":
        """Return a module that is good for other processes: datasets read, paths from the root."""
        where = self.arguments["data_dir"] or os.environ.get("TASKINFO_DATA_DIR")
        changes: dict[str, Any] = {"data_dir": where and os.path.abspath(where)}
        for name, task in zip(("source", "target"), self.tasks(), strict=True):
            what = self.arguments[name]
            if not isinstance(what, str | os.PathLike):
                changes[name] = task
            elif os.path.exists(what) and what not in EMBEDDED:
                changes[name] = os.path.abspath(what)
        return self.replaced(**changes)

    def prepare_data(self) -> None:
        """Load named data once, so that it is in the cache before other processes ask for it."""
        if not self._ready:
            self.tasks()

    def tasks(self) -> tuple[ImageTask, ImageTask]:
        """Return source and target as they are, before they are split."""
        given = self.arguments
        where = given["data_dir"]
        source = as_task("source", given["source"], where)
        return source, as_task("target", given["target"], where)

    def setup(self, stage: str | None = None) -> None:
        """Load and split, once."""
        if self._ready:
            return
        given = self.arguments
        source, target = self.tasks()
        self.image_shape: Shape = tuple(given["image_shape"] or source.train.x.shape[1:])
        self.source_classes = source.num_classes
        self.target_classes = target.num_classes
        x, y = target.train
        validation = given["validation"]
        if validation is None:
            validation = min(1000, len(y) // 10)
        self.split = split_target(
            y.numpy(),
            target.num_classes,
            labels=given["labels"],
            validation=validation,
            seed=self.seed,
        )
        self.source = self._samples(*source.train, most=given["max_source"])
        self.source_test = self._samples(*source.test)
        self.labeled = self._samples(x, y, self.split.labeled)
        # The unlabelled inputs do not depend on the number of labels: one pretraining serves them
        # all. Those of their own have indices after the target's.
        pool, first = x, 0
        rows: Any = self.split.unlabeled
        if given["unlabeled"] is not None:
            pool, rows, first = given["unlabeled"], None, len(x)
        self.unlabeled = self._samples(pool, None, rows, most=given["max_unlabeled"], first=first)
        self.num_indices = first + len(pool)
        self.validation = self._samples(x, y, self.split.validation)
        self.target_test = self._samples(*target.test)
        self._ready = True

    def _samples(
        self,
        x: Tensor,
        y: Tensor | None,
        rows: Any = None,
        *,
        most: int | None = None,
        first: int = 0,
    ) -> ImageSamples:
        """Some of the images, brought to one shape; the index of each is its row, counted from ``first``."""
        if rows is None:
            rows = np.arange(len(x))
        if most is not None and most < len(rows):
            shuffled = np.random.default_rng(self.seed).permutation(rows)
            rows = np.sort(shuffled[:most])
        chosen = torch.from_numpy(rows)
        images = fit_images(x[chosen], self.image_shape)
        return ImageSamples(images, None if y is None else y[chosen], first + chosen)

    def describe(self) -> dict[str, Any]:
        """Return what decides the data but for seed and number of labels, in JSON-like values; arrays as a digest."""
        used = dict(self.arguments)
        for name in ("seed", "data_dir"):
            del used[name]
        if isinstance(used["labels"], int):
            del used["labels"]
        for name, task in zip(("source", "target"), self.tasks(), strict=True):
            arrays = zip(KEYS, (*task.train, *task.test), strict=True)
            used[name] = {
                "name": task.name,
                "classes": task.num_classes,
                "sha256": digest(arrays),
            }
        if used["unlabeled"] is not None:
            used["unlabeled"] = digest([("images", used["unlabeled"])])
        return used

    def use(self, stage: DataStage) -> "TransferDataModule":
        """Choose the loaders: ``"pretrain"`` or ``"fine_tune"``."""
        if stage not in ("pretrain", "fine_tune"):
            raise ValueError(f"`stage` must be 'pretrain' or 'fine_tune', got {stage!r}.")
        self.stage = stage
        return self

    def train_dataloader(self) -> Any:
        """Return the labelled and the unlabelled loader, which Lightning combines in its mode ``max_size_cycle``."""
        labeled = self.source if self.stage == "pretrain" else self.labeled
        return {
            "labeled": self._loader(labeled, 0),
            "unlabeled": self._loader(self.unlabeled, 1),
        }

    def val_dataloader(self) -> Any:
        """Return the source's test split while pretraining, the target's validation samples while fine-tuning."""
        samples = self.source_test if self.stage == "pretrain" else self.validation
        return self._in_order(samples, 256) if len(samples) else []

    def test_dataloader(self) -> Any:
        """Return the target's test split, or the source's while pretraining."""
        samples = self.source_test if self.stage == "pretrain" else self.target_test
        return self._in_order(samples, 256)

    def unlabeled_dataloader(self) -> Loader:
        """Return the unlabelled inputs once, in order, for :meth:`Lautum.fit_inputs`."""
        return self._in_order(self.unlabeled)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Put the indices beside the samples."""
        if not isinstance(batch, dict):  # validation and test
            samples, _ = batch
            return samples
        parts = {name: part for name, (part, _) in batch.items()}
        return parts | {f"{name}_index": index for name, (_, index) in batch.items()}

    def _in_order(self, samples: ImageSamples, least: int = 1) -> Loader:
        size = max(self.batch_size, least)
        return DataLoader(samples, size, collate_fn=whole_batch)

    def _loader(self, samples: ImageSamples, number: int) -> Loader:
        epoch = getattr(self.trainer, "current_epoch", 0)  # not 0 in a run that is resumed
        ranks = getattr(self.trainer, "world_size", 1)
        seed = 2 * self.seed + number
        return DataLoader(
            samples,
            self.batch_size,
            sampler=EpochSampler(len(samples), seed=seed, epoch=epoch),
            collate_fn=whole_batch,
            # A batch of one sample has no covariance; but a rank whose share fills no batch must
            # have one.
            drop_last=len(samples) // ranks > self.batch_size,
        )


def as_task(argument: str, what: Any, data_dir: StrPath | None = None) -> ImageTask:
    """Return the task that ``what`` stands for.

    Args:
        argument: What the caller calls it, for messages.
        what: An :class:`ArrayData`; a name or npz file; or a pair of map-style
            datasets, training and test, of images ``[C, H, W]``, ``[H, W, C]`` or ``[H, W]`` and
            classes, which are read once and kept in memory.
        data_dir: Where names are looked up.

    Raises:
        TypeError: If it is none of these.
        ValueError: If there is no such file, or a dataset is empty, its images are not of one shape
            or not finite, or a class is negative.
    """
    if isinstance(what, ImageTask):
        return what
    if isinstance(what, str | os.PathLike):
        what = load_task(what, data_dir=data_dir)
    if isinstance(what, ArrayData):
        x, y, x_test, y_test = (torch.from_numpy(getattr(what, key)) for key in KEYS)
        return ImageTask(what.name, what.num_classes, Images(x, y), Images(x_test, y_test))
    if not isinstance(what, tuple | list) or len(what) != 2:
        raise TypeError(
            f"`{argument}` must be an ArrayData, a name, an npz file or a pair of datasets, "
            f"got {type(what).__name__}."
        )
    train, test = (_read(argument, part) for part in what)
    classes = 1 + int(torch.cat([train.y, test.y]).max())
    warn_of_absent(f"`{argument}`", train.y, classes)
    return ImageTask(type(what[0]).__name__, classes, train, test)


def _read(argument: str, dataset: Any) -> Images:
    """Read a dataset of pairs, image by image."""
    samples = [dataset[row] for row in range(len(dataset))]
    for sample in samples:
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise ValueError(
                f"`{argument}` must be two datasets, training and test, of pairs (image, class), got a sample that is "
                f"{described(sample)}; arrays make an `ArrayData`."
            )
    x = as_images(argument, [image for image, _ in samples])
    y = as_labels(argument, [label for _, label in samples])
    if y.min() < 0:
        raise ValueError(f"`{argument}` must have classes that count from 0, got {y.min()}.")
    return Images(x, torch.from_numpy(y))


def as_images(argument: str, images: Any) -> Tensor:
    """Return images as they are used, shape ``[N, C, H, W]``: bytes as bytes, and finite floats.

    Whole numbers from 0 to 255 are bytes; where there are only 0 and 1, as in a drawing, they are
    black and white.

    Args:
        argument: What the caller calls them, for messages.
        images: An array, a tensor or a list of images, of shape ``[N, C, H, W]``, ``[N, H, W, C]``
            or ``[N, H, W]``.

    Raises:
        ValueError: If they are no images of one such shape, fewer than two, or a value is not
            finite.
    """
    try:
        x = torch.stack([_tensor(image) for image in images])
    except (TypeError, ValueError, RuntimeError) as error:
        rule = f"`{argument}` must hold images, all of one shape"
        raise ValueError(f"{rule}, got a {type(images).__name__} ({first_line(error)}).") from error
    if x.ndim not in (3, 4) or len(x) < 2:
        raise ValueError(
            f"`{argument}` must have the shape [N, C, H, W], [N, H, W, C] or [N, H, W] with N at least 2, got "
            f"{tuple(x.shape)}."
        )
    x = x[:, None] if x.ndim == 3 else x
    if channels_last(x.shape):
        x = x.movedim(-1, 1).contiguous()
    if x.dtype == torch.uint8:
        return x
    if not x.is_floating_point():
        numbers = x.long()  # torch knows no minimum of all kinds
        if numbers.min() >= 0 and 1 < numbers.max() <= 255:
            return x.to(torch.uint8)
    x = x.float()
    check_finite(argument, x)
    if (largest := float(x.abs().max())) > 100:
        warn(
            f"`{argument}` has real images up to {largest:g}, which are used as they are; divide them by 255, or make "
            "bytes of them."
        )
    return x


def _tensor(image: Any) -> Tensor:
    if isinstance(image, Tensor):
        return image.detach().cpu()
    return torch.as_tensor(np.asarray(image))


def fit_images(x: Tensor, shape: Shape) -> Tensor:
    """Return images in the shape that the other task has: channels replicated or averaged, then resized.

    Args:
        x: Images, shape ``[N, C, H, W]``; bytes stay bytes.
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
        if x.dtype == torch.uint8:
            y = y.round().clamp(0, 255)
        fitted.append(y.to(x.dtype))
    return torch.cat(fitted)
