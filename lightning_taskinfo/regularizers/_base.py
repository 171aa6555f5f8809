"""What every regularizer shares: a weight that follows the epochs, and a memory of its last value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_taskinfo._warn import warn
from lightning_taskinfo.functional.likelihood import look_like_probabilities

Ramp = Literal["constant", "linear", "sigmoid"]


@dataclass(frozen=True)
class WeightSchedule:
    r"""A weight by epoch: zero before ``start``, then constant, or ramped up over ``length`` epochs.

    With :math:`T = \min(1, (\text{epoch} - \text{start}) / \text{length})` the weight is multiplied
    by 1, by
    :math:`T` (linear) or by :math:`e^{-5(1-T)^2}` (sigmoid, the ramp of Laine and Aila, 2017).

    Args:
        weight: The weight after the ramp.
        ramp: ``"constant"``, ``"linear"`` or ``"sigmoid"``.
        start: First epoch with a weight; a linear ramp begins in it, at 0.
        length: Epochs the ramp takes.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> schedule = WeightSchedule(2.0, ramp="linear", start=1, length=4)
        >>> [schedule(epoch) for epoch in range(7)]
        [0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    """

    weight: float
    ramp: Ramp = "constant"
    start: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ValueError(f"`weight` must be finite and not negative, got {self.weight}.")
        if self.ramp not in get_args(Ramp):
            raise ValueError(f"`ramp` must be one of {get_args(Ramp)}, got {self.ramp!r}.")
        for argument, value in {"start": self.start, "length": self.length}.items():
            if value < 0:
                raise ValueError(f"`{argument}` must not be negative, got {value}.")
        if self.ramp != "constant" and not self.length:
            raise ValueError(
                f"`length` must be at least 1 for a {self.ramp} ramp, got {self.length}."
            )

    def __call__(self, epoch: int) -> float:
        """Return the weight in ``epoch``, counted from 0."""
        if epoch < self.start:
            return 0.0
        if self.ramp == "constant":
            return float(self.weight)
        T = min(1.0, (epoch - self.start) / self.length)
        factor = T
        if self.ramp != "linear":
            factor = math.exp(-5 * (1 - T) ** 2)
        return self.weight * factor


class Regularizer(nn.Module):
    """A penalty to add to a loss, in any training loop.

    A subclass computes its objective in ``forward`` and returns :meth:`penalty`. The forward's
    ``epoch`` drives the weight's schedule. With a weight of 0 the penalty is a constant zero, and
    training is what it is without.

    Args:
        weight: Factor of the penalty, or a :class:`WeightSchedule`.
        argument: What the subclass calls it.

    Example:
        >>> class Small(Regularizer):
        ...     def forward(self, outputs, *, epoch=0):
        ...         return self.penalty(outputs.square().mean(), self.schedule(epoch))
        >>> Small(0.5)(torch.full((2, 2), 2.0))
        tensor(2.)
    """

    _looked = False  # at the first call's arguments, for what goes wrong without an error

    def __init__(self, weight: float | WeightSchedule, *, argument: str = "weight") -> None:
        super().__init__()
        if not isinstance(weight, WeightSchedule):
            if not hasattr(weight, "__float__"):
                raise TypeError(
                    f"`{argument}` must be a number or a WeightSchedule, got {weight!r}."
                )
            if not 0 <= weight < math.inf:
                raise ValueError(f"`{argument}` must be finite and not negative, got {weight!r}.")
            weight = WeightSchedule(float(weight))
        self.schedule = weight
        self.value: Tensor | None = None
        """What the last call measured, before the weight; ``None`` before the first, and where nothing was measured."""
        self.weight = 0.0
        """The weight of the last call."""

    def penalty(self, objective: Tensor, weight: float, value: Tensor | None = None) -> Tensor:
        """Return ``weight * objective`` and remember ``value`` (by default the objective) for logging."""
        self.value = (objective if value is None else value).detach()
        self.weight = weight
        return weight * objective if weight else self.nothing(objective)

    def _first_look(self, outputs: Tensor) -> bool:
        """Whether this is the first call; outputs that look like probabilities are warned about in it."""
        if self._looked:
            return False
        self._looked = True
        if look_like_probabilities(outputs):
            warn(
                "`outputs` should be logits, got what looks like probabilities: rows without negative values that sum "
                "to 1. Leave the softmax out, or pass the logarithms."
            )
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Regularizer":
        """Follow to other devices, but keep the precision: ``precision="bf16-true"`` is meant for the network."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if result.dtype == tensor.dtype:
                return result
            return tensor.to(result.device)

        return super()._apply(moved, recurse)

    def nothing(self, like: Tensor) -> Tensor:
        """Return a zero to add, without a graph."""
        return torch.zeros((), device=like.device, dtype=like.dtype)


def checked_shape(input_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one input as a tuple, or say what is wrong with it."""
    rule = "the sizes of one input, such as (1, 28, 28)"
    whole = isinstance(input_shape, Sequence) and all(isinstance(s, int) for s in input_shape)
    if not whole:
        raise TypeError(f"`input_shape` must be {rule}, got {input_shape!r}.")
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"`input_shape` must be {rule}, got {input_shape!r}.")
    return tuple(input_shape)


def check_rows(
    argument: str,
    tensor: object,
    row_shape: tuple[int, ...] | None = None,
    *,
    rows: int | None = None,
    minimum: int = 2,
) -> Tensor:
    """Return ``tensor`` if it holds ``rows`` rows (or at least ``minimum``) of shape ``row_shape``.

    Raises:
        ValueError: If it is no tensor, its rows have another shape, or it has another number of
            them.
    """
    if not isinstance(tensor, Tensor):
        found = type(tensor).__name__
        raise ValueError(
            f"`{argument}` must be a tensor, got {found}: does the batch hold unlabeled inputs?"
        )
    shape = tuple(tensor.shape)
    if row_shape is not None and (shape[1:] != row_shape or rows not in (None, len(tensor))):
        expected = ", ".join([str(rows or "B"), *map(str, row_shape)])
        raise ValueError(f"`{argument}` must have shape [{expected}], got {shape}.")
    if len(tensor) < minimum:
        raise ValueError(
            f"`{argument}` must hold at least {minimum} samples, got {len(tensor)}: use a larger batch, or drop the "
            "last incomplete one (`drop_last=True`)."
        )
    return tensor


def check_scalar(argument: str, tensor: object) -> None:
    """Raise ``ValueError`` if ``tensor`` is no tensor, or has a shape."""
    if not isinstance(tensor, Tensor) or tensor.ndim:
        raise ValueError(f"`{argument}` must be a scalar tensor, got {shape_or_kind(tensor)}.")


def shape_or_kind(x: object) -> tuple[int, ...] | str:
    """Return the shape of a tensor, and the type's name of anything else, for a message."""
    if isinstance(x, Tensor):
        return tuple(x.shape)
    return type(x).__name__
