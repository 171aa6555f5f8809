r"""Deep linear networks, pretrained on one linear task and transferred to another, many repetitions at once.

Two ways to the same numbers. :func:`simulate_transfer` draws target samples and takes the points at which gradient flow
ends, which are known in closed form for each draw; :mod:`lightning_taskinfo.tasks.descent` goes there step by step.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor


@dataclass(frozen=True)
class TransferRisks:
    """Risks of three ways to learn a target task, one entry a repetition, without the irreducible noise.

    Attributes:
        scratch: Trained on the target alone.
        linear: Only the last layer is fitted on top of pretrained features.
        fine_tune: All layers are trained, from the pretrained ones.
    """

    scratch: Tensor
    linear: Tensor
    fine_tune: Tensor


@dataclass(frozen=True)
class Samples:
    """Linear target tasks and samples of them, for ``R`` repetitions of ``A`` angles.

    Attributes:
        source: Unit source teachers, shape ``[R, d]``.
        target: Unit target teachers, shape ``[R, A, d]``.
        inputs: Gaussian inputs, shape ``[R, n, d]``, the same for all angles.
        labels: Noisy labels, shape ``[R, n, A]``.
    """

    source: Tensor
    target: Tensor
    inputs: Tensor
    labels: Tensor


def draw_samples(
    theta: Tensor,
    n: int,
    sigma: float,
    *,
    dimension: int = 200,
    repetitions: int = 20,
    generator: Generator | None = None,
) -> Samples:
    """Draw teachers at the angles ``theta`` and ``n`` noisy samples of each target, in the dtype of ``theta``.

    Args:
        theta: Angles between source and target, shape ``[A]``.
        n: Number of samples.
        sigma: Standard deviation of the label noise.
        dimension: Dimension ``d`` of the inputs.
        repetitions: Number ``R`` of independent draws.
        generator: Source of randomness; torch's own if not given.

    Returns:
        The draws.

    Raises:
        ValueError: If ``n`` or ``repetitions`` is below 1 or ``dimension`` below 2.

    Example:
        >>> draw_samples(torch.tensor([0.0, 1.0]), 3, 0.1, dimension=5, repetitions=7).labels.shape
        torch.Size([7, 3, 2])
    """
    for name, value, least in (
        ("n", n, 1),
        ("dimension", dimension, 2),
        ("repetitions", repetitions, 1),
    ):
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}.")

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=theta.dtype, device=theta.device)

    plane = torch.linalg.qr(randn(repetitions, dimension, 2)).Q.mT  # [R, 2, d], orthonormal
    target = torch.stack([theta.cos(), theta.sin()], -1) @ plane  # [R, A, d]
    inputs = randn(repetitions, n, dimension)
    labels = inputs @ target.mT + sigma * randn(repetitions, n, 1)
    return Samples(plane[:, 0], target, inputs, labels)


def simulate_transfer(
    theta: Tensor | float,
    gamma: float,
    sigma: float,
    *,
    dimension: int = 200,
    repetitions: int = 20,
    depth: int = 2,
    ridge: float = 0.0,
    generator: Generator | None = None,
) -> TransferRisks:
    r"""Risks on drawn target samples of networks that gradient flow has trained to the end.

    Scratch training ends in the minimum-norm solution :math:`\beta_{sc} = X^+ y`; linear transfer in ridge regression
    on :math:`\beta_s^\top x`; fine-tuning in
    :math:`\beta_{sc} + b^{L-1} (I - P)\beta_s` with :math:`P` the projection onto the samples and :math:`b` the layers'
    norm, :math:`b^{2L} = \|\beta_{sc}\|^2 + b^{2(L-1)}\,\|(I-P)\beta_s\|^2`.

    Args:
        theta: Angles between source and target, any shape ``[...]``; all angles see the same inputs and noise.
        gamma: Samples per dimension; ``n`` is ``gamma * dimension``, rounded.
        sigma: Standard deviation of the label noise.
        dimension: Dimension of the inputs.
        repetitions: Number ``R`` of independent draws.
        depth: Number of layers.
        ridge: Penalty ``n * ridge`` on the squared last layer in linear transfer.
        generator: Source of randomness; torch's own if not given.

    Returns:
        Risks of shape ``[..., R]``.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        >>> risks = simulate_transfer(0.0, 2.0, 0.0, dimension=20, repetitions=3)
        >>> risks.fine_tune.shape, bool((risks.fine_tune < 1e-6).all())
        (torch.Size([3]), True)
    """
    theta = torch.as_tensor(
        theta, dtype=None if isinstance(theta, Tensor) else torch.get_default_dtype()
    )
    n = round(gamma * dimension)
    draws = draw_samples(
        theta.flatten(), n, sigma, dimension=dimension, repetitions=repetitions, generator=generator
    )
    scratch, unseen = minimum_norm(draws)
    tuned = scratch + _layer_product(scratch, unseen, depth).unsqueeze(-1) * unseen.unsqueeze(1)
    linear = _ridge_on_feature(draws, ridge).unsqueeze(-1) * draws.source.unsqueeze(1)
    risks = [
        (beta - draws.target).square().sum(-1).mT.reshape(*theta.shape, -1)
        for beta in (scratch, linear, tuned)
    ]
    return TransferRisks(*risks)


def minimum_norm(draws: Samples) -> tuple[Tensor, Tensor]:
    """Minimum-norm least-squares solutions, and the part of the source teachers that the samples do not see.

    Args:
        draws: Samples of target tasks.

    Returns:
        ``[R, A, d]`` solutions and ``[R, d]`` unseen parts, which are 0 where there are at least ``d`` samples.
    """
    X, y = draws.inputs, draws.labels
    if X.shape[1] < X.shape[2]:  # n < d: (I - P) v = v - Xᵀ (X Xᵀ)⁻¹ X v
        factor = torch.linalg.cholesky(X @ X.mT)
        right = torch.cat([y, X @ draws.source.unsqueeze(-1)], -1)
        solved = (X.mT @ torch.cholesky_solve(right, factor)).mT  # [R, A + 1, d]
        return solved[:, :-1], draws.source - solved[:, -1]
    factor = torch.linalg.cholesky(X.mT @ X)
    return torch.cholesky_solve(X.mT @ y, factor).mT, torch.zeros_like(draws.source)


def _ridge_on_feature(draws: Samples, ridge: float) -> Tensor:
    """Last layers ``[R, A]`` fitted to the one pretrained feature."""
    z = draws.inputs @ draws.source.unsqueeze(-1)  # [R, n, 1]
    return (z.mT @ draws.labels / (z.square().sum(1, keepdim=True) + z.shape[1] * ridge)).squeeze(1)


def _layer_product(scratch: Tensor, unseen: Tensor, depth: int) -> Tensor:
    """Products ``b^(L-1)``, ``[R, A]``, by bisection in ``b²``: slower than Newton's method, and independent of it."""
    s, u = scratch.square().sum(-1), unseen.square().sum(-1, keepdim=True)  # [R, A], [R, 1]
    low, high = u.expand_as(s), u + s.pow(1 / depth)
    for _ in range(60):
        middle = 0.5 * (low + high)
        above = middle.pow(depth - 1) * (middle - u) > s
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (0.5 * (low + high)).pow(0.5 * (depth - 1))
