"""A ranking of starts: what was found, and its table, picture, file and page."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from os import PathLike
from typing import TYPE_CHECKING, Any

from lightning_taskinfo._files import read_json, write_json
from lightning_taskinfo._tables import html_table, text_table
from lightning_taskinfo._wandb import log_once
from lightning_taskinfo.transfer.overlap import shown_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Interval = tuple[float, float]
MeanInterval = tuple[float, float, float]


@dataclass(frozen=True)
class LayerReadout:
    """How well a linear read-out of one layer's frozen features predicts held-out labels.

    Attributes:
        name: Name of the layer.
        error: Share of wrong classes; of real labels, the share of their variance that is missed.
        interval: Confidence interval of it, over samples.
        missed: Share of the labels' variance that is missed, classes as indicators.
    """

    name: str
    error: float
    interval: Interval
    missed: float


@dataclass(frozen=True, kw_only=True)
class RankedStart:
    """One start, with what was found about it.

    Attributes:
        name: Its name.
        layers: Read-outs in the order of depth.
        best: Layer with the smallest error.
        freeze: Layer up to which to freeze: the deepest one that is not seen to be worse than the
            best.
        error: Read-out error of the best layer. It was picked among layers, so that it is a little
            too small, and early layers of untrained networks can be good: it says what freezing is
            worth, and does not order.
        interval: Its confidence interval.
        missed: Share of the labels' variance that the last layer misses.
        logme: LogME of the last layer.
        h_score: H-score of the last layer; ``None`` for real labels.
        leep: LEEP of the source head; ``None`` without one.
        nce: NCE of the source head; ``None`` without one.
        parameters: Number of weights.
        seconds: That reading took.
        fine_tuned: Error of cross-validated fine-tuning, where that was asked for.
        behind: How much more it misses than the first, paired: lower end, mean, upper end. With
            fine-tuning, how much larger its Brier score is, or the squared error of real labels.
        gain: How much less than the untrained start, in the same way.
        call: ``"helps"``, ``"hurts"`` or ``"cannot tell"``: fine-tuning it, compared with training
            the untrained start by Brier scores, or squared errors of real labels; ``None`` where
            they were not fine-tuned. Errors can differ less, or not at all.
        frozen_call: The same of a linear read-out of its frozen features, compared with training
            the untrained start, each at its best temperature, or else with the learning curve of
            scratch; ``None`` without either.
        onset: Number of labels above which training from scratch is predicted to win: lower end,
            middle, upper end.
    """

    name: str
    layers: tuple[LayerReadout, ...]
    best: str
    freeze: str
    error: float
    interval: Interval
    missed: float
    logme: float
    h_score: float | None = None
    leep: float | None = None
    nce: float | None = None
    parameters: int
    seconds: float
    fine_tuned: float | None = None
    behind: MeanInterval = (0.0, 0.0, 0.0)
    gain: MeanInterval | None = None
    call: str | None = None
    frozen_call: str | None = None
    onset: MeanInterval | None = None


@dataclass(frozen=True)
class StartRanking:
    """Starts in the order in which to try them.

    Attributes:
        starts: The starts, best first.
        tied: Names of those that cannot be told apart from the first, itself among them.
        samples: Number of labels used.
        classes: Number of classes; ``None`` for real labels.
        confidence: Of all intervals.
        scratch: Name of the untrained start, if there is one.
        ordered_by: ``"read-out and LogME"`` or ``"fine-tuning"``.
    """

    starts: tuple[RankedStart, ...]
    tied: tuple[str, ...]
    samples: int
    classes: int | None
    confidence: float
    scratch: str | None = None
    ordered_by: str = "read-out and LogME"

    @property
    def best(self) -> RankedStart:
        """The first one."""
        return self.starts[0]

    def __getitem__(self, name: str) -> RankedStart:
        """Return the start of a name."""
        return {start.name: start for start in self.starts}[name]

    def advice(self) -> str:
        """Return one sentence on what to do."""
        best = self.best
        others = ", ".join(self.tied[1:])
        said = [f"Start from {best.name}, frozen up to {best.freeze} if at all"]
        if len(self.starts) == 1:
            said = [f"Freeze {best.name} up to {best.freeze}"]
        elif others:
            rule = "try them, or get more labels"
            said = [f"{self.samples} labels cannot tell {best.name} from {others}: {rule}"]
        if self.scratch == best.name:
            said.append("no other start is ahead of the untrained one")
        for what, call in (("fine-tuning", best.call), ("freezing", best.frozen_call)):
            if call == "cannot tell":
                said.append(f"whether {what} it helps over scratch cannot be told")
            elif call is not None:
                said.append(f"{what} it {call} over scratch")
        if best.onset is not None and math.isfinite(best.onset[1]):
            wins = "labels on, scratch is predicted to win over frozen features"
            said.append(f"from about {shown_count(best.onset[1])} {wins}")
        return f"{'; '.join(said)}."

    def legend(self) -> str:
        """Return what the columns mean, which direction is good, and what orders the starts."""
        order = "The order is the mean of the ranks by missed and LogME."
        if self.ordered_by == "fine-tuning":
            order = (
                "The order is by the Brier score after fine-tuning; fine-tuned is the error then."
            )
        what = "share of wrong classes" if self.classes is not None else "share missed"
        lines = [
            "Of the last layer: missed, the share of the labels' variance that a linear read-out misses (lower is "
            "better); LogME, the evidence for the labels (higher is better).",
            f"{order} error: {what} by a read-out of the best layer, which layer names (lower is better). Freeze up "
            "to: the deepest layer that is not seen to be worse.",
        ]
        if any(start.h_score is not None for start in self.starts):
            lines.append(
                "H-score: how far the last layer's features separate the classes. LEEP, NCE: how well the outputs of "
                "the source's own head predict the labels. Higher is better."
            )
        if any(start.call or start.frozen_call for start in self.starts):
            lines.append(
                "Tuned, frozen: whether fine-tuning the start, or a head on its frozen features, beats training from "
                f"scratch by its {self._called_by()}, at {self.confidence:.0%} one-sided confidence."
            )
        return "\n".join(lines)

    def _called_by(self) -> str:
        """What calls compare: errors with a learning curve, or losses where scratch was trained."""
        if self.scratch is None or self[self.scratch].fine_tuned is None:
            return "error"
        if self.classes is None:
            return "squared error"
        return "Brier score (probabilities can improve where errors do not)"

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns and one row for each start, numbers as numbers."""
        rows = [_flat(start) for start in self.starts]
        return list(rows[0]), [list(row.values()) for row in rows]

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Columns and cells as they are shown; what nobody asked for has no column."""
        titles = []
        for title, show in SHOWN.items():
            if any(show(start) != UNKNOWN for start in self.starts):
                titles.append(title)
        rows = [[SHOWN[title](start) for title in titles] for start in self.starts]
        for row in rows:
            if len(self.tied) > 1 and row[0] in self.tied:
                row[0] = f"= {row[0]}"
        return titles, rows

    def __str__(self) -> str:
        what = "real labels" if self.classes is None else f"labels of {self.classes} classes"
        title = (
            f"Starts by {self.ordered_by}, {self.samples} {what}, {self.confidence:.0%} intervals"
        )
        if len(self.tied) > 1:
            title += "; = cannot be told apart from the first"
        return f"{title}\n{text_table(*self._cells())}\n{self.legend()}\n{self.advice()}"

    def _repr_html_(self) -> str:
        return html_table(*self._cells(), f"{self.legend()} {self.advice()}")

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to a JSON file; an onset that is never reached is ``null`` there.

        Args:
            path: The file.
        """
        text = json.dumps(asdict(self))
        write_json(path, json.loads(text, parse_constant=lambda _: None))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "StartRanking":
        """Read what :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            ValueError: If it is damaged, or holds something else.
        """
        values = read_json(path)
        if not isinstance(values, dict) or {*values} != {f.name for f in fields(cls)}:
            raise ValueError(f"{path}: not a ranking of starts.")
        starts = []
        for start in values["starts"]:
            layers = [LayerReadout(**_tuples(layer)) for layer in start["layers"]]
            starts.append(RankedStart(**_tuples(start) | {"layers": tuple(layers)}))
        return cls(**_tuples(values) | {"starts": tuple(starts)})

    def plot(self, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
        """Draw the read-out error of each layer of each start, its best layer with the interval.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        from lightning_taskinfo.plotting import figure_and_axes

        figure, ax = figure_and_axes(ax, size=(6, 1.2 + 0.35 * len(self.starts)), frame=False)
        for row, start in enumerate(self.starts):
            color = "C0" if start.name in self.tied else "0.55"
            errors = [layer.error for layer in start.layers]
            ax.scatter(errors, [row] * len(errors), s=10, color=color, alpha=0.4)
            ax.plot(start.interval, [row, row], color=color, linewidth=1.5)
            ax.plot([start.error], [row], "o", color=color)
            if start.fine_tuned is not None:
                ax.plot([start.fine_tuned], [row], "x", color="black")
        ax.set_yticks(range(len(self.starts)), [start.name for start in self.starts])
        ax.invert_yaxis()
        what = "error of a linear read-out"
        if self.classes is None:
            what = "share of the labels' variance missed"
        ax.set_xlabel(f"{what}, held out, {self.samples} labels")
        return figure, ax

    def log(self, run: Any, *, key: str = "rank_starts") -> None:
        """Log the figure as an image, the table, and the errors as scalars to a W&B run.

        Args:
            run: What ``wandb.init()`` returned, or a WandbLogger's ``experiment``.
            key: What stands before the names, behind ``taskinfo/``.
        """
        scalars = {f"error/{start.name}": start.error for start in self.starts}
        figures, tables = {"figure": self.plot()[0]}, {"table": self.table()}
        log_once(run, key, scalars=scalars, figures=figures, tables=tables)


UNKNOWN = "–"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


SHOWN: dict[str, Callable[[RankedStart], str]] = {  # columns of the table
    "start": lambda s: s.name,
    "fine-tuned": lambda s: _number(s.fine_tuned),
    "tuned": lambda s: s.call or UNKNOWN,
    "frozen": lambda s: s.frozen_call or UNKNOWN,
    "scratch wins from": lambda s: UNKNOWN if s.onset is None else shown_count(s.onset[1]),
    "missed": lambda s: _number(s.missed),
    "LogME": lambda s: _number(s.logme),
    "error": lambda s: f"{s.error:.3f} [{s.interval[0]:.3f}, {s.interval[1]:.3f}]",
    "layer": lambda s: s.best,
    "freeze up to": lambda s: s.freeze,
    "H-score": lambda s: _number(s.h_score),
    "LEEP": lambda s: _number(s.leep),
    "NCE": lambda s: _number(s.nce),
    "seconds": lambda s: f"{s.seconds:.1f}",
}


def _flat(start: RankedStart) -> dict[str, Any]:
    """Everything but the layers, an interval as its ends."""
    row: dict[str, Any] = {}
    for name, value in vars(start).items():
        if name == "interval":
            row["error_low"], row["error_high"] = value
        elif name in ("behind", "gain", "onset"):
            low, middle, high = value or (None, None, None)
            row |= {name: middle, f"{name}_low": low, f"{name}_high": high}
        elif name != "layers":
            row[name] = value
    return row


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples, with infinity where JSON has ``null``."""
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, list):
            found[name] = tuple(math.inf if part is None else part for part in value)
    return found
