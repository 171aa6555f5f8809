"""What every loader returns: labelled images in memory, split once and checked once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_taskinfo._warn import warn

# Of images whose channels may be at the end: grey, colour, colour with opacity.
CHANNELS = (1, 3, 4)


def channels_last(shape: Sequence[int]) -> bool:
    """Whether images of this shape, samples first, have their channels at the end.

    They do where the last axis is as long as channels are and the first one of an image is not;
    ``[N, 3, 8, 3]``, where both are, has them first.

    Example:
        >>> channels_last((90, 12, 12, 3)), channels_last((90, 3, 12, 12)), channels_last((90, 3, 8, 3))
        (True, False, False)
    """
    return len(shape) == 4 and shape[-1] in CHANNELS and shape[1] not in CHANNELS


def as_images(images: Any, argument: str) -> NDArray[np.uint8]:
    """Return bytes of shape ``[N, C, H, W]``; nothing but axes is converted, numbers are refused and not guessed at.

    Args:
        images: Of shape ``[N, H, W]``, ``[N, C, H, W]`` or ``[N, H, W, C]``; an array, a tensor or
            nested lists.
        argument: What the caller calls them, for messages.

    Raises:
        ValueError: If they are no bytes, or of another shape.
    """
    x = _array(images, argument)
    if x.dtype != np.uint8:
        raise ValueError(f"`{argument}` must be {_no_bytes(x)}.")
    if x.ndim not in (3, 4):
        raise ValueError(
            f"`{argument}` must have the shape [N, H, W], [N, C, H, W] or [N, H, W, C], got {x.shape}."
        )
    if channels_last(x.shape):
        return np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return x[:, None] if x.ndim == 3 else x


def as_labels(labels: Any, argument: str) -> NDArray[np.int64]:
    """Return whole numbers of any kind as int64, shape ``[N]``.

    Args:
        labels: An array, a tensor or a list.
        argument: What the caller calls them, for messages.

    Raises:
        ValueError: If they are no whole numbers, or of another shape.
    """
    y = _array(labels, argument)
    if y.size and y.dtype.kind not in "iu":
        raise ValueError(f"`{argument}` must be whole numbers, got {_no_whole_numbers(y)}.")
    if y.ndim != 1:
        raise ValueError(f"`{argument}` must have the shape [N], got {y.shape}.")
    return y.astype(np.int64, copy=False)


def _array(values: Any, argument: str) -> NDArray[Any]:
    if isinstance(values, Tensor):
        return np.asarray(values.detach().cpu().numpy())
    try:
        return np.asarray(values)
    except ValueError as error:  # of lists of different lengths
        raise ValueError(f"`{argument}` must be an array of one shape ({error}).") from error


def _no_bytes(x: NDArray[Any]) -> str:
    """The rule, what was given, and what makes bytes of it."""
    if x.dtype == bool:
        return "uint8, got bool; 255 * x.astype('uint8') makes them"
    if not x.size or x.dtype.kind not in "iuf":
        return f"uint8, got {x.dtype}"
    if count := int((~np.isfinite(x)).sum()):
        return f"finite, got {count} values that are not"
    low, high = x.min(), x.max()
    if low < 0 or high > 255:
        return (
            f"uint8, got {x.dtype} from {low:g} to {high:g}; bytes go from 0 to 255, and a pair of datasets may hold "
            "real images"
        )
    if x.dtype.kind in "iu":
        return f"uint8, got {x.dtype}; x.astype('uint8') makes them of whole numbers from 0 to 255"
    if high > 1:
        return f"uint8, got {x.dtype}; x.round().astype('uint8') makes them of floats from 0 to 255"
    return (
        f"uint8, got {x.dtype}; (255 * x).round().astype('uint8') makes them of floats from 0 to 1"
    )


def _no_whole_numbers(y: NDArray[Any]) -> str:
    if y.dtype.kind in "US":
        return f"strings such as {y.flat[0].item()!r}; number the classes from 0"
    whole = y.dtype == bool
    if y.dtype.kind == "f":
        is_whole = np.isfinite(y) & (y == np.round(y))
        whole = bool(is_whole.all())
    return f"{y.dtype}; y.astype('int64') makes them" if whole else f"{y.dtype}"


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
            images = f"x_{split}"
            labels = f"y_{split}"
            object.__setattr__(self, images, as_images(getattr(self, images), images))
            object.__setattr__(self, labels, as_labels(getattr(self, labels), labels))
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
        x = getattr(self, f"x_{split}")
        y = getattr(self, f"y_{split}")
        if len(x) != len(y) or not len(x):
            raise ValueError(
                f"`x_{split}` and `y_{split}` must have the same positive length, got {len(x)} and {len(y)}."
            )
        if y.min() < 0 or y.max() >= self.num_classes:
            raise ValueError(
                f"`y_{split}` must lie between 0 and {self.num_classes - 1}, got {y.min()} to {y.max()}."
            )


def _scaled(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> TensorDataset:
    x = torch.from_numpy(images).float() / 255
    y = torch.from_numpy(labels)
    return TensorDataset(x, y)


def from_any(splits: dict[str, Any], *, name: str, num_classes: int | None = None) -> ArrayData:
    """Make an :class:`ArrayData` from arrays as files hold them.

    Args:
        splits: ``x_train``, ``y_train``, ``x_test`` and ``y_test``.
        name: What to call the data.
        num_classes: Number of classes, for labels that count from 0. Where not given, the classes
            are the labels that occur, in their order.
    """
    arrays = dict(splits)
    for key in ("y_train", "y_test"):
        arrays[key] = as_labels(arrays[key], key)
    if num_classes is not None:
        return ArrayData(**arrays, name=name, num_classes=num_classes)
    both = [arrays["y_train"], arrays["y_test"]]
    occurring = np.unique(np.concatenate(both))
    labels = None
    in_order = np.array_equal(occurring, np.arange(len(occurring)))
    if not in_order and occurring.min() >= 0:
        labels = tuple(occurring.tolist())
        for key in ("y_train", "y_test"):
            arrays[key] = np.searchsorted(occurring, arrays[key])
        words = [str(label) for label in labels]
        if len(words) > 4:
            words = [*words[:3], "…", words[-1]]
        shown = ", ".join(words)
        warn(
            f"`y_train` and `y_test` of {name!r} have the labels {shown}, which become the classes 0 to "
            f"{len(labels) - 1}; `num_classes` keeps labels that count from 0 as they are.",
        )
    # Refuses labels below 0.
    data = ArrayData(**arrays, name=name, num_classes=len(occurring) or 2, labels=labels)
    absent = np.setdiff1d(np.arange(len(occurring)), data.y_train)
    if len(absent) and data.y_train.size:
        warn(
            f"`y_train` of {name!r} has no sample of {len(absent)} of {len(occurring)} classes: {absent[0]} first."
        )
    return data
