"""Which samples a probe looks at, on which process: the batch just trained on, or a fixed subset that is read once."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightning_taskinfo._batches import Reader
from lightning_taskinfo._calls import outputs_of
from lightning_taskinfo._fields import is_labeled, labeled_key
from lightning_taskinfo._lightning import Trainer
from lightning_taskinfo._nested import (
    Pair,
    first_samples,
    joined,
    joined_targets,
    sample_count,
    size,
    split,
    take,
)
from lightning_taskinfo._random import seed_everything
from lightning_taskinfo.fisher.measure import Request
from lightning_taskinfo.functional.likelihood import Likelihood, NumberedDraws, as_likelihood

CHUNK = 128  # samples of one forward pass
ALL = slice(None)


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
    """

    inputs: Any
    targets: Tensor | None
    counted: int
    first: int
    total: int
    seed: int
    asked: Request
    trainer: Trainer

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs mean."""
        return as_likelihood(self.asked.likelihood)

    def request(self, kind: type[NumberedDraws] = NumberedDraws) -> Request:
        """Return what the engine is asked for, with labels that do not depend on how processes share the samples."""
        draws = kind(
            self.likelihood,
            seed=self.seed,
            first=self.first,
            total=self.total,
            mc_samples=self.asked.mc_samples,
        )
        return replace(self.asked, likelihood=draws)

    def outputs(self, model: nn.Module, some: slice = ALL) -> Iterator[Tensor]:
        """Yield the outputs for some of the samples that count, at most 128 of them at a time, without gradients.

        The model is run on all inputs, so that processes with sharded weights run the same passes.
        """
        inputs = take(self.inputs, lambda x: x[some].contiguous())  # a model may take views of it
        counted = len(range(self.counted)[some])
        for part in split(inputs, CHUNK) if size(inputs) else ():
            with torch.no_grad():
                outputs = outputs_of(model, part, self.asked.forward_fn)
            if counted > 0:
                yield outputs[:counted]
            counted -= CHUNK

    def losses(self, model: nn.Module, some: slice = ALL) -> Tensor:
        """Return the negative log-likelihood of some samples' targets in nats, ``[n]``; NaN without targets."""
        if self.targets is None:
            return _unknown(len(range(self.counted)[some]))
        found = [_unknown(0)]
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
        self.losses = [_unknown(0)]  # of each sample so far, in nats; NaN without targets

    def check(self, outputs: Tensor, targets: Tensor | None) -> None:  # once a chunk
        """See that outputs and targets fit the likelihood, and note their losses."""
        super().check(outputs, targets)
        losses = _unknown(len(outputs))
        if targets is not None:
            losses = -self.likelihood.log_prob(outputs.detach(), targets)
        self.losses.append(losses.double().cpu())


def _unknown(samples: int) -> Tensor:
    return torch.full((samples,), math.nan, dtype=torch.float64, device="cpu")


