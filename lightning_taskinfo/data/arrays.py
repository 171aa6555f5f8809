"""What every loader returns: labelled images in memory, split once and checked once."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from lightning_taskinfo._warn import warn
from lightning_taskinfo.data._images import as_images, as_labels


@dataclass(frozen=True, eq=False)
class ArrayData:
    """Labelled images with a training and a test split.

    Args:
        x_train: Training images, uint8, shape ``[N, C, H, W]``. Those of shape ``[N, H, W]`` get a
            channel axis, and channels at the end (1, 3 or 4 of them) move to the front. A tensor
            does as well.
        y_train: Their classes, whole numbers from ``0`` to ``num_classes - 1``, shape ``[N]``; kept
            as int64.
        x_test: Test images, in the same way, shape ``[M, C, H, W]``.
        y_test: Their classes, shape ``[M]``.
        name: What to call the data in tables and plots.
        num_classes: Number of classes.
        labels: What a file called the classes, in their order, where that is not 0, 1, 2 and so on.

    Raises:
        ValueError: If a kind, a shape, a length or a label is not as above.

    Example:
        >>> x, y = np.full((3, 1, 2, 2), 255, dtype=np.uint8), np.array([0, 1, 1])
        >>> data = ArrayData(x, y, x, y, name="white", num_classes=2)
        >>> data.image_shape, len(data.train())
        ((1, 2, 2), 3)
        >>> image, label = data.train()[0]
        >>> image.max(), label
        (tensor(1.), tensor(0))
    """

    x_train: NDArray[np.uint8]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.uint8]
    y_test: NDArray[np.int64]
    name: str
    num_classes: int
    labels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise ValueError(f"`num_classes` must be at least 2, got {self.num_classes}.")
        for split in ("train", "test"):
            object.__setattr__(
                self, f"x_{split}", as_images(getattr(self, f"x_{split}"), f"x_{split}")
            )
            object.__setattr__(
                self, f"y_{split}", as_labels(getattr(self, f"y_{split}"), f"y_{split}")
            )
            self._check(split)
        if self.x_test.shape[1:] != self.image_shape:
            raise ValueError(
                f"`x_test` must hold images of the shape of `x_train`, {self.image_shape}, got {self.x_test.shape[1:]}."
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        _, channels, height, width = self.x_train.shape
        return channels, height, width

    def train(self) -> TensorDataset:
        """Return the training split as float32 images in ``[0, 1]`` with their classes."""
        return _scaled(self.x_train, self.y_train)

    def test(self) -> TensorDataset:
        """Return the test split as float32 images in ``[0, 1]`` with their classes."""
        return _scaled(self.x_test, self.y_test)

    def _check(self, split: str) -> None:
        x, y = getattr(self, f"x_{split}"), getattr(self, f"y_{split}")
        if len(x) != len(y) or not len(x):
            raise ValueError(
                f"`x_{split}` and `y_{split}` must have the same positive length, got {len(x)} and {len(y)}."
            )
        if y.min() < 0 or y.max() >= self.num_classes:
            raise ValueError(
                f"`y_{split}` must lie between 0 and {self.num_classes - 1}, got {y.min()} to {y.max()}."
            )


def _scaled(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> TensorDataset:
    return TensorDataset(torch.from_numpy(images).float() / 255, torch.from_numpy(labels))


def from_any(splits: dict[str, Any], *, name: str, num_classes: int | None = None) -> ArrayData:
    """Make an :class:`ArrayData` from arrays as files hold them.

    Args:
        splits: ``x_train``, ``y_train``, ``x_test`` and ``y_test``.
        name: What to call the data.
        num_classes: Number of classes, for labels that count from 0. Where not given, the classes
            are the labels that occur, in their order.
    """
    arrays: dict[str, Any] = {
        key: a if key.startswith("x") else as_labels(a, key) for key, a in splits.items()
    }
    if num_classes is not None:
        return ArrayData(**arrays, name=name, num_classes=num_classes)
    occurring = np.unique(np.concatenate([arrays["y_train"], arrays["y_test"]]))
    labels = None
    if not np.array_equal(occurring, np.arange(len(occurring))) and occurring.min() >= 0:
        labels = tuple(occurring.tolist())
        arrays |= {key: np.searchsorted(occurring, arrays[key]) for key in ("y_train", "y_test")}
        shown = ", ".join(
            map(str, [*labels[:3], *(["…"] if len(labels) > 4 else []), *labels[3:][-1:]])
        )
        warn(
            f"`y_train` and `y_test` of {name!r} have the labels {shown}, which become the classes 0 to "
            f"{len(labels) - 1}; `num_classes` keeps labels that count from 0 as they are.",
        )
    # Refuses labels below 0.
    data = ArrayData(**arrays, name=name, num_classes=len(occurring) or 2, labels=labels)
    if len(absent := np.setdiff1d(np.arange(len(occurring)), data.y_train)) and data.y_train.size:
        warn(
            f"`y_train` of {name!r} has no sample of {len(absent)} of {len(occurring)} classes: {absent[0]} first."
        )
    return data
