"""``taskinfo certify``, and whether images are prepared as they were for training: otherwise it is of no use."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_taskinfo._batches import Reader
from lightning_taskinfo._files import read_checkpoint, write_json
from lightning_taskinfo._warn import warn
from lightning_taskinfo.certificates import certify as certify_network
from lightning_taskinfo.certificates.samples import read_labelled
from lightning_taskinfo.cli._own import (
    Data,
    Network,
    Part,
    draw,
    fitting,
    path_of,
    read_part,
    started,
)
from lightning_taskinfo.plotting import check_picture

MARGIN = 0.05  # beside four standard errors: by how much errors of different samples may differ
SHAPES = (  # where a network may name the size of its images
    "example_input_array",
    "image_shape",
    "input_shape",
    "input_size",
    "image_size",
    "img_size",
)


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
    network = started(model, checkpoint)
    prior = options["prior"]
    if prior is not None and prior.center is not None:
        center = fitting(prior.values(), network.state_dict())
        options["prior"] = replace(prior, center=center)
    loader = read_part(data, part)
    # Not in the call: it would be taken for where options go.
    batch_fn, forward_fn, known = (
        options[key] for key in ("batch_fn", "forward_fn", "known_error")
    )
    reader = Reader(batch_fn, forward_fn)
    inputs, _ = read_labelled(loader, model=network, reader=reader)
    _check_size(network, model.arguments, inputs)
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
        draw(picture, certificate.plot())
    asked = {
        "model": path_of(model.maker),
        "arguments": model.arguments,
        "checkpoint": str(checkpoint),
        "known_error": known,
        "data": data if isinstance(data, str) else type(data).__qualname__,
        "part": part,
    }
    write_json(out, {**asked, **certificate.to_dict()})
    lines = [str(certificate)]
    if known is None:
        risk = certificate.model_risk
        if options["error"] == "class" and options["loss_fn"] is None:
            _compare_errors(risk, certificate.n, read_checkpoint("checkpoint", checkpoint).content)
        lines.append(
            "Not checked: that inputs are prepared as for training. The network's error on them is "
            f"{risk:.4f}; --known_error compares it with the one you know."
        )
    lines += map(str, files)
    return "\n".join(lines)


def _check_size(model: nn.Module, arguments: Mapping[str, Any], inputs: Any) -> None:
    """Raise a ``ValueError`` for images of another size than the network says it was made for.

    Args:
        model: The network; a LightningModule may have an ``example_input_array``.
        arguments: What it was made with.
        inputs: Images ``[N, C, H, W]``; others have no size to check.
    """
    if not isinstance(inputs, Tensor) or inputs.ndim != 4:
        return
    named = dict(arguments)
    example = getattr(model, "example_input_array", None)
    if isinstance(example, Tensor):
        named["example_input_array"] = example.shape[1:]
    found = tuple(inputs.shape[-2:])
    for source in SHAPES:
        shape = named.get(source)
        if isinstance(shape, int) and source in ("image_size", "img_size"):
            shape = (shape, shape)
        if not isinstance(shape, list | tuple) or len(shape) not in (2, 3):
            continue
        wanted = tuple(shape[-2:])
        if wanted != found:
            raise ValueError(
                f"`data` must have images of {wanted}, the size that the network was made for by its {source}, got "
                f"{found}: resize them as for training."
            )


def _compare_errors(found: float, n: int, content: Mapping[str, Any]) -> None:
    """Warn where the error is clearly above the one that a Lightning checkpoint was kept for, on other samples."""
    reach = MARGIN + 4 * math.sqrt(found * (1 - found) / n)
    states = content.get("callbacks", {}).values()
    for state in (state for state in states if isinstance(state, Mapping)):
        name = str(state.get("monitor"))
        kind = re.search("acc|err", name.lower())
        score = state.get("current_score")
        if kind is None or score is None:
            continue
        kept = float(score) if kind[0] == "err" else 1 - float(score)
        if 0 <= kept <= 1 and found - kept > reach:
            warn(
                f"The network's error on these samples is {found:.4f}, and {kept:.4f} in its checkpoint ({name}): "
                "are inputs prepared as for training?"
            )