@dataclass
class Source:
    """The samples of one fit.

    Attributes:
        trainer: The Trainer.
        data: ``"train_batch"``, ``"train"`` or ``"val"``.
        max_samples: At most this many, over all processes.
        seed: Chooses the pool.
        reader: Reads batches.
        split: Whether processes share the samples; otherwise each has all of them.
        pool: Inputs and targets of this process, where they stay the same and are known.
        missing: How many samples of this process are still to be collected from the first training batches.
    """

    trainer: Trainer
    data: str
    max_samples: int
    seed: int
    reader: Reader
    split: bool
    pool: Pair | None = None
    missing: int = 0
    collected: list[Pair] = field(default_factory=list)

    def open(self) -> None:
        """Read the pool, or prepare to collect it; call it inside ``observing``.

        Raises:
            ValueError: If there must be a pool and the dataset does not give one.
        """
        trainer = self.trainer
        whole = not self.split and trainer.world_size > 1
        if self.data == "train_batch":
            if whole:
                raise ValueError(
                    "`data` must be 'train' or 'val' with several processes, got 'train_batch'."
                )
            return
        loaders: Any = trainer.val_dataloaders if self.data == "val" else trainer.train_dataloader
        key, loader = labeled_loader(loaders)
        needed = "a loader of an indexed dataset, all of which is used"
        if readable(loader):
            try:
                self.pool = self._read_pool(loader, key)
                return
            except (TypeError, NotImplementedError, RuntimeError) as error:  # what copying raises
                needed = f"a dataset that can be copied ({error})"
        if self.data == "val" or whole:
            raise ValueError(f"`data={self.data!r}` needs {needed}, got {type(loader).__name__}.")
        # As many on every process, whatever it keeps of them: so the pools are full at the same step.
        self.missing = math.ceil(self.max_samples / trainer.world_size)

    def _read_pool(self, loader: Any, key: Any) -> Pair:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(loader.dataset), generator=generator, device="cpu")
        chosen = order[: self.max_samples].sort().values
        if self.split:  # each process takes a piece
            chosen = chosen.tensor_split(self.trainer.world_size)[self.trainer.global_rank]
        if not len(chosen):
            return torch.empty(0, device="cpu"), None
        batch = read_samples(loader, chosen.tolist(), self.seed)
        if key is not None:
            batch = {key: batch}  # as the training step gets it
        # Where the training step gets its own, through the same hooks.
        module = self.trainer.lightning_module
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch)
        batch = self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        return self.reader.read(module, batch)

    def collect(self, batch: Any, last: bool) -> None:
        """Take from a training batch what the pool still misses; with the last of an epoch it is complete."""
        module = self.trainer.lightning_module
        part = first_samples(*self.reader.read(module, batch), self.missing)
        self.missing -= sample_count(part[0])
        self.collected.append(take(part, lambda x: x.detach().clone()))
        if last or not self.missing:
            every, labels = zip(*self.collected, strict=True)
            known = [targets for targets in labels if targets is not None]
            targets = joined_targets(known) if known else None
            self.pool = self._share(joined([*every], module), targets)
            self.missing = 0

    def read(self, batch: Any) -> Pair:
        """Return this process's inputs and targets."""
        if self.pool is not None:
            return self.pool
        return self._share(*self.reader.read(self.trainer.lightning_module, batch))

    def _share(self, inputs: Any, targets: Tensor | None) -> Pair:
        """Return those of this process's own samples that are measured."""
        mine = range(self.trainer.global_rank, self.max_samples, self.trainer.world_size)
        return first_samples(inputs, targets, len(mine))


# Processes


def summed(trainer: Trainer, values: Tensor | list[float]) -> Tensor:
    """Return what all processes' values add up to, in float64; the values themselves where there is one process."""
    device = getattr(values, "device", "cpu")
    mine = torch.as_tensor(values, dtype=torch.float64, device=device)
    if trainer.world_size == 1:
        return mine
    return trainer.strategy.reduce(mine.to(trainer.strategy.root_device), reduce_op="sum")


def on_every_process(trainer: Trainer, number: int) -> list[int]:
    """Return the number that each process has."""
    mine = [0.0] * trainer.world_size
    mine[trainer.global_rank] = number
    return [int(of_one) for of_one in summed(trainer, mine).tolist()]


# Loaders


class NotingSampler:
    """A sampler of batches that notes the numbers it draws; they stay in the order in which batches are delivered.

    Attributes:
        noted: The sampler itself.
        drawn: What was drawn since it was last begun: a list for each time, which grows.
    """

    def __init__(self, noted: Any) -> None:
        self.noted = noted
        self.drawn: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self.drawn = drawn = []
        for numbers in self.noted:
            drawn.append(numbers)
            yield numbers

    def __len__(self) -> int:
        return len(self.noted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.noted, name)


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
    return is_labeled(read_samples(loader, [0], seed=0))


def readable(loader: Any) -> bool:
    """Whether a pool can be read from the loader's dataset: it is indexed, and all of it is trained on."""
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "noted", batches)  # of a NotingSampler
    if not isinstance(loader, DataLoader) or type(batches) is not BatchSampler:
        return False  # or its items are batches
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        return sampler.dataset is loader.dataset
    return type(sampler) in (SequentialSampler, RandomSampler)


def read_samples(loader: DataLoader, chosen: list[int], seed: int) -> Any:
    """Return one batch of the ``chosen`` samples; call it inside ``observing``.

    A dataset that may have a state is copied. Transforms that draw from global generators do so as
    the sample's number says, on whichever process.
    """
    dataset: Any = loader.dataset
    held = dataset
    while type(held) is Subset:
        held = held.dataset
    has_state = type(held) is not TensorDataset
    if has_state:
        dataset = copy.deepcopy(dataset)
    samples = []
    for index in chosen:
        if has_state:
            seed_everything(hash((seed, index)) % 2**32)
        samples.append(dataset[index])
    return copy.deepcopy(loader.collate_fn)(samples)
