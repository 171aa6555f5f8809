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
import time
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy

from lightning_taskinfo._files import atomic_write, claim_folder
from lightning_taskinfo.data import load_dataset
from lightning_taskinfo.fisher import fisher_trace

SHARES = (0.0, 0.25, 0.5, 1.0)
LENGTHS = (2000, 4000, 10_000)
SAMPLES = 1000
SIDE = 14
CLASSES = 10
BATCH = 64
RATE = 1e-3
FISHER_EVERY = 200
FISHER_SAMPLES = 250


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="keeps finished trainings")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--units", type=int, help="trainings to do now; all that are missing by default")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps, to see that it runs")
    args = parser.parse_args()
    lengths = (20, 40, 100) if args.quick else LENGTHS
    claim_folder(args.folder, {"lengths": list(lengths), "samples": SAMPLES}, argument="--folder")
    done = 0
    for seed, network, share in itertools.product(range(args.seeds), NETWORKS, SHARES):
        path = args.folder / f"{network}_seed_{seed}_share_{share:g}.pt"
        if path.exists() or (args.units is not None and done == args.units):
            continue
        result = trained(path, network, seed, share, lengths)
        print(path.stem, f"{result['cpu_seconds']:.0f} s", flush=True)
        done += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
