"""A small network with every penalty, for tests that train it in every way there is."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_taskinfo import mixins
from lightning_taskinfo._lightning import NAMESPACES
from lightning_taskinfo.regularizers import (
    Lautum,
    LocalMinimumRegularizer,
    MultiKernelMMD,
    MutualInformation,
    TemporalEnsembling,
    WeightInformation,
)
from lightning_taskinfo.regularizers.critics import SeparableCritic
from lightning_taskinfo.variational import add_weight_noise

N, D, F, K = 32, 4, 6, 3
WEIGHTS = {
    "information": 0.5, "lautum": 0.1, "mutual_information": 1.0, "local_minimum": 100.0, "mk_mmd": 1.0,
    "temporal_ensembling": 1.0,
}  # fmt: skip
MIXINS = (
    mixins.InformationMixin,
    mixins.LautumMixin,
    mixins.MutualInformationMixin,
    mixins.LocalMinimumMixin,
    mixins.MultiKernelMMDMixin,
    mixins.TemporalEnsemblingMixin,
)


class Pairs(Dataset):
    """Labelled and unlabelled samples side by side; index, and so every epoch, is the same."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.x, self.x_u = torch.randn(N, D, generator=g), torch.randn(N, D, generator=g) + 1
        self.y = self.x[:, :K].argmax(1)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"labeled": (self.x[i], self.y[i]), "unlabeled": self.x_u[i], "index": i}


def loader(batch_size: int = 8) -> DataLoader:
    return DataLoader(Pairs(), batch_size=batch_size)


class PenalisedSteps:
    """Everything but the LightningModule: its base comes from either namespace."""

    def __init__(self, weights: dict[str, float], compiled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.active = tuple(weights)
        w = {**dict.fromkeys(WEIGHTS, 0.0), **weights}
        self.body = nn.Sequential(nn.Linear(D, F), nn.BatchNorm1d(F), nn.Tanh())
        self.head = nn.Linear(F, K)
        add_weight_noise(self.body, std=0.05, prior_center="zero")
        self.features = torch.compile(self.body, backend="aot_eager") if compiled else self.body
        self.information = WeightInformation(w["information"])
        self.lautum = Lautum((D,), K, weight=w["lautum"], decay=0.9).fit_inputs([Pairs().x_u])
        critic = SeparableCritic((D,), F, hidden=16, embedding=4)
        self.mutual_information = MutualInformation(
            (D,), F, weight=w["mutual_information"], critic=critic, critic_steps=2
        )
        self.local_minimum = LocalMinimumRegularizer(weight=w["local_minimum"], parts=2)
        self.mk_mmd = MultiKernelMMD(weight=w["mk_mmd"])
        self.temporal_ensembling = TemporalEnsembling(N, K, weight=w["temporal_ensembling"])

    def forward(self, x):
        return self.head(self.features(x))

    def likelihood(self, labeled):
        return nn.functional.cross_entropy(self(labeled[0]), labeled[1])

    def penalties(self, batch):
        x_u, z, z_u = (
            batch["unlabeled"],
            self.features(batch["labeled"][0]),
            self.features(batch["unlabeled"]),
        )
        terms = {
            "information": lambda: self.information_penalty(),
            "lautum": lambda: self.lautum_penalty(x_u, self.head(z_u)),
            "mutual_information": lambda: self.mutual_information_penalty(x_u, z_u),
            "local_minimum": lambda: self.local_minimum_penalty(self.likelihood, batch["labeled"]),
            "mk_mmd": lambda: self.mk_mmd_penalty(z, z_u),
            "temporal_ensembling": lambda: self.temporal_ensembling_penalty(
                self.head(z), batch["index"]
            ),
        }
        return {name: terms[name]() for name in self.active}

    def training_step(self, batch, batch_idx):
        loss, penalties = self.likelihood(batch["labeled"]), self.penalties(batch)
        return self.penalised(loss, **penalties)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


NETS = {
    name: type("Net", (PenalisedSteps, *MIXINS, namespace.LightningModule), {})
    for name, namespace in NAMESPACES.items()
}
NAMESPACE = next(iter(NAMESPACES))
Net, Trainer = NETS[NAMESPACE], NAMESPACES[NAMESPACE].Trainer


def fit(model, trainer_class=Trainer, ckpt_path=None, **arguments):
    trainer = trainer_class(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **{
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "devices": 1,
            **arguments,
        },
    )
    trainer.fit(model, loader(), ckpt_path=ckpt_path)
    return trainer
