r"""PAC-Bayes bounds on the error of a stochastic classifier, and the prices of what makes them valid.

Every bound takes ``(risk, kl, n, delta)`` and holds for **all** post-distributions :math:`Q` at
once, with probability at least ``1 - delta`` over the ``n`` samples, if the loss lies in ``[0, 1]``
and the pre-distribution
:math:`P` does not depend on those samples. ``risk`` is the empirical risk of the stochastic classifier (weights
drawn from :math:`Q`), ``kl`` is :math:`\mathrm{KL}(Q\,\|\,P)` in nats. Numbers or tensors go in and
broadcast; float64 tensors come out. Nothing is cut off at 1: a value above 1 says how far from
informative a bound is.

:func:`oracle_complexity` is a number to set beside a certificate: its pre-distribution depends on the
data, so it certifies nothing.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import xlog1py, xlogy

from lightning_taskinfo._ranges import check_positive, check_values, checked_tensors

Number = float | Tensor
RULES = {
    "risk": "in [0, 1]",
    "q": "in [0, 1]",
    "p": "in [0, 1]",
    "kl": "non-negative",
    "bound": "non-negative",
    "n": "at least 8",
    "index": "at least 1",
    "beta": "above 0.5",
    "delta": "in (0, 1)",
}
checked = partial(checked_tensors, RULES, torch.float64)
"""Arguments as float64 tensors of one shape, each inside its range."""


def binary_kl(
    q: Number,
    p: Number,
) -> Tensor:
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
    q, p = checked(q=q, p=p)
    return _binary_kl(q, p)


def _binary_kl(
    q: Tensor,
    p: Tensor,
) -> Tensor:
    """The same, of probabilities that have been checked: a bisection asks for many."""
    rest = 1 - q
    step = p - q
    far = xlogy(q, q) - xlogy(q, p) + xlog1py(rest, -q) - xlog1py(rest, -p)
    near = -q * torch.log1p(step / q) - rest * torch.log1p(-step / rest)
    is_near = step.abs() < 0.5 * torch.minimum(q, rest)
    return torch.where(is_near, near, far).clamp_min(0)


def binary_kl_inverse(
    q: Number,
    bound: Number,
) -> Tensor:
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
    q, bound = checked(q=q, bound=bound)
    # The interval shrinks to neighbouring floats, also next to 0.
    return upper_end(lambda p: _binary_kl(q, p) <= bound, q, rounds=100)


def upper_end(inside: Callable[[Tensor], Tensor], low: Tensor, rounds: int = 60) -> Tensor:
    """Return where a condition that holds at ``low`` ends before 1: the upper end of the last interval of a bisection.

    Args:
        inside: Whether the condition holds, shaped like ``low``.
        low: Where it holds.
        rounds: How often the interval is halved.

    Example:
        >>> upper_end(lambda p: p <= 0.25, torch.tensor(0.0))
        tensor(0.2500)
    """
    high = torch.ones_like(low)
    for _ in range(rounds):
        middle = low + 0.5 * (high - low)
        holds = inside(middle)
        low = torch.where(holds, middle, low)
        high = torch.where(holds, high, middle)
    return high


def kl_bound(
    risk: Number,
    kl: Number,
    n: Number,
    delta: Number,
) -> Tensor:
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
    risk, kl, n, delta = checked(risk=risk, kl=kl, n=n, delta=delta)
    complexity = kl + (2 * n.sqrt() / delta).log()
    return binary_kl_inverse(risk, complexity / n)


def catoni_bound(
    risk: Number,
    kl: Number,
    n: Number,
    delta: Number,
    *,
    beta: Number = 1.0,
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
    risk, kl, n, delta, beta = checked(risk=risk, kl=kl, n=n, delta=delta, beta=beta)
    loss = n * risk + beta * (kl - delta.log())
    return loss / (n * (1 - 1 / (2 * beta)))


def union_bound_price(index: Number) -> Tensor:
    r"""What it costs, in nats beside the KL, to pick the pre-distribution from a grid after seeing the data.

    .. math:: \log\frac{\delta}{\delta_j} = \log\frac{\pi^2 j^2}{6}, \qquad \sum_{j \ge 1} \delta_j = \delta

    Args:
        index: Place :math:`j` of the chosen value in the grid, counted from 1; the grid and its
            order are fixed before the data are seen, and it may be infinite.

    Returns:
        The price, float64. Prices of independent choices add up.

    Example:
        >>> union_bound_price(10)
        tensor(5.1029, dtype=torch.float64)
    """
    (index,) = checked(index=index)
    constant = math.log(math.pi**2 / 6)
    return constant + 2 * index.log()


class OracleComplexity(NamedTuple):
    """Complexity under the best diagonal pre-distribution, see :func:`oracle_complexity`.

    Attributes:
        objective: Smallest ``½tr(HΣ) + β·KL``, scalar.
        kl: Its ``KL(Q‖P)`` in nats, scalar.
        prior_variance: The oracle's variance of each weight, shaped like the curvature.
        post_variance: Variance of each weight under ``Q``, shaped like the curvature.
    """

    objective: Tensor
    kl: Tensor
    prior_variance: Tensor
    post_variance: Tensor


def oracle_complexity(
    curvature: Tensor,
    displacement: Tensor,
    *,
    beta: float,
) -> OracleComplexity:
    r"""Least complexity that any diagonal Gaussian pre-distribution around the start could have led to.

    .. math::
        \min_{\Lambda,\,\Sigma}\; \tfrac12 \mathrm{tr}(H\Sigma) + \beta\,\mathrm{KL}(Q\|P)
        = \frac{\beta}{2} \sum_i \Big[ s_i + \log\Big(1 + \frac{u_i}{s_i}\Big) \Big], \qquad
        u_i = \frac{h_i \Delta_i^2}{\beta}, \quad s_i = \frac{2}{1 + \sqrt{1 + 4/u_i}}

    with :math:`P = N(w_0, \Lambda)`, :math:`Q = N(w^*, \Sigma)`, both diagonal. The oracle chooses
    :math:`\Lambda` after seeing the data: a lower limit for what can be certified with such distributions, never a
    certificate. Weights that did not move, or that the loss does not feel, cost nothing: the limits
    :math:`\Delta_i \to 0` and :math:`h_i \to 0` are both 0.

    Args:
        curvature: Diagonal :math:`h` of the loss curvature, non-negative, shape ``[...]``.
        displacement: :math:`\Delta = w^* - w_0`, broadcastable with ``curvature``.
        beta: Weight of the KL beside the same loss as ``curvature``: both for the sum over the data, as everywhere
            in this package, or both for the mean.

    Returns:
        The objective and the KL as float64 scalars, and the two variances.

    Example:
        >>> oracle_complexity(torch.tensor([2.0, 0.0, 3.0]), torch.tensor([1.0, 1.0, 0.0]), beta=4.0).objective
        tensor(2.3863, dtype=torch.float64)

    References:
        Pitas, *On PAC-Bayes bounds for deep neural networks using the loss curvature*, Lemma 4.2.
    """
    check_positive(beta=beta)
    h, delta = torch.broadcast_tensors(curvature.double(), displacement.double())
    check_values("non-negative", curvature=h)
    root_u = h.sqrt() * delta.abs() / math.sqrt(beta)
    other = torch.hypot(root_u, torch.full_like(root_u, 2.0))  # √(u + 4): no division by u
    shift = 2 * root_u / (root_u + other)  # s = Δ²/λ²
    ratio = 0.5 * root_u * (root_u + other)  # u/s = λ²h/β
    costs = shift + ratio.log1p()
    objective = 0.5 * beta * costs.sum()
    kl = 0.5 * (costs - ratio / (1 + ratio)).sum()
    # Unfelt by the loss: any width costs nothing.
    prior = torch.where(h > 0, beta * ratio / h, torch.inf)
    post = torch.where(h > 0, prior / (1 + ratio), torch.inf)
    return OracleComplexity(objective, kl, prior, post)
