"""Semi-supervised transfer on your own images: two npz files in, one answer out.

Without ``--source`` and ``--target`` two such files are made first: digits as they are, and digits seen as negatives
through noise, of which only a few have labels. In this example transfer hurts: what was learned from bright strokes
does not fit dark ones, and the report advises to train from scratch. It is an answer to know before a long
pretraining. Run it with ``python examples/own_data.py``, or cell by cell.
"""

# %%
import argparse
from pathlib import Path

import numpy as np

from lightning_taskinfo import TransferDataModule
from lightning_taskinfo.data import load_dataset
from lightning_taskinfo.transfer import Stages, TransferReport, transfer


# %% What a file holds: images as uint8, labels as integers, a training and a test split
def write_files(folder: Path, *, size: int) -> tuple[Path, Path]:
    """Write a source and a target that looks different but has the same classes."""
    digits = load_dataset("digits", size=size)
    rng = np.random.default_rng(0)
    paths = folder / "clean.npz", folder / "negatives.npz"
    splits = {"x_train": digits.x_train, "x_test": digits.x_test}
    labels = {"y_train": digits.y_train, "y_test": digits.y_test}
    np.savez(paths[0], **splits, **labels)
    noisy = {
        name: (255 - x + rng.normal(0, 40, x.shape)).clip(0, 255).astype(np.uint8)
        for name, x in splits.items()
    }
    np.savez(paths[1], **noisy, **labels)
    return paths


# %% Pretrain, fine-tune, compare with scratch
def run(source: Path, target: Path, folder: Path, *, fast: bool) -> TransferReport:
    data = TransferDataModule(
        source, target, labels=50, max_unlabeled=200 if fast else 1000, max_source=2000
    )
    return transfer(
        "mlp",
        data,
        methods=["standard", "mk_mmd", "mutual_information"],
        seeds=2 if fast else 5,
        stages=Stages(1, 1) if fast else Stages(pretrain_epochs=5, fine_tune_epochs=15),
        folder=folder / "cells",
        workers=0 if fast else None,
    )


# %% All of it
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, help="npz file of the labelled source")
    parser.add_argument("--target", type=Path, help="npz file of the target")
    parser.add_argument(
        "--fast", action="store_true", help="smaller images and one epoch, to see that it runs"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/own_data"),
        help="folder for everything that is written",
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    source, target = arguments.source, arguments.target
    if source is None or target is None:
        source, target = write_files(arguments.folder, size=8 if arguments.fast else 28)

    report = run(source, target, arguments.folder, fast=arguments.fast)
    print(report.to_terminal())
    report.plot()[0].savefig(arguments.folder / "own_data.png", dpi=150)
    files = report.save(arguments.folder / "report")
    print(f"\nReport: {files['report.md']}\nFigure: {arguments.folder / 'own_data.png'}")


if __name__ == "__main__":
    main()
