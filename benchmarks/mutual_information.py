"""How well is a known mutual information read? Ours beside torch-mist's, with the same critic, clip, steps and data.

    python benchmarks/mutual_information.py [--steps 1000] [--seeds 3] [--quick]

Pairs of 20-dimensional Gaussians with a known mutual information; every step and every reading draws a new batch. Each
contender begins with the same critic weights, is trained on the same batches and read on the same hundred batches.
Shown are the error of the mean reading, the variance of a reading, and both together as a root mean square.

torch-mist's own loss counts the joint pairs of a batch among its product samples. That pulls every score towards zero:
less variance, and less information. ``torch-mist, joint pairs left out`` is its estimator with the one line changed,
and ``lightning-taskinfo, all pairs`` is ours with a loss that counts them too.
Its read-out leaves them out as ours does, and ``read_out_gap`` is how far the two read-outs of one critic are apart.
``efficient_variance`` is ``Var[log p(x,z)/(p(x)p(z))] / B``: for large B no unbiased reading of B pairs varies less.
The curve of the optimal critic shows SMILE's own bias: it is no lower bound. Cells that are finished are kept in
``--folder`` and not run again. Without torch-mist its rows are missing; it is installed by
``pip install --no-deps torch-mist pyro-ppl pyro-api opt-einsum``.
"""

import argparse
import itertools
import math
import statistics
import tempfile
import time
from copy import deepcopy
from pathlib import Path

import torch
from environment import environment
from torch import Tensor, nn
from torch.nn.functional import softplus

from lightning_taskinfo._files import atomic_write, claim_folder, write_json
from lightning_taskinfo._parallel import run_jobs
from lightning_taskinfo.functional.discrepancy import smile
from lightning_taskinfo.regularizers import MutualInformation

D, CLIP, READS = 20, 5.0, 100
ROUNDING = 1e-2  # trainings that differ by rounding alone drift apart by less
OURS, ALL_PAIRS, THEIRS, CORRECTED, OPTIMAL = (
    "lightning-taskinfo", "lightning-taskinfo, all pairs", "torch-mist", "torch-mist, joint pairs left out",
    "optimal critic",
)  # fmt: skip
RIVALS = {OURS: (THEIRS, CORRECTED), ALL_PAIRS: (THEIRS,)}


class Product(nn.Module):
    """A separable critic of two dense towers, in a form that torch-mist can share."""

    def __init__(self, hidden: int = 128, out: int = 32) -> None:
        super().__init__()
        dense = lambda: nn.Sequential(  # noqa: E731
            nn.Linear(D, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, out),
        )
        self.f, self.g = dense(), dense()

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.f(x) @ self.g(z).T


class Gaussians:
    """Pairs of correlated Gaussians with a known mutual information."""

    def __init__(self, nats: float, seed: int) -> None:
        self.rho = math.sqrt(1 - math.exp(-2 * nats / D))
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, B: int) -> tuple[Tensor, Tensor]:
        x, noise = (torch.randn(B, D, generator=self.generator) for _ in range(2))
        return x, self.rho * x + math.sqrt(1 - self.rho**2) * noise

    def log_ratio(self, x: Tensor, z: Tensor) -> Tensor:
        """``log p(x, z) / (p(x) p(z))`` of all pairs: the optimal critic."""
        squares = (self.rho * x[:, None] - z[None]).square().sum(-1) / (1 - self.rho**2)
        return 0.5 * (z.square().sum(-1)[None] - squares) - 0.5 * D * math.log(1 - self.rho**2)


class AllPairs(MutualInformation):
    """Counts the joint pairs of a batch among those of the product."""

    def _objective(self, scores: Tensor) -> Tensor:
        return -softplus(-scores.diagonal()).mean() - softplus(scores).mean()


def our_estimator(
    critic: nn.Module,
    learning_rate: float,
    kind: type[MutualInformation] = MutualInformation,
):
    regularizer = kind((D,), D, critic=critic, critic_steps=1, learning_rate=learning_rate)

    def train(x, z):
        regularizer.train()(x, z)

    def read(x, z):
        regularizer.eval()(x, z)
        return regularizer.value.item()

    return train, read


