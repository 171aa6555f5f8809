"""The samples a certificate is about: all of them, each once, as they are; and whether others are new."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_taskinfo._batches import (
    NoLogitsError,
    Reader,
    is_labeled,
    joined,
    read_batch,
    sample_count,
    take,
    tensors,
)
from lightning_taskinfo._ranges import check_finite
from lightning_taskinfo.functional.tail_bounds import binomial_log_tail, binomial_upper_bound

Data: TypeAlias = tuple[Any, Tensor] | Dataset[Any] | DataLoader[Any]
BATCH = 256  # samples that are collated at a time
UNLIKELY = 1e-3  # more equal inputs than this chance explains are no chance


def read_labelled(
    data: Data,
    *,
    argument: str = "data",
    model: nn.Module | None = None,
    reader: Reader | None = None,
) -> tuple[Any, Tensor]:
    """Return all inputs and targets.

    A loader's dataset is read in its own order, without the loader's sampler: repeated, reweighted
    or dropped samples would not be the independent draws that a certificate needs. A random
    augmentation is applied once.

    Args:
        data: ``(inputs, targets)``, also as a list; or a dataset of such pairs, or a loader of one.
        argument: What the caller calls it, for messages.
        model: The network that is trained on it, if there is one: it decides which fields of a
            batch are its inputs.
        reader: How batches are read, if the user says so.

    Raises:
        ValueError: If it is something else, has fewer than 8 samples, or values that are not
            finite.
    """
    if isinstance(data, str):
        wanted = "(inputs, targets), a dataset of such pairs or a loader"
        raise ValueError(
            f"`{argument}` must be {wanted}, got {data!r}; `tasks.prepare_task({data!r}).data` is such a pair."
        )
    data = _pair_of(data)
    batches = [data] if _is_one_batch(data) else _batches(data)
    if not batches:
        raise ValueError(f"`{argument}` must hold at least 8 samples, got 0.")
    pairs = [_read(batch, argument, model, reader) for batch in batches]
    inputs = _joined([pair[0] for pair in pairs], argument)
    targets = _joined([pair[1] for pair in pairs], argument)
    if not isinstance(targets, Tensor):
        raise ValueError(
            f"`{argument}` must hold a tensor of targets, got {type(targets).__name__}."
        )
    n = sample_count(inputs) if len(targets) else 0
    if n != len(targets):
        raise ValueError(
            f"`{argument}` must hold a target for each input, got {len(targets)} for {n}."
        )
    if n < 8:
        raise ValueError(f"`{argument}` must hold at least 8 samples, got {n}.")
    for values in (*tensors(inputs), targets):
        check_finite(argument, values)
    return inputs, targets


def read_inputs(
    data: Any,
    *,
    argument: str = "unlabelled",
    model: nn.Module | None = None,
    reader: Reader | None = None,
) -> tuple[Any, Any]:
    """Return all inputs of data without labels, and their targets where there are some, else ``None``.

    Args:
        data: Inputs: a tensor, or a dict of tensors; ``(inputs, targets)``; or a dataset or loader
            of any of these.
        argument: What the caller calls it, for messages.
        model: The network that is called on them.
        reader: How batches are read, if the user says so.
    """
    data = _pair_of(data)
    batches = [data]
    if not isinstance(data, Tensor) and not _is_one_batch(data):
        batches = _batches(data)
    if not batches:
        raise ValueError(f"`{argument}` must hold inputs, got none.")
    given = []
    targets = []
    for batch in batches:
        some, labels = _read_unlabelled(batch, argument, model, reader)
        given.append(some)
        targets.append(labels)
    inputs = _joined(given, argument)
    for values in tensors(inputs):
        check_finite(argument, values)
    sample_count(inputs)
    if targets[0] is None:
        return inputs, None
    return inputs, _joined(targets, argument)


def _is_one_batch(data: Any) -> bool:
    """Whether data are all samples at once, and no dataset or loader."""
    if isinstance(data, tuple | Mapping):
        return True
    if not isinstance(data, list) or len(data) != 2:
        return False
    inputs, targets = data
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        return False
    return inputs.ndim > 0 and len(inputs) == len(targets)


def _read(
    batch: Any,
    argument: str,
    model: nn.Module | None,
    reader: Reader | None,
) -> tuple[Any, Any]:
    """Read one batch the way that callbacks do."""
    if reader is None or reader.batch_fn is None:
        pair = isinstance(batch, list | tuple) and len(batch) == 2
        if pair and not isinstance(batch[1], Tensor):
            raise ValueError(
                f"`{argument}` must hold a tensor of targets, got {type(batch[1]).__name__}."
            )
        if pair and not len(batch[1]):
            raise ValueError(f"`{argument}` must hold at least 8 samples, got 0.")
        if pair and len(batch[1]) != sample_count(batch[0]):
            counts = f"{len(batch[1])} for {sample_count(batch[0])}"
            raise ValueError(f"`{argument}` must hold a target for each input, got {counts}.")
    try:
        if model is None or reader is None:
            return read_batch(batch)
        device = next(model.parameters()).device
        if device.type != "cpu":
            # Finds out once how the model is called.
            reader.read(model, take(batch, lambda x: x.to(device)))
        return reader.read(model, batch)
    except NoLogitsError:  # about the model
        raise
    except ValueError as error:
        raise ValueError(f"`{argument}` cannot be read: {error}") from error


def _read_unlabelled(
    batch: Any,
    argument: str,
    model: nn.Module | None,
    reader: Reader | None,
) -> tuple[Any, Any]:
    if reader is not None and reader.batch_fn is not None:
        return reader.read(model or nn.Identity(), batch)
    if isinstance(batch, list | tuple) and len(batch) == 1:
        (batch,) = batch  # a dataset of one tensor
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, list | tuple) and len(batch) == 2 and batch[1] is None:
        return batch[0], None
    if isinstance(batch, Mapping) and not is_labeled(batch):
        nothing = torch.zeros(sample_count(batch), dtype=torch.long, device="cpu")
        inputs, _ = _read({**batch, "labels": nothing}, argument, model, reader)
        return inputs, None
    return _read(batch, argument, model, reader)


def _batches(data: Any) -> list[Any]:
    loader = data
    if not isinstance(data, DataLoader):
        loader = DataLoader(data, batch_size=BATCH)
    in_order = DataLoader(loader.dataset, batch_size=BATCH, collate_fn=loader.collate_fn)
    return list(in_order)


def _joined(parts: list[Any], argument: str) -> Any:
    try:
        return joined(parts)
    except RuntimeError as error:
        raise ValueError(
            f"`{argument}` must hold samples of one shape, got several: {error}"
        ) from error


def _pair_of(data: Any) -> Any:
    """The pair of something like a ``tasks.PreparedTask``, or what was given."""
    own = getattr(data, "data", None)
    if isinstance(own, tuple) and len(own) == 2:
        return own
    return data


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
    n = sample_count(inputs)
    hashes = [hashlib.blake2b(digest_size=16) for _ in range(n)]
    for tensor in tensors(inputs):
        for hashed, row in zip(hashes, _rows(tensor), strict=True):
            hashed.update(row)
    return [hashed.digest() for hashed in hashes]


def _rows(tensor: Tensor) -> Iterator[bytes]:
    values = tensor.detach().cpu()
    if values.is_complex():
        values = torch.view_as_real(values)
    kind = torch.float32 if values.is_floating_point() else torch.int64
    values = values.to(kind) + 0  # -0.0 becomes 0.0
    rows = values.unsqueeze(-1).flatten(1).contiguous()
    for row in rows.numpy():
        yield row.tobytes()


def check_fresh(argument: str, fresh: Any, used: Any, what: str) -> str | None:
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
    n = counts.total()
    new = fingerprints(fresh)
    m = len(new)
    found = sum(one in counts for one in new)
    if not found:
        return None
    twins = sum(count for count in counts.values() if count > 1)
    share = float(binomial_upper_bound(twins, n, UNLIKELY)) if twins else 0.0
    # At least `found` equal ones by chance are at most m - found that are not.
    by_chance = binomial_log_tail(m - found, m, 1 - share)
    if float(by_chance) < math.log(UNLIKELY):
        raise ValueError(
            f"`{argument}` must be inputs that nothing else was done with, got {found} of {m} that are among {what}."
        )
    return f"{found} of {m} inputs of `{argument}` equal some of {what}, as {twins} of those {n} equal each other"
