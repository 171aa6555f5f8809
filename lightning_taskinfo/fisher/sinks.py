"""Where squared gradients go: norms of samples, the diagonal, or inner products."""

import math
from collections import defaultdict
from functools import reduce
from operator import mul

import torch
from torch import Tensor, nn

from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo.fisher.layers import Use, squared_norms

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
            self.total(name, squares)[slice(None) if rows is None else rows] += squares

    def total(self, name: str, like: Tensor) -> Tensor:
        """Return the sum so far, zeros at the start."""
        if name not in self.values:
            self.values[name] = torch.zeros(self.shapes[name], dtype=like.dtype, device=like.device)
        return self.values[name]


class Gram:
    """Inner products of the samples' gradients, from features kept a parameter at a time.

    What does not fit into ``room`` elements is ``postponed`` to another pass.
    """

    def __init__(self, n: int, wanted: set[str], room: int) -> None:
        self.n, self.wanted, self.room = n, wanted, room
        self.postponed: set[str] = set()
        self.kept: dict[tuple[str, str, int], list[tuple[Tensor, ...]]] = defaultdict(list)

    def add_use(self, name: str, samples: slice, use: Use, slot: str, gradients: list[Tensor]) -> None:
        if self._has_room(name, use.slots[slot].shape):
            for parts in use.features(slot, gradients[0]):
                for i, part in enumerate(parts):
                    self.kept[name, str(use.slots[slot].rows), i].append(part)

    def add_gradients(self, name: str, samples: slice, gradients: Tensor) -> None:
        if self._has_room(name, tuple(gradients.shape[1:])):
            self.kept[name, "", 0].append((gradients.flatten(1),))

    def _has_room(self, name: str, shape: tuple[int, ...]) -> bool:
        seen = any(name == key[0] for key in self.kept)
        if name in self.wanted and name not in self.postponed and not seen:
            self.room -= self.n * math.prod(shape)
            if self.room < 0 and self.kept:  # one parameter always fits
                self.postponed.add(name)
        return name in self.wanted and name not in self.postponed

    def add_to(self, gram: Tensor) -> None:
        """Add all inner products to ``gram``."""
        known: dict[tuple[int, ...], Tensor] = {}  # a layer's weight and bias have a factor in common
        for blocks in self.kept.values():
            factors = [*zip(*blocks, strict=True)]
            for factor in factors:
                key = tuple(map(id, factor))
                if key not in known:
                    known[key] = _inner_products(factor)
            gram += reduce(mul, [known[tuple(map(id, factor))] for factor in factors])


def _inner_products(blocks: tuple[Tensor, ...]) -> Tensor:
    """Return ``x xᵀ`` in float64 for ``x`` in blocks of rows, from products of a block of columns at a time."""
    n = sum(len(block) for block in blocks)
    gram = blocks[0].new_zeros(n, n, dtype=torch.float64)
    for columns in zip(*(block.split(COLUMNS, dim=1) for block in blocks), strict=True):
        x = columns[0] if len(columns) == 1 else torch.cat(columns)
        gram += x @ x.T
    return gram
