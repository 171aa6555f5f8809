"""P1, figure 1: is the distance short from complex to simple, to a part, and to inverted images?

Registered before the first run; ``benchmarks/task_distance.py`` had shown five tasks of 8×8 images before, where
inverted digits were far for a fully connected network.

**Claim.** A network that knows a task needs little more for a part of it, more for the reverse; a union is near to its
parts; inverted images are near.

**Settings.** Eight tasks: MNIST, its digits 0 to 4, its digits 0 and 1, MNIST inverted, notMNIST, its letters A to E,
USPS, and MNIST with notMNIST (20 classes). 250 samples of each, 16×16 pixels, values from -1/2 to 1/2. Trunk: two
convolutions of stride 2 (8 and 16 channels) and a layer of 32. ``task_distance`` by its default method (Laplace),
β = 0.1, prior at the start with deviation 0.1, 300 steps of 125 samples (250 for a union). Seeds 0 to 4, each with
samples, start and batches of its own.

**Decided by** six differences of distances, paired over seeds, one-sided t-tests, Holm over the six:
d(MNIST→0–4) < d(0–4→MNIST); d(MNIST→0–1) < d(0–1→MNIST); d(notMNIST→A–E) < d(A–E→notMNIST);
d(union→MNIST) < d(MNIST→union); d(MNIST→0–4) < d(MNIST→A–E), a part is nearer than a part of another;
d(MNIST→inverted) < d(MNIST→notMNIST), inverted is near. Reproduced: all six at 5 %. In part: some. Not reproduced:
none, and all intervals end below 0. Undecided otherwise, and with fewer than five seeds. Secondary: each task's
distance from itself, which is 0 for perfect training.

Changed after a look: seed 0 was run with twice the samples, the batch and the channels first and took 276 s, too long
for one unit; its six differences were 1476, 2188, 619, 604, 479 and -707 nats. Tests and claims stayed as they were.
"""

from functools import partial

import numpy as np
from images import drawn
from intervals import holm, mean_interval, shown
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d
from units import Experiment, Row, main

from lightning_taskinfo import Training, task_distance

SIDE = 16
TASKS = {
    "MNIST": "mnist",
    "0–4": "mnist:only-0-1-2-3-4",
    "0–1": "mnist:only-0-1",
    "inverted": "mnist:inverted",
    "notMNIST": "notmnist",
    "A–E": "notmnist:only-0-1-2-3-4",
    "USPS": "usps",
    "union": "mnist+notmnist",
}
CLAIMS = (
    (("MNIST", "0–4"), ("0–4", "MNIST")),
    (("MNIST", "0–1"), ("0–1", "MNIST")),
    (("notMNIST", "A–E"), ("A–E", "notMNIST")),
    (("union", "MNIST"), ("MNIST", "union")),
    (("MNIST", "0–4"), ("MNIST", "A–E")),
    (("MNIST", "inverted"), ("MNIST", "notMNIST")),
)


def units(short: bool) -> dict[str, Row]:
    size = {"samples": 40, "steps": 3} if short else {"samples": 250, "steps": 300}
    return {
        f"{size['samples']} samples, seed {seed}": {"seed": seed, **size}
        for seed in range(2 if short else 5)
    }


def trunk() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 16, 32), nn.ReLU(),
    )  # fmt: skip


def task(name: str, settings: Row, data_dir: str | None) -> tuple[Tensor, Tensor]:
    samples, seed = settings["samples"], settings["seed"]
    (x, y), _ = drawn(name, samples=samples, test=1, seed=seed, data_dir=data_dir)
    return adaptive_avg_pool2d(x, SIDE) - 0.5, y


def run(settings: Row, data_dir: str | None) -> Row:
    make = partial(task, settings=settings, data_dir=data_dir)
    training = Training(
        pretrain_steps=settings["steps"],
        steps=settings["steps"],
        batch_size=settings["samples"] // 2,
    )
    matrix = task_distance(
        {name: make(spec) for name, spec in TASKS.items()}, 0.1, trunk_fn=trunk, training=training,
        seeds=[settings["seed"]], progress=False,
    )  # fmt: skip
    return {
        "distances": matrix.distances[0].tolist(),
        "information": matrix.information[0].tolist(),
    }


def between(row: Row, known: str, new: str) -> float:
    names = list(TASKS)
    return row["distances"][names.index(known)][names.index(new)]


def verdict(rows: list[Row]) -> Row:
    gaps = [[between(row, *more) - between(row, *less) for row in rows] for less, more in CLAIMS]
    p = [stats.ttest_1samp(gap, 0, alternative="greater").pvalue for gap in gaps]
    corrected = [float(value) for value in holm(p)]
    intervals = [mean_interval(gap) for gap in gaps]
    holds = [value < 0.05 for value in corrected]
    if len(rows) < 5:
        found = "undecided"
    elif all(holds):
        found = "reproduced"
    elif any(holds):
        found = "reproduced in part"
    elif all(high < 0 for _, _, high in intervals):
        found = "not reproduced, decided"
    else:
        found = "undecided"
    names = [f"d({a}→{b}) < d({c}→{d})" for (a, b), (c, d) in CLAIMS]
    parts = [
        f"{name} by {shown(interval, '.0f')} nats (p = {value:.2g})"
        for name, interval, value in zip(names, intervals, corrected, strict=True)
    ]
    itself = mean_interval([np.mean([between(row, name, name) for name in TASKS]) for row in rows])
    sentence = (
        f"{'; '.join(parts)}; Holm over the six, {len(rows)} seeds; "
        f"a task's distance from itself {shown(itself, '.1f')}"
    )
    numbers = {
        "gap": dict(zip(names, intervals, strict=True)),
        "p_holm": dict(zip(names, corrected, strict=True)),
    }
    return {"verdict": found, "sentence": sentence, "numbers": numbers | {"itself": itself}}


def figure(rows: list[Row], canvas) -> None:
    canvas.set_size_inches(7, 6)
    mean = np.mean([row["distances"] for row in rows], axis=0)
    ax = canvas.subplots()
    image = ax.imshow(mean, cmap="viridis")
    ax.set_xticks(range(len(TASKS)), TASKS, rotation=45)
    ax.set_yticks(range(len(TASKS)), TASKS)
    for (i, j), value in np.ndenumerate(mean):
        color = "black" if image.norm(value) > 0.6 else "white"
        ax.text(j, i, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
    ax.set(xlabel="added task", ylabel="known task")
    canvas.colorbar(image, label="distance (nats)")


if __name__ == "__main__":
    main(
        Experiment(
            name="task_matrix",
            claim="A part is near to the whole, a union to its parts, inverted images are near (P1, figure 1)",
            units=units,
            run=run,
            verdict=verdict,
            figure=figure,
        )
    )
