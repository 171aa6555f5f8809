"""Samples and their order, drawn from (seed, epoch) alone, so that a resumed run sees what the first one saw."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

Draw = tuple[int, int, int]
"""Epoch, pass within the epoch, and index of a sample."""


def seed_from(*parts: int) -> int:
    """Return a seed for the generator that belongs to ``parts``, e.g. (seed, epoch), unlike that of any others.

    Example:
        >>> seed_from(0, 1) == seed_from(0, 1), seed_from(0, 1) == seed_from(1, 0)
        (True, False)
    """
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


class EpochSampler(Sampler[Draw]):
    """Every sample once a pass, in an order that depends on the seed, the epoch and the pass only.

    A loader that is shorter than the one beside it is opened several times an epoch: each pass has its own order.
    Lightning calls :meth:`set_epoch`.

    Args:
        length: Number of samples.
        seed: Seed of the order.
        epoch: The first epoch.
    """

    def __init__(self, length: int, *, seed: int, epoch: int = 0) -> None:
        self.length, self.seed, self.epoch, self.passes = length, seed, epoch, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; nothing happens if it has begun already."""
        if epoch != self.epoch:
            self.epoch, self.passes = epoch, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Draw]:
        # Not drawn before the first sample is asked for: Lightning may open a loader before it sets the epoch.
        epoch, number = self.epoch, self.passes
        self.passes += 1
        order = np.random.default_rng(seed_from(self.seed, epoch, number)).permutation(self.length)
        for index in order.tolist():
            yield epoch, number, index


class Samples(Dataset[Any]):
    """Images with their index, and with their labels where they have any, a whole batch at a time.

    Args:
        x: Images, uint8 or float, shape ``[N, C, H, W]``. Bytes come out as floats from 0 to 1.
        y: Their classes, or ``None``: then there is nothing here that knows them.
        index: What each sample is called in the ensemble of its predictions; 0 to N − 1 where not given.
        augment: Changes one image, at random or not; torch's, numpy's and Python's global generators are seeded from
            (seed, epoch, pass, index) for it and put back afterwards.
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
        self.x, self.y, self.augment, self.seed = x, y, augment, seed
        self.index = torch.arange(len(x)) if index is None else index

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, draw: int | Draw) -> Any:
        inputs, index = self.__getitems__([(0, 0, draw) if isinstance(draw, int) else draw])
        return ((inputs[0][0], inputs[1][0]) if self.y is not None else inputs[0]), index[0]

    def __getitems__(self, draws: Sequence[Draw | int]) -> tuple[Any, Tensor]:
        """Return ``((x, y), index)`` of a batch, or ``(x, index)`` where there are no labels."""
        plain = [draw if isinstance(draw, tuple) else (0, 0, draw) for draw in draws]
        rows = torch.tensor([index for *_, index in plain])
        x = self.x[rows]
        x = x.float() / 255 if x.dtype == torch.uint8 else x
        if self.augment is not None:
            x = torch.stack([self._augmented(image, draw) for image, draw in zip(x, plain, strict=True)])
        return (x if self.y is None else (x, self.y[rows])), self.index[rows]

    def _augmented(self, image: Tensor, draw: Draw) -> Tensor:
        assert self.augment is not None
        with seeded(self.seed, *draw):
            return self.augment(image)


def whole_batch(batch: Any) -> Any:
    """Collate nothing: :class:`Samples` gives out whole batches."""
    return batch


def reseed(*parts: int) -> None:
    """Seed torch's, numpy's and Python's global generators from ``parts``, on every device."""
    seed = seed_from(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code draws from it
    random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put torch's, numpy's and Python's global generators back afterwards, on every device that is in use."""
    states = np.random.get_state(), random.getstate()  # noqa: NPY002
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(states[0])  # noqa: NPY002
        random.setstate(states[1])


@contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Seed the generators of this processor from ``parts``, and put them back afterwards."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    seed = seed_from(*parts)
    try:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
