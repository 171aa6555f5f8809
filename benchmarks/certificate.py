"""What can be certified about a network simply trained by SGD on real MNIST, digits 0–4 against 5–9?

Two priors: one centred at the random initialisation, certified on all 60,000 images; one centred at a network trained
on a random half, certified on the other half. For every structure of the curvature the certificate, and the errors of
the network and of its stochastic version on the 10,000 test images, whose labels no certificate has seen. The bound for
the network itself takes the disagreement on these images without their labels. The structures of one run share its
Monte-Carlo confidence, so that all of them hold at once and the best may be picked.

    python benchmarks/certificate.py --data-dir FOLDER_WITH_MNIST_NPZ

A row that is stored without the network's own bound is measured again; ``--centers``, ``--epochs`` and ``--structures``
say which rows to look at.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo._files import write_json
from lightning_taskinfo.certificates import Certificate, Prior, certify, zero_one_loss
from lightning_taskinfo.certificates.certificate import round_up
from lightning_taskinfo.data import load_dataset

DELTA_DRAWS = DELTA_NETWORK = 0.01  # each shared by the structures of a run
STRUCTURES = ("isotropic", "diagonal", "neuron", "kron")
CONFIDENCE = 1 - 0.04 - DELTA_DRAWS
NOTE = (
    f"The certificates of one run, structure by structure, hold together with confidence {CONFIDENCE:g}: each "
    f"Monte-Carlo interval fails with probability {DELTA_DRAWS / len(STRUCTURES):g}, and the theorem holds for all "
    f"post-distributions at once. So do the bounds for the network itself, with another {DELTA_NETWORK:g} shared by "
    "the structures in place of the first. Where there is none (—), the row is from before there were such bounds. "
    "Bounds are rounded up."
)
Split = tuple[Tensor, Tensor]
# Name, trained network, the samples to certify it on, prior.
Run = tuple[str, nn.Module, Split, Prior]


def load(data_dir: str | None) -> tuple[Split, Split]:
    data = load_dataset("mnist", data_dir=data_dir)
    splits = (data.train().tensors, data.test().tensors)
    train, test = ((x.flatten(1), (y >= 5).long()) for x, y in splits)
    return train, test


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2)
    )


def train(
    model: nn.Module, data: Split, epochs: int, *, lr: float = 0.01, seed: int = 1
) -> nn.Module:
    """Plain SGD with momentum 0.9 and batches of 128: nothing here knows of certificates."""
    inputs, targets = data
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for index in torch.randperm(len(inputs), generator=g).split(128):
            optimizer.zero_grad()
            cross_entropy(model(inputs[index]), targets[index]).backward()
            optimizer.step()
    return model


@torch.no_grad()
def error(model: nn.Module, data: Split) -> float:
    return float(zero_one_loss(model(data[0]), data[1]).mean())


def stochastic_error(
    model: nn.Module, certificate: Certificate, data: Split, draws: int = 30
) -> float:
    """Error on ``data`` of ``draws`` networks from the post-distribution."""
    g = torch.Generator().manual_seed(2)
    errors = []
    for _ in range(draws):
        with certificate.post.with_weights(model, g):
            errors.append(error(model, data))
    return sum(errors) / draws


def from_initialisation(data: Split, seed: int, epochs: list[int]) -> Iterator[Run]:
    for number in epochs:
        start = network(seed)
        prior = Prior(start, f"random initialisation, seed {seed}")
        yield f"initialisation, {number} epochs", train(deepcopy(start), data, number), data, prior


def from_half(data: Split, seed: int) -> Iterator[Run]:
    inputs, targets = data
    halves = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed)).chunk(2)
    held_out, certified = ((inputs[half], targets[half]) for half in halves)
    center = train(network(seed), held_out, epochs=20)
    prior = Prior(
        center, "trained for 20 epochs on a random half of the images that is not certified"
    )
    yield "half of the data, as it is", deepcopy(center), certified, prior
    for lr in (0.0002, 0.002):
        model = train(deepcopy(center), certified, epochs=1, lr=lr)
        yield f"half of the data, then 1 epoch on the other half at {lr}", model, certified, prior


def measure(
    name: str, model: nn.Module, data: Split, prior: Prior, test: Split, structure: str, draws: int
) -> Any:
    start = time.perf_counter()
    certificate = certify(
        model,
        data,
        prior,
        structure=structure,
        draws=draws,
        unlabelled=test[0],
        delta_draws=DELTA_DRAWS / len(STRUCTURES),
        delta_network=DELTA_NETWORK / len(STRUCTURES),
        progress=False,
    )
    seconds = time.perf_counter() - start
    row = certificate.to_dict()
    del row["candidates"]
    row |= {
        "run": name,
        "stochastic_test_error": stochastic_error(model, certificate, test),
        "test_error": error(model, test),
        "seconds": seconds,
    }
    return row


def table(rows: list[Any]) -> str:
    lines = [
        "| prior centre and training | curvature | certificate | valid | stochastic train | stochastic test "
        "| network's bound | network's test | KL (nats) | β | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        network = r.get("network")
        own = "—" if network is None else f"**{round_up(network['bound']):.4f}**"
        lines.append(
            f"| {r['run']} | {r['structure']} | **{round_up(r['bound']):.4f}** | {r['valid']} "
            f"| {r['risk']:.4f} | {r['stochastic_test_error']:.4f} | {own} | {r['test_error']:.4f} "
            f"| {r['kl']:.0f} | {r['beta']:.3g} | {r['seconds']:.0f} |"
        )
    return "\n".join(lines)


def check(row: Any) -> None:
    """Stop where a test error is above its bound."""
    assert row["stochastic_test_error"] <= row["bound"], row
    assert row["test_error"] <= row["network"]["bound"], row


def save(rows: list[Any], out: Path, threads: int) -> None:
    environment = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": threads,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, {"environment": environment, "confidence_of_a_run": CONFIDENCE, "rows": rows})
    out.with_suffix(".md").write_text(f"{table(rows)}\n\n{NOTE}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", default=os.environ.get("TASKINFO_DATA_DIR"), help="folder with mnist.npz"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/certificate.json"))
    parser.add_argument(
        "--centers", nargs="*", default=["initialisation", "half"], help="centres of the prior"
    )
    parser.add_argument(
        "--epochs", type=int, nargs="*", default=[2, 10], help="epochs from the initialisation"
    )
    parser.add_argument("--structures", nargs="*", default=STRUCTURES)
    parser.add_argument("--draws", type=int, default=1_000, help="fresh networks a certificate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    data, test = load(arguments.data_dir)
    runs = {
        "initialisation": from_initialisation(data, arguments.seed, arguments.epochs),
        "half": from_half(data, arguments.seed),
    }
    stored = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    rows = {(row["run"], row["structure"]): row for row in stored}
    for name, model, samples, prior in chain.from_iterable(
        runs[center] for center in arguments.centers
    ):
        for structure in arguments.structures:
            place = name, structure
            if place in rows and rows[place].get("network"):
                continue  # a stopped benchmark goes on where it was
            rows[place] = measure(name, model, samples, prior, test, structure, arguments.draws)
            print(table([rows[place]]).splitlines()[-1], flush=True)
            check(rows[place])
            save(list(rows.values()), arguments.out, arguments.threads)


if __name__ == "__main__":
    main()
