"""Target data of the user's own: a data module, datasets or arrays; what is trained on, and what is certified."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_taskinfo._batches import read_batch, tensors
from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo._warn import reason_of
from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.certificates.certify import FEWEST
from lightning_taskinfo.certificates.samples import check_fresh, read_inputs
from lightning_taskinfo.data import ArrayData
from lightning_taskinfo.transfer import sampling
from lightning_taskinfo.transfer.sampling import Rows

PARTS = ("train", "test", "validation")
MOST_FRESH = 5000  # inputs to compare predictions on
STREAM = 6  # of random numbers in a certificate
Loader: TypeAlias = DataLoader[Any]
Collate: TypeAlias = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Target:
    """Training, test and validation samples, and how batches are made of them.

    Attributes:
        train: Training samples; some of their labels are used.
        test: The test set.
        validation: Samples to validate on while training; ``None`` for none.
        batch_size: Samples in a training batch.
        collate: Makes a batch of a list of training samples.
        evaluated: Makes a loader of test or validation samples.
    """

    train: Any
    test: Any
    validation: Any
    batch_size: int
    collate: Collate
    evaluated: Callable[[Any], Loader]

    def labels(self) -> tuple[Tensor | None, str]:
        """Return the targets of all training samples where they can be read, and a digest of the samples."""
        digest = hashlib.sha256()
        found = []
        size = max(self.batch_size, 256)
        for begin in range(0, len(self.train), size):
            rows = range(begin, min(begin + size, len(self.train)))
            with sampling.seeded(0, begin):
                batch = self.collate([self.train[row] for row in rows])
            for tensor in tensors(batch):
                plain = tensor.detach().cpu().contiguous()
                digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
            found.append(_targets(batch))
        known = [targets for targets in found if targets is not None]
        labels = torch.cat(known) if len(known) == len(found) else None
        return labels, digest.hexdigest()[:16]

    def train_loader(self, rows: Rows, seed: int) -> Loader:
        """Return a loader of some training samples, in an order that depends on seed and epoch alone."""
        drawn = Drawn(self.train, rows, self.collate, seed)
        sampler = sampling.EpochSampler(len(rows), seed=seed)
        # A batch of one sample has no statistics for batch normalisation.
        drop = len(rows) > self.batch_size and len(rows) % self.batch_size == 1
        return DataLoader(
            drawn,
            self.batch_size,
            sampler=sampler,
            collate_fn=sampling.whole_batch,
            drop_last=drop,
        )

    def plain_loader(self, rows: Rows) -> Loader:
        """Return a loader of some training samples as they are, in their order."""
        samples = Subset(self.train, rows.tolist())
        return DataLoader(samples, self.batch_size, collate_fn=self.collate)

    def test_loader(self) -> Loader:
        """Return the loader of the test set."""
        return self.evaluated(self.test)


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

    def __getitems__(self, draws: Sequence[sampling.Draw]) -> Any:
        """Return a batch."""
        with sampling.seeded(self.seed, *draws[0]):
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
        target = _of_module(data, batch_size)
    elif isinstance(data, Mapping):
        if not {"train", "test"} <= {*data} <= {*PARTS}:
            rule = "must have the parts train, test and maybe validation"
            raise ValueError(f"`data` {rule}, got {', '.join(data)}.")
        train, test, validation = (_dataset(data.get(name), name) for name in PARTS)
        size = batch_size or 32
        evaluated = partial(DataLoader, batch_size=max(size, 256))
        target = Target(train, test, validation, size, default_collate, evaluated)
    else:
        rule = "a LightningDataModule or datasets {'train': …, 'test': …}"
        raise TypeError(f"`data` must be {rule}, got a {type(data).__name__}.")
    for name in PARTS:
        part = getattr(target, name)
        sized = hasattr(part, "__getitem__") and hasattr(part, "__len__")
        if part is not None and not (sized and len(part)):
            rule = f"must have a dataset or arrays (inputs, targets) to {name.removesuffix('ation')} on"
            raise ValueError(f"`data` {rule}, got none or an empty one: {type(part).__name__}.")
    return target


def _of_module(data: Any, batch_size: int | None) -> Target:
    """What a data module's loaders hold; their own order is not used."""
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    train = _loader(data, "train_dataloader")
    test = _loader(data, "test_dataloader")
    try:
        validation = _loader(data, "val_dataloader").dataset
    except ValueError:
        validation = None
    size = batch_size or train.batch_size or 32
    evaluated = partial(DataLoader, batch_size=test.batch_size or 256, collate_fn=test.collate_fn)
    return Target(train.dataset, test.dataset, validation, size, train.collate_fn, evaluated)


