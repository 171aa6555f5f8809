"""How far a transfer is: by epochs, from the files that its trainings write, whichever process they run in."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_taskinfo._progress import Progress, bar, visible
from lightning_taskinfo.transfer.stages import Cell
from lightning_taskinfo.transfer.training import finished_epochs


@contextmanager
def following(
    cells: Sequence[Cell], progress: Progress | bool, *, interval: float = 0.5
) -> Iterator[Callable[[Cell, Any], None]]:
    """Yield what is to be called with each finished cell and its result.

    Args:
        cells: All there are.
        progress: ``True`` for a bar of epochs, or a line a training where nobody sees one; ``False``; or a function.
        interval: Seconds between two looks at the files, for a bar.
    """
    done: set[str] = set()
    if progress is True and visible():
        epochs = sum(_epochs(cell) for cell in cells)
        with bar("transfer", epochs) as draw, _looking(partial(_look, draw, cells, done, epochs), interval):
            yield lambda cell, result: done.add(cell.name)
        return
    tell = _write if progress is True else progress or _nothing

    def finished(cell: Cell, result: Any) -> None:
        done.add(cell.name)
        tell(len(done), len(cells), describe(cell))

    yield finished


@contextmanager
def _looking(look: Callable[[], None], interval: float) -> Iterator[None]:
    """Call a function again and again in a thread, until the block is left."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(interval):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _look(draw: Progress, cells: Sequence[Cell], done: set[str], epochs: int) -> None:
    """Show finished epochs, and what is running."""
    finished, running = 0, []
    for cell in cells:
        count = _epochs(cell) if cell.name in done else finished_epochs(cell.folder)
        finished += count
        if count and cell.name not in done:
            running.append(describe(cell))
    draw(finished, epochs, " | ".join(running[:2]) or "starting")


def _write(done: int, total: int, label: str) -> None:
    sys.stderr.write(f"[{done}/{total}] {label}\n")


def _nothing(done: int, total: int, label: str) -> None:
    pass


def describe(cell: Cell) -> str:
    """Return what a cell is, in words."""
    if cell.stage == "pretrain":
        return cell.name.replace("-", " ").replace("seed", "seed ")
    what = "from scratch" if cell.stage == "scratch" else f"fine-tune {cell.method}"
    return f"{what}, {cell.labels} labels, seed {cell.seed}"


def _epochs(cell: Cell) -> int:
    return cell.experiment.stages.epochs(cell.stage)
