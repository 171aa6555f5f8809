"""``taskinfo embed``."""

import math
import re
from pathlib import Path
from typing import Any

from lightning_taskinfo._files import make_folder, write_json
from lightning_taskinfo._progress import counted, shown
from lightning_taskinfo._tables import text_table
from lightning_taskinfo.cli._own import Data, Network, has_part, read_part, started
from lightning_taskinfo.cli._tasks import Tasks, named_tasks
from lightning_taskinfo.data import load_task
from lightning_taskinfo.tasks import (
    Task2Vec,
    TaskEmbedding,
    embedding_distances,
    log_embeddings,
    plot_difficulty,
    plot_task_map,
    reference_network,
)
from lightning_taskinfo.tasks.embedding import ALPHA, embedding_rows

FIVE = ("digits", "digits:even-odd", "digits:small-large", "letters", "digits:inverted")


def embed(
    tasks: Tasks | None = None,
    data: Data | None = None,
    model: Network | None = None,
    checkpoint: Path | None = None,
    folder: Path = Path("embeddings"),
    alpha: float = ALPHA,
    project: str | None = None,
    **options: Any,
) -> str:
    """Embed tasks by the Fisher information of a network, draw them on a map, and name the nearest source of each.

    Args:
        tasks: Names of embedded data (digits, letters), npz files or idx folders, each alone or
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
        folder: Folder of the results: embeddings.json, an npz file per task, task_map.png and
            difficulty.png.
        alpha: How much the complexity of a source speaks for it; 0 for the symmetric distance.
        project: Also log figures and tables to this project of Weights & Biases.
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
        loaded[name] = _read(one, seed)  # refused before anything is trained or written
    network = reference_network(seed=seed) if model is None else started(model, checkpoint)
    embedder = Task2Vec(network, **options)
    with shown(True, "embed", len(loaded)) as tell:
        turns = counted(list(loaded), len(loaded), tell, "tasks")
        embeddings = [embedder.embed(name=name, **loaded[name]) for name in turns]
    rows = embedding_rows(embeddings, alpha=alpha)
    make_folder(folder)
    for embedding in embeddings:
        name = re.sub(r"[^A-Za-z0-9.+-]", "_", embedding.name)
        embedding.save(folder / f"{name}.npz")
    write_json(folder / "embeddings.json", _as_json(embeddings, rows, alpha))
    figure, _ = plot_task_map(embeddings)
    figure.savefig(folder / "task_map.png", dpi=150)
    figure, _ = plot_difficulty(embeddings)
    figure.savefig(folder / "difficulty.png", dpi=150)
    if project:
        import wandb

        config = {"tasks": list(loaded), "alpha": alpha}
        with wandb.init(project=project, config=config) as run:
            log_embeddings(run, embeddings, alpha=alpha)
    return f"{_table(rows)}\n{folder}"


def _read(data: Data, seed: int) -> dict[str, Any]:
    """Return training and test samples of a task."""
    if isinstance(data, str):
        return {"data": load_task(data, seed=seed)}
    test = read_part(data, "test") if has_part(data, "test") else None
    return {"data": read_part(data, "train"), "test": test}


def _as_json(
    embeddings: list[TaskEmbedding], rows: list[dict[str, Any]], alpha: float
) -> dict[str, Any]:
    tasks = []
    for row, e in zip(rows, embeddings, strict=True):
        vector = {
            "vector": e.vector.tolist(),
            "layers": dict(zip(e.layers, e.sizes, strict=True)),
            "layer_norms": e.layer_norms,
        }
        tasks.append(row | vector)
    return {
        "probe": embeddings[0].network,
        "labels": embeddings[0].labels,
        "alpha": alpha,
        "tasks": tasks,
        "symmetric_distances": embedding_distances(embeddings).tolist(),
        "distances_from_row_to_column": embedding_distances(embeddings, alpha=alpha).tolist(),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ["task", "classes", "norm", "test error", "nearest source", "distance"]
    cells = []
    for row in rows:
        line = [
            row["task"],
            str(row["classes"]),
            f"{row['norm']:.4g}",
            f"{row['test_error']:.4f}",
            row.get("nearest_source", "(no other)"),
            f"{row.get('distance', math.nan):.4f}",
        ]
        cells.append(line)
    return text_table(columns, cells)
