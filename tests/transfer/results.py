"""Results as a transfer experiment makes them, with numbers drawn from a seed."""

import json
import math
import random
from dataclasses import asdict, replace

from lightning_taskinfo.transfer.report import TransferReport

LAYERS = ("backbone.conv1", "backbone.conv2", "backbone.linear", "head")
METHODS = (
    "scratch",
    "standard",
    "lautum",
    "mutual_information",
    "mk_mmd",
    "temporal_ensembling",
    "lautum+temporal_ensembling",
    "lautum+mutual_information",
)


def layered(rng, size):
    values = {name: size * rng.uniform(1, 2) for name in LAYERS}
    return {"total": sum(values.values()), "layers": values}


def curves(rng, transferred, accuracy):
    stages = {"pretrain": 4, "fine_tune": 8} if transferred else {"scratch": 8}
    return [
        {
            "stage": stage,
            "epoch": epoch,
            "train_loss": 2.3 * math.exp(-epoch / 3),
            "val_loss": 2 * math.exp(-epoch / 4) + rng.uniform(0.5, 0.6),
            "val_accuracy": accuracy * (1 - math.exp(-epoch / 2)) + rng.uniform(0, 0.02),
        }
        for stage, epochs in stages.items()
        for epoch in range(1, epochs + 1)
    ]


def result(method="lautum", labels=50, seed=0, *, measured=True):
    """One result of all that there is; the split of a seed is the same luck for every method."""
    rng = random.Random(f"{method} {labels} {seed}")
    luck = random.Random(f"{labels} {seed}").gauss(0, 0.05)
    accuracy = (
        0.4 + 0.05 * (METHODS.index(method) if method in METHODS else 0) + luck + rng.gauss(0, 0.01)
    )
    transferred = method != "scratch"
    after = {"before": None, "after": layered(rng, 600), "added": None}
    return {
        "method": method,
        "labels": labels,
        "seed": seed,
        "test": {"accuracy": accuracy, "loss": 2.5 - 2 * accuracy + rng.gauss(0, 0.05)},
        "source": {"accuracy": 0.97, "loss": 0.1} if transferred else None,
        "curves": curves(rng, transferred, accuracy),
        "information": (
            after
            if not transferred
            else {
                "before": layered(rng, 500),
                "after": layered(rng, 800),
                "added": layered(rng, 90),
            }
        )
        if measured
        else None,
        "fisher_trace": {"before": layered(rng, 3), "after": layered(rng, 7)} if measured else None,
        "overlap": {
            "layers": ["a", "b"],
            "outside": [0.8, 0.6],
            "standard_error": [0.02, 0.03],
            "onset": [80, 120, 300],
        }
        if measured and transferred
        else None,
        "seconds": {"pretrain": rng.uniform(1, 2), "fine_tune": rng.uniform(1, 2)},
    }


def minimal(method, labels, seed, accuracy, loss=1.0):
    return {
        "method": method,
        "labels": labels,
        "seed": seed,
        "test": {"accuracy": accuracy, "loss": loss},
    }


def report(methods=METHODS[:3], labels=(50,), seeds=3, *, name="digits → letters", measured=True):
    rows = [
        result(m, n, seed, measured=measured)
        for n in labels
        for m in methods
        for seed in range(seeds)
    ]
    return TransferReport(
        rows, {"pair": "digits→letters", "epochs": {"pretrain": 4, "fine_tune": 8}}, name
    )


def same(one: TransferReport, other: TransferReport) -> bool:
    """Whether both say the same apart from how long it took; the order of the results plays no part."""
    said = []
    for report in (one, other):
        results = [replace(result, seconds={}) for result in sorted(report.results, key=str)]
        # As text, since NaN equals NaN there.
        said.append(json.dumps(asdict(replace(report, results=results)), sort_keys=True))
    return said[0] == said[1]
