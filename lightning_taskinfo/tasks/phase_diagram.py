"""Phase diagrams of transfer: theory and simulation on a grid of task angles and sample numbers."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from lightning_taskinfo.functional.deep_linear import (
    fine_tuning_transferability,
    linear_transferability,
)
from lightning_taskinfo.tasks.simulate import TransferRisks, simulate_transfer

Mode = Literal["linear", "fine_tune"]


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
    """Simulate the gain of transfer on a grid, see :func:`~lightning_taskinfo.tasks.simulate.simulate_transfer`.

    Args:
        mode: ``"linear"`` or ``"fine_tune"``.
        theta: Angles between source and target, shape ``[A]``; one gamma's angles share inputs and noise.
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
    transferability(
        mode, theta[:, None], gamma, sigma, depth=depth
    )  # refuses what is outside the domain
    if repetitions < 2:
        raise ValueError(
            f"`repetitions` must be at least 2 for a standard error, got {repetitions}."
        )
    draws = [
        _gain(
            mode,
            simulate_transfer(
                theta,
                float(value),
                sigma,
                dimension=dimension,
                repetitions=repetitions,
                depth=depth,
                generator=generator,
            ),
        )
        for value in gamma
    ]
    gains = torch.stack(draws, 1)  # [A, G, R]
    error = gains.std(-1) / repetitions**0.5
    return PhaseDiagram(mode, sigma, depth, theta, gamma, gains.mean(-1), error)


def _gain(mode: Mode, risks: TransferRisks) -> Tensor:
    return risks.scratch - (risks.linear if mode == "linear" else risks.fine_tune)
