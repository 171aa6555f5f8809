"""Gaussians over weights: before training (``pre_distribution``) and after it (``post_distribution``)."""

from lightning_taskinfo.distributions.curvature import (
    CurvatureBlock,
    diagonal_curvature,
    kronecker_curvature,
    layer_curvature,
    layer_input_matrices,
    neuron_curvature,
    with_diagonal,
)
from lightning_taskinfo.distributions.gaussian import (
    IsotropicGaussian,
    WeightGaussian,
    post_distribution,
    pre_distribution,
)

__all__ = [
    "CurvatureBlock",
    "IsotropicGaussian",
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
