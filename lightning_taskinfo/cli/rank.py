"""``taskinfo rank``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._random import own_randomness
from lightning_taskinfo.cli._networks import build, filled, read_checkpoint
from lightning_taskinfo.cli._pictures import check_picture
from lightning_taskinfo.data import ArrayData, load_task
from lightning_taskinfo.transfer.rank import FineTuning, rank_starts

SCRATCH = "scratch"


def rank(
    model: str,
    starts: dict[str, Path],
    data: str,
    model_args: dict[str, Any] | None = None,
    labels: int = 200,
    layers: int | list[str | int] = 5,
    scratch: bool = True,
    curve: dict[int, float] | None = None,
    fine_tune_steps: int = 0,
    learning_rate: float = 1e-3,
    confidence: float = 0.95,
    flatten: bool = False,
    mean: list[float] | None = None,
    std: list[float] | None = None,
    size: int = 28,
    seed: int = 0,
    data_dir: Path | None = None,
    out: Path = Path("ranking.json"),
    picture: Path | None = None,
    project: str | None = None,
) -> str:
    """Rank checkpoints as starts for a target task by linear read-outs of their frozen features; nothing is trained.

    Args:
        model: Import path of the network's class, or of a function that returns it, such as ``package.module.Net``;
            modules of the current folder are found too.
        starts: Checkpoints by name, ``{mnist: mnist.ckpt, wiki: wiki.pt}``: Lightning's, or a state dict saved by
            ``torch.save``. Of a larger module's checkpoint, the part that fits the network is taken.
        data: The target: ``digits``, ``letters``, a name in ``data_dir``, an npz file or an idx folder, alone or with a
            variant behind a colon.
        model_args: Arguments of ``model``, as JSON or YAML; those kept in a checkpoint, where not given.
        labels: How many labels there are, drawn from the training split.
        layers: How many layers of each network to read, or their names.
        scratch: Whether the network with fresh weights takes part, so that starts are said to help or to hurt.
        curve: Test errors of training from scratch by number of labels, ``{50: 0.4, 200: 0.2}``, to predict the number
            of labels above which scratch wins.
        fine_tune_steps: Also fine-tune every start so many steps, cross-validated, and order by that; 0 does not.
        learning_rate: Of fine-tuning.
        confidence: Probability that an interval covers.
        flatten: Whether the network takes vectors instead of images.
        mean: Subtracted from the images in ``[0, 1]``, for each channel, as in training.
        std: Divides them afterwards, for each channel.
        size: Height and width of the embedded digits and letters, 28 or 8.
        seed: Seed of the labels' draw and of fresh weights.
        data_dir: Folder of npz files and idx folders; TASKINFO_DATA_DIR where not given.
        out: Where the ranking is written, as JSON.
        picture: Where the read-outs are drawn, if anywhere.
        project: Also log figure and table to this project of Weights & Biases.

    Returns:
        The ranking as a table, with one sentence of advice.

    Raises:
        ValueError: If an argument is outside its domain, or a checkpoint does not fit the network.
    """
    if not starts or SCRATCH in starts:
        raise ValueError(
            f"`starts` must name at least one checkpoint, and none {SCRATCH!r}, got {list(starts)}."
        )
    if picture is not None:
        check_picture("picture", picture)
    task = load_task(data, size=size, seed=seed, data_dir=data_dir)
    inputs, targets = _drawn(task, labels, seed)
    if mean is not None or std is not None:
        inputs = _standardised(inputs, mean, std)
    inputs = inputs.flatten(1) if flatten else inputs
    models: dict[str, nn.Module | Callable[[], nn.Module]] = {
        name: _start(model, model_args, path) for name, path in starts.items()
    }
    if scratch:
        models[SCRATCH] = _fresh(model, model_args, next(iter(starts.values())), seed)
    ranking = rank_starts(
        models,
        (inputs, targets),
        layers=layers if isinstance(layers, int) else [str(name) for name in layers],
        scratch=SCRATCH if scratch else None,
        curve=curve,
        fine_tune=FineTuning(fine_tune_steps, learning_rate, seed=seed)
        if fine_tune_steps
        else None,
        confidence=confidence,
    )
    ranking.save(out)
    if picture is not None:
        ranking.plot()[0].savefig(picture, dpi=150)
    if project:
        import wandb

        with wandb.init(
            project=project, config={"data": data, "labels": labels, "starts": list(starts)}
        ) as run:
            ranking.log(run)
    return f"{ranking}\n{out}"


def _drawn(task: ArrayData, labels: int, seed: int) -> tuple[Tensor, Tensor]:
    images, targets = task.train().tensors
    if not 0 < labels <= len(targets):
        raise ValueError(
            f"`labels` must be between 1 and {len(targets)}, the training samples, got {labels}."
        )
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))[:labels]
    return images[order], targets[order]


def _standardised(images: Tensor, mean: list[float] | None, std: list[float] | None) -> Tensor:
    channels = images.shape[1]
    for name, values in (("mean", mean), ("std", std)):
        if values is not None and len(values) != channels:
            raise ValueError(
                f"`{name}` must have a number for each of {channels} channels, got {values}."
            )
    shift = torch.tensor(mean or [0.0] * channels).view(-1, 1, 1)
    scale = torch.tensor(std or [1.0] * channels).view(-1, 1, 1)
    return (images - shift) / scale


def _start(model: str, arguments: dict[str, Any] | None, path: Path) -> nn.Module:
    kept = read_checkpoint("starts", path)
    return filled(
        build(model, kept.arguments if arguments is None else arguments), kept.state, "starts", path
    )


def _fresh(model: str, arguments: dict[str, Any] | None, path: Path, seed: int) -> nn.Module:
    kept = read_checkpoint("starts", path)
    with own_randomness(seed):
        return build(model, kept.arguments if arguments is None else arguments)
