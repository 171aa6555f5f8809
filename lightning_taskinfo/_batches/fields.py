"""Which parts of a batch are its inputs and which its targets, told by their places and names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from lightning_taskinfo._batches.calls import positional_names
from lightning_taskinfo._batches.structure import TARGETS, described, tensors

LABELED = ("labeled", "labelled")  # the part of a combined batch that has targets


@dataclass(frozen=True)
class Parts:
    """The parts of a batch, before a model has said what it takes.

    Attributes:
        inputs: All that is no target: a single field by itself, several by name.
        targets: The targets.
        named: All fields by name, targets included; empty for a pair.
        target: Name of the targets among them.
    """

    inputs: Any
    targets: Any
    named: Mapping[str, Any]
    target: str | None

    @property
    def fields(self) -> Any:
        """Everything that a model may take."""
        return self.named or self.inputs


def parted(batch: Any, model: nn.Module | None) -> Parts:
    """Tell the targets of a batch from its inputs, by their place or name.

    Raises:
        ValueError: If neither says it.
    """
    batch = labeled_part(batch)
    named = fields_of(batch, model)
    target = target_of(named)
    if target is not None:
        others = {name: value for name, value in named.items() if name != target}
        inputs = next(iter(others.values())) if len(others) == 1 else others
        return Parts(inputs, named[target], named, target)
    if is_pair(batch):
        return Parts(batch[0], batch[1], {}, None)
    raise ValueError(
        f"A batch must be a pair (inputs, targets), or have one field of {', '.join(TARGETS)} and others, got "
        f"{described(batch)}; set `batch_fn` to a function of the batch that returns (inputs, targets)."
    )


def fields_of(batch: Any, model: nn.Module | None = None) -> dict[str, Any]:
    """Return the fields of a mapping, dataclass or named tuple that hold tensors; nothing for other batches.

    A tuple with a place for each argument of the model's ``forward``, labels among them, has their
    names.
    """
    if is_dataclass(batch) and not isinstance(batch, type):
        batch = {field.name: getattr(batch, field.name) for field in fields(batch)}
    elif isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        batch = batch._asdict()
    elif isinstance(batch, list | tuple) and len(batch) > 2 and model is not None:
        names = positional_names(model)[: len(batch)]
        if len(names) == len(batch) and names[-1] in TARGETS:
            batch = dict(zip(names, batch, strict=True))
    elif is_pair(batch, Mapping) and target_of(batch[0]):
        batch = batch[0]  # beside it something else than the labels, such as the samples' numbers
    if not isinstance(batch, Mapping):
        return {}
    return {str(name): value for name, value in batch.items() if any(True for _ in tensors(value))}


def target_of(named: Mapping[str, Any]) -> str | None:
    """Return the name of the field that holds the targets, if there is exactly one and others beside it."""
    found = [name for name in named if name in TARGETS]
    return found[0] if len(found) == 1 and len(named) > 1 else None


def is_pair(batch: Any, kind: type = object) -> bool:
    """Whether a batch is a pair of inputs, of some kind, and a tensor of targets."""
    pair = isinstance(batch, list | tuple) and len(batch) == 2
    return pair and isinstance(batch[0], kind) and isinstance(batch[1], Tensor)


def labeled_part(batch: Any) -> Any:
    """Return the labelled part of a batch that a ``CombinedLoader`` has put together; other batches as they are.

    Example:
        >>> from torch import ones, zeros
        >>> labeled_part({"labeled": (ones(1), zeros(1)), "unlabeled": ones(2)})
        (tensor([1.]), tensor([0.]))
    """
    if not isinstance(batch, Mapping) or target_of(batch) is not None:
        return batch
    key = labeled_key(batch, is_labeled)
    return batch if key is None else batch[key]


def is_labeled(batch: Any) -> bool:
    """Whether a batch has targets that are told from its inputs."""
    return is_pair(batch) or target_of(fields_of(batch)) is not None


def labeled_key(parts: Mapping[Any, Any], is_labeled: Callable[[Any], bool]) -> Any | None:
    """Return the key of the labelled one of several parts: the only one that is, or the one that is called so."""
    found = [key for key, part in parts.items() if is_labeled(part)]
    called = [key for key in found if key in LABELED]
    if len(called) == 1:
        return called[0]
    return found[0] if len(found) == 1 else None
