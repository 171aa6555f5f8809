"""Gaussians over weights: before training (``pre_distribution``) and after it (``post_distribution``)."""

from lightning_taskinfo.distributions.gaussian import (
    CurvatureBlock,
    IsotropicGaussian,
    WeightGaussian,
    diagonal_curvature,
    kronecker_curvature,
    post_distribution,
    pre_distribution,
)

__all__ = [
    "CurvatureBlock",
    "IsotropicGaussian",
    "WeightGaussian",
    "diagonal_curvature",
    "kronecker_curvature",
    "post_distribution",
    "pre_distribution",
]