def mist_estimator(critic: nn.Module, learning_rate: float, corrected: bool = False):
    from torch_mist.critic import SeparableCritic
    from torch_mist.estimators.discriminative.implementations.smile import SMILE
    from torch_mist.utils.indexing import matrix_off_diagonal

    class WithoutJointPairs(SMILE):
        def batch_loss(self, x, y):
            x_, y_, _ = self.sample_negatives(x, y)
            product = matrix_off_diagonal(self.critic(x_, y_), len(x) - 1)
            return softplus(-self.unnormalized_log_ratio(x, y)) + softplus(product).mean(0)

    kind = WithoutJointPairs if corrected else SMILE
    estimator = kind(SeparableCritic(critic.f, critic.g), neg_samples=-1, tau=CLIP)
    optimizer = torch.optim.Adam(estimator.parameters(), lr=learning_rate)

    def train(x, z):
        optimizer.zero_grad()
        estimator.loss(x, z).backward()
        optimizer.step()

    def read(x, z):
        with torch.no_grad():
            return estimator.mutual_information(x, z).item()

    return train, read


def estimators(critic: nn.Module, learning_rate: float = 5e-4) -> dict:
    """Training step and read-out of each contender, each with a copy of the critic, and the copies."""
    critics = {name: deepcopy(critic) for name in (OURS, ALL_PAIRS, THEIRS, CORRECTED)}
    made = {OURS: our_estimator(critics[OURS], learning_rate)}
    made[ALL_PAIRS] = our_estimator(critics[ALL_PAIRS], learning_rate, AllPairs)
    try:
        made[THEIRS] = mist_estimator(critics[THEIRS], learning_rate)
        made[CORRECTED] = mist_estimator(critics[CORRECTED], learning_rate, corrected=True)
    except ImportError:
        pass
    return {name: (*pair, critics[name]) for name, pair in made.items()}


def cell(settings: dict) -> dict:
    """All readings of all contenders for one amount of information, batch size and seed."""
    nats, B, seed, steps = (settings[key] for key in ("nats", "batch_size", "seed", "steps"))
    begin = time.process_time()
    torch.manual_seed(seed)
    readings, gaps = {}, {}
    test = Gaussians(nats, 1000 + seed)
    batches = [test.draw(B) for _ in range(READS)]
    for name, (train, read, critic) in estimators(Product()).items():
        data = Gaussians(nats, seed)
        for _ in range(steps):
            train(*data.draw(B))
        readings[name] = [read(*batch) for batch in batches]
        with torch.no_grad():
            ours = [smile(critic(*batch), CLIP).item() for batch in batches]
        gaps[name] = max(abs(a - b) for a, b in zip(ours, readings[name], strict=True))
    readings[OPTIMAL] = [smile(test.log_ratio(*batch), CLIP).item() for batch in batches]
    return {
        **settings,
        "readings": readings,
        "read_out_gap": gaps,
        "seconds": time.process_time() - begin,
    }


def summary(cells: list[dict], name: str) -> dict:
    """Error, variance and root mean square of one contender's readings, over the seeds of one setting."""
    nats, runs = cells[0]["nats"], [cell["readings"][name] for cell in cells]
    means, flat = [statistics.mean(run) for run in runs], list(itertools.chain(*runs))
    row = {
        "nats": nats,
        "batch_size": cells[0]["batch_size"],
        "estimator": name,
        "mean": statistics.mean(flat),
        "error": statistics.mean(flat) - nats,
        "error_by_seed": [mean - nats for mean in means],
        "variance": statistics.mean(statistics.variance(run) for run in runs),
        "efficient_variance": D * (1 - math.exp(-2 * nats / D)) / cells[0]["batch_size"],
        "root_mean_square": math.sqrt(statistics.mean((value - nats) ** 2 for value in flat)),
        "nan": any(map(math.isnan, flat)),
    }
    if name in cells[0]["read_out_gap"]:
        row["read_out_gap"] = max(cell["read_out_gap"][name] for cell in cells)
    return row


