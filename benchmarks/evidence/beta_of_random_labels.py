"""P1, figure 2: does the critical price β* of random labels depend on their number?

Registered before the first run; ``benchmarks/task_complexity.py`` had shown a fall from 0.102 (250 samples) to 0.038
(1,000) for a network of 6,000 weights and 300 steps for each price. A pilot with a seed of its own (100, width 256)
chose the prices and lengths below: 0.035 for 250 samples after 300 steps; 0.009 and 0.018 for 2,000 after 300 and 900.

**Claim.** β* of random labels hardly depends on the number N of samples.

**Settings.** MNIST's images at 12×12 pixels with random labels, N = 250, 500, 1,000, 2,000. Fully connected networks,
two hidden layers of 256 (105,000 weights) or 128 (36,000). The prior's deviation is 0.1·√(32/width), as the scale of
the first weights falls with the width. Sweeps over BETAS, each price with T steps of 128 samples from where the one
before ended, T = 600, 600, 1,200 and 2,400 for the four N: at least 154 passes over the data; the wide network also
with half of that; 300 steps without noise before. Seeds 0 to 2, each with images, labels, weights, batches and noise of
its own. The ends of the range, 250 and 2,000, are run first; a slope is fitted to those N that all cases have.

**Decided by** the slope of log β* over log N, fitted for each seed, width and length; mean and Student's 95 % interval
over seeds. Hardly: between -1/4 and 1/4, a factor of 1.7 over eight times the samples. Reproduced: the interval for the
wide network and T lies there. Not reproduced: it lies below -1/4, and neither T rather than T/2 nor the wide network
rather than the narrow one brings the slope nearer to 0 by more than 0.1 (upper end of the paired interval), so that
neither length nor capacity explains it. Otherwise undecided, with what a longer or a wider one changes. Beside it: β*
at T over β* at T/2 for each N, which is 1 where training has converged.

Added after a look at 250 and 2,000, and called exploratory: 2T for 2,000 samples, the one N where T and T/2 differed.
"""

import math
from functools import partial
from itertools import product

import numpy as np
from images import drawn
from intervals import Interval, mean_interval, shown
from torch import Generator, randint
from torch.nn.functional import adaptive_avg_pool2d
from units import Experiment, Row, main

from lightning_taskinfo import Training, structure_function
from lightning_taskinfo.tasks.ready import small_network

SIDE = 12
BETAS = (0.08, 0.04, 0.02, 0.01)
STEPS = {250: 600, 500: 600, 1000: 1200, 2000: 2400}
CASES = {"wide": (256, 1.0), "half as long": (256, 0.5), "narrow": (128, 1.0)}  # width, part of T
LONGEST = (256, 2.0)


def units(short: bool) -> dict[str, Row]:
    steps = {20: 20, 40: 20} if short else STEPS
    ends = (min(steps), max(steps))
    seeds = range(2 if short else 3)
    cells = [(*case, seed, n) for case in CASES.values() for seed, n in product(seeds, ends)]
    cells += [(*LONGEST, seed, max(steps)) for seed in seeds]
    middle = [n for n in steps if n not in ends]
    cells += [(*case, seed, n) for case in CASES.values() for seed, n in product(seeds, middle)]
    planned = {}
    for width, length, seed, n in cells:
        settings = {"samples": n, "width": width, "length": length, "seed": seed}
        name = f"N {n}, width {width}, length {length}, seed {seed}"
        planned[name] = settings | {"steps": round(length * steps[n])}
    return planned


def run(settings: Row, data_dir: str | None) -> Row:
    n, width, seed = settings["samples"], settings["width"], settings["seed"]
    (x, _), _ = drawn("mnist", samples=n, test=1, seed=seed, data_dir=data_dir)
    y = randint(10, (n,), generator=Generator().manual_seed(seed))
    x = adaptive_avg_pool2d(x, SIDE)
    x = 0.5 + 0.5 * (x - x.mean()) / x.std()  # the network takes the 1/2 away again
    curve = structure_function(
        partial(small_network, SIDE * SIDE, 10, width),
        (x, y),
        BETAS,
        prior_std=0.1 * math.sqrt(32 / width),
        training=Training(pretrain_steps=300, steps=settings["steps"]),
        seed=seed,
        progress=False,
    )
    return {
        "critical_beta": curve.critical_beta(),
        "unfinished": curve.unfinished(),
        "kl": curve.kl,
        "loss_per_sample": [loss / n for loss in curve.loss],
    }


def chosen(rows: list[Row], **wanted: float) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def complete(rows: list[Row]) -> list[int]:
    """Numbers of samples for which every case has equally many seeds."""
    counts = {
        n: [len(chosen(rows, samples=n, width=w, length=t)) for w, t in CASES.values()]
        for n in sorted({row["samples"] for row in rows})
    }
    most = max(max(several) for several in counts.values())
    return [n for n, several in counts.items() if min(several) == most]


