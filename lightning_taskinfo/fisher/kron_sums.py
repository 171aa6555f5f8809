r"""The sums over samples that Kronecker factors are made of.

The gradient of a weight :math:`W`, seen as a matrix ``[R, D]``, is a sum over the places :math:`t`
at which a layer is applied to sample :math:`n`: :math:`G_n = \sum_t b_{nt} a_{nt}^\top`. KFAC takes
inputs :math:`a`, gradients :math:`b` by the outputs, and different places, for independent. So it
needs no gradient of a single sample, and does not have to know which place belongs to which sample.
What is kept are two matrices and a number, so that chunks, batches and processes simply add up:

.. math:: F_W \approx \frac{\mathcal R \otimes \mathcal C}{N\,w}

- a matrix or kernel with one use: :math:`\mathcal R = \sum b b^\top`,
  :math:`\mathcal C = \sum a a^\top`, :math:`w` the number of places (KFAC);
- a table of embeddings, whose inputs are the indices of its rows: :math:`\mathcal R` their counts,
  a diagonal,
  :math:`\mathcal C = \sum b b^\top`, :math:`w` the number of places;
- any other matrix: :math:`\mathcal R = \sum_n G_n G_n^\top`,
  :math:`\mathcal C = \sum_n G_n^\top G_n`,
  :math:`w = \sum_n \|G_n\|^2`;
- a vector: :math:`\mathcal R = \sum_n g_n g_n^\top` alone, which is exact.
"""

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lightning_taskinfo._observe import at_least_float32, trainable_parameters
from lightning_taskinfo.fisher.conv import Conv
from lightning_taskinfo.fisher.ops import BLOCK, Embedding, Product, Use
from lightning_taskinfo.fisher.terms import Gradients, Term

MAX_SIDE = 8192  # of a factor that is kept as a whole: half a gigabyte in float64


@dataclass
class Sums:
    """The sums of one parameter: two matrices, or their diagonals, and the two numbers that may divide them.

    Attributes:
        rows: Shape ``[R, R]``, or ``[R]``.
        columns: Shape ``[D, D]``, or ``[D]``; nothing, ``[0]``, for a vector.
        places: How often the weight was applied, as far as products of inputs and gradients were
            added.
        squares: Squared norms of the gradients of single samples, as far as these were added.
    """

    rows: Tensor
    columns: Tensor
    places: Tensor
    squares: Tensor

    def add_gradients(self, gradients: Tensor) -> None:
        """Give ``G Gᵀ`` to the rows and ``Gᵀ G`` to the columns, for gradients ``G`` of single samples."""
        G = gradients.reshape(len(gradients), len(self.rows), -1)  # [n, R, D]
        add_gram(self.rows, G.transpose(1, 2).flatten(0, 1))
        if len(self.columns):
            add_gram(self.columns, G.flatten(0, 1))
            self.squares += G.square().sum()

    def mixed(self) -> bool:
        """Whether products were added for some samples, and whole gradients for others."""
        return bool(self.places) and bool(self.squares)

    def means(self, n: float) -> tuple[Tensor, Tensor | None]:
        """Return the factors of rows and of columns, for sums over ``n`` samples."""
        if not len(self.columns):
            return self.rows / n, None
        if self.squares:
            return self.rows / n, self.columns / self.squares
        return self.rows / self.places.clamp_min(1), self.columns / n  # an unused weight has zeros


