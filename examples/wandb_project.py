"""A project of twenty offline runs in Weights & Biases: which five panels to keep, and how to compare groups.

Four groups of networks learn digits with 0 %, 25 %, 50 % and 100 % random labels, five seeds each. Runs are read back
with ``wandb leet inspect --json`` and drawn as W&B draws a grouped panel: the mean of each group, and its range.
"""

# %%
import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
import wandb
from matplotlib.figure import Figure
from pytorch_lightning.loggers import WandbLogger
from reference import Classifier
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import FisherTrace, HardSamples, InformationInWeights
from lightning_taskinfo.data import load_dataset

os.environ.setdefault("WANDB_SILENT", "true")
logging.disable(logging.WARNING)  # Lightning's words on each of many trainings
warnings.filterwarnings("ignore", module="pytorch_lightning")
warnings.filterwarnings("ignore", message="InformationInWeights: networks drawn from the Gaussian")

PANELS = {
    "train_loss": "training loss",
    "val_accuracy": "validation accuracy",
    "taskinfo/squared_displacement": "squared distance of the\nweights from their start",
    "taskinfo/fisher_trace": "Fisher trace",
    "taskinfo/squared_gradient_norm": "squared gradient norm\nper sample",
}
STEP = "trainer/global_step"


# %% One run: an ordinary training with a group, a configuration and three callbacks
def train(share: float, seed: int, folder: Path, *, samples: int, epochs: int) -> None:
    data = load_dataset("digits", size=8)
    x, y = data.train()[:samples]
    generator = torch.Generator().manual_seed(seed)
    redrawn = torch.randperm(len(y), generator=generator)[: round(share * len(y))]
    y[redrawn] = torch.randint(10, (len(redrawn),), generator=generator)
    pl.seed_everything(seed, verbose=False)
    run = wandb.init(
        project="random-labels",
        group=f"{share:.0%} random labels",
        name=f"{share:.0%} random, seed {seed}",
        config={"random_labels": share, "seed": seed},
        dir=folder,
        mode="offline",
    )
    fisher = FisherTrace(every_n_steps=25, data="train")
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=WandbLogger(experiment=run),
        callbacks=[
            fisher,
            InformationInWeights(every_n_epochs=max(1, epochs // 10)),
            HardSamples(),
        ],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=5,
    )
    model = Classifier(data.image_shape, data.num_classes, lr=3e-3)
    trainer.fit(
        model,
        DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True),
        DataLoader(data.test(), batch_size=512),
    )
    run.finish()


# %% Read the runs back
def read(run: Path) -> dict:
    """Return the group of a run, and the points of each panel."""
    program = Path(sys.executable).with_name("wandb")
    command = [program, "leet", "inspect", "--json", run]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines]
    (group,) = {r["run"]["run_group"] for r in records if r["type"] == "run"}
    points = {name: [] for name in PANELS}
    for record in records:
        item = record["history"]["item"] if record["type"] == "history" else {}
        for name in PANELS.keys() & item.keys():
            points[name].append((item[STEP], item[name]))
    return {"group": group, "points": points}


# %% Look
def draw(runs: list[dict], path: Path) -> None:
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    panels = figure.subplots(2, 3).flat
    groups = list(dict.fromkeys(run["group"] for run in runs))
    for ax, (name, label) in zip(panels, PANELS.items(), strict=False):
        for group in groups:
            curves = [run["points"][name] for run in runs if run["group"] == group]
            steps = [step for step, _ in min(curves, key=len)]
            by_step = [[curve[i][1] for curve in curves] for i in range(len(steps))]
            (line,) = ax.plot(steps, [statistics.fmean(values) for values in by_step], label=group)
            ends = [min(values) for values in by_step], [max(values) for values in by_step]
            ax.fill_between(steps, *ends, alpha=0.2, color=line.get_color())
        ax.set(title=name, xlabel="optimizer step", ylabel=label, ylim=(0, None))
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.axes[-1].axis("off")
    figure.axes[-1].legend(
        handles, labels, loc="center", frameon=False, title="mean and range over seeds"
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="four short runs, to see that it runs")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/wandb_project"), help="folder of runs and figure"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    shares, seeds = ((0.0, 1.0), 2) if arguments.fast else ((0.0, 0.25, 0.5, 1.0), 5)
    length = {"samples": 128, "epochs": 2} if arguments.fast else {"samples": 300, "epochs": 60}
    for share in shares:
        for seed in range(seeds):
            train(share, seed, arguments.folder, **length)
    folders = sorted((arguments.folder / "wandb").glob("offline-run-*"))
    runs = sorted(
        (read(folder) for folder in folders), key=lambda run: float(run["group"].split("%")[0])
    )
    draw(runs, arguments.folder / "wandb_project.png")
    print(f"{len(runs)} runs. Browse them: wandb leet {arguments.folder / 'wandb'}")
    print(f"Figure: {arguments.folder / 'wandb_project.png'}")


if __name__ == "__main__":
    main()
