r"""What draws and held-out labels prove: confidence bounds that are sound for any number of samples.

The betting interval is for the mean of bounded draws, and profits from their small variance. The
binomial bound is for errors on held-out labels: a network that was fixed before ``n`` independent
labels were looked at makes a number of errors on them that is binomial with its true error. Nothing
else is assumed, so this is the proof that every other one has to beat.
"""

import math

import torch
from torch import Tensor
from torch.special import xlog1py, xlogy

from lightning_taskinfo._ranges import check_counts, check_probability, check_values
from lightning_taskinfo.functional.pac_bayes import Number, checked, upper_end

MAX_BET = 0.9  # of the capital; below 1, so that no draw can ruin the bettor


def betting_interval(
    values: Tensor,
    delta: float,
) -> tuple[Tensor, Tensor]:
    r"""Confidence interval for the mean of independent draws in ``[0, 1]``, by betting against other means.

    .. math::
        \mu \le \inf\Big\{ m : \prod_{t} \big(1 + \lambda_t (m - x_t)\big) \ge \frac{2}{\delta'} \Big\}

    Whoever bets at fair odds that the mean is below :math:`m` multiplies the capital by
    :math:`1 + \lambda_t(m - x_t)` at each draw. If :math:`m` is the true mean this is a non-negative martingale that
    reaches :math:`2/\delta'` with probability at most :math:`\delta'/2`, so a mean at which it does
    is rejected. The stakes :math:`\lambda_t` may depend on earlier draws only; they follow their
    variance. The lower end is the same for :math:`1 - x`.

    For stochastic networks tested on a few dozen samples each it is several times narrower than the
    interval by the kl divergence, which knows the mean only and must expect draws of 0 and 1.

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
    check_probability(delta=delta)
    x = values.double()
    high = betting_upper_bound(x, delta / 2)
    low = 1 - betting_upper_bound(1 - x, delta / 2)
    return low, high


def betting_upper_bound(
    values: Tensor,
    delta: float,
) -> Tensor:
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
    x = values.detach().double()
    if x.ndim != 1 or not len(x):
        raise ValueError(f"`values` must be a vector of draws, got shape {list(values.shape)}.")
    check_values("in [0, 1]", values=x)
    check_probability(delta=delta)
    goal = math.log(1 / delta)
    stakes = _stakes(x, goal)

    def accepted(mean: Tensor) -> Tensor:
        log_capital = (stakes * (mean - x)).log1p().sum()
        return log_capital < goal

    return upper_end(accepted, x.mean())


def _stakes(
    x: Tensor,
    goal: float,
) -> Tensor:
    """Return the share of the capital to bet at each draw, from the variance of the draws before it."""
    count = torch.arange(2, len(x) + 2, dtype=x.dtype, device=x.device)
    mean = (0.5 + x.cumsum(0)) / count
    variance = (0.25 + (x - mean).square().cumsum(0)) / count
    before = torch.cat([variance.new_tensor([0.25]), variance[:-1]])
    return (2 * goal / (len(x) * before)).sqrt().clamp_max(MAX_BET)


def binomial_log_tail(
    errors: int,
    n: int,
    p: Number,
) -> Tensor:
    r"""Logarithm of the probability of at most so many errors.

    .. math:: \log \sum_{i=0}^{k} \binom{n}{i} p^i (1 - p)^{n - i}

    Summed in logarithms, so that probabilities far below the smallest float keep their digits.

    Args:
        errors: Number :math:`k` of errors, from 0 to ``n``.
        n: Number of independent trials, at least 1.
        p: Probability of an error in each, in ``[0, 1]``, shape ``[...]``.

    Returns:
        The logarithm, float64, shape ``[...]``.

    Example:
        >>> binomial_log_tail(1, 3, 0.5).exp()  # (1 + 3) / 8
        tensor(0.5000, dtype=torch.float64)
    """
    _check_counts(errors, n)
    (p,) = checked(p=p)
    terms = _log_terms(errors, n, p.unsqueeze(-1))
    return terms.logsumexp(-1).clamp_max(0.0)


def binomial_upper_bound(
    errors: int,
    n: int,
    delta: float,
) -> Tensor:
    r"""Test-set bound: the largest true error under which so few errors are still likely enough.

    .. math:: e \le \sup\Big\{ p : \sum_{i=0}^{k} \binom{n}{i} p^i (1-p)^{n-i} \ge \delta \Big\}

    The one-sided Clopper–Pearson bound. Found by bisection to the last bit; the upper end of the
    last interval is returned, so that it errs on the safe side.

    Args:
        errors: Number :math:`k` of errors on the held-out labels.
        n: Number of held-out labels, at least 1.
        delta: Probability with which the bound may fail.

    Returns:
        The bound, float64 scalar.

    Example:
        >>> binomial_upper_bound(46, 400, delta=0.05)
        tensor(0.1446, dtype=torch.float64)
        >>> binomial_upper_bound(0, 100, delta=0.05)  # 1 - 0.05^(1/100)
        tensor(0.0295, dtype=torch.float64)

    References:
        Langford, *Tutorial on practical prediction theory for classification*, JMLR 2005.
    """
    _check_counts(errors, n)
    check_probability(delta=delta)
    share = torch.tensor(errors / n, dtype=torch.float64, device="cpu")
    return upper_end(lambda p: binomial_log_tail(errors, n, p) >= math.log(delta), share)


def most_errors_below(
    bound: float,
    n: int,
    delta: float,
) -> int:
    r"""How many errors a network may make on held-out labels so that they prove no more than a bound.

    .. math:: \max\{ k : \texttt{binomial\_upper\_bound}(k, n, \delta) \le \texttt{bound} \}

    Args:
        bound: The bound to stay below, in ``[0, 1]``.
        n: Number of held-out labels, at least 1.
        delta: Probability with which the test-set bound may fail.

    Returns:
        The number of errors; -1 if not even a network without errors could prove it with so few
        labels.

    Example:
        >>> most_errors_below(0.145, 400, delta=0.05), most_errors_below(0.01, 100, delta=0.05)
        (46, -1)
    """
    check_counts(n=n)
    check_probability(delta=delta)
    if bound >= 1:
        return n
    p = torch.tensor(float(bound), dtype=torch.float64, device="cpu")
    log_tails = _log_terms(n, n, p).logcumsumexp(0)
    likely = log_tails > math.log(delta)  # [n + 1], false first and then true
    return int((~likely).sum()) - 1


def _log_terms(
    errors: int,
    n: int,
    p: Tensor,
) -> Tensor:
    """Log-probabilities of 0 to ``errors`` errors, one entry each in the last axis."""
    i = torch.arange(errors + 1, dtype=torch.float64, device=p.device)  # [k + 1]
    others = n - i
    log_choose = math.lgamma(n + 1) - torch.lgamma(i + 1) - torch.lgamma(others + 1)
    return log_choose + xlogy(i, p) + xlog1py(others, -p)


def _check_counts(
    errors: int,
    n: int,
) -> None:
    check_counts(n=n)
    if not 0 <= errors <= n:
        raise ValueError(f"`errors` must be from 0 to `n` = {n}, got {errors}.")
