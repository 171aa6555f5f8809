"""What importing costs beyond the frameworks: fresh Pythons, in turns, medians.

    python benchmarks/import_time.py [--repeats 7] [--output benchmarks/results/import_time.json]

Each pair holds a base (``import torch``, or every Lightning that is installed) and the same followed by ours. The
machine's load drifts, so the two take turns, and the extra seconds are the median over turns of their difference.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median

import lightning_taskinfo

ROOT = Path(__file__).parents[1]
GOAL = 0.2  # seconds beyond the base
LIGHTNING = (
    "import importlib, importlib.util\n"
    "for name in ('lightning.pytorch', 'pytorch_lightning'):\n"
    "    if importlib.util.find_spec(name.split('.')[0]): importlib.import_module(name)"
)
CALLBACKS = [
    name for name, module in lightning_taskinfo._EXPORTS.items() if module.endswith("callbacks")
]
PAIRS = {
    "import lightning_taskinfo": ("import torch", "import torch, lightning_taskinfo"),
    "the callback base": (
        LIGHTNING,
        f"{LIGHTNING}\nfrom lightning_taskinfo._lightning import Callback",
    ),
    **{
        f"import {name}": (LIGHTNING, f"{LIGHTNING}\nfrom lightning_taskinfo import {name}")
        for name in CALLBACKS
    },
}


def seconds(code: str) -> float:
    """Time ``code`` inside a new Python; starting that Python is not counted."""
    timed = f"from time import perf_counter\nstart = perf_counter()\n{code}\nprint(perf_counter() - start)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", timed], capture_output=True, text=True, check=True, env=env
    )
    return float(done.stdout.splitlines()[-1])


def measure(base: str, ours: str, repeats: int) -> dict[str, float]:
    seconds(ours)  # bytecode and the disk's cache
    turns = [(seconds(base), seconds(ours)) for _ in range(repeats)]
    extra = median(b - a for a, b in turns)
    return {
        "base_seconds": round(median(a for a, _ in turns), 3),
        "extra_seconds": round(extra, 3),
        "ratio": round(median(b / a for a, b in turns), 3),
        "holds": extra <= GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="turns of each pair")
    parser.add_argument("--output", type=Path, help="also write the JSON there")
    args = parser.parse_args()
    report = {
        "version": lightning_taskinfo.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "repeats": args.repeats,
        "goal_extra_seconds": GOAL,
        "results": {
            name: measure(base, ours, args.repeats) for name, (base, ours) in PAIRS.items()
        },
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
