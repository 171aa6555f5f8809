r"""What each operation contributes: per-sample gradients of its weights from its inputs and its output gradients.

A *use* is one operation of a graph in which a weight meets the samples. With the operation's input :math:`a_n` and the
gradient :math:`b_n` of sample :math:`n`'s log-likelihood by its output, the gradient of each weight follows without
another backward pass, and often its squared norm without forming it (Goodfellow, *Efficient per-example gradient
computations*, 2015). The readers at the end of this file find input and options of an operation in its autograd node.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_taskinfo.fisher.vjp import batched_vjp

BLOCK = 1 << 21  # elements of per-sample gradients formed at once: 8 MB in float32


class Slot(NamedTuple):
    """A weight's part in a use: its name, and its shape there."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Rows:
    """Which sample each row of a tensor belongs to; a row is a slice along one axis.

    Attributes:
        axis: The axis of the rows, after ``merged`` leading axes were made one.
        repeat: Rows of one sample.
        interleaved: Whether samples take turns, rather than having their rows next to each other.
        merged: How many leading axes are read as one.
        index: Row numbers ``[N, repeat]`` where there is no such order; the number of rows stands for no row.
    """

    axis: int = 0
    repeat: int = 1
    interleaved: bool = False
    merged: int = 1
    index: Tensor | None = None

    @property
    def one_each(self) -> bool:
        """Whether row ``n`` of axis 0 is sample ``n``."""
        return self.axis == 0 and self.in_order

    @property
    def in_order(self) -> bool:
        """Whether row ``n`` is sample ``n``, on any axis."""
        return self.repeat == 1 and self.index is None and self.merged == 1

    def samples_first(self, x: Tensor) -> Tensor:
        """Return ``x`` as ``[N, ...]``, or as ``[N, repeat, ...]`` where rows are not just samples."""
        x = self.rows_first(x)
        if self.index is not None:
            padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
            return padded[self.index]
        if self.repeat == 1:
            return x
        if self.interleaved:
            return x.unflatten(0, (self.repeat, -1)).transpose(0, 1)
        return x.unflatten(0, (-1, self.repeat))

    def rows_first(self, x: Tensor) -> Tensor:
        """Return ``x`` with its rows along axis 0."""
        if self.merged > 1:
            x = x.flatten(0, self.merged - 1)
        return x.movedim(self.axis, 0) if self.axis else x

    @property
    def next_to_each_other(self) -> bool:
        """Whether the rows of a sample, and then those of the next one, follow on axis 0."""
        return self.axis == 0 and self.merged == 1 and self.index is None and not self.interleaved

    def of(self, samples: slice, rows: int, device: torch.device) -> "Rows":
        """Return the rows of some samples, of so many ``rows`` of all."""
        index = self.index
        if index is None:
            numbers = torch.arange(rows, device=device)
            index = (
                numbers.view(self.repeat, -1).T
                if self.interleaved
                else numbers.view(-1, self.repeat)
            )
        return replace(self, interleaved=False, index=index[samples])

    @property
    def extra(self) -> int:
        """Axes that :meth:`samples_first` puts behind the samples."""
        return int(self.repeat > 1 or self.index is not None)


class Product(NamedTuple):
    """Gradients ``[n, O·W]`` that are not formed yet: the batched product of ``[n, O, P]`` and ``[n, P, W]``."""

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of the gradients."""
        return self.left.shape[0], self.left.shape[1] * self.right.shape[2]

    def formed(self) -> Tensor:
        """Return the gradients."""
        return torch.bmm(self.left, self.right).flatten(1)

    def write(self, into: Tensor) -> None:
        """Form the gradients where they are wanted, in rows without gaps."""
        torch.bmm(self.left, self.right, out=into.unflatten(1, (self.left.shape[1], -1)))


Factor: TypeAlias = Tensor | Product


@dataclass
class Use:
    """One operation: the weights in it, the shape of its output, and what it read.

    ``config`` has the options of the operation, ``rows`` says which samples the rows of its output belong to.
    """

    slots: dict[str, Slot]
    shape: torch.Size
    saved: tuple[Tensor, ...]
    config: dict[str, Any] = field(default_factory=dict)
    rows: Rows = field(default_factory=Rows)

    def fits(self) -> bool:
        """Whether this kind of use can be computed for rows like these."""
        return True

    def grads(self, slot: str, b: Tensor) -> Tensor:
        """Return the gradient of each sample, shape ``[N, *slot.shape]``."""
        raise NotImplementedError

    def blocks(self, slot: str, b: Tensor) -> Iterator[Tensor]:
        """Yield the gradients of a few samples at a time, so that little memory is needed."""
        yield self.grads(slot, b)

    def norms(self, slot: str, scores: list[Tensor]) -> Tensor:
        """Return the squared norm of each sample's gradient, summed over scores, shape ``[N]``."""
        return total(torch.cat([squared_norms(g) for g in self.blocks(slot, b)]) for b in scores)

    def diagonal(self, slot: str, scores: list[Tensor]) -> Tensor:
        """Return the squared gradients, summed over samples and scores, shaped like the slot."""
        return total(g.square().sum(0) for b in scores for g in self.blocks(slot, b))

    def features(self, slot: str, b: Tensor) -> Iterator[list[tuple[Factor, ...]]]:
        """Yield blocks of samples as parts, whose inner products add up to those of the gradients.

        A part is a tuple of factors ``[n, D]``: the product of their inner products counts.
        """
        for gradients in self.blocks(slot, b):
            yield [(gradients.reshape(len(gradients), -1),)]


