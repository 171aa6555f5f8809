"""How far is it from one task to another? Digits, what can be asked of them, and letters.

The distance from a task to another is what the weights of a network that knows the first must learn to know both, in
nats. It is not symmetric: who can tell all digits apart has little to learn about even and odd, but not the other way
round. Run it with ``python examples/task_distance.py``, or cell by cell.
"""

# %%
import argparse
import os
from pathlib import Path

import wandb

from lightning_taskinfo import Training, task_distance
from lightning_taskinfo.tasks import DistanceMatrix, network_for, prepare_task, trunk_of

os.environ.setdefault("WANDB_SILENT", "true")
TASKS = {
    "all digits": "digits",
    "even or odd": "digits:even-odd",
    "small or large": "digits:small-large",
    "inverted digits": "digits:inverted",
    "letters": "letters",
}


# %% Every ordered pair, by plain training and a closed form; finished trainings are kept in the folder
def measure(folder: Path, *, fast: bool) -> DistanceMatrix:
    tasks = {
        name: prepare_task(spec, max_samples=60 if fast else 1000) for name, spec in TASKS.items()
    }
    return task_distance(
        {name: task.data for name, task in tasks.items()},
        0.1,
        trunk_fn=trunk_of(network_for(tasks["all digits"])),
        training=Training(pretrain_steps=8 if fast else 400),
        seeds=range(1 if fast else 3),
        workers=0 if fast else None,
        folder=folder,
    )


# %% All of it
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fast", action="store_true", help="fewer samples, steps and seeds, to see that it runs"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/task_distance"),
        help="folder for everything written",
    )
    arguments = parser.parse_args()
    matrix = measure(arguments.folder / ("fast" if arguments.fast else "full"), fast=arguments.fast)
    print(matrix)
    path = arguments.folder / "task_distance.png"
    matrix.plot()[0].savefig(path, dpi=150)
    with wandb.init(
        project="lightning-taskinfo", name="task-distance", dir=arguments.folder, mode="offline"
    ) as run:
        run.log({"distances": wandb.Image(str(path))})
        folder = Path(run.dir).parent
    print(f"\nFigure:       {path}\nOffline run:  {folder}")


if __name__ == "__main__":
    main()
