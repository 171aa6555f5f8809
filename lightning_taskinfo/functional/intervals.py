"""Intervals for shares, for differences of two losses on the same samples, and for means over seeds.

Shares have the interval of Wilson, differences and means that of Student.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_taskinfo._ranges import check_counts, check_probability

Ends = tuple[float, float]
EVERYTHING = (-math.inf, math.inf)


def wilson_interval(
    share: float,
    n: int,
    confidence: float = 0.95,
) -> Ends:
    r"""Interval of Wilson for a share of ``n`` samples.

    .. math:: \frac{p + \frac{z^2}{2n}}{1 + \frac{z^2}{n}}
        \pm \frac{z}{1 + \frac{z^2}{n}} \sqrt{\frac{p (1 - p)}{n} + \frac{z^2}{4 n^2}}

    It has a width where the share is 0 or 1, unlike the normal one.

    Args:
        share: The share :math:`p`, between 0 and 1.
        n: Number of samples.
        confidence: Probability that the interval covers.

    Returns:
        The two ends.

    Example:
        >>> [round(end, 3) for end in wilson_interval(0.0, 20)]
        [0.0, 0.161]

    References:
        Wilson, *Probable inference, the law of succession, and statistical inference*, JASA 1927.
    """
    z = normal_quantile(confidence)
    scale = 1 + z**2 / n
    middle = (share + z**2 / (2 * n)) / scale
    variance = share * (1 - share) / n + z**2 / (4 * n**2)
    reach = z / scale * variance**0.5
    return max(0.0, middle - reach), min(1.0, middle + reach)


def paired_interval(
    first: Tensor,
    second: Tensor,
    confidence: float = 0.95,
) -> tuple[float, float, float]:
    r"""Mean difference of two losses on the same samples, with its interval.

    .. math:: \bar d \pm t_{n-1}\, s_d / \sqrt n

    It is Student's, from the standard deviation of the differences :math:`d`.

    Args:
        first: Losses, shape ``[n]``.
        second: Losses on the same samples, shape ``[n]``.
        confidence: Probability that the interval covers.

    Returns:
        Lower end, mean of ``first - second``, upper end.

    Example:
        >>> from torch import tensor, zeros
        >>> a, b = tensor([1.0, 1, 1, 0, 0]), zeros(5)
        >>> [round(value, 2) for value in paired_interval(a, b)]
        [-0.08, 0.6, 1.28]
    """
    difference = (first - second).double()
    n = len(difference)
    mean = difference.mean().item()
    reach = student_quantile(confidence, n - 1) * difference.std().item() / n**0.5
    return mean - reach, mean, mean + reach


def normal_quantile(confidence: float) -> float:
    """Return the number of standard errors that a normal interval reaches to either side.

    Args:
        confidence: Probability that the interval covers.

    Raises:
        ValueError: If it is not between 0 and 1.

    Example:
        >>> round(normal_quantile(0.95), 2)
        1.96
    """
    check_probability(confidence=confidence)
    return statistics.NormalDist().inv_cdf(0.5 + 0.5 * confidence)


def student_quantile(
    confidence: float,
    degrees: int,
) -> float:
    r"""Return the number of standard errors that Student's interval reaches to either side.

    The :math:`t` with :math:`P(|T_\nu| \le t) = c`, found by bisection of the angle
    :math:`\theta = \arctan(t /
    \sqrt\nu)` in the finite sums that the probability is for whole :math:`\nu`.

    Args:
        confidence: The probability :math:`c`.
        degrees: Degrees of freedom :math:`\nu`, one less than the number of values.

    Raises:
        ValueError: If ``confidence`` is not between 0 and 1, or ``degrees`` is below 1.

    Example:
        >>> round(student_quantile(0.5, 1), 6), round(student_quantile(0.95, 4), 3)
        (1.0, 2.776)

    References:
        Abramowitz and Stegun, *Handbook of Mathematical Functions*, 26.7.3 and 26.7.4.
    """
    check_probability(confidence=confidence)
    check_counts(degrees=degrees)
    low, high = 0.0, math.pi / 2
    middle = 0.5 * (low + high)
    while low < middle < high:
        if _central_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
        middle = 0.5 * (low + high)
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(
    theta: float,
    degrees: int,
) -> float:
    """``P(|T| <= sqrt(degrees) tan(theta))``."""
    odd = degrees % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for k in range(1, degrees - odd, 2):
        total += term
        term *= math.cos(theta) ** 2 * (k + odd) / (k + odd + 1)
    total *= math.sin(theta)
    return 2 / math.pi * (theta + total) if odd else total


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


def verdict_of(
    low: float | None,
    high: float | None,
) -> Verdict:
    """Return what an interval of a gain says.

    Args:
        low: Its lower end; ``None`` without an interval.
        high: Its upper end.

    Example:
        >>> verdict_of(0.1, 0.3), verdict_of(-0.1, 0.3)
        ('helps', 'cannot tell')
    """
    if low is not None and low > 0:
        return "helps"
    if high is not None and high < 0:
        return "hurts"
    return "cannot tell"


def mean_interval(
    values: Sequence[float],
    *,
    confidence: float = 0.95,
    bounds: Ends = EVERYTHING,
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
    if spread <= ROUNDING * (scale or max(map(abs, values))):
        return Interval(mean, None, None, n, "all seeds gave the same")
    reach = student_quantile(confidence, n - 1) * spread / math.sqrt(n)
    smallest, largest = bounds
    return Interval(mean, max(smallest, mean - reach), min(largest, mean + reach), n)


def paired_gain(
    baseline: Mapping[int, float],
    method: Mapping[int, float],
    *,
    confidence: float = 0.95,
    bounds: Ends = EVERYTHING,
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
    scale = max(max(abs(baseline[seed]), abs(method[seed])) for seed in seeds)
    gains = [baseline[seed] - method[seed] for seed in seeds]
    return mean_interval(gains, confidence=confidence, bounds=bounds, scale=scale)
