r"""What each kind of layer contributes: per-sample gradients from its inputs and its output gradients.

A *use* is one call of an operation with parameters. With the operation's input :math:`a_n` and the gradient
:math:`b_n` of sample :math:`n`'s log-likelihood by its output, the gradient of each parameter follows without another
backward pass, and often its squared norm without even forming it (Goodfellow, *Efficient per-example gradient
computations*, 2015).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

BLOCK = 1 << 21  # elements of per-sample gradients formed at once: 8 MB in float32


class Slot(NamedTuple):
    """A parameter's part in a use: its name, and the rows that are used where it is not the whole."""

    name: str
    shape: tuple[int, ...]
    rows: slice | None = None


@dataclass(frozen=True)
class Layout:
    """Where the samples are in a tensor: along ``axis``, each ``repeat`` times, in one block or interleaved."""

    axis: int = 0
    repeat: int = 1
    interleaved: bool = False

    def samples_first(self, x: Tensor) -> Tensor:
        """Return ``x`` as ``[N, ...]``, with the repeats as axis 1 where there are any."""
        if self.axis:
            x = x.movedim(self.axis, 0)
        if self.repeat == 1:
            return x
        if self.interleaved:
            return x.unflatten(0, (self.repeat, -1)).transpose(0, 1)
        return x.unflatten(0, (-1, self.repeat))


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
    """One call of an operation: what it read, which parameters it used, and the edge of its output."""

    slots: dict[str, Slot]
    edge: GradientEdge
    shape: torch.Size  # of the output
    saved: tuple[tuple[Tensor, int], ...]  # tensors read, with their versions: an in-place change spoils them
    config: dict[str, Any] = field(default_factory=dict)
    layout: Layout = field(default_factory=Layout)

    @property
    def spoiled(self) -> bool:
        """Whether an input was changed in place after the operation had read it."""
        return any(tensor._version != version for tensor, version in self.saved)

    def fits(self) -> bool:
        """Whether the parameters are shared by all samples under this layout."""
        return True

    def grads(self, slot: str, b: Tensor) -> Tensor:
        """Return the gradient of each sample, shape ``[N, *slot.shape]``."""
        raise NotImplementedError

    def norms(self, slot: str, scores: list[Tensor]) -> Tensor:
        """Return the squared norm of each sample's gradient, summed over scores, shape ``[N]``."""
        return total([squared_norms(self.grads(slot, b)) for b in scores])

    def diagonal(self, slot: str, scores: list[Tensor]) -> Tensor:
        """Return the squared gradients, summed over samples and scores, shaped like the slot."""
        return total([self.grads(slot, b).square().sum(0) for b in scores])

    def features(self, slot: str, b: Tensor) -> Iterator[list[tuple[Factor, ...]]]:
        """Yield blocks of samples as parts, whose inner products add up to those of the gradients.

        A part is a tuple of factors ``[n, D]``: the product of their inner products counts.
        """
        gradients = self.grads(slot, b)
        yield [(gradients.reshape(len(gradients), -1),)]


