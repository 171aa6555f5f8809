"""``taskinfo complexity``, ``distance``, ``embed`` and ``phase-diagram``: questions about tasks."""

import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_taskinfo._files import make_folder, write_json
from lightning_taskinfo._progress import counted, shown
from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo._tables import text_table
from lightning_taskinfo.cli._own import (
    Data,
    Network,
    Tasks,
    draw,
    named_tasks,
    prepared,
    read_part,
    started,
)
from lightning_taskinfo.data import load_task
from lightning_taskinfo.plotting import check_picture
from lightning_taskinfo.tasks import (
    Task2Vec,
    embedding_distances,
    network_for,
    plot_phase_map,
    plot_structure_functions,
    plot_task_map,
    reference_network,
    structure_function,
    task_distance,
    transferability,
    trunk_of,
)
from lightning_taskinfo.tasks.deep_linear import Mode
from lightning_taskinfo.tasks.embedding import embedding_rows
from lightning_taskinfo.transfer.sampling import overrides

TWO = ("digits", "digits:random-labels")
COLUMNS = {  # of the table of embeddings, and their format
    "task": "",
    "classes": "",
    "norm": ".4g",
    "test_error": ".4f",
    "nearest_source": "",
    "distance": ".4f",
}
FIVE = ("digits", "digits:even-odd", "digits:small-large", "digits:inverted", "letters")


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
        tasks: What to measure: digits, letters, an npz file, several with
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
    seed = options["seed"]
    named = named_tasks(tasks, data, TWO)
    samples = prepared(named, max_samples=max_samples, size=size, seed=seed)
    curves = []
    for name, task in samples.items():
        network = network_for(task, width) if model is None else partial(started, model, checkpoint)
        inside = folder / re.sub("[:/]", "_", name)
        curve = structure_function(network, task.data, name=name, folder=inside, **options)
        curves.append(curve)
    numbers = [curve.to_dict() for curve in curves]
    files = _written(folder, "complexity", plot_structure_functions(curves), numbers)
    tables = [f"{curve.name}, {curve.samples} samples\n{curve}\n" for curve in curves]
    return "\n".join([*tables, files])


def _written(folder: Path, name: str, drawn: Sequence[Any], numbers: Any) -> str:
    """Write figure and numbers, and return where they are."""
    picture = folder / f"{name}.png"
    draw(picture, drawn)
    file = folder / f"{name}.json"
    write_json(file, numbers)
    return f"{picture}\n{file}"


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
        tasks: What to compare: digits, letters, an npz file, several with
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
    named = named_tasks(tasks, data, FIVE)
    samples = prepared(named, max_samples=max_samples, size=size)
    if model is None:
        trunk_fn = trunk_of(network_for(next(iter(samples.values())), width))
    else:
        trunk_fn = trunk_of(partial(started, model, checkpoint), head)
    matrix = task_distance(
        {name: task.data for name, task in samples.items()},
        beta,
        trunk_fn=trunk_fn,
        workers=workers,
        folder=folder / "trainings",
        **options,
    )
    files = _written(folder, "distance", matrix.plot(), matrix.to_dict())
    return f"{matrix}\n{files}"


