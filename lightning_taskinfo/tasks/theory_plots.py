"""Pictures of phase diagrams: surface, signed map with its boundaries, slices with simulated points.

Every function returns ``(fig, ax)`` and draws on a figure of its own unless it is given axes;
pyplot is not involved.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_taskinfo.functional.deep_linear import (
    fine_tuning_boundary,
    fine_tuning_risk_noiseless,
    negative_transfer_interval,
    scratch_risk,
)
from lightning_taskinfo.plotting import figure_and_axes
from lightning_taskinfo.tasks.theory import Mode, PhaseDiagram, transferability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy import ndarray

TITLES = {"linear": "linear transfer", "fine_tune": "fine-tuning"}
DEGREES = 180 / math.pi
SIZE = (5, 4)  # inches of a figure


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
    colours: dict[str, Any] = {"cmap": "RdBu", "vmin": -clip, "vmax": clip}
    ax.plot_surface(gamma, theta, gain.clip(-clip, clip), **colours, linewidth=0, rcount=60)
    ax.set(
        xlabel=r"samples per dimension $\gamma$", ylabel=r"angle $\theta$ (°)", zlabel="gain $T$"
    )
    ax.set_title(rf"{TITLES[mode]}, $\sigma = {sigma:g}$")
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
    image = ax.pcolormesh(gamma, theta, gain, cmap="RdBu", vmin=-clip, vmax=clip, rasterized=True)
    fig.colorbar(image, ax=ax, label="gain $T$ over scratch", extend="both")
    for x, y in _boundaries(mode, sigma, depth, max_gamma):
        ax.plot(x, y * DEGREES, color="black", linewidth=1.5)
    ax.set(
        xlim=(0, max_gamma),
        ylim=(0, 90),
        xlabel=r"samples per dimension $\gamma$",
        ylabel=r"angle $\theta$ (°)",
    )
    ax.set_title(rf"{TITLES[mode]}, $\sigma = {sigma:g}$")
    return fig, ax


def plot_phase_slices(
    simulated: PhaseDiagram, *, printed: bool = False, ax: "Axes | None" = None
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
        color = colormaps["viridis"](0.9 * index / max(1, len(simulated.theta) - 1))
        ax.plot(gamma, transferability(mode, theta, gamma, sigma, depth=depth), color=color)
        if printed and mode == "fine_tune":
            gain = scratch_risk(gamma, sigma) - fine_tuning_risk_noiseless(theta, gamma, sigma)
            label = None if index else "noiseless formula"
            ax.plot(gamma, gain, color=color, linestyle="--", linewidth=0.8, label=label)
        mean, error = simulated.mean[index], simulated.standard_error[index]
        label = rf"$\theta = {theta * DEGREES:.0f}$°"
        ax.errorbar(simulated.gamma, mean, error, color=color, label=label, **points)
    ax.axhline(0, color="grey", linewidth=0.8)
    ax.set(
        xlim=(0, largest),
        ylim=_limits(simulated),
        xlabel=r"samples per dimension $\gamma$",
        ylabel="gain $T$",
    )
    ax.set_title(rf"{TITLES[simulated.mode]}, $\sigma = {simulated.sigma:g}$")
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
    axes: list[Any] = [fig.add_subplot(1, 3, 1, projection="3d")]
    axes += [fig.add_subplot(1, 3, place) for place in (2, 3)]
    options: dict[str, Any] = {
        "depth": simulated.depth,
        "max_gamma": 1.1 * simulated.gamma.max().item(),
    }
    plot_phase_surface(simulated.mode, simulated.sigma, **options, ax=axes[0])
    plot_phase_map(simulated.mode, simulated.sigma, **options, ax=axes[1])
    plot_phase_slices(simulated, ax=axes[2])
    return fig, axes


def _grid(mode: Mode, sigma: float, depth: int, max_gamma: float, points: int) -> "list[ndarray]":
    """Angles in degrees, sample numbers and gains, ``[P, P]`` each; an even ``P`` misses the pole at gamma = 1."""
    theta = torch.linspace(0, math.pi / 2, points, dtype=torch.float64)[:, None]
    gamma = ((torch.arange(points, dtype=torch.float64) + 0.5) * max_gamma / points)[None]
    gain = transferability(mode, theta, gamma, sigma, depth=depth)
    return [t.expand_as(gain).numpy() for t in (theta * DEGREES, gamma, gain)]


def _boundaries(
    mode: Mode, sigma: float, depth: int, max_gamma: float
) -> list[tuple[Tensor, Tensor]]:
    """Curves ``(gamma, theta)`` on which the gain is 0."""
    if mode == "fine_tune":
        gamma = torch.linspace(1e-3, min(1.0, max_gamma) - 1e-6, 2000, dtype=torch.float64)
        return [(gamma, fine_tuning_boundary(gamma, sigma, depth=depth))]
    theta = torch.linspace(1e-4, math.pi / 2, 4000, dtype=torch.float64)
    return [(curve, theta) for curve in negative_transfer_interval(theta, sigma)]


def _limits(simulated: PhaseDiagram) -> tuple[float, float]:
    """What the points need and a margin; the theory's pole would dwarf them."""
    low = (simulated.mean - simulated.standard_error).min().item()
    high = (simulated.mean + simulated.standard_error).max().item()
    margin = 0.1 * max(high - low, 0.1)
    return low - margin, high + margin
