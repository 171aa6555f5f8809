r"""What an operation contributes: per-sample gradients of its weights, from its inputs and output gradients.

A *use* is one weight in one operation of a graph where it meets the samples. With the operation's
input :math:`a_n` and the gradient :math:`b_n` of sample :math:`n`'s log-likelihood by its output,
the gradient of the weight follows without another backward pass, and often its squared norm without
forming it (Goodfellow, *Efficient per-example gradient computations*, 2015).

Beside each kind of use stands how it is *read* off the autograd node of an operation. A node keeps
what its backward pass needs, such as the input of a matrix product or the indices of a lookup.
``READERS`` has a function for each kind of node. What none of them knows is an :class:`Other`,
which runs the operation's own backward pass.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lightning_taskinfo._observe import at_least_float32
from lightning_taskinfo.fisher.graph import Edge, pulled_to_weight, shape_of

BLOCK = 1 << 21  # elements of per-sample gradients formed at once: 8 MB in float32
ALL = slice(None)
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
    chosen: slice = field(default_factory=lambda: ALL)

    def rows_first(self, x: Tensor) -> Tensor:
        """Return ``x`` with its rows along axis 0."""
        if self.merged > 1:
            x = x.flatten(0, self.merged - 1)
        return x.movedim(self.axis, 0) if self.axis else x

    def samples_first(self, x: Tensor) -> Tensor:
        """Return ``x`` as ``[N, repeat, ...]``, with zeros for no row."""
        rows = self.rows_first(x)
        if self.index is not None:
            no_row = rows.new_zeros(1, *rows.shape[1:])
            index = self.index[self.chosen]
            return torch.cat([rows, no_row])[index]
        if self.repeat == 1:
            samples = rows.unsqueeze(1)
        elif self.interleaved:
            by_turn = rows.unflatten(0, (self.repeat, -1))
            samples = by_turn.transpose(0, 1)
        else:
            samples = rows.unflatten(0, (-1, self.repeat))
        return samples if self.chosen == ALL else samples[self.chosen]


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
        return self.rows.samples_first(b)

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        """Return the gradients of some samples, ``[n, *shape]``, from arranged ones of all."""
        raise NotImplementedError

    def norms(self, scores: list[Tensor]) -> Tensor:
        """Return the squared norm of each sample's gradient, summed over scores, shape ``[N]``."""
        return sum_of_norms(self.formed(scores))

    def diagonal(self, scores: list[Tensor]) -> Tensor:
        """Return the squared gradients, summed over samples and scores, shaped like the weight."""
        return sum_of_squares(g for _, g in self.formed(scores))

    def formed(self, scores: list[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Yield a few samples, and their gradients for one score after the other."""
        for samples in self.blocks(len(scores[0])):
            for b in scores:
                yield samples, self.gradients(b, samples)

    def blocks(self, n: int) -> Iterator[slice]:
        """Yield a few of ``n`` samples at a time, so that little memory is needed."""
        return blocks(n, self.elements)

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
        if self.grouped:
            return x.transpose(1, 2)
        width = x.shape[-1]
        return x.reshape(len(x), 1, -1, width)

    @cached_property
    def a(self) -> Tensor:
        """The arranged inputs."""
        return self.arranged(at_least_float32(self.inputs))

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        gradients = b[samples].mT @ self.a[samples]
        return self._turned(gradients).reshape(-1, *self.shape)

    def norms(self, scores: list[Tensor]) -> Tensor:
        a = self.a.flatten(0, 1)
        by_group = total(product_norms(b.flatten(0, 1), a) for b in scores)
        return by_group.view(len(self.a), -1).sum(1) if self.grouped else by_group

    def diagonal(self, scores: list[Tensor]) -> Tensor:
        if self.a.shape[1:3] != (1, 1):
            return super().diagonal(scores)
        of_outputs = total(b[:, 0, 0].square() for b in scores)
        of_inputs = self.a[:, 0, 0].square()
        squares = of_outputs.T @ of_inputs  # of one row: (b aᵀ)² = b² (a²)ᵀ
        return self._turned(squares).reshape(self.shape)

    def _turned(self, product: Tensor) -> Tensor:
        return product.mT if self.turned else product


def _product(left: str, right: str, *, first: int = 0, grouped: bool = False) -> "Reader":
    """Read ``left @ right`` by the names of what is saved; ``first`` is the place of ``left``."""

    def read(node: Any, place: int, weight: Any) -> Use | None:
        on_the_right = place > first
        (inputs,) = saved(node, left if on_the_right else right)
        if inputs.is_complex():
            return None
        axis = int(not on_the_right) + int(grouped)
        return Product(tuple(weight.shape), inputs, axis, on_the_right, grouped)

    return read


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
        if merged > 1 and axis:
            return False
        over_rows = self.aligned[axis : axis + merged]
        return set(over_rows) == {1}

    def arranged(self, b: Tensor) -> Tensor:
        """Return the gradients of the weight."""
        product = b
        if self.factor is not None:
            product = b * self.factor().conj()
        if product.is_complex() and not self.is_complex:
            product = product.real
        first = self.rows.axis
        behind = first + self.rows.merged
        sizes = [1, *self.aligned[:first], *self.aligned[behind:]]  # of what is not the sample
        summed = [axis for axis, size in enumerate(sizes, start=1) if size == 1]
        product = self.rows.samples_first(product)
        if any(product.shape[axis] != 1 for axis in summed):
            product = product.sum(summed)
        gradients = product.reshape(-1, *self.shape)
        return gradients if self.scale == 1 else gradients * self.scale

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        return b[samples]

    def blocks(self, n: int) -> Iterator[slice]:
        yield slice(0, n)  # they are there already


def elementwise(
    node: Any,
    weight: Any,
    factor: Callable[[], Tensor] | None = None,
    *,
    scale: float = 1,
    behind: int = 0,
) -> Elementwise:
    """Read an operation on each entry, with a weight that is broadcast; ``behind`` it are so many axes more."""
    shape = tuple(weight.shape)
    before = len(shape_of(node)) - len(shape) - behind
    aligned = [*[1] * before, *shape, *[1] * behind]
    return Elementwise(shape, aligned, factor, scale, weight.dtype.is_complex)


def _add(node: Any, place: int, weight: Any, sign: int = 1) -> Use:
    return elementwise(node, weight, scale=sign * node._saved_alpha if place else 1)


def _mul(node: Any, place: int, weight: Any) -> Use:
    (other,) = saved(node, "self" if place else "other")
    return elementwise(node, weight, lambda: other)


def _expand(node: Any, place: int, weight: Any) -> Use:
    return elementwise(node, weight)


def _addmm(node: Any, place: int, weight: Any) -> Use | None:
    if place == 0:
        return elementwise(node, weight, scale=node._saved_beta)
    if node._saved_alpha != 1:
        return None
    return _product("mat1", "mat2", first=1)(node, place, weight)


def _norm(
    normed: Callable[[Any], Callable[[], Tensor]], *, channels_second: bool = False
) -> "Reader":
    """Read the weight (place 1) or the bias (place 2) of a normalisation."""

    def read(node: Any, place: int, weight: Any) -> Use | None:
        if place == 0:
            return None
        behind = len(shape_of(node)) - 2 if channels_second else 0
        # Where activations are checkpointed, what is saved can be had only once: not for the bias.
        factor = normed(node) if place == 1 else None
        return elementwise(node, weight, factor, behind=behind)

    return read


def _layer_normed(node: Any) -> Callable[[], Tensor]:
    return partial(_standardised, *saved(node, "input", "result1", "result2"))


def _rms_normed(node: Any) -> Callable[[], Tensor]:
    return partial(torch.mul, *saved(node, "input", "result1"))


def _group_normed(node: Any) -> Callable[[], Tensor]:
    x, mean, scale = saved(node, "input", "result1", "result2")
    groups = (len(x), node._saved_group, -1)

    def normed() -> Tensor:
        by_group = (part.reshape(groups) for part in (x, mean, scale))
        return _standardised(*by_group).view(x.shape)

    return normed


def _batch_normed(node: Any) -> Callable[[], Tensor]:
    (x,) = saved(node, "input")
    if node._saved_training:
        mean, scale = saved(node, "result1", "result2")
    else:
        mean, variance = saved(node, "running_mean", "running_var")
        scale = (variance + node._saved_eps).rsqrt()
    behind = [1] * (x.dim() - 2)
    mean = mean.view(1, -1, *behind)
    scale = scale.view(1, -1, *behind)
    return partial(_standardised, x, mean, scale)


def _standardised(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (x - mean).mul_(scale)


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
        padding = self.tokens == self.padding_idx
        return b.masked_fill(padding.unsqueeze(-1), 0)

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        b = b[samples]
        gradients = b.new_zeros(len(b), *self.shape)
        add_lookups(gradients, self.tokens[samples], b)
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
        pairs, where = _numbered(self.tokens, table).unique(return_inverse=True)
        summed = b.new_zeros(len(pairs), b.shape[-1])
        summed.index_add_(0, where, b.flatten(0, 1))
        return pairs // table, pairs % table, summed


def add_lookups(gradients: Tensor, tokens: Tensor, b: Tensor) -> None:
    """Add rows ``[n, T, D]`` to tables ``[n, V, D]``, each at its token ``[n, T]``."""
    _, table, width = gradients.shape
    rows = gradients.view(-1, width)
    numbers = _numbered(tokens, table)
    rows.index_add_(0, numbers, b.flatten(0, 1))


def _numbered(tokens: Tensor, table: int) -> Tensor:
    """Number the tokens ``[n, T]`` of all samples through, as rows of one table after the other."""
    table_number = torch.arange(len(tokens), device=tokens.device)
    first = table_number.unsqueeze(1) * table
    return (first + tokens).flatten()


def _embedding(node: Any, place: int, weight: Any) -> Use | None:
    if node._saved_scale_grad_by_freq:
        return None
    shape = tuple(weight.shape)
    padding = node._saved_padding_idx
    if not 0 <= padding < shape[0]:  # -1, or that as an unsigned number
        padding = None
    return Embedding(shape, node._saved_indices, padding)


def _index_select(node: Any, place: int, weight: Any) -> Use | None:
    shape = tuple(weight.shape)
    if node._saved_dim != 0 or len(shape) != 2:
        return None
    return Embedding(shape, node._saved_index)


@dataclass
class Other(Use):
    """Any other operation: its own backward pass, for the part of the gradient that belongs to one sample.

    ``output`` is where the operation's output is in the graph, ``source`` where its weight is.
    """

    output: Edge
    source: Edge

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        numbers = self._numbers[samples]  # [n, repeat]
        b = b[samples]  # [n, repeat, ...]
        count, *others = self._row_shape
        parts = b.new_zeros(len(b), count + 1, *others)  # one row more, for no row
        sample = torch.arange(len(b), device=b.device).unsqueeze(1)
        parts[sample, numbers] = b
        axis = self.rows.axis + 1
        parts = parts[:, :-1].movedim(1, axis)
        shape = shape_of(self.output.node)
        outputs = parts.reshape(len(b), *shape)
        return pulled_to_weight(self.output, self.source, outputs)

    @property
    def elements(self) -> int:
        output = shape_of(self.output.node)
        return max(output.numel(), math.prod(self.shape))

    @cached_property
    def _row_shape(self) -> torch.Size:
        """The shape of the output, with the rows first."""
        output = torch.empty(shape_of(self.output.node), device="meta")
        return self.rows.rows_first(output).shape

    @cached_property
    def _numbers(self) -> Tensor:
        """The number of each row of each sample, ``[N, repeat]``, and -1 for no row."""
        device = self.output.node._input_metadata[0].device
        count = self._row_shape[0]
        numbers = torch.arange(1, count + 1, device=device)
        flat = replace(self.rows, axis=0, merged=1)
        return flat.samples_first(numbers) - 1


Reader = Callable[[Any, int, Any], Use | None]
"""From a node, the place of a weight among its inputs, and its shape and type, to the use of it."""

READERS: dict[str, Reader] = {
    "MmBackward0": _product("self", "mat2"),
    "BmmBackward0": _product("self", "mat2", grouped=True),
    "AddmmBackward0": _addmm,
    "EmbeddingBackward0": _embedding,
    "IndexSelectBackward0": _index_select,
    "NativeLayerNormBackward0": _norm(_layer_normed),
    "NativeGroupNormBackward0": _norm(_group_normed, channels_second=True),
    "NativeBatchNormBackward0": _norm(_batch_normed, channels_second=True),
    "FusedRmsNormBackward0": _norm(_rms_normed),
    "MulBackward0": _mul,
    "AddBackward0": _add,
    "SubBackward0": partial(_add, sign=-1),
    "ExpandBackward0": _expand,
}


def saved(node: Any, *names: str) -> list[Tensor]:
    """Return what an operation has kept for its backward pass."""
    return [getattr(node, f"_saved_{name}").detach() for name in names]


# Sums over samples, scores and positions


def blocks(n: int, elements: int) -> Iterator[slice]:
    """Yield a few of ``n`` samples at a time, which need so many elements each."""
    step = max(1, BLOCK // max(1, elements))
    for start in range(0, n, step):
        yield slice(start, start + step)


def product_norms(b: Tensor, a: Tensor) -> Tensor:
    """Return the squared norms of ``bᵀ a``, of ``[N, T, C]`` and ``[N, T, D]``; formed only where that is cheaper."""
    n, positions, wide = a.shape
    high = b.shape[2]
    if positions == 1:
        return squared_norms(a) * squared_norms(b)
    if positions * (wide + high) < wide * high:  # ghost norm: Σ_{t,s} (a_t·a_s)(b_t·b_s)
        products = (a @ a.mT) * (b @ b.mT)
        return products.sum((1, 2))
    norms = []
    for samples in blocks(n, wide * high):
        gradients = b[samples].mT @ a[samples]
        norms.append(squared_norms(gradients))
    return torch.cat(norms)


def squared_norms(x: Tensor) -> Tensor:
    """Return the squared norm of each row ``[N, ...]``, shape ``[N]``."""
    if x.dim() == 1:  # of a parameter that is one number
        return x.square()
    others = tuple(range(1, x.dim()))
    return torch.linalg.vector_norm(x, dim=others).square_()


def sum_of_norms(formed: Iterable[tuple[slice, Tensor]]) -> Tensor:
    """Return the squared norm of each sample's gradient, of gradients ``[n, *shape]`` for several scores each."""
    norms: dict[int, Tensor] = {}
    for samples, gradients in formed:
        some = squared_norms(gradients)
        if samples.start in norms:
            some += norms[samples.start]
        norms[samples.start] = some
    parts = [*norms.values()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
