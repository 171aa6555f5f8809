r"""Kronecker factors of the Fisher information of any network: one interface, and two ways to compute them.

The gradient of a weight :math:`W`, seen as a matrix ``[R, D]``, is a sum over the places :math:`t`
at which a layer is applied to sample :math:`n`: :math:`G_n = \sum_t b_{nt} a_{nt}^\top`. KFAC takes
inputs :math:`a`, gradients :math:`b` by the outputs, and different places, for independent. So it
needs no gradient of a single sample, and does not have to know which place belongs to which sample.
What is kept are two matrices and a number, so that chunks, batches and processes simply add up:

.. math:: F_W \approx \frac{\mathcal R \otimes \mathcal C}{N\,w}

- a matrix or kernel with one use: :math:`\mathcal R = \sum b b^\top`,
  :math:`\mathcal C = \sum a a^\top`, :math:`w` the number of places (KFAC);
- a table of embeddings, whose inputs are the indices of its rows: :math:`\mathcal R` their counts,
  a diagonal, :math:`\mathcal C = \sum b b^\top`, :math:`w` the number of places;
- any other matrix: :math:`\mathcal R = \sum_n G_n G_n^\top`,
  :math:`\mathcal C = \sum_n G_n^\top G_n`, :math:`w = \sum_n \|G_n\|^2`;
- a vector: :math:`\mathcal R = \sum_n g_n g_n^\top` alone, which is exact.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lightning_taskinfo._nested import sample_count, split
from lightning_taskinfo._observe import (
    at_least_float32,
    full_precision,
    observing,
    parts,
    trainable_parameters,
)
from lightning_taskinfo.fisher.measure import Request, check_parameters, measure
from lightning_taskinfo.fisher.ops import Conv, Embedding, Use, as_places, blocks
from lightning_taskinfo.fisher.terms import Gradients

MAX_SIDE = 8192  # of a factor that is kept as a whole: half a gigabyte in float64


@dataclass(frozen=True)
class KroneckerFactors:
    r"""The block :math:`F_W \approx \mathrm{rows} \otimes \mathrm{columns}` of one parameter, seen as a matrix.

    The first axis of a parameter counts its rows, all others its columns; of a parameter that is no kernel of a
    convolution, leading axes of length 1 are dropped before. A vector has rows alone, and its block is exact.

    Attributes:
        rows: Shape ``[R, R]``; its diagonal ``[R]`` where no more of it is kept.
        columns: Shape ``[D, D]``, or ``[D]`` in the same way; None for a vector.

    Example:
        >>> factors = KroneckerFactors(torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([3.0]))
        >>> factors.eigen()[0].tolist(), factors.trace().item()
        ([[3.0], [6.0]], 9.0)
    """

    rows: Tensor
    columns: Tensor | None = None

    def eigen(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the eigenvalues ``[R, D]`` in float64, and the eigenvectors of rows and columns; None for none.

        A vector has one column of eigenvalues.
        """
        of_rows, rows = _eigen(self.rows)
        if self.columns is None:
            return of_rows[:, None], rows, None
        of_columns, columns = _eigen(self.columns)
        return of_rows.outer(of_columns), rows, columns

    def diagonals(self) -> tuple[Tensor, Tensor]:
        """Return the diagonals of both factors, ``[R]`` and ``[D]``; a single 1 for the columns of a vector."""
        of_rows = _diagonal(self.rows)
        if self.columns is None:
            return of_rows, of_rows.new_ones(1)
        return of_rows, _diagonal(self.columns)

    def trace(self) -> Tensor:
        """Return the trace of the block, a scalar."""
        of_rows, of_columns = self.diagonals()
        return of_rows.sum() * of_columns.sum()


