"""What can be proved about a network that was simply trained? Digits 0–4 against 5–9, two hidden layers, plain SGD.

The network is certified twice, on the samples it was trained on: with a prior around its random initialisation, and
with a prior around a network that saw only the other half of the data. The picture shows what was tried in search of
the first certificate: what every structure of the curvature trades for what. Run it with
``python examples/certificate.py``, or cell by cell.
"""

# %%
import argparse
import os
from copy import deepcopy
from pathlib import Path

import torch
import wandb
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo.certificates import Certificate, Prior, certify, zero_one_loss
from lightning_taskinfo.data import load_dataset

os.environ.setdefault("WANDB_SILENT", "true")
Split = tuple[Tensor, Tensor]


# %% Two classes of digits, and a plain network
def load(*, fast: bool) -> tuple[Split, Split]:
    digits = load_dataset("digits", size=8 if fast else 28)
    train, test = digits.train().tensors, digits.test().tensors
    return (train[0].flatten(1), (train[1] >= 5).long()), (
        test[0].flatten(1),
        (test[1] >= 5).long(),
    )


def network(inputs: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 2),
    ]
    return nn.Sequential(*layers)


def train(model: nn.Module, data: Split, epochs: int, lr: float = 0.02) -> nn.Module:
    inputs, targets = data
    g = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for index in torch.randperm(len(inputs), generator=g).split(64):
            optimizer.zero_grad()
            cross_entropy(model(inputs[index]), targets[index]).backward()
            optimizer.step()
    return model


# %% The certificate, and what it is about: the stochastic network, on data nobody has looked at
@torch.no_grad()
def stochastic_error(
    model: nn.Module, certificate: Certificate, data: Split, draws: int = 100
) -> float:
    g, errors = torch.Generator().manual_seed(1), []
    for _ in range(draws):
        with certificate.post.with_weights(model, g):
            errors.append(zero_one_loss(model(data[0]), data[1]).mean())
    return torch.stack(errors).mean().item()


def show(title: str, model: nn.Module, certificate: Certificate, test: Split) -> dict[str, float]:
    error = stochastic_error(model, certificate, test)
    print(
        f"\n{title}\n{certificate}\ntest error         {error:.4f}  (stochastic, on {len(test[0])} new samples)"
    )
    return {
        "bound": certificate.bound,
        "train_error": certificate.risk,
        "test_error": error,
        "kl": certificate.kl,
    }


def draw(certificate: Certificate, path: Path) -> None:
    """Accuracy of the stochastic networks that were tried against their complexity, and the one that was certified."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    ax = figure.subplots()
    for structure in certificate.structures:
        rows = [row for row in certificate.candidates if row.structure == structure]
        points = sorted((row.kl + row.price, 1 - row.risk) for row in rows)
        ax.plot(*zip(*points, strict=True), ".-", label=structure)
    x = certificate.kl + certificate.price
    ax.plot(x, 1 - certificate.risk, "k*", markersize=12, label="certified")
    ax.set(xscale="log", xlabel="KL + price (nats)", ylabel="accuracy of stochastic networks")
    ax.legend(frameon=False, title="curvature")
    figure.savefig(path, dpi=150)


def log(
    folder: Path, numbers: dict[str, dict[str, float]], certificate: Certificate, figure: Path
) -> Path:
    """Scalars, the rows behind the picture as a table, and the picture, in an offline W&B run."""
    rows = certificate.candidates
    with wandb.init(
        project="lightning-taskinfo", name="certificate", dir=folder, mode="offline"
    ) as run:
        names = ["structure", "beta", "risk", "kl", "price", "bound"]
        table = wandb.Table(names, [[getattr(row, name) for name in names] for row in rows])
        scalars = {
            f"{prior}/{name}": value
            for prior, group in numbers.items()
            for name, value in group.items()
        }
        run.log({**scalars, "tried": wandb.Image(str(figure)), "tried_table": table})
        return Path(run.dir).parent


# %% All of it
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fast", action="store_true", help="smaller images and fewer draws, to see that it runs"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/certificate"),
        help="folder for everything written",
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    draws, betas = (
        (100, (0.1, 1.0)) if arguments.fast else (1000, tuple(10 ** (j / 2) for j in range(-3, 5)))
    )

    data, test = load(fast=arguments.fast)
    start = network(data[0].shape[1], width=32 if arguments.fast else 100)
    model = train(deepcopy(start), data, epochs=2)
    prior = Prior(start, origin="random initialisation, seed 0")
    certificate = certify(model, data, prior, draws=draws, betas=betas)
    numbers = {"initialisation": show("Prior around the initialisation", model, certificate, test)}

    held_out, certified = (data[0][0::2], data[1][0::2]), (data[0][1::2], data[1][1::2])
    center = train(deepcopy(start), held_out, epochs=20)
    tuned = train(deepcopy(center), certified, epochs=1, lr=0.002)
    prior = Prior(
        center, origin="trained on the other half of the digits", stds=(0.03, 0.01), per_layer=False
    )
    half = certify(tuned, certified, prior, structure="neuron", draws=draws, betas=betas)
    numbers["other half"] = show(
        "Prior around a network trained on the other half", tuned, half, test
    )

    figure = arguments.folder / "tried.png"
    draw(certificate, figure)
    run = log(arguments.folder, numbers, certificate, figure)
    print(f"\nPicture:      {figure}\nOffline run:  {run}")


if __name__ == "__main__":
    main()
