"""Tensors in tuples, lists and dicts, samples along the first axis: taken apart, joined and counted."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

Pair = tuple[Any, Tensor | None]

IGNORED = -100  # labels of this value count for nothing
TARGETS = ("targets", "target", "labels", "label", "y")  # names of fields that hold them


def take(
    inputs: Any,
    change: Callable[[Tensor], Any],
) -> Any:
    """Apply ``change`` to every tensor of ``inputs`` and keep the structure.

    Example:
        >>> take({"x": torch.arange(3), "name": "a"}, lambda x: x[:1])
        {'x': tensor([0]), 'name': 'a'}
    """
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {key: take(value, change) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        taken = [take(value, change) for value in inputs]
        return _of_kind(type(inputs), taken)
    return inputs


def _of_kind(
    kind: type,
    values: list[Any],
) -> Any:
    """Return a list, tuple or named tuple of some values."""
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def tensors(inputs: Any) -> Iterator[Tensor]:
    """Return every tensor of ``inputs``."""
    found: list[Tensor] = []
    take(inputs, found.append)
    return iter(found)


def has_tensors(value: Any) -> bool:
    return next(tensors(value), None) is not None


def moved(inputs: Any, device: torch.device) -> Any:
    """Return inputs on a device."""
    return take(inputs, lambda x: x.to(device))


def pick(inputs: Any, index: Tensor | slice, device: torch.device | None = None) -> Any:
    """Return some of the samples.

    Args:
        inputs: Tensors, or tuples, lists and dicts of them, samples along the first axis.
        index: Which samples: numbers, truth values or a slice.
        device: Where to; left where they are by default.

    Example:
        >>> pick({"x": torch.arange(5)}, torch.tensor([3, 1]))
        {'x': tensor([3, 1])}
    """

    def some(x: Tensor) -> Tensor:
        rows = index.to(x.device) if isinstance(index, Tensor) else index
        return x[rows].to(device=device)

    return take(inputs, some)


def split(
    inputs: Any,
    size: int,
) -> Iterator[Any]:
    """Yield inputs in parts of at most so many samples.

    Example:
        >>> [part["x"].tolist() for part in split({"x": torch.arange(3)}, 2)]
        [[0, 1], [2]]
    """
    for start in range(0, sample_count(inputs), size):
        yield pick(inputs, slice(start, start + size))


def first_samples(
    inputs: Any,
    targets: Tensor | None,
    n: int,
) -> Pair:
    """Return the first ``n`` samples of a batch."""
    return pick((inputs, targets), slice(n))


def filled_up(
    inputs: Any,
    targets: Tensor | None,
    n: int,
) -> Pair:
    """Return ``n`` samples: those of a batch, and again from the first.

    Example:
        >>> import torch
        >>> filled_up(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), 3)[1]
        tensor([0, 1, 0])
    """
    rows = torch.arange(n, device="cpu") % size(inputs)
    return pick((inputs, targets), rows)


def joined(parts: list[Any], model: nn.Module | None = None) -> Any:
    """Return batches of the same structure as one; beside an ``attention_mask``, sequences are padded to one length.

    Args:
        parts: The batches.
        model: The network that is called on them, whose padding token is asked for where no batch
            shows it: some networks find the end of a text by that token, and not by the mask.

    Example:
        >>> joined([{"x": torch.zeros(2)}, {"x": torch.ones(1)}])
        {'x': tensor([0., 0., 1.])}
    """
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], Mapping):
        masks = [part["attention_mask"] for part in parts if "attention_mask" in part]
        fields = {}
        for name in parts[0]:
            values = [part[name] for part in parts]
            if masks and isinstance(values[0], Tensor) and values[0].ndim > 1:
                fields[name] = _padded(values, _filler(name, values, masks, model))
            else:
                fields[name] = joined(values, model)
        return fields
    if isinstance(parts[0], list | tuple):
        places = zip(*parts, strict=True)
        return _of_kind(type(parts[0]), [joined([*place], model) for place in places])
    return parts[0]


def _filler(
    name: str,
    values: list[Tensor],
    masks: list[Any],
    model: nn.Module | None,
) -> int | float:
    """Return what a field has at places of padding: what batches have there, or the model's token, or 0."""
    if name in TARGETS:
        return IGNORED
    known = set()
    for x, mask in zip(values, masks, strict=True):
        if x.shape[:2] == mask.shape:
            known.update(x[mask == 0].flatten().tolist())
    if len(known) == 1:
        return known.pop()
    if name.endswith("input_ids") and model is not None:
        for module in model.modules():
            token = getattr(getattr(module, "config", None), "pad_token_id", None)
            if isinstance(token, int):
                return token
    return 0


def joined_targets(parts: list[Tensor]) -> Tensor:
    """Return the targets of batches as one; labels of tokens are padded to one length with -100.

    Example:
        >>> joined_targets([torch.tensor([[1, 2]]), torch.tensor([[3]])])
        tensor([[   1,    2],
                [   3, -100]])
    """
    if parts[0].ndim == 2 and not parts[0].is_floating_point():
        return _padded(parts, IGNORED)
    return torch.cat(parts)


def _padded(parts: list[Tensor], value: float) -> Tensor:
    rows = [row for part in parts for row in part]
    return pad_sequence(rows, batch_first=True, padding_value=value)


def sample_count(inputs: Any, argument: str = "inputs") -> int:
    """Return the number of samples: the common length of all tensors of ``inputs``.

    Args:
        inputs: Tensors, or tuples, lists and dicts of them.
        argument: What they are called, for messages.

    Raises:
        ValueError: If there is no tensor, or the lengths differ.
    """
    lengths = {len(x) if x.ndim else 0 for x in tensors(inputs)}
    if not lengths:
        raise ValueError(
            f"`{argument}` must be a tensor, or a tuple, list or dict of tensors, got "
            f"{type(inputs).__name__} without tensors."
        )
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"`{argument}` must hold tensors with the same, positive number of samples along axis 0, got "
            f"{sorted(lengths)}."
        )
    return lengths.pop()


def size(inputs: Any) -> int:
    """Return the number of samples, which may be 0."""
    if any(x.ndim == 0 for x in tensors(inputs)):
        raise ValueError(
            "inputs must have an axis of samples, got a tensor without axes; `batch_fn` can leave it out."
        )
    return max(len(x) for x in tensors(inputs))


def by_name(batch: Any) -> Any:
    """Return a dataclass or named tuple as a dict, and anything else as it is."""
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return batch._asdict() if hasattr(batch, "_asdict") else batch


def described(batch: Any) -> str:
    """Return in words what a batch is that was to be something else.

    Example:
        >>> described({"image": torch.zeros(2), "label": 3}), described((1, "a", None))
        ('dict with image, label', 'tuple of int, str, NoneType')
    """
    kind = type(batch).__name__
    if isinstance(batch, Tensor):
        return f"{kind} of {batch.dtype} and shape {list(batch.shape)}"
    batch = by_name(batch)
    if isinstance(batch, Mapping):
        return f"{kind} with {', '.join(map(str, batch)) or 'nothing'}"
    if isinstance(batch, list | tuple):
        return f"{kind} of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
    return kind
