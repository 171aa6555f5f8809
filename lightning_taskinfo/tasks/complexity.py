"""How complex is a dataset? Its structure function, traced by training noisy weights, and what is read from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_taskinfo._files import StrPath, claim_folder, read_tensors, write_tensors
from lightning_taskinfo._progress import Progress, shown
from lightning_taskinfo._random import seed_from
from lightning_taskinfo._ranges import check_not_negative, check_positive, check_probability
from lightning_taskinfo._tables import Cells, Logged
from lightning_taskinfo.certificates.samples import Data
from lightning_taskinfo.functional.likelihood import Categorical, Likelihood, as_likelihood
from lightning_taskinfo.plotting import Panels
from lightning_taskinfo.tasks.training import Fit, ModelFn, Training, build, read_task
from lightning_taskinfo.variational import add_weight_noise, noisy_weights, sampling, weight_kl

BETAS = tuple(10 ** (2 - j / 2) for j in range(10))  # 100 … 0.003
START = 0.3  # noise to begin with, as a share of the prior's: the full one shakes the means off their place
Point = tuple[float, float, float]  # information, loss, and its standard error
KEPT = "sweep.pt"  # the points so far, the pre-distribution's first, and the network


class Estimate(NamedTuple):
    """A number and its Monte-Carlo standard error.

    Attributes:
        value: The number, in nats unless said otherwise.
        standard_error: Of the draws it is a mean of.
    """

    value: float
    standard_error: float


@dataclass(frozen=True)
class StructureFunction(Logged):
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

    log_key = "structure_function"
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
        points = zip(self.betas, self._points()[1:], strict=True)
        return tuple(e + beta * t for beta, (t, e, _) in points)

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
        check_not_negative(beta=beta)
        return min(Estimate(e + beta * t, error) for t, e, error in self._points())

    def hull(self) -> tuple[tuple[float, float], ...]:
        """Return the corners ``(t, S)`` of the lower-left convex hull of all points, the prior's among them."""
        points = [(t, e) for t, e, _ in self._points()]
        corners = [min(points)]
        while True:
            t0, e0 = corners[-1]
            lower = [(t, e) for t, e in points if e < e0]
            if not lower:
                return tuple(corners)
            # Where the loss falls fastest; of points on one line, the last.
            corners.append(
                min(lower, key=lambda point: ((point[1] - e0) / (point[0] - t0), point[1]))
            )

    def unfinished(self) -> tuple[float, ...]:
        r"""Return the :math:`\beta` whose training provably stopped short of the minimum.

        That is where another point, or the prior's, has an :math:`E_Q[L_D] + \beta\,\mathrm{KL}`
        that is lower by more than three standard errors. Where none has, the training may still
        have stopped short.
        """
        found = []
        for beta, own, error in zip(self.betas, self.objective, self.loss_error, strict=True):
            best, its_error = self.complexity(beta)
            if own - best > 3 * math.hypot(error, its_error):
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
            The critical value; ``None`` where the sweep does not enclose it, or labels are not classes.

        Raises:
            ValueError: If ``margin`` is not between 0 and 1.
        """
        check_probability(margin=margin)
        if self.label_entropy is None:
            return None
        threshold = (1 - margin) * self.label_entropy * self.samples
        for (above, high), (below, low) in pairwise(zip(self.betas, self.loss, strict=True)):
            if high < threshold:  # already at the highest of the sweep
                return None
            if low < threshold:
                share = (high - threshold) / (high - low)
                return float(above ** (1 - share) * below**share)
        return None

    def reading(self) -> str:
        """Return one sentence on what the sweep found."""
        task = self.name or "the task"
        length = f"{self.complexity(1.0).value:,.0f} nats"
        if self.label_entropy is not None:
            length += f", the labels alone {self.samples * self.label_entropy:,.0f}"
        critical = self.critical_beta()
        if critical is None:
            return f"The shortest code found for the labels of {task} has {length}."
        return (
            f"The network learns something about {task} while a nat costs less than {critical:.3g} nats of loss; "
            f"the shortest code found for the labels has {length}."
        )

    def _cells(self) -> Cells:
        cells = []
        for beta, (kl, loss, error) in zip(self.betas, self._points()[1:], strict=True):
            both = f"{loss:,.1f} ± {error:,.1f}"
            cells.append([f"{beta:.3g}", f"{kl:,.1f}", both, f"{loss / self.samples:.3f}"])
        return ["β", "information, nats", "loss, nats", "loss per sample"], cells

    def _remarks(self) -> list[str]:
        betas = ", ".join(f"{beta:.4g}" for beta in self.unfinished())
        remark = f"Not to be trusted: training stopped short of the minimum at β {betas}; set more `training.steps`."
        return [remark] if betas else []

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            **vars(self),
            "objective": self.objective,
            "hull": self.hull(),
            "critical_beta": self.critical_beta(),
        }

    def plot(self) -> Panels:
        """Draw loss against β and the structure function, see ``plot_structure_functions``."""
        return plot_structure_functions([self])

    def _scalars(self) -> dict[str, float]:
        scalars = {"prior_loss": self.prior_loss, "complexity": self.complexity(1.0).value}
        critical = self.critical_beta()
        if critical is not None:
            scalars["critical_beta"] = critical
        return scalars

    def _points(self) -> list[Point]:
        swept = zip(self.kl, self.loss, self.loss_error, strict=True)
        return [(0.0, self.prior_loss, self.prior_loss_error), *swept]


def plot_structure_functions(
    curves: Sequence[StructureFunction],
) -> Panels:
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
    left, right = fig.subplots(1, 2, sharey=True)
    for index, curve in enumerate(curves):
        color = f"C{index}"
        t, e, error = torch.tensor(curve._points()).T.numpy()  # the prior's first
        e, error = e / curve.samples, error / curve.samples
        left.errorbar(
            curve.betas,
            e[1:],
            error[1:],
            fmt=".-",
            color=color,
            label=curve.name,
        )
        right.errorbar(t, e, error, fmt=".", color=color)
        t, e = torch.tensor(curve.hull()).T.numpy()
        right.plot(t, e / curve.samples, color=color, linewidth=1)
        if curve.label_entropy is not None:
            for ax in (left, right):
                ax.axhline(curve.label_entropy, color=color, linestyle="--", linewidth=0.7)
        critical = curve.critical_beta()
        if critical is not None:
            left.axvline(critical, color=color, linestyle=":", linewidth=1)
    left.set(xscale="log", xlabel=r"$\beta$, price of a nat", ylabel=r"$E_Q[L_D]/N$ (nats)")
    left.set_ylim(bottom=0)
    left.invert_xaxis()
    right.set_xlabel(r"information in the weights, $\mathrm{KL}(Q\|P)$ (nats)")
    right.set_xlim(left=0)
    if any(curve.name for curve in curves):
        left.legend(frameon=False)
    return fig, (left, right)


def structure_function(
    model_fn: ModelFn,
    data: Data,
    betas: Sequence[float] = BETAS,
    *,
    prior_std: float = 0.1,
    likelihood: str | Likelihood = "categorical",
    training: Training | None = None,
    seed: int = 0,
    name: str = "",
    folder: StrPath | None = None,
    progress: Progress | bool = True,
) -> StructureFunction:
    r"""Trace the structure function of a dataset by training noisy weights at ever lower prices of information.

    .. math:: C_\beta = \min_Q\, E_Q[L_D] + \beta\,\mathrm{KL}(Q\|P), \qquad Q = N(\mu, \mathrm{diag}\,\sigma^2)

    A network is trained plainly, then turned noisy and trained at the highest :math:`\beta`, where
    it forgets all that is not worth its price; each lower one starts from there. Two sweeps with
    the same seed over the same inputs differ by their labels alone.

    Args:
        model_fn: Makes the network, the same one after the same ``torch.manual_seed``.
        data: ``(inputs, targets)``, a dataset of such pairs, or a loader over one, whose dataset is
            read.
        betas: Weights of the divergence beside the **sum** of the loss; used from high to low.
        prior_std: Standard deviation of the pre-distribution, whose mean is the network's own start.
        likelihood: What the outputs mean, as for :func:`~lightning_taskinfo.fisher.fisher_trace`.
        training: How long and how fast to train.
        seed: Seed of the network's start, the batches and the noise.
        name: What to call the task in plots.
        folder: Keeps rows and network after each :math:`\beta`; a call that was interrupted
            continues there. Refused if it belongs to other data, another network or other settings.
        progress: Whether to draw a bar where standard error is a terminal or a notebook; or a
            function, called with the number of finished :math:`\beta`, their total and a label.

    Returns:
        The points, with hull, complexity, critical :math:`\beta` and plots.

    Raises:
        ValueError: If an argument is out of its range, or the folder belongs to something else.

    Example:
        >>> from torch import nn
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> quick = Training(pretrain_steps=50, steps=50)
        >>> curve = structure_function(lambda: nn.Linear(1, 2), (x, (x[:, 0] > 0).long()), [10, 0.1], training=quick)
        >>> curve.kl[0] < curve.kl[1], curve.loss[0] > curve.loss[1]
        (True, True)

    References:
        Achille, Paolini, Mbeng, Soatto, *The information complexity of learning tasks, their
        structure and their distance*, sections 3 and 7.
    """
    check_positive(prior_std=prior_std, betas=betas)
    betas = tuple(sorted({float(beta) for beta in betas}, reverse=True))
    meaning = as_likelihood(likelihood)
    inputs, targets = read_task(data, meaning)
    model = build(model_fn, seed)
    fit = Fit(
        model,
        inputs,
        targets,
        meaning,
        training or Training(),
    )
    fit.check()
    if folder is not None:
        made = {
            "betas": betas,
            "prior_std": prior_std,
            "seed": seed,
            **fit.configuration(),
        }
        claim_folder(folder, made, results=[KEPT])
    add_weight_noise(
        model,
        std=prior_std,
        prior_std=prior_std,
        seed=seed_from(seed, 0),
    )
    if folder is not None and Path(folder, KEPT).exists():
        kept = read_tensors(Path(folder, KEPT), advice="Delete it to begin the sweep again.")
        rows = kept["rows"]
        model.load_state_dict(kept["model"])
    else:
        rows = [_begin(fit, seed)]
    with shown(progress, name or "structure_function", len(betas)) as tell:
        for done, beta in enumerate(betas, 1):
            if done == len(rows):
                rows.append(_step(fit, beta, done - 1, seed))
                if folder is not None:
                    write_tensors(Path(folder, KEPT), {"rows": rows, "model": model.state_dict()})
            tell(done, len(betas), f"β = {beta:.3g}")
    kl, loss, error = zip(*rows, strict=True)  # the prior's first
    return StructureFunction(
        betas,
        kl[1:],
        loss[1:],
        error[1:],
        prior_loss=loss[0],
        prior_loss_error=error[0],
        samples=len(targets),
        label_entropy=_label_entropy(fit),
        name=name,
    )


def _label_entropy(fit: Fit) -> float | None:
    """Nats per sample, of the frequencies of classes; ``None`` where labels are not classes.

    A sample may have several labels, as a sequence has, and ignored ones count for nothing.
    """
    if not isinstance(fit.likelihood, Categorical):
        return None
    counted = fit.targets[fit.targets != fit.likelihood.ignore_index]
    counts = counted.unique(return_counts=True)[1].double()
    per_label = torch.special.entr(counts / len(counted)).sum().item()
    return per_label * len(counted) / len(fit.targets)


def _begin(fit: Fit, seed: int) -> Point:
    """Measure the pre-distribution itself, then train without noise, and leave a part of it for later."""
    prior = fit.expected_loss()
    for *_, noise in noisy_weights(fit.model):
        noise.log_variance.data += 2 * math.log(START)
    with sampling(fit.model, enabled=False):
        fit.minimise(lambda: 0.0, seed_from(seed, 1), noisy=False)
    return 0.0, *prior


def _step(fit: Fit, beta: float, done: int, seed: int) -> Point:
    r"""Minimise :math:`C_\beta` from where the network is, and measure.

    The first has the longest way to go, from plain weights to almost nothing: it is trained twice.
    """
    for turn in range(1 if done else 2):
        own = seed_from(seed, 2, done, turn)
        fit.minimise(lambda: beta * weight_kl(fit.model), own, noisy=True)
    return weight_kl(fit.model).item(), *fit.expected_loss()
