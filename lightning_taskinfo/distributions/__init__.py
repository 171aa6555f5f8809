"""Gaussians over weights: before training (``pre_distribution``) and after it (``post_distribution``)."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo.distributions.curvature import (
    CurvatureBlock,
    LowRankCurvature,
    diagonal_curvature,
    kronecker_curvature,
    layer_curvature,
    neuron_curvature,
    with_diagonal,
)
from lightning_taskinfo.distributions.factors import layer_input_matrices
from lightning_taskinfo.distributions.gaussian import (
    BlockGaussian,
    IsotropicGaussian,
    WeightGaussian,
    block_post_distribution,
    pre_distribution,
)
from lightning_taskinfo.distributions.low_rank import LowRankGaussian, low_rank_post_distribution

__all__ = [
    "BlockGaussian",
    "CurvatureBlock",
    "IsotropicGaussian",
    "LowRankCurvature",
    "LowRankGaussian",
    "WeightGaussian",
    "diagonal_curvature",
    "kronecker_curvature",
    "layer_curvature",
    "layer_input_matrices",
    "neuron_curvature",
    "post_distribution",
    "pre_distribution",
    "with_diagonal",
]


def post_distribution(
    weights: nn.Module | Mapping[str, Tensor],
    pre: IsotropicGaussian,
    curvature: Sequence[CurvatureBlock] | LowRankCurvature,
    *,
    beta: float = 1.0,
) -> BlockGaussian | LowRankGaussian:
    r"""Best Gaussian around trained weights, given the curvature of the loss there.

    .. math::
        Q = N(w^*, \Sigma^*), \qquad
        \Sigma^* = \arg\min_\Sigma\, \tfrac12\mathrm{tr}(H\Sigma) + \beta\,\mathrm{KL}(Q\|P)
        = \beta\,(H + \beta\Lambda^{-1})^{-1}

    Args:
        weights: :math:`w^*`: a trained module (its trainable parameters), or tensors by parameter
            name.
        pre: The pre-distribution :math:`P = N(w_0, \Lambda)`.
        curvature: :math:`H` of the **sum** of the loss, from one of the ``*_curvature`` functions.
        beta: Weight of the KL beside the sum of the loss; 1 is the evidence lower bound.

    Returns:
        A Gaussian that can ``sample``, give its ``kl(pre)`` and ``log_det()``, and be put into a
        module for a while.

    Example:
        >>> import torch
        >>> pre = pre_distribution({"w": torch.zeros(2)}, prior_std=1.0)
        >>> post = post_distribution({"w": torch.ones(2)}, pre, diagonal_curvature({"w": torch.tensor([0.0, 3.0])}))
        >>> post.log_det(), post.kl(pre)
        (tensor(-1.3863, dtype=torch.float64), tensor(1.3181, dtype=torch.float64))
    """
    check_positive(beta=beta)
    if isinstance(curvature, LowRankCurvature):
        return low_rank_post_distribution(weights, pre, curvature, beta)
    return block_post_distribution(weights, pre, curvature, beta)
