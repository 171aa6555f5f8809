"""What a result was measured with, to be stored beside it."""

import os
import platform
from typing import Any

import torch

import lightning_taskinfo


def environment() -> dict[str, Any]:
    """Versions, machine and load."""
    return {
        "lightning_taskinfo": lightning_taskinfo.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }
