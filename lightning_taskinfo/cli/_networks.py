"""Networks by import path, with weights from files that are read without running anything in them."""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_taskinfo.cli._preparation import stated_error


class Networks(NamedTuple):
    """A trained network and its start.

    Attributes:
        trained: The network with its trained weights.
        start: With those at the centre of a prior; ``None`` where no file was given.
        arguments: What both were made with.
        error: Name and value of the error that the checkpoint states, if it does.
    """

    trained: nn.Module
    start: nn.Module | None
    arguments: dict[str, Any]
    error: tuple[str, float] | None


def load_networks(
    path: str, arguments: dict[str, Any] | None, checkpoint: Path, start: Path | None
) -> Networks:
    """Return a network with the weights of ``checkpoint``, and one with those of ``start``, if that is a file.

    Args:
        path: Import path of a class, or of a function that returns the network.
        arguments: What to call it with; what Lightning kept in ``checkpoint``, where not given.
        checkpoint: A Lightning checkpoint or a state dict.
        start: Another one, for the centre of a prior.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If one is damaged, does not fit or holds NaN, or the network cannot be made.
    """
    kept = read_checkpoint("checkpoint", checkpoint)
    arguments = kept.arguments if arguments is None else arguments
    trained = filled(build(path, arguments), kept.state, "checkpoint", checkpoint)
    center = None
    if start is not None:
        state = read_checkpoint("prior_checkpoint", start).state
        center = filled(build(path, arguments), state, "prior_checkpoint", start)
    return Networks(trained, center, arguments, kept.error)


@contextmanager
def current_folder_imported() -> Iterator[None]:
    """Let modules of the current folder be imported, by processes too that are started meanwhile.

    A console script does not look there by itself.
    """
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def find(path: str) -> Any:
    """Return what an import path names.

    Raises:
        AttributeError, ImportError or ValueError: If there is no such thing.
    """
    module, _, name = path.rpartition(".")
    with current_folder_imported():
        return getattr(importlib.import_module(module), name)


def build(path: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Import and make a network."""
    try:
        factory = find(path)
    except (AttributeError, ImportError, ValueError) as error:
        reason = error if "." in path else f"no dot in it: module.{path}"
        raise ValueError(
            f"`model` must be the import path of a class or function, got {path!r} ({reason})."
        ) from error
    try:
        model = factory(**arguments)
    except TypeError as error:
        raise ValueError(
            f"`model_args` must be arguments of {path}, got {dict(arguments)} ({error})."
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"`model` must make a torch module, got {type(model).__name__} from {path!r}."
        )
    return model


class Checkpoint(NamedTuple):
    """The tensors of a checkpoint, and what Lightning keeps beside them: arguments, and an error it was kept for."""

    state: dict[str, Tensor]
    arguments: dict[str, Any]
    error: tuple[str, float] | None


def read_checkpoint(argument: str, path: Path) -> Checkpoint:
    """Return what a checkpoint or a file of a state dict holds."""
    if not path.is_file():
        raise FileNotFoundError(f"`{argument}` must be a file, but there is none at {path}.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (EOFError, KeyError, RuntimeError, UnpicklingError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        rule = "a Lightning checkpoint or a whole file of `model.state_dict()`, not of the model itself"
        raise ValueError(f"`{argument}` must be {rule}, got {path} ({reason}).") from error
    kept = content.get("hyper_parameters", {}) if isinstance(content, Mapping) else {}
    state = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(state, Mapping) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        raise ValueError(
            f"`{argument}` must hold a Lightning checkpoint or a state dict, got {path} with neither."
        )
    arguments = {key: value for key, value in kept.items() if not key.startswith("_")}
    return Checkpoint(dict(state), arguments, stated_error(content))


def filled(model: nn.Module, state: dict[str, Tensor], argument: str, path: Path) -> nn.Module:
    """Put the weights into the model; the state may be that of a module which holds it."""
    names = list(model.state_dict())
    prefixes = (
        {key.removesuffix(names[0]) for key in state if key.endswith(names[0])} if names else {""}
    )
    fitting = [
        p
        for p in prefixes
        if {key for key in state if key.startswith(p)} == {p + name for name in names}
    ]
    prefix = fitting[0] if len(fitting) == 1 else ""
    try:
        model.load_state_dict(
            {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}
        )
    except RuntimeError as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()[1:])
        raise ValueError(
            f"`{argument}` must hold the weights of the model, got {path}: {reason}"
        ) from error
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(
                f"`{argument}` must hold finite weights, got {path} with NaN or infinity in {name!r}."
            )
    return model


@torch.no_grad()
def check_outputs(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """See on two samples that the network takes these inputs and knows these classes."""
    if not len(inputs):
        return  # refused for its number
    shape = list(inputs[:2].shape)
    try:
        outputs = model.eval()(inputs[:2])
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"`model` must take inputs of shape {shape} ({reason}); `flatten` makes vectors of images, and `size` is "
            "that of the embedded ones."
        ) from error
    if (
        not isinstance(outputs, Tensor)
        or outputs.ndim != 2
        or outputs.shape[1] <= int(targets.max())
    ):
        got = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"`model` must return scores [N, C] for classes up to {int(targets.max())}, got {got} for inputs {shape}; "
            "`classes` groups labels."
        )
