r"""The sums over samples that Kronecker factors are made of.

The gradient of a weight :math:`W`, seen as a matrix ``[R, D]``, is a sum over the places :math:`t` at which a layer is
applied to sample :math:`n`: :math:`G_n = \sum_t b_{nt} a_{nt}^\top`. KFAC takes inputs :math:`a`, gradients :math:`b`
by the outputs, and different places, for independent. So it needs no gradient of a single sample, and does not have to
know which place belongs to which sample. What is kept are two matrices and a number, so that chunks, batches and
processes simply add up:

.. math:: F_W \approx \frac{\mathcal R \otimes \mathcal C}{N\,w}

- a matrix or kernel with one use: :math:`\mathcal R = \sum b b^\top`, :math:`\mathcal C = \sum a a^\top`, :math:`w` the
  number of places (KFAC);
- a table of embeddings, whose inputs are the indices of its rows: :math:`\mathcal R` their counts, a diagonal,
  :math:`\mathcal C = \sum b b^\top`, :math:`w` the number of places;
- any other matrix: :math:`\mathcal R = \sum_n G_n G_n^\top`, :math:`\mathcal C = \sum_n G_n^\top G_n`,
  :math:`w = \sum_n \|G_n\|^2`;
- a vector: :math:`\mathcal R = \sum_n g_n g_n^\top` alone, which is exact.
"""

import math
from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lightning_taskinfo._observe import ParamDict, at_least_float32, trainable_parameters
from lightning_taskinfo.fisher.conv import Conv
from lightning_taskinfo.fisher.ops import BLOCK, Embedding, Linear, Use
from lightning_taskinfo.fisher.terms import Contribution, Term

MAX_SIDE = 8192  # of a factor that is kept as a whole: half a gigabyte in float64


