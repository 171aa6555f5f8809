"""Information in the weights of a trained network, from a diagonal curvature."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_taskinfo._ranges import check_positive

BLOCK = 1 << 17  # gains in float64 at once: their intermediates stay in the cache
LARGE = 1e19  # gains up to which the product of sixteen is finite


class InformationTerms(NamedTuple):
    r"""What :func:`information_in_weights` returns; float64 scalars.

    Attributes:
        kl: Information in the weights, :math:`\mathrm{KL}(Q\,\|\,P)`, in nats.
        effective_parameters: How many weights the data, rather than the pre-distribution, determine.
        curvature_penalty: :math:`\tfrac12\mathrm{tr}(H\Sigma^*)`, by how much noise in the weights raises the loss.
        beta: Weight of the KL beside the sum of the loss.
    """

    kl: Tensor
    effective_parameters: Tensor
    curvature_penalty: Tensor
    beta: float

    def objective(self, loss: float | Tensor = 0.0) -> Tensor:
        r"""Return :math:`C_\beta \approx L_D(w^*) + \tfrac12\mathrm{tr}(H\Sigma^*) + \beta\,\mathrm{KL}`.

        Args:
            loss: :math:`L_D(w^*)`, the **sum** of the loss over the dataset.
        """
        return loss + self.curvature_penalty + self.beta * self.kl


def added(parts: Iterable[InformationTerms]) -> InformationTerms:
    """Return the information of several groups of weights together; they share ``beta``.

    Args:
        parts: At least one group's.

    Example:
        >>> from torch import ones, tensor
        >>> part = InformationTerms(tensor(1.0), tensor(2.0), tensor(3.0), beta=0.5)
        >>> added([part, part])
        InformationTerms(kl=tensor(2.), effective_parameters=tensor(4.), curvature_penalty=tensor(6.), beta=0.5)
    """
    parts = list(parts)
    kl, effective, penalty = (torch.stack([part[i] for part in parts]).sum() for i in range(3))  # type: ignore[misc]
    return InformationTerms(kl, effective, penalty, parts[0].beta)


def post_variance(curvature: Tensor, *, prior_std: float, beta: float = 1.0) -> Tensor:
    r"""Variance of each weight under the best Gaussian post-distribution.

    .. math::
        \Sigma^* = \arg\min_\Sigma \tfrac12\mathrm{tr}(H\Sigma) + \beta\,\mathrm{KL}(Q\|P)
        = \beta\,\big(H + (\beta/\lambda^2) I\big)^{-1}

    Args:
        curvature: Diagonal :math:`h_i = N F_{ii}` of the curvature of the **sum** of the loss, non-negative.
        prior_std: :math:`\lambda`, the standard deviation of the pre-distribution.
        beta: Weight of the KL beside the sum of the loss; 1 is the evidence lower bound.

    Returns:
        The variances, float64, shaped like ``curvature``.

    Example:
        >>> from torch import tensor
        >>> post_variance(tensor([0.0, 1.0, 3.0]), prior_std=1.0)
        tensor([1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """
    check_positive(prior_std=prior_std, beta=beta)
    return prior_std**2 / (1 + _non_negative(curvature) * (prior_std**2 / beta))


def information_in_weights(
    curvature: Tensor, displacement: Tensor, *, prior_std: float, beta: float = 1.0
) -> InformationTerms:
    r"""Information that the weights hold about the data they were trained on.

    .. math::
        \mathrm{KL}(Q\,\|\,P) = \tfrac12 \sum_i \Big[ \frac{\Delta_i^2}{\lambda^2} + v_i - 1 - \log v_i \Big],
        \qquad v_i = \frac{1}{1 + \lambda^2 h_i/\beta}

    for :math:`P = N(w_0, \lambda^2 I)` before and :math:`Q = N(w^*, \Sigma^*)` after training, with the
    :math:`\Sigma^*` of :func:`post_variance`. For a wide pre-distribution it tends to
    :math:`\tfrac12\log|F| + \tfrac k2\log\lambda^2 + \tfrac k2\log(N/\beta) - \tfrac k2`. The two parts of the
    objective have a closed form together, independent of how it is split:
    :math:`\tfrac12\mathrm{tr}(H\Sigma^*) + \beta\,\mathrm{KL} = \tfrac\beta2\sum_i[\Delta_i^2/\lambda^2 +
    \log(1 + \lambda^2h_i/\beta)]`.

    Everything is written in the gain :math:`r = \lambda^2h/\beta`, with ``log1p``, in float64: a network has many
    weights with a gain of almost 0, and they must add up to almost nothing.

    Args:
        curvature: Diagonal :math:`h_i = N F_{ii}` of the curvature of the **sum** of the loss, non-negative, shape
            ``[...]``.
        displacement: :math:`\Delta = w^* - w_0`, the same shape.
        prior_std: :math:`\lambda`, the standard deviation of the pre-distribution.
        beta: Weight of the KL beside the sum of the loss; 1 is the evidence lower bound.

    Returns:
        KL, effective number of parameters and curvature penalty, each summed over all weights. Parts of a network
        that share ``beta`` add up.

    Example:
        >>> from torch import tensor
        >>> information_in_weights(tensor([0.0, 1.0]), tensor([1.0, 0.0]), prior_std=1.0).kl
        tensor(0.5966, dtype=torch.float64)

    References:
        Achille, Paolini, Mbeng, Soatto, *The information complexity of learning tasks, their structure and their
        distance*, Theorem 5.4.
    """
    return information_sweep(curvature, displacement, prior_stds=[prior_std], beta=beta)[0]


def information_sweep(
    curvature: Tensor, displacement: Tensor, *, prior_stds: Sequence[float], beta: float = 1.0
) -> list[InformationTerms]:
    r"""Information in the weights for several widths of the pre-distribution, from one pass over the weights.

    The curvature may be the eigenvalues of a matrix, the displacement then being in its basis, or in any other of the
    same group of weights: the pre-distribution is isotropic, so that only the length of the displacement counts.

    Args:
        curvature: As for :func:`information_in_weights`.
        displacement: As for :func:`information_in_weights`.
        prior_stds: Values of :math:`\lambda`.
        beta: Weight of the KL beside the sum of the loss.

    Returns:
        What :func:`information_in_weights` returns, for each of ``prior_stds``.

    Example:
        >>> from torch import tensor
        >>> [r.kl for r in information_sweep(tensor([1.0]), tensor([0.0]), prior_stds=[1.0, 2.0])]
        [tensor(0.0966, dtype=torch.float64), tensor(0.4047, dtype=torch.float64)]
    """
    if curvature.shape != displacement.shape:
        shapes = f"{list(displacement.shape)} for {list(curvature.shape)}"
        raise ValueError(f"`displacement` must have the shape of `curvature`, got {shapes}.")
    check_positive(beta=beta)
    for std in prior_stds:
        check_positive(prior_std=std)
    scales = torch.tensor([std**2 / beta for std in prior_stds], dtype=torch.float64, device=curvature.device)
    distance = scales.new_zeros(())
    determined, logarithms = torch.zeros_like(scales), torch.zeros_like(scales)
    step = max(1, BLOCK // len(prior_stds))
    for h, moved in zip(curvature.reshape(-1).split(step), displacement.reshape(-1).split(step), strict=True):
        known, logarithm = _sums(_non_negative(h), scales)
        moved = moved.double()
        distance += moved.dot(moved)
        determined += known
        logarithms += logarithm
    spread = (logarithms - determined).clamp_min(0)
    kls = 0.5 * (distance / scales.new_tensor([std**2 for std in prior_stds]) + spread)
    penalties = 0.5 * beta * determined
    return [InformationTerms(*terms, beta) for terms in zip(kls, determined, penalties, strict=True)]


def _sums(h: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\sum 1-v = \sum r/(1+r)` and :math:`-\sum\log v = \sum\log(1+r)` for each scale of the gains.

    Logarithms cost more than all else, and sixteen gains can share one: :math:`(1+a)(1+b) = 1 + (a+b+ab)`, all terms of
    which are positive, so that small gains lose nothing. A pair shares a division in the same way.
    """
    if not h.numel() or not bool(h.max() * scales.max() < LARGE):
        gain = h * scales.unsqueeze(1)  # [widths, weights]
        return (gain / (gain + 1)).sum(1), gain.log1p().sum(1)
    a, b = (pad(h, (0, -len(h) % 16)) * scales.unsqueeze(1)).chunk(2, 1)
    product = a * b
    gain = (a + b).add_(product)
    known = product.add_(gain).div_(gain + 1).sum(1)
    for _ in range(3):
        a, b = gain.chunk(2, 1)
        gain = torch.addcmul(b, a, b).add_(a)
    return known, gain.log1p_().sum(1)


def _non_negative(curvature: Tensor) -> Tensor:
    h = curvature.double()
    if h.numel() and bool((smallest := h.min()) < 0):
        raise ValueError(f"`curvature` must be non-negative, got {smallest.item()}.")
    return h
