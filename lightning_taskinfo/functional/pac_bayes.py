r"""PAC-Bayes bounds on the error of a stochastic classifier, and the prices of what makes them valid.

Every bound takes ``(risk, kl, n, delta)`` and holds for **all** post-distributions :math:`Q` at
once, with probability at least ``1 - delta`` over the ``n`` samples, if the loss lies in ``[0, 1]``
and the pre-distribution
:math:`P` does not depend on those samples. ``risk`` is the empirical risk of the stochastic classifier (weights
drawn from :math:`Q`), ``kl`` is :math:`\mathrm{KL}(Q\,\|\,P)` in nats. Numbers or tensors go in and
broadcast; float64 tensors come out. Nothing is cut off at 1: a value above 1 says how far from
informative a bound is.
"""

import math
from typing import TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = float | Tensor


def _numbers(*values: Number) -> list[Tensor]:
    device = next(
        (value.device for value in values if isinstance(value, Tensor)), torch.device("cpu")
    )
    return list(
        torch.broadcast_tensors(
            *(torch.as_tensor(value, dtype=torch.float64, device=device) for value in values)
        )
    )


def _require(argument: str, value: Tensor, holds: Tensor, rule: str) -> None:
    if not bool(holds.all()):
        raise ValueError(f"`{argument}` must be {rule}, got {value[~holds].flatten()[0].item()}.")


def _checked(risk: Number, kl: Number, n: Number, delta: Number) -> list[Tensor]:
    risk_, kl_, n_, delta_ = numbers = _numbers(risk, kl, n, delta)
    _require("risk", risk_, (risk_ >= 0) & (risk_ <= 1), "in [0, 1]")
    _require("kl", kl_, kl_ >= 0, "non-negative")
    _require("n", n_, n_ >= 8, "at least 8")
    _require("delta", delta_, (delta_ > 0) & (delta_ < 1), "in (0, 1)")
    return numbers


def binary_kl(q: Number, p: Number) -> Tensor:
    r"""KL divergence between two Bernoulli distributions, in nats.

    .. math:: \mathrm{kl}(q \,\|\, p) = q \log\frac{q}{p} + (1 - q) \log\frac{1 - q}{1 - p}

    It is written in ``log1p`` of the relative difference where ``q`` and ``p`` are close, which
    keeps digits that the textbook form loses, and follows :math:`0 \log 0 = 0` at the ends.

    Args:
        q: Probability of the first distribution, in ``[0, 1]``.
        p: Probability of the second one, broadcastable with ``q``.

    Returns:
        The divergence, float64; infinite where ``p`` excludes what ``q`` allows.

    Example:
        >>> binary_kl(0.0, 0.5), binary_kl(0.25, 0.0)
        (tensor(0.6931, dtype=torch.float64), tensor(inf, dtype=torch.float64))
    """
    q, p = _numbers(q, p)
    for argument, value in {"q": q, "p": p}.items():
        _require(argument, value, (value >= 0) & (value <= 1), "in [0, 1]")
    far = torch.special.xlogy(q, q) - torch.special.xlogy(q, p)
    far = far + torch.special.xlog1py(1 - q, -q) - torch.special.xlog1py(1 - q, -p)
    step = p - q
    near = -q * torch.log1p(step / q) - (1 - q) * torch.log1p(-step / (1 - q))
    return torch.where(step.abs() < 0.5 * torch.minimum(q, 1 - q), near, far).clamp_min(0)


def binary_kl_inverse(q: Number, bound: Number) -> Tensor:
    r"""Largest ``p`` whose divergence from ``q`` stays within a bound.

    .. math:: \mathrm{kl}^{-1}(q, c) = \sup \{\, p \in [q, 1] : \mathrm{kl}(q \,\|\, p) \le c \,\}

    Found by bisection to the last bit; the upper end of the last interval is returned, so that a
    certificate errs on the safe side. The smallest such ``p`` is
    ``1 - binary_kl_inverse(1 - q, bound)``.

    Args:
        q: Probability, in ``[0, 1]``.
        bound: Non-negative bound :math:`c` on the divergence, broadcastable with ``q``.

    Returns:
        The probability ``p``, float64.

    Example:
        >>> binary_kl_inverse(0.0, math.log(2))  # 1 - exp(-c)
        tensor(0.5000, dtype=torch.float64)
    """
    q, bound = _numbers(q, bound)
    _require("q", q, (q >= 0) & (q <= 1), "in [0, 1]")
    _require("bound", bound, bound >= 0, "non-negative")
    low, high = q.clone(), torch.ones_like(q)
    for _ in range(100):  # the interval shrinks to neighbouring floats, also next to 0
        middle = low + 0.5 * (high - low)
        inside = binary_kl(q, middle) <= bound
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return high


def kl_bound(risk: Number, kl: Number, n: Number, delta: Number) -> Tensor:
    r"""Maurer–Seeger bound on the true risk: the tightest here, and the default of a certificate.

    .. math:: e(Q) \le \mathrm{kl}^{-1}\!\Big(\hat e(Q),\; \frac{\mathrm{KL} + \log(2\sqrt N/\delta)}{N}\Big)

    Args:
        risk: Empirical risk :math:`\hat e(Q)` in ``[0, 1]``.
        kl: :math:`\mathrm{KL}(Q\,\|\,P)` in nats; the price of a union bound is added here.
        n: Number of samples, at least 8.
        delta: Probability with which the bound may fail.

    Returns:
        The bound, float64, between ``risk`` and 1.

    Example:
        >>> kl_bound(0.02, kl=5_000.0, n=60_000, delta=0.05)
        tensor(0.1343, dtype=torch.float64)

    References:
        Maurer, *A note on the PAC Bayesian theorem*, 2004.
    """
    risk, kl, n, delta = _checked(risk, kl, n, delta)
    return binary_kl_inverse(risk, (kl + (2 * n.sqrt() / delta).log()) / n)


