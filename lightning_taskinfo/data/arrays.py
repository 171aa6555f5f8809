"""Labelled images, split once and checked once: in memory, and in npz files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_taskinfo._files import StrPath, atomic_write
from lightning_taskinfo._warn import warn

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

# Of images whose channels may be at the end: grey, colour, colour with opacity.
CHANNELS = (1, 3, 4)
KEYS = ("x_train", "y_train", "x_test", "y_test")


def channels_last(shape: Sequence[int]) -> bool:
    """Whether images of this shape, samples first, have their channels at the end.

    They do where the last axis is as long as channels are and the first one of an image is not;
    ``[N, 3, 8, 3]``, where both are, has them first.

    Example:
        >>> channels_last((90, 12, 12, 3)), channels_last((90, 3, 12, 12)), channels_last((90, 3, 8, 3))
        (True, False, False)
    """
    return len(shape) == 4 and shape[-1] in CHANNELS and shape[1] not in CHANNELS


def as_images(argument: str, images: Any) -> Images:
    """Return bytes of shape ``[N, C, H, W]``; nothing but axes is converted, numbers are refused and not guessed at."""
    x = _array(argument, images)
    if x.dtype != np.uint8:
        values = ""
        if x.size and x.dtype.kind in "biuf":
            values = f" from {x.min():g} to {x.max():g}"
        raise ValueError(f"`{argument}` must be uint8, from 0 to 255, got {x.dtype}{values}.")
    if x.ndim not in (3, 4):
        raise ValueError(
            f"`{argument}` must have the shape [N, H, W], [N, C, H, W] or [N, H, W, C], got {x.shape}."
        )
    if channels_last(x.shape):
        return np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return x[:, None] if x.ndim == 3 else x


def as_labels(argument: str, labels: Any) -> Labels:
    """Return whole numbers of any kind as int64, shape ``[N]``.

    Args:
        argument: What the caller calls them, for messages.
        labels: An array, a tensor or a list.

    Raises:
        ValueError: If they are something else.
    """
    y = _array(argument, labels)
    if y.size and y.dtype.kind not in "iu":
        first = y.flat[0].item()
        raise ValueError(
            f"`{argument}` must be whole numbers, got {y.dtype} such as {first!r}; number the classes from 0."
        )
    if y.ndim != 1:
        raise ValueError(f"`{argument}` must have the shape [N], got {y.shape}.")
    return y.astype(np.int64, copy=False)


def _array(argument: str, values: Any) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError as error:  # of lists of different lengths
        raise ValueError(f"`{argument}` must be an array of one shape ({error}).") from error


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

    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels
    name: str
    num_classes: int

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise ValueError(f"`num_classes` must be at least 2, got {self.num_classes}.")
        for split in ("train", "test"):
            images = f"x_{split}"
            labels = f"y_{split}"
            x = as_images(images, getattr(self, images))
            y = as_labels(labels, getattr(self, labels))
            if len(x) != len(y) or not len(x):
                raise ValueError(
                    f"`{images}` and `{labels}` must have the same positive length, got {len(x)} and {len(y)}."
                )
            if y.min() < 0 or y.max() >= self.num_classes:
                raise ValueError(
                    f"`{labels}` must lie between 0 and {self.num_classes - 1}, got {y.min()} to {y.max()}."
                )
            object.__setattr__(self, images, x)
            object.__setattr__(self, labels, y)
        if self.x_test.shape[1:] != self.image_shape:
            raise ValueError(
                f"`x_test` must hold images of the shape of `x_train`, {self.image_shape}, got {self.x_test.shape[1:]}."
            )

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Channels, height and width of one image."""
        return self.x_train.shape[1:]

    def train(self) -> TensorDataset:
        """Return the training split as float32 images in ``[0, 1]`` with their classes."""
        return _scaled(self.x_train, self.y_train)

    def test(self) -> TensorDataset:
        """Return the test split as float32 images in ``[0, 1]`` with their classes."""
        return _scaled(self.x_test, self.y_test)


def _scaled(images: Images, labels: Labels) -> TensorDataset:
    x = torch.from_numpy(images).float() / 255
    return TensorDataset(x, torch.from_numpy(labels))


def load_npz(path: StrPath, *, name: str | None = None) -> ArrayData:
    """Return the arrays ``x_train``, ``y_train``, ``x_test`` and ``y_test`` of an npz file.

    Args:
        path: The file. Images are uint8, ``[N, H, W]``, ``[N, C, H, W]`` or ``[N, H, W, C]``;
            labels are whole numbers that count from 0. An array ``num_classes`` says how many
            classes there are; without it, they reach up to the largest label.
        name: What to call the data; the file's own ``name``, or its file name, where not given.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no readable npz file, lacks an array, or the arrays do not make an
            :class:`ArrayData`.

    Example::

        sketches = load_npz("sketches.npz")
        sketches.image_shape, sketches.num_classes
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"A dataset must be an npz file, but there is no file at {path}.")
    try:
        with path.open("rb") as file:  # numpy leaves a broken file open
            arrays = dict(np.load(file, allow_pickle=False))
    except Exception as error:  # numpy, zip and zlib have one for every kind of damage
        raise ValueError(f"{path}: not a readable npz file of plain arrays ({error}).") from error
    if missing := [key for key in KEYS if key not in arrays]:
        raise ValueError(
            f"{path}: the arrays {', '.join(missing)} are missing; there are {', '.join(arrays) or 'none'}."
        )
    splits = {key: arrays[key] for key in KEYS}
    name = name or str(arrays.get("name", path.stem))
    told = arrays.get("num_classes")
    try:
        classes = _count_classes(splits) if told is None else int(told)
        data = ArrayData(**splits, name=name, num_classes=classes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    absent = np.setdiff1d(np.arange(classes), data.y_train)
    if told is None and len(absent):
        warn(
            f"`y_train` of {name!r} has no training sample of {len(absent)} of {classes} classes, the first of them "
            f"{absent[0]}; classes count from 0."
        )
    return data


def _count_classes(splits: dict[str, Any]) -> int:
    """Number of classes up to the largest label; more of them than samples is no way to count from 0."""
    labels = np.concatenate([as_labels(key, splits[key]) for key in ("y_train", "y_test")])
    largest = int(labels.max()) if labels.size else 1
    if largest > max(1, len(labels)):
        raise ValueError(
            f"`y_train` and `y_test` must count the classes from 0, got {largest} among {len(labels)} labels."
        )
    return largest + 1


def save_npz(path: StrPath, data: ArrayData) -> None:
    """Write ``data`` so that :func:`load_npz` returns it; a process killed meanwhile leaves what was there before.

    Args:
        path: The file to write or replace; its folder must exist.
        data: What to write.

    Example::

        save_npz("letters.npz", load_letters(size=28))
    """
    # What may be missing goes first: damage that cuts the list of arrays short is then seen by the
    # reader.
    arrays = {key: getattr(data, key) for key in ("name", "num_classes", *KEYS)}
    with atomic_write(path) as file:
        np.savez(file, **arrays)
