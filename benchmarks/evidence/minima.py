"""Does γ order minima by their test error, and does its regulariser lower the error? P5.

Registered before the first run; not run but for the timing.

**Claims.** (a) γ̂ orders minima by their test error, better than spectral radius, Frobenius norm and trace, where
training differs by the share of wrong labels, the augmentation or the batch size. (b) R_α lowers the test error by 0.3
to 1.9 points.

**Settings.** A plain network of six layers at half of its width (four convolutions of 32, 32, 64 and 64 channels, two
linear layers), 5,000 images of CIFAR-10, 2,000 test images. SGD with momentum 0.9, weight decay 1e-4, learning rate
0.05 that falls to a tenth after 30 and 45 of 60 epochs, batches of 128; images are augmented only in the scenario of
augmentations. N' = T = 100, from the gradients of 1,000 training images by the labels they were trained with, logits as
they are and of one norm; beside it the mean log-confidence in these labels, which may be all that γ̂ sees. (b) R_α with
α = 1e-4, eight parts and weight 10, from the first drop of the learning rate on.

**Seeds.** 0 to 4, for each of the 13 levels and for (b).

**Test.** (a) For each scenario, Spearman's correlation with the test error over levels and seeds, runs with a training
accuracy below 99 % left out and counted; bootstrap over runs, three intervals at 1 - 0.05/3. (b) Paired difference,
Student's t. *Reproduced* if γ̂'s correlations are all positive and ahead of its rivals' and of the log-confidence's, and
R_α lowers the error; *in part* if they are all positive or R_α lowers the error. *Undecided* until all units are run:
the time of one epoch on 1,000 images and of one measurement says how long that takes. What is stored of smaller runs
(``benchmarks/local_minima.py``) is quoted.
"""

import functools
import json
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from intervals import bootstrap_interval, mean_interval, shown, spearman
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from units import BENCHMARKS, Experiment, Row, main

# From the folder above, which `units` adds to the path.
from small_training import AUGMENTATIONS, load, mislabel  # isort: skip

from lightning_taskinfo.fisher import gradient_gram
from lightning_taskinfo.functional.minima import local_minimum_summary, normalise_logits
from lightning_taskinfo.regularizers import LocalMinimumRegularizer, WeightSchedule

BASE = {"mislabelled": 0.0, "augmentation": "none", "batch_size": 128}
SCENARIOS: dict[str, list[Any]] = {
    "mislabelled": [0.0, 0.1, 0.2, 0.3, 0.5],
    "augmentation": list(AUGMENTATIONS),
    "batch_size": [16, 32, 64, 128, 256],
}
RIVALS = ("spectral_radius", "frobenius", "trace", "log_confidence")


def units(short: bool) -> dict[str, Row]:
    """The timing first, then levels and pairs."""
    base: Row = {**BASE, "samples": 200 if short else 5000, "epochs": 2 if short else 60}
    base |= {"pool": 40 if short else 1000, "weight": 0.0, "width": 4 if short else 32}
    found = {
        "timing": {**base, "kind": "timing", "seed": 0, "epochs": 1, "pool": 20, "samples": 50}
    }
    if not short:
        found["timing"] |= {"samples": 1000, "pool": 200}
    for seed in range(1 if short else 5):
        for scenario, levels in SCENARIOS.items():
            for level in levels[:2] if short else levels:
                settings = {**base, "kind": "minimum", scenario: level, "seed": seed}
                name = ", ".join(f"{key} {settings[key]}" for key in BASE)
                found.setdefault(f"{name}, seed {seed}", settings)
        for weight in (0.0, 10.0):
            settings = {**base, "kind": "pair", "seed": seed, "weight": weight}
            found[f"weight {weight:g}, seed {seed}"] = settings
    return found


