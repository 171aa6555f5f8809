r"""Deep linear networks, pretrained on one linear task and transferred to another, many repetitions at once.

:func:`simulate_transfer` draws target samples and takes the points at which gradient flow ends,
which are known in closed form for each draw. :func:`simulate_phase_diagram` does so on a grid of
task angles and sample numbers.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo.functional.deep_linear import (
    fine_tuning_transferability,
    linear_transferability,
)

Mode = Literal["linear", "fine_tune"]


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

    plane = torch.linalg.qr(randn(repetitions, dimension, 2)).Q.mT  # [R, 2, d], orthonormal
    target = torch.stack([theta.cos(), theta.sin()], -1) @ plane  # [R, A, d]
    inputs = randn(repetitions, n, dimension)
    labels = inputs @ target.mT + sigma * randn(repetitions, n, 1)
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
    theta = torch.as_tensor(
        theta, dtype=None if isinstance(theta, Tensor) else torch.get_default_dtype()
    )
    n = round(gamma * dimension)
    draws = draw_tasks(
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
        right = torch.cat([y, X @ draws.source.unsqueeze(-1)], -1)
        solved = (X.mT @ torch.cholesky_solve(right, factor)).mT  # [R, A + 1, d]
        return solved[:, :-1], draws.source - solved[:, -1]
    factor = torch.linalg.cholesky(X.mT @ X)
    return torch.cholesky_solve(X.mT @ y, factor).mT, torch.zeros_like(draws.source)


def _ridge_on_feature(draws: LinearTasks, ridge: float) -> Tensor:
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


@dataclass(frozen=True)
class PhaseDiagram:
    """Gains ``T`` over training from scratch, simulated on a grid of ``A`` angles and ``G`` sample numbers.

    Attributes:
        mode: What was transferred.
        sigma: Standard deviation of the label noise.
        depth: Number of layers.
        theta: Angles between source and target, shape ``[A]``.
        gamma: Samples per dimension, shape ``[G]``.
        mean: Mean gain over repetitions, shape ``[A, G]``.
        standard_error: Of this mean, shape ``[A, G]``.
    """

    mode: Mode
    sigma: float
    depth: int
    theta: Tensor
    gamma: Tensor
    mean: Tensor
    standard_error: Tensor

    @property
    def theory(self) -> Tensor:
        """Gains in the limit of many dimensions, shape ``[A, G]``."""
        return transferability(
            self.mode, self.theta[:, None], self.gamma, self.sigma, depth=self.depth
        )


def transferability(
    mode: Mode,
    theta: Tensor | float,
    gamma: Tensor | float,
    sigma: Tensor | float,
    *,
    depth: int = 2,
) -> Tensor:
    """Gain of a mode of transfer over training from scratch, in the limit of many dimensions.

    Args:
        mode: ``"linear"`` or ``"fine_tune"``.
        theta: Angle between source and target, any shape.
        gamma: Samples per dimension, broadcastable with ``theta``.
        sigma: Standard deviation of the label noise, broadcastable with ``theta``.
        depth: Number of layers; linear transfer does not depend on it.

    Returns:
        The gain, in the broadcast shape; negative where transfer hurts.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        >>> transferability("linear", 0.0, 0.5, 0.0)
        tensor(0.5000)
    """
    if mode == "linear":
        return linear_transferability(theta, gamma, sigma)
    if mode == "fine_tune":
        return fine_tuning_transferability(theta, gamma, sigma, depth=depth)
    raise ValueError(f"`mode` must be 'linear' or 'fine_tune', got {mode!r}.")


def simulate_phase_diagram(
    mode: Mode,
    theta: Tensor,
    gamma: Tensor,
    sigma: float,
    *,
    dimension: int = 200,
    repetitions: int = 20,
    depth: int = 2,
    generator: Generator | None = None,
) -> PhaseDiagram:
    """Simulate the gain of transfer on a grid, see :func:`simulate_transfer`.

    Args:
        mode: ``"linear"`` or ``"fine_tune"``.
        theta: Angles between source and target, shape ``[A]``; one gamma's angles share inputs and
            noise.
        gamma: Samples per dimension, shape ``[G]``.
        sigma: Standard deviation of the label noise.
        dimension: Dimension of the inputs.
        repetitions: Number of independent draws, at least 2.
        depth: Number of layers.
        generator: Source of randomness; torch's own if not given.

    Returns:
        Means and standard errors of the paired differences between scratch and transfer.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        >>> angles, numbers = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.5, 2.0])
        >>> simulate_phase_diagram("linear", angles, numbers, 0.1, dimension=10).mean.shape
        torch.Size([2, 3])
    """
    transferability(mode, theta[:, None], gamma, sigma, depth=depth)  # refuses what is outside
    if repetitions < 2:
        raise ValueError(
            f"`repetitions` must be at least 2 for a standard error, got {repetitions}."
        )
    options = {"dimension": dimension, "repetitions": repetitions, "depth": depth}
    gains = []
    for value in gamma.tolist():
        risks = simulate_transfer(theta, value, sigma, **options, generator=generator)
        transferred = risks.linear if mode == "linear" else risks.fine_tune
        gains.append(risks.scratch - transferred)
    drawn = torch.stack(gains, 1)  # [A, G, R]
    error = drawn.std(-1) / repetitions**0.5
    return PhaseDiagram(mode, sigma, depth, theta, gamma, drawn.mean(-1), error)
