"""``taskinfo distance``."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from lightning_taskinfo._files import write_json
from lightning_taskinfo.cli._own import Data, Network, started
from lightning_taskinfo.cli._tasks import Tasks, labelled, named_tasks
from lightning_taskinfo.tasks import task_distance, trunk_for, trunk_of

FIVE = ("digits", "digits:even-odd", "digits:small-large", "digits:inverted", "letters")


def distance(
    tasks: Tasks | None = None,
    data: Data | None = None,
    model: Network | None = None,
    checkpoint: Path | None = None,
    head: str | None = None,
    folder: Path = Path("distance"),
    beta: float = 0.1,
    max_samples: int = 1000,
    size: int = 8,
    width: int = 32,
    workers: int | None = None,
    **options: Any,
) -> str:
    """Measure the distance from each task to each other: what a network must learn in addition, in nats.

    Args:
        tasks: What to compare: digits, letters, an npz file or a folder of idx files, several with
            + in between; and behind colons even-odd, small-large, inverted, random-labels,
            one-<class> or only-<class>-<class>…. Or data modules of your own, by name:
            ``{a: {class_path: my_package.Data, init_args: {…}}}``. Five tasks of digits and letters
            where neither this nor ``data`` is given.
        data: One more task: import path of your LightningDataModule, whose arguments follow,
            ``--data.batch_size 32``.
        model: Import path of your LightningModule or network; its arguments follow,
            ``--model.width 64``. All tasks share it but for its head. A small network with two
            hidden layers where not given.
        checkpoint: Weights that the network starts from, and that the prior is centred at.
        head: Name of the layer of your network that gives way to each task's own head; the last
            ``nn.Linear`` where not given.
        folder: Folder for distance.json, distance.png and what an interrupted call continues from.
        beta: Price of a nat, beside the sum of the loss of the task that is known.
        max_samples: At most this many samples of each task.
        size: Height and width of the embedded digits and letters, 8 or 28.
        width: Neurons of each hidden layer, where the network is not your own.
        workers: Processes; one per core where not given, 0 for this one alone.
        **options: Arguments of :func:`lightning_taskinfo.task_distance`.

    Returns:
        A table of distances with standard errors over seeds.

    Raises:
        ValueError: If an argument is outside its domain, or the folder holds another measurement.
    """
    loaded = {}
    for name, one in named_tasks(tasks, data, FIVE).items():
        loaded[name] = labelled(name, one, max_samples=max_samples, size=size)
    shapes = {tuple(task.inputs.shape[1:]) for task in loaded.values()}
    if len(shapes) != 1:
        raise ValueError(f"`tasks` must have inputs of one shape, got {sorted(shapes)}.")
    if model is None:
        trunk_fn = trunk_for(next(iter(loaded.values())), width)
    else:
        trunk_fn = trunk_of(partial(started, model, checkpoint), head)
    place = folder / options["method"]
    matrix = task_distance(
        {name: task.data for name, task in loaded.items()},
        beta,
        trunk_fn=trunk_fn,
        workers=workers,
        folder=place,
        **options,
    )
    matrix.plot()[0].savefig(folder / "distance.png", dpi=150)
    write_json(folder / "distance.json", json.loads(matrix.to_json()))
    return f"{matrix}\n{folder / 'distance.png'}\n{folder / 'distance.json'}"
