"""Kronecker factors of the Fisher information of any network: one interface, and two ways to compute them."""

from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._batches import sample_count, take
from lightning_taskinfo._observe import at_least_float32, full_precision, observing, parts
from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo.fisher.backpack import ChainFactors, NotCoveredError
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.fisher.kron_sums import MAX_SIDE, KroneckerSums
from lightning_taskinfo.fisher.measure import Request, measure
from lightning_taskinfo.functional.likelihood import Labels, Likelihood

KroneckerEngine: TypeAlias = Literal["auto", "backpack", "own"]
ENGINES = ("auto", "backpack", "own")


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
        >>> factors.eigenvalues().tolist(), factors.trace().item()
        ([[3.0], [6.0]], 9.0)
    """

    rows: Tensor
    columns: Tensor | None = None

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of the block, ``[R, D]`` in float64; one column for a vector."""
        of_rows = _eigenvalues(self.rows)
        if self.columns is None:
            return of_rows[:, None]
        return of_rows.outer(_eigenvalues(self.columns))

    def eigen(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the eigenvalues ``[R, D]``, and the eigenvectors of rows and columns; None where there are none."""
        of_rows, rows = _eigen(self.rows)
        if self.columns is None:
            return of_rows[:, None], rows, None
        of_columns, columns = _eigen(self.columns)
        return of_rows.outer(of_columns), rows, columns

    def diagonals(self) -> tuple[Tensor, Tensor]:
        """Return the diagonals of both factors, ``[R]`` and ``[D]``; a single 1 for the columns of a vector."""
        of_rows = _diagonal(self.rows)
        of_columns = of_rows.new_ones(1) if self.columns is None else _diagonal(self.columns)
        return of_rows, of_columns

    def trace(self) -> Tensor:
        """Return the trace of the block, a scalar."""
        of_rows, of_columns = self.diagonals()
        return of_rows.sum() * of_columns.sum()


def kronecker_factors(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    *,
    labels: Labels = "sampled",
    likelihood: str | Likelihood = "categorical",
    mc_samples: int = 1,
    generator: Generator | None = None,
    engine: KroneckerEngine = "auto",
    chunk_size: int | None = None,
    max_side: int = MAX_SIDE,
    forward_fn: Forward | None = None,
) -> dict[str, KroneckerFactors]:
    r"""Kronecker factors of the Fisher information for every trainable parameter, means over samples.

    .. math:: F_W \approx B \otimes A, \qquad A = \frac1N \sum_n \sum_t a_{nt} a_{nt}^\top, \qquad
        B = \frac{1}{NT} \sum_n \sum_t \mathbb{E}_y\, b_{nt} b_{nt}^\top

    for a linear layer or a convolution. It is applied at :math:`T` places of a sample, such as tokens or output
    positions; :math:`a_{nt}` is its input there (of a convolution, the patch) and :math:`b_{nt}` the score's gradient
    by its output. This is KFAC, KFC for convolutions and KFAC-expand for sequences. It equals :math:`F_W` where inputs,
    gradients and places are independent, e.g. for one sample with one place.

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
        labels: Whose labels: ``"sampled"`` from the model (KFAC), ``"exact"`` expectation over them (KFLR), or the
            dataset's (``"empirical"``, which is not the Fisher).
        likelihood: What the outputs mean, as for :func:`~lightning_taskinfo.fisher.fisher_trace`.
        mc_samples: Number of labels drawn for each sample, for ``labels="sampled"``.
        generator: Source of the draws, on the device of the outputs.
        engine: ``"backpack"`` for BackPACK, which serves chains of linear, convolution, activation and pooling layers;
            ``"own"`` for any network; ``"auto"`` takes BackPACK where it is installed and serves the network. Both give
            the same factors.
        chunk_size: Samples of one forward pass.
        max_side: Of a factor with a longer side than this, such as that of a vocabulary, only the diagonal is kept.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by default.

    Returns:
        The factors by parameter name.

    Raises:
        ValueError: If an argument is out of its range, or BackPACK is asked for and does not serve the network.
        ModuleNotFoundError: If BackPACK is asked for and is not installed.

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
    request = Request(labels, likelihood, mc_samples, generator, "auto", chunk_size, forward_fn)
    sums = kronecker_sums(model, inputs, targets, request, engine=engine, max_side=max_side)
    return as_factors(sums, sample_count(inputs))


def kronecker_sums(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    request: Request,
    *,
    engine: KroneckerEngine = "auto",
    max_side: int = MAX_SIDE,
) -> KroneckerSums:
    """Return the sums over samples that factors are made of; those of several batches add up.

    Args:
        model: The network.
        inputs: A batch of inputs.
        targets: The dataset's labels, or None.
        request: How to measure.
        engine: Who computes them.
        max_side: The longest side of a factor that is kept as a whole.
    """
    if engine not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}, got {engine!r}.")
    check_counts(max_side=max_side)
    if engine != "own":
        try:
            return _from_backpack(model, inputs, targets, request.again(), max_side)
        except NotCoveredError as error:
            if engine == "backpack":
                raise ValueError(
                    f"`engine='backpack'` does not serve this model: {error}; use 'auto'."
                ) from error
        except ModuleNotFoundError:
            if engine == "backpack":
                raise
    sums = KroneckerSums(model, max_side)
    measure(model, inputs, targets, request.again(), sums)
    if mixed := sums.mixed():
        # Some samples had to take a slower engine, which only knows whole gradients: take those of all samples.
        sums = KroneckerSums(model, max_side, whole=mixed)
        measure(model, inputs, targets, request.again(), sums)
    return sums


