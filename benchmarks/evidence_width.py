"""The width of the pre-distribution that the evidence prefers, in the quadratic approximation of the loss."""

import math

from torch import Tensor

from lightning_taskinfo._ranges import check_positive


def evidence_prior_std(curvature: Tensor, displacement: Tensor, *, beta: float = 1.0) -> float:
    r"""Width of the pre-distribution with the smallest quadratic :math:`C_\beta`.

    .. math:: \lambda^2\,k_{eff}(\lambda) = \|\Delta\|^2,
        \qquad k_{eff}(\lambda) = \sum_i \frac{\lambda^2 h_i}{\lambda^2 h_i + \beta}

    The left side grows with :math:`\lambda`, so that there is one root; it is found by bisection in
    :math:`\log\lambda`. **A diagnostic**: the Gaussian that belongs to it may destroy the network that it stands for,
    see :meth:`~lightning_taskinfo.functional.information.InformationTerms.code_length`.

    Args:
        curvature: Diagonal :math:`h_i` of the curvature of the **sum** of the loss, non-negative.
        displacement: :math:`\Delta = w^* - w_0`, the same shape.
        beta: Weight of the KL beside the sum of the loss.

    Returns:
        :math:`\lambda`; 0 where nothing has moved, and NaN (not estimable) where there is no curvature.

    Example:
        >>> from torch import tensor
        >>> round(evidence_prior_std(tensor([2.0]), tensor([1.0])), 4)  # λ⁴h = (λ²h + 1)Δ²
        1.1688
    """
    check_positive(beta=beta)
    h = curvature.double().flatten()
    h = h[h > 0]
    distance = displacement.double().square().sum().item()
    if not distance:
        return 0.0
    if not len(h):
        return math.nan

    def excess(log_std: float) -> float:
        """Logarithm of the left side over the right."""
        gain = h * (math.exp(2 * log_std) / beta)
        effective = (gain / (gain + 1)).sum().item()
        if not effective:
            return -math.inf
        return 2 * log_std + math.log(effective / distance)

    low = 0.5 * math.log(distance / len(h))  # k_eff is at most the number of weights
    high = low
    step = 1.0
    while excess(high) < 0:
        high += step
        step *= 2
    while high - low > 1e-12 * max(1.0, abs(high)):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if excess(middle) > 0:
            high = middle
        else:
            low = middle
    return math.exp(0.5 * (low + high))