def slopes(rows: list[Row], width: int, length: float) -> dict[int, float]:
    """Slope of log β* over log N, by seed; only of seeds whose sweeps all enclose β*."""
    found = {}
    wanted = complete(rows)
    for seed in sorted({row["seed"] for row in rows}):
        own = chosen(rows, width=width, length=length, seed=seed)
        own = [row for row in own if row["samples"] in wanted and row["critical_beta"] is not None]
        if len(own) == len(wanted) > 1:
            n = [math.log(row["samples"]) for row in own]
            found[seed] = float(np.polyfit(n, [math.log(r["critical_beta"]) for r in own], 1)[0])
    return found


def paired(a: dict[int, float], b: dict[int, float]) -> Interval:
    """Mean difference over the seeds that both have."""
    both = [a[seed] - b[seed] for seed in a if seed in b]
    return mean_interval(both) if len(both) > 1 else (math.nan,) * 3


def exponential(interval: Interval) -> Interval:
    mean, low, high = (math.exp(value) for value in interval)
    return mean, low, high


def hours_to_decide(rows: list[Row], longer: int = 4, seeds: int = 5) -> float:
    """Core-hours of all N and cases with more steps and more seeds, from the seconds that a step took."""
    total = 0.0
    for width, length in CASES.values():
        own = chosen(rows, width=width, length=length)
        if own:
            step = sum(row["seconds"] for row in own) / sum(row["steps"] for row in own)
            total += step * length * sum(STEPS.values())
    return longer * seeds * total / 3600


def verdict(rows: list[Row]) -> Row:
    cases = {case: slopes(rows, *parts) for case, parts in CASES.items()}
    found = {case: mean_interval([*s.values()]) for case, s in cases.items() if len(s) > 1}
    longer = paired(cases["wide"], cases["half as long"])
    wider = paired(cases["wide"], cases["narrow"])
    _, low, high = found.get("wide", (math.nan,) * 3)
    if low > -0.25 and high < 0.25:
        answer = "reproduced"
    elif high < -0.25 and max(longer[2], wider[2]) <= 0.1:
        answer = "not reproduced, decided"
    else:
        answer = "undecided"
    wide = CASES["wide"][0]
    logs = {
        (n, t): {
            r["seed"]: math.log(r["critical_beta"] or math.nan)
            for r in chosen(rows, samples=n, width=wide, length=t)
        }
        for n in complete(rows)
        for t in (0.5, 1.0, 2.0)
    }
    ratios = {n: exponential(paired(logs[n, 1.0], logs[n, 0.5])) for n in complete(rows)}
    critical = {n: math.exp(np.mean([*logs[n, 1.0].values()])) for n in complete(rows)}
    parts = [f"{case} {shown(value)}" for case, value in found.items()]
    ends = ", ".join(f"{n}: {critical[n]:.3f}" for n in critical)
    changes = ", ".join(f"{n}: {shown(ratio)}" for n, ratio in ratios.items())
    sentence = (
        f"β* by N, {ends} (width {wide}); slope of log β* over log N: {', '.join(parts)}; twice the training changes "
        f"it by {shown(longer)}, twice the width by {shown(wider)}; β* after twice the training over β* before, by N: "
        f"{changes}"
    )
    most = max(critical, default=0)
    if len(logs.get((most, 2.0), ())) > 1:
        again = exponential(paired(logs[most, 2.0], logs[most, 1.0]))
        sentence += f"; exploratory, twice as long again at {most}: {shown(again)}"
    if answer == "undecided":
        hours = hours_to_decide(rows)
        sentence += (
            f"; five seeds, trained four times as long, would take about {hours:.1f} core-hours"
        )
    numbers = {
        "slopes": found, "longer": longer, "wider": wider, "ratios": ratios, "critical_beta": critical,
        "unfinished": sum(len(row["unfinished"]) for row in rows),
    }  # fmt: skip
    return {"verdict": answer, "sentence": sentence, "numbers": numbers}


def figure(rows: list[Row], canvas) -> None:
    ax = canvas.subplots()
    for color, (label, (width, length)) in enumerate(CASES.items()):
        own = [r for r in chosen(rows, width=width, length=length) if r["critical_beta"]]
        n = sorted({row["samples"] for row in own})
        logs = [[math.log(r["critical_beta"]) for r in chosen(own, samples=k)] for k in n]
        means = [math.exp(np.mean(values)) for values in logs]
        ax.plot(n, means, "-", color=f"C{color}", label=label)
        ax.plot(
            [r["samples"] for r in own],
            [r["critical_beta"] for r in own],
            "o",
            color=f"C{color}",
            alpha=0.5,
        )
    ax.set(xscale="log", yscale="log", xlabel="random labels", ylabel="critical price β*")
    ax.legend()


if __name__ == "__main__":
    main(
        Experiment(
            name="beta_of_random_labels",
            claim="β* of random labels hardly depends on the number of samples (P1, figure 2)",
            units=units,
            run=run,
            verdict=verdict,
            figure=figure,
        )
    )
