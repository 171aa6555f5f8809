"""A ranking of starts: what was found, and its table, picture, file and page."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any

from lightning_taskinfo._files import read_json, write_json
from lightning_taskinfo._wandb import log_once

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Interval = tuple[float, float]
MeanInterval = tuple[float, float, float]
COLUMNS = (
    "start",
    "missed",
    "LogME",
    "error",
    "layer",
    "freeze up to",
    "H-score",
    "LEEP",
    "NCE",
    "seconds",
)


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


@dataclass(frozen=True)
class Start:
    """One start, with what was found about it.

    Attributes:
        name: Its name.
        layers: Read-outs in the order of depth.
        best: Layer with the smallest error.
        freeze: Layer up to which to freeze: the deepest one that is not seen to be worse than the best.
        error: Read-out error of the best layer. It was picked among layers, so that it is a little too small, and early
            layers of untrained networks can be good: it says what freezing is worth, and does not order.
        interval: Its confidence interval.
        missed: Share of the labels' variance that the last layer misses.
        logme: LogME of the last layer.
        h_score: H-score of the last layer; ``None`` for real labels.
        leep: LEEP of the source head; ``None`` without one.
        nce: NCE of the source head; ``None`` without one.
        parameters: Number of weights.
        seconds: That reading took.
        fine_tuned: Error of cross-validated fine-tuning, where that was asked for.
        behind: How much more it misses than the first, paired: lower end, mean, upper end. With fine-tuning, how much
            larger its error is.
        gain: How much less than the untrained start, in the same way.
        call: ``"helps"``, ``"hurts"`` or ``"cannot tell"``: fine-tuning, compared with that of the untrained start; or
            frozen features, compared with the learning curve of scratch. ``None`` without either.
        onset: Number of labels above which training from scratch is predicted to win: lower end, middle, upper end.
    """

    name: str
    layers: tuple[LayerReadout, ...]
    best: str
    freeze: str
    error: float
    interval: Interval
    missed: float
    logme: float
    h_score: float | None
    leep: float | None
    nce: float | None
    parameters: int
    seconds: float
    fine_tuned: float | None = None
    behind: MeanInterval = (0.0, 0.0, 0.0)
    gain: MeanInterval | None = None
    call: str | None = None
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

    starts: tuple[Start, ...]
    tied: tuple[str, ...]
    samples: int
    classes: int | None
    confidence: float
    scratch: str | None = None
    ordered_by: str = "read-out and LogME"

    @property
    def best(self) -> Start:
        """The first one."""
        return self.starts[0]

    def __getitem__(self, name: str) -> Start:
        """Return the start of a name."""
        for start in self.starts:
            if start.name == name:
                return start
        raise KeyError(name)

    def advice(self) -> str:
        """Return one sentence on what to do."""
        best = self.best
        if len(self.starts) == 1:
            sentence = f"Freeze {best.name} up to {best.freeze}"
        elif len(self.tied) == 1:
            sentence = f"Start from {best.name}, frozen up to {best.freeze} if at all"
        else:
            others = ", ".join(self.tied[1:])
            sentence = f"{self.samples} labels cannot tell {best.name} from {others}: try them, or get more labels"
        what = "fine-tuning it" if self.ordered_by == "fine-tuning" else "freezing it"
        if best.call == "cannot tell":
            sentence += f"; whether {what} helps over scratch cannot be told"
        elif best.call is not None:
            sentence += f"; {what} {best.call} over scratch"
        elif self.scratch == best.name:
            sentence += "; no other start is ahead of the untrained one"
        if best.onset is not None and math.isfinite(best.onset[1]):
            count = _count(best.onset[1])
            sentence += (
                f"; from about {count} labels on, scratch is predicted to win over frozen features"
            )
        return f"{sentence}."

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns and one row for each start, numbers as numbers."""
        columns = [
            "start",
            "missed",
            "error",
            "low",
            "high",
            "layer",
            "freeze",
            "behind",
            "behind_low",
            "behind_high",
        ]
        columns += [
            "gain",
            "call",
            "onset",
            "fine_tuned",
            "logme",
            "h_score",
            "leep",
            "nce",
            "parameters",
            "seconds",
        ]
        rows = []
        for start in self.starts:
            low, behind, high = start.behind
            row: list[Any] = [
                start.name,
                start.missed,
                start.error,
                *start.interval,
                start.best,
                start.freeze,
                behind,
                low,
                high,
            ]
            row += [None if start.gain is None else start.gain[1], start.call]
            row += [
                None if start.onset is None else start.onset[1],
                start.fine_tuned,
                start.logme,
                start.h_score,
            ]
            rows.append([*row, start.leep, start.nce, start.parameters, start.seconds])
        return columns, rows

    def _text_rows(self) -> tuple[list[str], list[list[str]]]:
        """Columns and cells as they are shown; what nobody asked for has no column."""
        columns = list(COLUMNS)
        optional = {
            "fine-tuned": lambda s: "–" if s.fine_tuned is None else f"{s.fine_tuned:.3f}",
            "scratch": lambda s: s.call or "–",
            "scratch wins from": lambda s: "–" if s.onset is None else _count(s.onset[1]),
        }
        asked = {
            "fine-tuned": any(s.fine_tuned is not None for s in self.starts),
            "scratch": any(s.call is not None for s in self.starts),
            "scratch wins from": any(s.onset is not None for s in self.starts),
        }
        extra = [name for name in optional if asked[name]]
        columns[1:1] = extra
        rows = []
        for s in self.starts:
            mark = "= " if s.name in self.tied and len(self.tied) > 1 else ""
            cells = [
                f"{mark}{s.name}",
                *(optional[name](s) for name in extra),
                f"{s.missed:.3f}",
                f"{s.logme:.3f}",
            ]
            cells += [f"{s.error:.3f} [{s.interval[0]:.3f}, {s.interval[1]:.3f}]", s.best, s.freeze]
            cells += [*map(_number, (s.h_score, s.leep, s.nce)), f"{s.seconds:.1f}"]
            rows.append(cells)
        return columns, rows

    def __str__(self) -> str:
        columns, rows = self._text_rows()
        widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
        lines = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
            for row in (columns, *rows)
        ]
        what = "real labels" if self.classes is None else f"labels of {self.classes} classes"
        title = (
            f"Starts by {self.ordered_by}, {self.samples} {what}, {self.confidence:.0%} intervals"
        )
        if len(self.tied) > 1:
            title += "; = cannot be told apart from the first"
        return "\n".join([title, *(line.rstrip() for line in lines), self.advice()])

    def _repr_html_(self) -> str:
        columns, rows = self._text_rows()
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{escape(self.advice())}</p>"

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON; an onset that is never reached is ``None`` there."""
        return _finite(asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StartRanking":
        """Return the ranking that :meth:`to_dict` described.

        Args:
            values: What it returned.
        """
        known = {f.name for f in fields(cls)}
        if not {"starts", "tied", "samples"} <= set(values) or set(values) - known:
            raise ValueError(f"`values` must be those of a ranking, got fields {sorted(values)}.")
        starts = tuple(_start(start) for start in values["starts"])
        return cls(**{**values, "starts": starts, "tied": tuple(values["tied"])})

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything to a JSON file.

        Args:
            path: The file.
        """
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "StartRanking":
        """Read what :meth:`save` wrote.

        Args:
            path: The file.
        """
        return cls.from_dict(read_json(path))

    def plot(self, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
        """Draw the read-out error of each layer of each start, its best layer with the interval.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        from matplotlib.figure import Figure

        if ax is None:
            ax = Figure(figsize=(6, 1.2 + 0.35 * len(self.starts)), layout="constrained").subplots()
        for row, start in enumerate(self.starts):
            color = "C0" if start.name in self.tied else "0.55"
            ax.scatter(
                [layer.error for layer in start.layers],
                [row] * len(start.layers),
                s=10,
                color=color,
                alpha=0.4,
            )
            low, high = start.interval
            ax.plot([low, high], [row, row], color=color, linewidth=1.5)
            ax.plot([start.error], [row], "o", color=color)
            if start.fine_tuned is not None:
                ax.plot([start.fine_tuned], [row], "x", color="black")
        ax.set_yticks(range(len(self.starts)), [start.name for start in self.starts])
        ax.invert_yaxis()
        what = (
            "share of the labels' variance missed"
            if self.classes is None
            else "error of a linear read-out"
        )
        ax.set_xlabel(f"{what}, held out, {self.samples} labels")
        ax.spines[["top", "right"]].set_visible(False)
        return ax.figure, ax  # type: ignore[return-value]

    def log(self, run: Any, *, key: str = "rank_starts") -> None:
        """Log the figure as an image, the table, and the errors as scalars to a W&B run.

        Args:
            run: What ``wandb.init()`` returned, or a WandbLogger's ``experiment``.
            key: What stands before the names, behind ``taskinfo/``.
        """
        scalars = {f"error/{start.name}": start.error for start in self.starts}
        figures, tables = {"figure": self.plot()[0]}, {"table": self.table()}
        log_once(run, key, scalars=scalars, figures=figures, tables=tables)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _count(value: float) -> str:
    return (
        "never"
        if math.isinf(value)
        else f"{value:.2g}"
        if value < 10
        else f"{float(f'{value:.2g}'):,.0f}"
    )


def _finite(value: Any) -> Any:
    """Infinity as ``None``, tuples as lists: what JSON can say."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _start(values: Mapping[str, Any]) -> Start:
    found = dict(values)
    found["layers"] = tuple(
        LayerReadout(**{**layer, "interval": tuple(layer["interval"])}) for layer in found["layers"]
    )
    for name in ("interval", "behind", "gain", "onset"):
        if found.get(name) is not None:
            found[name] = tuple(math.inf if end is None else end for end in found[name])
    return Start(**found)
