"""Files that are whole or not there: written beside their place, flushed to the disk, and moved into it."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Give a file to write to that takes the place of ``path`` when the block ends, and not before.

    A process killed meanwhile, or an exception in the block, leaves what was there. The name of the unfinished file
    begins with that of ``path`` and ends in ``.tmp``; one that a killed process left behind does no harm.

    Args:
        path: The file to write or replace; its folder must exist.
        mode: ``"wb"`` for bytes, ``"w"`` for UTF-8 text.

    Yields:
        The open file.
    """
    path = Path(path)
    encoding = None if "b" in mode else "utf-8"
    file = NamedTemporaryFile(  # noqa: SIM115
        mode, encoding=encoding, dir=path.parent, prefix=f"{path.name}.", suffix=".tmp", delete=False
    )
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(file.name, 0o666 & ~_umask())  # a temporary file is its owner's alone
        os.replace(file.name, path)
    except BaseException:
        Path(file.name).unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as JSON, atomically; numbers come back bit for bit."""
    text = json.dumps(value, indent=1, ensure_ascii=False)  # before the file is touched: it may fail
    with atomic_write(path, "w") as file:
        file.write(text + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return what :func:`write_json` wrote.

    Raises:
        ValueError: If the file is damaged; it is named, and left as it is.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable JSON file ({error}); delete it to compute it again.") from error


def make_folder(folder: str | os.PathLike[str], *, argument: str = "folder") -> Path:
    """Make ``folder`` where it is missing, with the folders above it.

    Args:
        folder: The folder.
        argument: What the caller calls it, for the message.

    Raises:
        ValueError: If it is a file, or below one.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next(path for path in (folder, *folder.parents) if path.exists())
        raise ValueError(f"`{argument}` must be a folder, got the file {file}.") from error
    return folder


def claim_folder(folder: str | os.PathLike[str], configuration: Mapping[str, Any], *, argument: str = "folder") -> None:
    """Make ``folder`` the place of one configuration, or see that it is: results of two are never mixed.

    Args:
        folder: Made where missing. What it holds of the same configuration is good to continue from.
        configuration: What decides the results, as JSON-like values.
        argument: What the caller calls the folder, for the message.

    Raises:
        ValueError: If the folder is a file, or belongs to another configuration; the message lists what differs.
    """
    path = make_folder(folder, argument=argument) / "configuration.json"
    mine = json.loads(json.dumps(configuration))  # tuples as lists, as they will be read
    if not path.exists():
        write_json(path, mine)
    elif changes := _differences(read_json(path), mine):
        raise ValueError(
            f"`{argument}` must be new or of the same configuration; {folder} was begun with another:\n"
            + "\n".join(f"  {line}" for line in changes)
        )


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    """One line for every leaf of nested dicts that is not the same in both."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [
            line
            for key in keys
            for line in _differences(old.get(key, "(not set)"), new.get(key, "(not set)"), f"{name}.{key}".lstrip("."))
        ]
    return [] if old == new else [f"{name}: {old} there, {new} now"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
