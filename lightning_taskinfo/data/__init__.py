"""Real data without a download: digits, letters, and your own npz files."""

from lightning_taskinfo.data.arrays import ArrayData, load_npz, save_npz
from lightning_taskinfo.data.embedded import load_digits, load_letters
from lightning_taskinfo.data.names import load_dataset, load_task, vary

__all__ = [
    "ArrayData",
    "load_dataset",
    "load_digits",
    "load_letters",
    "load_npz",
    "load_task",
    "save_npz",
    "vary",
]
