"""Which number shows how much a network has memorised, at any length of training?

    python benchmarks/memorised_information.py --folder UNITS [--units 5] [--quick]

Written down before the first run:

- **Runs.** 1,000 digits of 14x14 pixels; a share of 0, 25, 50 or 100 % of the labels is drawn anew, from ten classes;
  five seeds (samples, labels, initial weights, batches), the redrawn samples of a smaller share being among those of a
  larger one; an MLP (34,000 weights) and a CNN (18,000); Adam, rate 1e-3, batches of 64, no weight decay, no
  augmentation. One training of 10,000 steps is measured after 2,000, 4,000 and 10,000: 1x, 2x and 5x the length.
- **Measures.** All on the 1,000 training samples, with the diagonal of the Fisher information in expectation over the
  model's labels and the start of training as centre, beta = 1:
  ``displacement`` |w - w0|^2; ``curvature_0.1`` and ``curvature_1``, the curvature part of the KL in nats at a prior
  standard deviation of 0.1 and 1; ``measured_c1``, the smallest E_Q[L] + KL + log J over J = 17 standard deviations
  from 0.001 to 10, with E_Q[L] measured on 16 draws of Q; ``measured_c1_0.1``, the same at 0.1 alone;
  ``evidence_std``, the standard deviation at which the quadratic C_1 is smallest; ``fisher_trace``;
  ``largest_fisher_trace``, the largest of those taken every 200 steps so far (on 250 of the samples).
- **Ordered** is a measure that, in both networks and at each of the three lengths, rises strictly with the share of
  random labels (all four in order) in at least four of the five seeds.
- **Stable** is one whose mean over seeds differs by at most a factor of 2 between the three lengths, at each share in
  both networks.
- **What passes both becomes the headline** of ``InformationInWeights`` and the first picture; of several, the one
  nearest to a code length (``measured_c1``, then curvature, displacement, evidence, Fisher traces). If nothing passes,
  the first picture shows the Fisher trace and the memorised samples.
- Reported beside it: whether the largest value of clean labels over lengths is below the smallest of random ones
  (``separated``), accuracies, the ratio of measured to quadratic E_Q[L] - L at the evidence's standard deviation, and
  by how much the mean ``measured_c1`` of random labels is above N log 10, which theory asks to be positive.

The plan was changed once, for its cost and before any measure was looked at: the CNN was larger, there was a
share of 75 %, and Fisher traces were taken every 50 steps.

A unit is one training. Finished ones are kept in UNITS with their weights, and not run again.
"""

import argparse
import itertools
import math
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from environment import environment
from evidence_width import evidence_prior_std
from torch import Generator, Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy

from lightning_taskinfo._files import atomic_write, claim_folder, read_json, write_json
from lightning_taskinfo._random import seed_from
from lightning_taskinfo.data import load_dataset
from lightning_taskinfo.distributions import CurvatureBlock
from lightning_taskinfo.distributions.post_family import (
    PostFamily,
    losses_with_noise,
    standard_noise,
)
from lightning_taskinfo.fisher import fisher_diagonal, fisher_trace
from lightning_taskinfo.functional.information import added

SHARES = (0.0, 0.25, 0.5, 1.0)
LENGTHS = (2000, 4000, 10_000)
SAMPLES = 1000
SIDE = 14
CLASSES = 10
BATCH = 64
RATE = 1e-3
FISHER_EVERY = 200
FISHER_SAMPLES = 250
STDS = tuple(10 ** (j / 4) for j in range(-12, 5))
DRAWS = 16
MEASURES = (
    "displacement",
    "curvature_0.1",
    "curvature_1",
    "measured_c1",
    "measured_c1_0.1",
    "evidence_std",
    "fisher_trace",
    "largest_fisher_trace",
)
BESIDE = (
    "train_accuracy",
    "test_accuracy",
    "loss",
    "measured_c1_std",
    "measured_c1_misfit",
    "evidence_misfit",
)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


NETWORKS = {"mlp": mlp, "cnn": cnn}


