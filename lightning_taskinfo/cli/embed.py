"""``taskinfo embed``."""

import re
from pathlib import Path
from typing import Any, Literal

from lightning_taskinfo._files import claim_folder, write_json
from lightning_taskinfo._progress import counted, shown
from lightning_taskinfo.data import ArrayData, load_task
from lightning_taskinfo.tasks.embedding import ALPHA, TaskEmbedding, embedding_distances
from lightning_taskinfo.tasks.probe import default_probe
from lightning_taskinfo.tasks.task2vec import Task2Vec

TASKS = ("digits", "digits:even-odd", "digits:small-large", "letters", "digits:inverted")


def embed(
    tasks: tuple[str, ...] = TASKS,
    folder: Path = Path("embeddings"),
    alpha: float = ALPHA,
    labels: Literal["exact", "sampled"] = "exact",
    max_samples: int = 1000,
    weight_decay: float = 1e-3,
    size: int = 28,
    seed: int = 0,
    data_dir: Path | None = None,
    probe_epochs: int = 4,
    project: str | None = None,
) -> str:
    """Embed tasks by the Fisher information of a small probe, draw them on a map, and name the nearest source of each.

    Embeddings that the folder already has are read, so an interrupted command continues.

    Args:
        tasks: Names of embedded data (digits, letters), npz files or idx folders, each alone or with a variant behind a
            colon: even-odd, small-large, inverted, random-labels, a choice of classes like only-0-1-7, or one class
            like one-3.
        folder: Folder of the results: embeddings.json, an npz file per task, task_map.png and difficulty.png.
        alpha: How much the complexity of a source speaks for it; 0 for the symmetric distance.
        labels: Fisher information exactly over the model's labels, or with labels sampled from it.
        max_samples: At most this many samples of a task go into its Fisher information.
        weight_decay: Penalty of the heads that are fitted to the probe's features.
        size: Height and width of the embedded digits and letters, 28 or 8.
        seed: Seed of everything that is drawn.
        data_dir: Folder of npz files and idx folders; TASKINFO_DATA_DIR where not given.
        probe_epochs: Epochs that the probe is trained for, once; it is cached.
        project: Also log figures and tables to this project of Weights & Biases.

    Returns:
        A table of the tasks with norm, test error and nearest source.

    Raises:
        ValueError: If an argument is outside its domain, or the folder holds results of another configuration.
    """
    from lightning_taskinfo.tasks.plots import (
        embedding_rows,
        log_embeddings,
        plot_difficulty,
        plot_task_map,
    )

    if not tasks or len(set(tasks)) < len(tasks):
        raise ValueError(f"`tasks` must name at least one task, each once, got {list(tasks)}.")
    source: dict[str, Any] = {"size": size, "seed": seed, "data_dir": data_dir}
    data = {task: load_task(task, **source) for task in tasks}
    probe = default_probe(epochs=probe_epochs, seed=seed)
    embedder = Task2Vec(
        probe,
        head="head",
        labels=labels,
        max_samples=max_samples,
        weight_decay=weight_decay,
        seed=seed,
    )
    configuration = {"probe": embedder.fingerprint, "labels": labels, "max_samples": max_samples}
    configuration |= {
        "weight_decay": weight_decay,
        "size": size,
        "seed": seed,
        "data_dir": str(data_dir or ""),
    }
    claim_folder(
        folder, configuration, results=["embeddings.json", *(_file_name(task) for task in tasks)]
    )
    with shown(True, "embed", len(tasks)) as tell:
        turns = counted(tasks, len(tasks), tell, "tasks")
        embeddings = [_embedded(embedder, task, folder, data[task]) for task in turns]
    rows = embedding_rows(embeddings, alpha=alpha)
    write_json(folder / "embeddings.json", _as_json(embeddings, rows, alpha, configuration))
    plot_task_map(embeddings)[0].savefig(folder / "task_map.png", dpi=150)
    plot_difficulty(embeddings)[0].savefig(folder / "difficulty.png", dpi=150)
    if project:
        import wandb

        with wandb.init(
            project=project, config=configuration | {"tasks": list(tasks), "alpha": alpha}
        ) as run:
            log_embeddings(run, embeddings, alpha=alpha)
    return f"{_table(rows)}\n{folder}"


def _embedded(embedder: Task2Vec, task: str, folder: Path, data: ArrayData) -> TaskEmbedding:
    """Read the embedding of a task, or make and keep it."""
    path = folder / _file_name(task)
    if path.exists() and (kept := TaskEmbedding.load(path)).name == task:
        return kept
    embedding = embedder.embed(data, name=task)
    embedding.save(path)
    return embedding


def _file_name(task: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9.+-]', '_', task)}.npz"


def _as_json(
    embeddings: list[TaskEmbedding],
    rows: list[dict[str, Any]],
    alpha: float,
    configuration: dict[str, Any],
) -> dict[str, Any]:
    vectors = [
        {
            "vector": e.vector.tolist(),
            "layers": dict(zip(e.layers, e.sizes, strict=True)),
            "layer_norms": e.layer_norms,
        }
        for e in embeddings
    ]
    return {
        "configuration": configuration,
        "alpha": alpha,
        "tasks": [row | more for row, more in zip(rows, vectors, strict=True)],
        "symmetric_distances": embedding_distances(embeddings).tolist(),
        "distances_from_row_to_column": embedding_distances(embeddings, alpha=alpha).tolist(),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    width = max(len("task"), *(len(row["task"]) for row in rows))
    lines = [f"{'task':{width}} classes       norm  test_error  distance  nearest_source"]
    for row in rows:
        nearest = (
            f"{row['distance']:9.4f}  {row['nearest_source']}"
            if "distance" in row
            else f"{'':9}  (no other)"
        )
        numbers = f"{row['classes']:7d} {row['norm']:10.4g} {row['test_error']:11.4f} {nearest}"
        lines.append(f"{row['task']:{width}} {numbers}")
    return "\n".join(lines)
