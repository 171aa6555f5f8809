"""Datasets by name, alone and as source and target, and the cache that keeps drawn data on disk."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning_taskinfo._warn import warn
from lightning_taskinfo.data.arrays import ArrayData
from lightning_taskinfo.data.digits import load_digits
from lightning_taskinfo.data.files import load_idx, load_npz, save_npz
from lightning_taskinfo.data.letters import load_letters

VERSION = 2  # part of every cache file's name: raise it when a loader's output changes
EMBEDDED: dict[str, Callable[..., ArrayData]] = {"digits": load_digits, "letters": load_letters}


def load_pair(
    name: str = "digits→letters",
    *,
    size: int = 28,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
) -> tuple[ArrayData, ArrayData]:
    """Return the source and the target of a transfer.

    Args:
        name: Source and target, each as in :func:`load_dataset`, with ``→`` or ``->`` between them.
        size: Height and width of the embedded digits and letters: 28, or 8.
        seed: Seed of the embedded digits' split and the letters' drawing.
        data_dir: Folder of further datasets; ``TASKINFO_DATA_DIR`` where not given.

    Raises:
        ValueError: If ``name`` is not a pair, or a part of it is neither embedded nor found.

    Example:
        >>> source, target = load_pair("digits->letters", size=8)
        >>> source.name, target.name
        ('digits 8×8', 'letters 8×8')
    """
    parts = [part.strip() for part in re.split("→|->", name)]
    if len(parts) != 2 or not all(parts):
        raise ValueError(
            f"`name` must be a source and a target, like 'digits→letters', got {name!r}."
        )
    source, target = (load_dataset(part, size=size, seed=seed, data_dir=data_dir) for part in parts)
    return source, target


def load_dataset(
    name: str | os.PathLike[str],
    *,
    size: int = 28,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
) -> ArrayData:
    """Return a dataset by its name.

    ``digits`` and ``letters`` need no files: they are made once and cached in
    ``TASKINFO_CACHE_DIR``, or in ``lightning_taskinfo`` below the user's cache folder. Any other
    name is a file ``<name>.npz`` or a folder ``<name>`` of idx files in ``data_dir``, or else the
    path of an npz file or of such a folder.

    Args:
        name: ``"digits"``, ``"letters"``, or the name or path of a file or folder.
        size: Height and width of the embedded digits and letters: 28, or 8.
        seed: Seed of the embedded digits' split and the letters' drawing.
        data_dir: Folder of further datasets; ``TASKINFO_DATA_DIR`` where not given.

    Raises:
        ValueError: If ``name`` is neither embedded nor found.
    """
    name = os.fspath(name)
    if name in EMBEDDED:
        arguments = {"size": size, "seed": seed}
        return cached(name, arguments, lambda: EMBEDDED[name](**arguments))
    folder = data_dir or os.environ.get("TASKINFO_DATA_DIR")
    if folder and Path(folder, f"{name}.npz").is_file():
        return load_npz(Path(folder, f"{name}.npz"))
    path = next(
        (path for path in (Path(folder or "", name), Path(name)) if path.exists()), Path(name)
    )
    if path.suffix == ".npz" and path.is_file():
        return load_npz(path)
    if name and path.is_dir():
        return load_idx(path)
    where = f"in {folder}" if folder else "as `data_dir` and TASKINFO_DATA_DIR are not set"
    if name.endswith(".npz"):
        where = f"in {folder} nor at this path" if folder else "at this path"
    near = "".join(f" Did you mean {other!r}?" for other in get_close_matches(name, EMBEDDED, n=1))
    raise ValueError(
        f"A dataset must be {' or '.join(EMBEDDED)} or name a file; {name!r} was not found {where}.{near}"
    )


def cache_dir() -> Path:
    """Return the folder of cached data: ``TASKINFO_CACHE_DIR``, else one below the user's cache folder."""
    if own := os.environ.get("TASKINFO_CACHE_DIR"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_taskinfo"


def cached(name: str, arguments: dict[str, Any], build: Callable[[], ArrayData]) -> ArrayData:
    """Return what ``build`` made when it was last called with these arguments, or call it and keep the result.

    A file that cannot be read is made anew, and a folder that cannot be written to costs a warning,
    not the data.

    Args:
        name: Name of what is built.
        arguments: All that the result depends on, in values that JSON knows.
        build: Makes the data.
    """
    key = json.dumps([VERSION, name, arguments], sort_keys=True)
    path = cache_dir() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    try:
        return load_npz(path)
    except (OSError, ValueError):  # not there, not readable, or broken by something else
        data = build()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_npz(path, data)
    except OSError as error:
        warn(f"The data is not cached: {error}")
    return data
