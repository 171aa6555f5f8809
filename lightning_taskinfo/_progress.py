"""How far a long call is: a bar where somebody looks, or a function of the user's."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

Progress: TypeAlias = Callable[[int, int, str], None]
Item = TypeVar("Item")
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"  # how many a second says nothing here


@contextmanager
def shown(progress: Progress | bool, title: str, total: int) -> Iterator[Progress]:
    """Yield what is to be called with the number done, the total and a label; a new total starts the bar anew.

    Args:
        progress: ``True`` for a bar on standard error if that is a terminal or a notebook,
            ``False`` for nothing, or the function itself.
        title: What is going on.
        total: How much there is to do, at first.

    Example:
        >>> with shown(lambda done, total, label: print(f"{label} {done}/{total}"), "demo", 2) as tell:
        ...     tell(1, 2, "letters")
        letters 1/2
    """
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress or not visible():
        yield silent
        return
    from tqdm.auto import tqdm

    with tqdm(desc=title, total=total, leave=False, dynamic_ncols=True, bar_format=BAR) as drawn:

        def update(done: int, total: int, label: str) -> None:
            if total != drawn.total:
                drawn.reset(total)
            # A new label is shown at once, however short its work is.
            if drawn.desc != f"{title} {label}: ":
                drawn.set_description(f"{title} {label}")
            drawn.update(done - drawn.n)

        yield update


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
