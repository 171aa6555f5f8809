"""What regularizers share: a weight by epoch, a memory of the last value, checks, and collectives over ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_taskinfo._ranges import check_choice, check_not_negative
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
        check_not_negative(weight=self.weight, start=self.start, length=self.length)
        check_choice(get_args(Ramp), ramp=self.ramp)
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
        if self.ramp == "linear":
            return self.weight * T
        return self.weight * math.exp(-5 * (1 - T) ** 2)


Weight = float | WeightSchedule


class Regularizer(nn.Module):
    """A penalty to add to a loss, in any training loop.

    A subclass computes its objective in ``forward`` and returns :meth:`penalty`. The forward's
    ``epoch`` drives the weight's schedule. With a weight of 0 the penalty is a constant zero, and
    training is what it is without.

    Args:
        weight: Factor of the penalty, or a :class:`WeightSchedule`.

    Example:
        >>> class Small(Regularizer):
        ...     def forward(self, outputs, *, epoch=0):
        ...         return self.penalty(outputs.square().mean(), self.schedule(epoch))
        >>> Small(0.5)(torch.full((2, 2), 2.0))
        tensor(2.)
    """

    _looked = False  # at the first call's arguments, for what goes wrong without an error

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        if not isinstance(weight, WeightSchedule):
            weight = WeightSchedule(weight)
        self.schedule = weight
        self.value: Tensor | None = None
        """What the last call measured, before the weight; ``None`` before the first, and where nothing was measured."""
        self.weight = 0.0
        """The weight of the last call."""

    def penalty(self, objective: Tensor, weight: float, value: Tensor | None = None) -> Tensor:
        """Return ``weight * objective`` and remember ``value`` (by default the objective) for logging."""
        self.value = (objective if value is None else value).detach()
        self.weight = weight
        if not weight:
            return objective.new_zeros(())  # without a graph
        return weight * objective

    def first_look(self, outputs: Tensor) -> bool:
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


@contextmanager
def frozen_batchnorm_statistics(model: nn.Module) -> Iterator[None]:
    """Let forwards in train mode normalise by their own batch, without moving the running statistics.

    A forward on inputs of another task moves the statistics that evaluation uses towards that task.
    Where the penalty needs such a forward and the statistics should stay those of the labelled
    data, run it in here.

    Args:
        model: The module whose batch-norm layers are frozen for a while.

    Example:
        >>> net = nn.BatchNorm1d(2).train()
        >>> with frozen_batchnorm_statistics(net):
        ...     _ = net(torch.randn(8, 2) + 5)
        >>> net.running_mean, net.num_batches_tracked
        (tensor([0., 0.]), tensor(0))
    """
    tracking = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            tracking.append(module)
    try:
        for module in tracking:
            module.track_running_stats = False
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True


def checked_shape(input_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one input as a tuple, or say what is wrong with it."""
    if not input_shape or min(input_shape) < 1:
        raise ValueError(
            f"`input_shape` must be the sizes of one input, such as (1, 28, 28), got {input_shape!r}."
        )
    return tuple(input_shape)


def check_rows(
    argument: str,
    tensor: object,
    row_shape: Sequence[int],
    *,
    rows: int | None = None,
    minimum: int = 2,
) -> None:
    """Raise ``ValueError`` unless ``tensor`` holds ``rows`` rows (or at least ``minimum``) of shape ``row_shape``."""
    if not isinstance(tensor, Tensor):
        found = type(tensor).__name__
        raise ValueError(
            f"`{argument}` must be a tensor, got {found}: does the batch hold unlabeled inputs?"
        )
    count, *shape = tensor.shape
    if shape != [*row_shape] or rows not in (None, count):
        expected = [rows or "B", *row_shape]
        raise ValueError(
            f"`{argument}` must have shape [{', '.join(map(str, expected))}], got {tuple(tensor.shape)}."
        )
    if count < minimum:
        raise ValueError(
            f"`{argument}` must hold at least {minimum} samples, got {count}: use a larger batch, or drop the last "
            "incomplete one (`drop_last=True`)."
        )


def check_scalar(argument: str, tensor: object) -> None:
    """Raise ``ValueError`` if ``tensor`` is no tensor, or has a shape."""
    if not isinstance(tensor, Tensor) or tensor.ndim:
        found = getattr(tensor, "shape", type(tensor).__name__)
        raise ValueError(f"`{argument}` must be a scalar tensor, got {found}.")


def world_size() -> int:
    """Return the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def sum_over_ranks(*tensors: Tensor) -> list[Tensor]:
    """Return the sums over all ranks, without gradient, through one collective."""
    totals = [tensor.detach().contiguous() for tensor in tensors]
    if world_size() > 1:
        flat = parameters_to_vector(totals)
        dist.all_reduce(flat)
        vector_to_parameters(flat, totals)
    return totals


def mean_over_ranks(*tensors: Tensor) -> list[Tensor]:
    """Return the means over all ranks, without gradient, through one collective."""
    return [total / world_size() for total in sum_over_ranks(*tensors)]


def gather_rows(tensor: Tensor) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks; their numbers may differ."""
    if world_size() == 1:
        return tensor.detach()
    from torchmetrics.utilities.distributed import gather_all_tensors  # late: it takes a second

    return torch.cat(gather_all_tensors(tensor.detach()))
