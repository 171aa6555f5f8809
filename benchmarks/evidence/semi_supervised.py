"""Do Lautum and mutual information help semi-supervised transfer, and why is our baseline better? P4, tables 1 to 3.

Registered before the first run.

**Claims.** (a) MNIST to notMNIST with 50 labels: Lautum information lifts the accuracy of plain fine-tuning by 14.4
points, mutual information by 36.5, from 34.0 %; less with more labels. Seven methods in all (tables 1 and 2). (b)
CIFAR-10 to classes of CIFAR-100, which is not at hand: five classes of CIFAR-10 to the other five (table 3).

**Settings.** *The paper's network* at an eighth of its width: noise of 0.15 on the inputs, ``large_cnn`` of 16 channels
on 32×32 pixels in three colours; 50, 100, 200 and 1,000 labels, ten seeds, and for (b) 50, 100 and 250 labels, five
seeds. That takes tens of core-hours, so *a small network*, ``small_cnn`` on 28×28 grey pixels, has the part of it
that can be had: 50 labels, plain fine-tuning and the two methods of the paper, ten seeds. Both: batches of 50, Adam at
0.001, 3,000 source images for 5 epochs, 3,000 unlabelled target images, fine-tuning for 360 steps. The weight of each
penalty comes from five values a factor of √10 apart, around the package's default: the one with the smallest loss on 20
of 50 labels after fine-tuning on the other 30, mean of seeds 100 and 101. It stands in ``CHOSEN`` before the cells
are run.

*Why is the baseline better?* Plain fine-tuning on 50 labels with the paper's network, accuracy on 1,000 test images
after 5, 20, 60 and 120 steps: as designed, with a learning rate of 0.0001, in the head only, and all without batch
normalisation.

**Order.** The baseline with seed 0; the small network, search first; the baseline with seed 1; the paper's network.

**Test.** Gain in accuracy over plain fine-tuning, paired by seed, Student's t, two-sided, Holm over all comparisons.
*Reproduced* if Lautum and mutual information help by at least half of the paper's points with 50 labels; *in part* if
one of them helps; *not reproduced, decided* if none does and the upper ends of both intervals are below half of
the paper's points; else *undecided*. The verdict is that of the paper's network if it has ten seeds, and else that of
the small network; the sentence says how many hours the rest would take, from the mean times of finished units.

Changed after the script was tried out and before any of these units was run: the small network, as one unit of the
paper's network takes minutes.
"""

from collections import defaultdict
from typing import Any

import torch
from intervals import holm, mean_interval, shown
from scipy.stats import ttest_1samp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from units import Experiment, Row, main

from lightning_taskinfo._lightning import Trainer
from lightning_taskinfo.data import load_task
from lightning_taskinfo.transfer import TransferClassifier, TransferDataModule, large_cnn, small_cnn
from lightning_taskinfo.transfer.ready.module import WEIGHTS
from lightning_taskinfo.transfer.training import quiet

METHODS = (
    "standard",
    "lautum",
    "mutual_information",
    "mk_mmd",
    "temporal_ensembling",
    "lautum+temporal_ensembling",
    "lautum+mutual_information",
)
FIRST = METHODS[:3]
SEARCHED = ("lautum", "mutual_information", "mk_mmd", "temporal_ensembling")
PAPER = {"lautum": 14.40, "mutual_information": 36.48}  # points over plain fine-tuning, 50 labels
PAIRS = {
    "digits": ("mnist", "notmnist"),
    "objects": ("cifar10_12k:only-0-1-2-3-4", "cifar10_12k:only-5-6-7-8-9"),
}
SHAPES = {"paper": (3, 32, 32), "small": (1, 28, 28)}
CHOSEN = {"lautum": 0.001, "mutual_information": 0.01}  # weights for the small network
LOOKS = [5, 20, 60, 120]
WAYS = {"as designed": 1e-3, "at a tenth of the rate": 1e-4, "head only": 1e-3}  # learning rates
SEEDS = 10


