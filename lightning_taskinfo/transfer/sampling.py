"""The samples of a transfer: the user's target data, which of it is labelled, and an order by seed and epoch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset

from lightning_taskinfo._batches import read_batch
from lightning_taskinfo._files import digest
from lightning_taskinfo._nested import IGNORED, tensors
from lightning_taskinfo._random import keep_random_states, seed_everything
from lightning_taskinfo._ranges import check_counts, check_finite
from lightning_taskinfo._warn import reason_of
from lightning_taskinfo.data import ArrayData

PARTS = {  # of target data, and the methods of a data module
    "train": "train_dataloader",
    "test": "test_dataloader",
    "validation": "val_dataloader",
}
Loader = DataLoader[Any]
Collate = Callable[[list[Any]], Any]
Rows = NDArray[np.int64]
Draw = tuple[int, int, int]
"""Epoch, pass within the epoch, and index of a sample."""


def stream_seed(*parts: int) -> int:
    """Return a seed for the generator that belongs to ``parts``, e.g. (seed, epoch), unlike that of any others.

    Example:
        >>> stream_seed(0, 1) == stream_seed(0, 1), stream_seed(0, 1) == stream_seed(1, 0)
        (True, False)
    """
    (state,) = np.random.SeedSequence(parts).generate_state(1, np.uint64)
    return int(state >> 1)


@dataclass(eq=False)
class EpochSampler(Sampler[Draw]):
    """Every sample once a pass, in an order that depends on the seed, the epoch and the pass only.

    A loader that is shorter than the one beside it is opened several times per epoch: each pass has
    its own order. Lightning calls :meth:`set_epoch`.

    Args:
        length: Number of samples.
        seed: Seed of the order.
        epoch: The epoch that was begun last.
        passes: Passes of that epoch so far.
    """

    length: int
    seed: int
    epoch: int = 0
    passes: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; nothing happens if it has begun already."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.passes = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Draw]:
        # Not drawn before the first sample is asked for: Lightning may open a loader before it sets
        # the epoch.
        epoch, number = self.epoch, self.passes
        self.passes += 1
        rng = np.random.default_rng(stream_seed(self.seed, epoch, number))
        for index in rng.permutation(self.length).tolist():
            yield epoch, number, index


def whole_batch(batch: Any) -> Any:
    """Collate nothing: the datasets here give out whole batches."""
    return batch


def reseed(*parts: int) -> None:
    """Seed torch's, numpy's and Python's global generators from ``parts``, on every device."""
    seed_everything(stream_seed(*parts))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put torch's, numpy's and Python's global generators back afterwards, on every device that is in use."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    restore = keep_random_states([torch.device("cuda", index) for index in range(count)])
    try:
        yield
    finally:
        restore()


@contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Seed the global generators from ``parts``, and put them back afterwards."""
    with generators_kept():
        reseed(*parts)
        yield


def by_turns(y: Rows, rng: np.random.Generator) -> Rows:
    """All rows, shuffled so that every class appears once before any appears twice."""
    count = y.max() + 1
    shuffled = rng.permutation(len(y))
    classes = y[shuffled]
    turns = np.empty_like(y)  # how many of the same class come before each
    for label in range(count):
        same = classes == label
        turns[same] = np.arange(same.sum())
    ranks = rng.permutation(count)[classes]
    return shuffled[np.lexsort((ranks, turns))]


def check_different(argument: str, values: Sequence[Any]) -> None:
    """Raise a ``ValueError`` for an empty list, or one that repeats a value."""
    if not values:
        raise ValueError(f"`{argument}` must not be empty.")
    if len({*values}) < len(values):
        raise ValueError(f"`{argument}` must not repeat a value, got {list(values)}.")


@dataclass(frozen=True)
class Target:
    """Training, test and validation samples, in their order, and how batches are made of them.

    Attributes:
        train: Training samples; some of their labels are used.
        test: The test set.
        validation: Samples to validate on while training; ``None`` for none.
    """

    train: Loader
    test: Loader
    validation: Loader | None = None

    def labels(self) -> tuple[list[Tensor | None], list[str]]:
        """Return the targets of training and test samples where they can be read, and digests of these samples."""
        found: list[Tensor | None] = []
        digests = []
        with seeded(0):
            for loader in (self.train, self.test):
                targets: list[Any] = []
                parts = []
                for batch in loader:
                    for tensor in tensors(batch):
                        check_finite("data", tensor)
                    parts.append(digest(("", tensor) for tensor in tensors(batch)))
                    targets.append(_targets(batch))
                known = all(part is not None for part in targets)
                found.append(torch.cat(targets) if known else None)
                digests.append(digest((part, None) for part in parts))
        return found, digests

    def train_loader(self, rows: Rows, seed: int) -> Loader:
        """Return a loader of some training samples, in an order that depends on seed and epoch alone."""
        size: Any = self.train.batch_size
        return DataLoader(
            Drawn(self.train.dataset, rows, self.train.collate_fn, seed),
            size,
            sampler=EpochSampler(len(rows), seed=seed),
            collate_fn=whole_batch,
            # A batch of one sample has no statistics for batch normalisation.
            drop_last=len(rows) > size and len(rows) % size == 1,
        )

    def plain_loader(self, rows: Rows) -> Loader:
        """Return a loader of some training samples as they are, in their order."""
        samples = Subset(self.train.dataset, rows.tolist())
        return DataLoader(samples, self.train.batch_size, collate_fn=self.train.collate_fn)


def _targets(batch: Any) -> Tensor | None:
    """One target for each sample of a batch, where it has such."""
    try:
        _, targets = read_batch(batch)
    except ValueError:
        return None
    return targets if isinstance(targets, Tensor) and targets.ndim == 1 else None


@dataclass(frozen=True, eq=False)
class Drawn(Dataset[Any]):
    """Some rows of a dataset, a whole batch at a time, whose randomness depends on seed, epoch and place alone.

    Attributes:
        samples: The dataset.
        rows: Which samples of it.
        collate: Makes a batch of a list of samples.
        seed: Seed of what samples and batches draw, such as augmentations.
    """

    samples: Any
    rows: Rows
    collate: Collate
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, draws: Sequence[Draw]) -> Any:
        """Return a batch."""
        with seeded(self.seed, *draws[0]):
            rows = [int(self.rows[index]) for *_, index in draws]
            return self.collate([self.samples[row] for row in rows])


def read_target(data: Any, batch_size: int | None) -> Target:
    """Return the target data of what a user has.

    Args:
        data: A LightningDataModule; datasets ``{"train": …, "test": …}``, with ``"validation"`` or
            not; in place of a dataset, arrays ``(inputs, targets)``; or an
            :class:`~lightning_taskinfo.data.ArrayData`.
        batch_size: Samples in a training batch; that of the data module, or 32, where ``None``.

    Raises:
        TypeError: If it is something else.
        ValueError: If a part is missing or empty.
    """
    check_counts(batch_size=batch_size)
    if isinstance(data, ArrayData):
        data = {"train": data.train(), "test": data.test()}
    if hasattr(data, "train_dataloader"):
        # Or parts that are split at random would be others when a killed run goes on.
        with seeded(0):
            loaders = _loaders(data)
    elif isinstance(data, Mapping):
        parts = {name: part for name, part in data.items() if part is not None}
        if not {"train", "test"} <= {*parts} <= {*PARTS}:
            raise ValueError(
                f"`data` must have the parts train, test and maybe validation, got {', '.join(data)}."
            )
        size = max(batch_size or 32, 256)
        loaders = {name: DataLoader(_dataset(parts[name]), size) for name in parts}
        batch_size = batch_size or 32
    else:
        raise TypeError(
            "`data` must be a LightningDataModule or datasets {'train': …, 'test': …}, "
            f"got a {type(data).__name__}."
        )
    found = {}
    for name, loader in loaders.items():
        samples: Any = loader.dataset
        sized = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
        if not (sized and len(samples)):
            rule = f"must have a dataset or arrays (inputs, targets) to {name.removesuffix('ation')} on"
            raise ValueError(f"`data` {rule}, got none or an empty one: {type(samples).__name__}.")
        if loader.batch_sampler is None:
            rule = "must make batches of single samples in its DataLoaders"
            raise ValueError(f"`data` {rule}, got batch_size=None.")
        drawn = getattr(loader.batch_sampler, "sampler", samples)
        if hasattr(drawn, "__len__") and len(drawn) < len(samples):
            rule = f"must have a whole dataset to {name.removesuffix('ation')} on, such as a Subset"
            raise ValueError(
                f"`data` {rule}, got a sampler of {len(drawn)} of {len(samples)} samples."
            )
        size = loader.batch_size or 256
        if name == "train":
            size = batch_size or loader.batch_size or 32
        found[name] = DataLoader(samples, size, collate_fn=loader.collate_fn)
    return Target(**found)


def _loaders(data: Any) -> dict[str, Loader]:
    """The loaders of a data module; their own order is not used."""
    check_hooks(data)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    found = {}
    for part, method in PARTS.items():
        rule = f"`data` must return one DataLoader from {method}"
        try:
            loader = getattr(data, method)()
        except Exception as error:  # Lightning's own for a loader that is not there, or the user's
            if part == "validation":
                continue
            raise ValueError(f"{rule}, but it failed ({reason_of(error)}).") from error
        if isinstance(loader, DataLoader):
            found[part] = loader
        elif part != "validation":
            raise ValueError(f"{rule}, got {type(loader).__name__}.")
    return found


def check_hooks(data: Any) -> None:
    """Raise a ``ValueError`` if a data module changes batches, of which nobody but a Trainer asks it."""
    for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
        if overrides(data, hook):
            raise ValueError(
                f"`data` must leave {hook} to the module or to the dataset, where it is called, got one of "
                f"{type(data).__name__}."
            )


def overrides(data: Any, name: str) -> bool:
    """Whether a data module has a method of this name that is not Lightning's."""
    owner = getattr(getattr(data, name, None), "__module__", "lightning.")
    return not owner.startswith(("lightning.", "pytorch_lightning."))


