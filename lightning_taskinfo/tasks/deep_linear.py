r"""Transfer between deep linear networks, simulated many repetitions at once.

:func:`simulate_transfer` draws samples of a linear target task and takes the points at which
gradient flow ends, which are known in closed form for each draw.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from lightning_taskinfo._ranges import check_counts


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
class LinearTasks:
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


def draw_tasks(
    theta: Tensor,
    n: int,
    sigma: float,
    *,
    dimension: int = 200,
    repetitions: int = 20,
    generator: Generator | None = None,
) -> LinearTasks:
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
        >>> draw_tasks(torch.tensor([0.0, 1.0]), 3, 0.1, dimension=5, repetitions=7).labels.shape
        torch.Size([7, 3, 2])
    """
    check_counts(n=n, repetitions=repetitions)
    if dimension < 2:
        raise ValueError(f"`dimension` must be at least 2, got {dimension}.")

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=theta.dtype, device=theta.device)

    drawn = randn(repetitions, dimension, 2)
    plane = torch.linalg.qr(drawn).Q.mT  # [R, 2, d], orthonormal
    directions = torch.stack([theta.cos(), theta.sin()], -1)  # [A, 2]
    target = directions @ plane  # [R, A, d]
    inputs = randn(repetitions, n, dimension)
    noise = sigma * randn(repetitions, n, 1)
    labels = inputs @ target.mT + noise
    return LinearTasks(plane[:, 0], target, inputs, labels)


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

    Scratch training ends in the minimum-norm solution :math:`\beta_{sc} = X^+ y`; linear transfer
    in ridge regression on :math:`\beta_s^\top x`; fine-tuning in
    :math:`\beta_{sc} + b^{L-1} (I - P)\beta_s` with :math:`P` the projection onto the samples and :math:`b` the layers'
    norm, :math:`b^{2L} = \|\beta_{sc}\|^2 + b^{2(L-1)}\,\|(I-P)\beta_s\|^2`.

    Args:
        theta: Angles between source and target, any shape ``[...]``; all angles see the same inputs
            and noise.
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
    if not isinstance(theta, Tensor):
        theta = torch.tensor(float(theta))
    draws = draw_tasks(
        theta.flatten(),
        round(gamma * dimension),
        sigma,
        dimension=dimension,
        repetitions=repetitions,
        generator=generator,
    )
    scratch, unseen = minimum_norm(draws)
    factor = _layer_product(scratch, unseen, depth)  # [R, A]
    tuned = scratch + factor.unsqueeze(-1) * unseen.unsqueeze(1)
    last_layer = _ridge_on_feature(draws, ridge)  # [R, A]
    linear = last_layer.unsqueeze(-1) * draws.source.unsqueeze(1)

    def risk(beta: Tensor) -> Tensor:
        squares = (beta - draws.target).square().sum(-1)  # [R, A]
        return squares.mT.reshape(*theta.shape, -1)

    return TransferRisks(risk(scratch), risk(linear), risk(tuned))


def minimum_norm(draws: LinearTasks) -> tuple[Tensor, Tensor]:
    """Minimum-norm least-squares solutions, and the part of the source teachers that the samples do not see.

    Args:
        draws: LinearTasks of target tasks.

    Returns:
        ``[R, A, d]`` solutions and ``[R, d]`` unseen parts, which are 0 where there are at least
        ``d`` samples.
    """
    X, y = draws.inputs, draws.labels
    if X.shape[1] < X.shape[2]:  # n < d: (I - P) v = v - Xᵀ (X Xᵀ)⁻¹ X v
        factor = torch.linalg.cholesky(X @ X.mT)
        seen = X @ draws.source.unsqueeze(-1)
        right = torch.cat([y, seen], -1)
        weights = torch.cholesky_solve(right, factor)  # [R, n, A + 1]
        solved = (X.mT @ weights).mT  # [R, A + 1, d]
        unseen = draws.source - solved[:, -1]
        return solved[:, :-1], unseen
    factor = torch.linalg.cholesky(X.mT @ X)
    solved = torch.cholesky_solve(X.mT @ y, factor)
    return solved.mT, torch.zeros_like(draws.source)


def _ridge_on_feature(draws: LinearTasks, ridge: float) -> Tensor:
    """Last layers ``[R, A]`` fitted to the one pretrained feature."""
    z = draws.inputs @ draws.source.unsqueeze(-1)  # [R, n, 1]
    penalty = z.shape[1] * ridge
    scale = z.square().sum(1, keepdim=True) + penalty
    fitted = z.mT @ draws.labels / scale  # [R, 1, A]
    return fitted.squeeze(1)


def _layer_product(scratch: Tensor, unseen: Tensor, depth: int) -> Tensor:
    """Products ``b^(L-1)``, ``[R, A]``, by bisection in ``b²``: slower than Newton's method, and independent of it."""
    s = scratch.square().sum(-1)  # [R, A]
    u = unseen.square().sum(-1, keepdim=True)  # [R, 1]
    low = u.expand_as(s)
    high = u + s.pow(1 / depth)
    for _ in range(60):
        middle = 0.5 * (low + high)
        above = middle.pow(depth - 1) * (middle - u) > s
        low = torch.where(above, low, middle)
        high = torch.where(above, middle, high)
    root = 0.5 * (low + high)
    return root.pow(0.5 * (depth - 1))
