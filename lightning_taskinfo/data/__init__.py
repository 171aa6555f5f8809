"""Real data without a download: digits, letters, your own npz or idx files, torchvision where it is installed."""

from lightning_taskinfo.data.arrays import (
    ArrayData,
    load_idx,
    load_npz,
    load_torchvision,
    save_npz,
)
from lightning_taskinfo.data.embedded import Jitter, load_digits, load_letters
from lightning_taskinfo.data.names import load_dataset, load_task, vary

__all__ = [
    "ArrayData",
    "Jitter",
    "load_dataset",
    "load_digits",
    "load_idx",
    "load_letters",
    "load_npz",
    "load_task",
    "load_torchvision",
    "save_npz",
    "vary",
]
