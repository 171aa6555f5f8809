r"""What a sweep over :math:`\beta` found: the least loss that so many nats in the weights can buy."""

import json
import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_taskinfo._tables import html_table, text_table
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
class StructureFunction:
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
        return tuple(
            e + beta * t for beta, t, e in zip(self.betas, self.kl, self.loss, strict=True)
        )

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
        return min(Estimate(e + beta * t, error) for t, e, error in self._points())

    def hull(self) -> tuple[tuple[float, float], ...]:
        """Return the corners ``(t, S)`` of the lower-left convex hull of all points, the prior's among them."""
        corners: list[tuple[float, float]] = []
        for t, e, _ in sorted(self._points()):
            if corners and e >= corners[-1][1]:
                continue
            while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(
                corners[-1], (t, e)
            ):
                corners.pop()
            corners.append((t, e))
        return tuple(corners)

    def slopes(self) -> tuple[Estimate, ...]:
        r"""Return minus the slope between neighbours of the sweep; a minimiser has it between two :math:`\beta`."""
        rows = list(zip(self.kl, self.loss, self.loss_error, strict=True))
        return tuple(
            Estimate((e - f) / (u - t), math.hypot(a, b) / abs(u - t))
            if u != t
            else Estimate(math.nan, math.nan)
            for (t, e, a), (u, f, b) in pairwise(rows)
        )

    def unfinished(self) -> tuple[float, ...]:
        r"""Return the :math:`\beta` whose training provably stopped short of the minimum.

        That is where another point, or the prior's, has an :math:`E_Q[L_D] + \beta\,\mathrm{KL}`
        that is lower by more than three standard errors. Where none has, the training may still
        have stopped short.
        """
        found = []
        for beta, own, error in zip(self.betas, self.objective, self.loss_error, strict=True):
            best = self.complexity(beta)
            if own - best.value > 3 * math.hypot(error, best.standard_error):
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
        }
        columns |= {
            "objective": self.objective,
            "mean_loss": tuple(e / self.samples for e in self.loss),
        }
        return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]

    def reading(self) -> str:
        """Return one sentence on what the sweep found."""
        task = self.name or "the task"
        code = self.complexity(1.0).value
        if self.label_entropy is None:
            return f"The shortest code found for the labels of {task} has {code:,.0f} nats."
        labels = self.samples * self.label_entropy
        length = f"{code:,.0f} nats, the labels alone {labels:,.0f}"
        critical = self.critical_beta()
        if critical is None:
            return f"The shortest code found for the labels of {task} has {length}."
        return (
            f"The network learns something about {task} while a nat costs less than {critical:.3g} nats of loss; "
            f"the shortest code found for the labels has {length}."
        )

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        rows = zip(self.betas, self.kl, self.loss, self.loss_error, strict=True)
        cells = [
            [
                f"{beta:.3g}",
                f"{kl:,.1f}",
                f"{loss:,.1f} ± {error:,.1f}",
                f"{loss / self.samples:.3f}",
            ]
            for beta, kl, loss, error in rows
        ]
        return ["β", "information, nats", "loss, nats", "loss per sample"], cells

    def __str__(self) -> str:
        lines = [text_table(*self._cells())]
        if short := self.unfinished():
            prices = ", ".join(f"{beta:.4g}" for beta in short)
            lines.append(
                f"Not to be trusted: training stopped short of the minimum at β {prices}; set more `training.steps`."
            )
        return "\n".join([*lines, self.reading()])

    def _repr_html_(self) -> str:
        return html_table(*self._cells(), self.reading())

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        critical = None if self.label_entropy is None else self.critical_beta()
        return {
            **values,
            "objective": self.objective,
            "hull": self.hull(),
            "critical_beta": critical,
        }

    def to_json(self, **options: Any) -> str:
        """Return everything as JSON; ``options`` go to ``json.dumps``."""
        return json.dumps(self.to_dict(), **options)

    def plot(self) -> tuple["Figure", tuple["Axes", "Axes"]]:
        """Draw loss against β and the structure function, see ``plot_structure_functions``."""
        from lightning_taskinfo.tasks.plots import plot_structure_functions

        return plot_structure_functions([self])

    def log(self, run: Any, *, key: str = "structure_function") -> None:
        """Log figure (as an image), table and scalars to a W&B run.

        Args:
            run: What ``wandb.init()`` returned, or a WandbLogger's ``experiment``.
            key: What stands before the names, behind ``taskinfo/``.
        """
        scalars = {"prior_loss": self.prior_loss, "complexity": self.complexity(1.0).value}
        if self.label_entropy is not None and (critical := self.critical_beta()) is not None:
            scalars["critical_beta"] = critical
        figures, tables = {"figure": self.plot()[0]}, {"table": self.table()}
        log_once(run, key, scalars=scalars, figures=figures, tables=tables)

    def _points(self) -> list[tuple[float, float, float]]:
        swept = zip(self.kl, self.loss, self.loss_error, strict=True)
        return [(0.0, self.prior_loss, self.prior_loss_error), *swept]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
