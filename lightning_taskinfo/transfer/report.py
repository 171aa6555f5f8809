"""The report of a transfer experiment: did it help, by how much, over how many seeds, and what did it cost in nats?"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from lightning_taskinfo._files import StrPath, atomic_write, make_folder, read_json, write_json
from lightning_taskinfo._ranges import check_counts, check_probability
from lightning_taskinfo._wandb import log_once
from lightning_taskinfo.functional.intervals import Interval, Verdict, mean_interval, paired_gain
from lightning_taskinfo.plotting import Panels
from lightning_taskinfo.transfer import render

BASELINES = ("scratch", "standard")
PICTURE = "accuracy.png"
HIGHER = "acc|auc|auroc|f1|precision|recall|r2"  # in names of metrics of which more is better
LOWER = "err|loss|mse|mae|nll|perplexity"  # and of which less is better
ENDS = ("low", "high")  # columns of an interval beside its mean
VERDICT = (*ENDS, "verdict", "reason")  # and those of a gain
CERTIFIED = {f"certified_{proof}": ("certificate", proof) for proof in render.PROOFS}

Numbers = dict[str, float]
Values = dict[str, Any]


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
    test: Numbers
    source: Numbers | None = None
    curves: list[Values] = field(default_factory=list)
    information: Values | None = None
    fisher_trace: Values | None = None
    overlap: Values | None = None
    certificate: Values | None = None
    seconds: Numbers = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_counts(labels=self.labels)
        kinds = {type(value) for value in (self.test or {}).values()}
        if not kinds or not kinds <= {int, float}:
            raise ValueError(f"`test` must hold numbers by name, got {self.test!r}.")
        accuracy = self.test.get("accuracy", 0)
        if not 0 <= accuracy <= 1:
            raise ValueError(f"`test` must hold an accuracy between 0 and 1, got {accuracy}.")

    def __str__(self) -> str:
        return f"({self.method}, {self.labels} labels, seed {self.seed})"


def _plain(argument: str, value: Any) -> Any:
    """A copy in JSON's types alone, as it would be read from a file."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{argument}` must hold plain JSON-like values: {error}.") from error


def _checked(results: Iterable[Result | Mapping[str, Any]]) -> list[Result]:
    """Plain copies of the results, one of each cell, all with the same numbers."""
    rows = [asdict(one) if isinstance(one, Result) else one for one in results]
    found: dict[str, Result] = {}
    names = None
    for row in _plain("results", rows):
        try:
            result = Result(**row)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`results` must hold results, or dicts like them: {error} This is one: {row}"
            ) from error
        names = names or result.test.keys()
        if result.test.keys() != names:
            raise ValueError(
                f"`test` must hold {', '.join(names)} in all results, got {', '.join(result.test)} in {result}."
            )
        if found.setdefault(str(result), result) is not result:
            raise ValueError(
                f"`results` must hold one result per method, number of labels and seed, got two {result}."
            )
    if not found:
        raise ValueError("`results` must hold at least one result, got none.")
    return [*found.values()]


@dataclass(frozen=True)
class Measure:
    """A number of the results that methods are compared by.

    Attributes:
        name: Its name: ``"accuracy"``, ``"error"``, ``"loss"``, or that of a metric of the user's, which
            is shown as it is.
        higher: Whether higher values are better.
        share: Whether it is a share, shown in percent.
    """

    name: str
    higher: bool
    share: bool

    @property
    def unit(self) -> str:
        """Unit of its differences."""
        return "points" if self.share else "nats" * (self.name == "loss")

    @property
    def scale(self) -> float:
        """What values are multiplied with where they are shown."""
        return 100.0 if self.share else 1.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value that can be at all."""
        if self.share:
            return 0.0, 1.0
        return 0.0 if self.name == "loss" else -math.inf, math.inf


def is_higher_better(metric: str, mode: Literal["min", "max"] | None) -> bool:
    """Whether more of a metric is better: what its mode says, or else its name.

    Raises:
        ValueError: If the mode is unknown, or there is none and the name does not say.

    Example:
        >>> is_higher_better("test_accuracy", None), is_higher_better("dice", "max")
        (True, True)
    """
    lower, higher = (re.search(names, metric.lower()) for names in (LOWER, HIGHER))
    if mode is None and (lower is None) != (higher is None):
        return lower is None
    if mode not in ("min", "max"):
        raise ValueError(f"`mode` must be 'min' or 'max' for the metric {metric!r}, got {mode!r}.")
    return mode == "max"


@dataclass(frozen=True)
class Comparison:
    r"""The gain :math:`T = R_\text{baseline} - R_\text{method}` on the target test set; positive is better.

    Attributes:
        method: What is compared.
        labels: Number of target labels that both had.
        baseline: ``"scratch"``, or ``"standard"`` (plain fine-tuning).
        measure: ``"accuracy"`` (a share of the samples), ``"loss"`` (nats), or the name of a metric.
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


