"""The samples a certificate is about: all of them, each once, as they are."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_taskinfo._batches import described, joined, sample_count, tensors
from lightning_taskinfo.functional._tensors import check_finite

Data: TypeAlias = tuple[Any, Tensor] | Dataset[Any] | DataLoader[Any]


BATCH = 256  # samples that are collated at a time
Pick: TypeAlias = Callable[[Any], Any]


def read_samples(data: Data, *, argument: str = "data", batch_fn: Pick | None = None) -> tuple[Any, Tensor]:
    """Return all inputs and targets.

    A loader's dataset is read in its own order, without the loader's sampler: repeated, reweighted or dropped samples
    would not be the independent draws that a certificate speaks of. A random augmentation is applied once.

    Args:
        data: ``(inputs, targets)``, also as a list; or a dataset of such pairs, or a loader of one.
        argument: What the caller calls it, for messages.
        batch_fn: Picks ``(inputs, targets)`` out of a batch.

    Raises:
        ValueError: If it is something else, has fewer than 8 samples, or values that are not finite.
    """
    if isinstance(data, str):
        wanted = "(inputs, targets), a dataset of such pairs or a loader"
        raise ValueError(
            f"`{argument}` must be {wanted}, got {data!r}; `tasks.prepare_task({data!r}).data` is such a pair."
        )
    data = _pair_of(data)
    if isinstance(data, tuple) or (isinstance(data, list) and len(data) == 2 and isinstance(data[0], Tensor)):
        inputs, targets = data if batch_fn is None else batch_fn(data)
    else:
        batches = _batches(data)
        if not batches:
            raise ValueError(f"`{argument}` must hold at least 8 samples, got 0.")
        pairs = [batch if batch_fn is None else batch_fn(batch) for batch in batches]
        if not (isinstance(pairs[0], list | tuple) and len(pairs[0]) == 2):
            raise ValueError(f"`{argument}` must hold pairs (inputs, targets), got {described(pairs[0])}.")
        inputs, targets = (_joined([pair[part] for pair in pairs], argument) for part in (0, 1))
    if not isinstance(targets, Tensor):
        raise ValueError(f"`{argument}` must hold a tensor of targets, got {type(targets).__name__}.")
    n = sample_count(inputs) if len(targets) else 0
    if n != len(targets):
        raise ValueError(f"`{argument}` must hold a target for each input, got {len(targets)} for {n}.")
    if n < 8:
        raise ValueError(f"`{argument}` must hold at least 8 samples, got {n}.")
    for values in (*tensors(inputs), targets):
        check_finite(argument, values)
    return inputs, targets


def read_inputs(data: Any, *, argument: str = "unlabelled", batch_fn: Pick | None = None) -> tuple[Any, Any]:
    """Return all inputs of data without labels, and their targets where there are some, else ``None``.

    Args:
        data: Inputs: a tensor, or a dict of tensors; ``(inputs, targets)``; or a dataset or loader of any of these.
        argument: What the caller calls it, for messages.
        batch_fn: Picks ``(inputs, targets)`` out of a batch; targets may be ``None``.
    """
    data = _pair_of(data)
    batches = [data] if isinstance(data, Tensor | Mapping | tuple) else _batches(data)
    if not batches:
        raise ValueError(f"`{argument}` must hold inputs, got none.")
    pairs = []
    for batch in batches:
        if batch_fn is not None:
            batch = batch_fn(batch)
        is_pair = isinstance(batch, list | tuple) and len(batch) == 2
        pairs.append(tuple(batch) if is_pair else (batch, None))
    inputs = _joined([pair[0] for pair in pairs], argument)
    if isinstance(inputs, list | tuple) and len(inputs) == 1:  # a dataset of one tensor
        (inputs,) = inputs
    for values in tensors(inputs):
        check_finite(argument, values)
    sample_count(inputs)
    targets = None if pairs[0][1] is None else _joined([pair[1] for pair in pairs], argument)
    return inputs, targets


def _batches(data: Any) -> list[Any]:
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=BATCH)
    return list(DataLoader(loader.dataset, batch_size=BATCH, collate_fn=loader.collate_fn))


def _joined(parts: list[Any], argument: str) -> Any:
    try:
        return joined(parts)
    except RuntimeError as error:
        raise ValueError(f"`{argument}` must hold samples of one shape, got several: {error}") from error


def _pair_of(data: Any) -> Any:
    """The pair of something like a ``tasks.Task``, or what was given."""
    own = getattr(data, "data", None)
    return own if isinstance(own, tuple) and len(own) == 2 else data


def read_tensors(data: Data, *, argument: str = "data") -> tuple[Tensor, Tensor]:
    """Return all inputs and targets where inputs have to be one tensor.

    Args:
        data: As for :func:`read_samples`.
        argument: What the caller calls it, for messages.
    """
    inputs, targets = read_samples(data, argument=argument)
    if not isinstance(inputs, Tensor):
        raise ValueError(f"`{argument}` must hold one tensor of inputs, got {type(inputs).__name__}.")
    return inputs, targets
