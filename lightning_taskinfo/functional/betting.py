"""A confidence interval for the mean of bounded draws that profits from their small variance."""

import math

import torch
from torch import Tensor

MAX_BET = 0.9  # of the capital; below 1, so that no draw can ruin the bettor


def betting_interval(values: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    r"""Confidence interval for the mean of independent draws in ``[0, 1]``, by betting against other means.

    .. math::
        \mu \le \inf\Big\{ m : \prod_{t} \big(1 + \lambda_t (m - x_t)\big) \ge \frac{2}{\delta'} \Big\}

    Whoever bets at fair odds that the mean is below :math:`m` multiplies the capital by
    :math:`1 + \lambda_t(m - x_t)` at each draw. If :math:`m` is the true mean this is a non-negative martingale that
    reaches :math:`2/\delta'` with probability at most :math:`\delta'/2`, so a mean at which it does
    is rejected. The stakes :math:`\lambda_t` may depend on earlier draws only; they follow their
    variance. The lower end is the same for :math:`1 - x`.

    For stochastic networks tested on a few dozen samples each it is several times narrower than
    :func:`~lightning_taskinfo.functional.pac_bayes.monte_carlo_interval`, which knows the mean only
    and must expect draws of 0 and 1.

    Args:
        values: The draws in the order they were made, shape ``[m]``.
        delta: Probability :math:`\delta'` with which the interval may fail.

    Returns:
        Its lower and upper end, float64.

    Example:
        >>> low, high = betting_interval(torch.full((1_000,), 0.02), delta=0.01)
        >>> bool(low <= 0.02 <= high < 0.03)
        True

    References:
        Waudby-Smith, Ramdas, *Estimating means of bounded random variables by betting*, JRSS B
        2024.
    """
    x = _checked(values, delta)
    return 1 - _upper(1 - x, delta / 2), _upper(x, delta / 2)


def betting_upper_bound(values: Tensor, delta: float) -> Tensor:
    r"""Upper bound on the mean of independent draws in ``[0, 1]``: the upper end of :func:`betting_interval` alone.

    .. math::
        \mu \le \inf\Big\{ m : \prod_{t} \big(1 + \lambda_t (m - x_t)\big) \ge \frac{1}{\delta'} \Big\}

    Args:
        values: The draws in the order they were made, shape ``[m]``.
        delta: Probability :math:`\delta'` with which the bound may fail.

    Returns:
        The bound, float64 scalar.

    Example:
        >>> bool(betting_upper_bound(torch.full((1_000,), 0.02), delta=0.01) < 0.03)
        True
    """
    return _upper(_checked(values, delta), delta)


def _checked(values: Tensor, delta: float) -> Tensor:
    x = values.detach().double()
    if x.ndim != 1 or not len(x):
        raise ValueError(f"`values` must be a vector of draws, got shape {list(values.shape)}.")
    inside = (x >= 0) & (x <= 1)
    if not bool(inside.all()):
        raise ValueError(f"`values` must be in [0, 1], got {x[~inside][0].item()}.")
    if not 0 < delta < 1:
        raise ValueError(f"`delta` must be in (0, 1), got {delta}.")
    return x


def _upper(x: Tensor, delta: float) -> Tensor:
    goal = math.log(1 / delta)
    stakes = _stakes(x, goal)
    low, high = x.mean(), torch.ones_like(x[0])
    for _ in range(60):
        middle = 0.5 * (low + high)
        rejected = (stakes * (middle - x)).log1p().sum() >= goal
        low, high = torch.where(rejected, low, middle), torch.where(rejected, middle, high)
    return high


def _stakes(x: Tensor, goal: float) -> Tensor:
    """Return the share of the capital to bet at each draw, from the variance of the draws before it."""
    count = torch.arange(2, len(x) + 2, dtype=x.dtype, device=x.device)
    mean = (0.5 + x.cumsum(0)) / count
    variance = (0.25 + (x - mean).square().cumsum(0)) / count
    before = torch.cat([variance.new_tensor([0.25]), variance[:-1]])
    return (2 * goal / (len(x) * before)).sqrt().clamp_max(MAX_BET)
