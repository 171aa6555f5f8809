"""Is the distance between tasks asymmetric where it should be? Digits, letters and what can be made of them.

    python benchmarks/task_distance.py

All ordered pairs of five tasks with equally many samples, by noisy weights and in closed form from the Fisher
information, with standard errors over seeds. Then the claims, each with its numbers, true or not: a complex task is
nearer to a simple one than the other way round (all digits and two of them; digits with letters and digits alone), a
task is at distance 0 from itself, inverted digits are nearer to digits than letters are. A stopped benchmark goes on
with ``--folder``.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch

from lightning_taskinfo import DistanceMatrix, Training, __version__, task_distance
from lightning_taskinfo.tasks.specs import load_task, trunk_for

TASKS = ("digits", "digits:only-0-1", "digits:inverted", "letters", "digits+letters")


def measure(method: str, arguments: argparse.Namespace) -> DistanceMatrix:
    tasks = {spec: load_task(spec, max_samples=arguments.n) for spec in TASKS}
    return task_distance(
        {name: task.data for name, task in tasks.items()}, arguments.beta, method=method,
        trunk_fn=trunk_for(tasks["digits"]), seeds=range(arguments.seeds), workers=arguments.workers,
        training=Training(pretrain_steps=arguments.steps, steps=arguments.steps),
        folder=arguments.folder / method if arguments.folder else None,
        progress=lambda done, total, name: print(f"{method} {done}/{total} {name}", flush=True),
    )  # fmt: skip


def difference(matrix: DistanceMatrix, less: tuple[str, str], more: tuple[str, str]) -> dict[str, float | bool | str]:
    """Whether one distance is below another, with the standard error of the paired difference over seeds."""
    (a, b), (c, d) = (tuple(matrix.names.index(name) for name in pair) for pair in (less, more))
    gap = matrix.distances[:, c, d] - matrix.distances[:, a, b]
    error = (gap.std() / len(gap) ** 0.5).item()
    claim = f"d({less[0]}→{less[1]}) < d({more[0]}→{more[1]})"
    return {"claim": claim, "gap": gap.mean().item(), "error": error, "holds": gap.mean().item() > 2 * error}


def claims(matrix: DistanceMatrix) -> list[dict[str, float | bool | str]]:
    pairs = (("digits", "digits:only-0-1"), ("digits+letters", "digits"))
    found = [difference(matrix, pair, pair[::-1]) for pair in pairs]
    found.append(difference(matrix, ("digits", "digits:inverted"), ("digits", "letters")))
    found.append(difference(matrix, ("digits:inverted", "digits"), ("letters", "digits")))
    for index, name in enumerate(matrix.names):
        value, error = matrix.mean[index, index].item(), matrix.standard_error[index, index].item()
        row = {"claim": f"d({name}→{name}) = 0", "gap": value, "error": error, "holds": abs(value) < 2 * error}
        found.append({**row, "share_of_information": value / matrix.information[:, index].mean().item()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=["laplace", "variational"])
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--n", type=int, default=280, help="samples of each task; there are 288 zeros and ones")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps finished trainings")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "task_distance.json")
    arguments = parser.parse_args()
    start = time.perf_counter()
    environment = {"lightning_taskinfo": __version__, "python": platform.python_version(), "torch": torch.__version__}
    environment |= {"machine": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()}
    settings = {key: getattr(arguments, key) for key in ("beta", "n", "steps", "seeds")}
    result = {"what": "distances between five tasks of 8×8 images", "environment": environment, "settings": settings}
    for method in arguments.methods:
        matrix = measure(method, arguments)
        checked = claims(matrix)
        for row in checked:
            verdict = "holds" if row["holds"] else "DOES NOT HOLD"
            print(f"{method:12} {row['claim']:50} {row['gap']:9.1f} ± {row['error']:.1f}  {verdict}")
        result[method] = {"claims": checked, "matrix": matrix.to_dict()}
    result["seconds"] = round(time.perf_counter() - start, 1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
