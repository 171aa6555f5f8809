"""Closed forms for Gaussians: divergences between two of them, and the information between two parts of one."""

import torch
from torch import Tensor


def gaussian_kl_diag(
    mean_q: Tensor,
    logvar_q: Tensor,
    mean_p: Tensor,
    logvar_p: Tensor,
) -> Tensor:
    r"""KL divergence between two diagonal Gaussians, in nats.

    .. math::
        \mathrm{KL}(Q \,\|\, P) = \tfrac12 \sum_{i=1}^{D}
            \Big[ e^{\rho_i} - 1 - \rho_i + \frac{(\mu^q_i - \mu^p_i)^2}{\sigma^2_{p,i}} \Big],
        \qquad \rho_i = \log \frac{\sigma^2_{q,i}}{\sigma^2_{p,i}}.

    With :math:`Q` the post-distribution and :math:`P` the pre-distribution of the weights this is
    the information in the weights of [Achille2021]_. Writing it in :math:`\rho` and ``expm1`` keeps
    the bracket non-negative and accurate when :math:`Q \to P`, which is where a regularizer drives
    it.

    Args:
        mean_q: Mean of :math:`Q`, shape ``[..., D]``.
        logvar_q: Log-variance of :math:`Q`, broadcastable with ``mean_q``.
        mean_p: Mean of :math:`P`, broadcastable with ``mean_q``.
        logvar_p: Log-variance of :math:`P`, broadcastable with ``mean_q``.

    Returns:
        The divergence summed over the last axis, shape ``[...]``.

    Example:
        >>> from torch import tensor, zeros
        >>> gaussian_kl_diag(tensor([1.0, 0.0]), zeros(2), zeros(2), zeros(2))
        tensor(0.5000)

    References:
        .. [Achille2021] Achille, Paolini, Mbeng, Soatto, *The information complexity of learning tasks, their
           structure and their distance*, 2019.
    """
    rho = logvar_q - logvar_p  # [..., D]
    shift = (mean_q - mean_p).square() * (-logvar_p).exp()  # [..., D]
    return 0.5 * (rho.expm1() - rho + shift).sum(-1)  # [...]


def lautum_from_correlations(squared_correlations: Tensor) -> Tensor:
    r"""Lautum information of a Gaussian from its squared canonical correlations, in nats.

    .. math:: L = \tfrac12 \sum_j \Big[ \log(1 - \rho_j^2) + \frac{2\rho_j^2}{1 - \rho_j^2} \Big]

    It is :math:`\mathrm{KL}(p(w)p(x) \,\|\, p(w, x))`, the mutual information with the arguments of the divergence
    swapped, and unlike it grows as :math:`1/(1-\rho^2)`. Equation 9 of [Jakubovitz2023]_ is exactly twice this: it is
    the form for complex-valued variables. Squares, because a root would have no gradient where a correlation vanishes.

    Args:
        squared_correlations: The :math:`\rho_j^2 < 1`, shape ``[..., K]``.

    Returns:
        The information summed over the last axis, shape ``[...]``.

    Example:
        >>> lautum_from_correlations(torch.tensor([0.0]))
        tensor(0.)

    References:
        .. [Jakubovitz2023] Jakubovitz, Uliel, Rodrigues, Giryes, *An information-theoretic approach to
           semi-supervised transfer learning*.
    """
    squared = squared_correlations
    terms = torch.log1p(-squared) + 2 * squared / (1 - squared)
    return 0.5 * terms.sum(-1)
