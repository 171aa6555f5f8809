"""Real data without a download: digits, letters, your own npz or idx files, torchvision where it is installed."""

from lightning_taskinfo.data.arrays import ArrayData
from lightning_taskinfo.data.digits import load_digits
from lightning_taskinfo.data.files import load_idx, load_npz, save_npz
from lightning_taskinfo.data.letters import Jitter, load_letters
from lightning_taskinfo.data.pairs import load_dataset, load_pair
from lightning_taskinfo.data.variants import load_task, vary
from lightning_taskinfo.data.vision import load_torchvision

__all__ = [
    "ArrayData",
    "Jitter",
    "load_dataset",
    "load_digits",
    "load_idx",
    "load_letters",
    "load_npz",
    "load_pair",
    "load_task",
    "load_torchvision",
    "save_npz",
    "vary",
]