class Noise(nn.Module):
    """Gaussian noise on the inputs while training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.15 * torch.randn_like(x) if self.training else x


def units(short: bool) -> dict[str, Row]:
    base: Row = {"pair": "digits", "network": "paper", "width": 2 if short else 16}
    base |= {"samples": 100 if short else 3000, "pretrain_epochs": 1 if short else 5}
    base |= {"steps": 4 if short else 360, "looks": LOOKS[:1] if short else LOOKS}
    found: dict[str, Row] = {}

    def add(kind: str, seed: int, method: str, labels: int = 50, **others: Any) -> None:
        settings = {
            **base,
            "kind": kind,
            "seed": seed,
            "method": method,
            "labels": labels,
            **others,
        }
        weight = f" {settings['weight']:.3g}" if "weight" in settings else ""
        name = f"{settings['network']} network, {settings['pair']}, {labels} labels"
        found.setdefault(f"{kind}: {name}, {method}{weight}, seed {seed}", settings)

    def add_baseline(seed: int) -> None:
        for normalised in (True, False):
            name = f"baseline {'with' if normalised else 'without'} batch norm, seed {seed}"
            found[name] = {**base, "kind": "baseline", "seed": seed, "normalised": normalised}

    add_baseline(0)
    for network in ("small", "paper"):
        searched = ("lautum", "mutual_information") if network == "small" else SEARCHED
        for method in searched:
            for power in (0,) if short else range(-2, 3):
                weight = WEIGHTS[method] * 10 ** (power / 2)
                for seed in (100,) if short else (100, 101):
                    add("search", seed, method, network=network, weight=weight)
        for seed in range(1 if short else SEEDS):
            for method in FIRST:
                weight = {"weight": CHOSEN[method]} if method in CHOSEN else {}
                if network == "paper":
                    add("cell", seed, method)
                elif weight or method == "standard" or short:
                    add("cell", seed, method, network=network, **weight)
        if short:
            return found
        if network == "small":
            add_baseline(1)
    for labels in (50, 100, 200, 1000):
        for seed in range(SEEDS):
            for method in METHODS:
                add("cell", seed, method, labels)
    for labels in (50, 100, 250):
        for seed in range(5):
            for method in FIRST:
                add("cell", seed, method, labels, pair="objects")
    return found


def network(settings: Row) -> nn.Module:
    torch.manual_seed(settings["seed"])
    shape = SHAPES[settings["network"]]
    if settings["network"] == "small":
        return small_cnn(shape)
    net = nn.Sequential(Noise(), large_cnn(shape, width=settings["width"]))
    if not settings.get("normalised", True):
        for module in list(net.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.Identity())
    return net


def make_data(settings: Row, data_dir: str | None) -> TransferDataModule:
    source, target = PAIRS[settings["pair"]] if data_dir else ("digits", "letters")
    tasks = [load_task(name, data_dir=data_dir) for name in (source, target)]
    data = TransferDataModule(
        *tasks,
        labels=settings.get("labels", 50),
        validation=0,
        max_source=settings["samples"],
        max_unlabeled=settings["samples"],
        image_shape=SHAPES[settings["network"]],
        batch_size=50,
        seed=settings["seed"],
    )
    data.setup()
    if settings["kind"] == "search":
        rows = data.split.labeled.tolist()  # in turns of classes: the last 20 are two of each
        data = data.replaced(labels=rows[:30], validation=rows[30:])
        data.setup()
    return data


def fit(model: Any, data: TransferDataModule, **length: int) -> Trainer:
    with quiet():
        trainer = Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            **length,
        )
        trainer.fit(model, datamodule=data)
    return trainer


def classifier(backbone: nn.Module, data: TransferDataModule, stage: str, settings: Row) -> Any:
    method = settings.get("method", "standard")
    pretraining = stage == "pretrain"
    return TransferClassifier(
        backbone,
        data.source_classes if pretraining else data.target_classes,
        SHAPES[settings["network"]],
        method=method,
        stage=stage,
        weights={method: settings["weight"]} if "weight" in settings else None,
        num_labeled=len(data.source if pretraining else data.labeled),
        num_unlabeled=len(data.unlabeled),
        num_indices=data.num_indices,
        epochs=settings["pretrain_epochs"] if pretraining else max(1, settings["steps"] // 60),
        seed=settings["seed"],
    )


def pretrained(data: TransferDataModule, settings: Row) -> nn.Module:
    """The backbone after training on the source with the penalties of the method."""
    model = classifier(network(settings), data, "pretrain", settings)
    if "lautum" in model.penalties:
        model.lautum.fit_inputs([x for x, _ in data.unlabeled_dataloader()])
    fit(model, data.use("pretrain"), max_epochs=settings["pretrain_epochs"])
    return model.backbone


def tensors(samples: Any, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Images, as floats from 0 to 1, and labels."""
    (x, y), _ = samples.__getitems__(range(len(samples))[:most])
    return x, y


