"""Which samples of the dataset a training batch holds, known from the loader that delivered it.

A loader's iterator asks its sampler for the numbers of a batch before the batch is read, and
delivers batches in that order. Numbers are noted on the way from the sampler, and matched with the
batch that is delivered: the dataset, its workers, the batch and every random state stay as they
are.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_taskinfo._lightning import Trainer

LARGEST = 10**9  # number of a sample: memory grows with it


class _NotingIterator:
    """An iterator of a loader that tells the loader whose batch it has delivered."""

    def __init__(self, inner: Any, loader: Any, drawn: deque[Any]) -> None:
        self._inner = inner
        self._loader = loader
        self._drawn = drawn
        self._lost = False

    def __iter__(self) -> "_NotingIterator":
        return self

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        self._loader.delivered = None
        try:
            batch = next(self._inner)
        except StopIteration:
            raise
        except BaseException:
            self._lost = True  # the batch was drawn and not delivered
            raise
        drawn = self._drawn.popleft() if self._drawn else None
        self._loader.delivered = None if self._lost else drawn
        return batch


class _NotingSampler:
    """A sampler of batches that notes what it draws for the iterator that is being made."""

    def __init__(self, inner: Any, loader: Any) -> None:
        self._inner = inner
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._noted(iter(self._inner), self._loader.drawn)

    def __len__(self) -> int:
        return len(self._inner)

    @staticmethod
    def _noted(draws: Iterator[Any], drawn: deque[Any]) -> Iterator[Any]:
        for numbers in draws:
            drawn.append(numbers)
            yield numbers


def notes(loader: Any) -> bool:
    """Whether a loader notes what it delivers."""
    return hasattr(type(loader), "delivered")


def note(loader: Any) -> bool:
    """Let a loader note what it delivers, until :func:`forget`; return whether it did not before."""
    if not isinstance(loader, DataLoader) or notes(loader):
        return False
    kind: Any = type(loader)

    class Noting(kind):
        """The loader as it is, and the numbers of the batch that it has delivered last."""

        delivered: Any = None
        drawn: deque[Any]

        @property
        def _index_sampler(self) -> Any:
            return _NotingSampler(super()._index_sampler, self)

        def __iter__(self) -> Any:
            self.drawn = deque()
            return _NotingIterator(super().__iter__(), self, self.drawn)

    Noting.__name__ = kind.__name__
    Noting.__qualname__ = kind.__qualname__
    Noting.__module__ = kind.__module__
    loader.__class__ = Noting
    return True


def forget(loader: Any) -> None:
    """Let a loader be what it was."""
    if notes(loader):
        loader.__class__ = type(loader).__base__
        for name in ("drawn", "delivered"):
            vars(loader).pop(name, None)


class BatchIndices:
    """The numbers of the samples in each training batch of a fit.

    Args:
        index_fn: Picks them out of a batch; from the loader where it is not given.
    """

    def __init__(self, index_fn: Callable[[Any], Any] | None = None) -> None:
        self.index_fn = index_fn
        self._noting: list[Any] = []
        self._strategy: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Note what the training loader delivers; call it before the loader is opened."""
        if self.index_fn is not None:
            return
        self._strategy = trainer.strategy
        process = (
            self._strategy.process_dataloader
        )  # Lightning calls it on every loader, before it is opened

        def process_and_note(loader: Any) -> Any:
            if note(loader):
                self._noting.append(loader)
            return process(loader)

        self._strategy.process_dataloader = process_and_note

    def detach(self) -> None:
        """Let everything be what it was."""
        if self._strategy is not None:
            vars(self._strategy).pop("process_dataloader", None)
        self._strategy = None
        for loader in self._noting:
            forget(loader)
        self._noting = []

    def unknown(self, trainer: Trainer) -> str | None:
        """Return why the numbers of samples cannot be known, if so."""
        if self.index_fn is not None:
            return None
        loader: Any = trainer.train_dataloader
        if not isinstance(loader, DataLoader):
            return f"the training loader must be one DataLoader, got {type(loader).__name__}"
        if not notes(loader):
            return "the training loader was opened before"
        if isinstance(loader.dataset, IterableDataset):
            return f"its dataset must be indexed, got {type(loader.dataset).__name__}"
        if loader.batch_sampler is None:
            return "its batches must be made by the loader, got `batch_size=None`"
        if loader.num_workers and not getattr(loader, "in_order", True):
            return "the loader must keep the order of its batches, got `in_order=False`"
        if trainer.num_training_batches == float("inf"):
            return "the number of batches must be known, got a loader without a length"
        return None

    def reordering(self, trainer: Trainer) -> str | None:
        """Return the name of a collating function that may change the order of samples, as far as can be known."""
        collate: Any = getattr(trainer.train_dataloader, "collate_fn", default_collate)
        name = getattr(collate, "__module__", None) or type(collate).__module__
        if self.index_fn is not None or name.partition(".")[0] in (
            "torch",
            "transformers",
            "lightning_taskinfo",
        ):
            return None
        return getattr(collate, "__qualname__", type(collate).__qualname__)

    def of(self, trainer: Trainer, batch: Any) -> Any:
        """Return the numbers of the samples in a batch, as they were given: :func:`as_index` checks them."""
        if self.index_fn is None:
            return getattr(trainer.train_dataloader, "delivered", None)
        numbers = self.index_fn(batch)
        return numbers.tolist() if isinstance(numbers, Tensor) else numbers


def as_index(numbers: Any, samples: int) -> Tensor:
    """Return the numbers of a batch's samples as a tensor, ``[samples]``.

    Raises:
        ValueError: If they are not one whole number per sample.
    """
    try:
        index = _tensor(numbers)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        index = torch.empty(0, device="cpu")
    whole = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
    found = (
        f"{index.dtype} of shape {list(index.shape)}" if index.numel() else type(numbers).__name__
    )
    fits = whole and index.shape == (samples,)
    if fits and samples:
        lowest, highest = (int(end) for end in index.aminmax())
        found = f"{lowest} to {highest}"
        fits = lowest >= 0 and highest <= LARGEST
    if not fits:
        raise ValueError(
            "`index_fn`, or the sampler of the loader, must give one number from 0 to "
            f"{LARGEST} for each of {samples} samples, got {found}"
        )
    return index.long()


def _tensor(numbers: Any) -> Tensor:
    """Return numbers as a tensor; whole ones of a list in a tenth of the time that torch takes."""
    if isinstance(numbers, list) and numbers and type(numbers[0]) is int:
        try:
            return torch.frombuffer(array("q", numbers), dtype=torch.long)
        except TypeError:  # not all of them
            pass
    return torch.as_tensor(numbers, device="cpu")