class KroneckerSums:
    """Sums over samples by parameter name, to which the engine adds what it finds; see the top of this file.

    Args:
        sides: Numbers of rows and columns by parameter name; None in place of columns for a vector.
        tables: Parameters of which the factor of the rows is a diagonal.
        like: A tensor with the dtype and device of the sums.
        max_side: The longest side of a factor that is kept as a whole.
        whole: Parameters whose factors are made of the gradients of single samples in any case.
    """

    def __init__(
        self,
        sides: dict[str, tuple[int, int | None]],
        tables: set[str],
        like: Tensor,
        max_side: int = MAX_SIDE,
        whole: frozenset[str] = frozenset(),
    ) -> None:
        def zeros(side: int, diagonal: bool = False) -> Tensor:
            return (
                like.new_zeros(side) if diagonal or side > max_side else like.new_zeros(side, side)
            )

        self.sides = sides
        self.whole = whole
        self.rows = {name: zeros(r, name in tables) for name, (r, _) in sides.items()}
        self.columns = {name: zeros(d) for name, (_, d) in sides.items() if d is not None}
        self.places: ParamDict = {name: like.new_zeros(()) for name in self.columns}
        self.squares: ParamDict = {name: like.new_zeros(()) for name in self.columns}
        self._read: set[tuple[str, int]] = set()

    @classmethod
    def zeros(
        cls, model: nn.Module, max_side: int = MAX_SIDE, whole: frozenset[str] = frozenset()
    ) -> "KroneckerSums":
        """Return the sums of no samples, for the trainable parameters of a model."""
        parameters = trainable_parameters(model)
        if not parameters:
            raise ValueError("`model` must have a parameter with `requires_grad=True`, got none.")
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in parameters}
        sides = {
            name: matrix_shape(p.shape, kernel=isinstance(owners[name], _ConvNd))
            for name, p in parameters.items()
        }
        tables = {name for name, owner in owners.items() if isinstance(owner, nn.Embedding)}
        like = at_least_float32(next(iter(parameters.values())).detach())
        return cls(sides, tables, like, max_side, whole)

    def add(self, name: str, samples: slice, contribution: Contribution) -> None:
        """Add what the uses of a parameter contribute, for some samples and all scores."""
        term, gradients = contribution.parts[0]
        whole = name in self.whole or len(contribution.parts) > 1
        if whole or not self._is_product(name, term):
            for found in contribution.gradients():
                self._add_gradients(name, found)
            return
        # Scores come in groups. The inputs are the same for all groups of a chunk, and count once.
        key = (name, samples.start)
        unread = key not in self._read
        self._read.add(key)
        if isinstance(term.use, Embedding):
            self._add_lookup(name, term.use, gradients, inputs_too=unread)
        else:
            self._add_product(name, term, gradients, inputs_too=unread)

    def add_gradients(self, name: str, samples: slice, gradients: Tensor) -> None:
        """Add the gradients ``[n, *shape]`` of single samples for one score."""
        self._add_gradients(name, gradients)

    def add_sums(self, name: str, sums: list[Tensor], places: int, *, inputs_too: bool) -> None:
        """Add sums over samples that are made already: over rows, and over columns where there are any."""
        self.rows[name] += _as_kept(sums[0], self.rows[name])
        if inputs_too and name in self.columns:
            self.columns[name] += _as_kept(sums[1], self.columns[name])
            self.places[name] += places

    def _is_product(self, name: str, term: Term) -> bool:
        """Whether the gradient of a use's weight is a sum over places of a product of two vectors."""
        use = term.use
        if term.slot != "weight" or name not in self.columns:
            return False
        if isinstance(use, Conv):
            of_rows = self.sides[name][0] == use.slots["weight"].shape[0]
            plain = use.config["groups"] == 1 and not use.config.get("transposed")
            return plain and of_rows and term.way == ()
        if isinstance(use, Linear):
            return use.config.get("transposed", False) and term.way in ((), ("TBackward0",))
        return isinstance(use, Embedding) and term.way == ()

    def _add_product(
        self, name: str, term: Term, gradients: list[Tensor], *, inputs_too: bool
    ) -> None:
        """For ``G = Σ_t b_t a_tᵀ``, give ``b bᵀ`` of every score to the rows and ``a aᵀ`` to the columns.

        A weight ``[D, C]`` that rows are multiplied by as it is has ``a aᵀ`` in the rows.
        """
        of_outputs, of_inputs = self.rows[name], self.columns[name]
        if isinstance(term.use, Linear) and term.way == ():
            of_outputs, of_inputs = of_inputs, of_outputs
        for b in gradients:
            _add_gram(of_outputs, _by_place(term.use, b))
        if inputs_too:
            for a in _inputs_by_place(term.use):
                _add_gram(of_inputs, a)
                self.places[name] += len(a)

    def _add_lookup(
        self, name: str, use: Use, gradients: list[Tensor], *, inputs_too: bool
    ) -> None:
        """For ``G = Σ_t e_{x_t} b_tᵀ``, count the indices ``x`` in the rows and give ``b bᵀ`` to the columns."""
        index = use.saved[0].reshape(-1)
        padding = use.config["padding_idx"]
        counted = torch.ones_like(index, dtype=torch.bool) if padding is None else index != padding
        for b in gradients:
            _add_gram(self.columns[name], b.flatten(0, -2)[counted])
        if inputs_too:
            rows = self.rows[name]
            counts = torch.bincount(index[counted], minlength=len(rows))
            (rows if rows.dim() == 1 else rows.diagonal()).add_(counts)
            self.places[name] += counted.sum()

    def _add_gradients(self, name: str, gradients: Tensor) -> None:
        """Give ``G Gᵀ`` to the rows and ``Gᵀ G`` to the columns."""
        rows = self.rows[name]
        G = gradients.reshape(len(gradients), len(rows), -1)  # [n, R, D]
        _add_gram(rows, G.transpose(1, 2).flatten(0, 1))
        if name in self.columns:
            _add_gram(self.columns[name], G.flatten(0, 1))
            self.squares[name] += G.square().sum()

    def mixed(self) -> frozenset[str]:
        """Return the parameters that got products for some samples and whole gradients for others."""
        return frozenset(name for name in self.columns if self.places[name] and self.squares[name])

    def means(self, name: str, n: float) -> tuple[Tensor, Tensor | None]:
        """Return the factors of a parameter, of rows and of columns, for sums over ``n`` samples."""
        if name not in self.columns:
            return self.rows[name] / n, None
        if self.squares[name]:
            return self.rows[name] / n, self.columns[name] / self.squares[name]
        places = self.places[name].clamp_min(1)  # a weight that was not used has zeros
        return self.rows[name] / places, self.columns[name] / n

    def flat(self) -> Tensor:
        """Return all sums as one vector."""
        return torch.cat([sums[name].flatten() for sums, name in self._all()])

    def load_flat(self, values: Tensor) -> None:
        """Take all sums from a vector that :meth:`flat` returned for the same parameters."""
        sizes = [sums[name].numel() for sums, name in self._all()]
        for (sums, name), part in zip(self._all(), values.split(sizes), strict=True):
            sums[name] = part.view_as(sums[name])

    def _all(self) -> Iterator[tuple[ParamDict, str]]:
        for sums in (self.rows, self.columns, self.places, self.squares):
            for name in sums:
                yield sums, name