def mcallester_bound(risk: Number, kl: Number, n: Number, delta: Number) -> Tensor:
    r"""McAllester's bound on the true risk, :func:`kl_bound` relaxed by Pinsker's inequality.

    .. math:: e(Q) \le \hat e(Q) + \sqrt{\frac{\mathrm{KL} + \log(2\sqrt N/\delta)}{2N}}

    Args:
        risk: Empirical risk :math:`\hat e(Q)` in ``[0, 1]``.
        kl: :math:`\mathrm{KL}(Q\,\|\,P)` in nats.
        n: Number of samples, at least 8.
        delta: Probability with which the bound may fail.

    Returns:
        The bound, float64.

    Example:
        >>> mcallester_bound(0.02, kl=5_000.0, n=60_000, delta=0.05)
        tensor(0.2243, dtype=torch.float64)

    References:
        McAllester, *PAC-Bayesian model averaging*, COLT 1999.
    """
    risk, kl, n, delta = _checked(risk, kl, n, delta)
    return risk + ((kl + (2 * n.sqrt() / delta).log()) / (2 * n)).sqrt()


def catoni_bound(
    risk: Number, kl: Number, n: Number, delta: Number, *, beta: Number = 1.0
) -> Tensor:
    r"""Linear bound on the true risk, the one behind the information in the weights.

    .. math:: e(Q) \le \frac{N \hat e(Q) + \beta\,[\mathrm{KL} + \log(1/\delta)]}{N\,(1 - 1/(2\beta))}

    Args:
        risk: Empirical risk :math:`\hat e(Q)` in ``[0, 1]``.
        kl: :math:`\mathrm{KL}(Q\,\|\,P)` in nats.
        n: Number of samples, at least 8.
        delta: Probability with which the bound may fail.
        beta: The bound's own parameter, above ½ and fixed before the data are seen; it is not the
            :math:`\beta` that shapes :math:`Q`. Picking it from a grid costs a :func:`union_bound_price`.

    Returns:
        The bound, float64.

    Example:
        >>> catoni_bound(0.02, kl=5_000.0, n=60_000, delta=0.05)
        tensor(0.2068, dtype=torch.float64)

    References:
        Catoni, *PAC-Bayesian supervised classification*, 2007; Achille et al., *The information
        complexity of learning tasks, their structure and their distance*, Theorem 5.5.
    """
    risk, kl, n, delta = _checked(risk, kl, n, delta)
    (beta,) = _numbers(beta)
    _require("beta", beta, beta > 0.5, "above 0.5")
    return (n * risk + beta * (kl - delta.log())) / (n * (1 - 1 / (2 * beta)))


def union_bound_price(index: Number, *, size: int | None = None) -> Tensor:
    r"""What it costs, in nats beside the KL, to pick the pre-distribution from a grid after seeing the data.

    .. math:: \log\frac{\delta}{\delta_j} = \log\frac{\pi^2 j^2}{6}, \qquad \sum_{j \ge 1} \delta_j = \delta

    Args:
        index: Place :math:`j` of the chosen value in the grid, counted from 1; the grid and its
            order are fixed before the data are seen, and it may be infinite.
        size: If given, the grid is finite and all its values cost the same, ``log(size)``.

    Returns:
        The price, float64. Prices of independent choices add up.

    Example:
        >>> union_bound_price(10), union_bound_price(10, size=10)
        (tensor(5.1029, dtype=torch.float64), tensor(2.3026, dtype=torch.float64))
    """
    (index,) = _numbers(index)
    _require("index", index, index >= 1, "at least 1")
    if size is None:
        return math.log(math.pi**2 / 6) + 2 * index.log()
    _require("index", index, index <= size, f"at most `size` = {size}")
    return torch.full_like(index, math.log(size))


def monte_carlo_interval(risk: Number, draws: Number, delta: Number) -> tuple[Tensor, Tensor]:
    r"""Confidence interval for the risk of a stochastic classifier that was estimated from draws.

    .. math:: \mathrm{kl}\big(\hat e_m \,\|\, \hat e(Q)\big) \le \frac{\log(2/\delta')}{m}

    A draw is a network from :math:`Q` together with the samples it is tested on. The draws must be
    independent of each other and of the choice of :math:`Q`: a winner picked by its estimate needs
    fresh ones. Putting the upper end into a bound gives a bound that holds with probability
    :math:`1 - \delta - \delta'`.

    Args:
        risk: Mean risk :math:`\hat e_m` over the draws, each in ``[0, 1]``.
        draws: Number :math:`m` of draws.
        delta: Probability :math:`\delta'` with which the interval may fail.

    Returns:
        Its lower and upper end, float64.

    Example:
        >>> monte_carlo_interval(0.02, draws=1_000, delta=0.01)
        (tensor(0.0088, dtype=torch.float64), tensor(0.0379, dtype=torch.float64))

    References:
        Langford, Caruana, *(Not) bounding the true error*, NeurIPS 2002.
    """
    risk, draws, delta = _numbers(risk, draws, delta)
    _require("risk", risk, (risk >= 0) & (risk <= 1), "in [0, 1]")
    _require("draws", draws, draws >= 1, "at least 1")
    _require("delta", delta, (delta > 0) & (delta < 1), "in (0, 1)")
    radius = (2 / delta).log() / draws
    return 1 - binary_kl_inverse(1 - risk, radius), binary_kl_inverse(risk, radius)
