"""One pretraining and one fine-tuning of P4's experiments, and the gains over plain fine-tuning.

A pretraining sees the source's labels and the target's images, but none of the target's labels. So it does not depend
on their number, and it is kept: units that differ in labels or in fine-tuning only start from the same one. Temporal
Ensembling acts while fine-tuning only, and shares the pretraining of the method without it. What Lautum information
needs of the unlabelled images is kept as well. A unit has the same result whether it finds these files or makes them.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from units import Row

from lightning_taskinfo._files import make_folder, read_tensors, write_tensors
from lightning_taskinfo._lightning import Callback, LightningModule, Trainer
from lightning_taskinfo.data import ArrayData, load_task
from lightning_taskinfo.transfer import TransferClassifier, TransferDataModule, small_cnn
from lightning_taskinfo.transfer.ready.module import acting
from lightning_taskinfo.transfer.training import quiet

PAIRS = {
    "digits": ("mnist", "notmnist"),
    "objects": ("cifar10_12k:only-0-1-2-3-4", "cifar10_12k:only-5-6-7-8-9"),
}
SHAPES = {"paper": (3, 32, 32), "small": (1, 28, 28)}
SOURCE_TEST = 1000  # test images of the source that are looked at
FITTED = ("mean", "whitener", "effective_dim", "samples")  # what Lautum keeps of inputs


class Noise(nn.Module):
    """Gaussian noise on the inputs while training."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.15 * torch.randn_like(x) if self.training else x


class GradientRatios(Callback):
    """The last measured norm of each penalty's gradient over that of the loss."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        for key, value in trainer.callback_metrics.items():
            if key.endswith("/gradient_ratio"):
                self.found[key.split("/")[-2]] = float(value)


def large_cnn(channels: int, width: int) -> nn.Module:
    """Nine convolutions with batch normalisation and dropout, the network of Laine and Aila (2017)."""
    return nn.Sequential(
        _convolutions(channels, *[width] * 3, padding=1),
        nn.Sequential(nn.MaxPool2d(2), nn.Dropout()),
        _convolutions(width, *[2 * width] * 3, padding=1),
        nn.Sequential(nn.MaxPool2d(2), nn.Dropout()),
        _convolutions(2 * width, 4 * width),
        _convolutions(4 * width, 2 * width, width, kernel=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def _convolutions(inner: int, *outer: int, kernel: int = 3, padding: int = 0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in outer:
        layers += [
            nn.Conv2d(inner, width, kernel, padding=padding),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.1),
        ]
        inner = width
    return nn.Sequential(*layers)


def network(settings: Row) -> nn.Module:
    torch.manual_seed(settings["seed"])
    shape = SHAPES[settings["network"]]
    if settings["network"] == "small":
        return small_cnn(shape)
    net = nn.Sequential(Noise(), large_cnn(shape[0], settings["width"]))
    if not settings.get("normalised", True):
        for module in list(net.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.Identity())
    return net.to(memory_format=torch.channels_last)  # a fifth faster


@cache
def load(name: str, data_dir: str | None) -> ArrayData:
    return load_task(name, data_dir=data_dir)


def make_data(settings: Row, data_dir: str | None) -> TransferDataModule:
    names = PAIRS[settings["pair"]] if data_dir else ("digits", "letters")
    source, target = (load(name, data_dir) for name in names)
    source = replace(source, x_test=source.x_test[:SOURCE_TEST], y_test=source.y_test[:SOURCE_TEST])
    data = TransferDataModule(
        source,
        target,
        labels=settings.get("labels", 50),
        max_source=settings["samples"],
        max_unlabeled=settings["samples"],
        image_shape=SHAPES[settings["network"]],
        batch_size=50,
        seed=settings["seed"],
    )
    data.setup()
    if settings["kind"] == "search":
        rows = data.labeled.index.numpy()  # in turns of classes: the last 20 are as many of each
        x, y = target.x_train, target.y_train
        others = np.setdiff1d(np.arange(len(x)), rows[30:])
        data.labeled = data.samples(x, y, rows[:30])
        data.held_out = data.samples(x, y, rows[30:])
        others = np.random.default_rng(settings["seed"]).permutation(others)
        data.unlabeled = data.samples(x, rows=np.sort(others[: settings["samples"]]))
    return data


def fit(model: Any, data: TransferDataModule, **options: Any) -> None:
    with quiet():
        trainer = Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            **options,
        )
        trainer.fit(model, datamodule=data)


def weights_of(settings: Row) -> dict[str, float]:
    """Weights by penalty: of the one that the unit names, or of each part of a combination."""
    if "weight" in settings:
        return {settings["method"]: settings["weight"]}
    return settings.get("weights", {})


def classifier(
    backbone: nn.Module, data: TransferDataModule, stage: str, settings: Row
) -> LightningModule:
    pretraining = stage == "pretrain"
    return TransferClassifier(
        backbone,
        data.source_classes if pretraining else data.target_classes,
        SHAPES[settings["network"]],
        method=settings.get("method", "standard"),
        stage=stage,
        weights=weights_of(settings),
        num_labeled=len(data.source if pretraining else data.labeled),
        num_unlabeled=len(data.unlabeled),
        num_indices=data.num_indices,
        epochs=settings["pretrain_epochs"] if pretraining else max(1, settings["steps"] // 60),
        seed=settings["seed"],
    )


def kept(folder: Path, name: str, key: Row, make: Callable[[], Any]) -> Any:
    """Return what was made for the same key before, or make it and keep it."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = make_folder(folder) / f"{name}-{digest}.pt"
    if not path.exists():
        write_tensors(path, make())
    return read_tensors(path, advice="Delete it to make it again.")


