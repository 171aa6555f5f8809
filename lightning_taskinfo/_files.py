"""Files that are whole or not there: written beside their place, flushed to the disk, and moved into it."""

import glob
import hashlib
import json
import os
import platform
import re
import time
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

StrPath = str | os.PathLike[str]
DAY = 86_400  # seconds


@contextmanager
def atomic_write(path: StrPath, mode: str = "wb") -> Iterator[IO[Any]]:
    """Give a file to write to that takes the place of ``path`` when the block ends, and not before.

    A process killed meanwhile, or an exception in the block, leaves what was there. What a killed
    process left half-written is removed by the next one that writes the same file.

    Args:
        path: The file to write or replace; its folder is made where it is missing.
        mode: ``"wb"`` for bytes, ``"w"`` for UTF-8 text.

    Yields:
        The open file.
    """
    encoding = None if "b" in mode else "utf-8"
    with atomic_path(path) as beside, beside.open(mode, encoding=encoding) as file:
        yield file


@contextmanager
def atomic_path(path: StrPath) -> Iterator[Path]:
    """Give a path beside ``path`` for a file that takes its place when the block ends; see :func:`atomic_write`.

    The name of the unfinished file begins with that of ``path``, says which process writes it, and
    ends in ``.tmp``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in path.parent.glob(f"{glob.escape(path.name)}.*.*.*.tmp"):
        if _is_abandoned(other):
            other.unlink(missing_ok=True)
    unique = uuid.uuid4().hex[:8]
    beside = path.with_name(f"{path.name}.{_host()}.{os.getpid()}.{unique}.tmp")
    try:
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _is_abandoned(file: Path) -> bool:
    """Whether a process that is no more has left an unfinished file; those of other machines after a day."""
    _, host, process, _, _ = file.name.rsplit(".", 4)
    try:
        if host != _host() or os.name != "posix":
            return time.time() - file.stat().st_mtime > DAY
        os.kill(int(process), 0)  # which only asks for it
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # another user's, or ready now, or no file of ours
        pass
    return False


def _host() -> str:
    return re.sub(r"\W", "-", platform.node())


def write_json(path: StrPath, value: Any) -> None:
    """Write ``value`` as JSON, atomically; numbers come back bit for bit."""
    # Before the file is touched: it may fail.
    text = json.dumps(value, indent=1, ensure_ascii=False)
    with atomic_write(path, "w") as file:
        file.write(text + "\n")


def read_json(path: StrPath) -> Any:
    """Return what :func:`write_json` wrote.

    Raises:
        ValueError: If the file is damaged; it is named, and left as it is.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # of its letters or its JSON
        raise ValueError(f"{path}: not a readable JSON file ({error}).") from error


def write_result(path: StrPath, result: Any) -> None:
    """Write a result as JSON with a checksum beside it, atomically."""
    write_json(path, {"result": result, "sha256": _checksum(result)})


def read_result(path: StrPath) -> Any:
    """Return what :func:`write_result` wrote.

    Raises:
        ValueError: If that is not what the file holds; it is named, and left as it is.
    """
    try:
        kept = read_json(path)
        whole = kept["sha256"] == _checksum(kept["result"])
    except (KeyError, TypeError, ValueError):  # it holds something else
        whole = False
    if not whole:
        raise ValueError(
            f"{path}: not as it was written, its checksum differs. Delete it to compute it again."
        )
    return kept["result"]


