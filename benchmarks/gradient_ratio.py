"""What does a gradient ratio say about a penalty's weight?

    python benchmarks/gradient_ratio.py [--seeds 3] [--quick]

200 labelled and 1,000 unlabelled digits of 8x8 pixels, a network of one hidden layer, 600 steps of Adam. A penalty is
trained at weights a factor of 10 apart; every 20 steps the norm of its gradient over the loss's is taken, as
``penalised`` logs it. Reported: the ratio over the first tenth of the training, its median over all of it, and the test
accuracy against that of the same seed without a penalty.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch
from environment import environment
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo._files import atomic_write, write_json
from lightning_taskinfo.data import load_dataset
from lightning_taskinfo.mixins import gradient_norm
from lightning_taskinfo.regularizers import (
    Lautum,
    MultiKernelMMD,
    MutualInformation,
    WeightInformation,
)
from lightning_taskinfo.variational import add_weight_noise

WEIGHTS = {
    "lautum": (1e-4, 1e-3, 1e-2, 1e-1),
    "mutual_information": (1e-3, 1e-2, 1e-1, 1.0),
    "information": (1e-3, 1e-2, 1e-1, 1.0),
    "mk_mmd": (1e-2, 1e-1, 1.0, 10.0),
}
LABELLED, UNLABELLED, BATCH, STEPS, EVERY = 200, 1000, 50, 600, 20


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def run(penalty: str | None, weight: float, seed: int, steps: int) -> dict:
    """Train once; return ratios on the way and the test accuracy."""
    digits = load_dataset("digits", size=8)
    generator = Generator().manual_seed(seed)
    images, labels = digits.train()[:]
    order = torch.randperm(len(labels), generator=generator)
    x, y = images[order[:LABELLED]], labels[order[:LABELLED]]
    x_u = images[order[LABELLED : LABELLED + UNLABELLED]]
    torch.manual_seed(seed)
    net = Network()
    regulariser = made(penalty, weight, net, x_u)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 2e-3)
    ratios = {}
    for step in range(steps):
        i = torch.randint(LABELLED, (BATCH,), generator=generator)
        j = torch.randint(len(x_u), (BATCH,), generator=generator)
        loss = cross_entropy(net(x[i]), y[i])
        total = loss
        if regulariser is not None:
            term = added(penalty, regulariser, net, x[i], x_u[j])
            if step % EVERY == 0:
                parameters = [p for p in net.parameters() if p.requires_grad]
                whole = max(gradient_norm(loss, parameters), 1e-30)
                ratios[step] = gradient_norm(term, parameters) / whole
            total = loss + term
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    test_x, test_y = digits.test()[:]
    with torch.no_grad():
        accuracy = (net.eval()(test_x).argmax(-1) == test_y).float().mean().item()
    early = [ratio for step, ratio in ratios.items() if step < steps / 10]
    return {
        "penalty": penalty,
        "weight": weight,
        "seed": seed,
        "accuracy": accuracy,
        "early_ratio": statistics.median(early) if early else None,
        "median_ratio": statistics.median(ratios.values()) if ratios else None,
    }


def made(
    penalty: str | None, weight: float, net: nn.Module, unlabelled: Tensor
) -> nn.Module | None:
    """Return the regulariser; weight noise goes into the network."""
    if penalty == "lautum":
        lautum = Lautum(input_shape=(1, 8, 8), num_outputs=10, weight=weight)
        lautum.fit_inputs([unlabelled])
        return lautum
    if penalty == "mutual_information":
        return MutualInformation(input_shape=(1, 8, 8), feature_dim=64, weight=weight)
    if penalty == "information":
        add_weight_noise(net)
        return WeightInformation(beta=weight, num_samples=LABELLED)
    if penalty == "mk_mmd":
        return MultiKernelMMD(weight=weight)
    return None


def added(
    penalty: str, regulariser: nn.Module, net: Network, labelled: Tensor, unlabelled: Tensor
) -> Tensor:
    if penalty == "information":
        return regulariser(net)
    features = net.body(unlabelled)
    if penalty == "lautum":
        return regulariser(unlabelled, net.head(features))
    if penalty == "mutual_information":
        return regulariser(unlabelled, features)
    return regulariser(net.body(labelled), features)


def rows_of(runs: list[dict]) -> list[dict]:
    """Return means over seeds, with the change against the same seed without a penalty."""
    plain = {row["seed"]: row["accuracy"] for row in runs if row["penalty"] is None}
    rows = []
    for penalty, weights in WEIGHTS.items():
        for weight in weights:
            same = [row for row in runs if (row["penalty"], row["weight"]) == (penalty, weight)]
            change = [100 * (row["accuracy"] - plain[row["seed"]]) for row in same]
            rows.append({
                "penalty": penalty,
                "weight": weight,
                "early_ratio": statistics.fmean(row["early_ratio"] for row in same),
                "median_ratio": statistics.fmean(row["median_ratio"] for row in same),
                "accuracy": 100 * statistics.fmean(row["accuracy"] for row in same),
                "change": statistics.fmean(change),
                "change_range": [min(change), max(change)],
            })  # fmt: skip
    return rows


def markdown(result: dict) -> str:
    lines = [
        f"Without a penalty: {result['plain_accuracy']:.1f} % over {result['seeds']} seeds.",
        "",
    ]
    lines += [
        "| penalty | weight | ratio, first tenth | ratio, median | accuracy, % | change, points | range |"
    ]
    lines += ["|---" * 7 + "|"]
    for row in result["rows"]:
        low, high = row["change_range"]
        lines.append(
            f"| {row['penalty']} | {row['weight']:g} | {row['early_ratio']:.2g} | {row['median_ratio']:.2g} | "
            f"{row['accuracy']:.1f} | {row['change']:+.1f} | {low:+.1f} to {high:+.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="one seed and few steps, to see that it runs"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "gradient_ratio.json"
    )
    args = parser.parse_args()
    seeds, steps = (1, 40) if args.quick else (args.seeds, STEPS)
    begin = time.process_time()
    settings = [
        (None, 0.0),
        *((name, weight) for name, weights in WEIGHTS.items() for weight in weights),
    ]
    runs = []
    for (penalty, weight), seed in itertools.product(settings, range(seeds)):
        runs.append(run(penalty, weight, seed, steps))
        print(penalty, weight, seed, f"{runs[-1]['accuracy']:.3f}", flush=True)
    result = {
        "question": "what a gradient ratio says about a penalty's weight",
        "seeds": seeds,
        "steps": steps,
        "environment": environment(),
        "cpu_seconds": time.process_time() - begin,
        "plain_accuracy": 100
        * statistics.fmean(row["accuracy"] for row in runs if row["penalty"] is None),
        "rows": rows_of(runs),
        "runs": runs,
    }
    write_json(args.output, result)
    with atomic_write(args.output.with_suffix(".md"), "w") as file:
        file.write(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
