"""Tell memorising from learning: digits with 0 %, 25 %, 50 % and 100 % random labels.

A network that fits random labels has to store them. Its weights move further than those of a network that learns the
rule behind the labels, and its predictions are more sensitive to them on the way; the loss alone does not show it.
``--study`` draws the stored results of ``benchmarks/memorised_information.py`` instead: five seeds, two networks and
three lengths of training.
"""

# %%
import argparse
import json
import logging
import sys
import warnings
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from reference import Classifier
from scipy.stats import t as student
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import FisherTrace, InformationInWeights
from lightning_taskinfo.data import ArrayData, load_dataset
from lightning_taskinfo.plotting import plot_curves

FRACTIONS = (0.0, 0.25, 0.5, 1.0)
for namespace in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(namespace).setLevel(logging.WARNING)
for message in ("many workers", "LeafSpec", "logging interval", "validation_step"):
    warnings.filterwarnings("ignore", message=f".*{message}")


# %% Labels that say nothing
def with_random_labels(data: ArrayData, fraction: float, n: int) -> TensorDataset:
    """Return ``n`` training samples, a fraction of whose labels is drawn anew."""
    rng = np.random.default_rng(0)
    images, labels = data.train()[:n]
    redrawn = rng.permutation(n)[: round(fraction * n)]
    labels[redrawn] = torch.from_numpy(rng.integers(data.num_classes, size=len(redrawn)))
    return TensorDataset(images, labels)


# %% Train, and watch
def train(
    data: ArrayData, fraction: float, *, n: int, epochs: int
) -> dict[str, list[dict[str, float]] | float]:
    pl.seed_everything(0, verbose=False)
    model = Classifier(data.image_shape, data.num_classes, width=32, lr=2e-3)
    samples = with_random_labels(data, fraction, n)
    every = max(1, epochs // 20)
    information = InformationInWeights(every_n_epochs=every)
    fisher = FisherTrace(every_n_epochs=every, data="train", max_samples=256)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[information, fisher],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    trainer.fit(model, DataLoader(samples, batch_size=64, shuffle=True))
    return {
        "information": information.history,
        "fisher": fisher.history,
        "train_accuracy": accuracy(model, *samples.tensors),
        "test_accuracy": accuracy(model, *data.test().tensors),
    }


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return (model.eval()(images).argmax(-1) == labels).float().mean().item()


# %% Look
def side_by_side(runs: dict[str, dict], which: str, name: str) -> list[dict[str, float]]:
    """Return one row per measurement, with a column for each run."""
    rows: dict[float, dict[str, float]] = {}
    for label, run in runs.items():
        for row in run[which]:
            rows.setdefault(row["step"], {"step": row["step"]})[label] = row[name]
    return list(rows.values())


def draw(runs: dict[str, dict], path: Path) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    moved = side_by_side(runs, "information", "squared_displacement")
    plot_curves(
        moved, list(runs), ylabel="squared distance of the weights from their start", ax=left
    )
    plot_curves(
        side_by_side(runs, "fisher", "fisher_trace"),
        list(runs),
        ylabel="trace of the Fisher",
        ax=right,
    )
    for ax in (left, right):
        ax.legend(title="random labels", frameon=False)
    figure.savefig(path, dpi=150)


# %% The stored study
PANELS = {
    "displacement": "squared distance of the weights\nfrom their start",
    "largest_fisher_trace": "largest Fisher trace so far",
    "measured_c1_0.1": "measured code length C₁ (nats)",
}


def draw_study(study: dict, path: Path) -> None:
    """Draw mean and 95 % interval over seeds of three measures: panels by measure, a line for each length."""
    networks = sorted({row["network"] for row in study["runs"]}, reverse=True)
    figure = Figure(figsize=(11, 3.2 * len(networks)), layout="constrained")
    grid = figure.subplots(len(networks), len(PANELS), squeeze=False)
    for axes, network in zip(grid, networks, strict=True):
        for ax, (name, label) in zip(axes, PANELS.items(), strict=True):
            for length in study["settings"]["lengths"]:
                rows = [
                    row
                    for row in study["runs"]
                    if (row["network"], row["step"]) == (network, length)
                ]
                draw_length(ax, rows, name)
            ax.set(xlabel="random labels", ylabel=label, title=network.upper(), ylim=(0, None))
            ax.xaxis.set_major_formatter("{x:.0%}")
            if name == "measured_c1_0.1":
                samples = study["settings"]["samples"]
                ax.axhline(
                    samples * np.log(10),
                    color="black",
                    linestyle=":",
                    label="N log 10: the labels themselves",
                )
            ax.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def draw_length(ax, rows: list[dict], name: str) -> None:
    shares = sorted({row["share"] for row in rows})
    values = np.array(
        [[row[name] for row in rows if row["share"] == share] for share in shares]
    )  # [shares, seeds]
    reach = (
        student.ppf(0.975, values.shape[1] - 1) * values.std(1, ddof=1) / np.sqrt(values.shape[1])
    )
    ax.errorbar(
        shares, values.mean(1), reach, capsize=3, marker="o", label=f"{rows[0]['step']:,} steps"
    )


# %% All of it
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fast", action="store_true", help="fewer samples and epochs, to see that it runs"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/memorization"), help="folder for the figure"
    )
    parser.add_argument(
        "--study", type=Path, help="results of the benchmark, to draw instead of training"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.study:
        draw_study(json.loads(arguments.study.read_text()), arguments.folder / "memorization.png")
        return
    n, epochs = (128, 4) if arguments.fast else (1000, 120)
    data = load_dataset("digits", size=8)
    runs = {f"{fraction:.0%}": train(data, fraction, n=n, epochs=epochs) for fraction in FRACTIONS}
    columns = ["random labels", "distance²", "largest tr F", "train accuracy", "test accuracy"]
    if arguments.fast:
        print("Only to see that it runs: so short a training has memorised nothing yet.")
    print(*(f"{column:>18}" for column in columns))
    for label, run in runs.items():
        largest = max(row["fisher_trace"] for row in run["fisher"])
        values = [
            run["information"][-1]["squared_displacement"],
            largest,
            run["train_accuracy"],
            run["test_accuracy"],
        ]
        print(f"{label:>18}", *(f"{value:18.3f}" for value in values))
    draw(runs, arguments.folder / "memorization.png")
    print(f"\nFigure: {arguments.folder / 'memorization.png'}")


if __name__ == "__main__":
    main()
