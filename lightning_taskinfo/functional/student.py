"""What a few seeds can say: a mean with Student's interval, a gain over a baseline, and a verdict."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_taskinfo.functional.paired import student_quantile

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
    """Return what an interval of a gain says.

    Args:
        low: Its lower end; ``None`` without an interval.
        high: Its upper end.

    Example:
        >>> verdict_of(0.1, 0.3), verdict_of(-0.1, 0.3)
        ('helps', 'cannot tell')
    """
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