def embed(
    tasks: Tasks | None = None,
    data: Data | None = None,
    model: Network | None = None,
    checkpoint: Path | None = None,
    folder: Path = Path("embeddings"),
    **options: Any,
) -> str:
    """Embed tasks by the Fisher information of a network, draw them on a map, and name the nearest source of each.

    Args:
        tasks: Names of embedded data (digits, letters), npz files, each alone or
            with a variant behind a
            colon: even-odd, small-large, inverted, random-labels, a choice of classes like
            only-0-1-7, or one class like one-3. Or data modules of your own, by name:
            ``{a: {class_path: my_package.Data, init_args: {…}}}``. Five tasks of digits and letters
            where neither this nor ``data`` is given.
        data: One more task: import path of your LightningDataModule, whose arguments follow,
            ``--data.batch_size 32``.
        model: The network: import path of your LightningModule or network, which returns scores; its
            arguments follow, ``--model.width 64``. A small network trained on digits and letters
            where not given.
        checkpoint: Its weights. Those kept in it are the defaults of the model's arguments.
        folder: Folder of the results: embeddings.json, a file task_<name>.json with the embedding of
            each task, and task_map.png.
        **options: Arguments of :class:`lightning_taskinfo.Task2Vec`.

    Returns:
        A table of the tasks with norm, test error and nearest source.

    Raises:
        ValueError: If an argument is outside its domain, or the network does not take the inputs of a
            task.
    """
    seed = options["seed"]
    loaded = {}
    for name, one in named_tasks(tasks, data, FIVE).items():
        loaded[name] = _both_parts(one, seed)  # refused before anything is trained or written
    network = reference_network(seed=seed) if model is None else started(model, checkpoint)
    embedder = Task2Vec(network, **options)
    with shown(True, "embed", len(loaded)) as tell:
        turns = counted(list(loaded), len(loaded), tell, "tasks")
        embeddings = [embedder.embed(name=name, **loaded[name]) for name in turns]
    rows = embedding_rows(embeddings)
    make_folder(folder)
    for embedding in embeddings:
        name = re.sub(r"[^A-Za-z0-9.+-]", "_", embedding.name)
        write_json(folder / f"task_{name}.json", embedding.to_dict())
    numbers = {
        "network": embedder.fingerprint,
        "labels": embedder.labels,
        "tasks": rows,
        "distances": embedding_distances(embeddings).tolist(),
    }
    write_json(folder / "embeddings.json", numbers)
    draw(folder / "task_map.png", plot_task_map(embeddings))
    cells = []
    for row in rows:
        shown_row = {"nearest_source": "(no other)", "distance": math.nan, **row}
        cells.append([format(shown_row[key], form) for key, form in COLUMNS.items()])
    columns = [key.replace("_", " ") for key in COLUMNS]
    return f"{text_table(columns, cells)}\n{folder}"


def _both_parts(data: Data, seed: int) -> dict[str, Any]:
    """Return training and test samples of a task."""
    if isinstance(data, str):
        return {"data": load_task(data, seed=seed)}
    test = read_part(data, "test") if overrides(data, "test_dataloader") else None
    return {"data": read_part(data, "train"), "test": test}


def phase_diagram(
    mode: Mode = "linear",
    sigma: float = 0.2,
    depth: int = 2,
    out: Path = Path("phase_diagram.png"),
    angles: int = 5,
    gammas: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 1.5, 2.0),
) -> str:
    """Draw when transfer hurts a deep linear network: a signed map of its gain over training from scratch.

    Args:
        mode: What is transferred: the features under a new last layer, or all layers.
        sigma: Standard deviation of the label noise.
        depth: Number of layers, where all are transferred.
        out: Where the figure is written; the suffix decides its format.
        angles: Number of angles between source and target in the table, evenly from 0 to 90 degrees.
        gammas: Numbers of target samples per input dimension in the table; the largest ends the map.

    Returns:
        A table of the gains over training from scratch.

    Raises:
        ValueError: If an argument is outside its domain.
    """
    check_counts(angles=angles)
    check_picture("out", out)
    theta = torch.linspace(0, torch.pi / 2, angles, dtype=torch.float64)
    gamma = torch.tensor(gammas, dtype=torch.float64)
    gains = transferability(mode, theta[:, None], gamma, sigma, depth=depth)
    drawn = plot_phase_map(mode, sigma, depth=depth, max_gamma=max(gammas))
    draw(out, drawn)
    rows = []
    for angle, row in zip(theta.rad2deg().tolist(), gains.tolist(), strict=True):
        for samples, gain in zip(gammas, row, strict=True):
            rows.append([f"{angle:.1f}", f"{samples:.3f}", f"{gain:.4f}"])
    return f"{text_table(['theta_deg', 'gamma', 'gain'], rows)}\n{out}"
