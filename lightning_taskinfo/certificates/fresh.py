"""Inputs that must not have been used before: found again by their contents, as far as that can be known."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_taskinfo._batches import sample_count, tensors
from lightning_taskinfo.functional.intervals import binomial_log_tail, binomial_upper_bound

UNLIKELY = 1e-3  # more equal inputs than this chance explains are no chance


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
        for hashed, row in zip(hashes, _rows(tensor), strict=True):
            hashed.update(row)
    return [hashed.digest() for hashed in hashes]


def _rows(tensor: Tensor) -> Iterator[bytes]:
    values = tensor.detach().cpu()
    if values.is_complex():
        values = torch.view_as_real(values)
    kind = torch.float32 if values.is_floating_point() else torch.int64
    values = values.to(kind) + 0  # -0.0 becomes 0.0
    for row in (
        values.flatten(1).contiguous().numpy() if values.ndim > 1 else values[:, None].numpy()
    ):
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
