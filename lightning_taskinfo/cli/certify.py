"""``taskinfo certify``."""

import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_taskinfo._files import atomic_write, write_json
from lightning_taskinfo.certificates import BETAS, Candidate, Prior, pareto_front
from lightning_taskinfo.certificates import certify as certify_network
from lightning_taskinfo.certificates.curvatures import Structure
from lightning_taskinfo.cli._networks import check_outputs, load_networks
from lightning_taskinfo.cli._pictures import check_picture
from lightning_taskinfo.cli._preparation import check_error, check_size
from lightning_taskinfo.data import ArrayData, load_dataset, load_idx, load_npz

Split = Literal["train", "test"]


def certify(
    model: str,
    checkpoint: Path,
    data: str,
    model_args: dict[str, Any] | None = None,
    prior_checkpoint: Path | None = None,
    prior_origin: str | None = None,
    data_dir: Path | None = None,
    size: int = 28,
    split: Split = "train",
    samples: str = ":",
    classes: list[list[int]] | None = None,
    flatten: bool = False,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    known_error: float | None = None,
    structure: Literal["auto"] | Structure | list[Structure] = "auto",
    betas: list[float] | None = None,
    draws: int = 1000,
    delta: float = 0.04,
    delta_draws: float = 0.01,
    curvature_samples: int = 10_000,
    seed: int = 0,
    out: Path = Path("certificate.json"),
    picture: Path | None = None,
) -> str:
    """Bound the true error of a trained network turned stochastic; nothing is retrained.

    Args:
        model: Import path of the network's class, or of a function that returns it, such as ``package.module.Net``;
            modules of the current folder are found too.
        checkpoint: The trained weights: a Lightning checkpoint, or a state dict saved by ``torch.save``. Of a larger
            module's checkpoint, the part that fits the network is taken.
        data: The samples to certify on: ``digits``, ``letters``, a name in ``data_dir``, an npz file or an idx folder.
        model_args: Arguments of ``model``, as JSON or YAML; those kept in the checkpoint, where not given.
        prior_checkpoint: Weights at the centre of the prior: those that training began with. 0 where not given, which
            is always valid and seldom informative.
        prior_origin: Where they come from, in words, if the certified samples had no part in them, such as "random
            initialisation" or "trained on the other half"; the certificate repeats it, and is not valid without.
        data_dir: Folder of further datasets; ``TASKINFO_DATA_DIR`` where not given.
        size: Height and width of the embedded digits and letters: 28, or 8.
        split: Which split to certify on.
        samples: Which samples of it, as ``start:stop:step``: all, or the half that the prior has not seen.
        classes: Groups of labels to tell apart, such as ``[[0,1,2,3,4],[5,6,7,8,9]]``; other labels are left out.
        flatten: Whether the network takes vectors instead of images.
        mean: Subtracted from the images in ``[0, 1]``, for each channel, as in training.
        std: Divides them afterwards, for each channel.
        known_error: Error of the network on these samples, as you know it from training. If the error here is far from
            it, images are not prepared as they were then, and nothing is certified.
        structure: Curvature that shapes the post-distribution, or several to take the tightest under its union price;
            auto tries all that are affordable.
        betas: Weights of the KL beside the sum of the loss to try; 25 from 0.01 to 10000 where not given.
        draws: Number of fresh networks that the bound rests on.
        delta: Probability with which the theorem may fail.
        delta_draws: Probability with which the Monte-Carlo interval may fail.
        curvature_samples: How many samples the curvature is estimated from.
        seed: Seed of all draws.
        out: Where the certificate is written, as JSON.
        picture: Where the trade-off of accuracy and complexity is drawn, if anywhere; it takes longer.

    Returns:
        The certificate as a table.

    Raises:
        ValueError: If an argument does not fit, or a file is damaged.
    """
    if picture is not None:
        check_picture("picture", picture)
    loaded = load_networks(model, model_args, checkpoint, prior_checkpoint)
    trained, start = loaded.trained, loaded.start
    inputs, targets = _samples(_load(data, data_dir, size), split, samples, classes)
    inputs = _prepared(inputs, mean, std, flatten=flatten)
    check_size(trained, loaded.arguments, inputs)
    check_outputs(trained, inputs, targets)
    found = (
        check_error(trained, inputs, targets, known_error, loaded.error)
        if len(inputs)
        else math.nan
    )
    prior = Prior(start, origin=prior_origin if start is not None else None)
    for path in filter(None, (out, picture)):
        path.parent.mkdir(parents=True, exist_ok=True)  # before the work: it may fail
    certificate = certify_network(
        trained, (inputs, targets), prior, structure=structure, betas=betas or BETAS, draws=draws, delta=delta,
        delta_draws=delta_draws, curvature_samples=curvature_samples, seed=seed,
    )  # fmt: skip
    asked: dict[str, Any] = {"model": model, "checkpoint": str(checkpoint), "data": data}
    asked |= {"split": split, "samples": samples}
    asked |= {
        "inputs": {
            "shape": list(inputs.shape[1:]),
            "mean": mean,
            "std": std,
            "known_error": known_error,
        }
    }
    written = [f"{out}"]
    if known_error is None:
        written.insert(
            0,
            f"Not checked: that inputs of shape {list(inputs.shape[1:])} are prepared as for training. The network's "
            f"error on them is {found:.4f}; --known_error compares it with the one you know.",
        )
    if picture is not None:
        options: dict[str, Any] = {
            "betas": betas or BETAS,
            "curvature_samples": curvature_samples,
            "seed": seed,
        }
        rows = pareto_front(trained, (inputs, targets), prior, delta=delta, **options)
        _draw(rows, len(inputs), delta, picture)
        written.append(f"{picture}")
    write_json(out, {**asked, "classes": classes, **certificate.to_dict()})
    return "\n".join([str(certificate), *written])