def as_factors(sums: KroneckerSums, n: float) -> dict[str, KroneckerFactors]:
    """Return the factors by parameter name, from sums over ``n`` samples.

    Raises:
        ValueError: If the samples of a parameter were served in different ways on different processes.
    """
    if mixed := sums.mixed():
        raise ValueError(
            f"Kronecker factors of {min(mixed)!r} are of different kinds in different batches, as where only some of "
            "them are sorted or routed; measure the diagonal instead."
        )
    return {name: KroneckerFactors(*found.means(n)) for name, found in sums.by_name.items()}


def _from_backpack(
    model: nn.Module, inputs: Any, targets: Tensor | None, request: Request, max_side: int
) -> KroneckerSums:
    """Let BackPACK pass the output scores backwards, chunk by chunk."""
    sums = KroneckerSums(model, max_side)
    generator = request.generator
    state = None if generator is None else generator.get_state()
    step = request.chunk_size or 128
    try:
        with observing(model), full_precision(parts(model)):
            chain = ChainFactors(model, request.forward)
            for start in range(0, sample_count(inputs), step):
                chunk = slice(start, start + step)
                outputs = chain.outputs(take(take(inputs, itemgetter(chunk)), at_least_float32))
                of_chunk = None if targets is None else targets[chunk]
                first = True
                for scores, last in request.scores(outputs, of_chunk):
                    for name, rows, columns, places in chain.factors(
                        outputs, scores, keep=not last
                    ):
                        found = sums.by_name[name]
                        found.rows += _as_kept(rows, found.rows)
                        if first and columns is not None:
                            found.columns += _as_kept(columns, found.columns)
                            found.places += places
                    first = False
    except NotCoveredError:
        if generator is not None and state is not None:
            generator.set_state(state)  # so that the labels of the first chunks are drawn again
        raise
    return sums


def _as_kept(matrix: Tensor, kept: Tensor) -> Tensor:
    return _diagonal(matrix) if kept.dim() == 1 else matrix


def _diagonal(factor: Tensor) -> Tensor:
    return factor if factor.dim() == 1 else factor.diagonal()


def _eigen(factor: Tensor) -> tuple[Tensor, Tensor | None]:
    if factor.dim() == 1:
        return _eigenvalues(factor), None
    values, vectors = torch.linalg.eigh(factor.double())
    return values.clamp_min(0), vectors


def _eigenvalues(factor: Tensor) -> Tensor:
    factor = factor.double()
    values = factor if factor.dim() == 1 else torch.linalg.eigvalsh(factor)
    return values.clamp_min(0)  # rounding makes some negative
