r"""What each operation contributes: per-sample gradients of its weights from its inputs and its output gradients.

A *use* is one weight in one operation of a graph where it meets the samples. With the operation's
input :math:`a_n` and the gradient :math:`b_n` of sample :math:`n`'s log-likelihood by its output,
the gradient of the weight follows without another backward pass, and often its squared norm without
forming it (Goodfellow, *Efficient per-example gradient computations*, 2015).
:mod:`~lightning_taskinfo.fisher.readers` finds both in an autograd graph.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lightning_taskinfo._observe import at_least_float32
from lightning_taskinfo.fisher.graph import Edge, pulled_to_weight

BLOCK = 1 << 21  # elements of per-sample gradients formed at once: 8 MB in float32
FEW = 4096  # elements of a gradient up to which samples are squared together rather than one by one


@dataclass(frozen=True, eq=False)
class Rows:
    """Which sample each row of a tensor belongs to; a row is a slice along one axis.

    Attributes:
        axis: The axis of the rows, after ``merged`` leading axes were made one.
        repeat: Rows of one sample.
        interleaved: Whether samples take turns, rather than having their rows next to each other.
        merged: How many leading axes are read as one.
        index: Row numbers ``[N, repeat]`` where there is no such order; the number of rows stands
            for no row.
        chosen: The samples that are measured.
    """

    axis: int = 0
    repeat: int = 1
    interleaved: bool = False
    merged: int = 1
    index: Tensor | None = None
    chosen: slice = field(default_factory=lambda: slice(None))

    def rows_first(self, x: Tensor) -> Tensor:
        """Return ``x`` with its rows along axis 0."""
        if self.merged > 1:
            x = x.flatten(0, self.merged - 1)
        return x.movedim(self.axis, 0) if self.axis else x

    def samples_first(self, x: Tensor) -> Tensor:
        """Return ``x`` as ``[N, repeat, ...]``."""
        return self.by_sample(self.rows_first(x))

    def by_sample(self, rows: Tensor) -> Tensor:
        """Return rows along axis 0 as ``[N, repeat, ...]``."""
        if self.index is not None:
            padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
            return padded[self.index[self.chosen]]
        if self.interleaved:
            return rows.unflatten(0, (self.repeat, -1)).transpose(0, 1)[self.chosen]
        return rows.unflatten(0, (-1, self.repeat))[self.chosen]


@dataclass
class Use:
    """One weight in one operation.

    ``shape`` is the weight's, and ``rows`` says which samples the rows of the operation's output
    belong to. Output gradients are *arranged* once, with the samples first; everything else is made
    of arranged ones.
    """

    shape: tuple[int, ...]
    rows: Rows = field(default_factory=Rows, kw_only=True)

    def fits(self) -> bool:
        """Whether gradients can be computed for rows like these."""
        return True

    def arranged(self, b: Tensor) -> Tensor:
        """Return the gradients by the operation's output with the samples first, ``[N, ...]``."""
        raise NotImplementedError

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        """Return the gradients of some samples, ``[n, *shape]``, from arranged ones of all."""
        raise NotImplementedError

    def norms(self, scores: list[Tensor]) -> Tensor:
        """Return the squared norm of each sample's gradient, summed over scores, shape ``[N]``."""
        return torch.cat(
            [
                total(squared_norms(self.gradients(b, samples)) for b in scores)
                for samples in self.blocks(len(scores[0]))
            ]
        )

    def diagonal(self, scores: list[Tensor]) -> Tensor:
        """Return the squared gradients, summed over samples and scores, shaped like the weight."""
        return sum_of_squares(
            self.gradients(b, samples) for samples in self.blocks(len(scores[0])) for b in scores
        )

    def blocks(self, n: int) -> Iterator[slice]:
        """Yield a few of ``n`` samples at a time, so that little memory is needed."""
        step = max(1, BLOCK // max(1, self.elements))
        return (slice(i, i + step) for i in range(0, n, step))

    @property
    def elements(self) -> int:
        """How many numbers are needed to form the gradient of one sample."""
        return math.prod(self.shape)


@dataclass
class Product(Use):
    r"""A matrix that rows are multiplied by, :math:`\nabla W = \sum_t b_t a_t^\top` over the rows of a sample.

    ``inputs`` are the rows, on the ``axis`` on which the output has them. The matrix is ``[C, D]``,
    or ``[D, C]`` where it is ``turned``. There may be several such matrices, and inputs
    ``[G, ..., ...]``, in one ``grouped`` product.
    """

    inputs: Tensor
    axis: int = 0
    turned: bool = False
    grouped: bool = False

    def fits(self) -> bool:
        return self.rows.merged == 1 and self.rows.axis == self.axis

    def arranged(self, b: Tensor) -> Tensor:
        """Return inputs or output gradients as ``[N, G, T, D]``."""
        x = self.rows.samples_first(b)
        return x.transpose(1, 2) if self.grouped else x.reshape(len(x), 1, -1, x.shape[-1])

    @cached_property
    def a(self) -> Tensor:
        """The arranged inputs."""
        return self.arranged(at_least_float32(self.inputs))

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        product = b[samples].mT @ self.a[samples]  # [n, G, C, D]
        return (product.mT if self.turned else product).reshape(-1, *self.shape)

    def norms(self, scores: list[Tensor]) -> Tensor:
        a = self.a.flatten(0, 1)
        by_group = total(product_norms(b.flatten(0, 1), a) for b in scores)
        return by_group.view(len(self.a), -1).sum(1)

    def diagonal(self, scores: list[Tensor]) -> Tensor:
        if self.a.shape[1:3] != (1, 1):
            return super().diagonal(scores)
        squares = total(b[:, 0, 0].square() for b in scores)  # of one row: (b aᵀ)² = b² (a²)ᵀ
        product = squares.T @ self.a[:, 0, 0].square()
        return (product.T if self.turned else product).reshape(self.shape)


@dataclass
class Elementwise(Use):
    r"""``x ⊙ w`` or ``x + w`` with ``w`` broadcast over samples: scales, shifts and biases.

    ``aligned`` is the weight's shape as it meets the output's axes; ``factor`` returns what the
    weight is multiplied by (a function, so that it is computed only when it is needed). A real
    weight that meets a complex tensor has the gradient ``Re(b · conj(factor))``.
    """

    aligned: list[int]
    factor: Callable[[], Tensor] | None = None
    scale: float = 1
    is_complex: bool = False

    def fits(self) -> bool:
        axis, merged = self.rows.axis, self.rows.merged
        return not (merged > 1 and axis) and set(self.aligned[axis : axis + merged]) == {1}

    def arranged(self, b: Tensor) -> Tensor:
        """Return the gradients of the weight."""
        product = b if self.factor is None else b * self.factor().conj()
        if product.is_complex() and not self.is_complex:
            product = product.real
        others = list(self.aligned)
        del others[self.rows.axis : self.rows.axis + self.rows.merged]
        product = self.rows.samples_first(product)
        summed = [axis for axis, size in enumerate([1, *others], start=1) if size == 1]
        gradients = product.sum(summed).reshape(-1, *self.shape)
        return gradients if self.scale == 1 else gradients * self.scale

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        return b[samples]

    def blocks(self, n: int) -> Iterator[slice]:
        yield slice(None)  # they are there already


@dataclass
class Embedding(Use):
    """Rows of a table: a sample's gradient adds the output gradients of equal indices, before squaring."""

    index: Tensor
    padding_idx: int | None = None

    def fits(self) -> bool:
        return self.rows.axis + self.rows.merged <= self.index.dim()

    @cached_property
    def tokens(self) -> Tensor:
        """The indices, ``[N, T]``."""
        return self.rows.samples_first(self.index).flatten(1)

    def arranged(self, b: Tensor) -> Tensor:
        """Return gradients ``[N, T, D]``, zero where a lookup does not count."""
        b = self.rows.samples_first(b)
        b = b.reshape(*self.tokens.shape, b.shape[-1])
        if self.padding_idx is None:
            return b
        return b.masked_fill((self.tokens == self.padding_idx).unsqueeze(-1), 0)

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        b = b[samples]
        return self.add_to(b.new_zeros(len(b), *self.shape), b, samples)

    def add_to(self, gradients: Tensor, b: Tensor, samples: slice) -> Tensor:
        """Add the gradients of some samples to those ``[n, V, D]`` of other uses."""
        tokens = self.tokens[samples]
        first = torch.arange(len(tokens), device=b.device).unsqueeze(1) * self.shape[0]
        flat = gradients.view(-1, self.shape[1])
        flat.index_add_(0, (first + tokens).flatten(), b.flatten(0, 1))
        return gradients

    def norms(self, scores: list[Tensor]) -> Tensor:
        norms = scores[0].new_zeros(len(scores[0]))
        for sample, _, gradients in map(self._by_token, scores):
            norms.index_add_(0, sample, squared_norms(gradients))
        return norms

    def diagonal(self, scores: list[Tensor]) -> Tensor:
        squares = scores[0].new_zeros(self.shape)
        for _, token, gradients in map(self._by_token, scores):
            squares.index_add_(0, token, gradients.square())
        return squares

    def _by_token(self, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sample, token and summed gradient ``[pairs, D]`` of every pair of them that occurs."""
        table = self.shape[0]
        first = torch.arange(len(b), device=b.device).unsqueeze(1) * table
        pairs, where = (first + self.tokens).unique(return_inverse=True)
        summed = b.new_zeros(len(pairs), b.shape[-1])
        summed.index_add_(0, where.flatten(), b.flatten(0, 1))
        return pairs // table, pairs % table, summed


@dataclass
class Other(Use):
    """Any other operation: its own backward pass, for the part of the gradient that belongs to one sample.

    ``output`` is where the operation's output is in the graph, ``source`` where its weight is.
    """

    output: Edge
    source: Edge
    output_shape: torch.Size

    def arranged(self, b: Tensor) -> Tensor:
        return self.rows.samples_first(b)

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        count, *others = self._rows_first_shape
        numbers, b = self._numbers[samples], b[samples]  # [n, repeat], [n, repeat, ...]
        parts = b.new_zeros(len(b), count + 1, *others)  # one row more, for no row
        sample = torch.arange(len(b), device=b.device).unsqueeze(1)
        parts[sample, numbers] = b
        parts = parts[:, :-1].movedim(1, self.rows.axis + 1)
        parts = parts.reshape(len(b), *self.output_shape)
        return pulled_to_weight(self.output, self.source, parts)

    @property
    def elements(self) -> int:
        return max(self.output_shape.numel(), math.prod(self.shape))

    @cached_property
    def _rows_first_shape(self) -> torch.Size:
        return self.rows.rows_first(torch.empty(self.output_shape, device="meta")).shape

    @cached_property
    def _numbers(self) -> Tensor:
        """The number of each row of each sample, ``[N, repeat]``."""
        if self.rows.index is not None:
            return self.rows.index[self.rows.chosen]
        like = self.output.node._input_metadata[0]
        return self.rows.by_sample(torch.arange(self._rows_first_shape[0], device=like.device))


def product_norms(b: Tensor, a: Tensor) -> Tensor:
    """Return the squared norms of ``bᵀ a``, of ``[N, T, C]`` and ``[N, T, D]``; formed only where that is cheaper."""
    positions, wide, high = a.shape[1], a.shape[2], b.shape[2]
    if positions == 1:
        return squared_norms(a) * squared_norms(b)
    if positions * (wide + high) < wide * high:  # ghost norm: Σ_{t,s} (a_t·a_s)(b_t·b_s)
        return ((a @ a.mT) * (b @ b.mT)).sum((1, 2))
    step = max(1, BLOCK // (wide * high))
    pairs = zip(b.split(step), a.split(step), strict=True)
    return torch.cat([squared_norms(y.mT @ x) for y, x in pairs])


def squared_norms(x: Tensor) -> Tensor:
    """Return the squared norm of each row ``[N, ...]``, shape ``[N]``."""
    if x.dim() == 1:  # of a parameter that is one number
        return x.square()
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))).square_()


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Add the squares of gradients ``[n, *shape]`` of all samples and scores, with no copy of large ones."""
    squares: Tensor | None = None
    for some in gradients:
        if squares is None:
            squares = torch.zeros_like(some[0])
        if squares.numel() < FEW:
            squares += some.square().sum(0)
        else:
            for g in some:
                squares.addcmul_(g, g)
    assert squares is not None
    return squares


def total(parts: Iterable[Tensor]) -> Tensor:
    """Add tensors of one shape, into the first."""
    iterator = iter(parts)
    first = next(iterator)
    for part in iterator:
        first.add_(part)
    return first
