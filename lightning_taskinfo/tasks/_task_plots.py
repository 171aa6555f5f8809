"""Pictures of structure functions and distances between tasks.

Every function draws on a figure of its own unless it is given axes; pyplot is not involved.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

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
    loss, error = (
        [value / curve.samples for value in values] for values in (curve.loss, curve.loss_error)
    )
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
    from matplotlib.figure import Figure

    side = 1.6 + 0.9 * len(names)
    ax = Figure(figsize=(side + 0.8, side), layout="constrained").subplots() if ax is None else ax
    middle = 0.5 * (mean.min() + mean.max())
    image = ax.imshow(mean.numpy(), cmap="viridis_r")
    ax.figure.colorbar(image, ax=ax, label="distance (nats)", shrink=0.8)
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
    return ax.figure, ax  # type: ignore[return-value]
