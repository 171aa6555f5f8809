"""Two tiny tasks of 8×8 images that a small network learns in a second, at the top of a module for other processes."""

import numpy as np
from torch import nn

from lightning_taskinfo.data import ArrayData
from lightning_taskinfo.transfer import Stages, TransferDataModule
from lightning_taskinfo.transfer.ready import Ready
from lightning_taskinfo.transfer.training import RunLog

STAGES = Stages(pretrain_epochs=2, fine_tune_epochs=2, learning_rate=0.02)


def tiny_task(seed=0, *, classes=3, samples=90, size=8, channels=1, name="tiny"):
    """Each class is a fixed random image under noise."""
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, 200, (classes, channels, size, size))
    splits = {}
    for split, count in (("train", samples), ("test", 60)):
        y = np.arange(count) % classes
        noise = rng.integers(-40, 56, (count, channels, size, size))
        splits[f"x_{split}"] = (centres[y] + noise).clip(0, 255).astype(np.uint8)
        splits[f"y_{split}"] = y.astype(np.int64)
    return ArrayData(**splits, name=name, num_classes=classes)


def tiny_data(**changes):
    arguments = {"labels": 9, "batch_size": 16, **changes}
    source = arguments.pop("source", None) or tiny_task(0, name="source")
    target = arguments.pop("target", None) or tiny_task(1, name="target")
    return TransferDataModule(source, target, **arguments)


def tiny_net(image_shape):
    channels, height, width = image_shape
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * height * width, 12), nn.ReLU(), nn.Dropout(0.2)
    )


def tiny_trials(folder, *, methods=("standard",), seeds=(0,)):
    """The trainings that ``transfer`` would run."""
    options = {"methods": methods, "stages": STAGES, "weights": None}
    recipe = Ready(tiny_net, tiny_data(), None, seeds, "cpu", "full", **options)
    return recipe.trials(folder, RunLog())