def matrix_shape(shape: torch.Size, *, kernel: bool = False) -> tuple[int, int | None]:
    """Return how many rows and columns a parameter has; None in place of columns for a vector or a number.

    Args:
        shape: The parameter's shape.
        kernel: Whether it belongs to a convolution, whose first axis counts outputs, also if there is only one.

    Example:
        >>> matrix_shape(torch.Size([1, 2, 5, 5]), kernel=True), matrix_shape(torch.Size([1, 7, 4]))
        ((1, 50), (7, 4))
        >>> matrix_shape(torch.Size([1, 1, 4])), matrix_shape(torch.Size([1, 4]))
        ((4, None), (1, 4))
    """
    sizes = list(shape)
    while len(shape) > 2 and len(sizes) > 1 and sizes[0] == 1 and not kernel:
        del sizes[0]
    if len(sizes) < 2:
        return math.prod(sizes), None
    return sizes[0], math.prod(sizes[1:])


def _by_place(use: Use, b: Tensor) -> Tensor:
    """Return the gradients by a use's output, one place a row: ``[places, R]``."""
    if isinstance(use, Conv):
        return b.flatten(2).transpose(1, 2).flatten(0, 1)
    return b.flatten(0, -2)


def _inputs_by_place(use: Use) -> Iterator[Tensor]:
    """Yield the inputs of a use in blocks, one place a row: ``[places, D]``."""
    a = use.saved[0]
    if not isinstance(use, Conv):
        yield a.flatten(0, -2)
        return
    entries = math.prod(use.slots["weight"].shape[1:])
    samples = max(1, 4 * BLOCK // (entries * use.shape[2:].numel()))
    for some in a.split(samples):
        yield _patches(use, some)


def _patches(use: Conv, a: Tensor) -> Tensor:
    """Return what the kernel of a convolution meets at each position, ``[N·positions, C·kernel]``."""
    kernel = use.slots["weight"].shape[2:]
    positions = use.shape[2:]
    axes = [*zip(use.config["dilation"], use.config["stride"], positions, strict=True)]
    a = F.pad(a, [size for size in reversed(use.config["padding"]) for _ in ("before", "after")])
    entries = []
    for offsets in product(*map(range, kernel)):
        window = [
            slice(dilation * i, dilation * i + stride * (size - 1) + 1, stride)
            for i, (dilation, stride, size) in zip(offsets, axes, strict=True)
        ]
        everywhere = [slice(None), slice(None)]  # samples and channels
        entries.append(a[tuple(everywhere + window)].flatten(2))
    return torch.stack(entries, dim=2).flatten(1, 2).transpose(1, 2).flatten(0, 1)


def _add_gram(total: Tensor, x: Tensor) -> None:
    """Add ``xᵀx`` to a matrix, or the diagonal of it to a vector."""
    x = x.to(total.dtype)
    if total.dim() == 1:
        total += x.square().sum(0)
    else:
        total.addmm_(x.T, x)


def _as_kept(matrix: Tensor, kept: Tensor) -> Tensor:
    return matrix.diagonal() if kept.dim() == 1 else matrix
