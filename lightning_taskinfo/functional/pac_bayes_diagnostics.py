r"""Numbers to set beside a certificate: their pre-distribution depends on the data, so they certify nothing."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_counts, check_positive


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


def oracle_complexity(curvature: Tensor, displacement: Tensor, *, beta: float) -> OracleComplexity:
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
    if bool((h < 0).any()):
        raise ValueError(f"`curvature` must be non-negative, got {h.min().item()}.")
    root_u = h.sqrt() * delta.abs() / math.sqrt(beta)
    other = torch.hypot(root_u, torch.full_like(root_u, 2.0))  # √(u + 4): no division by u
    shift = 2 * root_u / (root_u + other)  # s = Δ²/λ²
    ratio = 0.5 * root_u * (root_u + other)  # u/s = λ²h/β
    objective = 0.5 * beta * (shift + ratio.log1p()).sum()
    kl = 0.5 * (shift + ratio.log1p() - ratio / (1 + ratio)).sum()
    # Unfelt by the loss: any width costs nothing.
    prior = torch.where(h > 0, beta * ratio / h, torch.inf)
    post = torch.where(h > 0, prior / (1 + ratio), torch.inf)
    return OracleComplexity(objective, kl, prior, post)


def local_minimum_bound(
    loss: float,
    log_det_fisher: float,
    num_parameters: int,
    n: int,
    delta: float,
    *,
    log_volume: float,
) -> Tensor:
    r"""Jia and Su's bound for a local minimum, from the log-determinant of its Fisher information.

    .. math::
        L_0 + A + 2\sqrt{\frac{2L_0 + 2A + \log(2N/\delta)}{N - 1}}, \qquad
        A = \frac{W\,V^{2/W} \pi^{1/W} e^{\gamma/W}}{4\pi e}

    :math:`A` is the height that the loss reaches on the ellipsoid of volume :math:`V` around the minimum, by
    Stirling's formula without its factor :math:`W^{1/W} \approx 1 + \log(W)/W`. The root is generous: take :math:`P`
    uniform on the ellipsoid and :math:`Q \propto e^{-L}` there, then :math:`\mathrm{KL}(Q\|P) \le A`, and McAllester's
    bound at the risk :math:`L_0 + A` with this KL is never above the value. The volume is free and such a
    pre-distribution depends on the data: a number to compare minima of one network by, never a certificate. The
    constants under the root have been checked by this argument, not against the printed theorem.

    Args:
        loss: Mean loss :math:`L_0` at the minimum, in ``[0, 1]``.
        log_det_fisher: :math:`\gamma = \log|F|`.
        num_parameters: Number :math:`W` of weights.
        n: Number :math:`N` of samples, at least 2.
        delta: Probability in the bound's statement.
        log_volume: :math:`\log V`; the volume itself would underflow.

    Returns:
        The value, float64 scalar.

    Example:
        >>> local_minimum_bound(0.1, -2_000.0, 1_000, n=10_000, delta=0.05, log_volume=-500.0)
        tensor(1.6392, dtype=torch.float64)

    References:
        Jia, Su, *Information-theoretic local minima characterization and regularization*, ICML 2020, Theorem 1.
    """
    if not 0 <= loss <= 1:
        raise ValueError(f"`loss` must be in [0, 1], got {loss}.")
    check_counts(num_parameters=num_parameters)
    if n < 2:
        raise ValueError(f"`n` must be at least 2, got {n}.")
    if not 0 < delta < 1:
        raise ValueError(f"`delta` must be in (0, 1), got {delta}.")
    W = num_parameters
    exponent = torch.tensor(
        (2 * log_volume + math.log(math.pi) + log_det_fisher) / W, dtype=torch.float64, device="cpu"
    )
    A = W * exponent.exp() / (4 * math.pi * math.e)
    return loss + A + 2 * ((2 * loss + 2 * A + math.log(2 * n / delta)) / (n - 1)).sqrt()
