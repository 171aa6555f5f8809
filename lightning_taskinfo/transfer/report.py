"""The report of a transfer experiment: did it help, by how much, over how many seeds, and what did it cost in nats?"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_taskinfo._files import atomic_write, make_folder, read_json, write_json
from lightning_taskinfo.transfer._results import checked_results, plain, without_timings
from lightning_taskinfo.transfer.statistics import Interval, Verdict, mean_interval, paired_gain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measure = Literal["error", "loss"]
BASELINES = ("scratch", "standard")
MEASURES: tuple[Measure, ...] = ("error", "loss")
RANGES = {"accuracy": (0.0, 1.0), "loss": (0.0, float("inf"))}  # what a mean can be
GAIN_RANGES = {"error": (-1.0, 1.0), "loss": (-float("inf"), float("inf"))}


@dataclass(frozen=True)
class Comparison:
    r"""The gain :math:`T = R_\text{baseline} - R_\text{method}` on the target test set; positive is better.

    Attributes:
        method: What is compared.
        labels: Number of target labels that both had.
        baseline: ``"scratch"``, or ``"standard"`` (plain fine-tuning).
        measure: ``"error"`` (a share of the samples) or ``"loss"`` (nats).
        gain: Mean over the seeds that both have, with its interval.
    """

    method: str
    labels: int
    baseline: str
    measure: Measure
    gain: Interval

    @property
    def verdict(self) -> Verdict:
        """``"helps"``, ``"hurts"`` or ``"cannot tell"``."""
        return self.gain.verdict


@dataclass(frozen=True)
class TransferReport:
    """Results of a transfer experiment, and everything that is said about them.

    Args:
        results: One plain dict for each method, number of labels and seed, with the keys ``method`` (``"scratch"`` is
            the baseline), ``labels``, ``seed`` and ``test`` (``accuracy``, and ``loss`` in nats), and where they are
            known ``validation``, ``source``, ``curves``, ``information``, ``fisher_trace``, ``overlap``, ``epochs``
            and ``seconds``.
        configuration: What decided the results, as JSON-like values.
        name: Title of the experiment.

    Raises:
        ValueError: If there are no results, two of the same cell, or one is not as above.

    Example:
        >>> def result(method, seed, accuracy):
        ...     return {"method": method, "labels": 50, "seed": seed, "test": {"accuracy": accuracy, "loss": 1.0}}
        >>> rows = [result("scratch", 0, 0.5), result("scratch", 1, 0.6)]
        >>> rows += [result("lautum", 0, 0.7), result("lautum", 1, 0.81)]
        >>> report = TransferReport(rows, {"pair": "digits→letters"})
        >>> gain = report.transferability()[0]
        >>> gain.method, round(gain.gain.mean, 3), gain.verdict
        ('lautum', 0.205, 'helps')
    """

    results: Sequence[dict[str, Any]] = field(repr=False)
    configuration: dict[str, Any] = field(repr=False)
    name: str = "transfer"

    def __post_init__(self) -> None:
        if not isinstance(self.configuration, dict):
            raise ValueError(f"`configuration` must be a dict, got {self.configuration!r}.")
        object.__setattr__(self, "results", checked_results(self.results))
        object.__setattr__(self, "configuration", plain(self.configuration, "configuration"))

    @property
    def methods(self) -> list[str]:
        """The methods: the two baselines first where they are there, the others as they came."""
        names = list(dict.fromkeys(row["method"] for row in self.results))
        return [*(name for name in BASELINES if name in names), *(name for name in names if name not in BASELINES)]

    @property
    def labels(self) -> list[int]:
        """The numbers of target labels, from few to many."""
        return sorted({row["labels"] for row in self.results})

    def cell(self, method: str, labels: int) -> dict[int, dict[str, Any]]:
        """Return the results of one method and number of labels by seed; empty where there are none."""
        rows = [row for row in self.results if (row["method"], row["labels"]) == (method, labels)]
        return {row["seed"]: row for row in sorted(rows, key=lambda row: row["seed"])}

    def transferability(self, confidence: float = 0.95) -> list[Comparison]:
        r"""Return the gain of every method over training from scratch, and over plain fine-tuning.

        .. math:: T = R_\text{scratch} - R_\text{transfer}

        Paired over seeds, since the same seed means the same split. A baseline that is not among the results has no
        comparisons; one that lacks a number of labels or a seed has comparisons that say so.

        Args:
            confidence: Probability that an interval covers the true gain. The intervals are not corrected for
                their number.

        Raises:
            ValueError: If ``confidence`` is not between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"`confidence` must be between 0 and 1, got {confidence}.")
        return [
            self._compare(method, labels, baseline, measure, confidence)
            for baseline in BASELINES
            if baseline in self.methods
            for labels in self.labels
            for method in self.methods
            if method not in ("scratch", baseline) and self.cell(method, labels)
            for measure in MEASURES
        ]

    def summary(self, method: str, labels: int, name: str, confidence: float = 0.95) -> Interval:
        """Return mean and interval over seeds of the target test ``"accuracy"`` or ``"loss"``."""
        values = [row["test"][name] for row in self.cell(method, labels).values()]
        return mean_interval(values, confidence=confidence, bounds=RANGES[name])

    def table(self, confidence: float = 0.95) -> list[dict[str, Any]]:
        """Return one row for each number of labels and method, all with the same columns; what is not known is None.

        Means over seeds, with ``_low`` and ``_high`` for the ends of their intervals; gains with ``_verdict`` and the
        ``_reason`` why there is no interval. Accuracies and errors are shares, losses and information nats.
        """
        gains = {(c.labels, c.method, c.baseline, c.measure): c for c in self.transferability(confidence)}
        rows = []
        for labels, method in ((labels, method) for labels in self.labels for method in self.methods):
            if cell := list(self.cell(method, labels).values()):
                row: dict[str, Any] = {"labels": labels, "method": method, "seeds": len(cell)}
                for name in ("accuracy", "loss"):
                    row |= _ends(name, self.summary(method, labels, name, confidence))
                for key in ((b, m) for b in BASELINES for m in MEASURES):
                    row |= _gain("over_{}_{}".format(*key), gains.get((labels, method, *key)))
                rows.append(row | _means(cell))
        return rows

    def to_markdown(self, confidence: float = 0.95, *, figures: Iterable[str] = ()) -> str:
        """Return the report as Markdown; ``figures`` are names of PNG files beside it, without the suffix."""
        from lightning_taskinfo.transfer._text import to_markdown

        return to_markdown(self, confidence, figures)

    def to_terminal(self, confidence: float = 0.95, *, width: int | None = None) -> str:
        """Return the main table for a terminal of ``width`` columns: drawn by rich where it is installed."""
        from lightning_taskinfo.transfer._text import to_terminal

        return to_terminal(self, confidence, width)

    def to_html(self, confidence: float = 0.95) -> str:
        """Return the report as one page that needs nothing else: no script, no request, figures inside."""
        from lightning_taskinfo.transfer._html import to_html

        return to_html(self, confidence, self.figures(confidence))

    def figures(self, confidence: float = 0.95) -> dict[str, "Figure"]:
        """Return every figure for which there are numbers, by the name of its file; none without matplotlib."""
        from lightning_taskinfo.transfer.figures import draw_all

        return draw_all(self, confidence=confidence) if find_spec("matplotlib") else {}

    def save(self, folder: str | os.PathLike[str], *, confidence: float = 0.95) -> dict[str, Path]:
        """Write ``report.json``, ``report.md``, ``report.html`` and the figures, each of them whole or not at all.

        Args:
            folder: Made where missing; files of the same names are replaced, and figures of the report that was there
                before go.
            confidence: Probability that an interval covers.

        Returns:
            The written files by name, ``"report.json"`` last; without matplotlib there are no figures.

        Raises:
            ValueError: If ``folder`` is a file.
        """
        from lightning_taskinfo.transfer._html import to_html

        folder = make_folder(folder)
        figures = self.figures(confidence)
        for name, figure in figures.items():
            with atomic_write(folder / f"{name}.png") as file:
                figure.savefig(file, format="png", dpi=150)
            figure.set_layout_engine("none")  # it is laid out now, which takes longer than drawing
        pages = {
            "report.md": self.to_markdown(confidence, figures=figures),
            "report.html": to_html(self, confidence, figures),
        }
        for name, text in pages.items():
            with atomic_write(folder / name, "w") as file:
                file.write(text)
        pictures = [f"{name}.png" for name in figures]
        outdated = set(_pictures(folder)) - set(pictures)
        values = {"name": self.name, "configuration": self.configuration, "results": self.results}
        write_json(folder / "report.json", {**values, "figures": pictures})
        for name in outdated:
            (folder / name).unlink(missing_ok=True)
        return {name: folder / name for name in (*pictures, *pages, "report.json")}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TransferReport":
        """Return a report that :meth:`save` wrote.

        Args:
            path: The folder, or the JSON file in it.

        Raises:
            ValueError: If the file is damaged, or not a report.
        """
        path = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
        values = read_json(path)
        if not isinstance(values, dict) or values.keys() - {"figures"} != {"name", "configuration", "results"}:
            raise ValueError(f"{path}: not a report of a transfer experiment.")
        return cls(**{key: value for key, value in values.items() if key != "figures"})

    def same_as(self, other: "TransferReport") -> bool:
        """Whether both say the same apart from how long it took; the order of the results plays no part."""
        return (
            self.name == other.name
            and self.configuration == other.configuration
            and without_timings(self.results) == without_timings(other.results)
        )

    def _compare(self, method: str, labels: int, baseline: str, measure: Measure, confidence: float) -> Comparison:
        risks = [
            {seed: _risk(row, measure) for seed, row in self.cell(name, labels).items()} for name in (baseline, method)
        ]
        gain = paired_gain(*risks, confidence=confidence, bounds=GAIN_RANGES[measure])
        return Comparison(method, labels, baseline, measure, gain)