def verdicts(rows: list[dict]) -> dict:
    """In how many settings ours is no worse than a rival's, by size of the error, variance and both."""
    found = {}
    keys = {"error": lambda row: abs(row["error"]), "variance": lambda row: row["variance"]}
    keys["root_mean_square"] = lambda row: row["root_mean_square"]
    by_setting = {(row["nats"], row["batch_size"], row["estimator"]): row for row in rows}
    settings = {key[:2] for key in by_setting}
    for name, rivals in RIVALS.items():
        for rival, (key, value) in itertools.product(rivals, keys.items()):
            pairs = [
                (by_setting[(*s, name)], by_setting[(*s, rival)])
                for s in settings
                if (*s, rival) in by_setting
            ]
            better = sum(value(ours) <= value(other) * (1 + ROUNDING) for ours, other in pairs)
            ratios = [value(ours) / value(other) for ours, other in pairs]
            found[f"{name}: {key}, no worse than {rival}"] = {
                "settings": better,
                "of": len(pairs),
            } | ({"ratio_range": [min(ratios), max(ratios)]} if ratios else {})
    return found


def markdown(rows: list[dict], counted: dict) -> str:
    heads = (
        "batch",
        "nats",
        "estimator",
        "mean reading",
        "error",
        "variance",
        "efficient variance",
        "root mean square",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        lines.append(
            f"| {row['batch_size']} | {row['nats']:g} | {row['estimator']} | {row['mean']:.3f} | {row['error']:+.3f} | "
            f"{row['variance']:.4f} | {row['efficient_variance']:.4f} | {row['root_mean_square']:.3f} |"
        )
    lines += ["", "| | settings | ratio |", "|---|---|---|"]
    for what, count in counted.items():
        low, high = count.get("ratio_range", (math.nan, math.nan))
        lines.append(f"| {what} | {count['settings']} of {count['of']} | {low:.2f} to {high:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nats", nargs="+", type=float, default=[2, 4, 6, 8, 10])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--steps", type=int, default=1000, help="critic steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--quick", action="store_true", help="a few steps of two settings, to see that it runs"
    )
    parser.add_argument(
        "--folder", type=Path, help="where finished cells are kept; a temporary folder by default"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "mutual_information.json"
    )
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds, args.nats, args.batch_sizes = 50, 1, [2.0, 4.0], [64]
    folder = args.folder or Path(tempfile.mkdtemp())
    claim_folder(
        folder,
        {"steps": args.steps, "reads": READS, "clip": CLIP, "dimensions": D},
    )
    cells = {
        f"batch_{B}_nats_{nats:g}_seed_{seed}": {
            "nats": nats,
            "batch_size": B,
            "seed": seed,
            "steps": args.steps,
        }
        for B, nats, seed in itertools.product(args.batch_sizes, args.nats, range(args.seeds))
    }
    done = run_jobs(
        cell,
        cells,
        folder=folder,
        workers=args.workers,
        on_done=lambda name, _: print(name, flush=True),
    )
    rows = []
    for B, nats in itertools.product(args.batch_sizes, args.nats):
        runs = [run for run in done.values() if (run["batch_size"], run["nats"]) == (B, nats)]
        rows += [summary(runs, name) for name in runs[0]["readings"]]
    counted = verdicts(rows)
    settings = {
        "steps": args.steps,
        "seeds": args.seeds,
        "reads": READS,
        "clip": CLIP,
        "dimensions": D,
    }
    seconds = sum(run["seconds"] for run in done.values())
    write_json(
        args.output,
        {
            "settings": settings,
            "environment": environment(),
            "cpu_seconds": seconds,
            "verdicts": counted,
            "rows": rows,
        },
    )
    table = markdown(rows, counted)
    with atomic_write(args.output.with_suffix(".md"), "w") as file:
        file.write(table)
    print(table)


if __name__ == "__main__":
    main()
