"""Which samples a probe looks at, on which process: the batch just trained on, or a fixed subset that is read once."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightning_taskinfo._batches import (
    Reader,
    first_samples,
    is_labeled,
    joined,
    joined_targets,
    labeled_key,
    sample_count,
    size,
    take,
)
from lightning_taskinfo._lightning import NAMESPACES, LightningModule, Trainer
from lightning_taskinfo._random import seed_everything
from lightning_taskinfo.fisher.measure import Request
from lightning_taskinfo.functional.likelihood import Likelihood, NumberedDraws, as_likelihood

Draws = TypeVar("Draws", bound=NumberedDraws)
Pair = tuple[Any, Tensor | None]  # inputs and targets
CHUNK = 128  # samples of one forward pass


@dataclass(frozen=True)
class Samples:
    """What one process measures, and how.

    Attributes:
        inputs: The inputs, ``[N, ...]``; ``N`` may be 0 where processes share few samples.
        targets: The dataset's labels, ``[N, ...]``.
        counted: How many of the inputs count. More are there only where processes with sharded
            weights have to run passes of one size; they repeat others.
        first: Number of the first of them among the samples of all processes.
        total: Samples of all processes together.
        seed: Seed of this measurement's draws, the same on all processes.
        asked: How the user wants to measure.
        trainer: The Trainer.
        batch: The batch that was trained on last; None before the first.
    """

    inputs: Any
    targets: Tensor | None
    counted: int
    first: int
    total: int
    seed: int
    asked: Request
    trainer: Trainer
    batch: Any

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs mean."""
        return as_likelihood(self.asked.likelihood)

    def draws(self, kind: type[Draws] = NumberedDraws) -> Draws:  # type: ignore[assignment]
        """Return the likelihood, with labels that do not depend on how processes share the samples."""
        return kind(
            self.likelihood,
            seed=self.seed,
            first=self.first,
            total=self.total,
            mc_samples=self.asked.mc_samples,
        )

    def request(self, draws: NumberedDraws | None = None) -> Request:
        """Return what the engine is asked for."""
        return replace(self.asked, likelihood=draws or self.draws())

    def outputs(self, model: nn.Module, some: slice = slice(None)) -> Iterator[Tensor]:
        """Yield the outputs for some of the samples that count, at most 128 of them at a time, without gradients.

        The model is run on all inputs, so that processes with sharded weights run the same passes.
        """
        inputs = take(self.inputs, lambda x: x[some].contiguous())  # a model may take views of it
        counted = len(range(self.counted)[some])
        for start in range(0, size(inputs), CHUNK):
            part = itemgetter(slice(start, start + CHUNK))
            with torch.no_grad():
                outputs = self.asked.forward(model, take(inputs, part))
            if start < counted:
                yield outputs[: counted - start]

    def losses(self, model: nn.Module, some: slice = slice(None)) -> Tensor:
        """Return the negative log-likelihood of some samples' targets in nats, ``[n]``; NaN without targets."""
        if self.targets is None:
            counted = len(range(self.counted)[some])
            return torch.full((counted,), math.nan, dtype=torch.float64, device="cpu")
        none = torch.zeros(0, dtype=torch.float64, device="cpu")
        found = [none]
        chunks = self.targets[some].split(CHUNK)
        for outputs, labels in zip(self.outputs(model, some), chunks, strict=False):
            losses = -self.likelihood.log_prob(outputs, labels[: len(outputs)])
            found.append(losses.double().cpu())
        return torch.cat(found)

    def summed(self, values: Tensor | list[float]) -> Tensor:
        """Return what all processes' values add up to, in float64; every process has to ask."""
        return summed(self.trainer, values)


class LossOnTheWay(NumberedDraws):
    """Draws of labels that also note the loss of the dataset's labels, from outputs that are there anyway."""

    def __init__(self, likelihood: Likelihood, **numbers: int) -> None:
        super().__init__(likelihood, **numbers)
        none = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._found = [none]

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:  # once a chunk
        """See that outputs and targets fit the likelihood, and note their losses."""
        super().check(outputs, targets)
        if targets is None:
            losses = torch.full((len(outputs),), math.nan, device="cpu")
        else:
            losses = -self.likelihood.log_prob(outputs.detach(), targets)
        self._found.append(losses.double().cpu())

    def losses(self) -> Tensor:
        """Return the negative log-likelihood of each sample so far, in nats; NaN without targets."""
        return torch.cat(self._found)


