"""Datasets and tasks by name: a cache of drawn data, files of your own, and new tasks from old data."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_taskinfo._files import StrPath
from lightning_taskinfo._random import seed_from
from lightning_taskinfo._warn import warn
from lightning_taskinfo.data.arrays import ArrayData, Labels, load_npz, save_npz
from lightning_taskinfo.data.embedded import load_digits, load_letters

VERSION = 2  # part of every cache file's name: raise it when a loader's output changes
EMBEDDED: dict[str, Callable[..., ArrayData]] = {"digits": load_digits, "letters": load_letters}
VARIANTS = ("even-odd", "small-large", "inverted", "random-labels", "only-0-1-7", "one-3")


def load_dataset(
    name: StrPath,
    *,
    size: int = 28,
    seed: int = 0,
    data_dir: StrPath | None = None,
) -> ArrayData:
    """Return a dataset by its name.

    ``digits`` and ``letters`` need no files: they are made once and cached in
    ``TASKINFO_CACHE_DIR``, or in ``lightning_taskinfo`` below the user's cache folder. Any other
    name is a file ``<name>.npz`` in ``data_dir``, or else the path of an npz file.

    Args:
        name: ``"digits"``, ``"letters"``, or the name or path of a file.
        size: Height and width of the embedded digits and letters: 28, or 8.
        seed: Seed of the embedded digits' split and the letters' drawing.
        data_dir: Folder of further datasets; ``TASKINFO_DATA_DIR`` where not given.

    Raises:
        ValueError: If ``name`` is neither embedded nor found.
    """
    name = os.fspath(name)
    if name in EMBEDDED:
        return cached(f"{name}-{size}-{seed}", lambda: EMBEDDED[name](size=size, seed=seed))
    folder = data_dir or os.environ.get("TASKINFO_DATA_DIR")
    paths = [Path(folder, f"{name}.npz")] if folder else []
    for path in (*paths, Path(name)):
        if path.is_file():
            return load_npz(path)
    raise ValueError(
        f"A dataset must be {' or '.join(EMBEDDED)} or name a file; {name!r} was not found at this path. "
        f"Names of files are looked up in `data_dir` or TASKINFO_DATA_DIR, which is {folder}."
    )


def cache_dir() -> Path:
    """Return the folder of cached data: ``TASKINFO_CACHE_DIR``, else one below the user's cache folder."""
    if own := os.environ.get("TASKINFO_CACHE_DIR"):
        return Path(own).expanduser()
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(users) / "lightning_taskinfo"


def cached(name: str, build: Callable[[], ArrayData]) -> ArrayData:
    """Return what ``build`` made when it was last called under this name, or call it and keep the result.

    A file that cannot be read is made anew, and a folder that cannot be written to costs a warning,
    not the data.

    Args:
        name: Name of what is built, with all that it depends on.
        build: Makes the data.
    """
    path = cache_dir() / f"{name}-version{VERSION}.npz"
    try:
        return load_npz(path)
    except (OSError, ValueError):  # not there, not readable, or broken by something else
        data = build()
    try:
        save_npz(path, data)
    except OSError as error:
        warn(f"The data is not cached: {error}")
    return data


def load_task(
    name: StrPath,
    *,
    size: int = 28,
    seed: int = 0,
    data_dir: StrPath | None = None,
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
    if len(parts) == 1:
        return parts[0]
    # The classes of each dataset come after those of the ones before it.
    first = np.cumsum([0, *(part.num_classes for part in parts)])
    arrays = {}
    for split in ("train", "test"):
        labels = [getattr(part, f"y_{split}") + n for part, n in zip(parts, first, strict=False)]
        arrays[f"x_{split}"] = np.concatenate([getattr(part, f"x_{split}") for part in parts])
        arrays[f"y_{split}"] = np.concatenate(labels)
    names = "+".join(part.name for part in parts)
    return ArrayData(**arrays, name=names, num_classes=int(first[-1]))


def task_parts(name: StrPath, *, variant_seed: int, **options: Any) -> list[ArrayData]:
    """Return the datasets of a task one by one, each varied; they have images of one shape.

    Args:
        name: As for :func:`load_task`.
        variant_seed: Seed of random labels.
        **options: Of :func:`~lightning_taskinfo.data.load_dataset`.

    Raises:
        ValueError: As :func:`load_task` does.
    """
    name = os.fspath(name)
    if os.path.exists(name):  # whose name may have any character
        return [load_dataset(name, **options)]
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
        generator = torch.Generator().manual_seed(seed_from(seed, 1))
        train, test = (
            torch.randint(data.num_classes, y.shape, generator=generator).numpy()
            for y in (data.y_train, data.y_test)
        )
        return replace(data, y_train=train, y_test=test, name=name)
    table = _new_classes(variant, data.num_classes)
    arrays = {}
    for split in ("train", "test"):
        y = table[getattr(data, f"y_{split}")]
        arrays[f"x_{split}"] = getattr(data, f"x_{split}")[y >= 0]
        arrays[f"y_{split}"] = y[y >= 0]
    return ArrayData(**arrays, name=name, num_classes=int(table.max()) + 1)


def _new_classes(variant: str, num_classes: int) -> Labels:
    """Return the new class of every old one, and -1 for those that are left out."""
    old = np.arange(num_classes)
    if variant == "even-odd":
        return old % 2
    if variant == "small-large":
        return (old >= num_classes // 2).astype(np.int64)
    if not re.fullmatch(r"only(-\d+)+|one-\d+", variant):
        raise ValueError(f"A variant must be like one of {', '.join(VARIANTS)}, got {variant!r}.")
    kind, *numbers = variant.split("-")
    chosen = [int(number) for number in numbers]
    least = 1 if kind == "one" else 2
    if max(chosen) >= num_classes or len({*chosen}) < max(least, len(chosen)):
        raise ValueError(
            f"A variant must name different classes from 0 to {num_classes - 1}, two or more behind only, "
            f"got {variant!r}."
        )
    if kind == "one":
        return (old == chosen[0]).astype(np.int64)
    table = np.full(num_classes, -1, dtype=np.int64)
    table[chosen] = np.arange(len(chosen))
    return table
