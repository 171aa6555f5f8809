"""A ranking of starts: what was found, and its table, picture, file and page."""

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lightning_taskinfo._files import StrPath, read_json, write_json
from lightning_taskinfo._tables import Cells, Logged
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
        freeze: Layer up to which to freeze: the deepest one that is not seen to miss more than the
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
        seconds: That reading took.
        fine_tuned: Error of cross-validated fine-tuning, where that was asked for.
        behind: How much more it misses than the first, paired: lower end, mean, upper end. With
            fine-tuning, how much larger its Brier score is, each at its best temperature, or the
            squared error of real labels.
        call: ``"helps"``, ``"hurts"`` or ``"cannot tell"``: fine-tuning it, compared with training
            the untrained start by the same losses; ``None`` where they were not fine-tuned.
        frozen_call: The same of a linear read-out of its frozen features.
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
    seconds: float
    fine_tuned: float | None = None
    behind: MeanInterval = (0.0, 0.0, 0.0)
    call: str | None = None
    frozen_call: str | None = None
    onset: MeanInterval | None = None


@dataclass(frozen=True)
class StartRanking(Logged):
    """Starts in the order in which to try them.

    Attributes:
        starts: The starts, best first.
        tied: Names of those that cannot be told apart from the first, itself among them.
        samples: Number of labels used.
        classes: Number of classes; ``None`` for real labels.
        confidence: Of all intervals.
        scratch: Name of the untrained start, if there is one.
    """

    log_key = "rank_starts"
    starts: tuple[RankedStart, ...]
    tied: tuple[str, ...]
    samples: int
    classes: int | None
    confidence: float
    scratch: str | None = None

    @property
    def best(self) -> RankedStart:
        """The first one."""
        return self.starts[0]

    def __getitem__(self, name: str) -> RankedStart:
        """Return the start of a name."""
        return {start.name: start for start in self.starts}[name]

    def reading(self) -> str:
        """Return one sentence of advice."""
        best = self.best
        others = ", ".join(self.tied[1:])
        said = [f"Start from {best.name}, frozen up to {best.freeze} if at all"]
        if others:
            rule = "try them, or get more labels"
            said = [f"{self.samples} labels cannot tell {best.name} from {others}: {rule}"]
        if self.scratch == best.name:
            said.append("no other start is ahead of the untrained one")
            helping = [start.name for start in self.starts if start.frozen_call == "helps"]
            if helping:
                helps = "helps" if len(helping) == 1 else "help"
                said[-1] += f" when all is fine-tuned; frozen, {', '.join(helping)} {helps}"
        for what, call in (("fine-tuning", best.call), ("freezing", best.frozen_call)):
            if call is not None:
                said.append(f"{what} it, over scratch: {call}")
        return f"{'; '.join(said)}."

    def _remarks(self) -> list[str]:
        """What the columns mean, which direction is good, and what orders the starts."""
        real = self.classes is None
        what = "real labels" if real else f"labels of {self.classes} classes"
        losses = "squared error" if real else "Brier score at the best temperature"
        order = "the mean of the ranks by missed and LogME"
        if self.best.fine_tuned is not None:
            order = f"the {losses} after fine-tuning; fine-tuned is the error then"
        lines = [
            f"{self.samples} {what}, {self.confidence:.0%} intervals. = cannot be told apart from the first. The order "
            f"is by {order}.",
            "Of the last layer: missed, the share of the labels' variance that a linear read-out misses (lower is "
            "better); LogME, the evidence for the labels; H-score, how far features separate the classes (higher).",
            f"error: {'share missed' if real else 'share of wrong classes'} by a read-out of the best layer, which "
            "layer names. Freeze up to: the deepest layer that is not seen to be worse. LEEP, NCE: how well the "
            "outputs of the source's own head predict the labels (higher is better).",
        ]
        if any(start.call for start in self.starts):
            lines.append(
                "Tuned: whether fine-tuning the start beats training from scratch; frozen: whether a head on its "
                f"frozen features does. By the {losses}, with a probability of at least {self.confidence:.0%}."
            )
        return lines

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns and one row for each start, numbers as numbers; only columns with values."""
        rows = [_columns(start) for start in self.starts]
        titles = [title for title in rows[0] if any(row[title] is not None for row in rows)]
        return titles, [[row[title] for title in titles] for row in rows]

    def _cells(self) -> Cells:
        titles, rows = self.table()
        cells = [[_shown(value) for value in row] for row in rows]
        for row in cells:
            if len(self.tied) > 1 and row[0] in self.tied:
                row[0] = f"= {row[0]}"
        return titles, cells

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return asdict(self)

    def save(self, path: StrPath) -> None:
        """Write everything to a JSON file; an onset that is never reached is ``null`` there.

        Args:
            path: The file.
        """
        text = self.to_json()
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
        """Draw the read-out error of the best layer of each start, with its interval.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        from lightning_taskinfo.plotting import plot_intervals

        names = [start.name for start in self.starts]
        low, high = zip(*(start.interval for start in self.starts), strict=True)
        errors = [start.error for start in self.starts]
        what = f"held-out error of a linear read-out, {self.samples} labels"
        return plot_intervals(names, low, errors, high, xlabel=what, ax=ax)

    def _scalars(self) -> dict[str, float]:
        return {f"error/{start.name}": start.error for start in self.starts}


def _columns(start: RankedStart) -> dict[str, Any]:
    """Columns of the table."""
    low, high = start.interval
    return {
        "start": start.name,
        "fine-tuned": start.fine_tuned,
        "tuned": start.call,
        "frozen": start.frozen_call,
        "scratch wins from": None if start.onset is None else shown_count(start.onset[1]),
        "missed": start.missed,
        "LogME": start.logme,
        "error": start.error,
        "low": low,
        "high": high,
        "layer": start.best,
        "freeze up to": start.freeze,
        "H-score": start.h_score,
        "LEEP": start.leep,
        "NCE": start.nce,
        "seconds": start.seconds,
    }


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:.3f}"


def _tuples(value: Any) -> Any:
    """Lists as tuples, with infinity where JSON has ``null``."""
    if isinstance(value, dict):
        return {name: _tuples(part) for name, part in value.items()}
    if not isinstance(value, list):
        return value
    return tuple(math.inf if part is None else _tuples(part) for part in value)