@dataclass
class TransferReport:
    """Results of a transfer experiment, and everything that is said about them.

    Args:
        results: A :class:`Result` for each method, number of
            labels and seed, or a plain dict of its attributes.
        configuration: What decided the results, as JSON-like values.
        name: Title of the experiment.
        starts: Where the weights of each start come from, in words.
        confidence: Probability that an interval covers the true mean or gain. The intervals are not
            corrected for their number.

    Raises:
        ValueError: If there are no results, two of the same cell, one is not as above, or
            ``confidence`` is not between 0 and 1.

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
    configuration: Values = field(repr=False)
    name: str = "transfer"
    starts: dict[str, str] = field(default_factory=dict, repr=False)
    confidence: float = 0.95

    def __post_init__(self) -> None:
        check_probability(confidence=self.confidence)
        self.results = _checked(self.results)
        self.configuration = _plain("configuration", self.configuration)

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
    def measures(self) -> list[Measure]:
        """What methods are compared by: the numbers that the results have."""
        mode = self.configuration.get("mode")
        found = []
        for name in self.results[0].test:
            values = [row.test[name] for row in self.results]
            inside = all(0 <= value <= 1 for value in values if math.isfinite(value))
            share = name in ("accuracy", "error") and inside
            found.append(Measure(name, is_higher_better(name, mode), share))
        return found

    def cells(self) -> Iterator[tuple[int, str, list[Result]]]:
        """Yield number of labels, method and results of all seeds, where there are some."""
        for labels, method in product(self.labels, self.methods):
            if results := list(self.cell(method, labels).values()):
                yield labels, method, results

    def cell(self, method: str, labels: int) -> dict[int, Result]:
        """Return the results of one method and number of labels by seed; empty where there are none."""
        here = [row for row in self.results if (row.method, row.labels) == (method, labels)]
        return {row.seed: row for row in here}

    def transferability(self) -> list[Comparison]:
        r"""Return the gain of every method over training from scratch, and over plain fine-tuning.

        .. math:: T = R_\text{scratch} - R_\text{transfer}

        Paired over seeds, since the same seed means the same split. A baseline that is not among
        the results has no comparisons; one that lacks a number of labels or a seed has comparisons
        that say so.
        """
        found = []
        for baseline, (labels, method, _) in product(BASELINES, self.cells()):
            for measure in self.measures:
                gain = self._gain(method, labels, baseline, measure)
                if gain is not None:
                    found.append(Comparison(method, labels, baseline, measure.name, gain))
        return found

    def _gain(self, method: str, labels: int, baseline: str, measure: Measure) -> Interval | None:
        if baseline not in self.methods or method in ("scratch", baseline):
            return None
        compared = [self.values(name, labels, measure) for name in (baseline, method)]
        if measure.higher:  # a risk is one of which less is better
            compared.reverse()
        limit = 1.0 if measure.share else math.inf
        return paired_gain(*compared, confidence=self.confidence, bounds=(-limit, limit))

    def values(self, method: str, labels: int, measure: Measure) -> dict[int, float]:
        """Return what one of ``measures`` shows, such as the accuracy, by seed."""
        cell = self.cell(method, labels)
        return {seed: row.test[measure.name] for seed, row in cell.items()}

    def summary(self, method: str, labels: int, measure: Measure) -> Interval:
        """Return mean and interval over seeds of what one of ``measures`` shows."""
        values = [*self.values(method, labels, measure).values()]
        return mean_interval(values, confidence=self.confidence, bounds=measure.bounds)

    def table(self) -> list[Values]:
        """Return one row for each number of labels and method, all with the same columns; what is not known is None.

        Means over seeds, with ``_low`` and ``_high`` for the ends of their intervals; gains with
        ``_verdict`` and the ``_reason`` why there is no interval. Accuracies and errors are shares,
        losses and information nats.
        """
        rows = []
        for labels, method, results in self.cells():
            row = {"labels": labels, "method": method, "seeds": len(results)}
            for measure in self.measures:
                interval = self.summary(method, labels, measure)
                row |= _columns(measure.name, interval, ENDS)
            for baseline, measure in product(BASELINES, self.measures):
                gain = self._gain(method, labels, baseline, measure)
                row |= _columns(f"over_{baseline}_{measure.name}", gain, VERDICT)
            for name, (attribute, key) in (render.MEASURED | CERTIFIED).items():
                measured = [getattr(one, attribute) or {} for one in results]
                row[name] = _mean(one.get(key) for one in measured)
            row["seconds"] = _mean([sum(one.seconds.values()) or None for one in results])
            rows.append(row)
        return rows

    def to_markdown(self, picture: str = "") -> str:
        """Return the report as Markdown, with a picture of this name if there is one."""
        return render.to_markdown(self, picture)

    def to_terminal(self) -> str:
        """Return the main table, and the findings as sentences."""
        return render.to_terminal(self)

    __str__ = to_terminal

    def plot(self) -> Panels:
        """Draw what was measured, mean and interval of every method, and return figure and panels."""
        return render.plot_results(self)

    def save(self, folder: StrPath) -> dict[str, Path]:
        """Write ``report.json``, ``report.md`` and the figure, each of them whole or not at all.

        Args:
            folder: Made where missing; files of the same names are replaced.

        Returns:
            The written files by name, ``"report.json"`` last; without matplotlib there is no
            figure.

        Raises:
            ValueError: If ``folder`` is a file.
        """
        folder = make_folder(folder)
        picture = PICTURE if find_spec("matplotlib") else ""
        if picture:
            with atomic_write(folder / picture) as file:
                self.plot()[0].savefig(file, format="png")
        with atomic_write(folder / "report.md", "w") as file:
            file.write(self.to_markdown(picture))
        write_json(folder / "report.json", asdict(self))
        names = [picture, "report.md", "report.json"]
        return {name: folder / name for name in names if name}

    @classmethod
    def load(cls, path: StrPath) -> "TransferReport":
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
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"{path}: not a report of a transfer experiment.") from error


def _columns(name: str, interval: Interval | None, parts: Iterable[str]) -> Values:
    found = {f"{name}_{part}": getattr(interval, part, None) for part in parts}
    return {name: getattr(interval, "mean", None), **found}


def _mean(values: Iterable[Any]) -> float | None:
    """Mean of those that are known: of totals that stand with their layers, and of the last of several layers."""
    known = []
    for value in values:
        if isinstance(value, dict | list):
            value = value["total"] if isinstance(value, dict) else value[-1]
        if value is not None:
            known.append(value)
    return fmean(known) if known else None


def log_to_wandb(
    report: TransferReport,
    *,
    project: str = "lightning-taskinfo",
    group: str | None = None,
    mode: Literal["online", "offline"] | None = None,
    folder: StrPath = ".",
) -> Path:
    """Make a run that holds the table, the figures as images, and the numbers as scalars.

    The numbers are called ``taskinfo/<method>/50_labels/accuracy``. Another run that is open
    meanwhile stays as it is.

    Args:
        report: What to log.
        project: Project in W&B.
        group: Group of the experiment's runs; the name of the report by default.
        mode: ``"online"``, or ``"offline"`` (to look at with ``wandb leet``); what W&B is set to by
            default.
        folder: Folder in which W&B makes its folder ``wandb``.

    Returns:
        The run's folder.

    Example::

        run = log_to_wandb(transfer(Classifier, target, starts=starts), mode="offline")
        print(f"wandb leet {run}")
    """
    import wandb

    make_folder(folder)  # or W&B writes to a temporary one
    rows = report.table()
    scalars = {}
    for row in rows:
        for name, value in row.items():
            if name != "labels" and isinstance(value, int | float):
                scalars[f"{row['method']}/{row['labels']}_labels/{name}"] = value
    figures = {"figures/accuracy": report.plot()[0]} if find_spec("matplotlib") else {}
    cells = [list(row.values()) for row in rows]
    with wandb.init(
        project=project,
        group=group or report.name,
        name=f"{report.name}: summary",
        job_type="summary",
        config=report.configuration,
        dir=folder,
        mode=mode,
        reinit="create_new",
        settings=wandb.Settings(console="off"),
    ) as run:
        tables = {"results": (list(rows[0]), cells)}
        log_once(run, "", scalars=scalars, figures=figures, tables=tables)
        return Path(run.dir).parent
