"""The ready networks: backbones, which map images to features, and a classifier trained by one of the methods."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo._lightning import DEFAULT, module_classes
from lightning_taskinfo._observe import observing, trainable_parameters
from lightning_taskinfo._ranges import check_choice, check_not_negative, check_positive
from lightning_taskinfo.mixins import (
    InformationMixin,
    LautumMixin,
    LocalMinimumMixin,
    MultiKernelMMDMixin,
    MutualInformationMixin,
    TemporalEnsemblingMixin,
)
from lightning_taskinfo.regularizers import (
    Lautum,
    LocalMinimumRegularizer,
    MultiKernelMMD,
    MutualInformation,
    TemporalEnsembling,
    WeightInformation,
    WeightSchedule,
    frozen_batchnorm_statistics,
)
from lightning_taskinfo.transfer.overlap import device_of
from lightning_taskinfo.transfer.sampling import check_different
from lightning_taskinfo.variational import add_weight_noise, noisy_weights

Shape = tuple[int, int, int]
Backbone = str | Callable[[Shape], nn.Module]
"""A name in :data:`BACKBONES`, or a function at the top of a module that makes a network for a shape of images."""
Stage = Literal["pretrain", "fine_tune"]
PENALTIES: dict[str, tuple[Stage, ...]] = {  # name -> the stages in which it acts
    "temporal_ensembling": ("fine_tune",),
    "mk_mmd": ("pretrain",),
    "lautum": ("pretrain",),
    "mutual_information": ("pretrain",),
    "information": ("pretrain", "fine_tune"),
    "local_minimum": ("pretrain", "fine_tune"),
}
WEIGHTS = {
    "temporal_ensembling": 30.0, "mk_mmd": 1.0, "lautum": 0.01, "mutual_information": 0.1, "information": 0.01,
    "local_minimum": 10.0,
}  # fmt: skip


def mlp(image_shape: Shape, *, width: int = 128) -> nn.Module:
    """Two hidden layers on the flattened image.

    Args:
        image_shape: Channels, height and width of an image.
        width: Neurons of each layer.

    Example:
        >>> mlp((1, 8, 8))(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 128])
    """
    channels, height, wide = image_shape
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * wide, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
    )


def small_cnn(image_shape: Shape, *, width: int = 16, feature_dim: int = 64) -> nn.Module:
    """Two convolutions with pooling and a linear layer: seconds per epoch on a processor.

    Args:
        image_shape: Channels, height and width of an image.
        width: Channels of the first convolution; the second has twice as many.
        feature_dim: Number of features.

    Example:
        >>> small_cnn((1, 8, 8))(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 64])
    """
    channels, height, wide = image_shape
    if min(height, wide) < 8:
        raise ValueError(
            f"`image_shape` must have a height and width of at least 8, got {image_shape}."
        )
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 4) * (wide // 4), feature_dim),
        nn.ReLU(),
    )


BACKBONES: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "small_cnn": small_cnn}


def make_backbone(backbone: Backbone, image_shape: Shape) -> nn.Module:
    """Return the network of a name or a function for images of a shape.

    Raises:
        ValueError: If the name is unknown, or what came out is no network.

    Example:
        >>> feature_dim(make_backbone("mlp", (1, 8, 8)), (1, 8, 8))
        128
    """
    if isinstance(backbone, str):
        check_choice(BACKBONES, backbone=backbone)
        backbone = BACKBONES[backbone]
    network = backbone(image_shape)
    if not isinstance(network, nn.Module):
        raise ValueError(f"`backbone` must make an nn.Module, got {type(network).__name__}.")
    return network


def feature_dim(backbone: nn.Module, image_shape: Shape) -> int:
    """Return the number of features that ``backbone`` puts out, from one forward pass that leaves no trace."""
    images = torch.zeros(2, *image_shape, device=device_of(backbone))
    with observing(backbone), torch.no_grad():
        return backbone(images).flatten(1).shape[1]


def parse_method(method: str) -> tuple[str, ...]:
    """Return the penalties of a method, in the order of :data:`PENALTIES`.

    Args:
        method: ``"standard"`` for none, or names of :data:`PENALTIES` with ``+`` between them.

    Raises:
        ValueError: If a name is unknown or repeated.

    Example:
        >>> parse_method("standard"), parse_method("lautum+temporal_ensembling")
        ((), ('temporal_ensembling', 'lautum'))
    """
    if method == "standard":
        return ()
    parts = [part.strip() for part in method.split("+")]
    for part in parts:
        check_choice(PENALTIES, method=part)
    check_different("method", parts)
    return tuple(name for name in PENALTIES if name in parts)


def acting(method: str, stage: Stage) -> tuple[str, ...]:
    """Return the penalties of ``method`` that act in ``stage``."""
    return tuple(name for name in parse_method(method) if stage in PENALTIES[name])


def all_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Return all weights, the defaults where none are given.

    Raises:
        ValueError: If a name is unknown or a weight negative.
    """
    for name in weights:
        check_choice(WEIGHTS, weights=name)
    check_not_negative(**weights)
    return {**WEIGHTS, **weights}


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
            call ``lautum.fit_inputs`` for ``"lautum"`` before ``fit``; :func:`transfer` does.
        stage: ``"pretrain"`` or ``"fine_tune"``.
        weights: Weights of the penalties by name, where not those of
            :data:`lightning_taskinfo.transfer.WEIGHTS`.
        learning_rate: Learning rate of Adam.
        num_labeled: Labelled training samples of the stage.
        num_unlabeled: Unlabelled inputs of the data, and
        num_indices: one more than the largest index of a target sample, for Temporal Ensembling.
        epochs: Epochs of the stage, for ramps.
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
        learning_rate: float = 1e-3,
        num_labeled: int = 1,
        num_unlabeled: int = 1,
        num_indices: int = 1,
        epochs: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_choice(["pretrain", "fine_tune"], stage=stage)
        check_positive(learning_rate=learning_rate)
        if isinstance(backbone, str):
            backbone = make_backbone(backbone, image_shape)
        self.backbone = backbone
        width = feature_dim(backbone, image_shape)
        self.head = nn.Linear(width, num_classes)
        self.stage = stage
        self.learning_rate = learning_rate
        self.seed = seed
        self.penalties = acting(method, stage)
        weight = all_weights(weights or {})
        # Laine and Aila's weight is for each share of labelled samples, ramped up over the stage.
        share = num_labeled / num_unlabeled
        # As many directions of the inputs as four samples each can tell apart.
        directions = min(math.prod(image_shape), 1024, max(1, num_unlabeled // 4))
        of_inputs: dict[str, Any] = {"input_shape": tuple(image_shape), "seed": seed}
        make = {
            "temporal_ensembling": lambda w: TemporalEnsembling(
                num_indices,
                num_classes,
                weight=WeightSchedule(w * share, "sigmoid", length=epochs),
            ),
            "mk_mmd": lambda w: MultiKernelMMD(weight=w),
            "lautum": lambda w: Lautum(
                num_outputs=num_classes,
                weight=w,
                components=directions,
                **of_inputs,
            ),
            "mutual_information": lambda w: MutualInformation(
                feature_dim=width,
                weight=w,
                **of_inputs,
            ),
            "information": WeightInformation,
            "local_minimum": lambda w: LocalMinimumRegularizer(weight=w),
        }
        for name in self.penalties:
            self.add_module(name, make[name](weight[name]))

    def features(self, x: Tensor) -> Tensor:
        """Return the backbone's features, shape ``[N, F]``."""
        return self.backbone(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, shape ``[N, C]``."""
        return self.head(self.features(x))

    def setup(self, stage: str) -> None:
        """Make what is trained noisy around where it is now, if the method says so, before the optimizer is made."""
        noisy = [*noisy_weights(self)]
        if stage != "fit" or "information" not in self.penalties or noisy:
            return
        add_weight_noise(self, seed=self.seed)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the labelled loss with the penalties of the method."""
        x, y = batch["labeled"]
        z = self.features(x)
        logits = self.head(z)
        loss = cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        return self.penalised(loss, **self._penalties(batch, z, logits))

    def _penalties(self, batch: Any, z: Tensor, logits: Tensor) -> dict[str, Tensor]:
        x_u = batch["unlabeled"]
        if {*self.penalties} - {"information", "local_minimum"}:
            keep = frozen_batchnorm_statistics if self.stage == "pretrain" else nullcontext
            with keep(self):
                z_u = self.features(x_u)
        compute = {
            "mk_mmd": lambda: self.mk_mmd_penalty(z, z_u),
            "mutual_information": lambda: self.mutual_information_penalty(x_u, z_u),
            "lautum": lambda: self.lautum_penalty(x_u, self.head(z_u)),
            "temporal_ensembling": lambda: self.temporal_ensembling_penalty(
                torch.cat([logits, self.head(z_u)]),
                torch.cat([batch["labeled_index"], batch["unlabeled_index"]]),
            ),
            "information": self.information_penalty,
            "local_minimum": lambda: self.local_minimum_penalty(
                lambda part: cross_entropy(self(part[0]), part[1]),
                batch["labeled"],
            ),
        }
        return {name: compute[name]() for name in compute if name in self.penalties}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log ``test_loss`` and ``test_accuracy``."""
        x, y = batch
        logits = self(x).float()
        right = logits.argmax(-1) == y
        values = {"test_loss": cross_entropy(logits, y), "test_accuracy": right.float().mean()}
        self.log_dict(values, on_epoch=True, batch_size=len(x), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam over everything that is trained."""
        return torch.optim.Adam(trainable_parameters(self).values(), lr=self.learning_rate)


CLASSES = module_classes(TransferClassifierMixin, "TransferClassifier")
"""The classifier for each installed namespace of Lightning."""

if TYPE_CHECKING:
    TransferClassifier = TransferClassifierMixin
else:
    TransferClassifier = CLASSES[DEFAULT]
