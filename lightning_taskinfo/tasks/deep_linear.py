r"""Transfer between deep linear networks: simulated many repetitions at once, and its phase diagram beside theory.

:func:`simulate_transfer` draws samples of a linear target task and takes the points at which
gradient flow ends, which are known in closed form for each draw. Every ``plot_`` function returns
``(fig, ax)`` and draws on a figure of its own unless it is given axes; pyplot is not involved.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Generator, Tensor

from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo.functional import deep_linear
from lightning_taskinfo.plotting import figure_and_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Mode = Literal["linear", "fine_tune"]
TITLES = {"linear": "linear transfer", "fine_tune": "fine-tuning"}
GAMMA = r"samples per dimension $\gamma$"
SIZE = (5, 4)  # inches of a figure


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
    factor = deep_linear.layer_product(
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
        draws: LinearTasks of target tasks.

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
        theory: Gains in the limit of many dimensions, shape ``[A, G]``.
    """

    mode: Mode
    sigma: float
    depth: int
    theta: Tensor
    gamma: Tensor
    mean: Tensor
    standard_error: Tensor
    theory: Tensor


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
        return deep_linear.linear_transferability(theta, gamma, sigma)
    if mode == "fine_tune":
        return deep_linear.fine_tuning_transferability(theta, gamma, sigma, depth=depth)
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
    theory = transferability(mode, theta[:, None], gamma, sigma, depth=depth)
    if repetitions < 2:
        raise ValueError(
            f"`repetitions` must be at least 2 for a standard error, got {repetitions}."
        )
    gains = []
    for value in gamma.tolist():
        risks = simulate_transfer(
            theta,
            value,
            sigma,
            dimension=dimension,
            repetitions=repetitions,
            depth=depth,
            generator=generator,
        )
        gains.append(risks.scratch - getattr(risks, mode))
    drawn = torch.stack(gains, 1)  # [A, G, R]
    error = drawn.std(-1) / repetitions**0.5
    return PhaseDiagram(
        mode,
        sigma,
        depth,
        theta,
        gamma,
        drawn.mean(-1),
        error,
        theory,
    )


def plot_phase_map(
    mode: Mode,
    sigma: float,
    *,
    depth: int = 2,
    max_gamma: float = 2.0,
    ax: "Axes | None" = None,
) -> "tuple[Figure, Axes]":
    """Draw sign and size of the gain as colours, with the closed-form boundaries of negative transfer.

    Colours end at gains of ±1, which have a pole at the interpolation threshold.

    Args:
        mode: ``"linear"`` or ``"fine_tune"``.
        sigma: Standard deviation of the label noise.
        depth: Number of layers.
        max_gamma: Largest number of samples per dimension.
        ax: Axes to draw on; a new figure if not given.

    Returns:
        The figure and its axes.
    """
    fig, ax = figure_and_axes(ax, size=SIZE)
    theta = torch.linspace(0, math.pi / 2, 300, dtype=torch.float64)
    middles = torch.arange(300, dtype=torch.float64) + 0.5  # none is on the pole at gamma = 1
    gamma = middles * max_gamma / 300
    gain = transferability(mode, theta[:, None], gamma, sigma, depth=depth)
    image = ax.pcolormesh(
        *(t.numpy() for t in (gamma, theta.rad2deg(), gain)),
        cmap="RdBu",
        vmin=-1,
        vmax=1,
        rasterized=True,
    )
    fig.colorbar(image, ax=ax, label="gain $T$ over scratch", extend="both")
    for x, y in _boundaries(mode, sigma, depth):
        ax.plot(x, y.rad2deg(), color="black", linewidth=1.5)
    ax.set(
        xlim=(0, max_gamma),
        ylim=(0, 90),
        xlabel=GAMMA,
        ylabel=r"angle $\theta$ (°)",
        title=_title(mode, sigma),
    )
    return fig, ax


def _boundaries(mode: Mode, sigma: float, depth: int) -> list[tuple[Tensor, Tensor]]:
    """Samples per dimension and angles at which the gain is 0, a pair for each line."""
    if mode == "fine_tune":
        gamma = torch.linspace(1e-3, 1 - 1e-6, 2000, dtype=torch.float64)
        return [(gamma, deep_linear.fine_tuning_boundary(gamma, sigma, depth=depth))]
    theta = torch.linspace(1e-4, math.pi / 2, 4000, dtype=torch.float64)
    return [(gamma, theta) for gamma in deep_linear.negative_transfer_interval(theta, sigma)]


def plot_phase_slices(
    simulated: PhaseDiagram,
    *,
    ax: "Axes | None" = None,
) -> "tuple[Figure, Axes]":
    """Draw the gain against the number of samples, theory as lines, simulation as points with standard errors.

    Args:
        simulated: The simulated grid; one colour an angle.
        ax: Axes to draw on; a new figure if not given.

    Returns:
        The figure and its axes.
    """
    from matplotlib import colormaps

    fig, ax = figure_and_axes(ax, size=SIZE)
    mode, sigma = simulated.mode, simulated.sigma
    largest = 1.1 * simulated.gamma.max().item()
    gamma = torch.linspace(0.01, largest, 400, dtype=torch.float64)
    angles = simulated.theta.tolist()
    for index, theta in enumerate(angles):
        color = colormaps["viridis"](0.9 * index / max(1, len(angles) - 1))
        theory = transferability(mode, theta, gamma, sigma, depth=simulated.depth)
        ax.plot(gamma, theory, color=color)
        ax.errorbar(
            simulated.gamma,
            simulated.mean[index],
            simulated.standard_error[index],
            fmt="o",
            markersize=4,
            capsize=2,
            color=color,
            label=rf"$\theta = {math.degrees(theta):.0f}$°",
        )
    ax.axhline(0, color="grey", linewidth=0.8)
    # What the points need and a margin: the theory's pole would dwarf them.
    low = (simulated.mean - simulated.standard_error).min().item()
    high = (simulated.mean + simulated.standard_error).max().item()
    margin = 0.1 * max(high - low, 0.1)
    ax.set(
        xlim=(0, largest),
        ylim=(low - margin, high + margin),
        xlabel=GAMMA,
        ylabel="gain $T$",
        title=_title(mode, sigma),
    )
    ax.legend(fontsize="small")
    return fig, ax


def plot_phase_overview(simulated: PhaseDiagram) -> "tuple[Figure, list[Axes]]":
    """Draw map and slices beside each other.

    Args:
        simulated: The simulated grid.

    Returns:
        The figure and its two axes.

    Example::

        theta, gamma = torch.linspace(0, 1.5, 4), torch.linspace(0.2, 1.8, 9)
        fig, axes = plot_phase_overview(simulate_phase_diagram("linear", theta, gamma, 0.2))
    """
    from matplotlib.figure import Figure

    fig = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = fig.subplots(1, 2)
    plot_phase_map(
        simulated.mode,
        simulated.sigma,
        depth=simulated.depth,
        max_gamma=1.1 * simulated.gamma.max().item(),
        ax=left,
    )
    plot_phase_slices(simulated, ax=right)
    return fig, [left, right]


def _title(mode: Mode, sigma: float) -> str:
    return rf"{TITLES[mode]}, $\sigma = {sigma:g}$"