@torch.no_grad()
def scores(model: nn.Module, samples: Any, most: int | None = None) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    x, y = tensors(samples, most)
    logits = torch.cat([model(part) for part in x.split(250)])
    return float(cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())


def run(settings: Row, data_dir: str | None) -> Row:
    data = make_data(settings, data_dir)
    backbone = pretrained(data, settings)
    if settings["kind"] == "baseline":
        return baseline(backbone, data, settings)
    torch.manual_seed(settings["seed"])
    model = classifier(backbone, data, "fine_tune", settings)
    fit(model, data.use("fine_tune"), max_steps=settings["steps"], max_epochs=-1)
    judged = data.validation if settings["kind"] == "search" else data.target_test
    loss, accuracy = scores(model, judged)
    return {"loss": loss, "accuracy": accuracy}


def baseline(backbone: nn.Module, data: TransferDataModule, settings: Row) -> Row:
    """Accuracy of plain fine-tuning after some steps, in three ways, from one pretraining."""
    start = {name: value.clone() for name, value in backbone.state_dict().items()}
    x, y = tensors(data.labeled)
    found: Row = {}
    for way, rate in WAYS.items():
        backbone.load_state_dict(start)
        torch.manual_seed(settings["seed"])
        head = nn.Linear(settings["width"], data.target_classes)
        model = nn.Sequential(backbone, head)
        trained = head if way == "head only" else model
        optimizer = torch.optim.Adam(trained.parameters(), lr=rate)
        found[way] = {}
        for step in range(1, max(settings["looks"]) + 1):
            model.eval()
            trained.train()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if step in settings["looks"]:
                found[way][str(step)] = scores(model, data.target_test, 1000)[1]
    return found


def gains(rows: list[Row]) -> dict[str, list[float]]:
    """Points of accuracy over plain fine-tuning by network, pair, labels and method, one for each seed."""
    cells = {}
    for row in rows:
        if row["kind"] == "cell":
            place = f"{row['network']} network, {row['pair']}, {row['labels']} labels"
            cells[place, row["method"], row["seed"]] = 100 * row["accuracy"]
    found = defaultdict(list)
    for (place, method, seed), accuracy in cells.items():
        plain = cells.get((place, "standard", seed))
        if method != "standard" and plain is not None:
            found[f"{place}, {method}"].append(accuracy - plain)
    return dict(found)


def hours_left(rows: list[Row], network: str) -> float:
    """Core-hours of a network's units that are not run, from the mean time of its finished ones."""
    own = [row for row in rows if row["network"] == network]
    long = [row["seconds"] for row in own if row["kind"] != "baseline"]
    times = long or [row["seconds"] for row in own]
    done = {row["unit"] for row in own}
    planned = [name for name, unit in units(short=False).items() if unit["network"] == network]
    left = len([name for name in planned if name not in done])
    return left * sum(times) / max(1, len(times)) / 3600


