"""Weights by name in a file: the one reader of Lightning checkpoints and saved state dicts."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Checkpoint(NamedTuple):
    """The tensors of a file, and what Lightning keeps beside them."""

    state: dict[str, Tensor]
    content: Mapping[str, Any]


def read_checkpoint(argument: str, path: str | PathLike[str]) -> Checkpoint:
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
        content = _content(path)
    except Exception as error:  # of a kind of its own for every kind of damage
        # Not torch's own words: they recommend to run whatever the file says.
        kind = type(error).__name__
        raise ValueError(f"{rule}, not of a whole model, got {path} ({kind}).") from error
    if not isinstance(content, Mapping):
        content = {"state_dict": content}
    state = content.get("state_dict", content)
    tensors = {}
    if isinstance(state, Mapping):
        for name, value in state.items():
            if isinstance(value, Tensor):  # a module may keep other things among its weights
                tensors[str(name)] = value
    if not tensors:
        raise ValueError(f"{rule}, got {path} without tensors by name.")
    return Checkpoint(tensors, content)


def _content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)
