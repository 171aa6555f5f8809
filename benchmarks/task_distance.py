"""Is the distance between tasks asymmetric where it should be? Digits, letters and what can be made of them.

    python benchmarks/task_distance.py

All ordered pairs of five tasks with equally many samples, by noisy weights and in closed form from the Fisher
information, with standard errors over seeds. Then the claims, each with its numbers, true or not: a complex task is
nearer to a simple one than the other way round (all digits and two of them; digits with letters and digits alone), a
task is at distance 0 from itself, inverted digits are nearer to digits than letters are. A stopped benchmark goes on
with ``--folder``.

Why the last one depends on the network: an inverted image is the negative of its original, and a unit max(0, w·x) that
answers to a stroke is silent on its negative, so that the first layer must be learned anew, while strokes of letters
are strokes. ``even`` measures the same three tasks with a first layer |w·x|, to which an image and its negative are
one: if the reason is right, inverted digits are then near and letters stay where they were.

A task's distance from itself by noisy weights is what is missing at the end of its training: the union of a task with
itself draws two heads in every step, has less noise in its gradients, and may be a little further along. ``longer``
trains each task and its union with itself four times as long: if the reason is right, the distance shrinks. It has five
times as many seeds, since five are too few to tell a nat from none where the information is two thousand.
"""

import argparse
import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo import Training, __version__, task_distance
from lightning_taskinfo._observe import weights_now
from lightning_taskinfo._random import seed_from
from lightning_taskinfo.tasks import DistanceMatrix, distance
from lightning_taskinfo.tasks.complexity import START
from lightning_taskinfo.tasks.ready import Centred, network_for, prepare_task, trunk_of
from lightning_taskinfo.tasks.training import ModelFn
from lightning_taskinfo.variational import add_weight_noise, noisy_weights

TASKS = ("digits", "digits:only-0-1", "digits:inverted", "letters", "digits+letters")
EVEN_TASKS = ("digits", "digits:inverted", "letters")
LONGER, MORE = 4, 5  # times the steps and the seeds, for the distance of a task from itself
COLUMNS = ("claim", "gap", "error", "holds", "information")  # of the table in the documentation


class Absolute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def even_trunk() -> nn.Module:
    """The small trunk with a first layer that does not see the sign of an image."""
    return nn.Sequential(
        Centred(), nn.Linear(64, 32, bias=False), Absolute(), nn.Linear(32, 32), nn.ReLU()
    )


def noisy(union: distance.Union) -> dict[str, float]:
    """Information in each part of a union by noisy weights: the plain ones first, then from where they are."""
    fit = union.fit()
    start, betas = weights_now(fit.model), union.betas()
    weights = {name: betas[name.split(".")[0]] for name in start}

    def pull() -> Tensor:
        terms = [
            weights[name] * (p - start[name]).square().sum()
            for name, p in fit.model.named_parameters()
        ]
        return torch.stack(terms).sum() / (2 * union.prior_std**2)

    def information() -> dict[str, Tensor]:
        return {name: noise.kl(mean) for name, mean, noise in noisy_weights(fit.model)}

    def penalty() -> Tensor:
        return torch.stack([weights[name] * kl for name, kl in information().items()]).sum()

    fit.minimise(pull, seed_from(union.seed, 2), noisy=False)
    add_weight_noise(
        fit.model,
        std=START * union.prior_std,
        prior_std=union.prior_std,
        prior_center=start,
        seed=seed_from(union.seed, 3),
    )
    fit.minimise(penalty, seed_from(union.seed, 4), noisy=True)
    found = dict.fromkeys(betas, 0.0)
    for name, kl in information().items():
        found[name.split(".")[0]] += kl.item()
    return found


SOLVERS = {"laplace": distance.solve, "variational": noisy}


