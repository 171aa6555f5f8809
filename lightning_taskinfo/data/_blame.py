"""Errors about a name, told of the argument that held it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_of(argument: str) -> Iterator[None]:
    """Let what loads a task by its name complain about ``argument``, where the user wrote that name.

    Example:
        >>> with told_of("tasks"):
        ...     raise ValueError("`name` must be digits or letters, got 'digit'.")
        Traceback (most recent call last):
        ValueError: `tasks` must be digits or letters, got 'digit'.
    """
    try:
        yield
    except (FileNotFoundError, ValueError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        text = re.sub("^`(path|folder|name)`", f"`{argument}`", str(error))
        raise kind(re.sub("^`variant`", f"A variant in `{argument}`", text)) from None
