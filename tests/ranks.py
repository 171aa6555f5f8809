"""Run a function in another process, or in several that talk through gloo; forked, so that nothing is imported anew."""

import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import start_processes


def forked(function: Callable[..., Any], *args: Any, **options: Any) -> BaseProcess:
    """Start ``function(*args, **options)`` in a process of its own, and return that."""
    process = get_context("fork").Process(target=_alone, args=(function, args, options))
    process.start()
    return process


def _alone(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    torch.set_num_threads(1)  # the parent's threads do not survive a fork
    function(*args, **options)


def on_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """Return what ``function(rank, *args)`` returns on each of ``world_size`` forked processes."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            _run, (function, args, world_size, folder), nprocs=world_size, start_method="fork"
        )
        return [
            torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(world_size)
        ]


def _run(
    rank: int, function: Callable[..., Any], args: tuple[Any, ...], world_size: int, folder: str
) -> None:
    torch.set_num_threads(1)  # the parent's threads do not survive a fork
    store = distributed.FileStore(str(Path(folder, "store")), world_size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), Path(folder, f"{rank}.pt"))
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
