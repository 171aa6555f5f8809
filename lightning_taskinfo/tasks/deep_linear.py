"""Where transfer helps a deep linear network, and where it hurts: the phase diagram of the closed forms."""

import math
from typing import Literal

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_choice
from lightning_taskinfo.functional import deep_linear
from lightning_taskinfo.plotting import Drawn, Given, figure_and_axes

Mode = Literal["linear", "fine_tune"]
TITLES = {"linear": "linear transfer", "fine_tune": "fine-tuning"}


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
    check_choice(TITLES, mode=mode)
    if mode == "linear":
        return deep_linear.linear_transferability(theta, gamma, sigma)
    return deep_linear.fine_tuning_transferability(theta, gamma, sigma, depth=depth)


def plot_phase_map(
    mode: Mode,
    sigma: float,
    *,
    depth: int = 2,
    max_gamma: float = 2.0,
    ax: Given = None,
) -> Drawn:
    """Draw sign and size of the gain as colours, and a line where negative transfer begins.

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
    theta = torch.linspace(0, math.pi / 2, 300, dtype=torch.float64)
    middles = torch.arange(300, dtype=torch.float64) + 0.5  # none is on the pole at gamma = 1
    gamma = middles * max_gamma / 300
    gain = transferability(mode, theta[:, None], gamma, sigma, depth=depth)
    place = gamma.numpy(), theta.rad2deg().numpy()
    fig, ax = figure_and_axes(ax, size=(5, 4))
    image = ax.pcolormesh(
        *place,
        gain.numpy(),
        cmap="RdBu",
        vmin=-1,
        vmax=1,
        rasterized=True,
    )
    fig.colorbar(image, ax=ax, label="gain $T$ over scratch", extend="both")
    decided = torch.where(gain == 0, math.nan, gain)  # fine-tuning on many samples changes nothing
    ax.contour(*place, decided.numpy(), levels=[0], colors="black")
    ax.set(
        xlim=(0, max_gamma),
        ylim=(0, 90),
        xlabel=r"samples per dimension $\gamma$",
        ylabel=r"angle $\theta$ (°)",
        title=rf"{TITLES[mode]}, $\sigma = {sigma:g}$",
    )
    return fig, ax
