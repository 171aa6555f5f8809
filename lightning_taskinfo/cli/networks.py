"""``taskinfo certify``, ``rank`` and ``transfer``: what can be proved about a network, and which start helps it."""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_taskinfo._files import write_json
from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo.certificates import certify as certify_network
from lightning_taskinfo.cli._own import Data, Network, Part, draw, path_of, read_part, started
from lightning_taskinfo.cli._parser import find, is_import_path
from lightning_taskinfo.data import load_task
from lightning_taskinfo.plotting import check_picture
from lightning_taskinfo.transfer import TransferDataModule, group_name, log_to_wandb, rank_starts
from lightning_taskinfo.transfer import transfer as run_transfer
from lightning_taskinfo.transfer.sampling import Loader

SCRATCH = "scratch"


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
            ``torch.save``.
        data: Import path of your LightningDataModule, whose arguments follow,
            ``--data.batch_size 32``; or ``digits``, ``letters``, or an npz file,
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
    network = started(model, checkpoint)
    loader = read_part(data, part)
    known = options["known_error"]  # not in the call: it would be taken for where options go
    files = _checked_files(out, picture)
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
        lines.append(
            "Not checked: that inputs are prepared as for training. The network's error on them is "
            f"{certificate.model_risk:.4f}; --known_error compares it with the one you know."
        )
    lines += map(str, files)
    return "\n".join(lines)


def rank(
    model: Network,
    starts: dict[str, Path],
    data: Data,
    labels: int = 200,
    scratch: bool = True,
    seed: int = 0,
    out: Path = Path("ranking.json"),
    picture: Path | None = None,
    **options: Any,
) -> str:
    """Rank checkpoints as starts for a target by linear read-outs of their frozen features; nothing is trained.

    Args:
        model: Import path of your LightningModule or network, such as ``my_package.Net``, or of a
            function that returns it; its arguments follow, ``--model.width 64``.
        starts: Checkpoints by name, ``{mnist: mnist.ckpt, wiki: wiki.pt}``: Lightning's, or a state
            dict saved by ``torch.save``.
        data: The target: import path of your LightningDataModule, whose arguments follow,
            ``--data.batch_size 32``; or ``digits``, ``letters``, or an npz file,
            alone or with a variant behind a colon, whose images the network gets as they are, in
            [0, 1].
        labels: At most this many labels, drawn from the training samples.
        scratch: Whether the network with fresh weights takes part; with --fine_tune, starts are then
            said to help or to hurt.
        seed: Seed of the labels' draw.
        out: Where the ranking is written, as JSON.
        picture: Where the read-outs are drawn, if anywhere.
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
    models: dict[str, nn.Module | Callable[[], nn.Module]] = {}
    for name, path in starts.items():
        models[name] = partial(started, model, path, "starts")
    if scratch:
        models[SCRATCH] = model  # which draws other weights each time
    _checked_files(out, picture)
    ranking = rank_starts(
        models,
        _drawn(read_part(data, "train"), labels, seed),
        scratch=SCRATCH if scratch else None,
        **options,
    )
    ranking.save(out)
    if picture is not None:
        draw(picture, ranking.plot())
    return f"{ranking}\n{out}"


def _checked_files(out: Path, picture: Path | None) -> list[Path]:
    """Return the files that will be written; before the work, as it may fail."""
    check_picture("picture", picture)
    if out.is_dir():
        raise ValueError(f"`out` must be a file, got the folder {out}.")
    files = [path for path in (out, picture) if path is not None]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
    return files


def _drawn(loader: Loader, labels: int, seed: int) -> Loader:
    check_counts(labels=labels)
    samples: Any = loader.dataset
    if isinstance(samples, IterableDataset):
        samples = list(samples)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    some = Subset(samples, order[:labels].tolist())
    return DataLoader(some, batch_size=256, collate_fn=loader.collate_fn)


def transfer(
    data: Data = "digits→letters",
    model: Network | None = None,
    backbone: str = "small_cnn",
    folder: Path = Path("runs/transfer"),
    workers: int | None = None,
    **options: Any,
) -> str:
    """Train on a few target labels from every start and from scratch, and report which start helps.

    With ``starts``, they are checkpoints of your own, for your own module and data. Without, they
    are made here: a backbone is pretrained on a source beside unlabelled target inputs, and
    fine-tuned on the target.

    Args:
        data: With ``starts``: import path of your LightningDataModule, whose arguments follow,
            ``--data.batch_size 32``; or ``digits``, ``letters``, or an npz file.
            Without: source and target with → or -> between them, each such a name or path; or
            ``lightning_taskinfo.transfer.TransferDataModule`` and its arguments.
        model: With ``starts``: import path of your LightningModule, such as ``my_package.Net``; its
            arguments follow, ``--model.width 64``.
        backbone: Without ``starts``: mlp, small_cnn, or the import path of a function that makes a
            network for an image shape.
        folder: Folder of everything that is written. A run that was killed goes on from it.
        workers: Processes that share the work; as many as there are cores where not given, 0 for
            none.
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
    report = run_transfer(trained, samples, folder=folder, workers=workers, **options)
    files = report.save(folder / "report")
    lines = [report.to_terminal(), "", f"Report:      {files['report.md']}"]
    logger = options["logger"]
    if logger != "none":
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