def _pictures(folder: Path) -> list[str]:
    """Return the names of the figures that the report in ``folder`` has, if there is one."""
    try:
        return [name for name in read_json(folder / "report.json")["figures"] if Path(name).name == name]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _risk(row: dict[str, Any], measure: Measure) -> float:
    return 1 - row["test"]["accuracy"] if measure == "error" else row["test"]["loss"]


def _ends(name: str, interval: Interval) -> dict[str, float | None]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _gain(name: str, comparison: Comparison | None) -> dict[str, Any]:
    if comparison is None:
        return {**_ends(name, Interval(None, None, None, 0)), f"{name}_verdict": None, f"{name}_reason": None}
    words = {f"{name}_verdict": comparison.verdict, f"{name}_reason": comparison.gain.reason}
    return {**_ends(name, comparison.gain), **words}


def _means(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Means over seeds of what is told beside the risks, over those that have it."""
    paths = {
        "validation_accuracy": ("validation", "accuracy"),
        "source_accuracy": ("source", "accuracy"),
        **{f"information_{key}": ("information", key, "total") for key in ("before", "after", "added")},
        **{f"fisher_trace_{key}": ("fisher_trace", key, "total") for key in ("before", "after")},
    }
    means = {name: _mean(_inside(row, path) for row in rows) for name, path in paths.items()}
    return {**means, "seconds": _mean(sum(row["seconds"].values()) if row["seconds"] else None for row in rows)}


def _inside(value: Any, path: Iterable[str]) -> Any:
    for key in path:
        value = None if value is None else value.get(key)
    return value


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
