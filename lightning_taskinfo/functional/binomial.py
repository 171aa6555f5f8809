r"""What errors on held-out labels prove: the exact tail of the binomial distribution, inverted.

A network that was fixed before ``n`` independent labels were looked at makes a number of errors on
them that is binomial with its true error. Nothing else is assumed, so this is the proof that every
other one has to beat.
"""

import math

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo.functional.pac_bayes import Number, _numbers, _require


def binomial_log_tail(errors: int, n: int, p: Number) -> Tensor:
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
    (p,) = _numbers(p)
    _require("p", p, (p >= 0) & (p <= 1), "in [0, 1]")
    i = torch.arange(errors + 1, dtype=torch.float64, device=p.device)  # [k + 1]
    p = p.unsqueeze(-1)
    log_terms = _log_choose(n, i) + torch.special.xlogy(i, p) + torch.special.xlog1py(n - i, -p)
    return log_terms.logsumexp(-1).clamp_max(0.0)


def binomial_upper_bound(errors: int, n: int, delta: float) -> Tensor:
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
    _check_delta(delta)
    low = torch.tensor(errors / n, dtype=torch.float64, device="cpu")
    high = torch.ones_like(low)
    if errors == n:
        return high
    for _ in range(60):
        middle = 0.5 * (low + high)
        if binomial_log_tail(errors, n, middle) >= math.log(delta):
            low = middle
        else:
            high = middle
    return high


def most_errors_below(bound: float, n: int, delta: float) -> int:
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
    _check_counts(0, n)
    _check_delta(delta)
    if bound >= 1:
        return n
    i = torch.arange(n + 1, dtype=torch.float64, device="cpu")
    p = torch.tensor(float(bound), dtype=torch.float64, device="cpu")
    log_terms = _log_choose(n, i) + torch.special.xlogy(i, p) + torch.special.xlog1py(n - i, -p)
    likely = log_terms.logcumsumexp(0) > math.log(delta)  # [n + 1], false first and then true
    return int((~likely).sum()) - 1


def _log_choose(n: int, i: Tensor) -> Tensor:
    return math.lgamma(n + 1) - torch.lgamma(i + 1) - torch.lgamma(n - i + 1)


def _check_counts(errors: int, n: int) -> None:
    check_counts(n=n)
    if not 0 <= errors <= n:
        raise ValueError(f"`errors` must be from 0 to `n` = {n}, got {errors}.")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"`delta` must be in (0, 1), got {delta}.")
