"""Whether images are prepared as they were for training: a certificate on others is valid, and of no use."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lightning_taskinfo._batches import outputs_of
from lightning_taskinfo._warn import warn

MARGIN = 0.05  # beside four standard errors: by how much errors of different samples may differ
SIDES = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 160, 192, 224)
LOOKED_AT = 256  # samples for each side
SHAPES = (
    "image_shape",
    "input_shape",
    "image_size",
    "img_size",
    "input_size",
)  # arguments that may name a size


def check_size(model: nn.Module, arguments: Mapping[str, Any], inputs: Tensor) -> None:
    """Raise a ``ValueError`` for images of another size than the network says it was made for.

    Args:
        model: The network; a LightningModule may have an ``example_input_array``.
        arguments: What it was made with.
        inputs: Images ``[N, C, H, W]``; vectors have no size to check.
    """
    if inputs.ndim != 4:
        return
    found = tuple(inputs.shape[-2:])
    for source, size in _sizes(model, arguments):
        if size != found:
            wanted = "×".join(map(str, size))
            raise ValueError(
                f"`data` must have images of {wanted}, the size that the network was made for by its {source}, got "
                f"{'×'.join(map(str, found))}: resize them as for training."
            )


def _sizes(model: nn.Module, arguments: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    example = getattr(model, "example_input_array", None)
    found = []
    if isinstance(example, Tensor) and example.ndim == 4:
        found.append(("example_input_array", tuple(example.shape[-2:])))
    for name in SHAPES:
        value = arguments.get(name)
        if isinstance(value, int) and name in ("image_size", "img_size"):
            found.append((name, (value, value)))
        elif (
            isinstance(value, list | tuple)
            and len(value) in (2, 3)
            and all(isinstance(v, int) for v in value)
        ):
            found.append((name, tuple(value[-2:])))
    return found


def stated_error(content: Any) -> tuple[str, float] | None:
    """Return name and value of the error that a Lightning checkpoint was kept for; ``None`` where it states none.

    Example:
        >>> stated_error({"callbacks": {"ModelCheckpoint": {"monitor": "val_accuracy", "current_score": 0.75}}})
        ('val_accuracy', 0.25)
    """
    states = content.get("callbacks", {}) if isinstance(content, Mapping) else {}
    for state in states.values() if isinstance(states, Mapping) else ():
        if not isinstance(state, Mapping):
            continue
        name, score = state.get("monitor"), state.get("current_score")
        if not isinstance(name, str) or score is None or not 0 <= float(score) <= 1:
            continue
        if "acc" in name.lower():
            return name, 1 - float(score)
        if "err" in name.lower():
            return name, float(score)
    return None


def warn_of_preparation(
    model: nn.Module, inputs: Tensor, targets: Tensor, kept: tuple[str, float] | None
) -> None:
    """Warn where the network does clearly better with other samples or on images of another size.

    Args:
        model: The network.
        inputs: The samples as they are prepared here.
        targets: Their classes.
        kept: Name and value of the error in the checkpoint, on other samples.
    """
    found = _error(model, inputs, targets)
    if kept is not None and found - kept[1] > _reach(found, len(targets)):
        warn(
            f"The network's error on these samples is {found:.4f}, and {kept[1]:.4f} in its checkpoint ({kept[0]}): "
            "are inputs prepared as for training?"
        )
    if better := _better_side(model, inputs[:LOOKED_AT], targets[:LOOKED_AT]):
        warn(
            f"The network's error is {better[1]:.4f} on these images resized to {better[0]}×{better[0]}, and "
            f"{found:.4f} as they are, {'×'.join(map(str, inputs.shape[-2:]))}: was it trained on another size?"
        )


@torch.no_grad()
def check_outputs(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """See on two samples that the network knows these classes."""
    outputs = outputs_of(model.eval(), inputs[:2])
    if outputs.ndim != 2 or outputs.shape[1] <= int(targets.max()):
        raise ValueError(
            f"`model` must return scores [N, C] for classes up to {int(targets.max())}, got {list(outputs.shape)} for "
            f"inputs {list(inputs[:2].shape)}."
        )


def _better_side(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[int, float] | None:
    """The side of images, and the error there, where that is clearly below the error on the images as they are."""
    if inputs.ndim != 4:
        return None
    own = _error(model, inputs, targets)
    found: list[tuple[float, int]] = []
    for side in SIDES:
        if side in inputs.shape[-2:] or side > 4 * inputs.shape[-1]:
            continue
        resized = interpolate(inputs, size=(side, side), mode="bilinear", antialias=True)
        try:
            found.append((_error(model, resized, targets), side))
        except (RuntimeError, ValueError, IndexError):  # a network of one size
            continue
    error, side = min(found, default=(own, 0))
    return (side, error) if own - error > _reach(own, len(targets)) else None


@torch.no_grad()
def _error(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    model.eval()
    wrong = [
        (outputs_of(model, x).argmax(1) != y).float()
        for x, y in zip(inputs.split(1024), targets.split(1024), strict=True)
    ]
    return float(torch.cat(wrong).mean())


def _reach(share: float, n: int) -> float:
    """How far the error of other samples may be from this one."""
    return MARGIN + 4 * math.sqrt(share * (1 - share) / n)
