"""P1, claim 3: does the distance between tasks follow the ease of fine-tuning?

Registered before this script was run, but not blind: ``which_start.py`` had shown the weighted τ of the same stored
units (0.13 ± 0.10 and 0.38 ± 0.09) before.

**Claim.** The nearer a source task is to a target, by P1's distance, the lower the error after fine-tuning from it.

**Data.** The stored units of ``benchmarks/which_start.py``: small convolutional networks trained on eleven tasks, six
targets (a start trained on the target's own task is left out), 20, 50, 200 and 1,000 labels, five seeds. Distances from
each source task to each target by ``task_distance`` (variational, a trunk of two layers on 8×8 images) and, beside it,
by Task2Vec. The truth is the test error averaged over seeds, of all weights fine-tuned and of a linear head.

**Decided by** Spearman's rank correlation of distance and error over the sources, for each target and number of labels,
averaged over the numbers of labels; mean and Student's 95 % interval over the six targets. Four comparisons (two
distances, two ways to adapt), one-sided t-tests against 0, Holm over the four. For P1's distance and all weights
fine-tuned: reproduced if the interval is above 0.5, in part if the correlation is positive at 5 % (corrected) there or
with a linear head, not reproduced if its interval ends below 0.5 otherwise, else undecided. Six targets are few: the
interval says so.
"""

import json
from collections import defaultdict
from zlib import crc32

import numpy as np
from intervals import holm, mean_interval, shown, spearman
from scipy import stats
from units import BENCHMARKS, Experiment, Row, main

STORED = BENCHMARKS / "results" / "which_start.jsonl"
TARGETS = ("usps", "notmnist", "cifar10", "letters", "digits", "mnist")
WAYS = {"full": "all weights fine-tuned", "linear": "a linear head"}
DISTANCES = {"distances": "P1's distance", "embeddings": "Task2Vec's"}


def units(short: bool) -> dict[str, Row]:
    checksum = crc32(STORED.read_bytes())  # units of other rows are not gone on with
    return {target: {"target": target, "checksum": checksum} for target in TARGETS}


def stored() -> dict[str, Row]:
    lines = STORED.read_text().splitlines()
    return {unit["unit"]: unit["found"] for unit in map(json.loads, lines)}


def mean_errors(found: dict[str, Row], target: str, way: str) -> dict[int, dict[str, float]]:
    """Test error of each start, averaged over seeds, by the number of labels."""
    errors = defaultdict(lambda: defaultdict(list))
    for name, rows in found.items():
        if name.startswith("truth small") and name.split()[-1] == target:
            labels = int(name.split()[3])
            for row in rows:
                errors[labels][row["start"]].append(row[way])
    return {
        labels: {start: float(np.mean(several)) for start, several in starts.items()}
        for labels, starts in errors.items()
    }


def run(settings: Row, data_dir: str | None) -> Row:
    target = settings["target"]
    found = stored()
    points = []
    for unit in DISTANCES:
        names, matrix = found[unit]["names"], found[unit]["mean"]
        for way in WAYS:
            for labels, errors in mean_errors(found, target, way).items():
                sources = [start for start in errors if start in names]
                distances = [matrix[names.index(s)][names.index(target)] for s in sources]
                correlation = spearman(distances, [errors[s] for s in sources])
                point = {"distance": unit, "way": way, "labels": labels, "sources": len(sources)}
                points.append(point | {"correlation": correlation})
    return {"points": points}


def by_target(rows: list[Row], distance: str, way: str) -> list[float]:
    """Mean over the numbers of labels, for each target."""
    means = []
    for row in rows:
        chosen = [p for p in row["points"] if (p["distance"], p["way"]) == (distance, way)]
        means.append(float(np.mean([point["correlation"] for point in chosen])))
    return means


def verdict(rows: list[Row]) -> Row:
    compared = {(d, w): by_target(rows, d, w) for d in DISTANCES for w in WAYS}
    p = [stats.ttest_1samp(values, 0, alternative="greater").pvalue for values in compared.values()]
    corrected = dict(zip(compared, map(float, holm(p)), strict=True))
    intervals = {key: mean_interval(values) for key, values in compared.items()}
    main_interval = intervals["distances", "full"]
    if main_interval[1] > 0.5:
        found = "reproduced"
    elif min(corrected["distances", way] for way in WAYS) < 0.05:
        found = "reproduced in part"
    elif main_interval[2] < 0.5:
        found = "not reproduced, decided"
    else:
        found = "undecided"
    parts = [
        f"{DISTANCES[d]} with {WAYS[w]} {shown(intervals[d, w])} (p = {corrected[d, w]:.2g})"
        for d, w in compared
    ]
    sentence = (
        f"mean rank correlation over {len(rows)} targets: {', '.join(parts)}; Holm over the four"
    )
    numbers = {f"{d}, {w}": [*intervals[d, w], corrected[d, w]] for d, w in compared}
    return {"verdict": found, "sentence": sentence, "numbers": numbers}


def figure(rows: list[Row], canvas) -> None:
    axes = canvas.subplots(1, len(DISTANCES), sharey=True)
    for ax, distance in zip(axes, DISTANCES, strict=True):
        for place, way in enumerate(WAYS):
            values = by_target(rows, distance, way)
            middle, low, high = mean_interval(values)
            ax.plot([place] * len(values), values, "o", alpha=0.4)
            ax.errorbar(
                place + 0.15,
                middle,
                [[middle - low], [high - middle]],
                marker="s",
                capsize=3,
                color="black",
            )
        ax.axhline(0, color="grey", linewidth=0.8)
        ax.set(title=DISTANCES[distance], xlim=(-0.5, 1.5))
        ax.set_xticks(range(len(WAYS)), WAYS.values())
    axes[0].set(ylabel="rank correlation, a dot a target")


if __name__ == "__main__":
    main(
        Experiment(
            name="claim_3",
            claim="The distance follows the ease of fine-tuning (P1, claim 3)",
            units=units,
            run=run,
            verdict=verdict,
            figure=figure,
        )
    )
