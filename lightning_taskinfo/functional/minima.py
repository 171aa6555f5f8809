"""What the Gram matrix of per-sample gradients says about a local minimum."""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import normalize

from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo._warn import warn


class LocalMinimumSummary(NamedTuple):
    r"""What :func:`local_minimum_summary` returns; float64 scalars, means over draws.

    Attributes:
        gamma: :math:`\hat\gamma`, the mean log-determinant; lower is better.
        gamma_standard_error: Its standard error over draws; NaN for one draw or a singular matrix.
        spectral_radius: :math:`\lambda_{\max}(\xi)/N'`.
        frobenius: :math:`\|\xi\|_F^2/N'^2`.
        trace: :math:`\mathrm{tr}(\xi)/N'`, the trace of the empirical Fisher information.
    """

    gamma: Tensor
    gamma_standard_error: Tensor
    spectral_radius: Tensor
    frobenius: Tensor
    trace: Tensor


def log_determinant(gram: Tensor) -> tuple[Tensor, Tensor]:
    r"""Log-determinant of a Gram matrix, in float64; :math:`-\infty` where it is singular to working precision.

    The matrix is scaled to a unit diagonal first, :math:`\log|\xi| = \sum_n \log \xi_{nn} + \log|\mathrm{corr}\,\xi|`:
    gradients of well-fitted samples are smaller than others by many orders of magnitude, which is not dependence.

    Args:
        gram: Symmetric and positive semi-definite, shape ``[..., N, N]``.

    Returns:
        :math:`\log|\xi|` and the rank of the matrix, shape ``[...]``.

    Example:
        >>> log_determinant(4 * torch.eye(2))  # 2 log 4
        (tensor(2.7726, dtype=torch.float64), tensor(2))
        >>> log_determinant(torch.ones(2, 2))
        (tensor(-inf, dtype=torch.float64), tensor(1))
    """
    xi = gram.double()
    scale = xi.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    unit = torch.where(scale > 0, scale.rsqrt(), 0.0)
    correlation = xi * unit.unsqueeze(-1) * unit.unsqueeze(-2)
    eigenvalues = torch.linalg.eigvalsh(correlation)  # [..., N], ascending
    noise = torch.finfo(xi.dtype).eps * xi.shape[-1] * eigenvalues[..., -1:]
    eigenvalues = eigenvalues.where(eigenvalues > noise, 0.0)
    value = scale.log().sum(-1) + eigenvalues.log().sum(-1)
    return value, eigenvalues.count_nonzero(-1)


def local_minimum_summary(
    gram: Tensor,
    *,
    subset_size: int | None = None,
    draws: int = 100,
    generator: Generator | None = None,
) -> LocalMinimumSummary:
    r"""Log-determinant, spectral radius, norm and trace of the gradients of random subsets of samples.

    .. math:: \hat\gamma = \frac1T \sum_{t=1}^T \log|\xi^t|, \qquad \xi^t = J_t J_t^\top

    with :math:`J_t` the gradients of :math:`N'` random samples. All subsets are sub-matrices of one Gram matrix. They
    overlap, so the standard error speaks of the draws from this pool, not of another pool. Two minima compare only at
    nearly equal training loss.

    Args:
        gram: Gram matrix :math:`J J^\top` of a pool of samples, shape ``[N, N]``.
        subset_size: :math:`N'`; ``min(100, N // 2)`` by default.
        draws: :math:`T`.
        generator: Source of the draws.

    Returns:
        The means over draws; with a warning, :math:`\hat\gamma = -\infty`, where a subset's matrix is singular.

    Raises:
        ValueError: If ``gram`` is not a square matrix, or a number is out of its range.

    Example:
        >>> result = local_minimum_summary(2 * torch.eye(4), subset_size=2)
        >>> result.gamma, result.trace  # 2 log 2, and 2
        (tensor(1.3863, dtype=torch.float64), tensor(2., dtype=torch.float64))

    References:
        Jia, Su, *Information-theoretic local minima characterization and regularization*, ICML 2020. Their published
        code returns half of this.
    """
    if gram.dim() != 2 or gram.shape[0] != gram.shape[1]:
        raise ValueError(f"`gram` must be a square matrix, got shape {list(gram.shape)}.")
    pool = len(gram)
    n = subset_size
    if n is None:
        n = min(100, max(1, pool // 2))
    if not 1 <= n <= pool:
        raise ValueError(
            f"`subset_size` must lie between 1 and the {pool} samples of `gram`, got {n}."
        )
    check_counts(draws=draws)
    device = generator.device if generator else "cpu"
    keys = torch.rand(draws, pool, generator=generator, device=device)
    chosen = keys.argsort(1)[:, :n].to(gram.device)  # [T, N'], without replacement
    xi = gram.double()[chosen.unsqueeze(2), chosen.unsqueeze(1)]  # [T, N', N']
    gammas, ranks = log_determinant(xi)
    singular = ranks[gammas.isinf()]
    if len(singular):
        warn(
            f"The gradients of {n} samples span {singular[0]} directions only, so that the log-determinant of their "
            "Gram matrix is -inf; set `subset_size` well below that.",
        )
    error = gammas.std() / math.sqrt(draws) if draws > 1 else gammas[0] * math.nan
    return LocalMinimumSummary(
        gamma=gammas.mean(),
        gamma_standard_error=error,
        spectral_radius=torch.linalg.eigvalsh(xi)[:, -1].mean() / n,
        frobenius=xi.square().sum((1, 2)).mean() / n**2,
        trace=xi.diagonal(dim1=1, dim2=2).sum(1).mean() / n,
    )


def normalise_logits(logits: Tensor) -> Tensor:
    r"""Divide each logit vector by 0.04 times its norm, so that networks of different confidence compare.

    Args:
        logits: Shape ``[..., C]``.

    Example:
        >>> normalise_logits(torch.tensor([[3.0, 4.0]]))  # of norm 25
        tensor([[15.0000, 20.0000]])
    """
    return normalize(logits, dim=-1) / 0.04
