"""The structure function of a dataset: what is read from the points of a sweep, and their picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_taskinfo._tables import Cells, Tabled
from lightning_taskinfo._wandb import log_once

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Estimate(NamedTuple):
    """A number and its Monte-Carlo standard error.

    Attributes:
        value: The number, in nats unless said otherwise.
        standard_error: Of the draws it is a mean of.
    """

    value: float
    standard_error: float


@dataclass(frozen=True)
class StructureFunction(Tabled):
    r"""Points :math:`(\mathrm{KL}(Q\|P),\ E_Q[L_D])` of the minimisers of :math:`C_\beta`, one for each :math:`\beta`.

    .. math::
        S_D(t) = \min_{\mathrm{KL}(Q\|P) \le t} E_Q[L_D], \qquad
        C_\beta = \min_t\, S_D(t) + \beta\,t, \qquad \frac{dS_D}{dt} = -\beta

    Information and losses are in nats, losses are **sums** over the dataset, and their errors are
    Monte-Carlo standard errors; the divergence has none, being in closed form. A training that
    stopped short of a minimum gives a point above the true curve, never below.

    Attributes:
        betas: Weights of the divergence beside the sum of the loss, falling, ``B`` of them.
        kl: :math:`\mathrm{KL}(Q\|P)`.
        loss: :math:`E_Q[L_D]`.
        loss_error: Its standard error; also that of :math:`C_\beta` at the sweep's own
            :math:`\beta`.
        prior_loss: :math:`E_P[L_D]`, what weights without information lose: the curve's point at
            :math:`t = 0`.
        prior_loss_error: Its standard error.
        samples: Number of samples ``N``.
        label_entropy: Entropy of the labels' frequencies per sample, the loss of the best constant
            classifier; ``None`` where labels are not classes.
        name: What to call the task.
    """

    betas: tuple[float, ...]
    kl: tuple[float, ...]
    loss: tuple[float, ...]
    loss_error: tuple[float, ...]
    prior_loss: float
    prior_loss_error: float
    samples: int
    label_entropy: float | None
    name: str = ""

    @property
    def objective(self) -> tuple[float, ...]:
        r"""The sweep's own :math:`E_Q[L_D] + \beta\,\mathrm{KL}` at each :math:`\beta`."""
        rows = zip(self.betas, self.kl, self.loss, strict=True)
        return tuple(e + beta * t for beta, t, e in rows)

    def complexity(self, beta: float) -> Estimate:
        r"""Return the information complexity :math:`C_\beta`: the least :math:`E_Q[L_D] + \beta\,\mathrm{KL}` found.

        Args:
            beta: Weight of the divergence beside the **sum** of the loss; need not be one of the
                sweep's.

        Returns:
            The least value, an upper bound on the true minimum, with the Monte-Carlo error of that
            point's loss.

        Raises:
            ValueError: If ``beta`` is negative.
        """
        if not beta >= 0:
            raise ValueError(f"`beta` must not be negative, got {beta}.")
        found = []
        for t, e, error in self._points():
            found.append(Estimate(e + beta * t, error))
        return min(found)

    def hull(self) -> tuple[tuple[float, float], ...]:
        """Return the corners ``(t, S)`` of the lower-left convex hull of all points, the prior's among them."""
        corners: list[tuple[float, float]] = []
        for t, e, _ in sorted(self._points()):
            corner = (t, e)
            if corners and e >= corners[-1][1]:
                continue
            while len(corners) > 1:
                before = _slope(corners[-2], corners[-1])
                if not before >= _slope(corners[-1], corner):
                    break
                corners.pop()
            corners.append(corner)
        return tuple(corners)

    def slopes(self) -> tuple[Estimate, ...]:
        r"""Return minus the slope between neighbours of the sweep; a minimiser has it between two :math:`\beta`."""
        slopes = []
        _, *swept = self._points()
        for (t, e, a), (u, f, b) in pairwise(swept):
            length = u - t or math.nan
            error = math.hypot(a, b) / abs(length)
            slope = (e - f) / length
            slopes.append(Estimate(slope, error))
        return tuple(slopes)

    def unfinished(self) -> tuple[float, ...]:
        r"""Return the :math:`\beta` whose training provably stopped short of the minimum.

        That is where another point, or the prior's, has an :math:`E_Q[L_D] + \beta\,\mathrm{KL}`
        that is lower by more than three standard errors. Where none has, the training may still
        have stopped short.
        """
        found = []
        for beta, own, error in zip(self.betas, self.objective, self.loss_error, strict=True):
            best = self.complexity(beta)
            together = math.hypot(error, best.standard_error)
            if own - best.value > 3 * together:
                found.append(beta)
        return tuple(found)

    def critical_beta(self, margin: float = 0.05) -> float | None:
        r"""Return :math:`\beta^*`, below which the minimiser is no longer a constant classifier.

        The largest :math:`\beta` at which :math:`E_Q[L_D]/N` is ``margin`` below the entropy of the
        labels, between two points of the sweep by linear interpolation over :math:`\log\beta`.
        Compare tasks at equal ``N`` only.

        Args:
            margin: Share of the label entropy that a classifier must gain to count as not constant.

        Returns:
            The critical value; ``None`` where the sweep does not enclose it.

        Raises:
            ValueError: If the labels are not classes, or ``margin`` is not between 0 and 1.
        """
        if self.label_entropy is None:
            raise ValueError("`critical_beta` must have classes as labels, got a task without.")
        if not 0 < margin < 1:
            raise ValueError(f"`margin` must be between 0 and 1, got {margin}.")
        threshold = (1 - margin) * self.label_entropy * self.samples
        rows = list(zip(self.betas, self.loss, strict=True))
        for (above, high), (below, low) in pairwise(rows):
            if low < threshold <= high:
                share = (high - threshold) / (high - low)
                return float(above ** (1 - share) * below**share)
        return None

    def table(self) -> tuple[list[str], list[list[float]]]:
        """Return column names and one row for each β."""
        columns = {
            "beta": self.betas,
            "kl": self.kl,
            "loss": self.loss,
            "loss_error": self.loss_error,
            "objective": self.objective,
            "mean_loss": tuple(e / self.samples for e in self.loss),
        }
        rows = zip(*columns.values(), strict=True)
        return list(columns), [list(row) for row in rows]

    def reading(self) -> str:
        """Return one sentence on what the sweep found."""
        task = self.name or "the task"
        code = self.complexity(1.0).value
        length = f"{code:,.0f} nats"
        if self.label_entropy is not None:
            length += f", the labels alone {self.samples * self.label_entropy:,.0f}"
        critical = self._critical_beta()
        if critical is None:
            return f"The shortest code found for the labels of {task} has {length}."
        return (
            f"The network learns something about {task} while a nat costs less than {critical:.3g} nats of loss; "
            f"the shortest code found for the labels has {length}."
        )

    def _cells(self) -> Cells:
        cells = []
        _, rows = self.table()
        for beta, kl, loss, error, _, mean in rows:
            both = f"{loss:,.1f} ± {error:,.1f}"
            cells.append([f"{beta:.3g}", f"{kl:,.1f}", both, f"{mean:.3f}"])
        return ["β", "information, nats", "loss, nats", "loss per sample"], cells

    def _remarks(self) -> list[str]:
        betas = ", ".join(f"{beta:.4g}" for beta in self.unfinished())
        if not betas:
            return []
        return [
            f"Not to be trusted: training stopped short of the minimum at β {betas}; set more `training.steps`."
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        values: dict[str, Any] = dict(vars(self))
        values["objective"] = self.objective
        values["hull"] = self.hull()
        values["critical_beta"] = self._critical_beta()
        return values

    def plot(self) -> tuple["Figure", tuple["Axes", "Axes"]]:
        """Draw loss against β and the structure function, see ``plot_structure_functions``."""
        return plot_structure_functions([self])

    def log(self, run: Any, *, key: str = "structure_function") -> None:
        """Log figure (as an image), table and scalars to a W&B run.

        Args:
            run: What ``wandb.init()`` returned, or a WandbLogger's ``experiment``.
            key: What stands before the names, behind ``taskinfo/``.
        """
        scalars = {"prior_loss": self.prior_loss, "complexity": self.complexity(1.0).value}
        critical = self._critical_beta()
        if critical is not None:
            scalars["critical_beta"] = critical
        figures = {"figure": self.plot()[0]}
        tables = {"table": self.table()}
        log_once(run, key, scalars=scalars, figures=figures, tables=tables)

    def _critical_beta(self) -> float | None:
        """The critical value; ``None`` also where labels are not classes."""
        return None if self.label_entropy is None else self.critical_beta()

    def _points(self) -> list[tuple[float, float, float]]:
        swept = zip(self.kl, self.loss, self.loss_error, strict=True)
        return [(0.0, self.prior_loss, self.prior_loss_error), *swept]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    height = b[1] - a[1]
    length = b[0] - a[0]
    return height / length


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
    def per_sample(values: Sequence[float]) -> list[float]:
        return [value / curve.samples for value in values]

    loss = per_sample(curve.loss)
    error = per_sample(curve.loss_error)
    left.errorbar(curve.betas, loss, error, fmt=".-", color=color, label=curve.name or None)
    kl, losses, errors = zip(*curve._points(), strict=True)
    loss = per_sample(losses)
    error = per_sample(errors)
    right.errorbar(kl, loss, error, fmt=".", color=color)
    t, S = zip(*curve.hull(), strict=True)
    right.plot(t, per_sample(S), color=color, linewidth=1)
    if curve.label_entropy is not None:
        for ax in (left, right):
            ax.axhline(curve.label_entropy, color=color, linestyle="--", linewidth=0.7)
    critical = curve._critical_beta()
    if critical is not None:
        left.axvline(critical, color=color, linestyle=":", linewidth=1)
