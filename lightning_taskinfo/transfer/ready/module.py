"""A ready classifier for every stage of a transfer, on the mixins."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo._lightning import DEFAULT, module_classes
from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo.mixins import (
    InformationMixin,
    LautumMixin,
    LocalMinimumMixin,
    MultiKernelMMDMixin,
    MutualInformationMixin,
    TemporalEnsemblingMixin,
)
from lightning_taskinfo.regularizers import frozen_batchnorm_statistics
from lightning_taskinfo.transfer.cells import Stage
from lightning_taskinfo.transfer.ready.backbones import Shape, feature_dim, flat, make_backbone
from lightning_taskinfo.transfer.ready.methods import (
    Sizes,
    acting,
    check_weights,
    make_regularizers,
)
from lightning_taskinfo.variational import add_weight_noise

FineTune = Literal["full", "linear", "layerwise"]


class TransferClassifierMixin(
    TemporalEnsemblingMixin,
    MultiKernelMMDMixin,
    LautumMixin,
    MutualInformationMixin,
    InformationMixin,
    LocalMinimumMixin,
):
    """A backbone with a linear head, trained in one stage of a transfer by one of its methods.

    Batches are those of :class:`TransferDataModule`. A forward on unlabelled target inputs does not
    move the statistics of batch normalisation while pretraining: they stay those of the source
    until fine-tuning.

    Args:
        backbone: Maps images to features; a module, or a name in
            :data:`lightning_taskinfo.transfer.BACKBONES`.
        num_classes: Number of classes of the stage's labels.
        image_shape: Channels, height and width of an image.
        method: ``"standard"``, or ``"temporal_ensembling"``, ``"mk_mmd"``, ``"lautum"``,
            ``"mutual_information"``, ``"information"``, ``"local_minimum"``, or several with ``+``
            between them. Those that do not act in the stage are left out. In a Trainer of your own,
            call ``lautum.fit_inputs`` for ``"lautum"`` and :meth:`add_noise` for ``"information"``
            before ``fit``; :func:`transfer` does.
        stage: ``"pretrain"``, ``"fine_tune"`` or ``"scratch"``.
        weights: Weights of the penalties by name, where not those of
            :data:`lightning_taskinfo.transfer.WEIGHTS`.
        fine_tune: What fine-tuning trains: everything, the head on frozen features, or
            ``"layerwise"``: the head first, then one more of the backbone's children, from the last
            to the first, in equal shares of the epochs.
        learning_rate: Learning rate of Adam.
        weight_decay: Its weight decay; noisy weights' variances have none.
        num_labeled: Labelled training samples of the stage.
        num_unlabeled: Unlabelled inputs of the data, and
        num_indices: one more than the largest index of a target sample, for Temporal Ensembling.
        epochs: Epochs of the stage, for ramps and layer-wise unfreezing.
        seed: Seed of the penalties' own generators.

    Raises:
        ValueError: If a name is unknown or a number out of range.

    Example:
        >>> net = TransferClassifier("mlp", num_classes=10, image_shape=(1, 8, 8), method="mk_mmd")
        >>> net(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])
    """

    def __init__(
        self,
        backbone: nn.Module | str,
        num_classes: int,
        image_shape: Shape,
        *,
        method: str = "standard",
        stage: Stage = "pretrain",
        weights: Mapping[str, float] | None = None,
        fine_tune: FineTune = "full",
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        num_labeled: int = 1,
        num_unlabeled: int = 1,
        num_indices: int = 1,
        epochs: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check(num_classes, stage, fine_tune, learning_rate)
        self.backbone = (
            make_backbone(backbone, image_shape) if isinstance(backbone, str) else backbone
        )
        width = feature_dim(self.backbone, image_shape)
        self.head = nn.Linear(width, num_classes)
        self.num_classes, self.stage, self.fine_tune, self.epochs = (
            num_classes,
            stage,
            fine_tune,
            epochs,
        )
        self.learning_rate, self.weight_decay, self.seed = learning_rate, weight_decay, seed
        self.penalties = acting(method, stage)
        sizes = Sizes(
            tuple(image_shape), width, num_classes, num_labeled, num_unlabeled, num_indices, epochs
        )
        made = make_regularizers(self.penalties, check_weights(weights or {}), sizes, seed)
        for name, regularizer in made.items():
            self.add_module(name, regularizer)

    def features(self, x: Tensor) -> Tensor:
        """Return the backbone's features, shape ``[N, F]``."""
        return flat(self.backbone(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, shape ``[N, C]``."""
        return self.head(self.features(x))

    def add_noise(self) -> None:
        """Make the weights noisy around where they are now, if the method asks for it; before the optimizer is made."""
        if "information" in self.penalties:
            add_weight_noise(self.backbone, seed=self.seed)
            add_weight_noise(self.head, seed=self.seed + 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the labelled loss with the penalties of the method."""
        x, y = batch["labeled"]
        self._check_classes(y)
        z = self.features(x)
        logits = self.head(z)
        loss = cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return self.penalised(loss, **self._penalties(batch, z, logits))

    def _penalties(self, batch: Any, z: Tensor, logits: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if {"mk_mmd", "lautum", "mutual_information", "temporal_ensembling"} & set(self.penalties):
            found |= self._unlabeled_penalties(batch, z, logits)
        if "information" in self.penalties:
            found["information"] = self.information_penalty()
        if "local_minimum" in self.penalties:
            found["local_minimum"] = self.local_minimum_penalty(
                lambda part: cross_entropy(self(part[0]), part[1]), batch["labeled"]
            )
        return found

    def _unlabeled_penalties(self, batch: Any, z: Tensor, logits: Tensor) -> dict[str, Tensor]:
        x_u = batch["unlabeled"]
        found: dict[str, Tensor] = {}
        if self.stage == "pretrain":
            with frozen_batchnorm_statistics(self):
                z_u = self.features(x_u)
        else:
            z_u = self.features(x_u)
        if "mk_mmd" in self.penalties:
            found["mk_mmd"] = self.mk_mmd_penalty(z, z_u)
        if "mutual_information" in self.penalties:
            found["mutual_information"] = self.mutual_information_penalty(x_u, z_u)
        if {"lautum", "temporal_ensembling"} & set(self.penalties):
            logits_u = self.head(z_u)
            if "lautum" in self.penalties:
                found["lautum"] = self.lautum_penalty(x_u, logits_u)
            if "temporal_ensembling" in self.penalties:
                index = torch.cat([batch["labeled_index"], batch["unlabeled_index"]])
                found["temporal_ensembling"] = self.temporal_ensembling_penalty(
                    torch.cat([logits, logits_u]), index
                )
        return found

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_accuracy``."""
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``test_loss``, ``test_accuracy`` and ``test_squared_error``, that of the probabilities."""
        self._evaluate("test", batch)

    def _evaluate(self, split: str, batch: Any) -> None:
        x, y = batch
        self._check_classes(y)
        logits = self(x).float()
        values = {
            f"{split}_loss": cross_entropy(logits, y),
            f"{split}_accuracy": (logits.argmax(-1) == y).float().mean(),
        }
        if split == "test":
            one_hot = nn.functional.one_hot(y, self.num_classes)
            values["test_squared_error"] = (logits.softmax(-1) - one_hot).square().sum(-1).mean()
        self.log_dict(values, prog_bar=True, on_epoch=True, batch_size=len(x), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam over everything that the stage may train."""
        every = self.fine_tune == "layerwise"  # what is frozen now may not stay so
        parts = [
            (name, p) for part in (self.backbone, self.head) for name, p in part.named_parameters()
        ]
        named = [(name, p) for name, p in parts if p.requires_grad or every]
        variances = [p for name, p in named if name.endswith("log_variance")]
        others = [p for name, p in named if not name.endswith("log_variance")]
        groups = [
            {"params": others, "weight_decay": self.weight_decay},
            {"params": variances, "weight_decay": 0.0},
        ]
        return torch.optim.Adam(
            [group for group in groups if group["params"]], lr=self.learning_rate
        )

    def setup(self, stage: str) -> None:
        """Freeze what is never trained before the optimizer is made, and before ranks agree on what is."""
        if stage == "fit" and self.fine_tune == "linear":
            self.freeze_for(0)

    def on_train_epoch_start(self) -> None:
        """Freeze what the epoch does not train; frozen layers run in eval mode."""
        self.freeze_for(self.current_epoch)

    def freeze_for(self, epoch: int) -> None:
        """Leave trainable what ``fine_tune`` trains in ``epoch``; other stages train everything."""
        if self.stage != "fine_tune" or self.fine_tune == "full":
            return
        children = list(self.backbone.children())
        layers = [
            place for place, child in enumerate(children) if any(True for _ in child.parameters())
        ]
        steps = max(1, len(layers))
        count = epoch * (steps + 1) // max(1, self.epochs) if self.fine_tune == "layerwise" else 0
        self.backbone.requires_grad_(count >= steps).train(count >= steps)
        if 0 < count < steps:
            for child in children[
                layers[-count] :
            ]:  # dropout behind a trained layer is on, before it off
                child.requires_grad_(True).train()

    def _check_classes(self, y: Tensor) -> None:
        if int(y.max()) >= self.num_classes:
            raise ValueError(
                f"`num_classes` must be above every label, got {self.num_classes} for label {int(y.max())}: are source "
                "and target swapped?"
            )


def _check(num_classes: int, stage: str, fine_tune: str, learning_rate: float) -> None:
    if num_classes < 2:
        raise ValueError(f"`num_classes` must be at least 2, got {num_classes}.")
    if stage not in ("pretrain", "fine_tune", "scratch"):
        raise ValueError(f"`stage` must be 'pretrain', 'fine_tune' or 'scratch', got {stage!r}.")
    if fine_tune not in ("full", "linear", "layerwise"):
        raise ValueError(f"`fine_tune` must be 'full', 'linear' or 'layerwise', got {fine_tune!r}.")
    check_positive(learning_rate=learning_rate)


CLASSES = module_classes(TransferClassifierMixin, "TransferClassifier")
"""The classifier for each installed namespace of Lightning."""

if TYPE_CHECKING:
    TransferClassifier = TransferClassifierMixin
else:
    TransferClassifier = CLASSES[DEFAULT]
