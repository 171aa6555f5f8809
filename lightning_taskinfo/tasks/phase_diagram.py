"""Phase diagrams of transfer between deep linear networks: theory and simulation on a grid, and pictures of both.

Every ``plot_`` function returns ``(fig, ax)`` and draws on a figure of its own unless it is given axes;
pyplot is not involved.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Generator, Tensor

from lightning_taskinfo.functional import deep_linear
from lightning_taskinfo.plotting import figure_and_axes
from lightning_taskinfo.tasks.deep_linear import simulate_transfer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy import ndarray

Mode = Literal["linear", "fine_tune"]
TITLES = {"linear": "linear transfer", "fine_tune": "fine-tuning"}
GAMMA = r"samples per dimension $\gamma$"
THETA = r"angle $\theta$ (°)"
DEGREES = 180 / math.pi
SIZE = (5, 4)  # inches of a figure


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
        theta = self.theta[:, None]
        return transferability(self.mode, theta, self.gamma, self.sigma, depth=self.depth)


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
    transferability(mode, theta[:, None], gamma, sigma, depth=depth)  # refuses what is outside
    if repetitions < 2:
        raise ValueError(
            f"`repetitions` must be at least 2 for a standard error, got {repetitions}."
        )
    options = {"dimension": dimension, "repetitions": repetitions, "depth": depth}
    gains = []
    for value in gamma.tolist():
        risks = simulate_transfer(theta, value, sigma, **options, generator=generator)
        gains.append(risks.scratch - getattr(risks, mode))
    drawn = torch.stack(gains, 1)  # [A, G, R]
    error = drawn.std(-1) / repetitions**0.5
    return PhaseDiagram(mode, sigma, depth, theta, gamma, drawn.mean(-1), error)


def plot_phase_surface(
    mode: Mode,
    sigma: float,
    *,
    depth: int = 2,
    max_gamma: float = 2.0,
    clip: float = 1.0,
    ax: Any = None,
) -> "tuple[Figure, Any]":
    """Draw the gain over the plane of angle and sample number as a surface; needs three-dimensional axes.

    Args:
        mode: ``"linear"`` or ``"fine_tune"``.
        sigma: Standard deviation of the label noise.
        depth: Number of layers.
        max_gamma: Largest number of samples per dimension.
        clip: Gains beyond ± this are cut off: they have a pole at the interpolation threshold.
        ax: Axes made with ``projection="3d"``; a new figure if not given.

    Returns:
        The figure and its axes.

    Example:
        >>> fig, ax = plot_phase_surface("linear", 0.2)
        >>> ax.name
        '3d'
    """
    fig, ax = figure_and_axes(ax, size=SIZE, projection="3d")
    theta, gamma, gain = _grid(mode, sigma, depth, max_gamma, 60)
    gain = gain.clip(-clip, clip)
    colours: dict[str, Any] = {"cmap": "RdBu", "vmin": -clip, "vmax": clip}
    ax.plot_surface(gamma, theta, gain, **colours, linewidth=0, rcount=60)
    ax.set(xlabel=GAMMA, ylabel=THETA, zlabel="gain $T$", title=_title(mode, sigma))
    ax.view_init(elev=28, azim=-60)
    ax.set_box_aspect(None, zoom=0.85)  # or the labels leave the figure
    return fig, ax


def plot_phase_map(
    mode: Mode,
    sigma: float,
    *,
    depth: int = 2,
    max_gamma: float = 2.0,
    clip: float = 1.0,
    ax: "Axes | None" = None,
) -> "tuple[Figure, Axes]":
    """Draw sign and size of the gain as colours, with the closed-form boundaries of negative transfer.

    Args:
        mode: ``"linear"`` or ``"fine_tune"``.
        sigma: Standard deviation of the label noise.
        depth: Number of layers.
        max_gamma: Largest number of samples per dimension.
        clip: The colour scale ends at ± this.
        ax: Axes to draw on; a new figure if not given.

    Returns:
        The figure and its axes.
    """
    fig, ax = figure_and_axes(ax, size=SIZE)
    theta, gamma, gain = _grid(mode, sigma, depth, max_gamma, 300)
    colours: dict[str, Any] = {"cmap": "RdBu", "vmin": -clip, "vmax": clip}
    image = ax.pcolormesh(gamma, theta, gain, **colours, rasterized=True)
    fig.colorbar(image, ax=ax, label="gain $T$ over scratch", extend="both")
    for x, y in _boundaries(mode, sigma, depth, max_gamma):
        ax.plot(x, y * DEGREES, color="black", linewidth=1.5)
    ax.set(xlim=(0, max_gamma), ylim=(0, 90))
    ax.set(xlabel=GAMMA, ylabel=THETA, title=_title(mode, sigma))
    return fig, ax


def plot_phase_slices(
    simulated: PhaseDiagram,
    *,
    printed: bool = False,
    ax: "Axes | None" = None,
) -> "tuple[Figure, Axes]":
    """Draw the gain against the number of samples, theory as lines, simulation as points with standard errors.

    Args:
        simulated: The simulated grid; one colour an angle.
        printed: Also draw, dashed, the formula for fine-tuning that holds without noise only.
        ax: Axes to draw on; a new figure if not given.

    Returns:
        The figure and its axes.
    """
    from matplotlib import colormaps

    fig, ax = figure_and_axes(ax, size=SIZE)
    mode = simulated.mode
    sigma = simulated.sigma
    depth = simulated.depth
    largest = 1.1 * simulated.gamma.max().item()
    gamma = torch.linspace(0.01, largest, 400, dtype=torch.float64)
    points: dict[str, Any] = {"fmt": "o", "markersize": 4, "capsize": 2}
    for index, theta in enumerate(simulated.theta.tolist()):
        shade = 0.9 * index / max(1, len(simulated.theta) - 1)
        color = colormaps["viridis"](shade)
        theory = transferability(mode, theta, gamma, sigma, depth=depth)
        ax.plot(gamma, theory, color=color)
        if printed and mode == "fine_tune":
            scratch = deep_linear.scratch_risk(gamma, sigma)
            gain = scratch - deep_linear.fine_tuning_risk_noiseless(theta, gamma, sigma)
            label = None if index else "noiseless formula"
            ax.plot(gamma, gain, color=color, linestyle="--", linewidth=0.8, label=label)
        mean = simulated.mean[index]
        error = simulated.standard_error[index]
        label = rf"$\theta = {theta * DEGREES:.0f}$°"
        ax.errorbar(simulated.gamma, mean, error, color=color, label=label, **points)
    ax.axhline(0, color="grey", linewidth=0.8)
    ax.set(xlim=(0, largest), ylim=_limits(simulated))
    ax.set(xlabel=GAMMA, ylabel="gain $T$", title=_title(mode, sigma))
    ax.legend(fontsize="small")
    return fig, ax


def plot_phase_overview(simulated: PhaseDiagram) -> "tuple[Figure, list[Any]]":
    """Draw surface, map and slices beside each other.

    Args:
        simulated: The simulated grid.

    Returns:
        The figure and its three axes.

    Example::

        theta, gamma = torch.linspace(0, 1.5, 4), torch.linspace(0.2, 1.8, 9)
        fig, axes = plot_phase_overview(simulate_phase_diagram("linear", theta, gamma, 0.2))
    """
    from matplotlib.figure import Figure

    fig = Figure(figsize=(15, 4.5), layout="constrained")
    surface: Any = fig.add_subplot(1, 3, 1, projection="3d")
    colours = fig.add_subplot(1, 3, 2)
    slices = fig.add_subplot(1, 3, 3)
    mode = simulated.mode
    sigma = simulated.sigma
    depth = simulated.depth
    max_gamma = 1.1 * simulated.gamma.max().item()
    plot_phase_surface(mode, sigma, depth=depth, max_gamma=max_gamma, ax=surface)
    plot_phase_map(mode, sigma, depth=depth, max_gamma=max_gamma, ax=colours)
    plot_phase_slices(simulated, ax=slices)
    return fig, [surface, colours, slices]


def _title(mode: Mode, sigma: float) -> str:
    return rf"{TITLES[mode]}, $\sigma = {sigma:g}$"


def _grid(mode: Mode, sigma: float, depth: int, max_gamma: float, points: int) -> "list[ndarray]":
    """Angles in degrees, sample numbers and gains, ``[P, P]`` each; an even ``P`` misses the pole at gamma = 1."""
    theta = torch.linspace(0, math.pi / 2, points, dtype=torch.float64)
    theta = theta[:, None]
    middles = torch.arange(points, dtype=torch.float64) + 0.5
    gamma = (middles * max_gamma / points)[None]
    gain = transferability(mode, theta, gamma, sigma, depth=depth)
    degrees = theta * DEGREES
    return [t.expand_as(gain).numpy() for t in (degrees, gamma, gain)]


def _boundaries(
    mode: Mode,
    sigma: float,
    depth: int,
    max_gamma: float,
) -> list[tuple[Tensor, Tensor]]:
    """Curves ``(gamma, theta)`` on which the gain is 0."""
    if mode == "fine_tune":
        largest = min(1.0, max_gamma) - 1e-6
        gamma = torch.linspace(1e-3, largest, 2000, dtype=torch.float64)
        theta = deep_linear.fine_tuning_boundary(gamma, sigma, depth=depth)
        return [(gamma, theta)]
    theta = torch.linspace(1e-4, math.pi / 2, 4000, dtype=torch.float64)
    curves = deep_linear.negative_transfer_interval(theta, sigma)
    return [(curve, theta) for curve in curves]


def _limits(simulated: PhaseDiagram) -> tuple[float, float]:
    """What the points need and a margin; the theory's pole would dwarf them."""
    below = simulated.mean - simulated.standard_error
    above = simulated.mean + simulated.standard_error
    low = below.min().item()
    high = above.max().item()
    margin = 0.1 * max(high - low, 0.1)
    return low - margin, high + margin
