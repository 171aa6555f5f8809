"""Samples and their order, drawn from (seed, epoch) alone, and which of them are labelled."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from lightning_taskinfo._batches import take
from lightning_taskinfo._random import keep_random_states, own_randomness, seed_everything

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


class EpochSampler(Sampler[Draw]):
    """Every sample once a pass, in an order that depends on the seed, the epoch and the pass only.

    A loader that is shorter than the one beside it is opened several times per epoch: each pass has
    its own order. Lightning calls :meth:`set_epoch`.

    Args:
        length: Number of samples.
        seed: Seed of the order.
        epoch: The first epoch.
    """

    def __init__(
        self,
        length: int,
        *,
        seed: int,
        epoch: int = 0,
    ) -> None:
        self.length = length
        self.seed = seed
        self.epoch = epoch
        self.passes = 0

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


class ImageSamples(Dataset[Any]):
    """Images with their index, and with their labels where they have any, a whole batch at a time.

    Args:
        x: Images, uint8 or float, shape ``[N, C, H, W]``. Bytes come out as floats from 0 to 1.
        y: Their classes, or ``None``: then there is nothing here that knows them.
        index: What each sample is called in the ensemble of its predictions; 0 to N − 1 where not
            given.
        augment: Changes one image, at random or not; torch's, numpy's and Python's global
            generators are seeded from (seed, epoch, pass, index) for it and put back afterwards.
        seed: Seed of the augmentation.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        index: Tensor | None = None,
        augment: Callable[[Tensor], Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        self.x = x
        self.y = y
        self.augment = augment
        self.seed = seed
        self.index = torch.arange(len(x)) if index is None else index

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, draw: int | Draw) -> Any:
        return take(self.__getitems__([draw]), itemgetter(0))

    def __getitems__(self, draws: Sequence[Draw | int]) -> tuple[Any, Tensor]:
        """Return ``((x, y), index)`` of a batch, or ``(x, index)`` where there are no labels."""
        plain = [draw if isinstance(draw, tuple) else (0, 0, draw) for draw in draws]
        rows = torch.tensor([index for *_, index in plain])
        x = self.x[rows]
        if x.dtype == torch.uint8:
            x = x.float() / 255
        if self.augment is not None:
            images = []
            for image, draw in zip(x, plain, strict=True):
                with seeded(self.seed, *draw):
                    images.append(self.augment(image))
            x = torch.stack(images)
        index = self.index[rows]
        if self.y is None:
            return x, index
        return (x, self.y[rows]), index


