"""What the regularizers cost a step.

    python benchmarks/regularizers.py [--parts lautum information] [--networks resnet18] [--threads 1] [--quick]

The plain step is the same step with the penalty deleted and the forward on the unlabelled inputs kept. Contenders take
turns of 42 steps each (6 of ResNet-18, which needs ``transformers``), and are compared by the median of their ratios to
the plain steps of the same turn, in CPU time of the process, so that a busy machine hits all of them alike (it still
makes memory slow). The naive D×D inverse is one step. How well the mutual information is read is in
``mutual_information.py``.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from environment import environment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo._files import read_json, write_json
from lightning_taskinfo.regularizers import (
    Lautum,
    LocalMinimumRegularizer,
    MultiKernelMMD,
    MutualInformation,
    TemporalEnsembling,
    WeightInformation,
)
from lightning_taskinfo.variational import add_weight_noise

D, K = 3072, 10
STEPS_A_TURN = 42  # two cycles of Lautum's whitening in the long run


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, K),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(D, 300),
        nn.ReLU(),
        nn.Linear(300, 300),
        nn.ReLU(),
        nn.Linear(300, K),
    )


class Pooled(nn.Module):
    """ResNet-18 as Hugging Face has it, up to its pooled features."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel

        widths = [64, 128, 256, 512]
        config = ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=widths, layer_type="basic")
        self.model = ResNetModel(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).pooler_output.flatten(1)


def resnet() -> nn.Module:
    return nn.Sequential(Pooled(), nn.Linear(512, K))


def steps_of(network: Callable[[], nn.Module]) -> int:
    """Fewer steps a turn of a network that takes long."""
    return 6 if network is resnet else STEPS_A_TURN


def in_turns(
    contenders: dict[str, Callable[[], None]], turns: int, steps: int = STEPS_A_TURN
) -> dict:
    """Median CPU milliseconds a step, and the median and range of the ratio to ``plain`` in the same turn."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, step in contenders.items():
            begin = time.process_time()
            for _ in range(steps):
                step()
            if turn:  # the first is to warm up
                times[name].append(1000 * (time.process_time() - begin) / steps)
    result = {}
    for name, values in times.items():
        ratios = [value / plain for value, plain in zip(values, times["plain"], strict=True)]
        spread = {"low": min(ratios), "high": max(ratios), "turns": turns, "steps_a_turn": steps}
        result[name] = {
            "cpu_ms": statistics.median(values),
            "ratio": statistics.median(ratios),
            **spread,
        }
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
    ours = Lautum((3, 32, 32), K).fit_inputs(inputs.split(1024))
    return inputs[:128], ours, NaiveLautum(inputs.flatten(1))


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

    begin = time.process_time()
    step_with(naive)()
    cpu_ms = 1000 * (time.process_time() - begin)
    plain = step_with(lambda x_u, out_u: 0 * out_u.sum())
    contenders = {"plain": plain, "lautum": step_with(ours)}
    result = in_turns(contenders, turns, steps_of(network))
    return result | {"naive": {"cpu_ms": cpu_ms, "ratio": cpu_ms / result["plain"]["cpu_ms"]}}


def information_cost(network, turns: int, batch_size: int = 128) -> dict:
    g = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(batch_size, 3, 32, 32, generator=g),
        torch.randint(K, (batch_size,), generator=g),
    )
    information = WeightInformation(1.0, num_samples=50_000)

    def step_with(model, penalty):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step():
            optimizer.zero_grad()
            (cross_entropy(model(x), y) + penalty(model)).backward()
            optimizer.step()

        return step

    noisy, weights = add_weight_noise(network()), sum(p.numel() for p in network().parameters())
    noise = torch.empty(weights)
    contenders = {
        "plain": step_with(network(), lambda m: 0.0),
        "information": step_with(noisy, information),
        "noise alone": step_with(
            network(), lambda m: 0 * noise.normal_().sum()
        ),  # no draw can be cheaper
    }
    return in_turns(contenders, turns, steps_of(network)) | {"weights": weights}


def penalty_cost(network, turns: int, name: str) -> dict:
    """A step with one of the penalties on features, outputs or the loss, with its default settings."""
    g = torch.Generator().manual_seed(0)
    x, x_u = (torch.randn(64, 3, 32, 32, generator=g) for _ in range(2))
    y, index = torch.randint(K, (64,), generator=g), torch.arange(64)

    def step_with(penalty):
        model = network()
        body, head = model[:-1], model[-1]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def loss_fn(part):
            return cross_entropy(model(part[0]), part[1])

        def step():
            optimizer.zero_grad()
            z, z_u = body(x), body(x_u)
            loss = cross_entropy(head(z), y) + 0 * head(z_u).sum()
            (loss + penalty(model, loss_fn, z, z_u, head(z_u))).backward()
            optimizer.step()

        return step

    features = network()[-1].in_features
    if name == "mutual_information":
        critic = MutualInformation((3, 32, 32), features)
        penalty = lambda model, loss_fn, z, z_u, out_u: critic(x_u, z_u)  # noqa: E731
    elif name == "mk_mmd":
        distance = MultiKernelMMD()
        penalty = lambda model, loss_fn, z, z_u, out_u: distance(z, z_u)  # noqa: E731
    elif name == "temporal_ensembling":
        ensemble = TemporalEnsembling(64, K, num_labeled=64)
        ensemble(torch.zeros(64, K), index, epoch=0)
        penalty = lambda model, loss_fn, z, z_u, out_u: ensemble(out_u, index, epoch=40)  # noqa: E731
    else:
        flat = LocalMinimumRegularizer()
        penalty = lambda model, loss_fn, z, z_u, out_u: flat(model, loss_fn, (x, y))  # noqa: E731
    plain = step_with(lambda model, loss_fn, z, z_u, out_u: 0 * out_u.sum())
    return in_turns({"plain": plain, name: step_with(penalty)}, turns, steps_of(network))


NETWORKS = {"cnn": cnn, "mlp": mlp, "resnet18": resnet}
OTHERS = ("mutual_information", "mk_mmd", "temporal_ensembling", "local_minimum")
COSTS = {
    **{name: dict.fromkeys(NETWORKS, partial(penalty_cost, name=name)) for name in OTHERS},
    "lautum": dict.fromkeys(NETWORKS, lautum_cost),
    "information": {
        **dict.fromkeys(NETWORKS, information_cost),
        "mlp, batches of 512": partial(
            information_cost, batch_size=512
        ),  # a weight is drawn once for more samples
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=COSTS, default=list(COSTS))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--turns", type=int, default=9, help="of each contender")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one turn, to see that it runs")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "regularizers.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = read_json(args.output) if args.output.exists() else {}
    for part in args.parts:
        for name, cost in COSTS[part].items():
            if name.partition(",")[0] not in args.networks:
                continue
            found = cost(NETWORKS[name.partition(",")[0]], 1 if args.quick else args.turns)
            results.setdefault(part, {})[name] = {**found, "environment": environment()}
            print(
                part,
                name,
                {key: round(row["ratio"], 2) for key, row in found.items() if key != "weights"},
                flush=True,
            )
            args.output.parent.mkdir(parents=True, exist_ok=True)
            write_json(args.output, results)


if __name__ == "__main__":
    main()
