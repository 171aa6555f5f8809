"""Labelled images from whatever a user has, brought to one shape."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_taskinfo._ranges import check_finite
from lightning_taskinfo._warn import warn
from lightning_taskinfo.data import ArrayData, load_idx, load_npz, load_task
from lightning_taskinfo.data.arrays import channels_last

Shape = tuple[int, int, int]
CHUNK = 4096  # images resized at once


@dataclass(frozen=True, eq=False)
class Images:
    """Images in memory, bytes or floats, with their classes.

    Attributes:
        x: Images, uint8 from 0 to 255 or floats, shape ``[N, C, H, W]``.
        y: Their classes, int64, shape ``[N]``.
    """

    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class ImageTask:
    """A classification task: a training and a test split, with a name."""

    name: str
    num_classes: int
    train: Images
    test: Images

    @property
    def image_shape(self) -> Shape:
        """Channels, height and width of one image."""
        _, channels, height, width = self.train.x.shape
        return channels, height, width


def as_task(
    what: Any,
    *,
    argument: str,
    data_dir: str | os.PathLike[str] | None = None,
) -> ImageTask:
    """Return the task that ``what`` stands for.

    Args:
        what: An :class:`ArrayData`; a name, npz file or idx folder; or a pair of map-style
            datasets, training and test, of images ``[C, H, W]``, ``[H, W, C]`` or ``[H, W]`` and
            classes, which are read once and kept in memory.
        argument: What the caller calls it, for messages.
        data_dir: Where names are looked up.

    Raises:
        TypeError: If it is none of these.
        ValueError: If a dataset is empty, its images are not of one shape or not finite, or a class
            is negative.
        FileNotFoundError: If a path does not exist.
    """
    if isinstance(what, ImageTask):
        return what
    if isinstance(what, str | os.PathLike):
        what = _load_named(what, data_dir)
    if isinstance(what, ArrayData):
        train = _images(what.x_train, what.y_train)
        test = _images(what.x_test, what.y_test)
        return ImageTask(what.name, what.num_classes, train, test)
    if isinstance(what, tuple | list) and len(what) == 2:
        train, test = (_read(part, argument) for part in what)
        largest = max(train.y.max(), test.y.max())
        classes = 1 + int(largest)
        present = set(train.y.tolist())
        absent = [label for label in range(classes) if label not in present]
        if absent:
            warn(
                f"`{argument}` has no training sample of {len(absent)} of {classes} classes, the first of them "
                f"{absent[0]}; classes count from 0."
            )
        return ImageTask(type(what[0]).__name__, classes, train, test)
    raise TypeError(
        f"`{argument}` must be an ArrayData, a name, an npz file, an idx folder or a pair of datasets, "
        f"got {type(what).__name__}."
    )


def _images(x: NDArray[Any], y: NDArray[Any]) -> Images:
    return Images(torch.from_numpy(x), torch.from_numpy(y))


def fit_images(x: Tensor, shape: Shape) -> Tensor:
    """Return images in the shape that the other task has: channels replicated or averaged, then resized.

    Args:
        x: Images, shape ``[N, C, H, W]``; bytes stay bytes.
        shape: Channels, height and width to come out.

    Raises:
        ValueError: If the channels differ, and neither number is 1.

    Example:
        >>> fit_images(torch.zeros(5, 1, 8, 8, dtype=torch.uint8), (3, 16, 16)).shape
        torch.Size([5, 3, 16, 16])
    """
    channels, *size = shape
    own = x.shape[1]
    if own != channels and 1 not in (channels, own):
        raise ValueError(f"`image_shape` must have {own} channels or 1, got {channels}.")
    if tuple(x.shape[1:]) == shape:
        return x
    fitted = [_fit(part, channels, size) for part in x.split(CHUNK)]
    return torch.cat(fitted)


def _fit(x: Tensor, channels: int, size: list[int]) -> Tensor:
    y = x.float()
    if channels == 1:
        y = y.mean(1, keepdim=True)
    y = y.expand(-1, channels, -1, -1)
    if list(y.shape[2:]) != size:
        y = torch.nn.functional.interpolate(
            y,
            size,
            mode="bilinear",
            antialias=True,
            align_corners=False,
        )
    if x.dtype == torch.uint8:
        y = y.round().clamp(0, 255)
    return y.to(x.dtype)


def as_inputs(what: Any, *, argument: str) -> Tensor:
    """Return images without labels, shape ``[M, C, H, W]``, bytes or floats.

    Args:
        what: An array, a tensor or nested lists, of shape ``[M, C, H, W]``, ``[M, H, W, C]`` or
            ``[M, H, W]``.
        argument: What the caller calls it, for messages.

    Raises:
        TypeError: If it is no array of numbers.
        ValueError: If the shape is another one, there are fewer than two images, or a value is not
            finite.
    """
    check_inputs(what, argument=argument)
    try:
        x = _tensor(what)
    except (TypeError, ValueError) as error:
        kind = type(what).__name__
        raise TypeError(
            f"`{argument}` must be an array of images, all of one shape, got a {kind}."
        ) from error
    if x.ndim not in (3, 4) or len(x) < 2:
        raise ValueError(
            f"`{argument}` must have the shape [M, C, H, W], [M, H, W, C] or [M, H, W] with M at least 2, got "
            f"{tuple(x.shape)}."
        )
    return _pixels(x, argument)


def _tensor(image: Any) -> Tensor:
    if isinstance(image, Tensor):
        return image.detach().cpu()
    return torch.as_tensor(np.asarray(image))


def check_inputs(what: Any, *, argument: str) -> None:
    """Raise a ``TypeError`` for what only stands for images, before anything is read."""
    if isinstance(what, str | os.PathLike):
        raise TypeError(
            f"`{argument}` must be an array of images, got {str(what)!r}; np.load(path)['x_train'] reads those of "
            "an npz file."
        )
    if isinstance(what, ArrayData):
        raise TypeError(
            f"`{argument}` must be an array of images, got an ArrayData; its `x_train` is one."
        )


def _pixels(x: Tensor, argument: str) -> Tensor:
    """Images with channels first, as they are used: bytes as bytes, and finite floats.

    Whole numbers from 0 to 255 are bytes; where there are only 0 and 1, as in a drawing, they are
    black and white.
    """
    x = x[:, None] if x.ndim == 3 else x
    if channels_last(x.shape):
        x = x.movedim(-1, 1).contiguous()
    if x.dtype == torch.uint8 or _whole_bytes(x):
        return x.to(torch.uint8)
    x = x.float()
    check_finite(argument, x)
    if (largest := float(x.abs().max())) > 100:
        warn(
            f"`{argument}` has real images up to {largest:g}, which are used as they are; divide them by 255, or make "
            "bytes of them."
        )
    return x


def _whole_bytes(x: Tensor) -> bool:
    if x.is_floating_point() or x.is_complex():
        return False
    x = x.long()  # torch knows no minimum of all kinds
    return bool(x.min() >= 0 and 1 < x.max() <= 255)


def _load_named(what: str | os.PathLike[str], data_dir: Any) -> ArrayData:
    path = Path(what)
    if path.suffix == ".npz":
        return load_npz(path)
    if path.is_dir():
        return load_idx(path)
    return load_task(str(what), data_dir=data_dir)


def _read(dataset: Any, argument: str) -> Images:
    samples = [dataset[i] for i in range(len(dataset))]
    if not samples:
        raise ValueError(f"`{argument}` must hold samples, got an empty dataset.")
    for sample in samples:
        several = isinstance(sample, tuple | list)
        if not several or len(sample) != 2:
            many = f" of {len(sample)}" if several else ""
            raise ValueError(
                f"`{argument}` must be two datasets, training and test, of pairs (image, class), got a sample of "
                f"type {type(sample).__name__}{many}; arrays make an `ArrayData`."
            )
    images = [_tensor(x) for x, _ in samples]
    shapes = {tuple(x.shape) for x in images}
    if len(shapes) != 1 or len(next(iter(shapes))) not in (2, 3):
        raise ValueError(
            f"`{argument}` must hold images of one shape [C, H, W], [H, W, C] or [H, W], got {sorted(shapes)[:3]}."
        )
    x = _pixels(torch.stack(images), argument)
    classes = torch.tensor([_class(y, argument) for _, y in samples])
    if classes.min() < 0:
        raise ValueError(f"`{argument}` must have classes from 0 on, got {int(classes.min())}.")
    return Images(x, classes)


def _class(y: Any, argument: str) -> int:
    try:
        number = int(y)
        whole = bool(number == y)
    except (TypeError, ValueError, RuntimeError):
        whole = False
    if not whole:
        raise ValueError(f"`{argument}` must have a whole number as each image's class, got {y!r}.")
    return number
