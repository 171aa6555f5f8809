"""What a good and a bad run with a penalty look like: six penalties, each with a small and a far too large weight.

A network learns digits from few labels beside unlabelled images. For every penalty, the validation accuracy is compared
with that of a training without it, and with the numbers that the mixins log.
"""

# %%
import argparse
import json
import logging
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from pytorch_lightning.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import (
    InformationMixin,
    Lautum,
    LautumMixin,
    LocalMinimumMixin,
    LocalMinimumRegularizer,
    MultiKernelMMD,
    MultiKernelMMDMixin,
    MutualInformation,
    MutualInformationMixin,
    TemporalEnsembling,
    TemporalEnsemblingMixin,
    WeightInformation,
    add_weight_noise,
)
from lightning_taskinfo.data import load_dataset

logging.disable(logging.WARNING)  # Lightning's words on each of many trainings
warnings.filterwarnings("ignore")

WEIGHTS = {  # penalty -> a small weight and one that is far too large
    "lautum": (0.001, 3.0),
    "mutual_information": (0.03, 30.0),
    "information": (0.1, 100.0),
    "local_minimum": (1.0, 1000.0),
    "mk_mmd": (0.3, 300.0),
    "temporal_ensembling": (1.0, 1000.0),
}


# %% One module with all penalties, of which each run uses one
class Digits(
    LautumMixin,
    MutualInformationMixin,
    InformationMixin,
    LocalMinimumMixin,
    MultiKernelMMDMixin,
    TemporalEnsemblingMixin,
    pl.LightningModule,
):
    gradient_ratio_every_n_steps = 10

    def __init__(self, penalty: str | None, weight: float, unlabelled: int) -> None:
        super().__init__()
        self.penalty = penalty
        self.features = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()
        )
        self.head = nn.Linear(64, 10)
        if penalty == "lautum":
            self.lautum = Lautum((1, 8, 8), 10, weight=weight)
        elif penalty == "mutual_information":
            self.mutual_information = MutualInformation((1, 8, 8), 64, weight=weight)
        elif penalty == "information":
            add_weight_noise(self.features)
            add_weight_noise(self.head)
            self.information = WeightInformation(weight, num_samples=unlabelled)
        elif penalty == "local_minimum":
            self.local_minimum = LocalMinimumRegularizer(weight=weight)
        elif penalty == "mk_mmd":
            self.mk_mmd = MultiKernelMMD(weight=weight)
        elif penalty == "temporal_ensembling":
            self.temporal_ensembling = TemporalEnsembling(unlabelled, 10, weight=weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def training_step(self, batch: dict, batch_idx: int) -> Tensor:
        (x, y), (x_u, index) = batch["labeled"], batch["unlabeled"]
        z, z_u = self.features(x), self.features(x_u)

        def loss_fn(part: tuple[Tensor, Tensor]) -> Tensor:
            return cross_entropy(self(part[0]), part[1])

        penalties = {
            "lautum": lambda: self.lautum_penalty(x_u, self.head(z_u)),
            "mutual_information": lambda: self.mutual_information_penalty(x_u, z_u),
            "information": lambda: self.information_penalty(),
            "local_minimum": lambda: self.local_minimum_penalty(loss_fn, (x, y)),
            "mk_mmd": lambda: self.mk_mmd_penalty(z, z_u),
            "temporal_ensembling": lambda: self.temporal_ensembling_penalty(self.head(z_u), index),
        }
        used = {} if self.penalty is None else {self.penalty: penalties[self.penalty]()}
        return self.penalised(cross_entropy(self.head(z), y), **used)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


# %% Train once
def train(penalty: str | None, weight: float, *, epochs: int, labels: int, unlabelled: int) -> dict:
    """Return the validation accuracy after each epoch, and the last numbers that were logged."""
    data = load_dataset("digits", size=8)
    x, y = data.train()[:]
    x_u = x[labels : labels + unlabelled]
    pl.seed_everything(0, verbose=False)
    model = Digits(penalty, weight, len(x_u))
    if penalty == "lautum":
        model.lautum.fit_inputs([x_u])
    loaders = {
        "labeled": DataLoader(TensorDataset(x[:labels], y[:labels]), batch_size=50, shuffle=True),
        "unlabeled": DataLoader(
            TensorDataset(x_u, torch.arange(len(x_u))), batch_size=50, shuffle=True
        ),
    }
    history = History()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        callbacks=[history],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        model,
        CombinedLoader(loaders, mode="max_size_cycle"),
        DataLoader(data.test(), batch_size=512),
    )
    logged = {
        key.removeprefix(f"taskinfo/{penalty}/"): value.item()
        for key, value in trainer.callback_metrics.items()
        if key.startswith(f"taskinfo/{penalty}/")
    }
    return {"accuracy": history.accuracy, "logged": logged}


class History(pl.Callback):
    """The validation accuracy after each epoch."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.accuracy.append(trainer.callback_metrics["val_accuracy"].item())


# %% Look
def draw(runs: dict[str, dict], path: Path) -> None:
    figure = Figure(figsize=(11, 6), layout="constrained")
    for ax, (penalty, weights) in zip(figure.subplots(2, 3).flat, WEIGHTS.items(), strict=True):
        ax.plot(runs["none"]["accuracy"], color="0.6", label="no penalty")
        for weight, color in zip(weights, ("C0", "C3"), strict=True):
            run = runs[f"{penalty} {weight:g}"]
            ratio = run["logged"].get("gradient_ratio", float("nan"))
            ax.plot(
                run["accuracy"], color=color, label=f"weight {weight:g}, gradient ratio {ratio:.2g}"
            )
        ax.set(title=penalty, xlabel="epoch", ylabel="validation accuracy", ylim=(0, 1))
        ax.legend(frameon=False, fontsize="small", loc="lower right")
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fast", action="store_true", help="one epoch, to see that it runs")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/penalties"), help="folder for figure and numbers"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    length = {"epochs": 1, "labels": 50, "unlabelled": 100}
    if not arguments.fast:
        length = {"epochs": 12, "labels": 100, "unlabelled": 500}
    runs = {"none": train(None, 0.0, **length)}
    for penalty, weights in WEIGHTS.items():
        for weight in weights:
            runs[f"{penalty} {weight:g}"] = train(penalty, weight, **length)
    for name, run in runs.items():
        numbers = ", ".join(f"{key} {value:.3g}" for key, value in sorted(run["logged"].items()))
        print(f"{name:28} accuracy {run['accuracy'][-1]:.3f}  {numbers}")
    (arguments.folder / "penalties.json").write_text(json.dumps(runs))
    draw(runs, arguments.folder / "penalties.png")
    print(f"Figure: {arguments.folder / 'penalties.png'}")


if __name__ == "__main__":
    main()