def whole_batch(batch: Any) -> Any:
    """Collate nothing: :class:`ImageSamples` gives out whole batches."""
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
    """Seed the generators of this processor from ``parts``, and put them back afterwards."""
    seed = stream_seed(*parts)
    with own_randomness(seed):
        np.random.seed(seed % 2**32)  # noqa: NPY002 - user code draws from it
        random.seed(seed)
        yield


Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of the target's training split.

    Attributes:
        labeled: Rows whose labels may be trained on.
        validation: Rows whose labels are only looked at.
        unlabeled: All rows but ``validation``: inputs without labels, those of ``labeled`` among
            them.
    """

    labeled: Rows
    validation: Rows
    unlabeled: Rows


def split_target(
    y: Rows,
    num_classes: int,
    *,
    labels: int | Sequence[int],
    validation: int | Sequence[int],
    seed: int,
) -> Split:
    """Choose validation and labelled rows, each class in turn, without regard to the number of the other.

    The first 50 labels are among the first 100: more labels are the same ones and others. The
    validation rows do not depend on the number of labels; rows that are given for the labels are
    left out of them.

    Args:
        y: Classes of the target's training split.
        num_classes: Number of classes.
        labels: Number of labelled samples, or their rows.
        validation: Number of validation samples, or their rows; 0 for none.
        seed: Seed of the choice.

    Raises:
        ValueError: If there are not enough samples, a class would stay without a label, there is
            only one class, or given rows are out of range, repeated or overlap.

    Example:
        >>> y = np.array([0, 1] * 10)
        >>> split = split_target(y, 2, labels=4, validation=6, seed=0)
        >>> y[split.labeled].tolist().count(0), len(split.validation), len(split.unlabeled)
        (2, 6, 14)
    """
    if len(np.unique(y)) < 2:
        got = f"got class {y[:1]} only"
        raise ValueError(f"`target` must have samples of at least two classes, {got}.")
    if absent := _absent(y, num_classes):
        rule = f"must have training samples of every one of its {num_classes} classes"
        raise ValueError(f"`target` {rule}, got none of class {absent}; classes count from 0.")
    order = by_turns(y, num_classes, np.random.default_rng(seed))
    labeled = order[:0]
    hint = ""
    if not isinstance(labels, int):
        labeled = _given("labels", labels, len(y))
        hint = " A list of `labels` names rows; numbers to compare go to `transfer(labels=[…])`."
    if isinstance(validation, int):
        kept = _first("validation", _without(order, labeled, y), validation)
    else:
        kept = _given("validation", validation, len(y))
    if isinstance(labels, int):
        beside = f" beside {len(kept)} for validation"
        labeled = _first("labels", _without(order, kept, y), labels, beside)
    if both := np.intersect1d(labeled, kept).tolist():
        raise ValueError(f"`labels` and `validation` must not share rows, got {both[:5]} in both.")
    if missing := _absent(y[labeled], num_classes):
        rule = f"`labels` must give every one of the {num_classes} classes at least one label"
        raise ValueError(f"{rule}, got {len(labeled)} labels and none for class {missing}.{hint}")
    return Split(labeled, kept, np.setdiff1d(np.arange(len(y)), kept))


def count_or_rows(argument: str, value: Any) -> int | Sequence[int]:
    """Return a number of samples, or rows, as they are kept.

    Raises:
        ValueError: If it is a negative number.
        TypeError: If it is neither a whole number nor rows.
    """
    if isinstance(value, int | np.integer):
        if value < 0:
            raise ValueError(f"`{argument}` must not be negative, got {value}.")
        return int(value)
    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise TypeError(
            f"`{argument}` must be a whole number or a sequence of whole numbers, got {value!r}."
        )
    rows: Sequence[int] = value
    return rows


def by_turns(
    y: Rows,
    num_classes: int,
    rng: np.random.Generator,
) -> Rows:
    """All rows, shuffled so that every class appears once before any appears twice."""
    shuffled = rng.permutation(len(y))
    classes = y[shuffled]
    ranks = rng.permutation(num_classes)[classes]
    order = np.lexsort((ranks, _turn(classes)))
    return shuffled[order]


def _turn(y: Rows) -> Rows:
    """How many of the same class come before each."""
    turn = np.empty_like(y)
    for label in np.unique(y):
        same = y == label
        turn[same] = np.arange(same.sum())
    return turn


def _without(order: Rows, taken: Rows, y: Rows) -> Rows:
    """The rows that are not taken, in turns of classes again after the gaps that those leave."""
    rest = order[~np.isin(order, taken)]
    turns = np.argsort(_turn(y[rest]), kind="stable")
    return rest[turns]


def _first(
    argument: str,
    order: Rows,
    count: int,
    beside: str = "",
) -> Rows:
    if not 0 <= count <= len(order):
        rule = f"must be between 0 and the {len(order)} samples there are{beside}"
        raise ValueError(f"`{argument}` {rule}, got {count}.")
    return order[:count]


def _given(argument: str, rows: Sequence[int], length: int) -> Rows:
    array = np.asarray(rows, dtype=np.int64)
    if array.size and (array.min() < 0 or array.max() >= length):
        rule = f"must hold rows from 0 to {length - 1}"
        raise ValueError(f"`{argument}` {rule}, got {array.min()} to {array.max()}.")
    if repeated := len(array) - len(np.unique(array)):
        raise ValueError(f"`{argument}` must not repeat a row, got {repeated} repetitions.")
    return array


def _absent(y: Rows, num_classes: int) -> str:
    """Which classes are not there."""
    return ", ".join(map(str, np.setdiff1d(np.arange(num_classes), y)[:10]))


def check_different(argument: str, values: Sequence[Any]) -> None:
    """Raise a ``ValueError`` for an empty list, or one that repeats a value."""
    if not values:
        raise ValueError(f"`{argument}` must not be empty.")
    if len({*values}) < len(values):
        raise ValueError(f"`{argument}` must not repeat a value, got {list(values)}.")
