"""What can be certified after a transfer from MNIST to 2,000 labels of notMNIST, by which proof?

Written down before the run. A small CNN is pretrained on 20,000 images of MNIST for two epochs and gets a fresh random
head. Four ways to use the 2,000 labels, one seed, no choice by any test label:

- *head*: the pretrained trunk is frozen, the head learns from all labels; the prior is centred where it began.
- *all layers*: everything is fine-tuned on all labels; the same centre.
- *half*: everything is fine-tuned on a random half, which gives the centre, then tuned gently on the other half,
  which is certified.
- *held out*: everything is fine-tuned on 1,600 labels; 400 are held out for the test-set bound.

Each row has the stochastic bound, the bound for the network itself by disagreement on the other 13,724 inputs without
their labels, the test-set bound where labels were held out, and the errors on 3,000 test images that nothing has seen.
To hold: the best stochastic bound with a pretrained centre (*head* or *all layers*) is below 0.369; every bound is
above its test error. Each bound holds with confidence 0.95 by itself, not all of them together.

Seen before this was written: one run of *all layers* with 200 draws gave a stochastic bound of 0.775, and 0.965 for the
network, at a test error of 0.110. The other three rows had not been run.

What came of it: the best of the two was *head* with 0.4975, so the goal was missed. A head on the 64 features has a
large error, and training all layers moves more weights than 2,000 labels can pay for.

A change of plan after that look, the fifth row. *Few directions*: the pretrained convolutions are frozen, and so is a
projection of their outputs to the leading 16 principal directions of 1,500 images without labels, which the
disagreement then does without. A head of 160 weights, centred at 0, is trained with the noise of its weights
(C_β of Achille et al.), which gives mean and width of the post-distribution; how it is trained is free.
Pre-distributions are not. 18 of this kind were written down (pixels, second convolution or features; 16, 32 or 64
directions; plain or half whitened), of which the first few were tried on the certified labels; before them 14 others
(heads on whole layers, noise in all layers), of which six were tried, and the rows above. The theorem gets a 40th of
its share of δ for this row, which covers all of them, as far as a list can be covered that grew after looks. No test
label had a part in the choice.

    python benchmarks/certified_transfer.py --data-dir FOLDER_WITH_MNIST_AND_NOTMNIST_NPZ

Rows that are stored stay as they are unless ``--runs`` names them.
"""

import argparse
import json
import os
import platform
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo._files import write_json
from lightning_taskinfo.certificates import Certificate, Prior, certify, zero_one_loss
from lightning_taskinfo.certificates.certificate import round_up
from lightning_taskinfo.data import load_dataset
from lightning_taskinfo.distributions import diagonal_curvature
from lightning_taskinfo.transfer import small_cnn

Split = tuple[Tensor, Tensor]
LABELS, HELD_OUT, PRETRAINED = 2_000, 400, 20_000
DIRECTIONS, PROJECTED, PRIORS = 16, 1_500, 40  # the last: pre-distributions to choose from
PRETRAINED_CENTRE = ("head", "all layers", "few directions")
RUNS = ["head", "half", "held out", "all layers", "few directions"]
GOAL = 0.369
NOTE = (
    "*Few directions* was planned after the other four had been seen, which missed the goal of a stochastic bound "
    f"below {GOAL} with a pretrained centre; it pays for a choice of {PRIORS} pre-distributions. Each bound holds with "
    "confidence 0.95 by itself. Bounds are rounded up."
)


def fit(model: nn.Module, data: Split, epochs: int, lr: float) -> nn.Module:
    """Adam with batches of 50: nothing here knows of certificates."""
    inputs, targets = data
    g = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(epochs):
        for index in torch.randperm(len(targets), generator=g).split(50):
            optimizer.zero_grad()
            cross_entropy(model(inputs[index]), targets[index]).backward()
            optimizer.step()
    return model


def part(data: Split, index: Tensor | slice) -> Split:
    return data[0][index], data[1][index]


@torch.no_grad()
def error(model: nn.Module, data: Split) -> float:
    return float(zero_one_loss(model(data[0]), data[1]).mean())


def stochastic_error(
    model: nn.Module, certificate: Certificate, data: Split, draws: int = 20
) -> float:
    g = torch.Generator().manual_seed(2)
    errors = []
    for _ in range(draws):
        with certificate.post.with_weights(model, g):
            errors.append(error(model, data))
    return sum(errors) / draws