def _loader(data: Any, name: str) -> Loader:
    rule = f"`data` must return one DataLoader from {name}"
    try:
        loader = getattr(data, name)()
    except Exception as error:  # Lightning's own for a loader that is not there, or the user's
        raise ValueError(f"{rule}, but it failed ({reason_of(error)}).") from error
    if not isinstance(loader, DataLoader):
        raise ValueError(f"{rule}, got {type(loader).__name__}.")
    return loader


def _dataset(part: Any, name: str) -> Any:
    """A dataset as it is, and arrays as one."""
    pair = isinstance(part, list | tuple) and len(part) == 2
    if pair and all(hasattr(array, "shape") for array in part):
        inputs, targets = map(torch.as_tensor, part)
        if len(inputs) != len(targets):
            rule = f"`data` must have as many targets as inputs to {name} on"
            raise ValueError(f"{rule}, got {len(targets)} for {len(inputs)}.")
        return TensorDataset(inputs, targets)
    return part


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
    rng = np.random.default_rng(seed)
    for count in counts:
        if not 1 <= count <= length:
            rule = f"must be between 1 and the {length} training samples there are"
            raise ValueError(f"`labels` {rule}, got {count}.")
    if labels is None or labels.is_floating_point():
        return rng.permutation(length)
    classes, y = np.unique(labels.cpu().numpy(), return_inverse=True)
    if len(classes) < 2:
        rule = "must have training samples of at least two classes"
        raise ValueError(f"`data` {rule}, got class {classes[0]} only.")
    if min(counts) < len(classes):
        rule = f"must give every one of the {len(classes)} classes at least one label"
        raise ValueError(f"`labels` {rule}, got {min(counts)}.")
    return sampling.by_turns(y.astype(np.int64), len(classes), rng)


def certified_parts(
    target: Target,
    rows: Rows,
    labels: int,
) -> tuple[Loader, Loader | None]:
    """Return the samples of a certificate, all of them independent draws.

    Args:
        target: The target data.
        rows: Rows of training samples in random order.
        labels: How many of them are trained on.

    Returns:
        Those that are trained on, and certified; and inputs that serve nothing else, if there are
        enough of them.
    """
    fresh = rows[labels:][:MOST_FRESH]
    enough = len(fresh) >= FEWEST
    return target.plain_loader(rows[:labels]), target.plain_loader(fresh) if enough else None


def check_certified(
    target: Target,
    rows: Rows,
    labels: int,
    model: nn.Module,
) -> None:
    """Raise a ``ValueError`` where inputs occur twice, so that they cannot serve nothing else."""
    labelled, unlabelled = certified_parts(target, rows, labels)
    used, _ = read_inputs(labelled, model=model)
    for loader in (target.test_loader(), unlabelled):
        if loader is None:
            continue
        inputs, _ = read_inputs(loader, argument="data", model=model)
        check_fresh("data", inputs, used, "the labelled samples, where `certify` is asked for")


def certified_bounds(
    target: Target,
    rows: Rows,
    labels: int,
    model: nn.Module,
    prior: Prior,
    seed: int,
) -> dict[str, Any]:
    """Return the three bounds on the true error of a trained network, as plain values.

    Args:
        target: The target data; its test set gives the test-set bound.
        rows: Rows of training samples in random order.
        labels: How many of them were trained on.
        model: The trained network.
        prior: The prior, taken before training.
        seed: Of all draws.
    """
    sampling.reseed(seed, STREAM)
    labelled, unlabelled = certified_parts(target, rows, labels)
    found = certify(
        model,
        labelled,
        prior,
        unlabelled=unlabelled,
        held_out=target.test_loader(),
        seed=seed,
        progress=False,
    )
    network = found.network
    assumptions = list(found.assumptions)
    if network is None:
        missing = f"no bound for the network itself, which needs {FEWEST} inputs without labels"
        assumptions.append(missing)
    return {
        "stochastic": found.bound,
        "network": network and network.bound,
        "test_set": found.test_set.bound,
        "confidence": min(found.confidence, network.confidence if network else 1.0),
        "valid": found.valid,
        "reasons": list(found.reasons),
        "assumptions": assumptions,
        "kl": found.kl,
        "risk": found.risk,
        "disagreement": network and network.disagreement,
    }
