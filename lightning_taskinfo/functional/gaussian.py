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


def canonical_correlations(
    cov_x: Tensor,
    cov_w: Tensor,
    cov_xw: Tensor,
) -> Tensor:
    r"""Canonical correlations of two jointly distributed vectors, in descending order.

    .. math:: \rho = \text{singular values of}\ \Sigma_x^{-1/2}\, \Sigma_{xw}\, \Sigma_w^{-1/2}

    They are what an invertible linear map of either vector leaves alone, so any square root does:
    Cholesky factors are used, and no inverse is formed.

    Args:
        cov_x: Covariance of the first vector, positive definite, shape ``[..., D, D]``.
        cov_w: Covariance of the second vector, positive definite, shape ``[..., K, K]``.
        cov_xw: Their cross-covariance, shape ``[..., D, K]``.

    Returns:
        The correlations, shape ``[..., min(D, K)]``; all below 1 exactly if the joint covariance is
        positive definite.

    Raises:
        RuntimeError: If the shapes do not belong together.

    Example:
        >>> from torch import eye, tensor
        >>> canonical_correlations(4 * eye(1), 9 * eye(1), tensor([[3.0]]))
        tensor([0.5000])
    """
    chol_x = torch.linalg.cholesky(cov_x)
    chol_w = torch.linalg.cholesky(cov_w)
    half = torch.linalg.solve_triangular(chol_x, cov_xw, upper=False)  # [..., D, K]
    whitened = torch.linalg.solve_triangular(chol_w, half.mT, upper=False)  # [..., K, D]
    return torch.linalg.svdvals(whitened)


def lautum_from_correlations(squared_correlations: Tensor) -> Tensor:
    r"""Lautum information of a Gaussian from its squared canonical correlations, in nats.

    .. math:: L = \tfrac12 \sum_j \Big[ \log(1 - \rho_j^2) + \frac{2\rho_j^2}{1 - \rho_j^2} \Big]

    Squares, because a root would have no gradient where a correlation vanishes.

    Args:
        squared_correlations: The :math:`\rho_j^2 < 1`, shape ``[..., K]``.

    Returns:
        The information summed over the last axis, shape ``[...]``.

    Example:
        >>> lautum_from_correlations(torch.tensor([0.0]))
        tensor(0.)
    """
    squared = squared_correlations
    terms = torch.log1p(-squared) + 2 * squared / (1 - squared)
    return 0.5 * terms.sum(-1)


def gaussian_lautum_information(
    cov_x: Tensor,
    cov_w: Tensor,
    cov_xw: Tensor,
) -> Tensor:
    r"""Lautum information between two jointly Gaussian vectors, in nats.

    .. math::
        L(w; x) = \mathrm{KL}\big(p(w)p(x) \,\|\, p(w, x)\big)
            = \tfrac12 \sum_j \Big[ \log(1 - \rho_j^2) + \frac{2\rho_j^2}{1 - \rho_j^2} \Big]

    with :math:`\rho_j` the canonical correlations. It is the mutual information with the arguments
    of the divergence swapped, and unlike it grows as :math:`1/(1-\rho^2)`. Equation 9 of
    [Jakubovitz2023]_ is exactly twice this: it is the form for complex-valued variables.

    Args:
        cov_x: Covariance of the first vector, positive definite, shape ``[..., D, D]``.
        cov_w: Covariance of the second vector, positive definite, shape ``[..., K, K]``.
        cov_xw: Their cross-covariance, shape ``[..., D, K]``.

    Returns:
        The information, shape ``[...]``.

    Example:
        >>> from torch import eye, tensor
        >>> gaussian_lautum_information(eye(1), eye(1), tensor([[0.5]]))  # (log(3/4) + 2/3) / 2
        tensor(0.1895)

    References:
        .. [Jakubovitz2023] Jakubovitz, Uliel, Rodrigues, Giryes, *An information-theoretic approach to
           semi-supervised transfer learning*.
    """
    correlations = canonical_correlations(cov_x, cov_w, cov_xw)
    return lautum_from_correlations(correlations.square())
