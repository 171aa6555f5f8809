"""What is made of the gradients: norms of samples, the diagonal, inner products; and from norms to a trace."""

import math
from collections.abc import Callable
from functools import reduce
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_taskinfo._layers import layer_of
from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo.fisher.ops import BLOCK, Factor, Product, squared_norms
from lightning_taskinfo.fisher.terms import Contribution

COLUMNS = 1024  # of features multiplied at once in their own precision; these products are summed in float64


class Norms:
    """Squared gradient norms of each sample, by parameter, each ``[N]``."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.values: ParamDict = {}

    def add(self, name: str, samples: slice, contribution: Contribution) -> None:
        self._add(name, samples, contribution.norms())

    def add_gradients(self, name: str, samples: slice, gradients: Tensor) -> None:
        self._add(name, samples, squared_norms(gradients))

    def _add(self, name: str, samples: slice, norms: Tensor) -> None:
        if name not in self.values and len(norms) == self.n:
            self.values[name] = norms
            return
        if name not in self.values:
            self.values[name] = norms.new_zeros(self.n)
        self.values[name][samples] += norms


class Diagonal:
    """Squared gradients summed over samples, by parameter, each shaped like it."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.shapes = {name: p.shape for name, p in parameters.items()}
        self.values: ParamDict = {}

    def add(self, name: str, samples: slice, contribution: Contribution) -> None:
        self._add(name, contribution.diagonal())

    def add_gradients(self, name: str, samples: slice, gradients: Tensor) -> None:
        self._add(name, gradients.square().sum(0))

    def _add(self, name: str, squares: Tensor) -> None:
        if name in self.values:
            self.values[name] += squares
        else:
            self.values[name] = squares.contiguous()

    def total(self, name: str, like: Tensor) -> Tensor:
        """Return the sum so far, zeros at the start."""
        if name not in self.values:
            self.values[name] = torch.zeros(self.shapes[name], dtype=like.dtype, device=like.device)
        return self.values[name]


