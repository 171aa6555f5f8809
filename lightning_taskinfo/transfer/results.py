"""What a transfer found: one result for each method, number of labels and seed, and what a few seeds can say."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from lightning_taskinfo.functional.paired import student_quantile

Cell = tuple[str, int, int]


@dataclass(frozen=True)
class Result:
    """What came out for one method, number of labels and seed, in plain values.

    Attributes:
        method: What was trained; ``"scratch"`` is the baseline.
        labels: Number of target labels.
        seed: The seed.
        test: Numbers on the target test set by name: ``accuracy``, and ``loss`` in nats, or another metric.
        validation: The same on validation samples.
        source: The same on the source's test set.
        curves: One dict an epoch, with its ``stage``.
        information: Information in the weights, whole and by layer, before and after fine-tuning, and added by it.
        fisher_trace: Trace of the Fisher information, in the same way.
        overlap: Share of the target labels that the features of each layer miss.
        epochs: Epochs by stage.
        seconds: Seconds by stage.
    """

    method: str
    labels: int
    seed: int
    test: dict[str, float]
    validation: dict[str, float] | None = None
    source: dict[str, float] | None = None
    curves: list[dict[str, Any]] = field(default_factory=list)
    information: dict[str, Any] | None = None
    fisher_trace: dict[str, Any] | None = None
    overlap: dict[str, Any] | None = None
    epochs: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        """What it is a result of: method, number of labels, seed."""
        return self.method, self.labels, self.seed

    def __str__(self) -> str:
        return f"({self.method}, {self.labels} labels, seed {self.seed})"


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
        ValueError: If there is none, two are of the same cell, or one has a key too many, too few or of a wrong kind.
    """
    given = [asdict(result) if isinstance(result, Result) else result for result in results]
    found = tuple(_checked(row) for row in plain(given, "results"))
    if not found:
        raise ValueError("`results` must hold at least one result, got none.")
    seen: set[Cell] = set()
    for result in found:
        if result.cell in seen:
            raise ValueError(
                f"`results` must hold one result a method, number of labels and seed, got two {result}."
            )
        seen.add(result.cell)
        if result.test.keys() != found[0].test.keys():
            raise ValueError(
                f"`test` must hold the same numbers in all results, got {', '.join(result.test)} in {result} and "
                f"{', '.join(found[0].test)} in {found[0]}."
            )
    return found


def without_timings(results: Iterable[Result]) -> dict[Cell, str]:
    """Return each result without its timings by its cell, as text: NaN equals NaN there, and order plays no part."""
    return {r.cell: json.dumps({**asdict(r), "seconds": None}, sort_keys=True) for r in results}


def _checked(row: Any) -> Result:
    if not isinstance(row, dict):
        raise ValueError(f"`results` must hold dicts, got {row!r}.")
    names = [part.name for part in fields(Result)]
    if missing := [name for name in ("method", "labels", "seed", "test") if name not in row]:
        raise ValueError(
            f"`results` must have method, labels, seed and test, got none for {missing[0]!r}."
        )
    if unknown := [name for name in row if name not in names]:
        raise ValueError(f"`results` may have the keys {names}, got {unknown[0]!r}.")
    required = ("method", "labels", "seed", "test")
    result = Result(
        **{name: value for name, value in row.items() if value is not None or name in required}
    )
    if not isinstance(result.method, str) or not result.method:
        raise ValueError(f"`method` must be a name, got {result.method!r}.")
    for name, least in (("labels", 1), ("seed", 0)):
        value = getattr(result, name)
        if not _is(value, int) or value < least:
            raise ValueError(
                f"`{name}` must be a whole number of at least {least}, got {value!r} in {result}."
            )
    for part in ("test", "validation", "source"):
        if part == "test" or getattr(result, part) is not None:
            _check_risk(result, part)
    for point in result.curves:
        if not isinstance(point, dict) or not {"stage", "epoch"} <= point.keys():
            raise ValueError(
                f"`curves` must have a stage and an epoch at each point, got {point} in {result}."
            )
    _check_measurements(result)
    return result


def _check_risk(result: Result, part: str) -> None:
    given = getattr(result, part)
    values = given if isinstance(given, dict) else {}
    if not values or not all(_is(value, (int, float)) for value in values.values()):
        raise ValueError(f"`{part}` must hold numbers by name, got {given!r} in {result}.")
    if not 0 <= values.get("accuracy", 0) <= 1:
        raise ValueError(
            f"`{part}` must hold an accuracy between 0 and 1, got {values['accuracy']} in {result}."
        )


