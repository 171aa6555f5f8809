"""What the regularizers cost a step, and how well the mutual information is estimated.

    python benchmarks/regularizers.py [--parts lautum information mutual_information] [--quick]

Step times are taken in turns (one step of each contender after the other) and compared by the median of their ratios to
the plain step of the same turn, so that a busy machine hits all of them alike. The plain step is the same step with the
penalty deleted and the forward on the unlabelled inputs kept. Estimates of the mutual information are compared with
torch-mist's, for the same critic, initial weights, clip, steps and data; where torch-mist is not installed it is
reported as missing.
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import time
from copy import deepcopy
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import lightning_taskinfo
from lightning_taskinfo.functional.mutual_information import smile
from lightning_taskinfo.regularizers import Lautum, MutualInformation, WeightInformation
from lightning_taskinfo.variational import add_weight_noise

D, K = 3072, 10


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, K),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(D, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, K))


def in_turns(steps: dict, turns: int, rare: tuple = ()) -> dict:
    """Median milliseconds of every step, and the median of its ratio to ``plain`` in the same turn."""
    times = {name: [] for name in steps}
    for turn in range(turns + 2):
        for name, step in steps.items():
            if name in rare and turn != 2:
                continue
            begin = time.perf_counter()
            step()
            if turn >= 2:  # two turns to warm up
                times[name].append((turn, 1000 * (time.perf_counter() - begin)))
    plain = dict(times["plain"])
    result = {}
    for name, values in times.items():
        ratios = [t / plain[turn] for turn, t in values if turn in plain]
        median = statistics.median(t for _, t in values)
        result[name] = {"median_ms": median, "ratio": statistics.median(ratios), "turns": len(values)}
    return result


class NaiveLautum(nn.Module):
    """The paper's recipe: moving averages of all three covariances, determinants and inverses of D×D in every step."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.mean, self.cov_x = x.mean(0), torch.cov(x.T) + 1e-2 * torch.eye(D)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        x, w = x.flatten(1) - self.mean, w - w.mean(0)
        cov_w, cov_xw = w.T @ w / len(w) + 1e-2 * torch.eye(K), 0.01 * x.T @ w / len(w)
        joint = torch.cat([torch.cat([self.cov_x, cov_xw], 1), torch.cat([cov_xw.T, cov_w], 1)])
        trace = torch.trace(torch.linalg.inv(joint) @ torch.block_diag(self.cov_x, cov_w))
        log_dets = joint.slogdet()[1] - self.cov_x.slogdet()[1] - cov_w.slogdet()[1]
        return -0.5 * (log_dets + trace - D - K)


@cache
def lautum_penalties() -> tuple[Tensor, nn.Module, nn.Module]:
    inputs = torch.randn(2 * D + 64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return inputs[:128], Lautum((3, 32, 32), K).fit_inputs(inputs.split(1024)), NaiveLautum(inputs.flatten(1))


def lautum_cost(network, turns: int) -> dict:
    inputs, ours, naive = lautum_penalties()
    x, x_u, y = inputs[:64], inputs[64:], torch.arange(64) % K

    def step_with(penalty):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step():
            optimizer.zero_grad()
            loss, out_u = cross_entropy(model(x), y), model(x_u)
            (loss + penalty(x_u, out_u)).backward()
            optimizer.step()

        return step

    steps = {
        "plain": step_with(lambda x_u, out_u: 0 * out_u.sum()), "lautum": step_with(ours), "naive": step_with(naive)
    }  # fmt: skip
    return in_turns(steps, turns, rare=("naive",))


def information_cost(network, turns: int) -> dict:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(128, 3, 32, 32, generator=g), torch.randint(K, (128,), generator=g)
    information = WeightInformation(1.0, num_samples=50_000)

    def step_with(model, penalty):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step():
            optimizer.zero_grad()
            (cross_entropy(model(x), y) + penalty(model)).backward()
            optimizer.step()

        return step

    noisy = add_weight_noise(network())
    return in_turns({"plain": step_with(network(), lambda m: 0.0), "information": step_with(noisy, information)}, turns)


class Product(nn.Module):
    """A separable critic of two dense towers, in a form that torch-mist can share."""

    def __init__(self, d: int, hidden: int = 256, out: int = 32) -> None:
        super().__init__()
        dense = lambda: nn.Sequential(  # noqa: E731
            nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, out)
        )
        self.f, self.g = dense(), dense()

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.f(x) @ self.g(z).T