class Linear(Use):
    r"""A matrix product on rows ``[..., D]``: with several a sample, :math:`\nabla W = \sum_t b_t a_t^\top`.

    ``config["transposed"]`` says that the weight is ``[D, C]`` rather than ``[C, D]``, ``config["axis"]`` on which axis
    of the output the rows must be.
    """

    shared: tuple[list[Tensor], Tensor] | None = (
        None  # scores, and what weight and bias make of them alike
    )

    def fits(self) -> bool:
        return self.rows.merged == 1 and self.rows.axis == self.config["axis"]

    def _once(self, scores: list[Tensor], make: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Return what ``make`` returns for the scores, made for the weight and kept for the bias."""
        if self.shared is None or self.shared[0] is not scores:
            self.shared = scores, make([self.flat(b) for b in scores])
        return self.shared[1]

    def flat(self, x: Tensor) -> Tensor:
        """Return rows of inputs or gradients as ``[N, D]``, or ``[N, T, D]`` where a sample has several."""
        if x.dim() > 2 or not self.rows.one_each:
            x = self.rows.samples_first(x)
        return x.flatten(1, -2) if x.dim() > 2 else x

    def inputs(self) -> Tensor:
        """Return the inputs as ``[N, D]``, or ``[N, T, D]`` where there are several positions."""
        return self.flat(self.saved[0])

    def _turned(self, gradients: Tensor) -> Tensor:
        """Return ``[..., C, D]`` as the weight has it."""
        return gradients.mT if self.config.get("transposed") else gradients

    def grads(self, slot: str, b: Tensor) -> Tensor:
        b = self.flat(b)
        if slot == "bias":
            return (b if b.dim() == 2 else b.sum(1)).reshape(-1, *self.slots[slot].shape)
        return self._turned(_outer(b, self.inputs()))

    def blocks(self, slot: str, b: Tensor) -> Iterator[Tensor]:
        if slot == "bias":
            yield self.grads(slot, b)
            return
        a, b = self.inputs(), self.flat(b)
        step = max(1, BLOCK // math.prod(self.slots[slot].shape))
        for i in range(0, len(a), step):
            yield self._turned(_outer(b[i : i + step], a[i : i + step]))

    def norms(self, slot: str, scores: list[Tensor]) -> Tensor:
        if slot == "bias" and self.flat(scores[0]).dim() > 2:
            return super().norms(slot, scores)
        if slot == "bias" or self.inputs().dim() == 2:
            norms = self._once(scores, lambda flat: total([squared_norms(b) for b in flat]))
            return norms * squared_norms(self.inputs()) if slot == "weight" else norms.clone()
        a = self.inputs()
        return total(product_norms(self.flat(b), a) for b in scores)

    def features(self, slot: str, b: Tensor) -> Iterator[list[tuple[Factor, ...]]]:
        if slot == "bias":
            yield from super().features(slot, b)
            return
        a = self.inputs()
        if a.dim() > 2:
            yield [(Product(self.flat(b).transpose(1, 2), a),)]
        else:  # ⟨b aᵀ, b' a'ᵀ⟩ = (a·a')(b·b')
            yield [(a, self.flat(b))]

    def diagonal(self, slot: str, scores: list[Tensor]) -> Tensor:
        if slot == "bias" and self.flat(scores[0]).dim() > 2:
            return super().diagonal(slot, scores)
        if slot == "bias":
            return self._once(scores, summed_squares).sum(0).view(self.slots[slot].shape)
        a = self.inputs()
        if a.dim() == 2:
            return self._turned(self._once(scores, summed_squares).T @ a.square())
        flat = [self.flat(b) for b in scores]
        step = max(1, BLOCK // math.prod(self.slots[slot].shape))
        blocks = [slice(i, i + step) for i in range(0, len(a), step)]
        return self._turned(
            total((b[i].transpose(1, 2) @ a[i]).square_().sum(0) for b in flat for i in blocks)
        )


class Grouped(Use):
    """Several matrix products at once, ``[G, R, D] @ [G, D, C]``, with the samples among the rows."""

    def fits(self) -> bool:
        return self.rows.merged == 1 and self.rows.axis == self.config["axis"]

    def _flat(self, x: Tensor) -> Tensor:
        """Return ``[N, G, T, ...]``."""
        x = self.rows.samples_first(x)
        return x.transpose(1, 2) if self.rows.extra else x.unsqueeze(2)

    def grads(self, slot: str, b: Tensor) -> Tensor:
        gradients = self._flat(b).mT @ self._flat(self.saved[0])  # [N, G, C, D]
        return gradients.mT if self.config.get("transposed") else gradients

    def norms(self, slot: str, scores: list[Tensor]) -> Tensor:
        a = self._flat(self.saved[0])
        groups = [product_norms(self._flat(b).flatten(0, 1), a.flatten(0, 1)) for b in scores]
        return total(groups).view(len(a), -1).sum(1)


class Elementwise(Use):
    r"""``x ⊙ w`` or ``x + w`` with ``w`` broadcast over samples: scales and shifts, and raw weights.

    ``config["aligned"]`` is the weight's shape as it meets the output's axes, by slot; ``config["factor"]`` gives
    what the slot is multiplied by (a function, so that it is computed only when it is needed), or nothing for a shift.
    A real weight that meets a complex tensor has the gradient ``Re(b · conj(factor))``.
    """

    def fits(self) -> bool:
        merged, axis = self.rows.merged, self.rows.axis
        for slot in self.slots:
            sizes = self.config["aligned"][slot]
            rows = sizes[:merged] if merged > 1 else sizes[axis : axis + 1]
            if (
                len(sizes) != len(self.shape)
                or any(size != 1 for size in rows)
                or (merged > 1 and axis)
            ):
                return False
        return True

    def grads(self, slot: str, b: Tensor) -> Tensor:
        factor = self.config["factor"].get(slot)
        product = b if factor is None else b * factor().conj()
        if product.is_complex() and not self.config.get("complex"):
            product = product.real
        product = self.rows.samples_first(product)
        aligned = self.config["aligned"][slot][self.rows.merged - 1 :]
        aligned = [size for axis, size in enumerate(aligned) if axis != self.rows.axis]
        aligned = [1] * self.rows.extra + aligned
        summed = [axis for axis, size in enumerate(aligned, start=1) if size == 1]
        if summed:
            product = product.sum(summed)
        gradients = product.reshape(-1, *self.slots[slot].shape)
        scale = self.config.get("scale", {}).get(slot, 1)
        return gradients if scale == 1 else gradients * scale


class BatchNorm(Elementwise):
    """Batch norm on running statistics, ``config["statistics"]``: mean, variance and what is added to it."""

    def grads(self, slot: str, b: Tensor) -> Tensor:
        a, (mean, variance, eps) = self.saved[0][: len(b)], self.config["statistics"]
        if (
            slot != "weight"
            or not self.rows.one_each
            or b.dim() < 3
            or not a.dtype == b.dtype == mean.dtype
        ):
            return super().grads(slot, b)
        n, channels = b.shape[:2]
        # Every channel of every sample is a channel of its own, so that the sums are those of single samples.
        shape, mask = (1, n * channels, *b.shape[2:]), [False, True, False]
        a, b, mean, variance = (
            a.reshape(shape),
            b.reshape(shape),
            mean.repeat(n),
            variance.repeat(n),
        )
        backward = torch.ops.aten.native_batch_norm_backward
        return backward(b, a, None, mean, variance, None, None, False, eps, mask)[1].view(
            n, channels
        )


class Embedding(Use):
    """Rows of a table: a sample's gradient adds the output gradients of equal indices, before squaring."""

    def fits(self) -> bool:
        return self.rows.axis + self.rows.merged <= self.saved[0].dim()

    def _pairs(self, b: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return the number of samples, and sample-and-row number and gradient of every lookup."""
        index = self.rows.samples_first(self.saved[0])
        table, width = self.slots["weight"].shape
        b = self.rows.samples_first(b).reshape(-1, width)
        sample = (
            torch.arange(len(index), device=b.device)
            .view(-1, *[1] * (index.dim() - 1))
            .expand_as(index)
        )
        pairs = (sample * table + index).reshape(-1)
        padding = self.config["padding_idx"]
        if padding is not None:
            kept = (index != padding).reshape(-1)
            pairs, b = pairs[kept], b[kept]
        return len(index), pairs, b

    def _summed(self, b: Tensor) -> tuple[int, Tensor, Tensor, Tensor]:
        """Return the number of samples, and sample, row and summed gradient of every pair of them that occurs."""
        n, pairs, b = self._pairs(b)
        unique, where = pairs.unique(return_inverse=True)
        summed = b.new_zeros(len(unique), b.shape[1]).index_add_(0, where, b)
        table = self.slots["weight"].shape[0]
        return n, unique // table, unique % table, summed

    def grads(self, slot: str, b: Tensor) -> Tensor:
        n, sample, row, summed = self._summed(b)
        out = b.new_zeros(n, *self.slots[slot].shape)
        out[sample, row] = summed
        return out

    def lookups(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices ``[N, T]`` and gradients ``[N, T, D]``, zero where a lookup does not count."""
        index = self.rows.samples_first(self.saved[0])
        b = self.rows.samples_first(b)
        padding = self.config["padding_idx"]
        if padding is not None:
            b = b.masked_fill((index == padding).unsqueeze(-1), 0)
        return index.reshape(len(index), -1), b.reshape(len(index), -1, b.shape[-1])

    def norms(self, slot: str, scores: list[Tensor]) -> Tensor:
        norms = []
        for b in scores:
            n, sample, _, summed = self._summed(b)
            norms.append(b.new_zeros(n).index_add_(0, sample, squared_norms(summed)))
        return total(norms)

    def diagonal(self, slot: str, scores: list[Tensor]) -> Tensor:
        squares = scores[0].new_zeros(self.slots[slot].shape)
        for b in scores:
            _, _, row, summed = self._summed(b)
            squares.index_add_(0, row, summed.square())
        return squares


class Other(Use):
    """Any other operation: its own backward pass, for the part of the gradient that belongs to one sample.

    ``config["output"]`` is where the operation's output is in the graph, ``config["inputs"]`` where its weights are.
    """

    def grads(self, slot: str, b: Tensor) -> Tensor:
        return torch.cat([*self.blocks(slot, b)])

    def blocks(self, slot: str, b: Tensor) -> Iterator[Tensor]:
        rows = self.rows.rows_first(b)
        numbers = self.rows.index  # [N, rows of a sample]
        if numbers is None:
            numbers = self.rows.samples_first(
                torch.arange(len(rows), device=b.device).view(self._as_rows(b))
            )
            numbers = numbers.reshape(len(numbers), -1)
        step = max(1, 4 * BLOCK // max(1, b.numel(), math.prod(self.slots[slot].shape)))
        for i in range(0, len(numbers), step):
            some = numbers[i : i + step]
            parts = rows.new_zeros(
                len(some), len(rows) + 1, *rows.shape[1:]
            )  # one more, for no row
            sample = torch.arange(len(some), device=b.device).unsqueeze(1)
            parts[sample, some] = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[some]
            parts = parts[:, :-1]
            if self.rows.axis:
                parts = parts.movedim(1, self.rows.axis + 1)
            parts = parts.reshape(len(some), *b.shape)
            yield batched_vjp(self.config["output"], self.config["inputs"][slot], parts)

    def _as_rows(self, b: Tensor) -> list[int]:
        """Return the shape of row numbers that are laid out like ``b``, with one entry on all other axes."""
        sizes = [1] * b.dim()
        if self.rows.merged > 1:
            sizes[: self.rows.merged] = b.shape[: self.rows.merged]
        else:
            sizes[self.rows.axis] = b.shape[self.rows.axis]
        return sizes


def _outer(b: Tensor, a: Tensor) -> Tensor:
    """Return ``[N, C, D]``, summed over positions where there are several."""
    if a.dim() == 2:
        return b.unsqueeze(2) * a.unsqueeze(1)
    return b.transpose(1, 2) @ a


def product_norms(b: Tensor, a: Tensor) -> Tensor:
    """Return the squared norms of ``bᵀ a``, of ``[N, T, C]`` and ``[N, T, D]``; formed only where that is cheaper."""
    positions, wide, high = a.shape[1], a.shape[2], b.shape[2]
    if positions * (wide + high) < wide * high:  # ghost norm: Σ_{t,s} (a_t·a_s)(b_t·b_s)
        gram = a @ a.transpose(1, 2)
        return (gram * (b @ b.transpose(1, 2))).sum((1, 2))
    step = max(1, BLOCK // (wide * high))
    blocks = [slice(i, i + step) for i in range(0, len(a), step)]
    return torch.cat([squared_norms(b[i].transpose(1, 2) @ a[i]) for i in blocks])


def squared_norms(x: Tensor) -> Tensor:
    """Return the squared norm of each row ``[N, ...]``, shape ``[N]``."""
    if x.dim() == 1:  # of a parameter that is one number
        return x.square()
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim()))).square_()


def summed_squares(parts: list[Tensor]) -> Tensor:
    """Add the squares of tensors of one shape."""
    squares = parts[0].square()
    for part in parts[1:]:
        squares.addcmul_(part, part)
    return squares


def total(parts: Iterable[Tensor]) -> Tensor:
    """Add tensors of one shape, into the first."""
    iterator = iter(parts)
    first = next(iterator)
    for part in iterator:
        first.add_(part)
    return first