class KroneckerSums:
    """Sums over samples by parameter name, to which the engine adds what it finds; see the top of this file.

    Args:
        model: The network whose trainable parameters are measured.
        max_side: The longest side of a factor that is kept as a whole.
        whole: Parameters whose factors are made of the gradients of single samples in any case.
    """

    def __init__(
        self, model: nn.Module, max_side: int = MAX_SIDE, whole: frozenset[str] = frozenset()
    ) -> None:
        parameters = trainable_parameters(model)
        if not parameters:
            raise ValueError("`model` must have a parameter with `requires_grad=True`, got none.")
        like = at_least_float32(next(iter(parameters.values())).detach())

        def zeros(side: int, diagonal: bool = False) -> Tensor:
            return like.new_zeros([side] if diagonal or side > max_side else [side, side])

        self.whole = whole
        self.by_name: dict[str, Sums] = {}
        self._read: set[tuple[str, int]] = set()
        for name, p in parameters.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            rows, columns = matrix_shape(p.shape, kernel=isinstance(owner, _ConvNd))
            of_rows = zeros(rows, isinstance(owner, nn.Embedding))
            of_columns = like.new_zeros(0) if columns is None else zeros(columns)
            numbers = like.new_zeros(()), like.new_zeros(())
            self.by_name[name] = Sums(of_rows, of_columns, *numbers)

    def add(self, name: str, samples: slice, found: Gradients) -> None:
        """Add the gradients of a parameter, for some samples and scores."""
        sums = self.by_name[name]
        if name in self.whole or len(found.parts) != 1 or not _is_product(*found.parts[0], sums):
            for _, gradients in found.formed():
                sums.add_gradients(gradients)
            return
        # The gradient is Σ_t b_t a_tᵀ: one factor has b bᵀ of every score, the other has a aᵀ.
        ((term, scores),) = found.parts
        use = term.use
        of_outputs, of_inputs = sums.rows, sums.columns
        if _has_inputs_in_rows(term):
            of_outputs, of_inputs = of_inputs, of_outputs
        for b in scores:
            add_gram(of_outputs, _outputs_by_place(use, b))
        # Scores come in groups. The inputs are the same for all groups of a chunk, and count once.
        if (name, samples.start) in self._read:
            return
        self._read.add((name, samples.start))
        if isinstance(use, Embedding):  # a is one of the unit vectors
            counts = torch.bincount(use.index[_counted(use)], minlength=use.shape[0])
            (of_inputs if of_inputs.dim() == 1 else of_inputs.diagonal()).add_(counts)
            sums.places += counts.sum()
        else:
            for a in _inputs_by_place(use):
                add_gram(of_inputs, a)
                sums.places += len(a)

    def mixed(self) -> frozenset[str]:
        """Return the parameters that got products for some samples and whole gradients for others."""
        return frozenset(name for name, sums in self.by_name.items() if sums.mixed())

    def summed(self, over_processes: Callable[[Tensor], Tensor]) -> "KroneckerSums":
        """Return the sums of all processes, by a function that adds up the tensors that each of them has."""
        whole = copy(self)
        whole.by_name = {
            name: Sums(*(over_processes(part) for part in vars(sums).values()))
            for name, sums in self.by_name.items()
        }
        return whole


def matrix_shape(shape: torch.Size, *, kernel: bool = False) -> tuple[int, int | None]:
    """Return how many rows and columns a parameter has; None in place of columns for a vector or a number.

    Args:
        shape: The parameter's shape.
        kernel: Whether it belongs to a convolution, whose first axis counts outputs, also if there
            is only one.

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


def _is_product(term: Term, scores: Tensor, sums: Sums) -> bool:
    """Whether the gradient of a use's weight is a sum over places of a product of two vectors."""
    use = term.use
    if isinstance(use, Conv):
        return use.plain and len(sums.rows) == use.shape[0] and term.way == ()
    return term.factored and len(sums.columns) > 0


def _has_inputs_in_rows(term: Term) -> bool:
    use = term.use
    if isinstance(use, Product):  # a weight [D, C] that rows are multiplied by as it is
        return use.turned != (term.way == ("TBackward0",))
    return isinstance(use, Embedding)


def _counted(use: Embedding) -> Tensor:
    """Return which lookups count: not those of padding."""
    padding = -1 if use.padding_idx is None else use.padding_idx
    return use.index != padding


def _outputs_by_place(use: Use, b: Tensor) -> Tensor:
    """Return the gradients by a use's output, one place a row: ``[places, R]``."""
    if isinstance(use, Conv):
        return b.flatten(2).transpose(1, 2).flatten(0, 1)
    if isinstance(use, Embedding):
        return b[_counted(use)]
    return use.rows.rows_first(b).flatten(0, -2)


def _inputs_by_place(use: Use) -> Iterator[Tensor]:
    """Yield the inputs of a use in blocks, one place a row: ``[places, D]``."""
    if isinstance(use, Product):
        yield use.rows.rows_first(use.inputs).flatten(0, -2)
    elif isinstance(use, Conv):
        entries = math.prod(use.shape[1:]) * use.positions.numel()
        for some in use.inputs.split(max(1, 4 * BLOCK // entries)):
            yield use.patches(some).transpose(1, 2).flatten(0, 1)


def add_gram(total: Tensor, x: Tensor) -> None:
    """Add ``xᵀx`` to a matrix, or the diagonal of it to a vector."""
    x = x.to(total.dtype)
    if total.dim() == 1:
        total += x.square().sum(0)
    else:
        total.addmm_(x.T, x)
