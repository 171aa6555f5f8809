"""How far a long call is: a bar where somebody looks, now and then a line elsewhere, or a function of the user's."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Progress = Callable[[int, int, str], None]
Item = TypeVar("Item")
PAUSE = 10.0  # seconds between two lines
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"  # how many a second says nothing here


@contextmanager
def shown(progress: Progress | bool, title: str, total: int) -> Iterator[Progress]:
    """Yield what is to be called with the number done, the total and a label.

    Args:
        progress: ``True`` for a bar on standard error if that is a terminal or a notebook, and
            otherwise for a line every ten seconds and a last one; ``False`` for nothing, or the function itself.
        title: What is going on.
        total: How much there is to do, at first.

    Example:
        >>> with shown(lambda done, total, label: print(f"{label} {done}/{total}"), "demo", 2) as tell:
        ...     tell(1, 2, "letters")
        letters 1/2
    """
    if not isinstance(progress, bool):
        yield progress
    elif not progress:
        yield silent
    elif visible():
        from tqdm.auto import tqdm

        with tqdm(desc=title, total=total, leave=False, dynamic_ncols=True, bar_format=BAR) as bar:

            def draw(done: int, total: int, label: str) -> None:
                if total != bar.total:
                    bar.reset(total)
                # A new label is shown at once, however short its work is.
                if bar.desc != f"{title} {label}: ":
                    bar.set_description(f"{title} {label}")
                bar.update(done - bar.n)

            yield draw
    else:
        last = time.monotonic()
        open_end = False  # whether the last line says that there is more to do

        def write(done: int, total: int, label: str) -> None:
            nonlocal last, open_end
            if time.monotonic() - last >= PAUSE or (open_end and done == total):
                last = time.monotonic()
                open_end = done < total
                sys.stderr.write(f"[{done}/{total}] {title} {label}\n")

        yield write


def counted(items: Iterable[Item], total: int, progress: Progress, label: str) -> Iterator[Item]:
    """Yield the items, and tell ``progress`` after each how many are done, of how many, and of what.

    Example:
        >>> list(counted("ab", 2, lambda done, total, label: print(f"{label} {done}/{total}"), "letters"))
        letters 1/2
        letters 2/2
        ['a', 'b']
    """
    for done, item in enumerate(items, 1):
        yield item
        progress(done, total, label)


def silent(done: int, total: int, label: str) -> None:
    """What is called where nobody wants to know."""


def visible() -> bool:
    """Whether somebody sees a bar on standard error: in a terminal or a notebook."""
    return sys.stderr.isatty()
