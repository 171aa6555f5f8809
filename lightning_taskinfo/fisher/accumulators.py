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
        self.kept: dict[str, list[tuple[slice, Features]]] = {}
        self.postponed: set[str] = set()

    def add(
        self,
        samples: slice,
        name: str,
        found: Gradients,
    ) -> None:
        if name not in self.wanted or name in self.postponed:
            return
        count = samples.stop - samples.start
        features = found.one_product() or (_flat(found, count),)
        if count == len(self.gram):
            self._count(features)
            return
        held = sum(x.numel() for x in features)
        expected = held * len(self.gram) // count
        too_many = self.held + expected > ROOM
        if self.kept and name not in self.kept and too_many:  # one parameter always fits
            self.postponed.add(name)
        else:
            self.held += held
            self.kept.setdefault(name, []).append((samples, features))

    def close(self) -> None:
        """Count what was kept, after the last sample; samples that no gradient reaches have zeros."""
        while self.kept:
            _, blocks = self.kept.popitem()
            if any(len(features) == 1 for _, features in blocks):
                blocks = [(samples, _multiplied(features)) for samples, features in blocks]
            _, like = blocks[0]
            n = len(self.gram)
            whole = [x.new_zeros(n, x.shape[1]) for x in like]
            for samples, features in blocks:
                for into, x in zip(whole, features, strict=True):
                    into[samples] = x
            self._count(tuple(whole))

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


def _flat(
    found: Gradients,
    n: int,
) -> Tensor:
    """Return the gradients of ``n`` samples as one matrix ``[n, weights]``."""
    rows: Tensor | None = None
    for some, gradients in found.formed():
        flat = gradients.unsqueeze(-1).flatten(1)
        if rows is None:
            rows = flat.new_empty(n, flat.shape[1])
        rows[some] = flat
    assert rows is not None
    return rows


def _multiplied(features: Features) -> Features:
    if len(features) == 1:
        return features
    left, right = features
    products = left.unsqueeze(2) * right.unsqueeze(1)
    return (products.flatten(1),)


def inner_products(x: Tensor) -> Tensor:
    """Return ``x xᵀ`` in float64, from products of a block of columns at a time."""
    n = len(x)
    gram = x.new_zeros(n, n, dtype=torch.float64)
    step = COLUMNS * max(1, BLOCK // n**2)  # of columns whose products are held at once
    for columns in x.split(step, dim=1):
        whole = columns.shape[1] // COLUMNS * COLUMNS
        blocks = columns[:, :whole].unflatten(1, (-1, COLUMNS)).transpose(0, 1)
        gram += torch.bmm(blocks, blocks.mT).sum(0, dtype=torch.float64)
        rest = columns[:, whole:]
        gram += rest @ rest.T
    return gram
