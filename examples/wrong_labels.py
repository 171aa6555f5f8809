"""Find wrong labels: which digits did the network have to learn by heart?

A tenth of the labels is replaced by another class. ``HardSamples`` follows the loss of each sample through an
ordinary training; the samples that were hardest to learn come first, and most of them are the wrong ones.
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
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import HardSamples, SampleScores
from lightning_taskinfo.data import load_dataset

for namespace in ("lightning.pytorch", "pytorch_lightning"):
    logging.getLogger(namespace).setLevel(logging.WARNING)
for message in ("many workers", "LeafSpec", "logging interval", "validation_step"):
    warnings.filterwarnings("ignore", message=f".*{message}")


# %% A tenth of the labels is wrong
def with_wrong_labels(labels: Tensor, classes: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(labels), generator=generator)[: len(labels) // 10]
    wrong = labels.clone()
    wrong[chosen] = (
        labels[chosen] + torch.randint(1, classes, chosen.shape, generator=generator)
    ) % classes
    return wrong


# %% An ordinary training, and one callback
def train(images: Tensor, labels: Tensor, classes: int, epochs: int) -> SampleScores:
    pl.seed_everything(0, verbose=False)
    callback = HardSamples()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    trainer.fit(Classifier(images.shape[1:], classes), loader)
    return callback.samples


# %% Look
def draw(samples: SampleScores, images: Tensor, given: Tensor, true: Tensor, path: Path) -> None:
    """Draw the scores by rank, and the first samples with the labels that they were given."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subfigures(1, 2)
    samples.plot(k=int((given != true).sum()), ax=left.subplots())
    for ax, index in zip(right.subplots(3, 6).flat, samples.ranking().tolist(), strict=False):
        ax.imshow(images[index, 0], cmap="gray_r")
        wrong = given[index] != true[index]
        ax.set_title(f"“{given[index]}”", color="C3" if wrong else "black", fontsize=9)
        ax.axis("off")
    right.suptitle("the first samples and their labels; planted wrong ones in red", fontsize=9)
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
        "--folder", type=Path, default=Path("runs/wrong_labels"), help="folder for the figure"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    n, epochs = (256, 3) if arguments.fast else (2000, 20)
    data = load_dataset("digits", size=28)
    images, true = data.train()[:n]
    given = with_wrong_labels(true, data.num_classes)
    samples = train(images, given, data.num_classes, epochs)
    print(samples)
    found = (given != true)[samples.ranking()[: n // 10]].float().mean()
    print(f"\nOf the first {n // 10} samples, {found:.0%} have a wrong label.")
    draw(samples, images, given, true, arguments.folder / "wrong_labels.png")
    print(f"Figure: {arguments.folder / 'wrong_labels.png'}")


if __name__ == "__main__":
    main()