def verdict(rows: list[Row]) -> Row:
    numbers: Row = {"plain": {}, "gains": {}}
    numbers["hours_left"] = {network: hours_left(rows, network) for network in SHAPES}
    words = []
    for network in SHAPES:
        place = (network, "digits", 50, "standard")
        plain = [
            100 * row["accuracy"]
            for row in rows
            if row["kind"] == "cell"
            and (row["network"], row["pair"], row["labels"], row["method"]) == place
        ]
        if plain:
            numbers["plain"][network] = plain
            mean = f"{sum(plain) / len(plain):.1f}"
            if len(plain) > 2:
                mean = shown(mean_interval(plain), ".1f")
            words.append(
                f"plain fine-tuning of the {network} network on 50 labels {mean} % (seeds: {len(plain)})"
            )
    found = {name: values for name, values in gains(rows).items() if len(values) > 1}
    p = holm([float(ttest_1samp(values, 0).pvalue) for values in found.values()])
    for (name, values), corrected in zip(found.items(), p, strict=True):
        gain = mean_interval(values)
        numbers["gains"][name] = {"gain": gain, "p_holm": corrected, "seeds": len(values)}
        words.append(
            f"{name}: {shown(gain, '+.1f')} points (p = {corrected:.2g}, {len(values)} seeds)"
        )
    words.append("the paper has 34.0 %, +14.4 and +36.5 points")
    for normalised in (True, False):
        own = [r for r in rows if r["kind"] == "baseline" and r["normalised"] == normalised]
        if own:
            norm = "with" if normalised else "without"
            steps = ", ".join(map(str, own[0]["looks"]))
            ways = [f"{way} {curve(own, way)} %" for way in WAYS]
            words.append(
                f"the paper's network {norm} batch norm after {steps} steps of plain fine-tuning "
                f"(seeds: {len(own)}): {', '.join(ways)}"
            )
    hours = numbers["hours_left"]
    words.append(
        f"what is missing of the small network would take {60 * hours['small']:.0f} core-minutes, of the paper's "
        f"at least {hours['paper']:.0f} core-hours"
    )
    return {"verdict": judged(numbers["gains"]), "sentence": "; ".join(words), "numbers": numbers}


def curve(rows: list[Row], way: str) -> str:
    """Mean accuracy over seeds at each look."""
    looks = rows[0][way]
    means = [sum(row[way][look] for row in rows) / len(rows) for look in looks]
    return "/".join(f"{100 * mean:.0f}" for mean in means)


def judged(found: dict[str, Row]) -> str:
    for network in SHAPES:
        cells = {}
        for name in PAPER:
            cell = found.get(f"{network} network, digits, 50 labels, {name}")
            if cell and cell["seeds"] == SEEDS:
                cells[name] = cell
        if len(cells) < len(PAPER):
            continue
        helps = [cell["gain"][1] > 0 and cell["p_holm"] < 0.05 for cell in cells.values()]
        large = [cell["gain"][0] >= PAPER[name] / 2 for name, cell in cells.items()]
        small = [cell["gain"][2] < PAPER[name] / 2 for name, cell in cells.items()]
        if all(helps) and all(large):
            return "reproduced"
        if any(helps):
            return "reproduced in part"
        return "not reproduced, decided" if all(small) else "undecided"
    return "undecided"


def figure(rows: list[Row], canvas: Any) -> None:
    """Gains so far, and plain fine-tuning by steps."""
    left, right = canvas.subplots(1, 2)
    found = gains(rows)
    for place, values in enumerate(found.values()):
        left.plot(values, [place] * len(values), "o")
    left.set_yticks(range(len(found)), list(found), fontsize=7)
    left.axvline(0, color="k", lw=0.5)
    left.set(xlabel="points over plain fine-tuning, one for each seed")
    for row in rows:
        if row["kind"] == "baseline":
            for place, way in enumerate(WAYS):
                norm = "" if row["normalised"] else ", no batch norm"
                label = f"{way}{norm}" if row["seed"] == 0 else None
                values = [100 * value for value in row[way].values()]
                style = "o-" if row["normalised"] else "x--"
                right.plot(row["looks"], values, style, color=f"C{place}", label=label)
    right.axhline(34.0, color="k", lw=0.5)
    right.set(xscale="log", xlabel="steps of fine-tuning", ylabel="accuracy with 50 labels, %")
    right.legend(fontsize=7)


CLAIM = (
    "Lautum and mutual information help semi-supervised transfer from MNIST to notMNIST, and between classes of "
    "CIFAR (P4, tables 1 to 3)"
)
if __name__ == "__main__":
    main(Experiment("semi_supervised", CLAIM, units, run, verdict, figure))
