"""Intervals over seeds or tasks, and Holm's correction for several comparisons."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

Interval = tuple[float, float, float]


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the mean with the ends of its Student interval."""
    x = np.asarray(values, dtype=float)
    reach = stats.t.ppf(0.5 + level / 2, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5
    return float(x.mean()), float(x.mean() - reach), float(x.mean() + reach)


def bootstrap_interval(
    statistic: Callable[..., float],
    *samples: Sequence[float],
    draws: int = 10_000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return a statistic of paired samples with the ends of its percentile interval over draws of whole pairs.

    Draws for which the statistic is not defined, such as a correlation with a constant, do not count.
    """
    columns = [np.asarray(values, dtype=float) for values in samples]
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(draws):
        chosen = generator.integers(len(columns[0]), size=len(columns[0]))
        found.append(statistic(*(column[chosen] for column in columns)))
    low, high = np.nanquantile(found, [0.5 - level / 2, 0.5 + level / 2])
    return float(statistic(*columns)), float(low), float(high)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation; not a number where one of the two is constant."""
    ranks = stats.rankdata(a), stats.rankdata(b)
    if min(r.std() for r in ranks) == 0:
        return float("nan")
    return float(np.corrcoef(*ranks)[0, 1])


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number: all that stay below α hold together with probability 1 - α."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    least = 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = least
    return corrected


def shown(interval: Interval, form: str = ".2f") -> str:
    """Return ``0.52 [0.31, 0.70]``."""
    middle, low, high = (format(value, form).replace("-", "−") for value in interval)
    return f"{middle} [{low}, {high}]"
