"""Target data of the user's own: a data module, datasets or arrays; what is trained on, and what is certified."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_taskinfo._batches import read_batch, tensors
from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.certificates.certify import FEWEST
from lightning_taskinfo.certificates.samples import check_fresh, read_inputs
from lightning_taskinfo.data import ArrayData
from lightning_taskinfo.transfer.sampling import (
    Draw,
    EpochSampler,
    Rows,
    by_turns,
    reseed,
    seeded,
    whole_batch,
)

PARTS = ("train", "test", "validation")
MOST_FRESH = 5000  # inputs to compare predictions on
STREAM = 6  # of random numbers in a certificate
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
        evaluated: Batch size and collate function of test and validation.
    """

    train: Any
    test: Any
    validation: Any
    batch_size: int
    collate: Collate
    evaluated: tuple[int, Collate]

    def labels(self) -> tuple[Tensor | None, str]:
        """Return the targets of all training samples where they can be read, and a digest of the samples."""
        digest = hashlib.sha256()
        found = []
        size = max(self.batch_size, 256)
        for begin in range(0, len(self.train), size):
            end = min(begin + size, len(self.train))
            rows = range(begin, end)
            with seeded(0, begin):
                batch = self.collate([self.train[row] for row in rows])
            for tensor in tensors(batch):
                plain = tensor.detach().cpu().contiguous()
                raw = plain.reshape(-1).view(torch.uint8)
                digest.update(raw.numpy().tobytes())
            found.append(_targets(batch))
        known = [targets for targets in found if targets is not None]
        labels = None
        if len(known) == len(found):
            labels = torch.cat(known)
        return labels, digest.hexdigest()[:16]

    def train_loader(self, rows: Rows, seed: int) -> DataLoader[Any]:
        """Return a loader of some training samples, in an order that depends on seed and epoch alone."""
        drawn = Drawn(self.train, rows, self.collate, seed)
        sampler = EpochSampler(len(rows), seed=seed)
        # A batch of one sample has no statistics for batch normalisation.
        left = len(rows) % self.batch_size
        drop = len(rows) > self.batch_size and left == 1
        return DataLoader(
            drawn,
            self.batch_size,
            sampler=sampler,
            collate_fn=whole_batch,
            drop_last=drop,
        )

    def plain_loader(self, rows: Rows) -> DataLoader[Any]:
        """Return a loader of some training samples as they are, in their order."""
        samples = Subset(self.train, rows.tolist())
        return DataLoader(samples, self.batch_size, collate_fn=self.collate)

    def evaluation_loader(self, samples: Any) -> DataLoader[Any]:
        """Return a loader of test or validation samples."""
        size, collate = self.evaluated
        return DataLoader(samples, size, collate_fn=collate)

    def test_loader(self) -> DataLoader[Any]:
        """Return the loader of the test set."""
        return self.evaluation_loader(self.test)


def _targets(batch: Any) -> Tensor | None:
    """One target for each sample of a batch, where it has such."""
    try:
        targets = read_batch(batch)[1]
    except ValueError:
        return None
    return targets if isinstance(targets, Tensor) and targets.ndim == 1 else None


class Drawn(Dataset[Any]):
    """Some rows of a dataset, a whole batch at a time, whose randomness depends on seed, epoch and place alone.

    Args:
        samples: The dataset.
        rows: Which samples of it.
        collate: Makes a batch of a list of samples.
        seed: Seed of what samples and batches draw, such as augmentations.
    """

    def __init__(self, samples: Any, rows: Rows, collate: Collate, seed: int) -> None:
        self.samples = samples
        self.rows = rows
        self.collate = collate
        self.seed = seed

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
            not, or a pair of them; in place of a dataset, arrays ``(inputs, targets)``; or an
            :class:`~lightning_taskinfo.data.ArrayData`.
        batch_size: Samples in a training batch; that of the data module, or 32, where ``None``.

    Raises:
        TypeError: If it is something else.
        ValueError: If a part is missing or empty.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
    if hasattr(data, "train_dataloader"):
        target = _of_module(data, batch_size)
    else:
        parts = {}
        for name, part in _parts(data).items():
            parts[name] = _dataset(part, name)
        size = batch_size or 32
        evaluated = (max(size, 256), default_collate)
        train, test, validation = (parts.get(name) for name in PARTS)
        target = Target(train, test, validation, size, default_collate, evaluated)
    for name in PARTS:
        part = getattr(target, name)
        if part is None:
            continue
        if not hasattr(part, "__len__") or not len(part):
            raise ValueError(
                f"`data` must have samples to {name.removesuffix('ation')} on, got none."
            )
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
    evaluated = (test.batch_size or 256, test.collate_fn)
    return Target(train.dataset, test.dataset, validation, size, train.collate_fn, evaluated)


def _loader(data: Any, name: str) -> DataLoader[Any]:
    try:
        loader = getattr(data, name)()
    except Exception as error:  # Lightning's own for a loader that is not there, or the user's
        raise ValueError(
            f"`data` must have a {name}, but {type(data).__name__}'s failed ({error})."
        ) from error
    if isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"`data` must return one DataLoader from {name}, got {type(loader).__name__}."
        )
    return loader


