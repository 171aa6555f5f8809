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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_taskinfo._observe import at_least_float32
from lightning_taskinfo.fisher.graph import Edge, inside_a_pass, like, pulled_to_input, shape_of
from lightning_taskinfo.fisher.proof import Rows

BLOCK = 1 << 21  # elements of per-sample gradients formed at once: 8 MB in float32
SMALL_MAP = 100  # output positions up to which patches beat grouped convolutions
WIDE_MAP, WIDE = 256, 2048  # the same for at least so many pairs of channels
FEW_ENTRIES = 48  # of a patch, up to which patches always do

Factor = Callable[[], Tensor] | None


@dataclass
class Weight:
    """A weight as an operation of a graph meets it.

    Attributes:
        node: The operation.
        place: The weight's place among its inputs.
        source: Where the weight is in the graph.
        rows: Which samples the rows of the operation's output belong to.
        way: The kinds of the operations from its parameter to it if they only move entries.
        functions: Those of the user's among the operations that it was computed by.
    """

    node: Any
    place: int
    source: Edge
    rows: Rows
    way: tuple[str, ...] | None
    functions: Sequence[Any] = ()

    @property
    def output(self) -> torch.Size:
        """The shape of the operation's output."""
        return shape_of(Edge(self.node, 0))

    def saved(self, name: str) -> Tensor:
        """Return what the operation has kept for its backward pass."""
        return getattr(self.node, f"_saved_{name}").detach()


