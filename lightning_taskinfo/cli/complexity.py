"""``taskinfo complexity``."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from lightning_taskinfo._files import write_json
from lightning_taskinfo.cli._own import Data, Network, started
from lightning_taskinfo.cli._tasks import Tasks, labelled, named_tasks
from lightning_taskinfo.tasks import network_for, structure_function

TWO = ("digits", "digits:random-labels")


def complexity(
    tasks: Tasks | None = None,
    data: Data | None = None,
    model: Network | None = None,
    checkpoint: Path | None = None,
    folder: Path = Path("complexity"),
    max_samples: int = 1000,
    size: int = 8,
    width: int = 32,
    **options: Any,
) -> str:
    """Trace the structure function of tasks: how much loss a nat in the weights of a network buys.

    Args:
        tasks: What to measure: digits, letters, an npz file or a folder of idx files, several with
            + in between; and behind colons even-odd, small-large, inverted, random-labels,
            one-<class> or only-<class>-<class>…. Or data modules of your own, by name:
            ``{a: {class_path: my_package.Data, init_args: {…}}}``. Digits with true and with random
            labels where neither this nor ``data`` is given.
        data: One more task: import path of your LightningDataModule, whose arguments follow,
            ``--data.batch_size 32``.
        model: Import path of your LightningModule or network, which returns scores; its arguments
            follow, ``--model.width 64``. A small network with two hidden layers where not given.
        checkpoint: Weights that the network starts from, and that the prior is centred at.
        folder: Folder for complexity.json, complexity.png and what an interrupted call continues
            from.
        max_samples: At most this many samples of each task; complexities are comparable at equal
            numbers only.
        size: Height and width of the embedded digits and letters, 8 or 28.
        width: Neurons of each hidden layer, where the network is not your own.
        **options: Arguments of :func:`lightning_taskinfo.structure_function`.

    Returns:
        A table: price, information in the weights and loss for each task, and the critical prices.

    Raises:
        ValueError: If an argument is outside its domain, or the folder holds another measurement.
    """
    from lightning_taskinfo.tasks import plot_structure_functions

    seed = options["seed"]
    loaded = []
    for name, one in named_tasks(tasks, data, TWO).items():
        task = labelled(name, one, max_samples=max_samples, size=size, seed=seed)
        loaded.append(task)
    curves = []
    for task in loaded:
        network = network_for(task, width) if model is None else partial(started, model, checkpoint)
        inside = folder / re.sub("[:/]", "_", task.name)
        curve = structure_function(network, task.data, name=task.name, folder=inside, **options)
        curves.append(curve)
    figure, _ = plot_structure_functions(curves)
    picture = folder / "complexity.png"
    figure.savefig(picture, dpi=150)
    numbers = folder / "complexity.json"
    write_json(numbers, [json.loads(curve.to_json()) for curve in curves])
    shown = [f"{curve.name}, {curve.samples} samples\n{curve}\n" for curve in curves]
    return "\n".join([*shown, str(picture), str(numbers)])