class Linear(Use):
    r"""``x Wᵀ + c`` on ``[N, ..., D]``: with :math:`T` positions a sample, :math:`\nabla W = \sum_t b_t a_t^\top`."""

    shared: tuple[list[Tensor], Tensor] | None = None  # scores, and what weight and bias make of them alike

    def _once(self, scores: list[Tensor], make: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Return what ``make`` returns for the scores, made for the weight and kept for the bias."""
        if self.shared is None or self.shared[0] is not scores:
            self.shared = scores, make([self._flat(b) for b in scores])
        return self.shared[1]

    def _flat(self, x: Tensor) -> Tensor:
        return self.layout.samples_first(x).flatten(1, -2) if x.dim() > 2 or self.layout.repeat > 1 else x

    def inputs(self) -> Tensor:
        """Return the inputs as ``[N, D]``, or ``[N, T, D]`` where there are several positions."""
        return self._flat(self.saved[0][0])

    def grads(self, slot: str, b: Tensor) -> Tensor:
        b = self._flat(b)
        if slot == "bias":
            return b if b.dim() == 2 else b.sum(1)
        a = self.inputs()
        if a.dim() == 2:
            return b.unsqueeze(2) * a.unsqueeze(1)
        return b.transpose(1, 2) @ a

    def norms(self, slot: str, scores: list[Tensor]) -> Tensor:
        a = self.inputs()
        if a.dim() == 2:
            norms = self._once(scores, lambda flat: total([squared_norms(b) for b in flat]))
            return norms * squared_norms(a) if slot == "weight" else norms.clone()
        if slot == "bias":
            return super().norms(slot, scores)
        flat = [self._flat(b) for b in scores]
        T, D, C = a.shape[1], a.shape[2], flat[0].shape[2]
        if T * (D + C) < D * C:  # ghost norm: Σ_{t,s} (a_t·a_s)(b_t·b_s)
            gram = a @ a.transpose(1, 2)
            return total([(gram * (b @ b.transpose(1, 2))).sum((1, 2)) for b in flat])
        step = max(1, BLOCK // (D * C))
        blocks = [slice(i, i + step) for i in range(0, len(a), step)]
        return total([torch.cat([squared_norms(b[i].transpose(1, 2) @ a[i]) for i in blocks]) for b in flat])

    def features(self, slot: str, b: Tensor) -> Iterator[list[tuple[Factor, ...]]]:
        a = self.inputs()
        if slot == "bias":
            yield from super().features(slot, b)
        elif a.dim() > 2:
            yield [(Product(self._flat(b).transpose(1, 2), a),)]
        else:  # ⟨b aᵀ, b' a'ᵀ⟩ = (a·a')(b·b')
            yield [(a, self._flat(b))]

    def diagonal(self, slot: str, scores: list[Tensor]) -> Tensor:
        a = self.inputs()
        if a.dim() == 2:
            squares = self._once(scores, summed_squares)
            return squares.T @ a.square() if slot == "weight" else squares.sum(0)
        if slot == "bias":
            return super().diagonal(slot, scores)
        flat = [self._flat(b) for b in scores]
        step = max(1, BLOCK // math.prod(self.slots[slot].shape))
        blocks = [slice(i, i + step) for i in range(0, len(a), step)]
        return total((b[i].transpose(1, 2) @ a[i]).square_().sum(0) for b in flat for i in blocks)


class Elementwise(Use):
    r"""``x ⊙ w`` or ``x + w`` with ``w`` broadcast over samples: scales and shifts, and raw parameters.

    ``config["aligned"]`` is the parameter's shape as it meets the output's axes, by slot; ``config["factor"]`` gives
    what the slot is multiplied by (a function, so that it is computed only when it is needed), or nothing for a shift.
    """

    def _aligned(self, slot: str) -> list[int]:
        aligned = list(self.config["aligned"][slot])
        del aligned[self.layout.axis]
        return [1, *aligned] if self.layout.repeat > 1 else aligned

    def fits(self) -> bool:
        aligned = [self.config["aligned"][slot] for slot in self.slots]
        return all(len(sizes) == len(self.shape) and sizes[self.layout.axis] == 1 for sizes in aligned)

    def grads(self, slot: str, b: Tensor) -> Tensor:
        factor = self.config["factor"].get(slot)
        product = b if factor is None else b * factor().conj()
        if product.is_complex():  # of a real parameter
            product = product.real
        product = self.layout.samples_first(product)
        summed = [axis for axis, size in enumerate(self._aligned(slot), start=1) if size == 1]
        if summed:
            product = product.sum(summed)
        return product.reshape(-1, *self.slots[slot].shape)


class BatchNorm(Elementwise):
    """``F.batch_norm`` on running statistics, ``config["statistics"]``: mean, variance and what is added to it."""

    def grads(self, slot: str, b: Tensor) -> Tensor:
        a, (mean, variance, eps) = self.saved[0][0][: len(b)], self.config["statistics"]
        if slot != "weight" or self.layout != Layout() or b.dim() < 3 or not a.dtype == b.dtype == mean.dtype:
            return super().grads(slot, b)
        n, channels = b.shape[:2]
        # Every channel of every sample is a channel of its own, so that the sums are those of single samples.
        shape, mask = (1, n * channels, *b.shape[2:]), [False, True, False]
        a, b, mean, variance = a.reshape(shape), b.reshape(shape), mean.repeat(n), variance.repeat(n)
        backward = torch.ops.aten.native_batch_norm_backward
        return backward(b, a, None, mean, variance, None, None, False, eps, mask)[1].view(n, channels)


class Embedding(Use):
    """Rows of a table: a sample's gradient adds the output gradients of equal indices, before squaring."""

    def _rows(self, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return sample, row and summed gradient of every (sample, row) pair that occurs."""
        index = self.layout.samples_first(self.saved[0][0])
        table, width = self.slots["weight"].shape
        b = self.layout.samples_first(b).reshape(-1, width)
        sample = torch.arange(len(index), device=b.device).view(-1, *[1] * (index.dim() - 1)).expand_as(index)
        pairs = (sample * table + index).reshape(-1)
        padding = self.config["padding_idx"]
        if padding is not None:
            kept = (index != padding).reshape(-1)
            pairs, b = pairs[kept], b[kept]
        unique, where = pairs.unique(return_inverse=True)
        summed = b.new_zeros(len(unique), width).index_add_(0, where, b)
        return unique // table, unique % table, summed

    def grads(self, slot: str, b: Tensor) -> Tensor:
        sample, row, summed = self._rows(b)
        n = self.layout.samples_first(self.saved[0][0]).shape[0]
        out = b.new_zeros(n, *self.slots[slot].shape)
        out[sample, row] = summed
        return out

    def norms(self, slot: str, scores: list[Tensor]) -> Tensor:
        n = self.layout.samples_first(self.saved[0][0]).shape[0]
        norms = scores[0].new_zeros(n)
        for b in scores:
            sample, _, summed = self._rows(b)
            norms.index_add_(0, sample, squared_norms(summed))
        return norms

    def diagonal(self, slot: str, scores: list[Tensor]) -> Tensor:
        squares = scores[0].new_zeros(self.slots[slot].shape)
        for b in scores:
            _, row, summed = self._rows(b)
            squares.index_add_(0, row, summed.square())
        return squares


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