def _dataset(part: Any) -> Any:
    """A dataset as it is, and arrays as one."""
    pair = isinstance(part, list | tuple) and len(part) == 2
    if not pair or not all(hasattr(array, "shape") for array in part):
        return part
    inputs, targets = map(torch.as_tensor, part)
    if len(inputs) != len(targets):
        raise ValueError(
            f"`data` must have as many targets as inputs, got {len(targets)} for {len(inputs)}."
        )
    return TensorDataset(inputs, targets)


def chosen_rows(
    labels: Tensor | None,
    length: int,
    counts: Sequence[int],
    seed: int,
) -> Rows:
    """Return rows of training samples of which the first ``n`` are the ``n`` labelled ones.

    Classes take turns where targets are classes; any order is as good otherwise.

    Args:
        labels: All training targets; ``None`` where they are not known.
        length: Number of training samples.
        counts: Numbers of labels that will be used.
        seed: Seed of the choice.

    Raises:
        ValueError: If there are not as many samples, or a class would have no label.
    """
    for count in counts:
        if not 1 <= count <= length:
            raise ValueError(
                f"`labels` must be between 1 and the {length} training samples there are, got {count}."
            )
    if labels is None or labels.is_floating_point():
        return np.random.default_rng(seed).permutation(length)
    known = (labels != IGNORED).nonzero().flatten().cpu().numpy()  # others have no label
    if len(known) < max(counts):
        raise ValueError(
            f"`labels` must be at most {len(known)}, the samples with a label, got {max(counts)}."
        )
    classes, y = np.unique(labels.cpu().numpy()[known], return_inverse=True)
    if len(classes) < 2:
        raise ValueError(
            f"`data` must have training samples of at least two classes, got class {classes[0]} only."
        )
    if min(counts) < len(classes):
        raise ValueError(
            f"`labels` must give every one of the {len(classes)} classes at least one label, got {min(counts)}."
        )
    return known[by_turns(y, np.random.default_rng(seed))]
