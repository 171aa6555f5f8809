"""When does transfer hurt? Phase diagrams of a deep linear network, without and with noise in the labels.

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
    fine_tuning_risk,
    negative_transfer_interval,
)
from lightning_taskinfo.tasks import plot_phase_map

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--fast", action="store_true", help="nothing is left out: it takes seconds")
parser.add_argument(
    "--folder", type=Path, default=Path("runs/phase_diagram"), help="folder of the figure"
)
args = parser.parse_args()

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
risk = fine_tuning_risk(torch.pi / 3, 0.5, 0.3)
printed = fine_tuning_risk(torch.pi / 3, 0.5, 0.3, depth=1)
print(f"Its risk is {risk:.3f} at n/d = 0.5, and {printed:.3f} by the formula as it is printed.")

# %% Draw everything in one figure
fig = Figure(figsize=(13, 7), layout="constrained")
axes = fig.subplots(2, 3)
for mode, row in zip(("linear", "fine_tune"), axes, strict=True):
    for sigma, ax in zip((0.0, 0.3, 0.8), row, strict=True):
        plot_phase_map(mode, sigma, ax=ax)

# %% Save
args.folder.mkdir(parents=True, exist_ok=True)
path = args.folder / "phase_diagram.png"
fig.savefig(path, dpi=120)
print(f"Figure: {path}")
