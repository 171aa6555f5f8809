"""The trace of the Fisher information from squared gradient norms, over samples and processes."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from lightning_taskinfo._layers import layer_of
from lightning_taskinfo._observe import ParamDict


class TraceSums(NamedTuple):
    """The trace from squared gradient norms, as sums that add up over processes.

    Attributes:
        names: Names of the parameters.
        sums: Squared norms summed over samples by parameter, the sum of each sample's squared total, and the number of
            samples. Numbers: at every step, operations on tensors of one would cost more than all else.

    Example:
        >>> norms = {"head.weight": torch.tensor([1.0, 2.0]), "head.bias": torch.tensor([1.0, 0.0])}
        >>> TraceSums.of(norms).compute()
        (2.0, 0.0, {'head': 2.0})
    """

    names: list[str]
    sums: list[float]

    @classmethod
    def of(cls, norms: ParamDict, scale: float = 1.0) -> "TraceSums":
        """Add up the samples of this process.

        Args:
            norms: Squared gradient norms by parameter name, each ``[N]``; ``N`` may be 0.
            scale: What they are multiplied by.
        """
        stacked = torch.stack([*norms.values()])  # [parameters, N]
        if stacked.numel() > 1024:
            stacked = stacked.cpu().double()
            totals, squares = stacked.sum(1).tolist(), stacked.sum(0).square().sum().item()
        else:  # as at every step of a training, where operations on tensors so small would cost more than all else
            rows = stacked.tolist()
            samples = [sum(column) for column in zip(*rows, strict=True)]
            totals, squares = [sum(row) for row in rows], sum(total * total for total in samples)
        return cls([*norms], [*(scale * total for total in totals), scale * scale * squares, stacked.shape[1]])

    def compute(self, group_fn: Callable[[str], str] = layer_of) -> tuple[float, float, dict[str, float]]:
        """Return the trace, its standard error over samples, and the trace by layer.

        Args:
            group_fn: The layer that a parameter of this name counts for.
        """
        *totals, squares, n = self.sums
        trace, layers = sum(totals) / n, dict[str, float]()
        for name, part in zip(self.names, totals, strict=True):
            owner = group_fn(name)
            layers[owner] = layers.get(owner, 0.0) + part / n
        error = (max(squares - n * trace * trace, 0.0) / (n - 1) / n) ** 0.5 if n > 1 else math.nan
        return trace, error, layers
