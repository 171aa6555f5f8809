"""Which fields of a batch are its inputs and which its targets, by their names or places."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_taskinfo._nested import TARGETS, by_name, has_tensors


class Parts(NamedTuple):
    """The parts of a batch, before a model has said what it takes.

    Attributes:
        inputs: All that is no target: a single field by itself, several by name.
        targets: The targets.
        fields: Everything that a model may take: all fields by name, targets included, or the
            inputs of a pair.
        target: Name of the targets among them.
    """

    inputs: Any
    targets: Any
    fields: Any
    target: str | None = None


def parted(batch: Any) -> Parts | None:
    """Tell the targets of a batch from its inputs, by their place or name; ``None`` if neither says it."""
    named = _fields_of(batch)
    target = _target_of(named)
    if target is not None:
        others = {name: value for name, value in named.items() if name != target}
        inputs = others
        if len(others) == 1:
            (inputs,) = others.values()
        return Parts(inputs, named[target], named, target)
    if _is_pair(batch):
        return Parts(batch[0], batch[1], batch[0])
    return None


def _fields_of(batch: Any) -> dict[str, Any]:
    """Return the fields of a mapping, dataclass or named tuple that hold tensors; nothing for other batches."""
    batch = by_name(batch)
    if _is_pair(batch) and isinstance(batch[0], Mapping) and _target_of(batch[0]):
        batch = batch[0]  # beside it something else than the labels, such as the samples' numbers
    named = {}
    if isinstance(batch, Mapping):
        for name, value in batch.items():
            if has_tensors(value):
                named[str(name)] = value
    return named


def numbers_of(batch: Any) -> tuple[str, ...]:
    """Return the names of the fields of a batch that are plain numbers, and so no part of a sample."""
    batch = by_name(batch)
    if _is_pair(batch):
        batch = batch[0]
    fields = batch.items() if isinstance(batch, Mapping) else ()
    return tuple(str(name) for name, value in fields if isinstance(value, int | float))


def _target_of(named: Mapping[str, Any]) -> str | None:
    """Return the name of the field that holds the targets, if there is exactly one and others beside it."""
    found = [name for name in named if name in TARGETS]
    if len(found) == 1 and len(named) > 1 and isinstance(named[found[0]], Tensor):
        return found[0]
    return None


def _is_pair(batch: Any) -> bool:
    """Whether a batch is a pair of inputs and a tensor of targets."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        return False
    return isinstance(batch[1], Tensor)


def labeled_part(batch: Any) -> Any:
    """Return the labelled part of a batch that a ``CombinedLoader`` has put together; other batches as they are.

    Example:
        >>> from torch import ones, zeros
        >>> labeled_part({"labeled": (ones(1), zeros(1)), "unlabeled": ones(2)})
        (tensor([1.]), tensor([0.]))
    """
    if not isinstance(batch, Mapping) or _target_of(batch) is not None:
        return batch
    key = labeled_key(batch, is_labeled)
    return batch if key is None else batch[key]


def is_labeled(batch: Any) -> bool:
    """Whether a batch has targets that are told from its inputs."""
    return parted(batch) is not None


def labeled_key(
    parts: Mapping[Any, Any],
    is_labeled: Callable[[Any], bool],
) -> Any | None:
    """Return the key of the labelled one of several parts: the one that is called so, or the only one."""
    found = [key for key, part in parts.items() if is_labeled(part)]
    if "labeled" in found:
        return "labeled"
    return found[0] if len(found) == 1 else None
