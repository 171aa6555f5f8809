"""Datasets in npz and idx files, and those of torchvision where a working one is installed."""

import gzip
import inspect
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_taskinfo._files import StrPath, atomic_write
from lightning_taskinfo.data.arrays import ArrayData, from_any

KEYS = ("x_train", "y_train", "x_test", "y_test")
IDX = {
    "x_train": "train-images",
    "y_train": "train-labels",
    "x_test": "t10k-images",
    "y_test": "t10k-labels",
}
_UNREADABLE = (
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


def load_npz(
    path: StrPath,
    *,
    name: str | None = None,
    num_classes: int | None = None,
) -> ArrayData:
    """Return the arrays ``x_train``, ``y_train``, ``x_test`` and ``y_test`` of an npz file.

    Args:
        path: The file. Images are uint8, ``[N, H, W]``, ``[N, C, H, W]`` or ``[N, H, W, C]``;
            labels are whole numbers.
        name: What to call the data; the file's own ``name``, or its file name, where not given.
        num_classes: Number of classes, for labels that count from 0; the file's own
            ``num_classes``, where not given, or else the labels that occur, in their order.

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
    with _naming(path):
        arrays = _read_npz(path)
        if missing := [key for key in KEYS if key not in arrays]:
            raise ValueError(
                f"the arrays {', '.join(missing)} are missing; there are {', '.join(arrays) or 'none'}."
            )
        name = name or str(arrays.get("name", path.stem))
        if num_classes is None and "num_classes" in arrays:
            num_classes = int(arrays["num_classes"])
        splits = {key: arrays[key] for key in KEYS}
        return from_any(splits, name=name, num_classes=num_classes)


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
    arrays: dict[str, Any] = {
        "name": np.array(data.name),
        "num_classes": np.array(data.num_classes),
    }
    for key in KEYS:
        arrays[key] = getattr(data, key)
    with atomic_write(path) as file:
        np.savez(file, **arrays)


def load_idx(
    folder: StrPath,
    *,
    name: str | None = None,
    num_classes: int | None = None,
) -> ArrayData:
    """Return the dataset of a folder in the format of MNIST: four idx files, gzipped or not.

    Args:
        folder: Holds ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``,
            ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``, with or without ``.gz``; a
            dot before ``idx`` does as well.
        name: What to call the data; the folder's name where not given.
        num_classes: Number of classes, for labels that count from 0; the labels that occur, in
            their order, where not given.

    Raises:
        FileNotFoundError: If one of the files is missing.
        ValueError: If one cannot be read, or the arrays do not make an :class:`ArrayData`.

    Example::

        fashion = load_idx("datasets/fashion-mnist", name="fashion")
    """
    folder = Path(folder)
    arrays = {}
    for key, stem in IDX.items():
        path = _idx_file(folder, f"{stem}{{}}idx{3 if key.startswith('x') else 1}-ubyte")
        with _naming(path):
            arrays[key] = _read_idx(path)
    with _naming(folder):
        return from_any(arrays, name=name or folder.name, num_classes=num_classes)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:  # numpy leaves a broken file open
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("it is a single array")
            return dict(archive)
    except _UNREADABLE as error:
        raise ValueError(f"not a readable npz file of plain arrays ({error}).") from error


def _idx_file(folder: Path, pattern: str) -> Path:
    for separator in "-.":
        for suffix in ("", ".gz"):
            path = folder / (pattern.format(separator) + suffix)
            if path.is_file():
                return path
    raise FileNotFoundError(
        f"A folder must hold the idx file {pattern.format('-')}, gzipped or not, but {folder} does not."
    )


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an array of unsigned bytes: two zeros, a type code, the number of axes, big-endian lengths, the values."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"not a readable gzip file ({error}).") from error
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise ValueError("not an idx file.")
    axes = raw[3]
    header = 4 + 4 * axes
    if len(raw) < header:
        raise ValueError("not an idx file.")
    if raw[2] != 0x08:
        raise ValueError(
            f"the values must be unsigned bytes (type code 0x08), got type code {raw[2]:#04x}."
        )
    shape = np.frombuffer(raw, ">u4", count=axes, offset=4).tolist()
    values = np.frombuffer(raw, np.uint8, offset=header)
    if values.size != math.prod(shape):
        raise ValueError(f"the shape {tuple(shape)} does not fit the file's {values.size} values.")
    return values.reshape(shape).copy()  # a buffer of bytes is read-only


def load_torchvision(name: str, data_dir: StrPath, *, download: bool = False) -> ArrayData:
    """Return a labelled image dataset of torchvision that has a training and a test split.

    Args:
        name: Name of a class in ``torchvision.datasets``, e.g. ``"FashionMNIST"``, ``"CIFAR10"`` or
            ``"SVHN"``.
        data_dir: Folder that holds the dataset, or where it goes.
        download: Whether torchvision may download it.

    Raises:
        ImportError: If torchvision is not installed, or is installed but cannot be loaded.
        ValueError: If torchvision has no such dataset, or the dataset has no training and test
            split.

    Example::

        data = load_torchvision("FashionMNIST", "~/datasets", download=True)
    """
    datasets = _datasets()
    make: Any = getattr(datasets, name, None)
    if name not in datasets.__all__ or make is None:
        raise ValueError(f"`name` must be a dataset of torchvision, got {name!r}.")
    parameters = inspect.signature(make).parameters
    if "train" in parameters:
        options: list[dict[str, Any]] = [{"train": True}, {"train": False}]
    elif "split" in parameters:
        options = [{"split": "train"}, {"split": "test"}]
    else:
        raise ValueError(
            f"`name` must be a dataset with a training and a test split, got {name!r}."
        )
    arrays: dict[str, Any] = {}
    for split, option in zip(("train", "test"), options, strict=True):
        samples = make(data_dir, download=download, **option)
        images, labels = zip(*samples, strict=True)
        pixels = [np.asarray(image) for image in images]
        arrays[f"x_{split}"] = np.stack(pixels)
        arrays[f"y_{split}"] = np.asarray(labels)
    return from_any(arrays, name=name)


def _datasets() -> ModuleType:
    try:
        from torchvision import datasets
    except ModuleNotFoundError as error:
        raise ImportError(
            "`load_torchvision` needs torchvision, which is not installed."
        ) from error
    except (ImportError, RuntimeError, OSError) as error:
        raise ImportError(
            "torchvision is installed but cannot be loaded beside this torch; install the build that belongs to it, "
            f"or remove torchvision. It said: {error}"
        ) from error
    return datasets
