"""How much does fine-tuning add to a pretrained network, and where?

A network is pretrained on digits and fine-tuned on a few hundred letters; another one learns the letters from scratch.
Measured from the weights that each training began with, the information in the weights is what that training added,
layer by layer. Run it with ``python examples/fine_tuning.py``, or cell by cell.
"""

# %%
import argparse
import logging
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from reference import Classifier
from torch.utils.data import DataLoader, Subset

from lightning_taskinfo import InformationInWeights
from lightning_taskinfo.data import ArrayData, load_dataset
from lightning_taskinfo.plotting import plot_curves

for namespace in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(namespace).setLevel(logging.WARNING)
for message in ("many workers", "LeafSpec", "logging interval", "validation_step"):
    warnings.filterwarnings("ignore", message=f".*{message}")


# %% Train, and measure from where the training began
def train(
    model: Classifier, data: ArrayData, n: int, epochs: int, *callbacks: pl.Callback
) -> Classifier:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    trainer.fit(model, DataLoader(Subset(data.train(), range(n)), batch_size=32, shuffle=True))
    return model


def new_network(data: ArrayData) -> Classifier:
    pl.seed_everything(0, verbose=False)
    return Classifier(data.image_shape, data.num_classes, lr=2e-3)


def with_new_head(model: Classifier, num_classes: int) -> Classifier:
    model.head = torch.nn.Linear(model.head.in_features, num_classes)
    return model


def accuracy(model: torch.nn.Module, data: ArrayData) -> float:
    images, labels = data.test().tensors
    with torch.no_grad():
        return (model.eval()(images).argmax(-1) == labels).float().mean().item()


# %% Look
def layers_of(information: InformationInWeights) -> dict[str, float]:
    """Return the last measurement's nats by layer."""
    last, prefix = information.history[-1], "information_nats/"
    return {
        key.removeprefix(prefix): value for key, value in last.items() if key.startswith(prefix)
    }


def draw(runs: dict[str, InformationInWeights], path: Path) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows = [
        {"step": here["step"]}
        | dict(zip(runs, (here["information_nats"], there["information_nats"]), strict=True))
        for here, there in zip(*(run.history for run in runs.values()), strict=True)
    ]
    plot_curves(rows, list(runs), ylabel="information added (nats)", ax=left)
    for i, (name, run) in enumerate(runs.items()):
        nats = layers_of(run)
        right.bar(
            [k + 0.4 * i for k in range(len(nats))], list(nats.values()), width=0.4, label=name
        )
        right.set_xticks([k + 0.2 for k in range(len(nats))], list(nats), rotation=20)
    right.set_ylabel("nats, by layer")
    right.legend(frameon=False)
    figure.savefig(path, dpi=150)


# %% All of it
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fast", action="store_true", help="fewer samples and epochs, to see that it runs"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/fine_tuning"), help="folder for the figure"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    n, before, after = (128, 1, 2) if arguments.fast else (300, 15, 30)
    digits, letters = (load_dataset(name, size=8) for name in ("digits", "letters"))

    pretrained = train(new_network(digits), digits, 128 if arguments.fast else 1400, before)
    runs = {"fine-tuning": InformationInWeights(), "from scratch": InformationInWeights()}
    tuned = train(
        with_new_head(pretrained, letters.num_classes), letters, n, after, runs["fine-tuning"]
    )
    scratch = train(new_network(letters), letters, n, after, runs["from scratch"])

    print(f"{'letters':>14} {'added (nats)':>14} {'test accuracy':>14}")
    for (name, run), model in zip(runs.items(), (tuned, scratch), strict=True):
        print(
            f"{name:>14} {run.history[-1]['information_nats']:14.0f} {accuracy(model, letters):14.3f}"
        )
    draw(runs, arguments.folder / "fine_tuning.png")
    print(f"\nFigure: {arguments.folder / 'fine_tuning.png'}")


if __name__ == "__main__":
    main()
