"""When does transfer hurt? Two phase diagrams of a deep linear network, and simulations beside the theory.

A network learns a source task, then a target at an angle θ to it from n samples of dimension d. Blue is where transfer
helps over training from scratch, red where it hurts.

    python examples/phase_diagram.py --folder figures
"""

# %% What to do
import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

from lightning_taskinfo.functional.deep_linear import (
    fine_tuning_boundary,
    fine_tuning_risk_noiseless,
    negative_transfer_interval,
    scratch_risk,
)
from lightning_taskinfo.tasks import plot_phase_map, plot_phase_slices, simulate_phase_diagram

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--fast", action="store_true", help="fewer dimensions and repetitions, a few seconds"
)
parser.add_argument(
    "--folder", type=Path, default=Path("runs/phase_diagram"), help="folder of the figure"
)
args = parser.parse_args()
size = {"dimension": 60, "repetitions": 10} if args.fast else {"dimension": 200, "repetitions": 40}

# %% Ask the closed forms: at an angle of 60°, with noise 0.3, where does it hurt?
lower, upper, onset = negative_transfer_interval(torch.pi / 3, 0.3)
print(f"Linear transfer hurts for n/d in ({lower:.2f}, {upper:.2f}) and above {onset:.2f}.")
print(
    "Between them it only seems to help: training from scratch is at its worst where n is near d."
)
angle = fine_tuning_boundary(torch.tensor([0.1, 0.5, 0.9]), 0.3).rad2deg()
print(
    "Fine-tuning hurts above",
    ", ".join(f"{value:.1f}°" for value in angle),
    "for n/d = 0.1, 0.5, 0.9.",
)

# %% Simulate, and draw everything in one figure
theta = torch.linspace(0, torch.pi / 2, 4, dtype=torch.float64)
gamma = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9, 1.25, 1.5, 2.0], dtype=torch.float64)
fine = torch.linspace(0.01, 2.2, 400, dtype=torch.float64)
fig = Figure(figsize=(14, 8), layout="constrained")
axes = fig.subplots(2, 3)
for mode, row in zip(("linear", "fine_tune"), axes, strict=True):
    plot_phase_map(mode, 0.0, ax=row[0])
    plot_phase_map(mode, 0.3, ax=row[1])
    generator = torch.Generator().manual_seed(0)
    simulated = simulate_phase_diagram(mode, theta, gamma, 0.3, **size, generator=generator)
    plot_phase_slices(simulated, ax=row[2])
    if mode == "fine_tune":  # dashed: the formula as it is printed, which holds without noise only
        for angle in theta:
            printed = scratch_risk(fine, 0.3) - fine_tuning_risk_noiseless(angle, fine, 0.3)
            row[2].plot(fine, printed, "k--", linewidth=0.6)
    else:
        row[2].set_ylim(
            -1.1, 1.1
        )  # the points near n = d, where scratch training diverges, leave the picture

# %% Save
args.folder.mkdir(parents=True, exist_ok=True)
path = args.folder / "phase_diagram.png"
fig.savefig(path, dpi=120)
print(f"Figure: {path}")
