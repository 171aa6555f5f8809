"""Watch a training: what the callbacks measure while a small network learns digits.

Two callbacks are added to an ordinary Trainer; the weights that come out are the same without them. The figure shows
where the information sits, layer by layer, and what it is weighed against.
"""

# %%
import argparse
import logging
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
from matplotlib.figure import Figure
from reference import ArrayDataModule, Classifier

from lightning_taskinfo import FisherTrace, InformationInWeights
from lightning_taskinfo.data import load_dataset
from lightning_taskinfo.plotting import plot_curves

for namespace in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(namespace).setLevel(logging.WARNING)
for message in ("many workers", "LeafSpec", "logging interval"):
    warnings.filterwarnings("ignore", message=f".*{message}")


# %% Train, and watch
def train(epochs: int) -> tuple[FisherTrace, InformationInWeights]:
    pl.seed_everything(0, verbose=False)
    fisher, information = FisherTrace(every_n_steps=10), InformationInWeights(every_n_epochs=1)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[fisher, information],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    trainer.fit(Classifier((1, 8, 8), 10, lr=2e-3), ArrayDataModule(load_dataset("digits", size=8)))
    return fisher, information


# %% Look
def draw(fisher: FisherTrace, information: InformationInWeights, path: Path) -> None:
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    terms = ["c_beta", "expected_loss_nats", "displacement_nats", "curvature_nats"]
    plot_curves(information.history, terms, ylabel="nats", ax=left)
    rows = [
        {key.removeprefix("information_nats/"): value for key, value in row.items()}
        for row in information.history
    ]
    layers = [key for key in rows[-1] if key not in information.history[-1]]
    plot_curves(rows, layers, ylabel="information by layer (nats)", ax=middle)
    fisher.plot(ax=right)
    figure.savefig(path, dpi=150)


# %% All of it
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="two epochs, to see that it runs")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/watch_run"), help="folder for the figure"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    fisher, information = train(2 if arguments.fast else 15)
    for row in information.history:
        print(
            f"step {row['step']:4.0f}: {row['information_nats']:6.0f} nats in the weights, "
            f"{row['effective_parameters']:5.0f} weights decided by the data, loss {row['loss_nats']:7.1f} nats"
        )
    draw(fisher, information, arguments.folder / "watch_run.png")
    print(f"\nFigure: {arguments.folder / 'watch_run.png'}")


if __name__ == "__main__":
    main()
