"""Whiten flat inputs by their covariance, factored once from a loader."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_finite
from lightning_taskinfo._warn import warn
from lightning_taskinfo.regularizers._base import shape_or_kind
from lightning_taskinfo.regularizers._ranks import sum_over_ranks

_FACTORED = 4096  # inputs up to which their covariance is formed and factored
FEWEST = 8  # samples of a batch whose scale is looked at
FAR = 100.0  # times the expected variance is too far, and so is its inverse


class Whitening(NamedTuple):
    """A linear map after which inputs have (nearly) unit covariance."""

    mean: Tensor  # [D]
    matrix: Tensor  # [r, D]
    scales: Tensor  # [r], standard deviations of the directions, ridge included
    effective_dim: Tensor  # tr Σ(Σ + ridge)⁻¹, at most r
    samples: Tensor  # how many inputs it was made from, over all ranks


def fit_whitening(
    batches: Callable[[], Iterator[Tensor]],
    size: int,
    components: int,
    ridge: float,
    outputs: int,
) -> Whitening:
    r"""Whiten by :math:`(\Sigma_x + \epsilon \bar\lambda I)^{-1/2}`, on all inputs or on leading principal directions.

    With ``components == size`` the factor is a Cholesky factor; below, leading eigenvectors. These
    come from the covariance where that fits (``size`` of at most 4,096), and from three passes of
    subspace iteration where not.

    Args:
        batches: Gives a new iterator over flat inputs ``[B, D]`` each time it is called.
        size: Number of inputs ``D``.
        components: Number of directions ``r`` to keep.
        ridge: The :math:`\epsilon`, relative to the mean variance :math:`\bar\lambda` of the
            directions.
        outputs: Number of variables that the inputs are to be compared with.

    Raises:
        ValueError: If there are not more samples than outputs.
    """
    mean, samples = _mean(batches(), size)
    if samples <= outputs:
        raise ValueError(
            f"`loader` must hold more samples than there are outputs ({outputs}), got {int(samples)}: use a larger "
            "unlabeled set."
        )
    if size <= _FACTORED:
        identity = torch.eye(size, dtype=torch.float64, device=mean.device)
        covariance = _scatter(batches(), mean, identity) / samples
        whole = components == size
        factored = _cholesky(covariance, ridge) if whole else _eigen(covariance, components, ridge)
    else:
        factored = _subspace(batches, mean, components, ridge, samples)
    whitening = Whitening(mean, *factored, samples)
    if samples < 2 * whitening.effective_dim:
        warn(
            f"{int(samples)} samples for {float(whitening.effective_dim):.0f} directions of the inputs: correlations "
            "will be overestimated. Use more unlabeled inputs, or fewer `components`.",
        )
    return whitening


def warn_of_scale(whitened: Tensor, effective_dim: Tensor) -> None:
    """Warn if the variance of a batch is 100 times, or a hundredth of, what the fit expects.

    Args:
        whitened: Whitened inputs, shape ``[B, r]``; fewer than eight of them say too little, and
            copies of one input nothing.
        effective_dim: Their expected total variance, of :class:`Whitening`.
    """
    if len(whitened) < FEWEST:
        return
    apart = (whitened - whitened[0]).abs().max()
    if apart <= 1e-5 * whitened.abs().max():  # copies of one input, but for rounding
        return
    # Around the batch's own mean: black images are not far from what images of bytes are like, as a
    # whole.
    ratio = float(whitened.var(0).sum() / effective_dim)  # NaN where the fit saw constants
    if ratio > FAR or ratio < 1 / FAR:
        warn(
            f"`inputs` must be on the scale of what `fit_inputs` was given, got {ratio:.2g} times its variance: the "
            "penalty means nothing then. Fit what the network is trained on, transforms included."
        )


def _mean(batches: Iterator[Tensor], size: int) -> tuple[Tensor, Tensor]:
    total = torch.zeros(size, dtype=torch.float64, device="cpu")
    count = torch.zeros((), dtype=torch.float64, device="cpu")
    for x in batches:
        total = total + x.double().sum(0).cpu()
        count = count + len(x)
    total, count = sum_over_ranks(total, count)
    return total / count.clamp_min(1), count


def _scatter(batches: Iterator[Tensor], mean: Tensor, basis: Tensor) -> Tensor:
    """Return ``Σ_i (x_i − mean)(x_i − mean)ᵀ basis``, shape ``[D, r]``."""
    whole = basis.shape[0] == basis.shape[1]  # then the basis is the identity
    total = torch.zeros_like(basis)
    for x in batches:
        centred = x.double().cpu() - mean
        projected = centred if whole else centred @ basis
        total += centred.T @ projected
    return sum_over_ranks(total)[0]


def _cholesky(covariance: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    D = len(covariance)
    floor = ridge * covariance.diagonal().mean()
    if floor == 0:  # constant inputs: nothing to whiten
        nothing = torch.zeros_like(covariance)
        return nothing, covariance.new_zeros(D), covariance.new_zeros(())
    identity = torch.eye(D, dtype=covariance.dtype, device=covariance.device)
    factor = torch.linalg.cholesky(covariance + floor * identity)
    matrix = torch.linalg.solve_triangular(factor, identity, upper=False)
    scales = matrix.norm(dim=1).reciprocal()
    effective_dim = D - floor * matrix.square().sum()
    return matrix, scales, effective_dim


def _eigen(covariance: Tensor, components: int, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(covariance)
    values = values[-components:].flip(0).clamp_min(0)  # the largest first
    vectors = vectors[:, -components:].flip(1)
    shrunk = values + ridge * values.mean()
    inverse = torch.where(shrunk > 0, shrunk, torch.inf).reciprocal()
    matrix = inverse.sqrt()[:, None] * vectors.T
    effective_dim = (values * inverse).sum()
    return matrix, shrunk.sqrt(), effective_dim


def _subspace(
    batches: Callable[[], Iterator[Tensor]],
    mean: Tensor,
    components: int,
    ridge: float,
    samples: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (len(mean), components + 10)
    basis = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    for _ in range(3):
        basis = torch.linalg.qr(basis).Q
        image = _scatter(batches(), mean, basis) / samples  # Σ basis
        small = basis.T @ image
        previous = basis
        basis = image
    symmetric = (small + small.T) / 2  # Rayleigh–Ritz
    matrix, scales, effective = _eigen(symmetric, components, ridge)
    return matrix @ previous.T, scales, effective


def flat_inputs(loader: Iterable[Any], shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the inputs of each batch of ``loader``, checked and flat.

    A batch is a tensor, a tuple or list whose first element is the inputs, or a dict with
    ``"unlabeled"``.

    Raises:
        ValueError: If a batch has another layout or shape, or holds values that are not finite.
    """
    if isinstance(loader, Iterator):
        raise ValueError(
            f"`loader` must be readable more than once, got a {type(loader).__name__}: pass a list."
        )
    for batch in loader:
        if isinstance(batch, dict):
            batch = batch.get("unlabeled")
        x = batch
        if isinstance(batch, tuple | list) and len(batch):
            x = batch[0]
        if not isinstance(x, Tensor) or tuple(x.shape[1:]) != shape:
            expected = ", ".join(["B", *map(str, shape)])
            raise ValueError(
                f"`loader` must yield inputs of shape [{expected}], tuples that begin with them, or dicts that hold "
                f"them as 'unlabeled'; got {shape_or_kind(x)}."
            )
        check_finite("loader", x)
        yield x.flatten(1)