def pretrained(data_dir: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(small_cnn((1, 28, 28)), nn.Linear(64, 10))
    fit(
        model,
        part(load_dataset("mnist", data_dir=data_dir).train().tensors, slice(PRETRAINED)),
        2,
        1e-3,
    )
    torch.manual_seed(1)
    model[1] = nn.Linear(64, 10)  # the fresh head
    return model


def run(name: str, start: nn.Module, labels: Split) -> tuple[nn.Module, Split, Prior, Split | None]:
    """Return the trained network, the samples to certify it on, its prior, and held-out labels."""
    origin = "pretrained on MNIST, with a fresh random head"
    if name == "head":
        start = deepcopy(start)
        start[0].requires_grad_(False)
        return fit(deepcopy(start), labels, 20, 1e-3), labels, Prior.of(start, origin), None
    if name == "all layers":
        return fit(deepcopy(start), labels, 5, 1e-3), labels, Prior.of(start, origin), None
    if name == "half":
        first, second = part(labels, slice(LABELS // 2)), part(labels, slice(LABELS // 2, None))
        center = fit(deepcopy(start), first, 10, 1e-3)
        prior = Prior.of(center, f"{origin}, then trained on the other half of the labels")
        return fit(deepcopy(center), second, 1, 1e-5), second, prior, None
    kept, held_out = part(labels, slice(HELD_OUT, None)), part(labels, slice(HELD_OUT))
    return fit(deepcopy(start), kept, 5, 1e-3), kept, Prior.of(start, origin), held_out


def projected(start: nn.Module, images: Tensor) -> nn.Module:
    """Return the frozen part: convolutions, and the leading principal directions of images without labels.

    Its outputs have a mean norm of 1 on these images, so that a weight of the head and its noise are felt alike.
    """
    convolutions = deepcopy(start[0][:7])  # up to the flattened outputs of the second one
    with torch.no_grad():
        features = convolutions(images)  # [1500, 1568]
        mean = features.mean(0)
        torch.manual_seed(0)
        directions = torch.svd_lowrank(features - mean, q=4 * DIRECTIONS, niter=4)[2][
            :, :DIRECTIONS
        ]
        size = ((features - mean) @ directions).norm(dim=1).mean()
        projection = nn.Linear(len(mean), DIRECTIONS)
        projection.weight.copy_(directions.T / size)
        projection.bias.copy_(-(mean @ directions) / size)
    return nn.Sequential(convolutions, projection).requires_grad_(False)


def fit_with_noise(
    features: Tensor, targets: Tensor, beta: float = 3.0, steps: int = 400
) -> tuple[nn.Module, Tensor]:
    """Minimise C_β of a linear head with the pre-distribution N(0, 1); return it, and the variances of its weights.

    The noise of a sum of weights is drawn as one Gaussian. A temperature takes the scale of the logits out of the loss,
    which the error does not depend on.
    """
    n, classes = len(targets), 10
    g = torch.Generator().manual_seed(0)
    mean, log_variance = (torch.zeros(DIRECTIONS, classes, requires_grad=True) for _ in range(2))
    log_scale = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([mean, log_variance, log_scale], lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        std = (features.square() @ log_variance.exp()).sqrt()
        logits = features @ mean + std * torch.randn(n, classes, generator=g)
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
        (cross_entropy(logits * log_scale.exp(), targets) + beta / n * kl).backward()
        optimizer.step()
        schedule.step()
    head = nn.Linear(DIRECTIONS, classes, bias=False)
    head.weight.data = mean.detach().T.clone()
    return head, log_variance.detach().exp().T.clone()


def few_directions(
    start: nn.Module, labels: Split, unlabelled: Tensor, test: Split, draws: int
) -> dict[str, Any]:
    """Certify a head on a frozen part, which is run once instead of for every draw."""
    began = time.perf_counter()
    frozen = projected(start, unlabelled[:PROJECTED])
    with torch.no_grad():
        features, fresh, tested = map(frozen, (labels[0], unlabelled[PROJECTED:], test[0]))
    head, variance = fit_with_noise(features, labels[1])
    center = nn.Linear(DIRECTIONS, 10, bias=False)
    nn.init.zeros_(center.weight)
    prior = Prior(
        center,
        "0, on frozen convolutions pretrained on MNIST and directions of other images",
        stds=(1.0,),
    )
    # With this curvature and beta 1, the post-distribution has the variances of the training.
    curvature = diagonal_curvature({"weight": (1 / variance - 1).clamp(min=0)})
    certificate = certify(
        head,
        (features, labels[1]),
        prior,
        unlabelled=fresh,
        structure=curvature,
        betas=(0.03, 0.1, 0.3, 1.0, 3.0),
        delta=0.04 / PRIORS,
        draws=draws,
        progress=False,
    )
    row = row_of("few directions", certificate, head, (tested, test[1]), began)
    del row["reading"]  # it knows nothing of the other pre-distributions, which take their share
    row["confidence"] = 1 - PRIORS * certificate.delta - certificate.delta_draws
    row["network"]["confidence"] = 1 - PRIORS * certificate.delta - row["network"]["delta"]
    return row | {"pre_distributions": PRIORS}


def measure(
    name: str, start: nn.Module, labels: Split, unlabelled: Tensor, test: Split, draws: int
) -> dict[str, Any]:
    if name == "few directions":
        return few_directions(start, labels, unlabelled, test, draws)
    began = time.perf_counter()
    model, data, prior, held_out = run(name, start, labels)
    certificate = certify(model, data, prior, unlabelled=unlabelled, held_out=held_out, draws=draws)
    return row_of(name, certificate, model, test, began)


def row_of(
    name: str, certificate: Certificate, model: nn.Module, test: Split, began: float
) -> dict[str, Any]:
    row = certificate.to_dict()
    del row["candidates"]
    row |= {
        "run": name,
        "test_error": error(model, test),
        "stochastic_test_error": stochastic_error(model, certificate, test),
        "reading": str(certificate).rpartition("\n")[2],
        "seconds": time.perf_counter() - began,
    }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| labels used by | certified on | valid | stochastic bound | its test error | network's bound "
        "| test-set bound | network's test error | KL (nats) | curvature |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        held_out = row["test_set"]["bound"]
        shown = "—" if held_out is None else f"**{round_up(held_out):.4f}**"
        lines.append(
            f"| {row['run']} | {row['n']} | {row['valid']} | **{round_up(row['bound']):.4f}** "
            f"| {row['stochastic_test_error']:.4f} | **{round_up(row['network']['bound']):.4f}** | {shown} "
            f"| {row['test_error']:.4f} | {row['kl']:.0f} | {row['structure']} |"
        )
    return "\n".join(lines)


def save(rows: list[dict[str, Any]], out: Path, draws: int) -> None:
    environment = {"torch": torch.__version__, "python": platform.python_version(), "draws": draws}
    best = min((row["bound"] for row in rows if row["run"] in PRETRAINED_CENTRE), default=1.0)
    above = all(
        row["stochastic_test_error"] <= row["bound"]
        and row["test_error"] <= row["network"]["bound"]
        for row in rows
    )
    kept = {
        "best_with_a_pretrained_centre": best,
        "goal": GOAL,
        "below_goal": best < GOAL,
        "bounds_above": above,
    }
    write_json(out, {"environment": environment, **kept, "rows": rows})
    out.with_suffix(".md").write_text(f"{table(rows)}\n\n{NOTE}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", default=os.environ.get("TASKINFO_DATA_DIR"), help="mnist.npz and notmnist.npz"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/certified_transfer.json")
    )
    parser.add_argument("--runs", nargs="*", default=RUNS)
    parser.add_argument("--draws", type=int, default=1_000, help="fresh networks per estimate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    target = load_dataset("notmnist", data_dir=arguments.data_dir)
    train, test = target.train().tensors, target.test().tensors
    order = torch.randperm(len(train[1]), generator=torch.Generator().manual_seed(0))
    labels = part(train, order[:LABELS])
    unlabelled = train[0][order[LABELS:]]
    start = pretrained(arguments.data_dir)
    stored = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    rows = {row["run"]: row for row in stored}
    for name in arguments.runs:
        rows[name] = measure(name, start, labels, unlabelled, test, arguments.draws)
        print(table([rows[name]]).splitlines()[-1], flush=True)
        save(list(rows.values()), arguments.out, arguments.draws)


if __name__ == "__main__":
    main()
