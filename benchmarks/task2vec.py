"""What a task embedding costs beside a loop over single samples, and whether the two agree.

    python benchmarks/task2vec.py [--networks lenet] [--samples 64] [--rounds 5]

Both fit nothing: the probe has its head already. Ours takes the whole batch; the loop runs the probe on one sample
after the other, squares the gradient (for `exact` labels one per class) and averages it over filters. They take turns,
in processor time of one thread, and what counts is the ratio within a round. Agreement is the largest relative
difference of an entry, with exact labels in float64. `head` is the time of features and head, which come before
the Fisher information in an embedding.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from fisher import environment
from networks import NETWORKS, make
from torch import Tensor, nn

from lightning_taskinfo import Task2Vec

LABELS = ("sampled", "exact")


def looped(probe: nn.Module, weights: list[str], inputs: Tensor, labels: str) -> Tensor:
    """The embedding from gradients of one sample after the other, by plain autograd."""
    parameters = [probe.get_parameter(name) for name in weights]
    totals = [torch.zeros_like(p) for p in parameters]
    for x in inputs:
        log_p = probe(x[None]).log_softmax(-1)[0]
        p = log_p.exp().detach()
        draws = range(len(p)) if labels == "exact" else p.multinomial(1).tolist()
        for c in draws:
            gradients = torch.autograd.grad(log_p[c], parameters, retain_graph=labels == "exact")
            for total, g in zip(totals, gradients, strict=True):
                total += g.square() * (p[c] if labels == "exact" else 1)
    return torch.cat([total.flatten(1).mean(1) / len(inputs) for total in totals])


def fitted(
    network: str, n: int, labels: str, dtype: torch.dtype
) -> tuple[Task2Vec, Tensor, Tensor]:
    """Return an embedder whose probe has a head for the random labels, and inputs and labels."""
    probe, x, y = make(network, n)
    embedder, x = Task2Vec(probe.to(dtype), labels=labels), x.to(dtype)
    embedder._fit(x, y)
    return embedder, x, y


def seconds(call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def race(network: str, n: int, labels: str, rounds: int) -> dict:
    embedder, x, y = fitted(network, n, labels, torch.float32)
    weights = embedder.weights
    times = {"ours": [], "loop": [], "head": []}
    for turn in range(rounds + 1):  # the first is to warm up
        now = {
            "ours": seconds(lambda: embedder._fisher(x)),
            "loop": seconds(lambda: looped(embedder.network, weights, x, labels)),
            "head": seconds(lambda: embedder._fit(x, y)),
        }
        for name, value in now.items() if turn else ():
            times[name].append(value)
    ratios = [loop / ours for loop, ours in zip(times["loop"], times["ours"], strict=True)]
    row = {
        "network": network,
        "labels": labels,
        "samples": n,
        "filters": sum(len(p) for p in _parameters(embedder)),
    }
    row |= {
        "loop_over_ours": median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "rounds": rounds,
    }
    return row | {f"{name}_seconds": median(values) for name, values in times.items()}


def disagreement(network: str, n: int) -> float:
    embedder, x, _ = fitted(network, n, "exact", torch.float64)
    reference = looped(embedder.network, embedder.weights, x, "exact")
    found = torch.cat(embedder._fisher(x))
    return (
        ((found - reference).abs() / reference.clamp(min=torch.finfo(torch.float64).tiny))
        .max()
        .item()
    )


def _parameters(embedder: Task2Vec) -> list[Tensor]:
    return [embedder.network.get_parameter(name) for name in embedder.weights]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--networks", nargs="+", choices=NETWORKS, default=["mlp", "lenet", "vgg", "resnet20"]
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "task2vec.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = {
        "what": "Task2Vec beside a loop over single samples",
        "environment": environment(1),
        "rows": [],
    }
    result["relative_error_float64"] = {name: disagreement(name, 8) for name in args.networks}
    print("network   labels   loop/ours (least to largest)   ours s   loop s   head s")
    for network in args.networks:
        for labels in LABELS:
            row = race(network, args.samples, labels, args.rounds)
            result["rows"].append(row)
            ratio = f"{row['loop_over_ours']:6.1f} ({row['low']:.1f} to {row['high']:.1f})"
            times = " ".join(f"{row[f'{name}_seconds']:8.3f}" for name in ("ours", "loop", "head"))
            print(f"{network:9} {labels:8} {ratio:28} {times}", flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print("largest relative difference of an entry, float64:", result["relative_error_float64"])


if __name__ == "__main__":
    main()
