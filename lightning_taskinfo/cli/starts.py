"""``taskinfo rank`` and ``taskinfo transfer``: which start helps on a target."""

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_taskinfo._random import own_randomness
from lightning_taskinfo.cli._own import Data, Network, draw, log_to, read_part, started
from lightning_taskinfo.cli._parser import find, is_import_path
from lightning_taskinfo.data import load_task
from lightning_taskinfo.plotting import check_picture
from lightning_taskinfo.transfer import TransferDataModule, group_name, log_to_wandb, rank_starts
from lightning_taskinfo.transfer import transfer as run_transfer
from lightning_taskinfo.transfer.training import LoggerKind

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
    """Rank checkpoints as starts for a target by linear read-outs of their frozen features; nothing is trained.

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
        with own_randomness(seed):
            models[SCRATCH] = model()
    ranking = rank_starts(
        models,
        _drawn(read_part(data, "train"), labels, seed),
        scratch=SCRATCH if scratch else None,
        **options,
    )
    ranking.save(out)
    if picture is not None:
        draw(picture, ranking.plot())
    log_to(project, {"starts": list(starts)}, ranking.log)
    return f"{ranking}\n{out}"


def _drawn(loader: DataLoader[Any], labels: int | None, seed: int) -> DataLoader[Any]:
    samples: Any = loader.dataset
    count = min(LABELS, len(samples)) if labels is None else labels
    if not 0 < count <= len(samples):
        raise ValueError(
            f"`labels` must be between 1 and {len(samples)}, the training samples, got {count}."
        )
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    some = Subset(samples, order[:count].tolist())
    return DataLoader(some, batch_size=256, collate_fn=loader.collate_fn)


def transfer(
    data: Data = "digits→letters",
    model: Network | None = None,
    backbone: str = "small_cnn",
    folder: Path = Path("runs/transfer"),
    logger: LoggerKind = "csv",
    workers: int | None = None,
    dask: str | None = None,
    **options: Any,
) -> str:
    """Train on a few target labels from every start and from scratch, and report which start helps.

    With ``starts``, they are checkpoints of your own, for your own module and data. Without, they
    are made here: a backbone is pretrained on a source beside unlabelled target inputs, and
    fine-tuned on the target.

    Args:
        data: With ``starts``: import path of your LightningDataModule, whose arguments follow,
            ``--data.batch_size 32``; or ``digits``, ``letters``, an npz file or an idx folder.
            Without: source and target with → or -> between them, each such a name or path; or
            ``lightning_taskinfo.transfer.TransferDataModule`` and its arguments.
        model: With ``starts``: import path of your LightningModule, such as ``my_package.Net``; its
            arguments follow, ``--model.width 64``.
        backbone: Without ``starts``: mlp, small_cnn, large_cnn, or the import path of a function
            that makes a network for an image shape.
        folder: Folder of everything that is written. A run that was killed goes on from it.
        logger: Where each run logs its metrics.
        workers: Processes that share the work; as many as there are cores where not given, 0 for
            none.
        dask: Address of a Dask scheduler whose workers share the work, on several machines; they
            need the folder of --folder as well, and one thread each.
        **options: Arguments of :func:`lightning_taskinfo.transfer`.

    Returns:
        The table, and where the report is.

    Raises:
        ValueError: If an argument is out of its domain, or the folder belongs to another
            configuration.
    """
    os.environ.setdefault("WANDB_SILENT", "true")  # many runs, one terminal
    if (model is None) != (options["starts"] is None):
        missing, given = ("model", "starts") if model is None else ("starts", "model")
        raise ValueError(f"`{missing}` must be given with `{given}`, got None.")
    trained: Any = model
    samples: Any = data
    if model is None:
        trained = find(backbone, "backbone") if is_import_path(backbone) else backbone
        samples = _source_and_target(data) if isinstance(data, str) else data
    elif isinstance(data, str):
        samples = load_task(data)
    connection: Any = nullcontext()
    if dask is not None:
        from distributed import Client

        connection = Client(dask)
    with connection as client:
        executor = None if client is None else client.get_executor()
        report = run_transfer(
            trained,
            samples,
            folder=folder,
            logger=logger,
            executor=executor,
            workers=workers,
            **options,
        )
    files = report.save(folder / "report")
    lines = [report.to_terminal(), "", f"Report:      {files['report.md']}"]
    if logger.startswith("wandb"):
        project = options["project"]  # not in the call: it would be taken for where options go
        offline = logger == "wandb_offline"
        run = log_to_wandb(
            report,
            project=project,
            group=group_name(report.name, folder),
            mode="offline" if offline else "online",
            folder=folder / "logs",
        )
        lines.append(f"Offline run: {run}" if offline else f"Run: {run}")
        if offline:
            lines.append(f"Look at it:  wandb leet {run}")
    return "\n".join(lines)


def _source_and_target(data: str) -> TransferDataModule:
    parts = [part.strip() for part in re.split("→|->", data)]
    if len(parts) != 2 or not all(parts):
        raise ValueError(
            f"`data` must be a source and a target, like digits→letters, where there are no `starts`, got {data!r}."
        )
    return TransferDataModule(*parts)