@dataclass
class Sums:
    """The sums of one parameter: two matrices, or their diagonals, and the two numbers that may divide them.

    Attributes:
        rows: Shape ``[R, R]``, or ``[R]``.
        columns: Shape ``[D, D]``, or ``[D]``; nothing, ``[0, 0]``, for a vector.
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
        if not gradients.numel():  # of a parameter without entries
            return
        G = gradients.reshape(len(gradients), len(self.rows), -1)  # [n, R, D]
        columns = G.transpose(1, 2).flatten(0, 1)  # [n D, R]
        add_gram(self.rows, columns)
        if len(self.columns):
            add_gram(self.columns, G.flatten(0, 1))
            self.squares += G.square().sum()

    def factors(self, n: float) -> KroneckerFactors:
        """Return the factors, for sums over ``n`` samples."""
        if not len(self.columns):
            return KroneckerFactors(self.rows / n)
        if self.squares:
            return KroneckerFactors(self.rows / n, self.columns / self.squares)
        places = self.places.clamp_min(1)  # an unused weight has zeros
        return KroneckerFactors(self.rows / places, self.columns / n)


class KroneckerSums:
    """Sums over samples by parameter name, to which the engine adds what it finds; see the top of this file.

    Args:
        model: The network whose trainable parameters are measured.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = trainable_parameters(model)
        check_parameters(parameters)
        first = next(iter(parameters.values()))
        like = at_least_float32(first.detach())

        def zeros(side: int, diagonal: bool = False) -> Tensor:
            return like.new_zeros([side] if diagonal or side > MAX_SIDE else [side, side])

        self.by_name: dict[str, Sums] = {}
        self._read: set[tuple[str, int]] = set()
        for name, p in parameters.items():
            layer, _, _ = name.rpartition(".")
            owner = model.get_submodule(layer)
            rows, columns = matrix_shape(p.shape, kernel=isinstance(owner, _ConvNd))
            of_rows = zeros(rows, diagonal=isinstance(owner, nn.Embedding))
            self.by_name[name] = Sums(of_rows, zeros(columns), *like.new_zeros(2))

    def add(
        self,
        samples: slice,
        name: str,
        found: Gradients,
    ) -> None:
        """Add the gradients of a parameter, for some samples and scores."""
        sums = self.by_name[name]
        if found.only is None or not _is_product(found.only[0], sums):
            for _, gradients in found.formed():
                sums.add_gradients(gradients)
            return
        # The gradient is Σ_t b_t a_tᵀ: one factor has b bᵀ of every score, the other has a aᵀ.
        use: Any
        use, scores = found.only
        of_outputs, of_inputs = sums.rows, sums.columns
        if isinstance(use, Embedding) or use.inputs_in_rows:
            of_outputs, of_inputs = of_inputs, of_outputs
        for b in scores if scores.dim() == 4 else as_places(scores):
            add_gram(of_outputs, b.flatten(0, 1))
        # Scores come in groups. The inputs are the same for all groups of a chunk, and count once.
        if (name, samples.start) in self._read:
            return
        self._read.add((name, samples.start))
        if isinstance(use, Embedding):  # a is one of the unit vectors
            counted = use.index[use.index != use.padding_idx]
            _diagonal(of_inputs).add_(torch.bincount(counted, minlength=use.shape[0]))
            sums.places += len(counted)
        elif isinstance(use, Conv):
            for some in blocks(len(use.inputs), use.entries // 4):
                patches = use.patches(use.inputs[some]).mT.flatten(0, 1)
                add_gram(of_inputs, patches)
                sums.places += len(patches)
        else:
            a = use.rows.rows_first(use.inputs).flatten(0, -2)
            add_gram(of_inputs, a)
            sums.places += len(a)

    def summed(self, over_processes: Callable[[Tensor], Tensor]) -> "KroneckerSums":
        """Return the sums of all processes, by a function that adds up the tensors that each of them has."""
        whole = copy.copy(self)
        whole.by_name = {
            name: Sums(*map(over_processes, vars(sums).values()))
            for name, sums in self.by_name.items()
        }
        return whole


def kronecker_factors(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    **options: Any,
) -> dict[str, KroneckerFactors]:
    r"""Kronecker factors of the Fisher information for every trainable parameter, means over samples.

    .. math:: F_W \approx B \otimes A, \qquad A = \frac1N \sum_n \sum_t a_{nt} a_{nt}^\top, \qquad
        B = \frac{1}{NT} \sum_n \sum_t \mathbb{E}_y\, b_{nt} b_{nt}^\top

    for a linear layer or a convolution. It is applied at :math:`T` places of a sample, such as tokens or output
    positions; :math:`a_{nt}` is its input there (of a convolution, the patch) and :math:`b_{nt}` the score's gradient
    by its output. This is KFAC, KFC for convolutions and KFAC-expand for sequences. It equals :math:`F_W` where inputs,
    gradients and places are independent, e.g. for one sample with one place. BackPACK computes the factors where it is
    installed and serves the network, an ``nn.Sequential`` of linear, convolution, activation and pooling layers. Our
    own are the same.

    Other parameters:

    - A vector, such as a bias or a scale, has its exact block :math:`\mathbb{E}[g g^\top]`.
    - A table of embeddings has the counts of its rows in place of :math:`A`, a diagonal.
    - Any other matrix gets :math:`\mathbb{E}[GG^\top] \otimes \mathbb{E}[G^\top G] / \mathbb{E}\|G\|^2` from the
      gradients :math:`G` of single samples, which has the trace of :math:`F_W`: a weight that is tied or used twice, a
      position embedding, a kernel of a grouped convolution, or a weight that only the slower engines serve.

    Args:
        model: Any module; its parameters with ``requires_grad=True`` are measured.
        inputs: A batch of ``N`` inputs: a tensor ``[N, ...]``, or tuples, lists and dicts of them.
        targets: The dataset's labels; needed for ``labels="empirical"``, otherwise they only say what to ignore.
        **options: The other arguments of :func:`~lightning_taskinfo.fisher.fisher_trace`. Labels are drawn from the
            model by default (KFAC); ``labels="exact"`` is KFLR.

    Returns:
        The factors by parameter name. Of a factor with a side above 8192, such as that of a vocabulary, only the
        diagonal is kept.

    Raises:
        ValueError: If an argument is out of its range, or samples are served in different ways.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
        >>> weight = kronecker_factors(nn.Linear(2, 1), x, labels="exact", likelihood="gaussian")["weight"]
        >>> weight.rows, weight.columns  # 1, and the mean of xxᵀ
        (tensor([[1.]]), tensor([[5., 0.],
                [0., 0.]]))

    References:
        Martens, Grosse, *Optimizing neural networks with Kronecker-factored approximate curvature*, ICML 2015; Grosse,
        Martens, *A Kronecker-factored approximate Fisher matrix for convolution layers*, ICML 2016; Eschenhagen et al.,
        *Kronecker-factored approximate curvature for modern neural network architectures*, NeurIPS 2023.
    """
    sums = kronecker_sums(model, inputs, targets, Request(**options))
    return as_factors(sums, sample_count(inputs))


def kronecker_sums(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    request: Request,
) -> KroneckerSums:
    """Return the sums over samples that factors are made of; those of several batches add up.

    Args:
        model: The network.
        inputs: A batch of inputs.
        targets: The dataset's labels, or None.
        request: How to measure.
    """
    sums = KroneckerSums(model)
    if _backpack_covers(model, inputs, request):
        _add_by_backpack(sums, model, inputs, targets, request)
    else:
        measure(model, inputs, targets, request, sums)
    return sums


def as_factors(
    sums: KroneckerSums,
    n: float,
) -> dict[str, KroneckerFactors]:
    """Return the factors by parameter name, from sums over ``n`` samples.

    Raises:
        ValueError: If the samples of a parameter were served in different ways.
    """
    factors: dict[str, KroneckerFactors] = {}
    for name, found in sums.by_name.items():
        if (
            found.places and found.squares
        ):  # products of some samples, and whole gradients of others
            raise ValueError(
                f"Kronecker factors of {name!r} are of different kinds in different batches, as where only some of "
                "them are sorted or routed; measure the diagonal instead."
            )
        factors[name] = found.factors(n)
    return factors


def matrix_shape(
    shape: torch.Size,
    *,
    kernel: bool = False,
) -> tuple[int, int]:
    """Return how many rows and columns a parameter has; no columns for a vector or a number.

    Args:
        shape: The parameter's shape.
        kernel: Whether it belongs to a convolution, whose first axis counts outputs, also if there
            is only one.

    Example:
        >>> matrix_shape(torch.Size([1, 2, 5, 5]), kernel=True), matrix_shape(torch.Size([1, 7, 4]))
        ((1, 50), (7, 4))
        >>> matrix_shape(torch.Size([1, 1, 4])), matrix_shape(torch.Size([1, 4]))
        ((4, 0), (1, 4))
    """
    sizes = list(shape)
    if len(sizes) > 2 and not kernel:
        while len(sizes) > 1 and sizes[0] == 1:
            del sizes[0]
    if len(sizes) < 2:
        return math.prod(sizes), 0
    return sizes[0], math.prod(sizes[1:])


def _is_product(
    use: Use,
    sums: Sums,
) -> bool:
    """Whether the gradient of a parameter with this use alone is a sum over places of products of two vectors."""
    if isinstance(use, Conv):
        return use.plain and len(sums.rows) == use.shape[0] and use.at.way == ()
    return use.joint is not None and len(sums.columns) > 0


def add_gram(
    total: Tensor,
    x: Tensor,
) -> None:
    """Add ``xᵀx`` to a matrix, or the diagonal of it to a vector."""
    x = x.to(total.dtype)
    if total.dim() == 1:
        total += x.square().sum(0)
    else:
        total.addmm_(x.T, x)


def add_matrix(
    total: Tensor,
    matrix: Tensor,
) -> None:
    """Add a matrix to another, or its diagonal to a vector."""
    total += _diagonal(matrix) if total.dim() == 1 else matrix


def _diagonal(factor: Tensor) -> Tensor:
    return factor if factor.dim() == 1 else factor.diagonal()


def _eigen(factor: Tensor) -> tuple[Tensor, Tensor | None]:
    factor = factor.double()
    if factor.dim() == 1:
        return factor.clamp_min(0), None
    values, vectors = torch.linalg.eigh(factor)
    return values.clamp_min(0), vectors  # rounding makes some negative


# --- What BackPACK computes for us: Kronecker factors of chains of layers

# Layers whose Kronecker factors BackPACK has, or through which it can pass them on, with these options.
KNOWN = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ReLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.MaxPool2d,
    nn.Flatten,
    nn.Dropout,
)
USUAL = {
    "padding_mode": "zeros",
    "groups": 1,
    "inplace": False,
    "return_indices": False,
    "start_dim": 1,
    "end_dim": -1,
}


