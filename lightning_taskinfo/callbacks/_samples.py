"""What is in a batch: inputs, targets, how many samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_taskinfo._batches import described, take, tensors
from lightning_taskinfo.fisher.draws import NumberedDraws
from lightning_taskinfo.functional.likelihood import Likelihood, as_likelihood

BatchFn: TypeAlias = Callable[[Any], tuple[Any, Tensor | None]]
Draws = TypeVar("Draws", bound=NumberedDraws)
TARGETS = ("targets", "target", "labels", "label", "y")


@dataclass(frozen=True)
class Samples:
    """What one process measures.

    Attributes:
        inputs: The inputs, ``[N, ...]``; ``N`` may be 0 where processes share few samples.
        targets: The dataset's labels, ``[N, ...]``.
        first: Number of the first of them among the samples of all processes.
        total: Samples of all processes together.
        seed: Seed of this measurement's draws, the same on all processes.
        counted: How many of the inputs count. More are there only where processes with sharded weights have to run
            passes of one size; they repeat others.
    """

    inputs: Any
    targets: Tensor | None
    first: int
    total: int
    seed: int
    counted: int

    def draws(self, likelihood: str | Likelihood, mc_samples: int, kind: type[Draws] = NumberedDraws) -> Draws:  # type: ignore[assignment]
        """Return the likelihood, with labels that do not depend on how processes share the samples."""
        inner = as_likelihood(likelihood)
        return kind(inner, seed=self.seed, first=self.first, total=self.total, mc_samples=mc_samples)


def inputs_and_targets(batch: Any) -> tuple[Any, Tensor | None]:
    """Return inputs and targets of a batch whose meaning is plain.

    That is a pair, or a mapping or dataclass with one field for the targets (``targets``, ``target``, ``labels``,
    ``label`` or ``y``) and one other that holds tensors.

    Raises:
        ValueError: If the batch is anything else.

    Example:
        >>> import torch
        >>> inputs_and_targets({"image": torch.ones(1, 2), "label": torch.tensor([3])})
        (tensor([[1., 1.]]), tensor([3]))
    """
    if isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    named = _named(batch)
    targets = [name for name in named if name in TARGETS]
    if len(targets) == 1 and len(named) == 2:
        (inputs,) = (value for name, value in named.items() if name not in targets)
        return inputs, named[targets[0]]
    raise ValueError(
        f"A batch must be a pair (inputs, targets), or have one field of {', '.join(TARGETS)} and one other, got "
        f"{_described(batch)}; set `batch_fn` to a function of the batch that returns (inputs, targets)."
    )


def read_by(batch_fn: BatchFn, batch: Any) -> tuple[Any, Tensor | None]:
    """Return what the user's function picks out of a batch.

    Raises:
        ValueError: If it fails, or returns anything but a pair.
    """
    try:
        picked: Any = batch_fn(batch)
    except Exception as error:
        raise ValueError(
            "`batch_fn` must return (inputs, targets) of every batch, got "
            f"{type(error).__name__} ({error}) for {_described(batch)}."
        ) from error
    if not isinstance(picked, list | tuple) or len(picked) != 2:
        raise ValueError(f"`batch_fn` must return (inputs, targets) of every batch, got {_described(picked)}.")
    return picked[0], picked[1]


def _named(batch: Any) -> dict[str, Any]:
    """Return the fields of a mapping or dataclass that hold tensors."""
    if is_dataclass(batch) and not isinstance(batch, type):
        batch = {field.name: getattr(batch, field.name) for field in fields(batch)}
    if not isinstance(batch, Mapping):
        return {}
    return {str(name): value for name, value in batch.items() if isinstance(value, Tensor | list | tuple | Mapping)}


def _described(batch: Any) -> str:
    kind = type(batch).__name__
    if is_dataclass(batch):
        return f"{kind} with {', '.join(field.name for field in fields(batch)) or 'nothing'}"
    if names := getattr(batch, "_fields", ()):  # of a named tuple
        return f"{kind} with {', '.join(names)}"
    return described(batch)


def first_samples(inputs: Any, targets: Tensor | None, n: int) -> tuple[Any, Tensor | None]:
    """Return the first ``n`` samples of a batch."""
    return take(inputs, lambda x: x[:n]), None if targets is None else targets[:n]


def filled_up(inputs: Any, targets: Tensor | None, n: int) -> tuple[Any, Tensor | None]:
    """Return ``n`` samples: those of a batch, and again from the first.

    Example:
        >>> import torch
        >>> filled_up(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), 3)[1]
        tensor([0, 1, 0])
    """
    if size(inputs) == n:
        return inputs, targets
    rows = torch.arange(n) % size(inputs)
    return take(inputs, lambda x: x[rows.to(x.device)]), None if targets is None else targets[rows.to(targets.device)]


def size(inputs: Any) -> int:
    """Return the number of samples, which may be 0."""
    if any(x.ndim == 0 for x in tensors(inputs)):
        raise ValueError("inputs must have an axis of samples, got a tensor without axes; `batch_fn` can leave it out.")
    return max(len(x) for x in tensors(inputs))