def _check_measurements(result: Result) -> None:
    for part in ("information", "fisher_trace"):
        for moment, values in (getattr(result, part) or {}).items():
            if values is not None and not (
                isinstance(values, dict) and {"total", "layers"} <= values.keys()
            ):
                raise ValueError(
                    f"`{part}` must hold total and layers for {moment!r}, got {values!r} in {result}."
                )
    overlap = result.overlap
    if (
        overlap
        and len({len(overlap.get(key, ())) for key in ("layers", "outside", "standard_error")}) != 1
    ):
        raise ValueError(
            f"`overlap` must hold as many shares and standard errors as layers, got {overlap} in {result}."
        )


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


Verdict = Literal["helps", "hurts", "cannot tell"]
ROUNDING = 1e-6  # relative: results come from float32


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, with Student's interval where there is one.

    Attributes:
        mean: The mean; None without values.
        low: Lower end; None without an interval.
        high: Upper end; None without an interval.
        n: Number of seeds.
        reason: Why there is no interval; empty where there is one.
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """What the interval says of a gain: ``"helps"`` above 0, ``"hurts"`` below, ``"cannot tell"`` otherwise."""
        return verdict_of(self.low, self.high)


def verdict_of(low: float | None, high: float | None) -> Verdict:
    """Return what an interval of a gain says."""
    if low is None or high is None:
        return "cannot tell"
    return "helps" if low > 0 else "hurts" if high < 0 else "cannot tell"


def mean_interval(
    values: Sequence[float],
    *,
    confidence: float = 0.95,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    scale: float | None = None,
) -> Interval:
    r"""Return the mean of independent values with Student's interval :math:`\bar v \pm t_{n-1}\, s / \sqrt n`.

    Args:
        values: One value a seed.
        confidence: Probability that the interval covers the true mean, for normal values.
        bounds: What the mean can be at all; the interval is cut there.
        scale: Size of the numbers from which the values were computed, to tell spread from rounding; by default
            that of the values.

    Returns:
        The interval, or the reason why there is none: fewer than two values, one that is not finite, or values that
        are all the same (from which Student's interval would have width 0, whatever their number).

    Example:
        >>> interval = mean_interval([0.0, 2.0], confidence=0.5)
        >>> round(interval.mean, 6), round(interval.low, 6), round(interval.high, 6)
        (1.0, 0.0, 2.0)
    """
    n = len(values)
    if n == 0:
        return Interval(None, None, None, 0, "no seed")
    if not all(map(math.isfinite, values)):
        return Interval(sum(values) / n, None, None, n, "a value is not finite")
    mean = statistics.fmean(values)
    if n == 1:
        return Interval(mean, None, None, n, "one seed")
    spread = statistics.stdev(values)
    if spread <= ROUNDING * (max(map(abs, values)) if scale is None else scale):
        return Interval(mean, None, None, n, "all seeds gave the same")
    reach = student_quantile(confidence, n - 1) * spread / math.sqrt(n)
    return Interval(mean, max(bounds[0], mean - reach), min(bounds[1], mean + reach), n)


def paired_gain(
    baseline: Mapping[int, float],
    method: Mapping[int, float],
    *,
    confidence: float = 0.95,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Interval:
    r"""Return the gain :math:`T = R_\text{baseline} - R_\text{method}`, its interval from differences seed by seed.

    The same seed means the same split and the same labels, so what a lucky split gives to both cancels.

    Args:
        baseline: Risk of the baseline by seed.
        method: Risk of the method by seed; seeds that only one of them has are left out.
        confidence: Probability that the interval covers the true gain, for normal differences.
        bounds: What the gain can be at all; the interval is cut there.

    Example:
        >>> paired_gain({0: 0.5, 1: 0.25}, {0: 0.25, 7: 0.0})
        Interval(mean=0.25, low=None, high=None, n=1, reason='one seed')
    """
    seeds = [seed for seed in baseline if seed in method]
    if not seeds:
        return Interval(None, None, None, 0, "no seed in common")
    risks = [abs(risk[seed]) for risk in (baseline, method) for seed in seeds]
    gains = [baseline[seed] - method[seed] for seed in seeds]
    return mean_interval(gains, confidence=confidence, bounds=bounds, scale=max(risks))
