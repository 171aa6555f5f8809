"""Count what is done in a loop, for whoever wants to show it."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar

Progress: TypeAlias = Callable[[int, int, str], None]
Item = TypeVar("Item")


def counted(items: Iterable[Item], total: int, progress: Progress | None, label: str) -> Iterator[Item]:
    """Yield the items, and tell ``progress`` after each how many are done, of how many, and of what.

    Example:
        >>> list(counted("ab", 2, lambda done, total, label: print(f"{label} {done}/{total}"), "letters"))
        letters 1/2
        letters 2/2
        ['a', 'b']
    """
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, total, label)
