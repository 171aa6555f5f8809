"""``taskinfo distance``."""

import json
from math import isnan
from pathlib import Path

from lightning_taskinfo._files import write_json
from lightning_taskinfo.tasks.distance import DistanceMatrix, task_distance
from lightning_taskinfo.tasks.specs import prepare_task, trunk_for
from lightning_taskinfo.tasks.training import Training
from lightning_taskinfo.tasks.union import Method

FIVE = ("digits", "digits:even-odd", "digits:small-large", "digits:inverted", "letters")


def distance(
    tasks: tuple[str, ...] = FIVE,
    folder: Path = Path("distance"),
    beta: float = 0.1,
    method: Method = "laplace",
    seeds: int = 3,
    max_samples: int = 1000,
    size: int = 8,
    width: int = 32,
    steps: int = 400,
    prior_std: float = 0.1,
    workers: int | None = None,
    data_dir: str | None = None,
) -> str:
    """Measure the distance from each task to each other: what a small network must learn in addition, in nats.

    Args:
        tasks: What to compare: digits, letters, an npz file or a folder of idx files, several with + in between; and
            behind colons even-odd, small-large, inverted, random-labels, one-<class> or only-<class>-<class>….
        folder: Folder for distance.json, distance.png and what an interrupted call continues from.
        beta: Price of a nat, beside the sum of the loss of the task that is known.
        method: laplace trains plain weights, with the closed form around them, variational noisy ones.
        seeds: Repetitions with other starts, batches and noise.
        max_samples: At most this many samples of each task.
        size: Height and width of the embedded digits and letters, 8 or 28.
        width: Neurons of each of the two hidden layers.
        steps: Optimizer steps without noise, and again with.
        prior_std: Standard deviation of the weights before training.
        workers: Processes; one per core where not given, 0 for this one alone.
        data_dir: Folder of further datasets; TASKINFO_DATA_DIR where not given.

    Returns:
        A table of distances with standard errors over seeds.

    Raises:
        ValueError: If an argument is outside its domain, or the folder holds another measurement.
    """
    for argument, value, least in (
        ("seeds", seeds, 1),
        ("steps", steps, 1),
        ("max_samples", max_samples, 8),
    ):
        if value < least:
            raise ValueError(f"`{argument}` must be at least {least}, got {value}.")
    loaded = {
        spec: prepare_task(spec, max_samples=max_samples, size=size, data_dir=data_dir)
        for spec in tasks
    }
    shapes = {tuple(task.inputs.shape[1:]) for task in loaded.values()}
    if len(shapes) != 1:
        raise ValueError(f"`tasks` must have images of one shape, got {sorted(shapes)}.")
    matrix = task_distance(
        {name: task.data for name, task in loaded.items()}, beta, method=method, prior_std=prior_std,
        trunk_fn=trunk_for(next(iter(loaded.values())), width), seeds=seeds, workers=workers,
        training=Training(pretrain_steps=steps, steps=steps), folder=folder / method,
    )  # fmt: skip
    matrix.plot()[0].savefig(folder / "distance.png", dpi=150)
    write_json(folder / "distance.json", json.loads(matrix.to_json()))
    return "\n".join([_text(matrix), str(folder / "distance.png"), str(folder / "distance.json")])


def _text(matrix: DistanceMatrix) -> str:
    """One line per pair: from, to, distance with its standard error (none of one seed), information in the new head."""
    wide = max(map(len, matrix.names))
    lines = [f"{'from':{wide}} {'to':{wide}}   distance     error  new head"]
    for source, target, *numbers in matrix.table()[1]:
        shown = [
            "-" if isnan(x) else f"{round(x, 2) + 0.0:.2f}" for x in map(float, numbers)
        ]  # no "-0.00"
        lines.append(f"{source:{wide}} {target:{wide}} " + " ".join(f"{x:>9}" for x in shown))
    if short := matrix.unfinished():
        lines.append(
            f"not to be trusted: {', '.join(short)} should be at distance 0 from itself; set more --steps"
        )
    return "\n".join(lines)