def measure(
    name: str,
    specs: Sequence[str],
    arguments: argparse.Namespace,
    *,
    longer: int = 1,
    more: int = 1,
    trunk_fn: ModelFn | None = None,
) -> DistanceMatrix:
    """Distances between tasks by the method that ``name`` begins with."""
    tasks = {spec: prepare_task(spec, max_samples=arguments.n) for spec in specs}
    distance.solve = SOLVERS[name.partition(",")[0]]
    return task_distance(
        {spec: task.data for spec, task in tasks.items()}, arguments.beta,
        trunk_fn=trunk_fn or trunk_of(network_for(tasks[specs[0]])), seeds=range(more * arguments.seeds),
        training=Training(
            pretrain_steps=arguments.steps, steps=longer * arguments.steps, batch_size=arguments.batch_size
        ),
        folder=arguments.folder / name if arguments.folder else None,
        progress=lambda done, total, cell: print(f"{name} {done}/{total} {cell}", flush=True),
    )  # fmt: skip


def difference(
    matrix: DistanceMatrix, less: tuple[str, str], more: tuple[str, str]
) -> dict[str, float | bool | str]:
    """Whether one distance is below another, with the standard error of the paired difference over seeds."""
    (a, b), (c, d) = (tuple(matrix.names.index(name) for name in pair) for pair in (less, more))
    gap = matrix.distances[:, c, d] - matrix.distances[:, a, b]
    error = (gap.std() / len(gap) ** 0.5).item()
    claim = f"d({less[0]}→{less[1]}) < d({more[0]}→{more[1]})"
    return {
        "claim": claim,
        "gap": gap.mean().item(),
        "error": error,
        "holds": gap.mean().item() > 2 * error,
    }


def claims(matrix: DistanceMatrix) -> list[dict[str, float | bool | str]]:
    pairs = (("digits", "digits:only-0-1"), ("digits+letters", "digits"))
    found = [
        difference(matrix, pair, pair[::-1]) for pair in pairs if set(pair) <= set(matrix.names)
    ]
    if set(EVEN_TASKS) <= set(matrix.names):
        found.append(difference(matrix, ("digits", "digits:inverted"), ("digits", "letters")))
        found.append(difference(matrix, ("digits:inverted", "digits"), ("letters", "digits")))
    for index, name in enumerate(matrix.names):
        value, error = matrix.mean[index, index].item(), matrix.standard_error[index, index].item()
        information = matrix.information[:, index].mean().item()
        row = {
            "claim": f"d({name}→{name}) = 0",
            "gap": value,
            "error": error,
            "holds": abs(value) < 2 * error,
        }
        found.append({**row, "information": information})
    return found


def measured(arguments: argparse.Namespace) -> Iterator[tuple[str, DistanceMatrix]]:
    """All tasks by each method, then what explains what does not hold."""
    for method in arguments.methods:
        yield method, measure(method, TASKS, arguments)
        yield (
            f"{method}, even",
            measure(f"{method}, even", EVEN_TASKS, arguments, trunk_fn=even_trunk),
        )
    for task in TASKS if "variational" in arguments.methods else ():
        folder = f"variational, longer, {task.replace(':', '-')}"
        yield "variational, longer", measure(folder, [task], arguments, longer=LONGER, more=MORE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="*", default=["laplace", "variational"])
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument(
        "--n", type=int, default=280, help="samples of each task; there are 288 zeros and ones"
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=280,
        help="all samples, so that no noise of batches is left",
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keeps finished trainings")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "task_distance.json"
    )
    arguments = parser.parse_args()
    environment = {
        "lightning_taskinfo": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    environment |= {"machine": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()}
    settings = {
        key: getattr(arguments, key) for key in ("beta", "n", "steps", "batch_size", "seeds")
    }
    what = "distances between five tasks of 8×8 images"
    result: dict[str, Any] = {"what": what, "environment": environment, "settings": settings}
    rows: list[dict[str, float | bool | str]] = []
    for name, matrix in measured(arguments):
        checked = claims(matrix)
        for row in checked:
            verdict = "holds" if row["holds"] else "DOES NOT HOLD"
            print(
                f"{name:19} {row['claim']:50} {row['gap']:9.1f} ± {row['error']:.1f}  {verdict}",
                flush=True,
            )
        rows += [
            {"method": name, **{key: row[key] for key in COLUMNS if key in row}} for row in checked
        ]
        result.setdefault(name, []).append({"claims": checked, "matrix": matrix.to_dict()})
    result["rows"] = rows
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
