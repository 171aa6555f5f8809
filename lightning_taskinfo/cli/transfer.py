"""``taskinfo transfer``."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from lightning_taskinfo.cli._own import Data, Network
from lightning_taskinfo.cli._parser import find, is_import_path
from lightning_taskinfo.data import load_task
from lightning_taskinfo.transfer import TransferDataModule, TransferReport, group_name, log_to_wandb
from lightning_taskinfo.transfer import transfer as run_transfer
from lightning_taskinfo.transfer.training import LoggerKind


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
        backbone: Without ``starts``: mlp, small_cnn, large_cnn, resnet20, or the import path of a
            function that makes a network for an image shape.
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
        if model is None:
            given, missing = "starts", "model"
        else:
            given, missing = "model", "starts"
        raise ValueError(f"`{missing}` must be given with `{given}`, got None.")
    trained: Any = model
    samples: Any = data
    if model is None:
        trained = find(backbone, "backbone") if is_import_path(backbone) else backbone
        samples = _ready(data)
    elif isinstance(data, str):
        samples = load_task(data)
    with _executor(dask) as executor:
        report = run_transfer(
            trained,
            samples,
            folder=folder,
            logger=logger,
            executor=executor,
            workers=workers,
            **options,
        )
    project = options["project"]  # not in the call: it would be taken for where options go
    return _written(report, folder, logger, project)


def _ready(data: Data) -> Any:
    if not isinstance(data, str):
        return data
    parts = [part.strip() for part in re.split("→|->", data)]
    if len(parts) != 2 or not all(parts):
        raise ValueError(
            f"`data` must be a source and a target, like digits→letters, where there are no `starts`, got {data!r}."
        )
    return TransferDataModule(*parts)


def _written(report: TransferReport, folder: Path, logger: LoggerKind, project: str) -> str:
    """Save the report, give it to Weights & Biases, and say where everything is."""
    files = report.save(folder / "report")
    lines = [report.to_terminal(), "", f"Report:      {files['report.html']}"]
    if logger.startswith("wandb"):
        mode: Literal["online", "offline"] = "offline" if logger == "wandb_offline" else "online"
        run = log_to_wandb(
            report,
            project=project,
            group=group_name(report.name, folder),
            mode=mode,
            folder=folder / "logs",
        )
        if mode == "offline":
            lines += [f"Offline run: {run}", f"Look at it:  {_wandb()} leet {run}"]
        else:
            lines.append(f"Run: {run}")
    return "\n".join(lines)


def _wandb() -> str:
    """How to call Weights & Biases from here: by its name, or else by the shorter path."""
    if shutil.which("wandb"):
        return "wandb"
    path = str(Path(sys.executable).with_name("wandb"))
    folder = os.path.relpath(os.path.dirname(path))
    relative = os.path.join(folder, "wandb")  # ./wandb, not a bare name
    return min(relative, path, key=len)


@contextmanager
def _executor(address: str | None) -> Iterator[Executor | None]:
    if address is None:
        yield None
        return
    from distributed import Client

    with Client(address) as client:
        yield client.get_executor()
