"""What a long command shows while it runs: a bar with the time left in a terminal, a line a result elsewhere."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from lightning_taskinfo.transfer.stages import Cell
from lightning_taskinfo.transfer.training import finished_epochs


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Give a function of finished, total and label that draws a bar on standard error, if that is a terminal.

    Args:
        title: What is going on.

    Yields:
        The function.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(title, total=None)
        shown = ""

        def update(done: int, total: int, label: str) -> None:
            nonlocal shown
            new, shown = label != shown, label  # a new label is shown at once, however short its work is
            bars.update(bar, completed=done, total=total, description=f"{title} {label}", refresh=new)

        yield update


class TransferProgress:
    """Follows the cells of a transfer through the files that they write after every epoch.

    Args:
        interval: Seconds between two looks.
    """

    def __init__(self, *, interval: float = 0.5) -> None:
        self.interval = interval
        self.cells: list[Cell] = []
        self.done_names: set[str] = set()
        self._bar: Any = None
        self._task: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "TransferProgress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
            self._bar = Progress(*columns, console=Console(stderr=True), speed_estimate_period=600)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    def plan(self, cells: Sequence[Cell]) -> None:
        """Take up what there is to do."""
        self.cells = list(cells)
        if self._bar is not None:
            self._task = self._bar.add_task("starting", total=sum(_epochs(cell) for cell in cells))
            self._thread.start()

    def done(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Take note of a finished cell."""
        self.done_names.add(cell.name)
        if self._bar is None:
            sys.stderr.write(f"[{len(self.done_names)}/{len(self.cells)}] {describe(cell)}\n")

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            epochs, running = 0, []
            for cell in self.cells:
                finished = _epochs(cell) if cell.name in self.done_names else finished_epochs(cell.folder)
                epochs += finished
                if finished and cell.name not in self.done_names:
                    running.append(describe(cell))
            self._bar.update(self._task, completed=epochs, description=" | ".join(running[:2]) or "starting")


def describe(cell: Cell) -> str:
    """Return what a cell is, in words."""
    if cell.stage == "pretrain":
        return cell.name.replace("-", " ").replace("seed", "seed ")
    what = "from scratch" if cell.stage == "scratch" else f"fine-tune {cell.method}"
    return f"{what}, {cell.labels} labels, seed {cell.seed}"


def _epochs(cell: Cell) -> int:
    return cell.experiment.stages.epochs(cell.stage)