def _parts(data: Any) -> dict[str, Any]:
    if isinstance(data, ArrayData):
        return {"train": data.train(), "test": data.test()}
    if isinstance(data, Mapping):
        if not {"train", "test"} <= {*data} <= {*PARTS}:
            raise ValueError(
                f"`data` must have the parts train, test and maybe validation, got {', '.join(data)}."
            )
        return dict(data)
    if isinstance(data, list | tuple) and len(data) in (2, 3):
        return dict(zip(PARTS, data, strict=False))
    raise TypeError(
        f"`data` must be a LightningDataModule or datasets {{'train': …, 'test': …}}, got a {type(data).__name__}."
    )


def _dataset(part: Any, name: str) -> Any:
    """A dataset as it is, and arrays as one."""
    pair = isinstance(part, list | tuple) and len(part) == 2
    if pair and all(hasattr(array, "shape") for array in part):
        inputs, targets = map(_tensor, part)
        if len(inputs) != len(targets):
            raise ValueError(
                f"`data` must have as many targets as inputs to {name} on, got {len(targets)} for {len(inputs)}."
            )
        return TensorDataset(inputs, targets)
    if not (hasattr(part, "__getitem__") and hasattr(part, "__len__")):
        raise TypeError(
            f"`data` must have a dataset or arrays (inputs, targets) to {name} on, got {type(part)}."
        )
    return part


def _tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    return torch.as_tensor(np.asarray(array))


def chosen_rows(labels: Tensor | None, length: int, counts: Sequence[int], seed: int) -> Rows:
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
            raise ValueError(
                f"`labels` must be between 1 and the {length} training samples there are, got {count}."
            )
    if labels is None or labels.is_floating_point():
        return rng.permutation(length)
    classes, y = np.unique(labels.cpu().numpy(), return_inverse=True)
    if len(classes) < 2:
        raise ValueError(
            f"`data` must have training samples of at least two classes, got class {classes[0]} only."
        )
    if min(counts) < len(classes):
        raise ValueError(
            f"`labels` must give every one of the {len(classes)} classes at least one label, got {min(counts)}."
        )
    return by_turns(y.astype(np.int64), len(classes), rng)


@dataclass(frozen=True)
class Certified:
    """The samples that a certificate needs, all of them independent draws.

    Attributes:
        target: The target data; its test set gives the test-set bound.
        rows: Rows of training samples in random order.
        labels: The first so many are trained on, and certified; the inputs of others serve nothing
            else.
    """

    target: Target
    rows: Rows
    labels: int

    @property
    def fresh(self) -> Rows:
        """Rows of the inputs that serve nothing else."""
        return self.rows[self.labels :][:MOST_FRESH]

    @property
    def unlabelled(self) -> DataLoader[Any] | None:
        """Those inputs, where there are enough of them."""
        enough = len(self.fresh) >= FEWEST
        return self.target.plain_loader(self.fresh) if enough else None

    def check(self, model: nn.Module) -> None:
        """Raise a ``ValueError`` where inputs occur twice, so that they cannot serve nothing else."""
        target = self.target
        labelled = target.plain_loader(self.rows[: self.labels])
        used, _ = read_inputs(labelled, model=model)
        for loader in (target.test_loader(), self.unlabelled):
            if loader is None:
                continue
            inputs, _ = read_inputs(loader, argument="data", model=model)
            check_fresh("data", inputs, used, "the labelled samples, where `certify` is asked for")

    def bounds(self, model: nn.Module, prior: Prior, seed: int) -> dict[str, Any]:
        """Return the three bounds on the true error, as plain values.

        Args:
            model: The trained network.
            prior: The prior, taken before training.
            seed: Of all draws.
        """
        reseed(seed, STREAM)
        found = certify(
            model,
            self.target.plain_loader(self.rows[: self.labels]),
            prior,
            unlabelled=self.unlabelled,
            held_out=self.target.test_loader(),
            seed=seed,
            progress=False,
        )
        network = found.network
        bounds: dict[str, Any] = {
            "stochastic": found.bound,
            "network": network and network.bound,
            "test_set": found.test_set.bound,
            "confidence": min(found.confidence, network.confidence if network else 1.0),
            "valid": found.valid,
            "reasons": list(found.reasons),
            "assumptions": list(found.assumptions),
            "kl": found.kl,
            "risk": found.risk,
            "disagreement": network and network.disagreement,
        }
        if network is None:
            missing = f"no bound for the network itself, which needs {FEWEST} inputs without labels"
            bounds["assumptions"].append(missing)
        return bounds


def start_prior(model: nn.Module, start: str, *, scratch: bool) -> Prior:
    """Return the prior centred at a module that is about to be trained; what is frozen in it costs nothing."""
    origin = "random initialisation"
    if not scratch:
        origin = (
            f"the start {start!r}, said to be pretrained on other samples than the certified ones"
        )
    return Prior.of(model, origin=origin)
