"""New tasks from old data: the same images under other labels, or other images under the same."""

import re
from collections.abc import Callable
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_taskinfo._random import seed_from
from lightning_taskinfo.data.arrays import ArrayData
from lightning_taskinfo.data.pairs import load_dataset

VARIANTS = ("even-odd", "small-large", "inverted", "random-labels", "only-0-1-7", "one-3")


def load_task(
    name: str | PathLike[str],
    *,
    size: int = 28,
    seed: int = 0,
    data_dir: str | PathLike[str] | None = None,
) -> ArrayData:
    """Return a task by its name: a dataset or several, and what to make of them.

    Args:
        name: As in :func:`~lightning_taskinfo.data.load_dataset`, or several names with ``+``
            between them (their images together, each with classes of its own); then any variants of
            :func:`vary`, each behind a colon.
            Examples: ``"digits:even-odd"``, ``"digits+letters"``, ``"mnist:only-0-1:inverted"``.
        size: Height and width of the embedded digits and letters: 28, or 8.
        seed: Seed of the embedded digits' split, the letters' drawing and random labels.
        data_dir: Folder of further datasets; ``TASKINFO_DATA_DIR`` where not given.

    Raises:
        ValueError: If there is no such dataset or variant, or datasets that are put together differ
            in the shape of their images.

    Example:
        >>> load_task("digits:even-odd", size=8).num_classes
        2
    """
    parts = task_parts(name, size=size, seed=seed, data_dir=data_dir, variant_seed=seed)
    return parts[0] if len(parts) == 1 else _together(parts)


def task_parts(name: str | PathLike[str], *, variant_seed: int, **options: Any) -> list[ArrayData]:
    """Return the datasets of a task one by one, each varied; they have images of one shape.

    Args:
        name: As for :func:`load_task`.
        variant_seed: Seed of random labels.
        **options: Of :func:`~lightning_taskinfo.data.load_dataset`.

    Raises:
        ValueError: As :func:`load_task` does.
    """
    name = fspath(name)
    names, *variants = name.split(":")
    parts = [load_dataset(part, **options) for part in names.split("+")]
    shapes = [str(part.image_shape) for part in parts]
    if len({*shapes}) > 1:
        raise ValueError(
            f"{name!r} must put images of one shape together, got {', '.join(shapes)}."
        )
    for variant in variants:
        parts = [vary(part, variant, seed=variant_seed) for part in parts]
    return parts


def vary(data: ArrayData, variant: str, *, seed: int = 0) -> ArrayData:
    """Return the data as another task; its name gets the variant behind a colon.

    Args:
        data: The data.
        variant: ``"even-odd"`` (of the class), ``"small-large"`` (first half of the classes or
            second), ``"inverted"`` (black for white), ``"random-labels"`` (uniform), a choice of
            classes such as ``"only-0-1-7"``, numbered anew from 0, or one class against the others
            such as ``"one-3"``.
        seed: Seed of random labels.

    Raises:
        ValueError: If there is no such variant, or a class does not exist.

    Example:
        >>> import numpy as np
        >>> x, y = np.zeros((4, 1, 2, 2), dtype=np.uint8), np.array([0, 1, 2, 3])
        >>> black = ArrayData(x, y, x, y, name="black", num_classes=4)
        >>> vary(black, "small-large").y_train, vary(black, "only-1-3").y_train, vary(black, "inverted").x_train.min()
        (array([0, 0, 1, 1]), array([0, 1]), np.uint8(255))
    """
    name = f"{data.name}:{variant}"
    if variant == "inverted":
        return replace(data, x_train=255 - data.x_train, x_test=255 - data.x_test, name=name)
    if variant == "random-labels":
        train, test = _random_labels(data, seed)
        return replace(data, y_train=train, y_test=test, name=name)
    if variant == "even-odd":
        return _relabelled(data, lambda label: label % 2, name)
    if variant == "small-large":
        return _relabelled(data, lambda label: int(label >= data.num_classes // 2), name)
    if found := re.fullmatch(r"one-(\d+)", variant):
        (one,) = _classes(found[1], variant, data)
        return _relabelled(data, lambda label: int(label == one), name)
    if found := re.fullmatch(r"only-(\d+(-\d+)*)", variant):
        return _chosen(data, _classes(found[1], variant, data), name)
    raise ValueError(f"A variant must be like one of {', '.join(VARIANTS)}, got {variant!r}.")


def _random_labels(data: ArrayData, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    generator = torch.Generator().manual_seed(seed_from(seed, 1))
    train, test = (
        torch.randint(data.num_classes, (len(y),), generator=generator).numpy()
        for y in (data.y_train, data.y_test)
    )
    return train, test


def _relabelled(data: ArrayData, rule: Callable[[int], int], name: str) -> ArrayData:
    table = np.array([rule(label) for label in range(data.num_classes)], dtype=np.int64)
    return replace(
        data, y_train=table[data.y_train], y_test=table[data.y_test], name=name, num_classes=2
    )


def _chosen(data: ArrayData, classes: list[int], name: str) -> ArrayData:
    if len(set(classes)) < max(2, len(classes)):
        raise ValueError(
            f"A variant must name two or more different classes, got {name.rpartition(':')[2]!r}."
        )
    table = np.full(data.num_classes, -1, dtype=np.int64)
    table[classes] = np.arange(len(classes))
    splits: dict[str, Any] = {}
    for split in ("train", "test"):
        x, y = getattr(data, f"x_{split}"), getattr(data, f"y_{split}")
        kept = table[y] >= 0
        splits |= {f"x_{split}": x[kept], f"y_{split}": table[y[kept]]}
    return ArrayData(**splits, name=name, num_classes=len(classes))


def _together(parts: list[ArrayData]) -> ArrayData:
    starts = np.cumsum([0, *(part.num_classes for part in parts)])
    splits: dict[str, Any] = {}
    for split in ("train", "test"):
        splits[f"x_{split}"] = np.concatenate([getattr(part, f"x_{split}") for part in parts])
        splits[f"y_{split}"] = np.concatenate(
            [
                getattr(part, f"y_{split}") + start
                for part, start in zip(parts, starts[:-1], strict=True)
            ]
        )
    return ArrayData(
        **splits, name="+".join(part.name for part in parts), num_classes=int(starts[-1])
    )


def _classes(text: str, variant: str, data: ArrayData) -> list[int]:
    classes = [int(part) for part in text.split("-")]
    if max(classes) >= data.num_classes:
        raise ValueError(
            f"A variant must name classes from 0 to {data.num_classes - 1}, got {variant!r}."
        )
    return classes