class Source:
    """The samples of one fit.

    Args:
        data: ``"train_batch"``, ``"train"`` or ``"val"``.
        max_samples: At most this many, over all processes.
        seed: Chooses the pool.
        reader: Reads batches.
        split: Whether processes share the samples; otherwise each has all of them.

    Attributes:
        pool: Inputs and targets of this process, where they stay the same and are known.
        missing: How many the first training batches have still to give to the pool; None where they
            need not.
    """

    def __init__(
        self,
        data: str,
        max_samples: int,
        seed: int,
        reader: Reader,
        *,
        split: bool,
    ) -> None:
        self.data = data
        self.max_samples = max_samples
        self.seed = seed
        self.reader = reader
        self.split = split
        self.pool: Pair | None = None
        self.missing: int | None = None
        self._collected: list[Pair] = []

    def open(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the pool, or prepare to collect it; call it inside ``observing``.

        Raises:
            ValueError: If there must be a pool and the dataset does not give one.
        """
        loader: Any = trainer.train_dataloader
        kind = "loader"
        if self.data == "val":
            loader = trainer.val_dataloaders
            kind = "validation loader"
        key, loader = labeled_loader(loader)
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
        self.missing = len(self._share(trainer, self.max_samples))

    def _read_pool(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        loader: DataLoader,
        key: Any | None,
    ) -> Pair:
        chosen = choose(len(loader.dataset), self.max_samples, self.seed)  # type: ignore[arg-type]
        mine = self._share(trainer, len(chosen))
        if not mine:
            return torch.empty(0, device="cpu"), None
        batch = read_samples(loader, chosen[mine.start : mine.stop], self.seed)
        if key is not None:
            batch = {key: batch}  # as the training step gets it
        batch = on_device(trainer, pl_module, batch)
        return self.reader.read(pl_module, batch)

    def collect(self, pl_module: LightningModule, batch: Any, *, last: bool) -> None:
        """Take from a training batch what the pool still misses; with the last of an epoch it is complete."""
        if self.missing is None:
            return
        inputs, targets = self.reader.read(pl_module, batch)
        inputs, targets = first_samples(inputs, targets, self.missing)
        self.missing -= sample_count(inputs)
        inputs = take(inputs, lambda x: x.detach().clone())
        if targets is not None:
            targets = targets.detach().clone()
        self._collected.append((inputs, targets))
        if last or not self.missing:
            given = [part for part, _ in self._collected]
            known = [labels for _, labels in self._collected if labels is not None]
            self.pool = joined(given), joined_targets(known) if known else None
            self.missing = None

    @property
    def ready(self) -> bool:
        """Whether there is something to look at."""
        return self.data == "train_batch" or self.pool is not None

    def read(self, trainer: Trainer, batch: Any) -> Pair:
        """Return this process's inputs and targets."""
        if self.pool is not None:
            return self.pool
        inputs, targets = self.reader.read(trainer.lightning_module, batch)
        mine = self._share(trainer, self.max_samples)
        return first_samples(inputs, targets, len(mine))

    def _share(self, trainer: Trainer, total: int) -> range:
        if not self.split:
            return range(total)
        return share(total, trainer.global_rank, trainer.world_size)


# Processes


def share(total: int, rank: int, world_size: int) -> range:
    """Return which of ``total`` samples this process takes, in one piece.

    Example:
        >>> [list(share(5, rank, 2)) for rank in range(2)]
        [[0, 1, 2], [3, 4]]
    """
    size, more = divmod(total, world_size)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))


def summed(trainer: Trainer, values: Tensor | list[float]) -> Tensor:
    """Return what all processes' values add up to, in float64; the values themselves where there is one process."""
    if trainer.world_size == 1:
        device = values.device if isinstance(values, Tensor) else "cpu"
        return torch.as_tensor(values, dtype=torch.float64, device=device)
    mine = torch.as_tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    return trainer.strategy.reduce(mine, reduce_op="sum")


def on_every_process(trainer: Trainer, number: int) -> list[int]:
    """Return the number that each process has."""
    if trainer.world_size == 1:
        return [number]
    mine = torch.tensor(number, device=trainer.strategy.root_device)
    return trainer.strategy.all_gather(mine).flatten().tolist()


# Loaders


def labeled_loader(loader: Any) -> tuple[Any | None, Any]:
    """Return the loader of labelled samples among those of a Trainer, and its key in their batches if it has one.

    Call it inside ``observing``.

    Args:
        loader: What the Trainer has: a loader, several of them, or a ``CombinedLoader``.
    """
    parts = getattr(loader, "iterables", loader)
    if isinstance(parts, list | tuple) and len(parts) == 1:
        return None, parts[0]
    if isinstance(parts, Mapping):
        key = labeled_key(parts, _has_labels)
        if key is not None:
            return key, parts[key]
    return None, loader


def _has_labels(loader: Any) -> bool:
    if not readable(loader) or not len(loader.dataset):
        return False
    first = torch.zeros(1, dtype=torch.long, device="cpu")
    return is_labeled(read_samples(loader, first, seed=0))


def readable(loader: Any) -> bool:
    """Whether a pool can be read from the loader's dataset: it is indexed, and all of it is trained on."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return False  # or its items are batches
    dataset = loader.dataset
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return False
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        return sampler.dataset is dataset
    return type(sampler) in (SequentialSampler, RandomSampler)


def read_samples(loader: DataLoader, chosen: Tensor, seed: int) -> Any:
    """Return one batch of the ``chosen`` samples; call it inside ``observing``.

    A dataset that may have a state is copied. Transforms that draw from global generators do so as
    the sample's number says, on whichever process.
    """
    dataset = loader.dataset
    collate = copy.deepcopy(loader.collate_fn)
    plain = _only_tensors(dataset)
    if not plain:
        dataset = copy.deepcopy(dataset)
    samples = []
    for index in chosen.tolist():
        if not plain:
            seed_everything(hash((seed, index)) % 2**32)
        samples.append(dataset[index])
    return collate(samples) if samples else None


def _only_tensors(dataset: Any) -> bool:
    """Whether a dataset is one of torch's own that hands out its tensors: reading changes nothing and draws nothing."""
    if type(dataset) is TensorDataset:
        return True
    if type(dataset) is Subset:
        return _only_tensors(dataset.dataset)
    return type(dataset) is ConcatDataset and all(map(_only_tensors, dataset.datasets))


def choose(total: int, n: int, seed: int) -> Tensor:
    """Return the numbers of ``n`` of ``total`` samples (or of all of them), in order, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(total, generator=generator, device="cpu")
    return order[:n].sort().values


def on_device(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
    """Send a batch where the training step gets its own, through the same hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    owner: Any = pl_module
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:  # one of the two, as Lightning does it
        plain = [each.LightningDataModule.on_before_batch_transfer for each in NAMESPACES.values()]
        if type(datamodule).on_before_batch_transfer not in plain:
            owner = datamodule
    batch = owner.on_before_batch_transfer(batch, 0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
