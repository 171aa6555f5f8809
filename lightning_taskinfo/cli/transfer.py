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

from lightning_taskinfo.cli._networks import current_folder_imported, find
from lightning_taskinfo.transfer import BACKBONES, Stages, TransferDataModule, TransferReport
from lightning_taskinfo.transfer import transfer as run_transfer
from lightning_taskinfo.transfer.logs import LoggerKind
from lightning_taskinfo.transfer.run import group_name


def transfer(
    pair: str = "digits→letters",
    methods: tuple[str, ...] = ("standard", "lautum", "mutual_information"),
    labels: tuple[int, ...] = (50,),
    seeds: int = 3,
    model: str = "small_cnn",
    stages: Stages = Stages(),  # noqa: B008 - frozen
    weights: dict[str, float] | None = None,
    batch_size: int = 64,
    validation: int | None = None,
    max_source: int | None = None,
    max_unlabeled: int | None = None,
    data_dir: Path | None = None,
    folder: Path = Path("runs/transfer"),
    logger: LoggerKind = "csv",
    project: str = "lightning-taskinfo",
    name: str | None = None,
    workers: int | None = None,
    dask: str | None = None,
    accelerator: str = "cpu",
) -> str:
    """Pretrain on a source, fine-tune on a few target labels, compare with training from scratch, and report.

    Args:
        pair: Source and target with → or -> between them: digits, letters, names in the data folder, npz files or
            idx folders.
        methods: standard, temporal_ensembling, mk_mmd, lautum, mutual_information, information, local_minimum, or
            several of them with + between them.
        labels: Numbers of target labels.
        seeds: How many seeds; each decides split, initial weights and order.
        model: The backbone: mlp, small_cnn, large_cnn, resnet20, or the import path of a function that makes a network
            for an image shape, such as package.module.backbone; modules of the current folder are found too.
        stages: How long and how each stage trains.
        weights: Weights of the penalties by name, where not the default.
        batch_size: Samples in a labelled batch, and in an unlabelled one.
        validation: Target samples whose labels are looked at but never trained on.
        max_source: At most this many source samples.
        max_unlabeled: At most this many unlabelled target inputs.
        data_dir: Where names are looked up; TASKINFO_DATA_DIR where not given.
        folder: Folder of everything that is written. A run that was killed goes on from it.
        logger: Where each run logs its metrics.
        project: Project in Weights & Biases.
        name: What to call the experiment.
        workers: Processes that share the work; as many as there are cores where not given, 0 for none.
        dask: Address of a Dask scheduler whose workers share the work, on several machines; they need the folder
            of --folder as well, and one thread each.
        accelerator: Lightning's accelerator.

    Returns:
        The table, and where the report is.

    Raises:
        ValueError: If an argument is out of its domain, or the folder belongs to another configuration.
    """
    os.environ.setdefault("WANDB_SILENT", "true")  # many runs, one terminal
    source, target = _pair(pair)
    data = TransferDataModule(
        source,
        target,
        labels=max(labels, default=0),
        validation=validation,
        max_source=max_source,
        max_unlabeled=max_unlabeled,
        batch_size=batch_size,
        data_dir=data_dir,
    )
    with current_folder_imported(), _executor(dask) as executor:
        report = run_transfer(
            _backbone(model),
            data,
            methods=methods,
            labels=labels,
            seeds=seeds,
            stages=stages,
            weights=weights,
            folder=folder,
            logger=logger,
            project=project,
            name=name,
            executor=executor,
            workers=workers,
            accelerator=accelerator,
        )
    return _written(report, folder, logger, project)


def _written(report: TransferReport, folder: Path, logger: LoggerKind, project: str) -> str:
    """Save the report, give it to Weights & Biases, and say where everything is."""
    files = report.save(folder / "report")
    lines = [report.to_terminal(), "", f"Report:      {files['report.html']}"]
    if logger.startswith("wandb"):
        from lightning_taskinfo.transfer.logs import log_to_wandb

        mode: Literal["online", "offline"] = "offline" if logger == "wandb_offline" else "online"
        run = log_to_wandb(
            report,
            project=project,
            group=group_name(report.name, folder),
            mode=mode,
            folder=folder / "logs",
        )
        lines += (
            [f"Offline run: {run}", f"Look at it:  {_wandb()} leet {run}"]
            if mode == "offline"
            else [f"Run: {run}"]
        )
    return "\n".join(lines)


def _wandb() -> str:
    """How to call Weights & Biases from here: by its name, or else by the shorter path."""
    if shutil.which("wandb"):
        return "wandb"
    path = str(Path(sys.executable).with_name("wandb"))
    return min(
        os.path.join(os.path.relpath(os.path.dirname(path)), "wandb"), path, key=len
    )  # ./wandb, not a bare name


def _pair(pair: str) -> tuple[str, str]:
    parts = [part.strip() for part in re.split("→|->", pair)]
    if len(parts) != 2 or not all(parts):
        raise ValueError(
            f"`pair` must be a source and a target, like digits→letters, got {pair!r}."
        )
    return parts[0], parts[1]


def _backbone(name: str) -> Any:
    if name in BACKBONES:
        return name
    try:
        return find(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"`model` must be one of {', '.join(BACKBONES)} or a function's import path, got {name!r} ({error})."
        ) from error


@contextmanager
def _executor(address: str | None) -> Iterator[Executor | None]:
    if address is None:
        yield None
        return
    from distributed import Client

    with Client(address) as client:
        yield client.get_executor()
