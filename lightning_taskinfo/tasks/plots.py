"""Pictures of tasks: structure functions, distances and embeddings; and embeddings in Weights & Biases.

Every ``plot_`` function draws on a figure of its own unless it is given axes; pyplot is not involved.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_taskinfo._wandb import log_once
from lightning_taskinfo.plotting import figure_and_axes
from lightning_taskinfo.tasks.embedding import (
    ALPHA,
    TaskEmbedding,
    embedding_distances,
    nearest_source,
    task_map,
)
from lightning_taskinfo.tasks.structure import StructureFunction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_structure_functions(
    curves: Sequence[StructureFunction],
) -> tuple["Figure", tuple["Axes", "Axes"]]:
    r"""Draw the loss against :math:`\beta`, and against the information in the weights; one colour a task.

    On the left the loss of noisy weights per sample, the entropy of the labels dashed and :math:`\beta^*` dotted; on
    the right the points of the sweep with their lower hull, the structure function. Bars are one standard error.

    Args:
        curves: One or several structure functions.

    Returns:
        The figure and its two axes.

    Raises:
        ValueError: If there is no curve.
    """
    from matplotlib.figure import Figure

    if not curves:
        raise ValueError("`curves` must hold at least one structure function, got none.")
    fig = Figure(figsize=(10, 4), layout="constrained")
    left, right = fig.subplots(1, 2)
    for index, curve in enumerate(curves):
        _draw_curve(curve, f"C{index}", left, right)
    left.set(xscale="log", xlabel=r"$\beta$, price of a nat", ylabel=r"$E_Q[L_D]/N$ (nats)")
    left.invert_xaxis()
    right.set(
        xlabel=r"information in the weights, $\mathrm{KL}(Q\|P)$ (nats)",
        ylabel=r"$E_Q[L_D]/N$ (nats)",
    )
    right.set_xlim(left=0)
    for ax in (left, right):
        ax.set_ylim(bottom=0)
        ax.spines[["top", "right"]].set_visible(False)
    if any(curve.name for curve in curves):
        left.legend(frameon=False)
    return fig, (left, right)


def _draw_curve(curve: StructureFunction, color: str, left: "Axes", right: "Axes") -> None:
    loss = [value / curve.samples for value in curve.loss]
    error = [value / curve.samples for value in curve.loss_error]
    left.errorbar(curve.betas, loss, error, fmt=".-", color=color, label=curve.name or None)
    points = ([0.0, *curve.kl], [curve.prior_loss / curve.samples, *loss])
    right.errorbar(*points, [curve.prior_loss_error / curve.samples, *error], fmt=".", color=color)
    t, S = zip(*curve.hull(), strict=True)
    right.plot(t, [value / curve.samples for value in S], color=color, linewidth=1)
    if curve.label_entropy is not None:
        for ax in (left, right):
            ax.axhline(curve.label_entropy, color=color, linestyle="--", linewidth=0.7)
        if (critical := curve.critical_beta()) is not None:
            left.axvline(critical, color=color, linestyle=":", linewidth=1)


def plot_distances(
    names: Sequence[str],
    mean: Tensor,
    error: Tensor | None = None,
    *,
    title: str = "",
    ax: "Axes | None" = None,
) -> tuple["Figure", "Axes"]:
    """Draw a matrix of distances as colours with numbers: rows are what a network knows, columns what it learns.

    Args:
        names: Names of the ``K`` tasks.
        mean: Distances from row to column, shape ``[K, K]``.
        error: Their standard errors, shape ``[K, K]``; written below the numbers where finite.
        title: Title of the axes.
        ax: Draw here instead of in a new figure.

    Returns:
        The figure and its axes.
    """
    side = 1.6 + 0.9 * len(names)
    fig, ax = figure_and_axes(ax, size=(side + 0.8, side))
    middle = 0.5 * (mean.min() + mean.max())
    image = ax.imshow(mean.numpy(), cmap="viridis_r")
    fig.colorbar(image, ax=ax, label="distance (nats)", shrink=0.8)
    for row in range(len(names)):
        for column in range(len(names)):
            text = f"{round(mean[row, column].item())}"
            if error is not None and error[row, column].isfinite():
                text += f"\n±{error[row, column]:.0f}"
            color = "white" if mean[row, column] > middle else "black"
            ax.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    ax.set_xticks(range(len(names)), names, rotation=30, ha="right")
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="to: the task that is added", ylabel="from: the task that is known", title=title)
    return fig, ax


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
    fig, ax = figure_and_axes(ax, size=(6, 4))
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
    fig, ax = figure_and_axes(ax, size=(6, 4))
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
        color = colormaps["tab20"](i % 20)
        ax.scatter([x], [y], s=area, color=color, alpha=0.9, label=_shortened(embedding.name))
    legend = ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for handle in legend.legend_handles:
        handle.set_sizes([40])  # type: ignore[union-attr]


def _shortened(name: str, length: int = 30) -> str:
    """Return the end of a long name, as of a path, so that a legend leaves room for the picture."""
    return name if len(name) <= length else f"…{name[1 - length :]}"
