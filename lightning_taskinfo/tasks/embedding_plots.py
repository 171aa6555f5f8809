"""Pictures and tables of embedded tasks, and both in Weights & Biases.

Every ``plot_`` function returns ``(fig, ax)`` and draws on a figure of its own unless it is given axes; pyplot is not
involved.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_taskinfo._wandb import log_once
from lightning_taskinfo.tasks.embedding import (
    ALPHA,
    TaskEmbedding,
    embedding_distances,
    nearest_source,
    task_map,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_task_map(
    embeddings: Sequence[TaskEmbedding], *, ax: "Axes | None" = None
) -> "tuple[Figure, Axes]":
    """Draw tasks as points of a plane whose distances come near their symmetric distances.

    The area of a point goes with the logarithm of the embedding's norm; the title says how much of the distances'
    spread the plane shows.

    Args:
        embeddings: Of one probe.
        ax: Axes to draw on; a new figure if not given.

    Returns:
        The figure and its axes.
    """
    fig, ax = _axes(ax)
    points, share = task_map(embeddings)
    logs = [
        math.log(embedding.norm) if embedding.norm > 0 else -math.inf for embedding in embeddings
    ]
    low, high = min(logs), max(logs)
    areas = [
        30 + 150 * ((log - low) / (high - low) if -math.inf < low < high else 0.5) for log in logs
    ]
    _scatter(ax, embeddings, points.tolist(), areas)
    ax.set_title(f"tasks by their Fisher information ({share:.0%} of the spread)", fontsize=10)
    ax.set_aspect("equal", adjustable="datalim")
    ax.margins(0.2)
    return fig, ax


def plot_difficulty(
    embeddings: Sequence[TaskEmbedding], *, ax: "Axes | None" = None
) -> "tuple[Figure, Axes]":
    """Draw the test error of each task's fitted head against the norm of its embedding.

    Args:
        embeddings: Those without a test error are left out.
        ax: Axes to draw on; a new figure if not given.

    Returns:
        The figure and its axes.

    Raises:
        ValueError: If no embedding has a test error.
    """
    tested = [embedding for embedding in embeddings if not math.isnan(embedding.test_error)]
    if not tested:
        raise ValueError("`embeddings` must have a test error, got none that has.")
    fig, ax = _axes(ax)
    _scatter(
        ax,
        tested,
        [(embedding.norm, 100 * embedding.test_error) for embedding in tested],
        [40.0] * len(tested),
    )
    ax.set(xscale="log", xlabel="norm of the embedding", ylabel="test error of the head (%)")
    ax.margins(0.15)
    ax.spines[["top", "right"]].set_visible(False)
    return fig, ax


def embedding_rows(
    embeddings: Sequence[TaskEmbedding], *, alpha: float = ALPHA
) -> list[dict[str, Any]]:
    """Return one row per task: size, norm, test error, place on the map, and the nearest source among the others.

    Args:
        embeddings: Of one probe.
        alpha: How much the complexity of a source speaks for it, see
            :func:`~lightning_taskinfo.tasks.embedding.nearest_source`.
    """
    rows = []
    for embedding, (x, y) in zip(embeddings, task_map(embeddings).points.tolist(), strict=True):
        row: dict[str, Any] = {
            "task": embedding.name,
            "classes": embedding.num_classes,
            "samples": embedding.samples,
        }
        row |= {"norm": embedding.norm, "test_error": embedding.test_error, "x": x, "y": y}
        if len(embeddings) > 1:
            best = nearest_source(embedding, embeddings, alpha=alpha)[0]
            row |= {"nearest_source": best.source, "distance": best.distance}
        rows.append(row)
    return rows


def log_embeddings(
    run: Any, embeddings: Sequence[TaskEmbedding], *, alpha: float = ALPHA, key: str = "task2vec"
) -> None:
    """Log figures as images, rows and distances as tables, and norms and errors as scalars to a run of W&B.

    Args:
        run: What ``wandb.init()`` returns, or the ``experiment`` of Lightning's ``WandbLogger``.
        embeddings: Of one probe.
        alpha: How much the complexity of a source speaks for it.
        key: What stands before the names, behind ``taskinfo/``.

    Example::

        with wandb.init(project="tasks") as run:
            log_embeddings(run, [Task2Vec().embed(load_task(name), name=name) for name in ("digits", "letters")])
    """
    rows = embedding_rows(embeddings, alpha=alpha)
    names = [embedding.name for embedding in embeddings]
    known = [row for row in rows if not math.isnan(row["test_error"])]
    distances = embedding_distances(embeddings, alpha=alpha).tolist()
    figures = {"map": plot_task_map(embeddings)[0]}
    if known:
        figures["difficulty"] = plot_difficulty(embeddings)[0]
    log_once(
        run,
        key,
        scalars={
            **{f"norm/{row['task']}": row["norm"] for row in rows},
            **{f"test_error/{row['task']}": row["test_error"] for row in known},
        },
        figures=figures,
        tables={
            "tasks": ([*rows[0]], [[*row.values()] for row in rows]),
            "distances": (
                ["from", *names],
                [[name, *row] for name, row in zip(names, distances, strict=True)],
            ),
        },
    )


def _scatter(
    ax: "Axes",
    embeddings: Sequence[TaskEmbedding],
    places: Sequence[Sequence[float]],
    areas: Sequence[float],
) -> None:
    """Draw a point per task, named in the legend: names at the points would overlap for similar tasks."""
    from matplotlib import colormaps

    for i, (embedding, (x, y), area) in enumerate(zip(embeddings, places, areas, strict=True)):
        ax.scatter(
            [x], [y], s=area, color=colormaps["tab20"](i % 20), alpha=0.9, label=embedding.name
        )
    legend = ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for handle in legend.legend_handles:
        handle.set_sizes([40])  # type: ignore[union-attr]


def _axes(ax: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    if ax is not None:
        return ax.figure, ax
    fig = Figure(figsize=(6, 4), layout="constrained")
    return fig, fig.subplots()
