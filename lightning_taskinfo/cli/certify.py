"""``taskinfo certify``, and whether images are prepared as they were for training: otherwise it is of no use."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lightning_taskinfo._batches import Reader, outputs_of
from lightning_taskinfo._files import atomic_write, read_checkpoint, write_json
from lightning_taskinfo._warn import warn
from lightning_taskinfo.certificates import certify as certify_network
from lightning_taskinfo.certificates.samples import read_labelled
from lightning_taskinfo.cli._own import (
    Data,
    Network,
    Part,
    fitting,
    read_part,
    with_weights,
)
from lightning_taskinfo.plotting import check_picture

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


def certify(
    model: Network,
    checkpoint: Path,
    data: Data,
    part: Part = "train",
    unlabelled: Part | None = None,
    held_out: Part | None = None,
    out: Path = Path("certificate.json"),
    picture: Path | None = None,
    **options: Any,
) -> str:
    """Bound the true error of a trained network, and of its stochastic version; nothing is retrained.

    Args:
        model: Import path of your LightningModule or network, such as ``my_package.Net``, or of a
            function that returns it; its arguments follow, ``--model.width 64``. Those kept in the
            checkpoint are the defaults.
        checkpoint: The trained weights: a Lightning checkpoint, or a state dict saved by
            ``torch.save``. Of a larger module's checkpoint, the part that fits the network is
            taken.
        data: Import path of your LightningDataModule, whose arguments follow,
            ``--data.batch_size 32``; or ``digits``, ``letters``, an npz file or an idx folder,
            whose images the network gets as they are, in [0, 1].
        part: Which part of the data to certify on.
        unlabelled: Part of the data whose inputs are fresh, for a bound on the network itself:
            nothing else may have been done with them. Labels are not looked at.
        held_out: Part of the data that neither training nor a choice has seen, for the test-set
            bound.
        out: Where the certificate is written, as JSON.
        picture: Where bounds and errors are drawn, if anywhere.
        **options: Arguments of :func:`lightning_taskinfo.certify`.

    Returns:
        The certificate as a table.

    Raises:
        ValueError: If an argument does not fit, or a file is damaged.
    """
    if picture is not None:
        check_picture("picture", picture)
    kept = read_checkpoint("checkpoint", checkpoint)
    network = with_weights(model(), kept, "checkpoint", checkpoint)
    prior = options["prior"]
    if prior is not None and prior.center is not None:
        center = fitting(prior.values(), network.state_dict())
        options["prior"] = replace(prior, center=center)
    loader = read_part(data, part)

    # Inputs that are prepared in another way than for training give a valid certificate that is of
    # no use.
    # Not in the call: it would be taken for where options go.
    batch_fn, forward_fn = options["batch_fn"], options["forward_fn"]
    reader = Reader(batch_fn, forward_fn)
    inputs, targets = read_labelled(loader, model=network, reader=reader)
    classes = options["error"] == "class" and options["loss_fn"] is None
    if classes and isinstance(inputs, Tensor):
        _check_size(network, model.arguments, inputs)
        _check_outputs(network, inputs, targets)
        if options["known_error"] is None:
            _warn_of_preparation(network, inputs, targets, _stated_error(kept.content))

    files = [out] if picture is None else [out, picture]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)  # before the work: it may fail
    certificate = certify_network(
        network,
        loader,
        unlabelled=None if unlabelled is None else read_part(data, unlabelled),
        held_out=None if held_out is None else read_part(data, held_out),
        **options,
    )
    if picture is not None:
        with atomic_write(picture) as file:
            figure, _ = certificate.plot()
            figure.savefig(file, format=picture.suffix[1:], dpi=150)
    asked = {
        "model": model.name,
        "arguments": model.arguments,
        "checkpoint": str(checkpoint),
        "known_error": options["known_error"],
        "data": data if isinstance(data, str) else type(data).__qualname__,
        "part": part,
    }
    write_json(out, {**asked, **certificate.to_dict()})
    lines = [str(certificate)]
    if options["known_error"] is None:
        lines.append(
            "Not checked: that inputs are prepared as for training. The network's error on them is "
            f"{certificate.model_risk:.4f}; --known_error compares it with the one you know."
        )
    lines += map(str, files)
    return "\n".join(lines)


def _check_size(model: nn.Module, arguments: Mapping[str, Any], inputs: Tensor) -> None:
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
        elif isinstance(value, list | tuple) and len(value) in (2, 3):
            whole = all(isinstance(v, int) for v in value)
            if whole:
                found.append((name, tuple(value[-2:])))
    return found


def _stated_error(content: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return name and value of the error that a Lightning checkpoint was kept for; ``None`` where it states none.

    Example:
        >>> _stated_error({"callbacks": {"ModelCheckpoint": {"monitor": "val_accuracy", "current_score": 0.75}}})
        ('val_accuracy', 0.25)
    """
    states = content.get("callbacks", {})
    if not isinstance(states, Mapping):
        return None
    for state in states.values():
        if not isinstance(state, Mapping):
            continue
        name = state.get("monitor")
        score = state.get("current_score")
        if not isinstance(name, str) or score is None:
            continue
        share = float(score)
        if not 0 <= share <= 1:
            continue
        if "acc" in name.lower():
            return name, 1 - share
        if "err" in name.lower():
            return name, share
    return None


def _warn_of_preparation(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    kept: tuple[str, float] | None,
) -> None:
    """Warn where the network does clearly better with other samples or on images of another size.

    Args:
        model: The network.
        inputs: The samples as they are prepared here.
        targets: Their classes.
        kept: Name and value of the error in the checkpoint, on other samples.
    """
    found = _error(model, inputs, targets)
    if kept is not None:
        name, stated = kept
        if found - stated > _reach(found, len(targets)):
            warn(
                f"The network's error on these samples is {found:.4f}, and {stated:.4f} in its checkpoint ({name}): "
                "are inputs prepared as for training?"
            )
    better = _better_side(model, inputs[:LOOKED_AT], targets[:LOOKED_AT])
    if better is not None:
        side, error = better
        warn(
            f"The network's error is {error:.4f} on these images resized to {side}×{side}, and "
            f"{found:.4f} as they are, {'×'.join(map(str, inputs.shape[-2:]))}: was it trained on another size?"
        )


@torch.no_grad()
def _check_outputs(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """See on two samples that the network knows these classes."""
    few = inputs[:2]
    outputs = outputs_of(model.eval(), few)
    last = int(targets.max())
    if outputs.ndim != 2 or outputs.shape[1] <= last:
        raise ValueError(
            f"`model` must return scores [N, C] for classes up to {last}, got {list(outputs.shape)} for "
            f"inputs {list(few.shape)}."
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
            error = _error(model, resized, targets)
            found.append((error, side))
        except (RuntimeError, ValueError, IndexError):  # a network of one size
            continue
    error, side = min(found, default=(own, 0))
    if own - error > _reach(own, len(targets)):
        return side, error
    return None


@torch.no_grad()
def _error(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    model.eval()
    wrong = []
    chunks = zip(inputs.split(1024), targets.split(1024), strict=True)
    for x, y in chunks:
        predicted = outputs_of(model, x).argmax(1)
        wrong.append((predicted != y).float())
    return float(torch.cat(wrong).mean())


def _reach(share: float, n: int) -> float:
    """How far the error of other samples may be from this one."""
    standard_error = math.sqrt(share * (1 - share) / n)
    return MARGIN + 4 * standard_error
