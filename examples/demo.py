"""Transfer from digits to letters with fifty labels: does it help, and do unlabelled letters help it?

Run it with ``make demo``, or cell by cell in an editor that knows ``# %%``. A run that was interrupted goes on where it
was; one that is finished is only shown. Delete the folder to begin anew.
"""

# %%
import argparse
import os
import sys
from pathlib import Path

from lightning_taskinfo.data import load_pair
from lightning_taskinfo.transfer import (
    Stages,
    TransferDataModule,
    TransferReport,
    group_name,
    log_to_wandb,
    transfer,
)

os.environ.setdefault("WANDB_SILENT", "true")


# %% Train: each method twice, on another split, from other initial weights
def run(folder: Path, *, fast: bool) -> TransferReport:
    """Pretrain on digits beside unlabelled letters, fine-tune on fifty labelled ones, and train from scratch beside."""
    source, target = load_pair("digits→letters", size=8 if fast else 28)
    data = TransferDataModule(source, target, labels=50, max_unlabeled=200 if fast else 1500)
    return transfer(
        "mlp" if fast else "small_cnn",
        data,
        methods=["standard", "lautum", "mutual_information"],
        seeds=2,
        stages=Stages(1, 1) if fast else Stages(pretrain_epochs=4, fine_tune_epochs=15),
        folder=folder,
        logger="wandb_offline",
        workers=0 if fast else None,
    )


# %% Look: a table here, a page to send to a colleague, a run of Weights & Biases
def show(report: TransferReport, folder: Path) -> None:
    files = report.save(folder)
    summary = log_to_wandb(
        report,
        project="lightning-taskinfo",
        group=group_name(report.name, folder),
        mode="offline",
        folder=folder / "logs",
    )
    wandb = os.path.relpath(Path(sys.executable).with_name("wandb"))
    print(report.to_terminal())
    print(f"\nReport:       {files['report.html']}\nOffline runs: {summary.parent}")
    print(f"Look at it:   {wandb} leet {summary}")


# %% All of it
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fast", action="store_true", help="smaller images and one epoch, to see that it runs"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/demo"),
        help="folder for everything that is written",
    )
    arguments = parser.parse_args(argv)
    show(run(arguments.folder, fast=arguments.fast), arguments.folder)


if __name__ == "__main__":
    main([] if "ipykernel" in sys.modules else None)  # a kernel's own arguments are not ours
