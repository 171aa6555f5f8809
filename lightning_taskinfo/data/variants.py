"""New tasks from old data: the same images under other labels, or other images under the same."""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike

import numpy as np

from lightning_taskinfo.data.arrays import ArrayData
from lightning_taskinfo.data.pairs import load_dataset

VARIANTS = ("parity", "halves", "inverted", "shuffled", "0+1+7", "3/rest")


def load_task(name: str, *, size: int = 28, seed: int = 0, data_dir: str | PathLike[str] | None = None) -> ArrayData:
    """Return a task by its name: a dataset, and what to make of it after a colon.

    Args:
        name: As in :func:`~lightning_taskinfo.data.load_dataset`, alone or with a variant of :func:`vary` behind a
            colon, such as ``"digits:parity"``, ``"letters:inverted"`` or ``"digits:0+1"``.
        size: Height and width of the embedded digits and letters: 28, or 8.
        seed: Seed of the embedded digits' split, the letters' drawing and shuffled labels.
        data_dir: Folder of further datasets; ``TASKINFO_DATA_DIR`` where not given.

    Raises:
        ValueError: If there is no such dataset or variant.

    Example:
        >>> load_task("digits:parity", size=8).num_classes
        2
    """
    dataset, _, variant = name.partition(":")
    data = load_dataset(dataset, size=size, seed=seed, data_dir=data_dir)
    return vary(data, variant, seed=seed) if variant else data


def vary(data: ArrayData, variant: str, *, seed: int = 0) -> ArrayData:
    """Return the data as another task; its name gets the variant behind a colon.

    Args:
        data: The data.
        variant: ``"parity"`` (even or odd class), ``"halves"`` (lower or upper half of the classes), ``"inverted"``
            (black for white), ``"shuffled"`` (labels at random among the samples of a split), a choice of classes such
            as ``"0+1+7"``, numbered anew from 0, or one class against the others such as ``"3/rest"``.
        seed: Seed of shuffled labels.

    Raises:
        ValueError: If there is no such variant, or a class does not exist.

    Example:
        >>> import numpy as np
        >>> x, y = np.zeros((4, 1, 2, 2), dtype=np.uint8), np.array([0, 1, 2, 3])
        >>> black = ArrayData(x, y, x, y, name="black", num_classes=4)
        >>> vary(black, "halves").y_train, vary(black, "1+3").y_train, vary(black, "inverted").x_train.min()
        (array([0, 0, 1, 1]), array([0, 1]), np.uint8(255))
    """
    name = f"{data.name}:{variant}"
    if variant == "inverted":
        return replace(data, x_train=255 - data.x_train, x_test=255 - data.x_test, name=name)
    if variant == "shuffled":
        rng = np.random.default_rng(seed)
        return replace(data, y_train=rng.permutation(data.y_train), y_test=rng.permutation(data.y_test), name=name)
    if variant == "parity":
        return _relabelled(data, lambda label: label % 2, name)
    if variant == "halves":
        return _relabelled(data, lambda label: int(2 * label >= data.num_classes), name)
    if variant.endswith("/rest"):
        one = _class(variant.removesuffix("/rest"), variant, data)
        return _relabelled(data, lambda label: int(label == one), name)
    classes = [_class(part, variant, data) for part in variant.split("+")]
    if len(classes) < 2 or len(set(classes)) < len(classes):
        raise ValueError(f"`variant` must name two or more different classes, got {variant!r}.")
    return _chosen(data, classes, name)


def _relabelled(data: ArrayData, rule: Callable[[int], int], name: str) -> ArrayData:
    table = np.array([rule(label) for label in range(data.num_classes)], dtype=np.int64)
    return replace(data, y_train=table[data.y_train], y_test=table[data.y_test], name=name, num_classes=2)


def _chosen(data: ArrayData, classes: list[int], name: str) -> ArrayData:
    table = np.full(data.num_classes, -1, dtype=np.int64)
    table[classes] = np.arange(len(classes))
    train, test = (np.isin(labels, classes) for labels in (data.y_train, data.y_test))
    return ArrayData(
        data.x_train[train],
        table[data.y_train[train]],
        data.x_test[test],
        table[data.y_test[test]],
        name=name,
        num_classes=len(classes),
    )


def _class(text: str, variant: str, data: ArrayData) -> int:
    if not (text.isdecimal() and int(text) < data.num_classes):
        raise ValueError(
            f"`variant` must be like one of {', '.join(VARIANTS)}, with classes from 0 to {data.num_classes - 1}, "
            f"got {variant!r}."
        )
    return int(text)
