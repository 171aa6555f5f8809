"""Which samples a probe looks at: the batch just trained on, or a fixed pool that is read once."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from lightning_taskinfo._batches import (
    Reader,
    first_samples,
    is_labeled,
    joined,
    joined_targets,
    labeled_key,
    sample_count,
    take,
)
from lightning_taskinfo._lightning import NAMESPACES, LightningModule, Trainer
from lightning_taskinfo._observe import observing
from lightning_taskinfo._random import seed_everything


class Source:
    """The samples of one fit.

    Args:
        data: ``"train_batch"``, ``"train"`` or ``"val"``.
        max_samples: At most this many, over all processes.
        seed: Chooses the pool.
        reader: Reads batches.
        split: Whether processes share the samples; otherwise each has all of them.
    """

    def __init__(
        self, data: str, max_samples: int, seed: int, reader: Reader, *, split: bool
    ) -> None:
        self.data = data
        self.max_samples = max_samples
        self.seed = seed
        self.reader = reader
        self.split = split
        self.pool: tuple[Any, Tensor | None] | None = None
        self.collecting: Collected | None = None

    def open(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the pool, or prepare to collect it; call it inside ``observing``.

        Raises:
            ValueError: If there must be a pool and the dataset does not give one.
        """
        loader: Any = trainer.train_dataloader if self.data == "train" else trainer.val_dataloaders
        key, loader = labeled_loader(pl_module, loader)
        kind = "validation loader" if self.data == "val" else "loader"
        needed = f"a {kind} of an indexed dataset, all of which is used"
        if readable(loader):
            try:
                self.pool = self._read_pool(trainer, pl_module, loader, key)
                return
            except (TypeError, NotImplementedError, RuntimeError) as error:  # what copying raises
                needed = f"a dataset that can be copied ({error})"
        if self.data == "val" or (not self.split and trainer.world_size > 1):
            found = "none" if loader is None else type(loader).__name__
            raise ValueError(f"`data={self.data!r}` needs {needed}, got {found}.")
        self.collecting = Collected(len(self._share(trainer, self.max_samples)))

    def _read_pool(
        self, trainer: Trainer, pl_module: LightningModule, loader: DataLoader, key: Any | None
    ) -> tuple[Any, Tensor | None]:
        chosen = choose(len(loader.dataset), self.max_samples, self.seed)  # type: ignore[arg-type]
        mine = self._share(trainer, len(chosen))
        if not mine:
            return torch.empty(0, device="cpu"), None
        batch = read_samples(loader, chosen[mine.start : mine.stop], self.seed)
        batch = batch if key is None else {key: batch}  # as the training step gets it
        return self.reader.read(pl_module, on_device(trainer, pl_module, batch))

    def see(self, pl_module: LightningModule, batch: Any, *, last: bool) -> None:
        """Collect from a training batch what the pool still misses."""
        if self.collecting is not None and self.pool is None:
            self.collecting.add(*self.reader.read(pl_module, batch), last=last)
            if self.collecting.complete:
                self.pool = self.collecting.joined()

    @property
    def ready(self) -> bool:
        """Whether there is something to look at."""
        return self.data == "train_batch" or self.pool is not None

    def read(self, trainer: Trainer, batch: Any) -> tuple[Any, Tensor | None]:
        """Return this process's inputs and targets."""
        if self.pool is not None:
            return self.pool
        samples = self.reader.read(trainer.lightning_module, batch)
        return first_samples(*samples, len(self._share(trainer, self.max_samples)))

    def _share(self, trainer: Trainer, total: int) -> range:
        return share(total, trainer.global_rank, trainer.world_size) if self.split else range(total)


def share(total: int, rank: int, world_size: int) -> range:
    """Return which of ``total`` samples this process takes, in one piece.

    Example:
        >>> [list(share(5, rank, 2)) for rank in range(2)]
        [[0, 1, 2], [3, 4]]
    """
    size, more = divmod(total, world_size)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))


def labeled_loader(pl_module: LightningModule, loader: Any) -> tuple[Any | None, Any]:
    """Return the loader of labelled samples among those of a Trainer, and its key in their batches if it has one.

    Args:
        pl_module: The module that is trained.
        loader: What the Trainer has: a loader, several of them, or a ``CombinedLoader``.
    """
    parts = getattr(loader, "iterables", loader)
    if isinstance(parts, list | tuple) and len(parts) == 1:
        return None, parts[0]
    if not isinstance(parts, Mapping):
        return None, loader
    with observing(pl_module):
        key = labeled_key(parts, _has_labels)
    return (None, loader) if key is None else (key, parts[key])


def _has_labels(loader: Any) -> bool:
    """Whether the first sample of a loader has targets; call it inside ``observing``."""
    if not readable(loader) or not len(loader.dataset):
        return False
    batch = read_samples(loader, torch.zeros(1, dtype=torch.long, device="cpu"), seed=0)
    return is_labeled(batch)


def readable(loader: Any) -> bool:
    """Whether a pool can be read from the loader's dataset: it is indexed, and all of it is trained on."""
    if (
        not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler
    ):  # or its items are batches
        return False
    if not (hasattr(loader.dataset, "__getitem__") and hasattr(loader.dataset, "__len__")):
        return False
    sampler = loader.sampler
    whole = type(sampler) in (SequentialSampler, RandomSampler)
    return whole or (isinstance(sampler, DistributedSampler) and sampler.dataset is loader.dataset)


def read_samples(loader: DataLoader, chosen: Tensor, seed: int) -> Any:
    """Return one batch of the ``chosen`` samples, from a copy of the dataset; call it inside ``observing``.

    Transforms that draw from global generators do so as the sample's number says, on whichever process.
    """
    dataset, collate = copy.deepcopy((loader.dataset, loader.collate_fn))
    samples = []
    for index in chosen.tolist():
        seed_everything(hash((seed, index)) % 2**32)
        samples.append(dataset[index])
    return collate(samples) if samples else None


def choose(total: int, n: int, seed: int) -> Tensor:
    """Return the numbers of ``n`` of ``total`` samples (or of all of them), in order, the same for the same seed."""
    return (
        torch.randperm(total, generator=torch.Generator().manual_seed(seed), device="cpu")[:n]
        .sort()
        .values
    )


def on_device(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
    """Send a batch where the training step gets its own, through the same hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    datamodule = getattr(trainer, "datamodule", None)
    plain = [
        namespace.LightningDataModule.on_before_batch_transfer for namespace in NAMESPACES.values()
    ]
    has_own = datamodule is not None and type(datamodule).on_before_batch_transfer not in plain
    owner: Any = datamodule if has_own else pl_module  # one of the two, as Lightning does it
    batch = owner.on_before_batch_transfer(batch, 0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


class Collected:
    """A pool gathered from the first training batches, for datasets that can be neither copied nor indexed."""

    def __init__(self, size: int) -> None:
        self.size, self.complete = size, False
        self.inputs: list[Any] = []
        self.targets: list[Tensor] = []

    def add(self, inputs: Any, targets: Tensor | None, *, last: bool) -> None:
        """Take what is still missing; the pool is complete when full, or with the last batch of an epoch."""
        if self.complete:
            return
        missing = self.size - sum(map(sample_count, self.inputs))
        inputs, targets = first_samples(inputs, targets, missing)
        self.inputs.append(take(inputs, lambda x: x.detach().clone()))
        if targets is not None:
            self.targets.append(targets.detach().clone())
        self.complete = last or sample_count(inputs) == missing

    def joined(self) -> tuple[Any, Tensor | None]:
        """Return all samples as one batch."""
        return joined(self.inputs), joined_targets(self.targets) if self.targets else None
