"""What is made of the gradients: norms of samples, the diagonal, inner products; and from norms to a trace."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_taskinfo._observe import ParamDict, layer_of
from lightning_taskinfo.fisher.ops import BLOCK
from lightning_taskinfo.fisher.terms import Gradients

Features = tuple[Tensor, ...]  # [n, D], or two whose products of a row are the gradient of a sample
ROOM = 128 * BLOCK  # elements of gradients that wait for those of other samples
COLUMNS = 1024  # of features multiplied at once in their own precision; these products are summed in float64


class Accumulator(Protocol):
    """Where gradients go: the quantity that is measured."""

    def add(
        self,
        samples: slice,
        name: str,
        found: Gradients,
    ) -> None:
        """Take the gradients of a parameter, for some samples and scores."""
        ...


@dataclass
class Norms:
    """Squared gradient norms of each of ``n`` samples, by parameter, each ``[n]``."""

    n: int
    values: ParamDict = field(default_factory=dict)

    def add(
        self,
        samples: slice,
        name: str,
        found: Gradients,
    ) -> None:
        norms = found.norms()
        if len(norms) == self.n and name not in self.values:
            self.values[name] = norms
            return
        if name not in self.values:
            self.values[name] = norms.new_zeros(self.n)
        self.values[name][samples] += norms


@dataclass
class Diagonal:
    """Squared gradients summed over samples, by parameter, each shaped like it."""

    values: ParamDict = field(default_factory=dict)

    def add(
        self,
        samples: slice,
        name: str,
        found: Gradients,
    ) -> None:
        squares = found.diagonal()
        if name in self.values:
            self.values[name] += squares
        else:
            self.values[name] = squares.contiguous()


@dataclass
class Gram:
    """Inner products ``[n, n]`` of the samples' gradients.

    They need all samples of a parameter at once. Gradients of chunks are kept, as two vectors where
    they are a product of these, and what does not fit into ``ROOM`` elements is ``postponed`` to
    another pass.
    """

    gram: Tensor
    wanted: set[str]

    def __post_init__(self) -> None:
        self.held = 0
        # By parameter: features of all samples, and how many of these are there.
        self.kept: dict[str, tuple[Features, int]] = {}
        self.postponed: set[str] = set()

    def add(
        self,
        samples: slice,
        name: str,
        found: Gradients,
    ) -> None:
        if name not in self.wanted or name in self.postponed:
            return
        pair = found.one_product()
        if pair is not None:
            self._keep(name, samples.start, pair)
            return
        for some, gradients in found.formed():
            flat = gradients.unsqueeze(-1).flatten(1)
            self._keep(name, samples.start + some.start, (flat,))

    def _keep(
        self,
        name: str,
        start: int,
        features: Features,
    ) -> None:
        """Keep features of some samples until there are those of all, which are counted."""
        n = len(self.gram)
        stop = start + len(features[0])
        if stop - start == n:
            self._count(features)
            return
        if name not in self.kept:
            needed = n * sum(x.shape[1] for x in features)
            if self.kept and self.held + needed > ROOM:  # one parameter always fits
                self.postponed.add(name)
            if name in self.postponed:
                return
            self.held += needed
            whole = tuple(x.new_empty(n, x.shape[1]) for x in features)
            self.kept[name] = whole, 0
        whole, done = self.kept.pop(name)
        if len(whole) != len(features):  # as where the last sample was a chunk of its own
            whole, features = _multiplied(whole), _multiplied(features)
        for into, x in zip(whole, features, strict=True):
            into[done:start] = 0  # no gradient has reached these
            into[start:stop] = x
        if stop < n:
            self.kept[name] = whole, stop
        else:
            self._count(whole)

    def close(self) -> None:
        """Count what was kept, after the last sample; samples that no gradient reaches have zeros."""
        for whole, done in self.kept.values():
            for x in whole:
                x[done:] = 0
            self._count(whole)
        self.kept.clear()

    def _count(self, features: Features) -> None:
        """Add the inner products; ``⟨b aᵀ, b′ a′ᵀ⟩ = (a·a′)(b·b′)`` where there are two vectors."""
        products = inner_products(features[0])
        for x in features[1:]:
            products *= inner_products(x)
        self.gram += products


class Trace(NamedTuple):
    """A trace, its standard error over samples (NaN for one sample), and the trace of each layer."""

    trace: float
    standard_error: float
    layers: dict[str, float]


class TraceSums(NamedTuple):
    """The trace from squared gradient norms, as sums that add up over batches and processes.

    Attributes:
        names: Names of the parameters.
        sums: Squared norms summed over samples by parameter, the sum of each sample's squared
            total, and the number of samples.

    Example:
        >>> norms = {"head.weight": torch.tensor([1.0, 2.0]), "head.bias": torch.tensor([1.0, 0.0])}
        >>> TraceSums.of(norms).compute()
        Trace(trace=2.0, standard_error=0.0, layers={'head': 2.0})
    """

    names: list[str]
    sums: list[float]

    @classmethod
    def of(
        cls,
        norms: ParamDict,
        scale: float = 1.0,
    ) -> "TraceSums":
        """Add up samples.

        Args:
            norms: Squared gradient norms by parameter name, each ``[N]``; ``N`` may be 0.
            scale: What they are multiplied by.
        """
        by_parameter = torch.stack([*norms.values()])  # [parameters, N]
        by_parameter = by_parameter.cpu().double() * scale
        of_parameters = by_parameter.sum(1).tolist()
        of_samples = by_parameter.sum(0)
        squares = of_samples.square().sum().item()
        return cls([*norms], [*of_parameters, squares, len(of_samples)])

    def compute(self, group_fn: Callable[[str], str] = layer_of) -> Trace:
        """Return the trace, its error, and the trace by layer.

        Args:
            group_fn: The layer that a parameter of this name counts for.
        """
        *totals, squares, n = self.sums
        trace = sum(totals) / n
        layers: dict[str, float] = {}
        for name, part in zip(self.names, totals, strict=True):
            owner = group_fn(name)
            layers[owner] = layers.get(owner, 0.0) + part / n
        if n < 2:
            return Trace(trace, math.nan, layers)
        deviations = max(squares - n * trace * trace, 0.0)
        variance = deviations / (n - 1)
        return Trace(trace, math.sqrt(variance / n), layers)


def _multiplied(features: Features) -> Features:
    if len(features) == 1:
        return features
    left, right = features
    products = left.unsqueeze(2) * right.unsqueeze(1)
    return (products.flatten(1),)


def inner_products(x: Tensor) -> Tensor:
    """Return ``x xᵀ`` in float64, from products of a block of columns at a time."""
    whole = x.shape[1] // COLUMNS * COLUMNS
    rest = x[:, whole:]
    gram = (rest @ rest.T).double()
    step = COLUMNS * max(1, BLOCK // len(x) ** 2)  # of columns whose products are held at once
    for start in range(0, whole, step):
        columns = x[:, start : min(start + step, whole)]
        blocks = columns.unflatten(1, (-1, COLUMNS)).transpose(0, 1)
        gram += torch.bmm(blocks, blocks.mT).sum(0, dtype=torch.float64)
    return gram
