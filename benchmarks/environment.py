"""What a result was measured with, to be stored beside it."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import lightning_taskinfo


def commit() -> str:
    """Short hash of the commit that is checked out; empty outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def environment() -> dict[str, Any]:
    """Versions, machine and load."""
    return {
        "lightning_taskinfo": lightning_taskinfo.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }
