"""``taskinfo rank``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_taskinfo._random import own_randomness
from lightning_taskinfo.cli._own import Data, Network, read_part, started
from lightning_taskinfo.plotting import check_picture
from lightning_taskinfo.transfer import rank_starts

SCRATCH = "scratch"
LABELS = 200


def rank(
    model: Network,
    starts: dict[str, Path],
    data: Data,
    labels: int | None = None,
    scratch: bool = True,
    seed: int = 0,
    out: Path = Path("ranking.json"),
    picture: Path | None = None,
    project: str | None = None,
    **options: Any,
) -> str:
    """Rank checkpoints as starts for a target task by linear read-outs of their frozen features; nothing is trained.

    Args:
        model: Import path of your LightningModule or network, such as ``my_package.Net``, or of a
            function that returns it; its arguments follow, ``--model.width 64``.
        starts: Checkpoints by name, ``{mnist: mnist.ckpt, wiki: wiki.pt}``: Lightning's, or a state
            dict saved by ``torch.save``. Of a larger module's checkpoint, the part that fits the
            network is taken.
        data: The target: import path of your LightningDataModule, whose arguments follow,
            ``--data.batch_size 32``; or ``digits``, ``letters``, an npz file or an idx folder,
            alone or with a variant behind a colon, whose images the network gets as they are, in
            [0, 1].
        labels: How many labels there are, drawn from the training samples; 200 where not given, or
            all if they are fewer.
        scratch: Whether the network with fresh weights takes part, so that starts are said to help
            or to hurt.
        seed: Seed of the labels' draw and of fresh weights.
        out: Where the ranking is written, as JSON.
        picture: Where the read-outs are drawn, if anywhere.
        project: Also log figure and table to this project of Weights & Biases.
        **options: Arguments of :func:`lightning_taskinfo.rank_starts`.

    Returns:
        The ranking as a table with its legend, and one sentence of advice.

    Raises:
        ValueError: If an argument is outside its domain, or a checkpoint does not fit the network.
    """
    if not starts or SCRATCH in starts:
        raise ValueError(
            f"`starts` must name at least one checkpoint, and none {SCRATCH!r}, got {list(starts)}."
        )
    if picture is not None:
        check_picture("picture", picture)
    models: dict[str, nn.Module | Callable[[], nn.Module]] = {}
    for name, path in starts.items():
        models[name] = partial(started, model, path, "starts")
    if scratch:
        models[SCRATCH] = _fresh(model, seed)
    ranking = rank_starts(
        models,
        _drawn(read_part(data, "train"), labels, seed),
        scratch=SCRATCH if scratch else None,
        **options,
    )
    ranking.save(out)
    if picture is not None:
        figure, _ = ranking.plot()
        figure.savefig(picture, dpi=150)
    if project:
        import wandb

        with wandb.init(project=project, config={"starts": list(starts)}) as run:
            ranking.log(run)
    return f"{ranking}\n{out}"


def _drawn(loader: DataLoader[Any], labels: int | None, seed: int) -> DataLoader[Any]:
    samples: Any = loader.dataset
    count = min(LABELS, len(samples)) if labels is None else labels
    if not 0 < count <= len(samples):
        raise ValueError(
            f"`labels` must be between 1 and {len(samples)}, the training samples, got {count}."
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(samples), generator=generator)
    some = Subset(samples, order[:count].tolist())
    return DataLoader(some, batch_size=256, collate_fn=loader.collate_fn)


def _fresh(model: Network, seed: int) -> nn.Module:
    with own_randomness(seed):
        return model()
