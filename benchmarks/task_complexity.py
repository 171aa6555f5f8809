"""Which dataset is more complex? The critical price of information of MNIST, CIFAR-10 and random labels.

    python benchmarks/task_complexity.py --data-dir DIR

All images are brought to the same size, made grey and scaled to mean 1/2 and deviation 1/2, so that one small network
serves all; every task has the same number of samples. For each seed (samples, labels, network, noise) a sweep over β
gives β*, the largest price at which the network is better than a constant classifier by 5 % of the label entropy.
Reported: the mean of log β* with its 95 % interval over seeds; how β* moves with the number of samples, for true and
random labels; and for random labels E_Q[L] + KL - N log|Y|, which may not be negative on average over labelings. A
stopped benchmark goes on with ``--folder``.
"""

import argparse
import json
import math
import os
import platform
import time
from functools import partial
from pathlib import Path

import torch
from scipy.stats import t as student
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lightning_taskinfo import Training, __version__, structure_function
from lightning_taskinfo._parallel import run_jobs
from lightning_taskinfo.tasks.ready import prepare_task, small_network

BETAS = tuple(10 ** (1.5 - j / 3) for j in range(14))  # 32 … 0.0015
SIDE = 12


def prepared(images: Tensor) -> Tensor:
    small = adaptive_avg_pool2d(images.mean(1, keepdim=True), SIDE)
    return 0.5 + 0.5 * (small - small.mean()) / small.std()  # the network takes the 1/2 away again


def one(cell: dict) -> dict:
    """One sweep: its rows and β*."""
    task = prepare_task(
        cell["spec"], max_samples=cell["n"], size=28, seed=cell["seed"], data_dir=cell["data_dir"]
    )
    steps = cell["steps"]
    training = Training(pretrain_steps=steps, steps=steps)
    network = partial(small_network, SIDE * SIDE, task.num_classes, 32)
    data = prepared(task.inputs), task.targets
    curve = structure_function(network, data, BETAS, training=training, seed=cell["seed"])
    excess = [
        e + t - curve.samples * math.log(10) for e, t in zip(curve.loss, curve.kl, strict=True)
    ]
    rows = {key: getattr(curve, key) for key in ("betas", "kl", "loss", "loss_error")}
    return {"critical_beta": curve.critical_beta(), "least_excess": min(excess), **rows}


def interval(values: list[float | None]) -> dict:
    """Mean of log β* with its 95 % interval; where a sweep has none, it is below the lowest price."""
    known = torch.tensor([math.log(v) for v in values if v is not None], dtype=torch.float64)
    result = {"seeds": len(values), "below_the_lowest_price": len(values) - len(known)}
    if len(known) < 2:
        return result
    reach = student.ppf(0.975, len(known) - 1) * known.std().item() / len(known) ** 0.5
    middle = known.mean().item()
    ends = {"low": math.exp(middle - reach), "high": math.exp(middle + reach)}
    return {**result, "critical_beta": math.exp(middle), **ends}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir",
        default=os.environ.get("TASKINFO_DATA_DIR"),
        help="holds mnist and cifar10_12k",
    )
    parser.add_argument(
        "--tasks", nargs="*", default=["mnist", "cifar10_12k", "mnist:random-labels"]
    )
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument(
        "--other-n",
        type=int,
        nargs="*",
        default=[250, 500, 2000],
        help="for the first and last task",
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps finished sweeps")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "task_complexity.json"
    )
    args = parser.parse_args()
    start = time.perf_counter()
    wanted = [(spec, args.n) for spec in args.tasks]
    wanted += [(spec, n) for n in args.other_n for spec in (args.tasks[0], args.tasks[-1])]
    cells = {
        f"{spec.replace(':', '_')}-{n}-{seed}": {
            "spec": spec, "n": n, "seed": seed, "steps": args.steps, "data_dir": args.data_dir
        }
        for seed in range(args.seeds)
        for spec, n in wanted
    }  # fmt: skip
    found = run_jobs(
        one, cells, folder=args.folder, workers=args.workers,
        on_done=lambda name, value: print(name, value["critical_beta"], flush=True),
    )  # fmt: skip
    rows = []
    for spec, n in wanted:
        sweeps = [
            found[name] for name, cell in cells.items() if (cell["spec"], cell["n"]) == (spec, n)
        ]
        row = {"task": spec, "n": n, **interval([sweep["critical_beta"] for sweep in sweeps])}
        if "random" in spec:
            excess = torch.tensor([sweep["least_excess"] for sweep in sweeps], dtype=torch.float64)
            row |= {"least_excess": excess.mean().item()}
        rows.append(row)
        print(json.dumps(row))
    environment = {
        "lightning_taskinfo": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    environment |= {"machine": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()}
    result = {
        "what": "critical β of datasets at equal size",
        "environment": environment,
        "steps": args.steps,
    }
    result |= {"seconds": round(time.perf_counter() - start, 1), "rows": rows, "sweeps": found}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