def _backpack_covers(
    model: nn.Module,
    inputs: Any,
    request: Request,
) -> bool:
    """Whether BackPACK is there, and a network is known to be a chain of layers that it serves, on a tensor.

    BackPACK finds what it passes backwards by the memory address of tensors, and would not notice an operation in
    place, or a view, between two layers.
    """
    usable = isinstance(inputs, Tensor) and inputs.is_floating_point()
    if find_spec("backpack") is None or request.forward_fn is not None or not usable:
        return False
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    layers = _layers(model)
    axes = inputs.dim()
    for _, layer in layers:
        usual = all(getattr(layer, key, value) == value for key, value in USUAL.items())
        if type(layer) not in KNOWN or not usual or isinstance(getattr(layer, "padding", 0), str):
            return False
        if isinstance(layer, nn.Flatten):
            axes = 2
        if isinstance(layer, nn.Linear) and axes != 2:  # on sequences
            return False
    owned = [x for _, layer in layers for x in (layer, *layer.parameters())]
    tied = len({*owned}) < len(owned)
    return not tied and all(p.requires_grad for p in model.parameters())


def _add_by_backpack(
    sums: KroneckerSums,
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor | None,
    request: Request,
) -> None:
    """Let BackPACK pass the output scores backwards, chunk by chunk, and add what it finds for each parameter."""
    from backpack import backpack, extend

    loss = extend(nn.MSELoss(reduction="sum"))
    with observing(model), full_precision(parts(model)):
        network = copy.deepcopy(model)
        chain = [(name, extend(layer)) for name, layer in _layers(network)]
        for chunk, of_chunk in split((inputs, targets), request.chunk_size or 128):
            outputs = at_least_float32(chunk).detach().requires_grad_()
            n = len(outputs)
            places: dict[str, int] = {}
            for name, layer in chain:
                outputs = layer(outputs)
                places[name] = n * outputs.shape[2:].numel()
            counted = False  # whether the inputs are
            for scores, last in request.scores(outputs, of_chunk):
                extension = _factors_from(torch.stack(scores))  # a new one: it keeps what it passes
                with backpack(extension, retain_graph=not last):
                    loss(outputs, torch.zeros_like(outputs)).backward(retain_graph=not last)
                for name, p in network.named_parameters():
                    found = sums.by_name[name]
                    rows, *columns = getattr(p, extension.savefield)
                    add_matrix(found.rows, rows)
                    if columns and not counted:
                        add_matrix(found.columns, n * columns[0])
                        layer_name, _, _ = name.rpartition(".")
                        found.places += places[layer_name]
                counted = True


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of a chain in their order, one that is there twice both times."""
    modules = model.named_modules(remove_duplicate=False)
    return [(name, layer) for name, layer in modules if type(layer) is not nn.Sequential]


def _factors_from(scores: Tensor) -> Any:
    r"""Return BackPACK's extension for Kronecker factors, with two parts replaced.

    The square root of the loss's curvature, which its backward pass starts from, is made of **our** output scores: so
    labels, likelihood and random numbers are the caller's. And the output factor of a convolution is that of KFC,
    :math:`\sum_t b_t b_t^\top`; BackPACK takes the block of the bias there, in which positions are summed before they
    are squared.

    Args:
        scores: What its backward pass starts from, ``[scores, N, C]``.
    """
    from backpack.extensions import KFLR
    from backpack.extensions.secondorder.hbp.convnd import HBPConvNd
    from backpack.extensions.secondorder.hbp.losses import HBPMSELoss

    class Scores(HBPMSELoss):
        def backpropagate(self, *_: Any) -> Tensor:
            return scores

    class KFC(HBPConvNd):
        def weight(self, *arguments: Any) -> list[Tensor]:
            _, A = super().weight(*arguments)
            passed = arguments[-1]
            b = passed.flatten(3)  # [scores, N, channels, positions]
            return [torch.einsum("snit,snjt->ij", b, b), A]

    extension = KFLR()
    extension.set_module_extension(nn.MSELoss, Scores(), overwrite=True)
    for dims, kind in enumerate((nn.Conv1d, nn.Conv2d, nn.Conv3d), start=1):
        extension.set_module_extension(kind, KFC(dims), overwrite=True)
    return extension
