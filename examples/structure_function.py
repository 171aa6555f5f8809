"""How much is a nat in the weights worth? Digits with their labels, and with labels that say nothing.

A network pays a price β for each nat that its weights hold about the data. True labels are worth it early: a few
nats, one rule, much less loss. Random labels can only be stored one by one, so that the network stays a constant
classifier until information is almost free. The right-hand picture is the structure function of both tasks. Run it
with ``python examples/structure_function.py``, or cell by cell.
"""

# %%
import argparse
import os
from pathlib import Path

import wandb

from lightning_taskinfo import Training, structure_function
from lightning_taskinfo.tasks import (
    StructureFunction,
    network_for,
    plot_structure_functions,
    prepare_task,
)

os.environ.setdefault("WANDB_SILENT", "true")
TASKS = {"true labels": "digits", "random labels": "digits:random-labels"}


# %% One sweep over β, from high to low; a sweep that was interrupted continues in its folder
def trace(name: str, spec: str, folder: Path, *, fast: bool) -> StructureFunction:
    task = prepare_task(spec, max_samples=200 if fast else 1000)
    training = (
        Training(pretrain_steps=40, steps=40, draws=8)
        if fast
        else Training(pretrain_steps=600, steps=600)
    )
    betas = (10.0, 1.0, 0.1) if fast else tuple(10 ** (2 - j / 2) for j in range(12))
    return structure_function(
        network_for(task),
        task.data,
        betas,
        training=training,
        name=name,
        folder=folder / spec.replace(":", "_"),
    )


# %% All of it
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fast", action="store_true", help="fewer samples, prices and steps, to see that it runs"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/structure_function"),
        help="folder for everything written",
    )
    arguments = parser.parse_args()
    out = arguments.folder / ("fast" if arguments.fast else "full")
    curves = [trace(name, spec, out, fast=arguments.fast) for name, spec in TASKS.items()]
    for curve in curves:
        print(f"\n{curve.name}, {curve.samples} samples\n{curve}")
    path = arguments.folder / "structure_function.png"
    plot_structure_functions(curves)[0].savefig(path, dpi=150)
    with wandb.init(
        project="lightning-taskinfo",
        name="structure-function",
        dir=arguments.folder,
        mode="offline",
    ) as run:
        run.log({"structure functions": wandb.Image(str(path))})
        folder = Path(run.dir).parent
    print(f"\nFigure:       {path}\nOffline run:  {folder}")


if __name__ == "__main__":
    main()
