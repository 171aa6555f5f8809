"""What a transfer found: one result for each method, number of labels and seed, and what a few seeds can say."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_taskinfo.functional.paired import student_quantile

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
        for name, numbers in {"test": self.test, "source": self.source or {"loss": 0.0}}.items():
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
    rows = plain([asdict(r) if isinstance(r, Result) else r for r in results], "results")
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
    return {r.key: json.dumps({**asdict(r), "seconds": None}, sort_keys=True) for r in results}


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
        values: One value per seed.
        confidence: Probability that the interval covers the true mean, for normal values.
        bounds: What the mean can be at all; the interval is cut there.
        scale: Size of the numbers from which the values were computed, to tell spread from
            rounding; by default that of the values.

    Returns:
        The interval, or the reason why there is none: fewer than two values, one that is not
        finite, or values that are all the same (from which Student's interval would have width 0,
        whatever their number).

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

    The same seed means the same split and the same labels, so what a lucky split gives to both
    cancels.

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
