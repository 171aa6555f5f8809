"""How far two samples are apart: kernel discrepancies, and an ensemble of earlier predictions."""

from collections.abc import Sequence

import torch
from torch import Tensor

WIDTH_FACTORS = tuple(2.0**k for k in range(-9, 10))
"""Nineteen widths, from 1/512 to 512 times the median distance."""


def median_distance(source: Tensor, target: Tensor) -> Tensor:
    """Median distance between two different samples of the union: the usual unit for kernel widths.

    Args:
        source: Samples, shape ``[N, D]``.
        target: Samples, shape ``[M, D]``.

    Returns:
        The median, a scalar without gradient; 1 where more than half of the samples coincide.

    Example:
        >>> median_distance(torch.tensor([[0.0]]), torch.tensor([[3.0]]))
        tensor(3.)
    """
    samples = torch.cat([source, target]).detach()
    median = torch.pdist(samples).median()
    return torch.where(median > 0, median, torch.ones_like(median))


def gaussian_kernel(a: Tensor, b: Tensor, widths: Tensor) -> Tensor:
    r"""Mean of Gaussian kernels of several widths, between all pairs.

    .. math:: k(a, b) = \frac1m \sum_{s} \exp\Big( -\frac{\|a - b\|^2}{2 s^2} \Big)

    Args:
        a: Samples, shape ``[N, D]``.
        b: Samples, shape ``[M, D]``.
        widths: The :math:`s`, positive, shape ``[m]``.

    Returns:
        The kernel matrix, shape ``[N, M]``.

    Example:
        >>> gaussian_kernel(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([1.0, 2.0]))
        tensor([[1., 1., 1.]])
    """
    # Kernels depend on differences alone. What all samples have in common is removed before
    # squaring: in float32 its square would leave few digits for the differences. It is a constant,
    # so that gradients stay as they are.
    samples = torch.cat([a, b]).detach()
    center = samples.mean(0)
    a = a - center
    b = b - center
    rows = a.square().sum(1)[:, None]
    columns = b.square().sum(1)[None]
    squares = (rows + columns - 2 * a @ b.T).clamp_min(0)  # [N, M]
    precisions = -0.5 / widths.square()
    exponents = squares[..., None] * precisions  # [N, M, m]
    return exponents.exp().mean(-1)


def mk_mmd(
    source: Tensor,
    target: Tensor,
    *,
    widths: Sequence[float] | Tensor | None = None,
) -> Tensor:
    r"""Unbiased estimate of the squared maximum mean discrepancy under a mean of Gaussian kernels.

    .. math::
        \widehat{\mathrm{MMD}}^2 = \frac{1}{N(N-1)} \sum_{i \ne j} k(s_i, s_j)
            + \frac{1}{M(M-1)} \sum_{i \ne j} k(t_i, t_j) - \frac{2}{NM} \sum_{i,j} k(s_i, t_j)

    Zero in expectation where both come from one distribution, so a single value may be negative.

    Args:
        source: Samples of the first distribution, shape ``[N, D]``.
        target: Samples of the second, shape ``[M, D]``; ``M`` need not be ``N``.
        widths: Kernel widths. By default nineteen, from 1/512 to 512 times the median distance of
            these samples (held fixed in the gradient), so that a common scale of the features does
            not matter.

    Returns:
        The estimate, a scalar.

    Raises:
        ValueError: If a sample has fewer than two rows, the dimensions differ, or a width is not
            positive.

    Example:
        >>> a = torch.tensor([[0.0], [0.0]])
        >>> mk_mmd(a, a + 100.0, widths=[1.0])
        tensor(2.)

    References:
        Gretton et al., *A Kernel Two-Sample Test*, JMLR 2012.
    """
    for argument, samples in (("source", source), ("target", target)):
        if samples.ndim != 2 or len(samples) < 2:
            raise ValueError(
                f"`{argument}` must have shape [N, D] with N of at least 2, got {tuple(samples.shape)}."
            )
    if source.shape[1] != target.shape[1]:
        raise ValueError(
            f"`source` and `target` must have the same width, got {tuple(source.shape)} and {tuple(target.shape)}."
        )
    if widths is None:
        widths = median_distance(source, target) * source.new_tensor(WIDTH_FACTORS)
    widths = torch.as_tensor(widths, dtype=source.dtype, device=source.device)
    if widths.numel() == 0 or not (widths > 0).all():
        raise ValueError(f"`widths` must be positive, got {widths.tolist()}.")
    sources = _mean_off_diagonal(gaussian_kernel(source, source, widths))
    targets = _mean_off_diagonal(gaussian_kernel(target, target, widths))
    between = gaussian_kernel(source, target, widths).mean()
    return sources + targets - 2 * between


def _mean_off_diagonal(kernel: Tensor) -> Tensor:
    N = len(kernel)
    others = kernel.sum() - kernel.diagonal().sum()
    return others / (N * (N - 1))


def ensemble_targets(average: Tensor, count: Tensor, decay: float) -> Tensor:
    r"""Bias-corrected ensemble predictions of Temporal Ensembling.

    .. math:: \tilde z = Z / (1 - \alpha^t)

    Args:
        average: Moving averages that began at zero, shape ``[B, C]``.
        count: How many times each was updated, :math:`t`, shape ``[B]``.
        decay: The :math:`\alpha` of the moving average.

    Returns:
        The targets, shape ``[B, C]``; zero for a sample that was never updated.

    Example:
        >>> ensemble_targets(torch.tensor([[0.25, 0.25]]), torch.tensor([1]), decay=0.5)
        tensor([[0.5000, 0.5000]])

    References:
        Laine, Aila, *Temporal Ensembling for Semi-Supervised Learning*, ICLR 2017.
    """
    updates = count.clamp_min(1).to(average.dtype)
    correction = 1 - decay**updates
    return average / correction[:, None]
