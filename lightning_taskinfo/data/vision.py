"""torchvision's datasets, where a working torchvision is installed."""

import inspect
from os import PathLike
from types import ModuleType
from typing import Any

import numpy as np

from lightning_taskinfo.data.arrays import ArrayData, from_any


def load_torchvision(
    name: str, data_dir: str | PathLike[str], *, download: bool = False
) -> ArrayData:
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
        images, labels = zip(*make(data_dir, download=download, **option), strict=True)
        arrays[f"x_{split}"] = np.stack([np.asarray(image) for image in images])
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