def data(seed: int, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, a share of them redrawn, and test images and labels."""
    digits = load_dataset("digits", size=28)
    generator = Generator().manual_seed(1000 + seed)
    images, labels = digits.train()[:]
    chosen = torch.randperm(len(labels), generator=generator)[:SAMPLES]
    redrawn = torch.randperm(SAMPLES, generator=generator)[: round(share * SAMPLES)]
    others = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    labels = labels[chosen].clone()
    labels[redrawn] = others[redrawn]
    test_images, test_labels = digits.test()[:]
    return small(images[chosen]), labels, small(test_images), test_labels


def small(images: Tensor) -> Tensor:
    return (adaptive_avg_pool2d(images, SIDE) - 0.13) / 0.3


def train(network: str, seed: int, share: float, lengths: tuple[int, ...]) -> dict:
    """Return the weights at the start and after each length, and the Fisher traces on the way."""
    inputs, targets, *_ = data(seed, share)
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    optimizer = torch.optim.Adam(model.parameters(), RATE, fused=True)
    batches = Generator().manual_seed(2000 + seed)
    weights = {0: copied(model)}
    traces = {}
    order = torch.empty(0, dtype=torch.long)
    for step in range(1, max(lengths) + 1):
        if len(order) < BATCH:
            order = torch.randperm(SAMPLES, generator=batches)
        chosen, order = order[:BATCH], order[BATCH:]
        optimizer.zero_grad()
        cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
        if step % FISHER_EVERY == 0:
            traces[step] = fisher_trace(model, inputs[:FISHER_SAMPLES], labels="exact").item()
        if step in lengths:
            weights[step] = copied(model)
    return {"weights": weights, "traces": traces}


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(path: Path, network: str, seed: int, share: float, lengths: tuple[int, ...]) -> dict:
    """Return a training from its file, or do it and keep it there."""
    if path.exists():
        return torch.load(path, weights_only=True)
    begin = time.process_time()
    result = train(network, seed, share, lengths)
    result["cpu_seconds"] = time.process_time() - begin
    with atomic_write(path) as file:
        torch.save(result, file)
    return result


def measures(network: str, seed: int, share: float, training: dict) -> list[dict]:
    """Return one row per length of training."""
    inputs, targets, test_inputs, test_targets = data(seed, share)
    model = NETWORKS[network]()
    start = training["weights"][0]
    rows = []
    for step, weights in training["weights"].items():
        if not step:
            continue
        model.load_state_dict(weights)
        fisher = fisher_diagonal(model, inputs, labels="exact")
        h = {name: SAMPLES * part for name, part in fisher.items()}
        moved = {name: weights[name] - start[name] for name in weights}
        distances = {name: part.double().square().sum().item() for name, part in moved.items()}
        blocks = {name: CurvatureBlock(part) for name, part in h.items()}
        family = PostFamily(blocks, distances, beta=1.0)
        loss = summed_loss(model, inputs, targets)
        widths = [at_width(model, inputs, targets, family, std, seed) for std in STDS]
        best = min(widths, key=lambda row: row["c1"])
        narrow, wide = (added(terms.values()) for terms in family.terms([0.1, 1.0]))
        flat_h, flat_moved = (
            torch.cat([part.flatten() for part in parts.values()]) for parts in (h, moved)
        )
        evidence = evidence_prior_std(flat_h, flat_moved)
        rows.append({
            "network": network,
            "seed": seed,
            "share": share,
            "step": step,
            "displacement": flat_moved.double().square().sum().item(),
            "curvature_0.1": narrow.curvature.item(),
            "curvature_1": wide.curvature.item(),
            "measured_c1": best["c1"] + math.log(len(STDS)),
            "measured_c1_std": best["prior_std"],
            "measured_c1_kl": best["kl"],
            "measured_c1_misfit": best["expected_loss"] / best["quadratic_loss"],
            "measured_c1_0.1": next(row["c1"] for row in widths if row["prior_std"] == 0.1),
            "evidence_std": evidence,
            "evidence_misfit": at_width(model, inputs, targets, family, evidence, seed)["misfit"],
            "fisher_trace": sum(part.sum().item() for part in fisher.values()),
            "largest_fisher_trace": max(value for at, value in training["traces"].items() if at <= step),
            "loss": loss,
            "train_accuracy": accuracy(model, inputs, targets),
            "test_accuracy": accuracy(model, test_inputs, test_targets),
            "widths": widths,
        })  # fmt: skip
    return rows


@torch.no_grad()
def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    return cross_entropy(model(inputs), targets, reduction="sum").item()


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    return (model(inputs).argmax(-1) == targets).float().mean().item()


def at_width(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    family: PostFamily,
    prior_std: float,
    seed: int,
) -> dict[str, float]:
    """Return measured and quadratic expected loss for one width of the pre-distribution, and C_1."""
    loss = partial(summed_loss, model, inputs, targets)
    rows = []
    for number in range(DRAWS // 2):
        noise = standard_noise(dict(model.named_parameters()), seed_from(seed, number))
        rows.append(losses_with_noise(model, loss, family.draw(prior_std), noise))
    pairs = torch.tensor(rows, dtype=torch.float64).mean(1)
    (by_weight,) = family.terms([prior_std])
    terms = added(by_weight.values())
    quadratic = loss() + terms.curvature_penalty.item()
    expected = pairs.mean().item()
    return {
        "prior_std": prior_std,
        "kl": terms.kl.item(),
        "expected_loss": expected,
        "expected_loss_error": pairs.std().item() / math.sqrt(len(pairs)),
        "quadratic_loss": quadratic,
        "misfit": expected / quadratic,
        "c1": terms.code_length(expected).item(),
    }


def of_complete_seeds(rows: list[dict]) -> list[dict]:
    """Return the rows of those seeds of a network all of whose shares are finished."""
    shares: dict[tuple, set[float]] = {}
    for row in rows:
        shares.setdefault((row["network"], row["seed"]), set()).add(row["share"])
    return [row for row in rows if len(shares[row["network"], row["seed"]]) == len(SHARES)]


def verdicts(rows: list[dict]) -> dict[str, dict]:
    """Return, for each measure, whether it is ordered and stable as the plan says, and the figures behind that."""
    found = {}
    for name in MEASURES:
        ordered, drifts, separated = [], [], []
        for network in NETWORKS:
            values = {
                (row["seed"], row["share"], row["step"]): row[name]
                for row in rows
                if row["network"] == network
            }
            seeds = sorted({seed for seed, *_ in values})
            steps = sorted({step for *_, step in values})
            for step in steps:
                in_order = [
                    all(
                        values[seed, a, step] < values[seed, b, step]
                        for a, b in itertools.pairwise(SHARES)
                    )
                    for seed in seeds
                ]
                ordered.append(
                    {
                        "network": network,
                        "step": step,
                        "seeds_in_order": sum(in_order),
                        "seeds": len(seeds),
                    }
                )
            for share in SHARES:
                means = [
                    statistics.fmean(values[seed, share, step] for seed in seeds) for step in steps
                ]
                drifts.append(
                    {
                        "network": network,
                        "share": share,
                        "means": means,
                        "factor": max(means) / min(means),
                    }
                )
            clean = max(values[seed, SHARES[0], step] for seed in seeds for step in steps)
            random = min(values[seed, SHARES[-1], step] for seed in seeds for step in steps)
            separated.append(clean < random)
        found[name] = {
            "ordered": all(row["seeds_in_order"] >= 0.8 * row["seeds"] for row in ordered),
            "stable": all(row["factor"] <= 2 for row in drifts),
            "separated": all(separated),
            "fewest_seeds_in_order": min(
                f"{row['seeds_in_order']} of {row['seeds']}" for row in ordered
            ),
            "largest_factor": max(row["factor"] for row in drifts),
            "order": ordered,
            "drift": drifts,
        }
    return found


def of_random_labels(rows: list[dict]) -> list[dict]:
    """Return by how much measured C_1 of random labels is above N log 10, over seeds."""
    result = []
    for network, step in itertools.product(NETWORKS, sorted({row["step"] for row in rows})):
        values = [
            row["measured_c1"] - SAMPLES * math.log(CLASSES)
            for row in rows
            if (row["network"], row["step"], row["share"]) == (network, step, 1.0)
        ]
        result.append(
            {
                "network": network,
                "step": step,
                "mean": statistics.fmean(values),
                "smallest": min(values),
            }
        )
    return result


def markdown(result: dict) -> str:
    """Return the tables: what holds of each measure, and its means."""
    done, planned = result["trainings"]
    lines = [
        f"From {done} of {planned} trainings; a seed counts where all its shares are finished.",
        "",
    ]
    lines += [
        "| measure | ordered | fewest seeds in order | stable | largest factor over lengths | separated |"
    ]
    lines += ["|---" * 6 + "|"]
    for name, row in result["verdicts"].items():
        words = ["yes" if row[key] else "no" for key in ("ordered", "stable", "separated")]
        lines.append(
            f"| {name} | {words[0]} | {row['fewest_seeds_in_order']} | {words[1]} | "
            f"{row['largest_factor']:.3g} | {words[2]} |"
        )
    shares = " | ".join(f"{share:.0%}" for share in SHARES)
    steps = sorted({row["step"] for row in result["runs"]})
    lines += ["", f"| network | measure | steps | {shares} |", "|---" * (3 + len(SHARES)) + "|"]
    for network, name in itertools.product(NETWORKS, (*MEASURES, *BESIDE)):
        for step in steps:
            cells = []
            for share in SHARES:
                same = [
                    row[name]
                    for row in result["runs"]
                    if (row["network"], row["step"], row["share"]) == (network, step, share)
                ]
                cells.append(f"{statistics.fmean(same):.4g}")
            lines.append(f"| {network} | {name} | {step} | {' | '.join(cells)} |")
    lines += ["", "Measured C_1 of random labels above N log 10, in nats:", ""]
    lines += ["| network | steps | mean | smallest |", "|---" * 4 + "|"]
    for row in result["random_labels"]:
        lines.append(
            f"| {row['network']} | {row['step']} | {row['mean']:.0f} | {row['smallest']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="keeps finished trainings")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--units", type=int, help="trainings to do now; all that are missing by default"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed and few steps, to see that it runs"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parent / "results" / "memorised_information.json",
    )
    args = parser.parse_args()
    lengths = (20, 40, 100) if args.quick else LENGTHS
    seeds = 1 if args.quick else args.seeds
    claim_folder(args.folder, {"lengths": list(lengths), "samples": SAMPLES})
    done, rows, seconds = 0, [], 0.0
    for seed, network, share in itertools.product(range(seeds), NETWORKS, SHARES):
        path = args.folder / f"{network}_seed_{seed}_share_{share:g}.pt"
        if not path.exists():
            if args.units is not None and done == args.units:
                continue
            done += 1
        training = trained(path, network, seed, share, lengths)
        measured = path.with_suffix(".json")
        if not measured.exists():
            begin = time.process_time()
            found = measures(network, seed, share, training)
            seconds_here = training["cpu_seconds"] + time.process_time() - begin
            write_json(measured, {"rows": found, "cpu_seconds": seconds_here})
            print(path.stem, f"{seconds_here:.0f} s", flush=True)
        stored = read_json(measured)
        rows += stored["rows"]
        seconds += stored["cpu_seconds"]
    finished = len(rows) // len(lengths)
    rows = of_complete_seeds(rows)
    result = {
        "question": "which number shows how much a network has memorised, at any length of training",
        "settings": {
            "seeds": seeds,
            "samples": SAMPLES,
            "lengths": lengths,
            "shares": SHARES,
            "draws": DRAWS,
        },
        "environment": environment(),
        "cpu_seconds": seconds,
        "trainings": [finished, seeds * len(NETWORKS) * len(SHARES)],
        "verdicts": verdicts(rows),
        "random_labels": of_random_labels(rows),
        "runs": [{key: value for key, value in row.items() if key != "widths"} for row in rows],
    }
    write_json(args.output, result)
    with atomic_write(args.output.with_suffix(".md"), "w") as file:
        file.write(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
