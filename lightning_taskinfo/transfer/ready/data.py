"""A labelled source, a target with few labels and many unlabelled inputs, and the loaders of every stage."""

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_taskinfo._lightning import LightningDataModule
from lightning_taskinfo.data import ArrayData
from lightning_taskinfo.transfer.ready.images import (
    Images,
    ImageTask,
    Shape,
    as_inputs,
    as_task,
    check_inputs,
    fit_images,
)
from lightning_taskinfo.transfer.sampling import (
    EpochSampler,
    ImageSamples,
    Split,
    count_or_rows,
    split_target,
    whole_batch,
)

DataStage = Literal["pretrain", "fine_tune"]


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
            :func:`~lightning_taskinfo.data.load_dataset`, an npz file or an idx folder; or a pair
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
        num_workers: Worker processes of each loader.
        augment: Changes one training image, see
            :class:`~lightning_taskinfo.transfer.sampling.ImageSamples`.
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
        num_workers: int = 0,
        augment: Callable[[Tensor], Tensor] | None = None,
        seed: int = 0,
        data_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        labels = count_or_rows("labels", labels)
        validation = None if validation is None else count_or_rows("validation", validation)
        check_inputs(unlabeled, argument="unlabeled")
        self.arguments = {
            "source": source, "target": target, "labels": labels, "validation": validation, "unlabeled": unlabeled,
            "max_source": max_source, "max_unlabeled": max_unlabeled, "image_shape": image_shape,
            "batch_size": batch_size, "num_workers": num_workers, "augment": augment, "seed": seed,
            "data_dir": data_dir,
        }  # fmt: skip
        for argument in ("batch_size", "max_source", "max_unlabeled"):
            value = self.arguments[argument]
            if value is not None and value < 2:
                raise ValueError(f"`{argument}` must be at least 2, got {value}.")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.stage: DataStage = "pretrain"
        self._ready = False

    def replaced(self, **changes: Any) -> "TransferDataModule":
        """Return a module with some arguments changed, such as ``seed`` and ``labels``."""
        return type(self)(**{**self.arguments, **changes})

    def settled(self) -> "TransferDataModule":
        """Return a module that is good for other processes: datasets read, paths from the root."""
        where = self.arguments["data_dir"] or os.environ.get("TASKINFO_DATA_DIR")
        changes: dict[str, Any] = {"data_dir": None}
        if where is not None:
            changes["data_dir"] = os.path.abspath(where)
        for name, task in zip(("source", "target"), self.tasks(), strict=True):
            what = self.arguments[name]
            if isinstance(what, str | os.PathLike):
                if os.path.exists(what):
                    changes[name] = os.path.abspath(what)
                else:
                    changes[name] = what
            elif not isinstance(what, ArrayData):
                changes[name] = task
        return self.replaced(**changes)

    def prepare_data(self) -> None:
        """Load named data once, so that it is in the cache before other processes ask for it."""
        if not self._ready:
            self.tasks()

    def setup(self, stage: str | None = None) -> None:
        """Load and split, once."""
        if self._ready:
            return
        source, target = self.tasks()
        shape = self.arguments["image_shape"] or source.image_shape
        self.image_shape: Shape = tuple(shape)
        self.source_classes = source.num_classes
        self.target_classes = target.num_classes
        self.split = self._split(target)
        self._set_source(source)
        self._set_target(target)
        self._ready = True

    def tasks(self) -> tuple[ImageTask, ImageTask]:
        """Return source and target as they are, before they are split."""
        where = self.arguments["data_dir"]
        source = as_task(self.arguments["source"], argument="source", data_dir=where)
        target = as_task(self.arguments["target"], argument="target", data_dir=where)
        return source, target

    def describe(self) -> dict[str, Any]:
        """Return what decides the data but for seed and number of labels, in JSON-like values; arrays as a digest."""
        source, target = self.tasks()
        used = dict(self.arguments)
        used["unlabeled"] = self._unlabeled()
        used["augment"] = _function(used["augment"])
        used["source"] = _digest(source)
        used["target"] = _digest(target)
        free = {"seed", "num_workers", "data_dir"}
        if isinstance(used["labels"], int):
            free.add("labels")
        return {name: _plain(value) for name, value in used.items() if name not in free}

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
        return _plain_loader(samples, self.batch_size) if len(samples) else []

    def test_dataloader(self) -> Any:
        """Return the target's test split, or the source's while pretraining."""
        samples = self.source_test if self.stage == "pretrain" else self.target_test
        return _plain_loader(samples, self.batch_size)

    def unlabeled_dataloader(self) -> DataLoader[Any]:
        """Return the unlabelled inputs once, in order, for :meth:`Lautum.fit_inputs`."""
        return DataLoader(self.unlabeled, self.batch_size, collate_fn=whole_batch)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Put the indices beside the samples."""
        if not isinstance(batch, dict):  # validation and test
            (x, y), _ = batch
            return x, y
        samples = {}
        indices = {}
        for name, (part, index) in batch.items():
            samples[name] = part
            indices[f"{name}_index"] = index
        return samples | indices

    def _split(self, target: ImageTask) -> Split:
        validation = self.arguments["validation"]
        if validation is None:
            validation = min(1000, len(target.train.y) // 10)
        return split_target(
            target.train.y.numpy(),
            target.num_classes,
            labels=self.arguments["labels"],
            validation=validation,
            seed=self.seed,
        )

    def _set_source(self, source: ImageTask) -> None:
        every = np.arange(len(source.train.y))
        rows = _limited(every, self.arguments["max_source"], self.seed)
        x = fit_images(source.train.x[rows], self.image_shape)
        y = source.train.y[rows]
        augment = self.arguments["augment"]
        self.source = ImageSamples(x, y, augment=augment, seed=self.seed)
        self.source_test = self._labelled(source.test)

    def _set_target(self, target: ImageTask) -> None:
        x = target.train.x
        y = target.train.y
        split = self.split
        # The unlabelled inputs do not depend on the number of labels: one pretraining serves them
        # all.
        given = self._unlabeled()
        most = self.arguments["max_unlabeled"]
        if given is None:
            rows = torch.from_numpy(_limited(split.unlabeled, most, self.seed))
            inputs = x[rows]
            self.num_indices = len(x)
        else:
            every = np.arange(len(given))
            chosen = torch.from_numpy(_limited(every, most, self.seed))
            inputs = given[chosen]
            rows = len(x) + chosen
            self.num_indices = len(x) + len(given)
        options = {"augment": self.arguments["augment"], "seed": self.seed}
        own = torch.from_numpy(split.labeled)
        images = fit_images(x[own], self.image_shape)
        self.labeled = ImageSamples(images, y[own], index=own, **options)
        unlabeled = fit_images(inputs, self.image_shape)
        self.unlabeled = ImageSamples(unlabeled, index=rows, **options)
        kept = split.validation
        self.validation = self._labelled(Images(x[kept], y[kept]))
        self.target_test = self._labelled(target.test)

    def _unlabeled(self) -> Tensor | None:
        given = self.arguments["unlabeled"]
        return None if given is None else as_inputs(given, argument="unlabeled")

    def _labelled(self, images: Images) -> ImageSamples:
        return ImageSamples(fit_images(images.x, self.image_shape), images.y)

    def _loader(self, samples: ImageSamples, number: int) -> DataLoader[Any]:
        epoch = getattr(self.trainer, "current_epoch", 0)  # not 0 in a run that is resumed
        ranks = getattr(self.trainer, "world_size", 1)
        seed = 2 * self.seed + number
        return DataLoader(
            samples,
            self.batch_size,
            sampler=EpochSampler(len(samples), seed=seed, epoch=epoch),
            num_workers=self.num_workers,
            collate_fn=whole_batch,
            # A batch of one sample has no covariance; but a rank whose share fills no batch must
            # have one.
            drop_last=len(samples) // ranks > self.batch_size,
        )


def _plain_loader(samples: ImageSamples, batch_size: int) -> DataLoader[Any]:
    return DataLoader(samples, max(batch_size, 256), collate_fn=whole_batch)


def _limited(rows: Any, limit: int | None, seed: int) -> Any:
    if limit is None or limit >= len(rows):
        return rows
    shuffled = np.random.default_rng(seed).permutation(rows)
    return np.sort(shuffled[:limit])


def _function(augment: Any) -> str | None:
    """By what a function or object with settings is known again in another process: its name and its settings."""
    if augment is None:
        return None
    try:
        pickled = pickle.dumps(augment)
    except Exception as error:  # what cannot be pickled says so in many ways
        raise ValueError(
            f"`augment` must be a function or an object of a class at the top of a module, got {augment!r}: other "
            "processes import it by its name."
        ) from error
    name = getattr(augment, "__qualname__", type(augment).__qualname__)
    digest = hashlib.sha256(pickled).hexdigest()
    return f"{name} {digest[:16]}"


def _digest(task: ImageTask) -> dict[str, Any]:
    hashed = hashlib.sha256()
    for images in (task.train, task.test):
        hashed.update(images.x.contiguous().numpy().tobytes())
        hashed.update(images.y.contiguous().numpy().tobytes())
    short = hashed.hexdigest()[:16]
    return {"name": task.name, "classes": task.num_classes, "sha256": short}


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | dict) or value is None:
        return value
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray | Tensor):
        raw = np.ascontiguousarray(value).tobytes()
        return hashlib.sha256(raw).hexdigest()[:16]
    return str(value)
