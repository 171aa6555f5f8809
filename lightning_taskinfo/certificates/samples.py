"""The samples a certificate is about: all of them, each once, as they are; and whether others are new."""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_taskinfo._batches import Reader
from lightning_taskinfo._calls import NoLogitsError
from lightning_taskinfo._fields import is_labeled
from lightning_taskinfo._nested import joined, joined_targets, moved, sample_count, tensors
from lightning_taskinfo._ranges import check_finite
from lightning_taskinfo.functional.tail_bounds import binomial_log_tail, binomial_upper_bound

Samples = tuple[Any, Tensor]
Data = Samples | Dataset[Any] | DataLoader[Any]
BATCH = 256  # samples that are collated at a time
WHOLE = (SequentialSampler, RandomSampler, DistributedSampler)  # samplers that leave nothing out
UNLIKELY = 1e-3  # more equal inputs than this chance explains are no chance


def read_labelled(
    data: Data,
    *,
    argument: str = "data",
    model: nn.Module | None = None,
    reader: Reader | None = None,
) -> Samples:
    """Return all inputs and targets.

    A loader's dataset is read in its own order, without the loader's sampler: repeated or reweighted
    samples would not be the independent draws that a certificate needs. A loader that may leave some
    of them out for good is refused. A random augmentation is applied once.

    Args:
        data: ``(inputs, targets)``, also as a list; or a dataset of such pairs, or a loader of one.
        argument: What the caller calls it, for messages.
        model: The network that is trained on it, if there is one: it decides which fields of a
            batch are its inputs.
        reader: How batches are read, if the user says so.

    Raises:
        ValueError: If it is something else, a loader that may leave samples out, has fewer than 8
            samples, or values that are not finite.
    """
    inputs, targets = read_inputs(
        data, argument=argument, model=model, reader=reader, labelled=True
    )
    if targets is None:
        raise ValueError(f"`{argument}` must hold a tensor of targets, got none.")
    n = sample_count(inputs)
    if n != len(targets):
        raise ValueError(
            f"`{argument}` must hold a target for each input, got {len(targets)} for {n}."
        )
    if n < 8:
        raise ValueError(f"`{argument}` must hold at least 8 samples, got {n}.")
    return inputs, targets


def read_inputs(
    data: Any,
    *,
    argument: str = "unlabelled",
    model: nn.Module | None = None,
    reader: Reader | None = None,
    labelled: bool = False,
) -> tuple[Any, Tensor | None]:
    """Return all inputs of data without labels, and their targets where there are some, else ``None``.

    Args:
        data: Inputs: a tensor, or a dict of tensors; ``(inputs, targets)``; or a dataset or loader
            of any of these.
        argument: What the caller calls it, for messages.
        model: The network that is called on them.
        reader: How batches are read, if the user says so.
        labelled: Whether there have to be labels.
    """
    if isinstance(data, str):
        raise ValueError(
            f"`{argument}` must be (inputs, targets), a dataset of such pairs or a loader, got {data!r}; "
            f"`tasks.prepare_task({data!r}).data` is such a pair."
        )
    own = getattr(data, "data", None)
    if isinstance(own, tuple):  # of a `tasks.PreparedTask`
        data = own
    batches = [data] if _is_one_batch(data) else _batches_of(data, argument)
    if not batches:
        raise ValueError(f"`{argument}` must hold at least 8 samples, got 0.")
    reader = reader or Reader()
    given = []
    labels = []
    for batch in batches:
        if reader.batch_fn is None and not all(x.ndim for x in tensors(batch)):
            raise ValueError(
                f"`{argument}` must hold a row for each sample in each tensor, got shape []."
            )
        try:
            some, targets = _read(batch, model, reader, labelled)
        except NoLogitsError:  # about the model
            raise
        except ValueError as error:
            raise ValueError(f"`{argument}` cannot be read: {error}") from error
        given.append(some)
        if isinstance(targets, Tensor):
            labels.append(targets)
    try:
        inputs = joined(given, model)
        targets = joined_targets(labels) if labels else None
    except RuntimeError as error:
        raise ValueError(
            f"`{argument}` must hold samples of one shape, got several: {error}"
        ) from error
    for values in tensors((inputs, targets)):
        check_finite(argument, values)
    return inputs, targets


def _is_one_batch(data: Any) -> bool:
    """Whether data are all samples at once, and no dataset or loader."""
    if isinstance(data, list) and len(data) == 2:  # a pair, or two samples
        inputs, targets = data
        both = isinstance(inputs, Tensor) and isinstance(targets, Tensor)
        return both and inputs.shape[:1] == targets.shape[:1]
    return isinstance(data, tuple | Mapping | Tensor)


