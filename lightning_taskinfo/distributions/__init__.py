"""Gaussians over weights: before training (``IsotropicGaussian``) and after it (``post_distribution``)."""

from lightning_taskinfo.distributions.gaussian import (
    CurvatureBlock,
    IsotropicGaussian,
    WeightGaussian,
    diagonal_curvature,
    kronecker_curvature,
    post_distribution,
)

__all__ = [
    "CurvatureBlock",
    "IsotropicGaussian",
    "WeightGaussian",
    "diagonal_curvature",
    "kronecker_curvature",
    "post_distribution",
]