def _load(name: str, data_dir: Path | None, size: int) -> ArrayData:
    path = Path(name)
    if path.suffix == ".npz":
        return load_npz(path)
    return load_idx(path) if path.is_dir() else load_dataset(name, size=size, data_dir=data_dir)


def _samples(
    data: ArrayData, split: Split, samples: str, classes: list[list[int]] | None
) -> tuple[Tensor, Tensor]:
    inputs, targets = (data.train() if split == "train" else data.test()).tensors
    if data.labels is not None:  # a network's outputs belong to the labels of the file
        targets = torch.tensor(data.labels)[targets]
    try:
        part = slice(*(int(end) if end else None for end in samples.split(":", maxsplit=2)))
        inputs, targets = inputs[part], targets[part]
    except ValueError as error:
        raise ValueError(
            f"`samples` must be start:stop:step with a positive step, got {samples!r}."
        ) from error
    if classes is None:
        return inputs, targets
    listed = [label for group in classes for label in group]
    if len(classes) < 2 or len(set(listed)) < len(listed) or not all(classes):
        raise ValueError(
            f"`classes` must be two or more groups of labels, no label in two of them, got {classes}."
        )
    known = data.labels or range(data.num_classes)
    if unknown := sorted(set(listed) - set(known)):
        raise ValueError(
            f"`classes` must hold labels from {min(known)} to {max(known)}, got {unknown[0]}."
        )
    groups = torch.full_like(targets, -1)
    for number, group in enumerate(classes):
        groups[torch.isin(targets, torch.tensor(group))] = number
    return inputs[groups >= 0], groups[groups >= 0]


def _prepared(
    inputs: Tensor, mean: list[float] | None, std: list[float] | None, *, flatten: bool
) -> Tensor:
    channels = inputs.shape[1]
    for argument, values in {"mean": mean, "std": std}.items():
        if values is not None and len(values) not in (1, channels):
            raise ValueError(
                f"`{argument}` must hold a value for each of {channels} channels, got {values}."
            )
        if values is not None and not all(map(math.isfinite, values)):
            raise ValueError(f"`{argument}` must be finite, got {values}.")
    if std is not None and min(std) <= 0:
        raise ValueError(f"`std` must be positive, got {std}.")
    shift, scale = (torch.tensor(values).view(-1, 1, 1) for values in (mean or [0.0], std or [1.0]))
    inputs = (inputs - shift) / scale
    return inputs.flatten(1) if flatten else inputs


def _draw(rows: list[Candidate], n: int, delta: float, path: Path) -> None:
    from lightning_taskinfo.plotting import plot_pareto

    figure, _ = plot_pareto(rows, n, delta=delta)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)