def _batches_of(data: Any, argument: str) -> list[Any]:
    loader = data if isinstance(data, DataLoader) else DataLoader(data)
    sampler = loader.sampler
    whole = isinstance(loader.dataset, IterableDataset) or type(sampler) in WHOLE
    if isinstance(sampler, WeightedRandomSampler):
        whole = bool((sampler.weights > 0).all())
    own = sampler if not whole else loader.batch_sampler
    if not whole or type(own) not in (BatchSampler, NoneType):
        raise ValueError(
            f"`{argument}` must be a loader of all samples of its dataset, got one with {type(own).__name__}, which "
            "may leave some out; give the samples it takes as a dataset, such as `Subset(dataset, indices)`."
        )
    return [*DataLoader(loader.dataset, batch_size=BATCH, collate_fn=loader.collate_fn)]


def _read(
    batch: Any,
    model: Any,  # a module, or none
    reader: Reader,
    labelled: bool,
) -> tuple[Any, Tensor | None]:
    """Read one batch the way that callbacks do."""
    unlabelled = False
    if not labelled and reader.batch_fn is None:
        if isinstance(batch, list | tuple) and all(part is None for part in batch[1:]):
            batch = batch[0]  # of a dataset of one tensor, or beside no targets
        if isinstance(batch, Tensor):
            return batch, None
        if isinstance(batch, Mapping) and not is_labeled(batch):
            nothing = torch.zeros(sample_count(batch), dtype=torch.long, device="cpu")
            batch = {**batch, "labels": nothing}
            unlabelled = True
    if model is not None and reader.batch_fn is None:
        device = next(model.parameters()).device
        if device.type != "cpu":
            # Finds out once how the model is called.
            reader.read(model, moved(batch, device))
    inputs, targets = reader.read(model, batch)
    return inputs, None if unlabelled else targets


def read_pair(data: Data, *, argument: str = "data") -> tuple[Tensor, Tensor]:
    """Return all inputs and targets where inputs have to be one tensor.

    Args:
        data: As for :func:`read_labelled`.
        argument: What the caller calls it, for messages.
    """
    inputs, targets = read_labelled(data, argument=argument)
    if not isinstance(inputs, Tensor):
        raise ValueError(
            f"`{argument}` must hold one tensor of inputs, got {type(inputs).__name__}."
        )
    return inputs, targets


def fingerprints(inputs: Any) -> list[bytes]:
    """Return a short hash of each sample's contents, the same for equal values of another precision.

    Args:
        inputs: ``N`` inputs: a tensor, or tuples, lists and dicts of tensors.

    Example:
        >>> one, two = fingerprints(torch.tensor([[1.0, 2.0], [1.0, 3.0]]))
        >>> one == fingerprints(torch.tensor([[1, 2]], dtype=torch.float64))[0], one == two
        (True, False)
    """
    hashes = [hashlib.blake2b(digest_size=16) for _ in range(sample_count(inputs))]
    for tensor in tensors(inputs):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        kind = torch.float32 if tensor.is_floating_point() else torch.int64
        values = tensor.detach().cpu().to(kind) + 0  # -0.0 becomes 0.0
        for hashed, row in zip(hashes, values.numpy(), strict=True):
            hashed.update(row.tobytes())
    return [hashed.digest() for hashed in hashes]


class Repeats(NamedTuple):
    """How many samples there are, how many of them have an exact twin, and how many are different."""

    total: int
    repeated: int
    distinct: int


def count_repeats(samples: tuple[Any, Tensor | None]) -> Repeats:
    """Count samples that occur more than once, by input and label.

    Args:
        samples: Inputs, and their labels where those count.

    Example:
        >>> count_repeats((torch.tensor([1, 1, 1, 2]), torch.tensor([0, 0, 5, 0])))
        Repeats(total=4, repeated=2, distinct=3)
    """
    counts = Counter(fingerprints(samples))
    repeated = sum(count for count in counts.values() if count > 1)
    return Repeats(counts.total(), repeated, len(counts))


def check_fresh(argument: str, fresh: Any, used: Any, what: str) -> list[str]:
    """Refuse inputs that were used before; return what a reader should know about those that equal a used one.

    Where inputs are few and short (text, categories), some are equal by chance. How many that may
    be is seen from the used ones themselves, by how many of them have a twin among the others.

    Args:
        argument: What the caller calls the inputs.
        fresh: Inputs that should be new.
        used: Inputs that were used.
        what: What they were used for, in words.

    Raises:
        ValueError: If more of the inputs are among the used ones than chance explains.
    """
    counts = Counter(fingerprints(used))
    new = fingerprints(fresh)
    n, m = counts.total(), len(new)
    found = sum(one in counts for one in new)
    if not found:
        return []
    twins = sum(count for count in counts.values() if count > 1)
    share = float(binomial_upper_bound(twins, n, UNLIKELY)) if twins else 0.0
    # At least `found` equal ones by chance are at most m - found that are not.
    by_chance = binomial_log_tail(m - found, m, 1 - share)
    if float(by_chance) < math.log(UNLIKELY):
        raise ValueError(
            f"`{argument}` must be inputs that nothing else was done with, got {found} of {m} that are among {what}."
        )
    return [
        f"{found} of {m} inputs of `{argument}` equal some of {what}, as {twins} of those {n} equal each other"
    ]
