"""The report of a transfer experiment: did it help, by how much, over how many seeds, and what did it cost in nats?"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_taskinfo._files import atomic_write, make_folder, read_json, write_json
from lightning_taskinfo.functional.intervals import Interval, Verdict, mean_interval, paired_gain
from lightning_taskinfo.transfer import html, render
from lightning_taskinfo.transfer.figures import draw_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = ("scratch", "standard")
SHARES = (
    r"acc|err|auc|auroc|f1|precision|recall"  # metrics between 0 and 1, if all their values are
)
HIGHER = r"acc|auc|auroc|f1|precision|recall|r2|score|likelihood"  # metrics of which more is better


Key = tuple[str, int, int]


@dataclass(frozen=True)
class Result:
    """What came out for one method, number of labels and seed, in plain values.

    Attributes:
        method: What was trained; ``"scratch"`` is the baseline.
        labels: Number of target labels.
        seed: The seed.
        test: Numbers on the target test set by name: ``accuracy``, and ``loss`` in nats, or another
            metric.
        source: The same on the source's test set.
        curves: One dict per epoch, with its ``stage``.
        information: Information in the weights, whole and by layer, before and after fine-tuning,
            and added by it.
        fisher_trace: Trace of the Fisher information, in the same way.
        overlap: Share of the target labels that the features of each layer miss.
        certificate: Bounds on the true error, where they were asked for.
        seconds: Seconds by stage.
    """

    method: str
    labels: int
    seed: int
    test: dict[str, float]
    source: dict[str, float] | None = None
    curves: list[dict[str, Any]] = field(default_factory=list)
    information: dict[str, Any] | None = None
    fisher_trace: dict[str, Any] | None = None
    overlap: dict[str, Any] | None = None
    certificate: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise ValueError(f"`method` must be a name, got {self.method!r}.")
        for name, least in (("labels", 1), ("seed", 0)):
            value = getattr(self, name)
            if not _is(value, int) or value < least:
                raise ValueError(
                    f"`{name}` must be a whole number of at least {least}, got {value!r} in {self}."
                )
        checked = {"test": self.test}
        if self.source:
            checked["source"] = self.source
        for name, numbers in checked.items():
            values = numbers.values() if isinstance(numbers, dict) else ()
            if not values or not all(_is(value, int | float) for value in values):
                raise ValueError(f"`{name}` must hold numbers by name, got {numbers!r} in {self}.")
            if not 0 <= numbers.get("accuracy", 0) <= 1:
                raise ValueError(
                    f"`{name}` must hold an accuracy between 0 and 1, got {numbers['accuracy']} in {self}."
                )

    @property
    def key(self) -> Key:
        """What it is a result of: method, number of labels, seed."""
        return self.method, self.labels, self.seed

    def __str__(self) -> str:
        return f"({self.method}, {self.labels} labels, seed {self.seed})"


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def plain(value: Any, argument: str) -> Any:
    """Return a copy of ``value`` in JSON's types alone, as it would be read from a file.

    Raises:
        ValueError: If it holds anything else, such as a tensor.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{argument}` must hold plain JSON-like values: {error}.") from error


def checked_results(results: Iterable[Result | Mapping[str, Any]]) -> tuple[Result, ...]:
    """Return plain copies of the results.

    Raises:
        ValueError: If there is none, two have the same key, or one has a key too many, too few
            or of a wrong kind.
    """
    given = []
    for result in results:
        given.append(asdict(result) if isinstance(result, Result) else result)
    rows = plain(given, "results")
    try:
        found = tuple(Result(**row) for row in rows)
    except TypeError as error:
        raise ValueError(f"`results` must hold results, or dicts like them: {error}.") from error
    if not found:
        raise ValueError("`results` must hold at least one result, got none.")
    seen: set[Key] = set()
    for result in found:
        if result.key in seen:
            raise ValueError(
                f"`results` must hold one result per method, number of labels and seed, got two {result}."
            )
        seen.add(result.key)
        if result.test.keys() != found[0].test.keys():
            raise ValueError(
                f"`test` must hold the same numbers in all results, got {', '.join(result.test)} in {result} and "
                f"{', '.join(found[0].test)} in {found[0]}."
            )
    return found


def without_timings(results: Iterable[Result]) -> dict[Key, str]:
    """Return each result without its timings by its key, as text: NaN equals NaN there, and order plays no part."""
    texts = {}
    for result in results:
        values = {**asdict(result), "seconds": None}
        texts[result.key] = json.dumps(values, sort_keys=True)
    return texts


@dataclass(frozen=True)
class Measure:
    """What methods are compared by.

    Attributes:
        name: Name of the gain: ``"error"``, ``"loss"``, or that of a metric.
        value: Name of the number that is shown beside it, in ``test``: the accuracy for the error.
        unit: Unit of the gain.
        share: Whether it is a share, shown in percent.
        higher: Whether higher values are better.
    """

    name: str
    value: str
    unit: str
    share: bool = False
    higher: bool = False

    @property
    def scale(self) -> float:
        """What values are multiplied with where they are shown."""
        return 100.0 if self.share else 1.0

    @property
    def title(self) -> str:
        """Name and unit of the value."""
        if self.share:
            return f"{self.value}, %"
        return f"{self.value}, {self.unit}" if self.unit else self.value

    def risk(self, test: Mapping[str, float]) -> float:
        """Return a number of which less is better."""
        if self.higher:
            return -test[self.value]
        return test[self.value]


CLASSIFIED = (
    Measure("error", "accuracy", "points", share=True, higher=True),
    Measure("loss", "loss", "nats"),
)


@dataclass(frozen=True)
class Comparison:
    r"""The gain :math:`T = R_\text{baseline} - R_\text{method}` on the target test set; positive is better.

    Attributes:
        method: What is compared.
        labels: Number of target labels that both had.
        baseline: ``"scratch"``, or ``"standard"`` (plain fine-tuning).
        measure: ``"error"`` (a share of the samples), ``"loss"`` (nats), or the name of a metric.
        gain: Mean over the seeds that both have, with its interval.
    """

    method: str
    labels: int
    baseline: str
    measure: str
    gain: Interval

    @property
    def verdict(self) -> Verdict:
        """``"helps"``, ``"hurts"`` or ``"cannot tell"``."""
        return self.gain.verdict


@dataclass(frozen=True)
class TransferReport:
    """Results of a transfer experiment, and everything that is said about them.

    Args:
        results: A :class:`Result` for each method, number of
            labels and seed, or a plain dict of its attributes.
        configuration: What decided the results, as JSON-like values.
        name: Title of the experiment.
        starts: Where the weights of each start come from, in words.

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

    results: Sequence[Result] = field(repr=False)
    configuration: dict[str, Any] = field(repr=False)
    name: str = "transfer"
    starts: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.configuration, dict):
            raise ValueError(f"`configuration` must be a dict, got {self.configuration!r}.")
        object.__setattr__(self, "results", checked_results(self.results))
        object.__setattr__(self, "configuration", plain(self.configuration, "configuration"))
        object.__setattr__(self, "starts", plain(self.starts, "starts"))

    @property
    def methods(self) -> list[str]:
        """The methods: the two baselines first where they are there, the others as they came."""
        names = list(dict.fromkeys(row.method for row in self.results))
        return sorted(names, key=(*BASELINES, *names).index)

    @property
    def labels(self) -> list[int]:
        """The numbers of target labels, from few to many."""
        return sorted({row.labels for row in self.results})

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What methods are compared by: error and loss of classifiers, or the metric that the results have."""
        names = list(self.results[0].test)
        if {*names} >= {"accuracy", "loss"}:
            return CLASSIFIED
        return tuple(self._measure(name) for name in names)

    def _measure(self, name: str) -> Measure:
        values = [row.test[name] for row in self.results]
        inside = 0 <= min(values) <= max(values) <= 1
        share = bool(re.search(SHARES, name.lower())) and inside
        higher = bool(re.search(HIGHER, name.lower()))
        if mode := self.configuration.get("mode"):
            higher = mode == "max"
        return Measure(name, name, "points" if share else "", share, higher)

    def cells(self) -> Iterator[tuple[int, str, list[Result]]]:
        """Yield number of labels, method and results of all seeds, where there are some."""
        for labels in self.labels:
            for method in self.methods:
                if results := list(self.cell(method, labels).values()):
                    yield labels, method, results

    def cell(self, method: str, labels: int) -> dict[int, Result]:
        """Return the results of one method and number of labels by seed; empty where there are none."""
        seeds = {}
        for row in sorted(self.results, key=lambda row: row.seed):
            if row.method == method and row.labels == labels:
                seeds[row.seed] = row
        return seeds

    def transferability(self, confidence: float = 0.95) -> list[Comparison]:
        r"""Return the gain of every method over training from scratch, and over plain fine-tuning.

        .. math:: T = R_\text{scratch} - R_\text{transfer}

        Paired over seeds, since the same seed means the same split. A baseline that is not among
        the results has no comparisons; one that lacks a number of labels or a seed has comparisons
        that say so.

        Args:
            confidence: Probability that an interval covers the true gain. The intervals are not
                corrected for their number.

        Raises:
            ValueError: If ``confidence`` is not between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"`confidence` must be between 0 and 1, got {confidence}.")
        found = []
        baselines = [name for name in BASELINES if name in self.methods]
        for baseline, labels, method in product(baselines, self.labels, self.methods):
            if method in ("scratch", baseline) or not self.cell(method, labels):
                continue
            for measure in self.measures:
                found.append(self._compare(method, labels, baseline, measure, confidence))
        return found

    def summary(self, method: str, labels: int, name: str, confidence: float = 0.95) -> Interval:
        """Return mean and interval over seeds of a number in ``test``, such as ``"accuracy"``."""
        cell = self.cell(method, labels)
        values = [row.test[name] for row in cell.values()]
        share = any(measure.share for measure in self.measures if measure.value == name)
        low = 0.0 if share or name == "loss" else -math.inf
        bounds = (low, 1.0 if share else math.inf)
        return mean_interval(values, confidence=confidence, bounds=bounds)

    def table(self, confidence: float = 0.95) -> list[dict[str, Any]]:
        """Return one row for each number of labels and method, all with the same columns; what is not known is None.

        Means over seeds, with ``_low`` and ``_high`` for the ends of their intervals; gains with
        ``_verdict`` and the ``_reason`` why there is no interval. Accuracies and errors are shares,
        losses and information nats.
        """
        gains = {}
        for c in self.transferability(confidence):
            gains[c.labels, c.method, c.baseline, c.measure] = c.gain
        rows = []
        for labels, method, results in self.cells():
            row: dict[str, Any] = {"labels": labels, "method": method, "seeds": len(results)}
            for measure in self.measures:
                value = measure.value
                row |= _ends(value, self.summary(method, labels, value, confidence))
            for baseline, measure in product(BASELINES, self.measures):
                gain = gains.get((labels, method, baseline, measure.name))
                row |= _gain(f"over_{baseline}_{measure.name}", gain)
            rows.append(row | _means(results))
        return rows

    def to_markdown(self, confidence: float = 0.95, *, figures: Iterable[str] = ()) -> str:
        """Return the report as Markdown; ``figures`` are names of PNG files beside it, without the suffix."""
        return render.to_markdown(self, confidence, figures)

    def __str__(self) -> str:
        return self.to_terminal()

    def to_terminal(self, confidence: float = 0.95, *, width: int | None = None) -> str:
        """Return the main table for a terminal of ``width`` columns: drawn by rich where it is installed."""
        return render.to_terminal(self, confidence, width)

    def to_html(self, confidence: float = 0.95) -> str:
        """Return the report as one page that needs nothing else: no script, no request, figures inside."""
        return html.to_html(self, confidence, self.figures(confidence))

    def figures(self, confidence: float = 0.95) -> dict[str, "Figure"]:
        """Return every figure for which there are numbers, by the name of its file; none without matplotlib."""
        return draw_all(self, confidence=confidence) if find_spec("matplotlib") else {}

    def save(self, folder: str | os.PathLike[str], *, confidence: float = 0.95) -> dict[str, Path]:
        """Write ``report.json``, ``report.md``, ``report.html`` and the figures, each of them whole or not at all.

        Args:
            folder: Made where missing; files of the same names are replaced, and figures of the
                report that was there before go.
            confidence: Probability that an interval covers.

        Returns:
            The written files by name, ``"report.json"`` last; without matplotlib there are no
            figures.

        Raises:
            ValueError: If ``folder`` is a file.
        """
        folder = make_folder(folder)
        figures = self.figures(confidence)
        for name, figure in figures.items():
            with atomic_write(folder / f"{name}.png") as file:
                figure.savefig(file, format="png", dpi=150)
            figure.set_layout_engine("none")  # it is laid out now, which takes longer than drawing
        pages = {
            "report.md": self.to_markdown(confidence, figures=figures),
            "report.html": html.to_html(self, confidence, figures),
        }
        for name, text in pages.items():
            with atomic_write(folder / name, "w") as file:
                file.write(text)
        pictures = [f"{name}.png" for name in figures]
        outdated = set(_pictures(folder)) - set(pictures)
        rows = [asdict(result) for result in self.results]
        values = {"name": self.name, "configuration": self.configuration, "starts": self.starts}
        write_json(folder / "report.json", {**values, "results": rows, "figures": pictures})
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
        path = Path(path)
        if path.is_dir():
            path = path / "report.json"
        values = read_json(path)
        names = {field.name for field in fields(cls)}
        # A report of an earlier version has no starts.
        is_report = isinstance(values, dict) and {*values, "starts"} - {"figures"} == names
        if not is_report:
            raise ValueError(f"{path}: not a report of a transfer experiment.")
        values.pop("figures", None)
        return cls(**values)

    def same_as(self, other: "TransferReport") -> bool:
        """Whether both say the same apart from how long it took; the order of the results plays no part."""
        return (
            self.name == other.name
            and self.configuration == other.configuration
            and self.starts == other.starts
            and without_timings(self.results) == without_timings(other.results)
        )

    def _compare(
        self,
        method: str,
        labels: int,
        baseline: str,
        measure: Measure,
        confidence: float,
    ) -> Comparison:
        def risks(name: str) -> dict[int, float]:
            cell = self.cell(name, labels)
            return {seed: measure.risk(row.test) for seed, row in cell.items()}

        limit = 1.0 if measure.share else math.inf
        bounds = (-limit, limit)
        before = risks(baseline)
        after = risks(method)
        gain = paired_gain(before, after, confidence=confidence, bounds=bounds)
        return Comparison(method, labels, baseline, measure.name, gain)


def _pictures(folder: Path) -> list[str]:
    """Return the names of the figures that the report in ``folder`` has, if there is one."""
    try:
        names = read_json(folder / "report.json")["figures"]
        return [name for name in names if Path(name).name == name]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _ends(name: str, interval: Interval) -> dict[str, float | None]:
    return {
        name: interval.mean,
        f"{name}_low": interval.low,
        f"{name}_high": interval.high,
    }


def _gain(name: str, gain: Interval | None) -> dict[str, Any]:
    if gain is None:
        parts = ("", "_low", "_high", "_verdict", "_reason")
        return dict.fromkeys(f"{name}{part}" for part in parts)
    values: dict[str, Any] = dict(_ends(name, gain))
    values[f"{name}_verdict"] = gain.verdict
    values[f"{name}_reason"] = gain.reason
    return values


MEANS = {  # columns of means over seeds: where a result has them
    "source_accuracy": ("source", "accuracy"),
    **{f"information_{key}": ("information", key, "total") for key in ("before", "after", "added")},
    **{f"fisher_trace_{key}": ("fisher_trace", key, "total") for key in ("before", "after")},
    **{f"certified_{key}": ("certificate", key) for key in ("stochastic", "network", "test_set")},
}


def _means(results: Sequence[Result]) -> dict[str, float | None]:
    """Means over seeds of what is told beside the risks, over those that have it."""
    means = {}
    for name, path in MEANS.items():
        values = [_inside(vars(one), path) for one in results]
        means[name] = _mean(values)
    seconds = [sum(one.seconds.values()) for one in results]
    means["seconds"] = _mean([each or None for each in seconds])
    return means


def _inside(value: Any, path: Iterable[str]) -> Any:
    for key in path:
        value = None if value is None else value.get(key)
    return value


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
