"""Train a small network on real handwritten digits, and look at its curves.

Run it with ``make demo``, or cell by cell in an editor that knows ``# %%``.
"""

# %%
import argparse
import csv
import logging
import os
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
from matplotlib.figure import Figure
from pytorch_lightning.loggers import CSVLogger, WandbLogger
from reference import ArrayDataModule, Classifier

from lightning_taskinfo.data import load_dataset
from lightning_taskinfo.plotting import plot_curves

os.environ.setdefault("WANDB_SILENT", "true")
logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*does not have many workers.*")
warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning's own


# %% Train
def train(out: Path, *, fast: bool) -> pl.Trainer:
    """Fit and test the reference classifier; metrics go to a CSV file and an offline W&B run below ``out``."""
    pl.seed_everything(0, verbose=False)
    data = load_dataset("digits", size=8 if fast else 28)
    trainer = pl.Trainer(
        max_epochs=2 if fast else 10,
        accelerator="cpu",
        logger=[CSVLogger(out), WandbLogger("demo", save_dir=out, project="lightning-taskinfo", offline=True)],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
        log_every_n_steps=10,
    )
    datamodule = ArrayDataModule(data)
    model = Classifier(data.image_shape, data.num_classes)
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule, verbose=False)
    return trainer


# %% Look
def read_history(logger: CSVLogger) -> list[dict[str, float]]:
    """Return one row an epoch, counted from 1; the last one holds the test."""
    epochs: dict[str, dict[str, float]] = {}
    with open(Path(logger.log_dir, "metrics.csv"), newline="") as file:
        for row in csv.DictReader(file):
            epochs.setdefault(row["epoch"], {}).update({k: float(v) for k, v in row.items() if v})
    return [{**row, "epoch": row["epoch"] + 1} for row in epochs.values()]


def print_table(history: list[dict[str, float]], names: list[str]) -> None:
    print(*(f"{name:>14}" for name in ["epoch", *names]))
    for row in history:
        print(f"{row['epoch']:14.0f}", *(f"{row[name]:14.4f}" for name in names))


def draw(history: list[dict[str, float]], path: Path) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_curves(history, ["train_loss", "val_loss"], x="epoch", ylabel="cross-entropy in nats", ax=left)
    plot_curves(history, ["val_accuracy"], x="epoch", ylabel="accuracy", ax=right)
    figure.savefig(path, dpi=150)


# %% All of it
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="smaller images and two epochs, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for everything that is written")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)

    trainer = train(arguments.out, fast=arguments.fast)
    csv_logger, wandb_logger = trainer.loggers
    csv_logger.save()
    *history, test = read_history(csv_logger)
    print_table(history, ["train_loss", "val_loss", "val_accuracy"])
    print(f"\nTest accuracy: {test['test_accuracy']:.3f}")

    figure = arguments.out / "curves.png"
    draw(history, figure)
    wandb_logger.log_image("curves", [str(figure)])
    run = arguments.out / "wandb" / Path(wandb_logger.experiment.dir).parent.name
    wandb_logger.experiment.finish()
    wandb = os.path.relpath(Path(sys.executable).with_name("wandb"))
    print(f"Curves:        {figure}\nOffline run:   {run}\nLook at it:    {wandb} leet {run}")


if __name__ == "__main__":
    main([] if "ipykernel" in sys.modules else None)  # a kernel's own arguments are not ours
