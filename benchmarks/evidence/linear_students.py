r"""Transfer between deep linear networks, simulated many repetitions at once, and its risk with a ridge.

:func:`simulate_transfer` draws samples of a linear target task and takes the points at which
gradient flow ends, which are known in closed form for each draw.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo.functional.deep_linear import layer_product


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

    like: Any = {"generator": generator, "dtype": theta.dtype, "device": theta.device}
    drawn = torch.randn(repetitions, dimension, 2, **like)
    plane = torch.linalg.qr(drawn).Q.mT  # [R, 2, d], orthonormal
    directions = torch.stack([theta.cos(), theta.sin()], -1)  # [A, 2]
    target = directions @ plane  # [R, A, d]
    inputs = torch.randn(repetitions, n, dimension, **like)
    noise = torch.randn(repetitions, n, 1, **like)
    labels = inputs @ target.mT + sigma * noise
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
    theta = torch.as_tensor(theta) * 1.0  # a whole number is an angle too
    draws = draw_tasks(
        theta.flatten(),
        round(gamma * dimension),
        sigma,
        dimension=dimension,
        repetitions=repetitions,
        generator=generator,
    )
    scratch, unseen = minimum_norm(draws)
    factor = layer_product(
        scratch.square().sum(-1, keepdim=True),  # [R, A, 1]
        unseen.square().sum(-1, keepdim=True),  # [R, 1, 1]
        depth,
    )
    tuned = scratch + factor * unseen
    z = draws.inputs @ draws.source.unsqueeze(-1)  # [R, n, 1], the pretrained feature
    scale = z.square().sum(1, keepdim=True) + z.shape[1] * ridge
    last_layer = z.mT @ draws.labels / scale  # [R, 1, A]
    linear = last_layer.mT * draws.source.unsqueeze(1)

    def risk(beta: Tensor) -> Tensor:
        squares = (beta - draws.target).square().sum(-1)  # [R, A]
        return squares.mT.reshape(*theta.shape, -1)

    return TransferRisks(risk(scratch), risk(linear), risk(tuned))


def minimum_norm(draws: LinearTasks) -> tuple[Tensor, Tensor]:
    """Minimum-norm least-squares solutions, and the part of the source teachers that the samples do not see.

    Args:
        draws: Target tasks and samples.

    Returns:
        ``[R, A, d]`` solutions and ``[R, 1, d]`` unseen parts, which are 0 where there are at least
        ``d`` samples.
    """
    X = draws.inputs
    source = draws.source.unsqueeze(1)  # [R, 1, d]
    # The solution for the source's own outputs is the part of it that the samples see.
    outputs = torch.cat([draws.labels, X @ source.mT], -1)  # [R, n, A + 1]
    solved = torch.linalg.lstsq(X, outputs, driver="gels").solution.mT  # [R, A + 1, d]
    _, n, d = X.shape
    unseen = source - solved[:, -1:] if n < d else torch.zeros_like(source)
    return solved[:, :-1], unseen


def ridge_transfer_risk(theta: Tensor, sigma: float, n: float, ridge: Tensor | float) -> Tensor:
    r"""Mean risk after the last layer was fitted to ``n`` target samples with a ridge, on the pretrained feature.

    Pretraining leaves one feature, :math:`z = \beta_s^\top x`. With :math:`q = \sum_i z_i^2 \sim \chi^2_n` and the
    penalty :math:`n\lambda c^2` on the last layer,

    .. math::
        R_{lt} = \sin^2\theta + \cos^2\theta\; \mathbb E\, \frac{(n\lambda)^2}{(q + n\lambda)^2}
            + (\sigma^2 + \sin^2\theta)\; \mathbb E\, \frac{q}{(q + n\lambda)^2}.

    Without ridge the last mean is :math:`1/(n-2)`. For ``n = inf`` the risk is
    :math:`1 - \cos^2\theta\,(1 + 2\lambda)/(1 + \lambda)^2`, which only grows with :math:`\lambda`. At finite ``n`` a
    ridge of order :math:`1/n` can help, by order :math:`1/n^2`.

    Args:
        theta: Angle between source and target, any shape.
        sigma: Standard deviation of the label noise.
        n: Number of target samples, ``inf`` allowed.
        ridge: :math:`\lambda`, broadcastable with ``theta``.

    Returns:
        The risk, in the broadcast shape.
    """
    theta, n, ridge = torch.broadcast_tensors(
        theta, theta.new_tensor(n), torch.as_tensor(ridge, dtype=theta.dtype)
    )
    shrunk, gain = _ridge_moments(n, ridge)
    outside = theta.sin().square()
    return outside + theta.cos().square() * shrunk + (sigma**2 + outside) * gain


def _ridge_moments(
    n: Tensor,
    ridge: Tensor,
) -> tuple[Tensor, Tensor]:
    """Means of ``(n·λ/(q + n·λ))²`` and of ``q/(q + n·λ)²`` for ``q`` chi-squared with ``n`` degrees of freedom.

    The trapezoidal rule in ``log q`` is accurate to rounding: the integrand is smooth and vanishes
    at both ends.
    """
    m = n.double().clamp(max=1e300)  # as good as infinitely many
    penalty = ridge.double()
    unit = torch.linspace(0, 1, 1001, dtype=torch.float64, device=n.device)
    unit = unit.reshape(-1, *[1] * n.dim())
    # The density of log q falls off like exp(n t / 2) on the left, and faster than a Gaussian on
    # the right.
    right = 12 * (2 / m).sqrt()
    width = 80 / m + 2 * right
    t = right - unit * width  # log(q / n), [points, ...]
    q = t.exp()
    weight = (0.5 * m * (t - q)).softmax(0)
    total = q + penalty
    shrunk = (weight * (penalty / total).square()).sum(0)
    gain = (weight * q / total.square()).sum(0) / m
    gain = torch.where(penalty == 0, 1 / (m - 2), gain)
    return shrunk.to(n), gain.to(n)
