"""Batches of any shape: a tensor, or tuples, lists and dicts of tensors."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


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
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(take(value, pick) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(take(value, pick) for value in inputs)
    return inputs


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
    if isinstance(batch, Mapping):
        return f"{kind} with {', '.join(map(str, batch)) or 'nothing'}"
    if isinstance(batch, list | tuple):
        return f"{kind} of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
    return kind


def joined(parts: list[Any]) -> Any:
    """Return batches of the same structure as one.

    Example:
        >>> joined([{"x": torch.zeros(2)}, {"x": torch.ones(1)}])
        {'x': tensor([0., 0., 1.])}
    """
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], Mapping):
        return {key: joined([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], list | tuple):
        groups = [joined(list(group)) for group in zip(*parts, strict=True)]
        return type(parts[0])(*groups) if hasattr(parts[0], "_fields") else type(parts[0])(groups)
    return parts[0]


def sample_count(inputs: Any) -> int:
    """Return the number of samples: the common length of all tensors of ``inputs``.

    Raises:
        ValueError: If there is no tensor, or the lengths differ.
    """
    lengths = {len(x) if x.dim() else 0 for x in tensors(inputs)}
    if not lengths:
        found = type(inputs).__name__ + ("" if not isinstance(inputs, list | tuple | Mapping) else " without tensors")
        raise ValueError(f"`inputs` must be a tensor, or a tuple, list or dict of tensors, got {found}.")
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"`inputs` must hold tensors with the same, positive number of samples along axis 0, got {sorted(lengths)}."
        )
    return lengths.pop()
