"""Where squared gradients go: norms of samples, the diagonal, or inner products."""

import math
from functools import reduce
from operator import mul

import torch
from torch import Tensor, nn

from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo.fisher.layers import BLOCK, Factor, Product, Use, squared_norms

COLUMNS = 1024  # of features multiplied at once in their own precision; these products are summed in float64


class Norms:
    """Squared gradient norms of each sample, by parameter, each ``[N]``."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.values: ParamDict = {}

    def add_use(self, name: str, samples: slice, use: Use, slot: str, gradients: list[Tensor]) -> None:
        self._add(name, samples, use.norms(slot, gradients))

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

    def add_use(self, name: str, samples: slice, use: Use, slot: str, gradients: list[Tensor]) -> None:
        self._add(name, use.diagonal(slot, gradients), use.slots[slot].rows)

    def add_gradients(self, name: str, samples: slice, gradients: Tensor) -> None:
        self._add(name, gradients.square().sum(0))

    def _add(self, name: str, squares: Tensor, rows: slice | None = None) -> None:
        if name not in self.values and rows is None:
            self.values[name] = squares
        else:
            self.total(name, squares)[... if rows is None else rows] += squares

    def total(self, name: str, like: Tensor) -> Tensor:
        """Return the sum so far, zeros at the start."""
        if name not in self.values:
            self.values[name] = torch.zeros(self.shapes[name], dtype=like.dtype, device=like.device)
        return self.values[name]


class Gram:
    """Inner products of the samples' gradients, from features kept until all samples of a parameter are there.

    What does not fit into ``room`` elements is ``postponed`` to another pass.
    """

    def __init__(self, gram: Tensor, wanted: set[str], room: int) -> None:
        self.gram, self.wanted, self.room = gram, wanted, room
        self.postponed: set[str] = set()
        self.reserved: dict[str, int] = {}
        self.kept: dict[tuple[str, str, int], tuple[tuple[Tensor, ...], int]] = {}  # with the number of samples there
        self.factors: list[tuple[Tensor, Tensor]] = []  # of the last product, with their inner products

    def add_use(self, name: str, samples: slice, use: Use, slot: str, gradients: list[Tensor]) -> None:
        if self._has_room(name, use.slots[slot].shape):
            for parts in use.features(slot, gradients[0]):
                for i, part in enumerate(parts):
                    self._keep((name, str(use.slots[slot].rows), i), part)

    def add_gradients(self, name: str, samples: slice, gradients: Tensor) -> None:
        if self._has_room(name, tuple(gradients.shape[1:])):
            self._keep((name, "", 0), (gradients.reshape(len(gradients), -1),))

    def unfinished(self) -> set[str]:
        """Return the parameters of which features of some samples are missing."""
        return {name for name, _, _ in self.kept}

    def _has_room(self, name: str, shape: tuple[int, ...]) -> bool:
        if name not in self.reserved and name in self.wanted - self.postponed:
            needed, unfinished = len(self.gram) * math.prod(shape), self.unfinished()
            if unfinished and needed + sum(self.reserved[other] for other in unfinished) > self.room:
                self.postponed.add(name)  # one parameter always fits
            else:
                self.reserved[name] = needed
        return name in self.reserved

    def _keep(self, key: tuple[str, str, int], part: tuple[Factor, ...]) -> None:
        n, filled = len(self.gram), part[0].shape[0]
        if filled == n:
            self._add(tuple(x.formed() if isinstance(x, Product) else x for x in part))
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
            self._add(whole)

    def _add(self, part: tuple[Tensor, ...]) -> None:
        products = [self._known(factor) for factor in part]
        self.gram += reduce(mul, products)
        if len(part) > 1:  # the bias that follows a weight has one of them
            self.factors = [*zip(part, products, strict=True)]

    def _known(self, factor: Tensor) -> Tensor:
        for known, products in self.factors:
            if known is factor:
                return products
        return inner_products(factor)


def inner_products(x: Tensor) -> Tensor:
    """Return ``x xᵀ`` in float64, from products of a block of columns at a time; one of its corners is mirrored."""
    n, whole = len(x), x.shape[1] // COLUMNS * COLUMNS
    rest, half = x[:, whole:], n // 2
    gram = (rest @ rest.T).double()
    step = COLUMNS * max(1, BLOCK // n**2)  # of columns whose products are held at once
    for start in range(0, whole, step):
        part = x[:, start : min(start + step, whole)].unflatten(1, (-1, COLUMNS)).transpose(0, 1)
        for first, last in ((0, half), (half, n)):
            gram[first:last, first:] += torch.bmm(part[:, first:last], part[:, first:].mT).sum(0, dtype=torch.float64)
    gram[half:, :half] = gram[:half, half:].T
    return gram