@dataclass
class Use:
    """One weight in one operation.

    Output gradients, of several scores together, are *arranged* once, with the samples behind the scores;
    everything else is made of arranged ones.
    """

    at: Weight

    def __post_init__(self) -> None:
        self.rows = self.at.rows
        self.shape = shape_of(self.at.source)

    def fits(self) -> bool:
        """Whether gradients can be computed for rows like these."""
        return True

    @property
    def joint(self) -> Any:
        """What uses of a parameter have in common that can be made one, with the rows of all; None if they cannot."""
        return None

    def arranged(self, scores: Tensor) -> Tensor:
        """Return the gradients ``[S, ...]`` by the operation's output as ``[S, N, ...]``."""
        return self.rows.samples_first(scores, 1)

    def gradients(
        self,
        b: Tensor,
        samples: slice,
    ) -> Tensor:
        """Return the gradients of some samples, ``[n, *shape]``, from arranged ones of all for one score."""
        raise NotImplementedError

    def norms(self, scores: Tensor) -> Tensor | None:
        """Return the squared norm of each sample's gradient, summed over scores, ``[N]``; None if it must be formed."""
        return None

    def diagonal(self, scores: Tensor) -> Tensor | None:
        """Return the squared gradients, summed over samples and scores, shaped like the weight; None likewise."""
        return None

    @property
    def elements(self) -> int:
        """How many numbers are needed to form the gradient of one sample."""
        return self.shape.numel()


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

    @property
    def joint(self) -> Any:
        is_matrix = len(self.shape) == 2 and self.at.way in ((), ("TBackward0",))
        return (self.turned, self.at.way) if is_matrix else None

    @property
    def inputs_in_rows(self) -> bool:
        """Whether a row of the parameter belongs to an entry of the inputs, rather than of the outputs."""
        return self.turned != (self.at.way == ("TBackward0",))

    def left_and_right(
        self,
        b: Tensor,
        a: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return output gradients and inputs, those first that have a row of the parameter each."""
        return (a, b) if self.inputs_in_rows else (b, a)

    def arranged(self, scores: Tensor) -> Tensor:
        """Return output gradients as ``[S, N, T, D]``, or ``[S, N, G, T, D]``."""
        x = self.rows.samples_first(scores, 1)
        return x.transpose(2, 3) if self.grouped else x.flatten(2, -2)

    @cached_property
    def a(self) -> Tensor:
        """The inputs as ``[N, T, D]``, or ``[N, G, T, D]``."""
        return self.arranged(at_least_float32(self.inputs).unsqueeze(0))[0]

    def of(self, samples: slice) -> Tensor:
        """Return the inputs of some samples."""
        return self.a[samples]

    @property
    def copied(self) -> int:
        """How many numbers are copied for the inputs of one sample."""
        return 0

    def gradients(
        self,
        b: Tensor,
        samples: slice,
    ) -> Tensor:
        gradients = b[samples].mT @ self.of(samples)
        return self._turned(gradients).reshape(len(gradients), *self.shape)

    def norms(self, scores: Tensor) -> Tensor | None:
        if self._is_one_row(scores):
            return squared_norms(self.of(slice(None))) * squared_norms(scores.transpose(0, 1))
        norms = []
        for some in blocks(scores.shape[1], self.copied):
            norms.append(product_norms(scores[:, some], self.of(some)))
        return torch.cat(norms)

    def diagonal(self, scores: Tensor) -> Tensor | None:
        if not self._is_one_row(scores):
            return None
        of_outputs = summed_squares(scores[:, :, 0])
        of_inputs = self.of(slice(None))[:, 0].square()
        squares = of_outputs.T @ of_inputs  # of one row: (b aᵀ)² = b² (a²)ᵀ
        return self._turned(squares).reshape(self.shape)

    def _is_one_row(self, scores: Tensor) -> bool:
        return scores.shape[2] == 1 and not self.grouped

    def _turned(self, product: Tensor) -> Tensor:
        return product.mT if self.turned else product


def _product(
    at: Weight,
    left: str = "self",
    right: str = "mat2",
    *,
    first: int = 0,
    grouped: bool = False,
) -> Use | None:
    """Read ``left @ right`` by the names of what is saved; ``first`` is the place of ``left``."""
    on_the_right = at.place > first
    inputs = at.saved(left if on_the_right else right)
    axis = (not on_the_right) + grouped
    return None if inputs.is_complex() else Product(at, inputs, axis, on_the_right, grouped)


def _addmm(at: Weight) -> Use | None:
    if at.place == 0:
        return Elementwise(at, scale=at.node._saved_beta)
    return _product(at, "mat1", "mat2", first=1) if at.node._saved_alpha == 1 else None


@dataclass(kw_only=True)
class Conv(Product):
    r"""The kernel of ``conv1d``, ``conv2d`` or ``conv3d``, a matrix that patches of the input are multiplied by.

    A sample's gradient is :math:`B\,U^\top` with the output gradients :math:`B` (channels by positions) and the
    unfolded input :math:`U` (patch entries by positions).
    """

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    transposed: bool
    output_padding: list[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.positions = self.at.output[2:]
        self.entries = self.shape[1:].numel() * self.positions.numel()  # of all patches
        self.plain = self.groups == 1 and not self.transposed  # as patches know it
        self._last: tuple[slice, Tensor] | None = None

    @cached_property
    def a(self) -> Tensor:
        """The inputs with the samples first, ``[N, repeat, C, ...]``."""
        return self.rows.samples_first(at_least_float32(self.inputs))

    def arranged(self, scores: Tensor) -> Tensor:
        """Return output gradients as ``[S, N, T, C]``."""
        return as_places(self.rows.samples_first(scores, 1))

    def of(self, samples: slice) -> Tensor:
        """Return the patches of some samples, ``[n, T, entries]``; those of the last ones are kept."""
        if self._last is None or self._last[0] != samples:
            a = self.a[samples]
            patches = self.patches(a.flatten(0, 1)).mT
            self._last = samples, patches.unflatten(0, a.shape[:2]).flatten(1, 2)
        return self._last[1]

    def patches(self, a: Tensor) -> Tensor:
        """Return what the kernel meets at each position, ``[rows, entries, positions]``."""
        if any(self.padding):
            sides = [size for size in reversed(self.padding) for _ in ("before", "after")]
            a = F.pad(a, sides)
        rows, channels, *strides = a.stride()
        within = [d * stride for d, stride in zip(self.dilation, strides, strict=True)]
        between = [s * stride for s, stride in zip(self.stride, strides, strict=True)]
        sizes = (*a.shape[:2], *self.shape[2:], *self.positions)
        patches = a.as_strided(sizes, (rows, channels, *within, *between))
        return patches.reshape(len(a), -1, self.positions.numel())

    @property
    def copied(self) -> int:
        return 2 * max(self.shape.numel(), self.entries * self.a.shape[1])

    elements = copied

    @property
    def by_patches(self) -> bool:
        """Whether patches are quicker than a grouped convolution."""
        out, channels, *kernel = self.shape
        few = self.shape[1:].numel() <= FEW_ENTRIES
        small = self.entries * len(self.inputs) <= BLOCK // 4
        largest_map = WIDE_MAP if out * channels >= WIDE else SMALL_MAP
        small_map = self.positions.numel() <= largest_map
        return self.plain and (kernel == list(self.stride) or few or small or small_map)


class Grouped(Conv):
    """The kernel of any convolution: samples become groups of a large one, whose weight gradient has all of theirs."""

    arranged = Use.arranged
    norms = Use.norms
    diagonal = Use.diagonal

    def gradients(
        self,
        b: Tensor,
        samples: slice,
    ) -> Tensor:
        a, b = self.a[samples].flatten(0, 1), b[samples]
        n = len(a)
        _, grouped, _ = torch.ops.aten.convolution_backward(
            b.reshape(1, -1, *b.shape[3:]),
            a.reshape(1, -1, *a.shape[2:]),
            b.new_empty(1).expand(n * self.shape[0], *self.shape[1:]),
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            n * self.groups,
            [False, True, False],  # the gradient of the kernel alone
        )
        return grouped.view(*b.shape[:2], *self.shape).sum(1)

    @property
    def elements(self) -> int:
        return max(self.shape.numel(), BLOCK // 32)  # groups of more samples are slower


def as_places(scores: Tensor) -> Tensor:
    """Return ``[S, N, repeat, C, *positions]`` as ``[S, N, places, C]``."""
    return scores.flatten(4).mT.flatten(2, 3)


CONVOLUTION = ("stride", "padding", "dilation", "groups", "transposed", "output_padding")


def _convolution(at: Weight) -> Use | None:
    """Read the kernel (place 1) or the bias (place 2) of a convolution."""
    if at.place == 2:
        return Elementwise(at, channels=True)
    inputs = at.saved("input")
    if at.place == 0 or inputs.is_complex():
        return None
    options = {name: getattr(at.node, f"_saved_{name}") for name in CONVOLUTION}
    use = Conv(at, inputs, **options)
    return use if use.by_patches else Grouped(at, inputs, **options)


@dataclass
class Elementwise(Use):
    r"""``x ⊙ w`` or ``x + w``, times ``scale``, with ``w`` broadcast over samples: scales, shifts and biases.

    ``factor`` returns what the weight is multiplied by (a function, so that it is computed only
    when it is needed). The weight is broadcast as usual, or has the ``channels`` of axis 1;
    ``aligned`` is its shape as it meets the output's axes. A real weight that meets a complex
    tensor has the gradient ``Re(b · conj(factor))``.
    """

    factor: Factor = None
    scale: float = 1
    channels: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = len(self.at.output)
        behind = axes - 2 if self.channels else 0
        before = axes - len(self.shape) - behind
        self.aligned = [*[1] * before, *self.shape, *[1] * behind]

    def fits(self) -> bool:
        over_rows = self.aligned[self.rows.axis :][: self.rows.merged]
        return set(over_rows) == {1}

    def arranged(self, scores: Tensor) -> Tensor:
        """Return the gradients of the weight."""
        if self.factor is None:
            gradients = self._summed(scores)
        else:
            factor = self.factor().conj()
            gradients = torch.cat([self._summed(b * factor) for b in scores.split(1)])
        return gradients if self.scale == 1 else gradients * self.scale

    def _summed(self, scores: Tensor) -> Tensor:
        """Return what arrives at the weight, from all entries of each sample."""
        if scores.is_complex() and not like(self.at.source).dtype.is_complex:
            scores = scores.real
        first = self.rows.axis
        behind = first + self.rows.merged
        others = [*self.aligned[:first], *self.aligned[behind:]]  # axes of a row
        by_sample = self.rows.samples_first(scores, 1)
        several = by_sample.shape[:2]
        return by_sample.sum_to_size(*several, 1, *others).reshape(*several, *self.shape)

    def gradients(
        self,
        b: Tensor,
        samples: slice,
    ) -> Tensor:
        return b[samples]

    def norms(self, scores: Tensor) -> Tensor:
        return squared_norms(scores.transpose(0, 1))

    def diagonal(self, scores: Tensor) -> Tensor:
        return summed_squares(scores).sum(0)


def _add(
    at: Weight,
    sign: int = 1,
) -> Use:
    return Elementwise(at, scale=sign * at.node._saved_alpha if at.place else 1)


def _mul(at: Weight) -> Use:
    other = at.saved("self" if at.place else "other")
    return Elementwise(at, lambda: other)


def _norm(
    at: Weight,
    *,
    channels: bool = False,
) -> Use | None:
    """Read the weight (place 1) or the bias (place 2) of a normalisation."""
    if at.place == 0:
        return None
    # Where activations are checkpointed, what is saved can be had only once: not for the bias.
    factor = _normed(at, channels) if at.place == 1 else None
    return Elementwise(at, factor, channels=channels)


def _normed(
    at: Weight,
    channels: bool,
) -> Callable[[], Tensor]:
    node = at.node
    x = at.saved("input")
    if not hasattr(type(node), "_saved_result2"):  # RMS norm
        return partial(torch.mul, x, at.saved("result1"))
    if getattr(node, "_saved_training", True):
        mean, scale = at.saved("result1"), at.saved("result2")
    else:
        mean = at.saved("running_mean")
        scale = (at.saved("running_var") + node._saved_eps).rsqrt()

    def normed() -> Tensor:
        if not channels:
            return (x - mean).mul_(scale)
        parts = mean.shape[-1]  # channels, or groups of each sample
        by_part = x.reshape(len(x), parts, -1) - mean.view(-1, parts, 1)
        return by_part.mul_(scale.view(-1, parts, 1)).view(x.shape)

    return normed


@dataclass
class Embedding(Use):
    """Rows of a table: a sample's gradient adds the output gradients of equal indices, before squaring."""

    index: Tensor
    padding_idx: int  # -1 for none

    def fits(self) -> bool:
        return self.rows.axis + self.rows.merged <= self.index.dim()

    @property
    def joint(self) -> Any:
        return "lookups" if self.at.way == () else None

    @cached_property
    def a(self) -> Tensor:
        """The indices, ``[N, T]``."""
        return self.rows.samples_first(self.index).flatten(1)

    def arranged(self, scores: Tensor) -> Tensor:
        """Return gradients ``[S, N, T, D]``, zero where a lookup does not count."""
        scores = self.rows.samples_first(scores, 1)
        scores = scores.reshape(len(scores), *self.a.shape, scores.shape[-1])
        if self.padding_idx < 0:
            return scores
        padding = self.a == self.padding_idx
        return scores.masked_fill(padding.unsqueeze(-1), 0)

    def gradients(
        self,
        b: Tensor,
        samples: slice,
    ) -> Tensor:
        b = b[samples]
        gradients = b.new_zeros(len(b), *self.shape)
        rows = gradients.view(-1, b.shape[-1])
        rows.index_add_(0, self._numbered(samples), b.flatten(0, 1))
        return gradients

    def norms(self, scores: Tensor) -> Tensor:
        norms = scores.new_zeros(scores.shape[1])
        for pairs, gradients in map(self._by_token, scores):
            norms.index_add_(0, pairs // self.shape[0], squared_norms(gradients))
        return norms

    def diagonal(self, scores: Tensor) -> Tensor:
        squares = scores.new_zeros(self.shape)
        for pairs, gradients in map(self._by_token, scores):
            squares.index_add_(0, pairs % self.shape[0], gradients.square())
        return squares

    def _by_token(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return every pair of sample and token that occurs, numbered, and its summed gradient ``[pairs, D]``."""
        pairs, where = self._numbered(slice(None)).unique(return_inverse=True)
        summed = b.new_zeros(len(pairs), b.shape[-1])
        return pairs, summed.index_add_(0, where, b.flatten(0, 1))

    def _numbered(self, samples: slice) -> Tensor:
        """Number the tokens of some samples through, as rows of one table after the other."""
        tokens = self.a[samples]
        first = torch.arange(len(tokens), device=tokens.device) * self.shape[0]
        return (first.unsqueeze(1) + tokens).flatten()


def _embedding(at: Weight) -> Use:
    padding = at.node._saved_padding_idx
    if padding >= shape_of(at.source)[0]:  # -1 as an unsigned number
        padding = -1
    return Embedding(at, at.saved("indices"), padding)


class Other(Use):
    """Any other operation: its own backward pass, for the part of the gradient that belongs to one sample."""

    def gradients(
        self,
        b: Tensor,
        samples: slice,
    ) -> Tensor:
        at = self.at
        count = at.output.numel() // b.shape[2:].numel()  # of rows
        numbers = self.rows.numbers(count)[samples]  # [n, repeat]
        b = b[samples]  # [n, repeat, ...]
        parts = b.new_zeros(len(b), count + 1, *b.shape[2:])  # one row more, for no row
        sample = torch.arange(len(b), device=numbers.device).unsqueeze(1)
        parts[sample, numbers] = b
        parts = parts[:, :-1].movedim(1, self.rows.axis + 1)
        gradients = parts.reshape(len(b), *at.output)
        pull = partial(pulled_to_input, at.node, at.place, at.source)
        found: list[Tensor] = []
        inside_a_pass(lambda: found.extend(map(pull, gradients)))
        return torch.stack(found)

    @property
    def elements(self) -> int:
        return max(self.at.output.numel(), self.shape.numel())


Reader = Callable[[Weight], Use | None]

READERS: dict[str, Reader] = {
    "MmBackward0": _product,
    "BmmBackward0": partial(_product, grouped=True),
    "AddmmBackward0": _addmm,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
    "NativeLayerNormBackward0": _norm,
    "FusedRmsNormBackward0": _norm,
    "NativeGroupNormBackward0": partial(_norm, channels=True),
    "NativeBatchNormBackward0": partial(_norm, channels=True),
    "MulBackward0": _mul,
    "AddBackward0": _add,
    "SubBackward0": partial(_add, sign=-1),
    "ExpandBackward0": Elementwise,
}


def read(at: Weight) -> Use:
    """Return what an operation has seen of a weight."""
    reader = READERS.get(type(at.node).__name__)
    try:
        use = None if reader is None else reader(at)
    except AttributeError:  # another version of torch keeps other things
        use = None
    return use if use is not None and use.fits() else Other(at)


# Sums over samples, scores and positions


def blocks(
    n: int,
    elements: int,
) -> Iterator[slice]:
    """Yield a few of ``n`` samples at a time, which need so many elements each."""
    step = max(1, BLOCK // max(1, elements))
    for start in range(0, n, step):
        yield slice(start, start + step)


def product_norms(
    scores: Tensor,
    a: Tensor,
) -> Tensor:
    """Return the squared norms ``[N]`` of ``bᵀ a``, summed over scores ``b``, formed if that is cheaper.

    Args:
        scores: Output gradients, ``[S, N, ..., T, C]``.
        a: Inputs, ``[N, ..., T, D]``.
    """
    positions, wide = a.shape[-2:]
    high = scores.shape[-1]
    if positions * (wide + high) < wide * high:  # ghost norm: Σ_{t,s} (a_t·a_s)(b_t·b_s)
        products = total(b @ b.mT for b in scores)
        return (products * (a @ a.mT)).flatten(1).sum(1)
    norms = []
    for some in blocks(len(a), a[0].numel() // positions * high):
        norms.append(total(squared_norms(b[some].mT @ a[some]) for b in scores))
    return torch.cat(norms)


def squared_norms(x: Tensor) -> Tensor:
    """Return the squared norm of each row ``[N, ...]``, shape ``[N]``."""
    others = tuple(range(1, x.dim()))  # none of a parameter that is one number
    return torch.linalg.vector_norm(x, dim=others).square_() if others else x.square()


def summed_squares(x: Tensor) -> Tensor:
    """Return the sum of squares over axis 0, with no copy of all of them."""
    squares = torch.zeros_like(x[0])
    for part in x:
        squares.addcmul_(part, part)
    return squares


def total(parts: Iterable[Tensor]) -> Tensor:
    """Add tensors of one shape, into the first."""
    return reduce(Tensor.add_, parts)
