"""Do Lautum and mutual information help transfer between classes of CIFAR with few labels? P4, table 3.

Registered before the first run.

**Claim.** CIFAR-10 to ten classes of CIFAR-100 with 100, 200 and 500 labels: Lautum information lifts the accuracy of
plain fine-tuning (39.9, 52.8, 64.5 %) by 6.5, 7.9 and 6.1 points, mutual information by 13.2, 10.4 and 8.3.

**Settings.** CIFAR-100 is not at hand: the first five classes of CIFAR-10 to the other five, with 50, 100 and 250
labels, as many per class as the paper has. The paper network of ``semi_supervised.py``, with all that is said there
of its training, and with the weights that were chosen there, for want of time for a search. Plain fine-tuning and the
two methods, seeds 0 to 4.

**Order.** 50 labels, seed by seed, then 100, then 250. It is run when the paper network has its ten seeds with 50
labels, with and without batch norm, in ``semi_supervised.py``.

**Test.** The gain of a seed is that over plain fine-tuning, averaged over those numbers of labels for which all
seeds of all three methods are finished; the paper's points are averaged over the same numbers. Student's t over
seeds, two-sided, Holm over the two methods. *Reproduced* if both help by at least half of the paper's points; *in
part* if one of them helps; *not reproduced, decided* if none does and the upper ends of both intervals are below half
of the paper's points; else *undecided*.

**Changed after a look.** All cells were run with weights of one seed's search first (*not reproduced, decided*, commit
``6949d00``); those with a penalty are run again with the weights of both seeds, see ``semi_supervised.py``. With five
seeds these were undecided (Lautum −1.5 [−7.2, 4.3] points, about six seeds would decide it), so seeds 5 to 9 are added,
with all three numbers of labels. The test stays and is made once more, on all ten seeds; a second look makes a wrong
verdict a little more probable than 5 %.
"""

import math
from typing import Any

from intervals import mean_interval, shown
from scipy.stats import t as student
from semi_supervised import FIRST, PLAIN, Plan, compared, draw_gains, judged, mean_shown, run
from semi_supervised_training import accuracies, gains
from units import Experiment, Row, main

# The paper's points over plain fine-tuning, by our number of labels, which is half of the paper's.
PAPER = {
    "lautum": {50: 6.5, 100: 7.9, 250: 6.1},
    "mutual_information": {50: 13.2, 100: 10.4, 250: 8.3},
}
LABELS = (50, 100, 250)
SEEDS = 10


def units(short: bool) -> dict[str, Row]:
    plan = Plan("objects", short=short)
    for labels in LABELS[:1] if short else LABELS:
        plan.cells(PLAIN, FIRST, SEEDS, labels)
    return plan.units


def finished(found: dict[Any, dict[int, float]]) -> list[int]:
    """Numbers of labels for which both methods have all seeds."""
    return [
        labels
        for labels in LABELS
        if all(len(found.get((PLAIN, labels, name), ())) == SEEDS for name in PAPER)
    ]


def averaged(found: dict[Any, dict[int, float]], numbers: list[int]) -> dict[str, dict[int, float]]:
    """Gain of each seed by method, averaged over numbers of labels."""
    means: dict[str, dict[int, float]] = {}
    for name in PAPER if numbers else ():
        parts = [found[PLAIN, labels, name] for labels in numbers]
        means[name] = {seed: sum(part[seed] for part in parts) / len(parts) for seed in parts[0]}
    return means


def seeds_to_decide(cell: Row, limit: float) -> int:
    """Return with how many seeds the upper end of an interval would be below a limit, if mean and spread stay."""
    mean, low, high = cell["gain"]
    n = cell["seeds"]
    spread = (high - low) / 2 * math.sqrt(n) / student.ppf(0.975, n - 1)
    while mean + student.ppf(0.975, n - 1) * spread / math.sqrt(n) >= limit and n < 1000:
        n += 1
    return n


def verdict(rows: list[Row]) -> Row:
    found = gains(rows)
    numbers = finished(found)
    compared_means = compared(averaged(found, numbers))
    paper = {
        name: sum(points[labels] for labels in numbers) / max(1, len(numbers))
        for name, points in PAPER.items()
    }
    words = []
    plain = {}
    for (_, labels, method), values in accuracies(rows).items():
        if method != "standard":
            continue
        plain[labels] = [*values.values()]
        parts = [f"plain fine-tuning {mean_shown(plain[labels])}"]
        for name in PAPER:
            own = [*found.get((PLAIN, labels, name), {}).values()]
            if len(own) > 1:
                parts.append(f"{name} {shown(mean_interval(own), '+.1f')} points")
        words.append(f"{labels} labels: {', '.join(parts)} (seeds: {len(plain[labels])})")
    for name, cell in compared_means.items():
        words.append(
            f"{name} on average over these {shown(cell['gain'], '+.1f')} points (p = {cell['p_holm']:.2g}), "
            f"{paper[name]:+.1f} in the paper"
        )
    said = judged(compared_means, paper) or "undecided"
    if said == "undecided" and compared_means:
        needed = max(
            seeds_to_decide(cell, paper[name] / 2) for name, cell in compared_means.items()
        )
        words.append(f"about {needed} seeds would decide it if means and spread stay")
    return {
        "verdict": said,
        "sentence": "; ".join(words),
        "numbers": {
            "averaged_over": numbers,
            "gains": compared_means,
            "paper": paper,
            "plain": plain,
        },
    }


def figure(rows: list[Row], canvas: Any) -> None:
    """Gains by number of labels."""
    axes = canvas.subplots(1, len(LABELS), squeeze=False)[0]
    for labels, ax in zip(LABELS, axes, strict=True):
        draw_gains(rows, ax, labels)


CLAIM = "Lautum and mutual information help semi-supervised transfer between classes of CIFAR (P4, table 3)"
if __name__ == "__main__":
    main(Experiment("semi_supervised_classes", CLAIM, units, run, verdict, figure, shares=True))