def _checksum(value: Any) -> str:
    read = json.loads(json.dumps(value))  # numbers as keys are strings then
    text = json.dumps(read, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest(named: Iterable[tuple[str, Any]]) -> str:
    """Return a short fingerprint of tensors: their names, types, shapes and values; of others only the name.

    Args:
        named: Pairs of a name and a tensor.
    """
    total = hashlib.sha256()
    for name, tensor in named:
        total.update(name.encode())
        if isinstance(tensor, Tensor):
            values = tensor.detach().cpu().contiguous()
            total.update(f"{values.dtype} {list(values.shape)}".encode())
            raw = values.reshape(-1).view(torch.uint8)
            total.update(raw.numpy().data)
    return total.hexdigest()[:16]


def write_tensors(path: StrPath, content: Any) -> None:
    """Write tensors and plain values by ``torch.save``, atomically."""
    with atomic_write(path) as file:
        torch.save(content, file)


def read_tensors(path: StrPath, *, advice: str = "") -> Any:
    """Return tensors and plain values that ``torch.save`` wrote, on the processor; nothing in the file is run.

    Args:
        path: The file.
        advice: What to do about a damaged file, for the message.

    Raises:
        ValueError: If the file is damaged, or holds anything else.
    """
    check_archive(path, advice=advice)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has a different one for everything that it does not expect
        raise ValueError(
            f"{path}: it holds something else than tensors and plain values. {advice}"
        ) from error


def check_archive(path: StrPath, *, advice: str = "") -> None:
    """Verify the checksums in a file of ``torch.save``: a zip archive with one for each part, which torch ignores.

    Args:
        path: The file.
        advice: What to do about a damaged file, for the message.

    Raises:
        ValueError: If the file is damaged.
    """
    with open(path, "rb") as file:
        try:
            damaged = zipfile.ZipFile(file).testzip()
        except Exception as error:  # zip and zlib have a different one for every kind of damage
            damaged = type(error).__name__
    if damaged is not None:
        raise ValueError(
            f"{path}: not as it was written, a checksum differs or a part is missing ({damaged}). {advice}"
        )


class Checkpoint(NamedTuple):
    """The tensors of a file, and what Lightning keeps beside them."""

    state: dict[str, Tensor]
    content: Mapping[str, Any]


def read_checkpoint(argument: str, path: StrPath) -> Checkpoint:
    """Return what a Lightning checkpoint or a file of a state dict holds; nothing in it is run.

    Args:
        argument: What the file was given for, for the message.
        path: The file, of Lightning, ``torch.save`` or safetensors.

    Raises:
        ValueError: If there is no such file, if it is damaged, or if it holds anything else.
    """
    rule = f"`{argument}` must be the file of a Lightning checkpoint or a state dict"
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{rule}, but there is none at {path}.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a kind of its own for every kind of damage
        # Not torch's own words: they recommend to run whatever the file says.
        kind = type(error).__name__
        raise ValueError(f"{rule}, not of a whole model, got {path} ({kind}).") from error
    if not isinstance(content, Mapping):
        content = {}
    state = content.get("state_dict", content)
    tensors = {}
    if isinstance(state, Mapping):
        for name, value in state.items():
            if isinstance(value, Tensor):  # a module may keep other things among its weights
                tensors[str(name)] = value
    if not tensors:
        raise ValueError(f"{rule}, got {path} without tensors by name.")
    return Checkpoint(tensors, content)


def make_folder(folder: StrPath) -> Path:
    """Make ``folder`` where it is missing, with the folders above it.

    Args:
        folder: The folder.

    Raises:
        ValueError: If it is a file, or below one.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        above = (folder, *folder.parents)
        file = next(path for path in above if path.exists())
        raise ValueError(f"`folder` must be a folder, got the file {file}.") from error
    return folder


def claim_folder(
    folder: StrPath,
    configuration: Mapping[str, Any],
    *,
    results: Sequence[str] = (),
) -> None:
    """Make ``folder`` the place of one configuration, or see that it is: results of two are never mixed.

    Args:
        folder: Made where missing. What it holds of the same configuration is good to continue
            from.
        configuration: What decides the results, as JSON-like values.
        results: Patterns of names that results have there: a folder that has some, but lost the
            configuration they belong to, is refused.

    Raises:
        ValueError: If the folder is a file, belongs to another configuration (the message lists
            what differs), or holds results of an unknown one.
    """
    path = make_folder(folder) / "configuration.json"
    mine = json.loads(json.dumps(configuration))  # tuples as lists, as they will be read
    if path.exists():
        changes = _differences(read_json(path), mine)
        if changes:
            raise ValueError(
                f"`folder` must be new or of the same configuration; {folder} was begun with another:"
                + "".join(f"\n  {line}" for line in changes)
            )
        return
    for pattern in results:
        for file in path.parent.glob(pattern):
            raise ValueError(
                f"`folder` must be new or have its configuration.json; {folder} has none, but results such as "
                f"{file.relative_to(path.parent)}, which may belong to another one. Take a new folder."
            )
    write_json(path, mine)


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    """One line for every leaf of nested dicts that is not the same in both."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in {**old, **new}:
            before = old.get(key, "(not set)")
            now = new.get(key, "(not set)")
            lines += _differences(before, now, f"{name}.{key}".lstrip("."))
        return lines
    return [] if old == new else [f"{name}: {old} there, {new} now"]
