"""The methods of semi-supervised transfer by name, and the regularizers that they are made of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from lightning_taskinfo.regularizers import (
    Lautum,
    LocalMinimumRegularizer,
    MultiKernelMMD,
    MutualInformation,
    Regularizer,
    TemporalEnsembling,
    WeightInformation,
    WeightSchedule,
)
from lightning_taskinfo.transfer.cells import Stage

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


@dataclass(frozen=True)
class Sizes:
    """What the regularizers must know of the data before training.

    Attributes:
        input_shape: Shape of one input.
        feature_dim: Number of features.
        num_classes: Number of classes of the stage.
        num_labeled: Labelled training samples of the stage.
        num_unlabeled: Unlabelled target inputs.
        num_indices: One more than the largest index of a target sample.
        epochs: Epochs of the stage.
    """

    input_shape: tuple[int, ...]
    feature_dim: int
    num_classes: int
    num_labeled: int
    num_unlabeled: int
    num_indices: int
    epochs: int


def parse_method(method: str, *, argument: str = "method") -> tuple[str, ...]:
    """Return the penalties of a method, in the order of :data:`PENALTIES`.

    Args:
        method: ``"standard"`` for none, or names of :data:`PENALTIES` with ``+`` between them.
        argument: What the caller calls it, for messages.

    Raises:
        ValueError: If a name is unknown or repeated.

    Example:
        >>> parse_method("standard"), parse_method("lautum+temporal_ensembling")
        ((), ('temporal_ensembling', 'lautum'))
    """
    if method in ("standard", "scratch"):
        return ()
    parts = [part.strip() for part in method.split("+")]
    if unknown := [part for part in parts if part not in PENALTIES]:
        known = ["standard", *PENALTIES]
        near = "".join(
            f"; did you mean {name!r}?" for name in get_close_matches(unknown[0], known, n=1)
        )
        raise ValueError(
            f"`{argument}` must be made of {', '.join(known)}, with '+' between them, got {unknown[0]!r} in {method!r}"
            f"{near or '.'}"
        )
    if len(set(parts)) != len(parts):
        raise ValueError(f"`{argument}` must name each part once, got {method!r}.")
    return tuple(name for name in PENALTIES if name in parts)


def acting(method: str, stage: Stage) -> tuple[str, ...]:
    """Return the penalties of ``method`` that act in ``stage``; training from scratch has none."""
    return tuple(name for name in parse_method(method) if stage in PENALTIES[name])


def check_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Return all weights, the defaults where none are given.

    Raises:
        ValueError: If a name is unknown or a weight negative.
    """
    for name, weight in weights.items():
        if name not in WEIGHTS:
            near = "".join(
                f" Did you mean {other!r}?" for other in get_close_matches(name, WEIGHTS, n=1)
            )
            raise ValueError(f"`weights` must be for {', '.join(WEIGHTS)}, got {name!r}.{near}")
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"`weights` must be finite and not negative, got {weight} for {name!r}."
            )
    return {**WEIGHTS, **weights}


def make_regularizers(
    names: tuple[str, ...], weights: Mapping[str, float], sizes: Sizes, seed: int
) -> nn.ModuleDict:
    """Return the regularizers of a stage by name.

    The weight of Temporal Ensembling is Laine and Aila's 30 per share of labelled samples, ramped
    up over the stage.
    """
    return nn.ModuleDict({name: _make(name, weights[name], sizes, seed) for name in names})


def _make(name: str, weight: float, sizes: Sizes, seed: int) -> Regularizer:
    if name == "temporal_ensembling":
        factor = sizes.num_labeled / max(1, sizes.num_unlabeled)
        ramp = WeightSchedule(weight * factor, "sigmoid", length=sizes.epochs)
        return TemporalEnsembling(sizes.num_indices, sizes.num_classes, weight=ramp)
    if name == "mk_mmd":
        return MultiKernelMMD(weight=weight)
    if name == "lautum":
        # As many directions of the inputs as four samples each can tell apart.
        directions = min(math.prod(sizes.input_shape), 1024, max(1, sizes.num_unlabeled // 4))
        return Lautum(
            sizes.input_shape, sizes.num_classes, weight=weight, components=directions, seed=seed
        )
    if name == "mutual_information":
        return MutualInformation(sizes.input_shape, sizes.feature_dim, weight=weight, seed=seed)
    if name == "information":
        return WeightInformation(weight)
    return LocalMinimumRegularizer(weight=weight, start=0)