def images_key(settings: Row, data_dir: str | None) -> Row:
    """All that decides which images are seen without their labels; the number of labels does not."""
    key = {name: settings[name] for name in ("pair", "network", "samples", "seed")}
    # A search leaves the images out by whose labels it judges.
    return key | {"search": settings["kind"] == "search", "files": data_dir is not None}


def start_key(settings: Row, data_dir: str | None) -> Row:
    """All that decides a pretraining."""
    key = {name: settings[name] for name in ("width", "pretrain_epochs")}
    key["normalised"] = settings.get("normalised", True)
    weights = weights_of(settings)
    for name in acting(settings.get("method", "standard"), "pretrain"):
        key[name] = weights.get(name, "default")
    return key | images_key(settings, data_dir)


def start_from(
    settings: Row, data: TransferDataModule, data_dir: str | None, folder: Path
) -> tuple[nn.Module, Row]:
    """Return the pretrained backbone, with the source's accuracy and the ratios of the penalties' gradients."""

    def make() -> Row:
        return pretrained(settings, data, data_dir, folder)

    start = kept(folder, "start", start_key(settings, data_dir), make)
    backbone = network(settings)
    backbone.load_state_dict(start.pop("backbone"))
    return backbone, start


def pretrained(
    settings: Row, data: TransferDataModule, data_dir: str | None, folder: Path
) -> dict[str, Any]:
    """Train on the source with the penalties of the method."""
    model = classifier(network(settings), data, "pretrain", settings)
    if "lautum" in model.penalties:
        inputs = [x for x, _ in data.unlabeled_dataloader()]

        def fitted() -> dict[str, Tensor]:
            state = model.lautum.fit_inputs(inputs).state_dict()
            return {name: state[name] for name in FITTED}

        found = kept(folder, "inputs", images_key(settings, data_dir), fitted)
        model.lautum.load_state_dict(found, strict=False)
    ratios = GradientRatios()
    data.use("pretrain")
    fit(model, data, callbacks=[ratios], max_epochs=settings["pretrain_epochs"])
    return {
        "backbone": model.backbone.state_dict(),
        "source_accuracy": scores(model, data.source_test)[1],
        "gradient_ratios": ratios.found,
    }


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


def fine_tuned(settings: Row, data_dir: str | None, folder: Path) -> Row:
    """Loss and accuracy after fine-tuning: on test images, or in a search on the labels that were held out."""
    data = make_data(settings, data_dir)
    backbone, start = start_from(settings, data, data_dir, folder)
    torch.manual_seed(settings["seed"])
    model = classifier(backbone, data, "fine_tune", settings)
    fit(model, data.use("fine_tune"), max_steps=settings["steps"], max_epochs=-1)
    judged = data.held_out if settings["kind"] == "search" else data.target_test
    loss, accuracy = scores(model, judged)
    return {"loss": loss, "accuracy": accuracy, **start}


def table_of(row: Row) -> str:
    """The network, and what was changed in it."""
    norm = "" if row.get("normalised", True) else " without batch norm"
    return f"{row['network']} network{norm}"


def found_weights(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Of each network and method the weight with the smallest loss in the search, on average over its seeds."""
    losses: dict[str, dict[str, dict[float, list[float]]]] = {}
    for row in rows:
        if row["kind"] == "search":
            of_method = losses.setdefault(row["network"], {}).setdefault(row["method"], {})
            of_method.setdefault(row["weight"], []).append(row["loss"])
    found: dict[str, dict[str, float]] = {}
    for network, methods in losses.items():
        found[network] = {}
        for method, by_weight in methods.items():
            means = {weight: sum(values) / len(values) for weight, values in by_weight.items()}
            found[network][method] = min(means, key=means.__getitem__)
    return found


def accuracies(rows: list[Row]) -> dict[tuple[str, int, str], dict[int, float]]:
    """Accuracy in percent by seed, of each table, number of labels and method."""
    found: dict[tuple[str, int, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == "cell":
            place = table_of(row), row["labels"], row["method"]
            found[place][row["seed"]] = 100 * row["accuracy"]
    return dict(found)


def gains(rows: list[Row]) -> dict[tuple[str, int, str], dict[int, float]]:
    """Points of accuracy over plain fine-tuning by seed, of each table, number of labels and method."""
    cells = accuracies(rows)
    found = {}
    for (table, labels, method), values in cells.items():
        plain = cells.get((table, labels, "standard"), {})
        both = {seed: values[seed] - plain[seed] for seed in values if seed in plain}
        if method != "standard" and both:
            found[table, labels, method] = both
    return found