class Gram:
    """Inner products of the samples' gradients, from features kept until all samples of a parameter are there.

    What does not fit into ``room`` elements is ``postponed`` to another pass. Features are short where uses have
    factors; where chunks have different ones, parameters are left ``unfinished``, for a pass with ``formed`` gradients.
    """

    def __init__(self, gram: Tensor, wanted: set[str], room: int, formed: bool = False) -> None:
        self.gram = gram
        self.wanted = wanted
        self.room = room
        self.formed = formed
        self.whole: ParamDict = {}  # formed gradients of all samples
        self.found: ParamDict = {}  # inner products of parameters that are not complete
        self.postponed: set[str] = set()
        self.reserved: dict[str, int] = {}
        self.kept: dict[
            tuple[Any, ...], tuple[tuple[Tensor, ...], int]
        ] = {}  # with the number of samples there
        self.factors: list[
            tuple[Tensor, Tensor]
        ] = []  # of the last product, with their inner products

    def add(self, name: str, samples: slice, contribution: Contribution) -> None:
        if not self._has_room(name, tuple(contribution.shape)):
            return
        if self.formed:
            start = samples.start
            for gradients in contribution.gradients():
                self._write(name, start, gradients)
                start += len(gradients)
            return
        layout = contribution.layout
        if layout is None and samples.stop - samples.start < len(self.gram):
            for gradients in contribution.gradients():
                self._keep((name, "formed"), (gradients.reshape(len(gradients), -1),))
        else:
            for number, parts in contribution.features():
                for i, part in enumerate(parts):
                    widths = tuple(factor.shape[1] for factor in part)
                    key = (name, *(layout or ()), number, i, len(parts), widths)
                    self._keep((name, "formed") if layout == ("formed",) else key, part)
        self._finish(name)

    def add_gradients(self, name: str, samples: slice, gradients: Tensor) -> None:
        if not self._has_room(name, tuple(gradients.shape[1:])):
            return
        if self.formed:
            self._write(name, samples.start, gradients)
        else:
            self._keep((name, "formed"), (gradients.reshape(len(gradients), -1),))
            self._finish(name)

    def _write(self, name: str, start: int, gradients: Tensor) -> None:
        """Put formed gradients into the rows of their samples; samples that no gradient reaches keep zeros."""
        flat = gradients.reshape(len(gradients), -1)
        if name not in self.whole:
            self.whole[name] = flat.new_zeros(len(self.gram), flat.shape[1])
        self.whole[name][start : start + len(flat)] = flat

    def close(self) -> None:
        """Count formed gradients, after the last sample."""
        for rows in self.whole.values():
            self.gram += inner_products(rows)

    def unfinished(self) -> set[str]:
        """Return the parameters of which features of some samples are missing."""
        return {key[0] for key in self.kept}

    def _finish(self, name: str) -> None:
        """Count a parameter once all its parts have all samples."""
        if name in self.found and name not in self.unfinished():
            self.gram += self.found.pop(name)

    def _has_room(self, name: str, shape: tuple[int, ...]) -> bool:
        if name not in self.reserved and name in self.wanted - self.postponed:
            needed, unfinished = (
                len(self.gram) * math.prod(shape),
                self.unfinished() | self.whole.keys(),
            )
            if (
                unfinished
                and needed + sum(self.reserved[other] for other in unfinished) > self.room
            ):
                self.postponed.add(name)  # one parameter always fits
            else:
                self.reserved[name] = needed
        return name in self.reserved

    def _keep(self, key: tuple[Any, ...], part: tuple[Factor, ...]) -> None:
        n, filled = len(self.gram), part[0].shape[0]
        if filled == n:
            self._add(key[0], tuple(x.formed() if isinstance(x, Product) else x for x in part))
            return
        if key not in self.kept:  # room for all samples, so that no block is held twice
            some = part[0].left if isinstance(part[0], Product) else part[0]
            self.kept[key] = tuple(some.new_empty(n, x.shape[1]) for x in part), 0
        whole, start = self.kept.pop(key)
        filled += start
        for x, block in zip(whole, part, strict=True):
            if isinstance(block, Product):
                block.write(x[start:filled])
            else:
                x[start:filled] = block
        if filled < n:
            self.kept[key] = whole, filled
        else:
            self._add(key[0], whole)

    def _add(self, name: str, part: tuple[Tensor, ...]) -> None:
        products = [self._known(factor) for factor in part]
        product = reduce(mul, products)
        self.found[name] = self.found[name] + product if name in self.found else product
        if len(part) > 1:  # the bias that follows a weight has one of them
            self.factors = [*zip(part, products, strict=True)]

    def _known(self, factor: Tensor) -> Tensor:
        for known, products in self.factors:
            if known is factor:
                return products
        return inner_products(factor)


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
        return cls(
            [*norms],
            [*(scale * total for total in totals), scale * scale * squares, stacked.shape[1]],
        )

    def compute(
        self, group_fn: Callable[[str], str] = layer_of
    ) -> tuple[float, float, dict[str, float]]:
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


def inner_products(x: Tensor) -> Tensor:
    """Return ``x xᵀ`` in float64, from products of a block of columns at a time; one of its corners is mirrored."""
    n, whole = len(x), x.shape[1] // COLUMNS * COLUMNS
    rest, half = x[:, whole:], n // 2
    gram = (rest @ rest.T).double()
    step = COLUMNS * max(1, BLOCK // n**2)  # of columns whose products are held at once
    for start in range(0, whole, step):
        part = x[:, start : min(start + step, whole)].unflatten(1, (-1, COLUMNS)).transpose(0, 1)
        for first, last in ((0, half), (half, n)):
            gram[first:last, first:] += torch.bmm(part[:, first:last], part[:, first:].mT).sum(
                0, dtype=torch.float64
            )
    gram[half:, :half] = gram[:half, half:].T
    return gram
