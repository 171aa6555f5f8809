"""Tensors in tuples, lists and dicts, samples along the first axis, as torch's loaders make them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100  # labels of this value count for nothing
TARGETS = ("targets", "target", "labels", "label", "y")
"""Names of fields that hold targets."""


def take(inputs: Any, pick: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``pick`` to every tensor of ``inputs`` and keep the structure.

    Example:
        >>> take({"x": torch.arange(3), "name": "a"}, lambda x: x[:1])
        {'x': tensor([0]), 'name': 'a'}
    """
    if isinstance(inputs, Tensor):
        return pick(inputs)
    if isinstance(inputs, Mapping):
        return {key: take(value, pick) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return _of_kind(type(inputs), [take(value, pick) for value in inputs])
    return inputs


def _of_kind(kind: type, values: list[Any]) -> Any:
    """Return a list, tuple or named tuple of some values."""
    if hasattr(kind, "_fields"):
        return kind(*values)
    return kind(values)


def moved(inputs: Any, device: torch.device) -> Any:
    """Return inputs on a device."""
    return take(inputs, lambda x: x.to(device))


def split(inputs: Any, size: int) -> Iterator[Any]:
    """Yield inputs in parts of at most so many samples.

    Example:
        >>> [part["x"].tolist() for part in split({"x": torch.arange(3)}, 2)]
        [[0, 1], [2]]
    """
    for start in range(0, sample_count(inputs), size):
        yield take(inputs, itemgetter(slice(start, start + size)))


def tensors(inputs: Any) -> Iterator[Tensor]:
    """Yield every tensor of ``inputs``."""
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        for value in inputs.values():
            yield from tensors(value)
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from tensors(value)


def described(batch: Any) -> str:
    """Return in words what a batch is that was to be something else.

    Example:
        >>> described({"image": torch.zeros(2), "label": 3}), described((1, "a", None))
        ('dict with image, label', 'tuple of int, str, NoneType')
    """
    kind = type(batch).__name__
    if isinstance(batch, Tensor):
        return f"{kind} of {batch.dtype} and shape {list(batch.shape)}"
    relation = "with"
    if is_dataclass(batch):
        parts = [field.name for field in fields(batch)]
    elif getattr(batch, "_fields", ()):  # of a named tuple
        parts = [*batch._fields]
    elif isinstance(batch, Mapping):
        parts = [str(name) for name in batch]
    elif isinstance(batch, list | tuple):
        relation = "of"
        parts = [type(part).__name__ for part in batch]
    else:
        return kind
    return f"{kind} {relation} {', '.join(parts) or 'nothing'}"


def joined(parts: list[Any]) -> Any:
    """Return batches of the same structure as one; sequences with an ``attention_mask`` are padded to one length.

    Example:
        >>> joined([{"x": torch.zeros(2)}, {"x": torch.ones(1)}])
        {'x': tensor([0., 0., 1.])}
    """
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], Mapping):
        parts = _of_one_length(parts)
        fields = {}
        for key in parts[0]:
            fields[key] = joined([part[key] for part in parts])
        return fields
    if isinstance(parts[0], list | tuple):
        places = zip(*parts, strict=True)
        return _of_kind(type(parts[0]), [joined(list(place)) for place in places])
    return parts[0]


def joined_targets(parts: list[Tensor]) -> Tensor:
    """Return the targets of batches as one; labels of tokens are padded to one length with -100.

    Example:
        >>> joined_targets([torch.tensor([[1, 2]]), torch.tensor([[3]])])
        tensor([[   1,    2],
                [   3, -100]])
    """
    if parts[0].ndim == 2 and not parts[0].is_floating_point():
        longest = max(part.shape[1] for part in parts)
        parts = [_longer(part, longest, IGNORED) for part in parts]
    return torch.cat(parts)


def _of_one_length(parts: list[Any]) -> list[Any]:
    """Return sequences of tokens with more padding, which their mask leaves out; other batches as they are."""
    lengths = []
    for part in parts:
        mask = part.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            lengths.append(mask.shape[1])
    if len(lengths) < len(parts) or len({*lengths}) == 1:
        return parts
    longest = max(lengths)
    padded = []
    for part, length in zip(parts, lengths, strict=True):
        longer = dict(part)
        for name, x in part.items():
            if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == length:
                value = IGNORED if name in TARGETS else 0
                longer[name] = _longer(x, longest, value)
        padded.append(longer)
    return padded


def _longer(x: Tensor, length: int, value: int) -> Tensor:
    """Return ``[N, T, ...]`` with so many places on the second axis, the new ones filled with a value."""
    behind = [0, 0] * (x.ndim - 2)
    missing = length - x.shape[1]
    return nn.functional.pad(x, (*behind, 0, missing), value=value)


def sample_count(inputs: Any) -> int:
    """Return the number of samples: the common length of all tensors of ``inputs``.

    Raises:
        ValueError: If there is no tensor, or the lengths differ.
    """
    if isinstance(inputs, Tensor) and inputs.dim():
        length = inputs.shape[0]  # in a third of the time that `len` takes, in every training step
        if length:
            return length
    lengths = {len(x) if x.dim() else 0 for x in tensors(inputs)}
    if not lengths:
        found = type(inputs).__name__
        if isinstance(inputs, list | tuple | Mapping):
            found += " without tensors"
        raise ValueError(
            f"`inputs` must be a tensor, or a tuple, list or dict of tensors, got {found}."
        )
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"`inputs` must hold tensors with the same, positive number of samples along axis 0, got {sorted(lengths)}."
        )
    return lengths.pop()


def first_samples(inputs: Any, targets: Tensor | None, n: int) -> tuple[Any, Tensor | None]:
    """Return the first ``n`` samples of a batch."""
    few = take(inputs, lambda x: x[:n])
    if targets is not None:
        targets = targets[:n]
    return few, targets


def filled_up(inputs: Any, targets: Tensor | None, n: int) -> tuple[Any, Tensor | None]:
    """Return ``n`` samples: those of a batch, and again from the first.

    Example:
        >>> import torch
        >>> filled_up(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), 3)[1]
        tensor([0, 1, 0])
    """
    if size(inputs) == n:
        return inputs, targets
    rows = torch.arange(n, device="cpu") % size(inputs)
    filled = take(inputs, lambda x: x[rows.to(x.device)])
    if targets is not None:
        targets = targets[rows.to(targets.device)]
    return filled, targets


def size(inputs: Any) -> int:
    """Return the number of samples, which may be 0."""
    if any(x.ndim == 0 for x in tensors(inputs)):
        raise ValueError(
            "inputs must have an axis of samples, got a tensor without axes; `batch_fn` can leave it out."
        )
    return max(len(x) for x in tensors(inputs))
