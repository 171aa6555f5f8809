"""``taskinfo certify``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_taskinfo._batches import Reader
from lightning_taskinfo._checkpoints import read_checkpoint
from lightning_taskinfo._files import atomic_write, write_json
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
from lightning_taskinfo.cli._pictures import check_picture
from lightning_taskinfo.cli._preparation import (
    check_outputs,
    check_size,
    stated_error,
    warn_of_preparation,
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
    kept = read_checkpoint("checkpoint", checkpoint)
    network = with_weights(model(), kept, "checkpoint", checkpoint)
    prior = options["prior"]
    if prior is not None and prior.center is not None:
        options["prior"] = replace(prior, center=fitting(prior.values(), network.state_dict()))
    loader = read_part(data, part)

    # Inputs that are prepared in another way than for training give a valid certificate that is of
    # no use.
    batch_fn, forward_fn = options["batch_fn"], options["forward_fn"]
    reader = Reader(batch_fn, forward_fn)
    inputs, targets = read_labelled(loader, model=network, reader=reader)
    classes = options["error"] == "class" and options["loss_fn"] is None
    if classes and isinstance(inputs, Tensor):
        check_size(network, model.arguments, inputs)
        check_outputs(network, inputs, targets)
        if options["known_error"] is None:
            warn_of_preparation(network, inputs, targets, stated_error(kept.content))

    for path in filter(None, (out, picture)):
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
            certificate.plot()[0].savefig(file, format=picture.suffix[1:], dpi=150)
    asked: dict[str, Any] = {"model": model.name, "arguments": model.arguments}
    asked |= {"checkpoint": str(checkpoint), "known_error": options["known_error"]}
    asked |= {"data": data if isinstance(data, str) else type(data).__qualname__, "part": part}
    write_json(out, {**asked, **certificate.to_dict()})
    lines = [str(certificate)]
    if options["known_error"] is None:
        lines.append(
            "Not checked: that inputs are prepared as for training. The network's error on them is "
            f"{certificate.model_risk:.4f}; --known_error compares it with the one you know."
        )
    return "\n".join([*lines, *(str(path) for path in (out, picture) if path is not None)])
