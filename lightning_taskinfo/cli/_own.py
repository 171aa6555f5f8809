"""What users bring: networks and data modules with their arguments, and weights from files."""

from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo._files import Checkpoint, read_checkpoint
from lightning_taskinfo._lightning import NAMESPACES
from lightning_taskinfo._warn import reason_of
from lightning_taskinfo.cli._parser import add_arguments
from lightning_taskinfo.data import load_task


class Network(ABC):  # noqa: B024 - torch modules are registered below
    """A class or function, and what to call it with: called, it makes the network.

    Every call makes all of it anew, modules among the arguments too: no two networks share weights,
    and fresh weights depend on torch's random state alone. Any torch module is registered as a
    subclass, so that a configuration file may name one.

    Args:
        maker: The class or function.
        arguments: What to call it with; classes in them are still specifications.
    """

    def __init__(self, maker: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.maker = maker
        self.arguments = dict(arguments)

    @property
    def name(self) -> str:
        """Its import path."""
        return path_of(self.maker)

    def __call__(self) -> nn.Module:
        model: nn.Module = made(nn.Module, self.maker, self.arguments, "model")
        return model


class DataModule(ABC):  # noqa: B024 - those of both namespaces are registered below
    """A LightningDataModule of either namespace."""


Network.register(nn.Module)
for _namespace in NAMESPACES.values():
    DataModule.register(_namespace.LightningDataModule)

Data: TypeAlias = DataModule | str
Part: TypeAlias = Literal["train", "val", "test", "predict"]
STAGES = {"train": "fit", "val": "fit", "test": "test", "predict": "predict"}


def made(kind: type, maker: Callable[..., Any], arguments: Mapping[str, Any], argument: str) -> Any:
    """Call a user's class or function, with classes among its arguments made first.

    Args:
        kind: What has to come out.
        maker: The class or function.
        arguments: What to call it with.
        argument: Option that named it, for messages.

    Raises:
        ValueError: If it fails, or makes something else.
    """
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    add_arguments(parser, maker, "made")
    try:
        parsed = parser.parse_object({"made": arguments} if arguments else {})
        ready = parser.instantiate(parsed)
        found = maker(**ready.get("made", {}))
    except Exception as error:  # of the user's own code
        reason = reason_of(error)
        raise ValueError(
            f"`{argument}` must be made from its arguments, but {path_of(maker)} failed ({reason})."
        ) from error
    if not isinstance(found, kind):
        raise ValueError(
            f"`{argument}` must make a {kind.__name__}, got {type(found).__name__} from {path_of(maker)}."
        )
    return found


def path_of(maker: Callable[..., Any]) -> str:
    """Return the import path of a class or function."""
    return f"{maker.__module__}.{maker.__qualname__}"


def read_part(data: Data, part: Part) -> DataLoader[Any]:
    """Return the loader of a part of the data.

    Args:
        data: A data module; or a name, an npz file or an idx folder, whose images lie in [0, 1] and
            whose targets are the labels of the file.
        part: Which part.

    Raises:
        ValueError: If the data has no such part.
    """
    if not isinstance(data, str):
        return _loader(data, part)
    if part not in ("train", "test"):
        raise ValueError(f"`data` must be a data module to have a part {part!r}, got {data!r}.")
    task = load_task(data)
    samples = task.train() if part == "train" else task.test()
    images, targets = samples.tensors
    if task.labels is not None:  # a network's outputs belong to the labels of the file
        targets = torch.tensor(task.labels)[targets]
    return DataLoader(TensorDataset(images, targets), batch_size=256)


def has_part(data: Any, part: Part) -> bool:
    """Whether a data module has a loader of its own for a part."""
    method = getattr(type(data), f"{part}_dataloader", None)
    return method is not None and not method.__module__.startswith(tuple(NAMESPACES))


def _loader(data: Any, part: Part) -> DataLoader[Any]:
    kind = type(data).__name__
    if not has_part(data, part):
        raise ValueError(f"`data` must have a {part}_dataloader, got {kind} without.")
    try:
        data.prepare_data()
        data.setup(STAGES[part])
        loader = getattr(data, f"{part}_dataloader")()
    except Exception as error:  # of the user's own code
        reason = reason_of(error)
        raise ValueError(
            f"`data` must have a {part}_dataloader, but {kind}'s failed ({reason})."
        ) from error
    if not isinstance(loader, DataLoader):
        got = type(loader).__name__
        raise ValueError(f"`data` must return one DataLoader from {part}_dataloader, got {got}.")
    return loader


def fitting(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the part of a state that has these names, where it is that of a module which holds the network.

    Example:
        >>> weight = torch.zeros(2)
        >>> fitting({"net.bias": weight, "metric.total": weight}, ["bias"]) == {"bias": weight}
        True
    """
    wanted = list(names)
    places = set()  # of the network in the module
    if wanted:
        first = wanted[0]
        places = {key.removesuffix(first) for key in state if key.endswith(first)}
    fits = []
    for place in places:
        inside = [key for key in state if key.startswith(place)]
        part = {key.removeprefix(place): state[key] for key in inside}
        if part.keys() == set(wanted):
            fits.append(part)
    return fits[0] if len(fits) == 1 else dict(state)  # of two that fit, neither is the one


def with_weights(model: nn.Module, checkpoint: Checkpoint, argument: str, path: Path) -> nn.Module:
    """Put the weights of a checkpoint into a network, and return it."""
    try:
        model.load_state_dict(fitting(checkpoint.state, model.state_dict()))
    except RuntimeError as error:
        lines = str(error).splitlines()[1:]
        reason = "; ".join(line.strip() for line in lines)
        raise ValueError(
            f"`{argument}` must hold the weights of the model, got {path}: {reason}"
        ) from error
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(
                f"`{argument}` must hold finite weights, got {path} with NaN or infinity in {name!r}."
            )
    return model


def started(model: Network, checkpoint: Path | None, argument: str = "checkpoint") -> nn.Module:
    """Return a network, with the weights of a checkpoint if there is one."""
    if checkpoint is None:
        return model()
    return with_weights(model(), read_checkpoint(argument, checkpoint), argument, checkpoint)
