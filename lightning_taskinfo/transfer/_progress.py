"""How far a transfer is: by epochs, from the files that its trainings write, whichever process they run in."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_taskinfo._progress import Progress, bar, visible
from lightning_taskinfo.transfer.training import finished_epochs


@contextmanager
def following(
    cells: Sequence[Any], progress: Progress | bool, *, interval: float = 0.5
) -> Iterator[Callable[[Any, Any], None]]:
    """Yield what is to be called with each finished cell and its result.

    Args:
        cells: All there are.
        progress: ``True`` for a bar of epochs, or a line a training where nobody sees one; ``False``; or a function.
        interval: Seconds between two looks at the files, for a bar.
    """
    done: set[str] = set()
    if progress is True and visible():
        epochs = sum(cell.epochs for cell in cells)
        with bar("transfer", epochs) as draw, _looking(partial(_look, draw, cells, done, epochs), interval):
            yield lambda cell, result: done.add(cell.name)
        return
    tell = _write if progress is True else progress or _nothing

    def finished(cell: Any, result: Any) -> None:
        done.add(cell.name)
        tell(len(done), len(cells), cell.description)

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


def _look(draw: Progress, cells: Sequence[Any], done: set[str], epochs: int) -> None:
    """Show finished epochs, and what is running."""
    finished, running = 0, []
    for cell in cells:
        count = cell.epochs if cell.name in done else finished_epochs(cell.folder)
        finished += count
        if count and cell.name not in done:
            running.append(cell.description)
    draw(finished, epochs, " | ".join(running[:2]) or "starting")


def _write(done: int, total: int, label: str) -> None:
    sys.stderr.write(f"[{done}/{total}] {label}\n")


def _nothing(done: int, total: int, label: str) -> None:
    pass
