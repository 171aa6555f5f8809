"""``taskinfo phase-diagram``."""

from pathlib import Path
from typing import Any

import torch

from lightning_taskinfo._tables import text_table
from lightning_taskinfo.plotting import check_picture
from lightning_taskinfo.tasks import PhaseDiagram, plot_phase_overview, simulate_phase_diagram
from lightning_taskinfo.tasks.deep_linear import Mode


def phase_diagram(
    mode: Mode = "linear",
    sigma: float = 0.2,
    out: Path = Path("phase_diagram.png"),
    angles: int = 5,
    gammas: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 1.5, 2.0),
    seed: int = 0,
    **options: Any,
) -> str:
    """Draw when transfer hurts a deep linear network: surface, signed map, and slices with simulated points.

    Args:
        mode: What is transferred: the features under a new last layer, or all layers.
        sigma: Standard deviation of the label noise.
        out: Where the figure is written; the suffix decides its format.
        angles: Number of angles between source and target that are simulated, evenly from 0 to 90
            degrees.
        gammas: Numbers of target samples per input dimension that are simulated.
        seed: Seed of the simulation.
        **options: Arguments of :func:`lightning_taskinfo.tasks.simulate_phase_diagram`.

    Returns:
        A table of the simulated and the predicted gains over training from scratch.

    Raises:
        ValueError: If an argument is outside its domain.
    """
    if angles < 1:
        raise ValueError(f"`angles` must be at least 1, got {angles}.")
    check_picture("out", out)
    simulated = simulate_phase_diagram(
        mode,
        torch.linspace(0, torch.pi / 2, angles, dtype=torch.float64),
        torch.tensor(gammas, dtype=torch.float64),
        sigma,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )
    fig, _ = plot_phase_overview(simulated)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)
    return f"{_gain_table(simulated)}\n{out}"


def _gain_table(simulated: PhaseDiagram) -> str:
    """One line per cell: angle, samples per dimension, simulated gain with its standard error, theory."""
    rows = []
    for a, theta in enumerate(simulated.theta.rad2deg().tolist()):
        for g, gamma in enumerate(simulated.gamma.tolist()):
            row = [f"{theta:.1f}", f"{gamma:.3f}"]
            for gain in (simulated.mean, simulated.standard_error, simulated.theory):
                row.append(f"{gain[a, g]:.4f}")
            rows.append(row)
    return text_table(["theta_deg", "gamma", "gain", "error", "theory"], rows)
