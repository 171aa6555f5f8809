"""A ranking of starts: what was found, and its table, picture, file and page."""

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_taskinfo._files import StrPath, read_json, write_json
from lightning_taskinfo._tables import html_table, text_table
from lightning_taskinfo._wandb import log_once
from lightning_taskinfo.transfer.overlap import shown_count

if TYPE_CHECKING:
    from lightning_taskinfo.plotting import Axes, Drawn

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
        rows = []
        for start in self.starts:
            row = dict(vars(start))
            del row["layers"]
            row["error_low"], row["error_high"] = row.pop("interval")
            for name in ("behind", "gain", "onset"):
                ends = row[name] or (None, None, None)
                row[f"{name}_low"], row[name], row[f"{name}_high"] = ends
            rows.append(row)
        return list(rows[0]), [list(row.values()) for row in rows]

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Columns and cells as they are shown; what nobody asked for has no column."""
        titles = []
        for title, attribute in SHOWN.items():
            if any(getattr(start, attribute) is not None for start in self.starts):
                titles.append(title)
        rows = []
        for start in self.starts:
            cells = [_cell(start, SHOWN[title]) for title in titles]
            if len(self.tied) > 1 and start.name in self.tied:
                cells[0] = f"= {start.name}"
            rows.append(cells)
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

    def save(self, path: StrPath) -> None:
        """Write everything to a JSON file; an onset that is never reached is ``null`` there.

        Args:
            path: The file.
        """
        text = json.dumps(asdict(self))
        write_json(path, json.loads(text, parse_constant=lambda _: None))

    @classmethod
    def load(cls, path: StrPath) -> "StartRanking":
        """Read what :meth:`save` wrote.

        Args:
            path: The file.

        Raises:
            ValueError: If it is damaged, or holds something else.
        """
        values = _tuples(read_json(path))
        try:
            starts = []
            for start in values.pop("starts"):
                layers = [LayerReadout(**layer) for layer in start.pop("layers")]
                starts.append(RankedStart(layers=tuple(layers), **start))
            return cls(tuple(starts), **values)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a ranking of starts.") from error

    def plot(self, ax: "Axes | None" = None) -> "Drawn":
        """Draw the read-out error of each layer of each start, its best layer with the interval.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        from lightning_taskinfo.plotting import plot_intervals

        names = [start.name for start in self.starts]
        low, high = zip(*(start.interval for start in self.starts), strict=True)
        errors = [start.error for start in self.starts]
        what = "error of a linear read-out"
        if self.classes is None:
            what = "share of the labels' variance missed"
        what += f", held out, {self.samples} labels"
        figure, ax = plot_intervals(names, low, errors, high, xlabel=what, ax=ax)
        for row, start in enumerate(self.starts):
            for layer in start.layers:
                ax.plot([layer.error], [row], ".", color="C0", alpha=0.4)
            if start.fine_tuned is not None:
                ax.plot([start.fine_tuned], [row], "x", color="black")
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


SHOWN = {  # columns of the table, and what they show of a start
    "start": "name",
    "fine-tuned": "fine_tuned",
    "tuned": "call",
    "frozen": "frozen_call",
    "scratch wins from": "onset",
    "missed": "missed",
    "LogME": "logme",
    "error": "error",
    "layer": "best",
    "freeze up to": "freeze",
    "H-score": "h_score",
    "LEEP": "leep",
    "NCE": "nce",
    "seconds": "seconds",
}


def _cell(start: RankedStart, attribute: str) -> str:
    value = getattr(start, attribute)
    if value is None:
        return "–"
    if attribute == "onset":
        return shown_count(value[1])
    if attribute == "error":
        low, high = start.interval
        return f"{value:.3f} [{low:.3f}, {high:.3f}]"
    if attribute == "seconds":
        return f"{value:.1f}"
    return value if isinstance(value, str) else f"{value:.3f}"


def _tuples(value: Any) -> Any:
    """Lists as tuples, with infinity where JSON has ``null``."""
    if isinstance(value, dict):
        return {name: _tuples(part) for name, part in value.items()}
    if not isinstance(value, list):
        return value
    return tuple(math.inf if part is None else _tuples(part) for part in value)
