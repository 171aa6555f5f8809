"""What counts as images and as labels, whoever hands them in, and what is said of what does not."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
    whole = y.dtype == bool or (
        y.dtype.kind == "f" and bool((np.isfinite(y) & (y == np.round(y))).all())
    )
    return f"{y.dtype}; y.astype('int64') makes them" if whole else f"{y.dtype}"