def network(shape: torch.Size, settings: Row) -> nn.Module:
    torch.manual_seed(settings["seed"])
    channels, H, W = shape
    width = settings["width"]
    layers: list[nn.Module] = []
    for inner, outer in ((channels, width), (width, width), (width, 2 * width), (2 * width,) * 2):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.ReLU()]
        if inner == outer:
            layers.append(nn.MaxPool2d(2))
    size = 2 * width * (H // 4) * (W // 4)
    last = [nn.Linear(size, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *last)


def train(x: Tensor, y: Tensor, settings: Row) -> nn.Module:
    model = network(x.shape[1:], settings)
    g = Generator().manual_seed(settings["seed"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    drops = [settings["epochs"] // 2, 3 * settings["epochs"] // 4]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops)
    regularizer = LocalMinimumRegularizer(weight=WeightSchedule(settings["weight"], start=drops[0]))
    scheme: tuple[Callable[..., Tensor], ...] = AUGMENTATIONS[settings["augmentation"]]

    def loss_of(part: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(part[0]), part[1])

    for epoch in range(settings["epochs"]):
        for rows in torch.randperm(len(x), generator=g).split(settings["batch_size"]):
            batch = functools.reduce(lambda a, f: f(a, g), scheme, x[rows]), y[rows]
            loss = loss_of(batch)
            if settings["weight"] and len(rows) >= 8:
                loss = loss + regularizer(model, loss_of, batch, epoch=epoch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    return model.eval()


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.split(250)])


def run(settings: Row, data_dir: str | None) -> Row:
    (x, y), (x_test, y_test), _ = load(data_dir, settings["samples"])
    labels = mislabel(y, settings["mislabelled"], Generator().manual_seed(100 + settings["seed"]))
    start = time.monotonic()
    model = train(x, labels, settings)
    trained = time.monotonic()
    logits = logits_of(model, x)
    wrong = logits_of(model, x_test).argmax(1) != y_test
    found: Row = {
        "train_accuracy": float((logits.argmax(1) == labels).float().mean()),
        "train_loss": float(cross_entropy(logits, labels)),
        "test_error": float(wrong.float().mean()),
        "training_seconds": trained - start,
    }
    if settings["kind"] != "pair":
        found |= measures(model, x, labels, settings)
    return found | {"measuring_seconds": time.monotonic() - trained}


def measures(model: nn.Module, x: Tensor, y: Tensor, settings: Row) -> Row:
    """γ̂, its rivals and the log-confidence, with logits as they are and of one norm."""
    found: Row = {}
    x, y = x[: settings["pool"]], y[: settings["pool"]]
    ways: dict[str, Callable[[Tensor], Tensor]] = {"": lambda z: z, "normalised_": normalise_logits}
    for prefix, way in ways.items():
        gram = gradient_gram(model, x, y, forward_fn=lambda net, part, way=way: way(net(part)))
        summary = local_minimum_summary(gram, generator=Generator().manual_seed(settings["seed"]))
        found |= {prefix + name: value.item() for name, value in summary._asdict().items()}
        confidence = -cross_entropy(way(logits_of(model, x)), y)
        found[f"{prefix}log_confidence"] = float(confidence)
    return found


def hours(rows: list[Row]) -> float:
    """Core-hours of everything that is planned, from one epoch on 1,000 images and one measurement."""
    (timing,) = (row for row in rows if row["kind"] == "timing")
    total = 0.0
    for unit in units(short=False).values():
        share = unit["samples"] / timing["samples"] * unit["epochs"] / timing["epochs"]
        passes = 3 if unit["weight"] else 1  # R_α takes two more
        total += passes * share * timing["training_seconds"]
        if unit["kind"] == "minimum":
            total += unit["pool"] / timing["pool"] * timing["measuring_seconds"]
    return total / 3600


def correlations(rows: list[Row]) -> Row:
    """For each scenario the correlation of each measure with the test error, over runs that fit their labels."""
    fitted = [row for row in rows if row["kind"] == "minimum" and row["train_accuracy"] >= 0.99]
    found: Row = {}
    for scenario in SCENARIOS:
        others = [key for key in BASE if key != scenario]
        own = [row for row in fitted if all(row[key] == BASE[key] for key in others)]
        errors = [row["test_error"] for row in own]
        if len(own) < 10:
            continue
        found[scenario] = {"runs": len(own)}
        for name in ("gamma", *RIVALS):
            values = [row[name] for row in own]
            found[scenario][name] = bootstrap_interval(spearman, values, errors, level=1 - 0.05 / 3)
    return found


def verdict(rows: list[Row]) -> Row:
    numbers: Row = {"hours": hours(rows), "correlations": correlations(rows)}
    stored = json.loads((BENCHMARKS / "results" / "local_minima.json").read_text())
    small = [found["gamma"] for found in stored["correlations"].values()]
    intervals = [(one["spearman"], *one["interval"]) for one in small]
    numbers["stored_correlations"] = intervals
    (change,) = (row for row in stored["regularised"] if row["weight"] == 10)
    numbers["stored_change"] = [100 * value for value in (change["change"], *change["interval"])]
    words = [
        f"{name}: γ {shown(found['gamma'])}" for name, found in numbers["correlations"].items()
    ]
    pairs: dict[float, dict[int, float]] = {0.0: {}, 10.0: {}}
    for row in rows:
        if row["kind"] == "pair":
            pairs[row["weight"]][row["seed"]] = 100 * row["test_error"]
    both = sorted(pairs[0.0].keys() & pairs[10.0].keys())
    if len(both) > 1:
        change_now = mean_interval([pairs[10.0][seed] - pairs[0.0][seed] for seed in both])
        numbers["change"] = change_now
        words.append(f"R_α changes the error by {shown(change_now)} points")
    words.append(
        f"rank correlations of γ with the test error in small runs (1,200 images, errors above 50 %): "
        f"{', '.join(map(shown, intervals))}; R_α changed the error by {shown(tuple(numbers['stored_change']))} "
        f"points; the paper's recipe on 5,000 images would take {numbers['hours']:.0f} core-hours"
    )
    said = "undecided"
    if len(rows) == len(units(short=False)):
        said = judged(numbers)
    return {"verdict": said, "sentence": "; ".join(words), "numbers": numbers}


def judged(numbers: Row) -> str:
    found = numbers["correlations"].values()
    positive = bool(found) and all(scenario["gamma"][1] > 0 for scenario in found)
    ahead = all(scenario["gamma"][0] > scenario[name][0] for scenario in found for name in RIVALS)
    lower = numbers.get("change", (math.nan,) * 3)[2] < 0
    if positive and ahead and lower:
        return "reproduced"
    return "reproduced in part" if positive or lower else "not reproduced, decided"


def figure(rows: list[Row], canvas: Any) -> None:
    """Correlations of the small runs, and what the recipe would take."""
    numbers = verdict(rows)["numbers"]
    ax = canvas.subplots()
    for place, (middle, low, high) in enumerate(numbers["stored_correlations"]):
        ax.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o", color="C0")
    ax.set_yticks(range(3), list(SCENARIOS))
    ax.axvline(0, color="k", lw=0.5)
    ax.set(xlabel="rank correlation of γ with the test error, small runs")
    ax.set_title(f"undecided: {numbers['hours']:.0f} core-hours would decide it")


CLAIM = "γ orders minima by their test error; R_α lowers the error by 0.3 to 1.9 points (P5)"
if __name__ == "__main__":
    main(Experiment("minima", CLAIM, units, run, verdict, figure))