class Gaussians:
    """Pairs of correlated Gaussians with a known mutual information."""

    def __init__(self, nats: float, seed: int, d: int = 20) -> None:
        self.nats, self.d, self.rho = nats, d, math.sqrt(1 - math.exp(-2 * nats / d))
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, B: int) -> tuple[Tensor, Tensor]:
        x, noise = (torch.randn(B, self.d, generator=self.generator) for _ in range(2))
        return x, self.rho * x + math.sqrt(1 - self.rho**2) * noise

    def optimal_scores(self, x: Tensor, z: Tensor) -> Tensor:
        squares = (self.rho * x[:, None] - z[None]).square().sum(-1) / (1 - self.rho**2)
        return 0.5 * (z.square().sum(-1)[None] - squares) - 0.5 * self.d * math.log(1 - self.rho**2)


def our_estimator(critic: nn.Module, learning_rate: float):
    regularizer = MutualInformation((20,), 20, critic=critic, critic_steps=1, learning_rate=learning_rate)

    def train(x, z):
        regularizer.train()(x, z)

    def read(x, z):
        regularizer.eval()(x, z)
        return regularizer.value.item()

    return train, read


def mist_estimator(critic: nn.Module, learning_rate: float):
    from torch_mist.critic import SeparableCritic
    from torch_mist.estimators.discriminative.implementations.smile import SMILE

    estimator = SMILE(SeparableCritic(critic.f, critic.g), neg_samples=-1, tau=5.0)
    optimizer = torch.optim.Adam(estimator.parameters(), lr=learning_rate)

    def train(x, z):
        optimizer.zero_grad()
        estimator.loss(x, z).backward()
        optimizer.step()

    def read(x, z):
        with torch.no_grad():
            return estimator.mutual_information(x, z).item()

    return train, read


def mutual_information(nats: float, B: int, steps: int, seeds: int, reads: int = 100) -> dict:
    makers = {"lightning-taskinfo": our_estimator, "torch-mist": mist_estimator}
    readings = {name: [] for name in (*makers, "optimal critic")}
    for seed in range(seeds):
        torch.manual_seed(seed)
        critic = Product(20)
        for name, make in makers.items():
            try:
                train, read = make(deepcopy(critic), learning_rate=5e-4)
            except ImportError:
                readings[name] = None
                continue
            data = Gaussians(nats, seed)
            for _ in range(steps):
                train(*data.draw(B))
            readings[name].append([read(*data.draw(B)) for _ in range(reads)])
        data = Gaussians(nats, 1000 + seed)
        pairs = [data.draw(B) for _ in range(reads)]
        readings["optimal critic"].append([smile(data.optimal_scores(*pair)).item() for pair in pairs])
    return {name: summary(values, nats) for name, values in readings.items()}


def summary(readings: list[list[float]] | None, nats: float) -> dict | str:
    if readings is None:
        return "missing"
    flat = [value for run in readings for value in run]
    means = [statistics.mean(run) for run in readings]
    return {
        "mean": statistics.mean(flat), "error": statistics.mean(flat) - nats, "variance": statistics.mean(
            statistics.variance(run) for run in readings), "means_by_seed": means, "nan": any(map(math.isnan, flat)),
    }  # fmt: skip


def environment() -> dict:
    versions = {"torch": torch.__version__, "lightning_taskinfo": lightning_taskinfo.__version__}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"python": platform.python_version(), **versions, **machine, "load_average": os.getloadavg()}


NETWORKS = {"cnn": cnn, "mlp": mlp}
COSTS = {"lautum": lautum_cost, "information": information_cost}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = (*COSTS, "mutual_information")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--nats", nargs="+", type=float, default=[2, 4, 6, 8, 10])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--steps", type=int, default=4000, help="critic steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=60, help="step times of each contender")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a few turns and steps, to see that it runs")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "regularizers.json")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.steps, args.seeds, args.nats, args.batch_sizes = 4, 50, 1, [2.0], [64]
    torch.set_num_threads(args.threads)
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    common = {"environment": environment(), "turns": args.turns, "steps": args.steps, "seeds": args.seeds}
    for part in args.parts:
        if part in COSTS:
            cells = {name: partial(COSTS[part], network, args.turns) for name, network in NETWORKS.items()}
        else:
            cells = {
                f"batch {B}, {nats:g} nats": partial(mutual_information, nats, B, args.steps, args.seeds)
                for B, nats in itertools.product(args.batch_sizes, args.nats)
            }
        for name, measure in cells.items():
            results.setdefault(part, {})[name] = {**measure(), **common}
            print(part, name, json.dumps(results[part][name], indent=1), flush=True)
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
