"""What commands share: the networks, data and weights that users bring, tasks by name, and what is written."""

from abc import ABC
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_taskinfo._files import atomic_write, read_checkpoint
from lightning_taskinfo._lightning import NAMESPACES
from lightning_taskinfo._ranges import check_finite_tensors
from lightning_taskinfo._warn import reason_of
from lightning_taskinfo.certificates.samples import read_pair
from lightning_taskinfo.cli._parser import Maker, add_arguments, find, is_import_path
from lightning_taskinfo.data import load_task
from lightning_taskinfo.tasks import PreparedTask, prepare_task
from lightning_taskinfo.transfer.sampling import Loader, check_hooks, seeded


class Network:
    """A class or function, and what to call it with: called, it makes the network.

    Every call makes all of it anew, modules among the arguments too: no two networks share weights,
    and fresh weights depend on torch's random state alone.

    Args:
        maker: The class or function.
        arguments: What to call it with; classes in them are still specifications.
    """

    def __init__(self, maker: Maker, arguments: Mapping[str, Any]) -> None:
        self.maker = maker
        self.arguments = dict(arguments)

    def __call__(self) -> nn.Module:
        return made(nn.Module, self.maker, self.arguments, "model")


class DataModule(ABC):  # noqa: B024 - those of both namespaces are registered below
    """A LightningDataModule of either namespace."""


for _namespace in NAMESPACES.values():
    DataModule.register(_namespace.LightningDataModule)

Data = DataModule | str
Spec = dict[str, Any] | str  # a data module by class_path and init_args, or what Data may be
Tasks = list[Spec] | dict[str, Spec] | str
Part = Literal["train", "val", "test", "predict"]
STAGES = {"train": "fit", "val": "fit", "test": "test", "predict": "predict"}


def made(kind: type, maker: Maker, arguments: Mapping[str, Any], argument: str) -> Any:
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
        raise ValueError(
            f"`{argument}` must be made from its arguments, but {path_of(maker)} failed ({reason_of(error)})."
        ) from error
    if not isinstance(found, kind):
        raise ValueError(
            f"`{argument}` must make a {kind.__name__}, got {type(found).__name__} from {path_of(maker)}."
        )
    return found


def path_of(maker: Maker) -> str:
    """Return the import path of a class or function."""
    return f"{maker.__module__}.{maker.__qualname__}"


def read_part(data: Data, part: Part) -> Loader:
    """Return the loader of a part of the data.

    Args:
        data: A data module; or a name or an npz file, whose images lie in [0, 1].
        part: Which part.

    Raises:
        ValueError: If the data has no such part.
    """
    if not isinstance(data, str):
        return _loader(data, part)
    if part not in ("train", "test"):
        raise ValueError(f"`data` must be a data module to have a part {part!r}, got {data!r}.")
    return DataLoader(getattr(load_task(data), part)(), batch_size=256)


def _loader(data: Any, part: Part) -> Loader:
    kind = type(data).__name__
    check_hooks(data)
    rule = f"`data` must have a {part}_dataloader"
    try:
        with seeded(0):  # or parts that are split at random would overlap
            data.prepare_data()
            data.setup(STAGES[part])
            loader = getattr(data, f"{part}_dataloader")()
    except Exception as error:  # of the user's own code
        raise ValueError(f"{rule}, but {kind}'s failed ({reason_of(error)}).") from error
    if not isinstance(loader, DataLoader):
        raise ValueError(f"{rule} that returns one DataLoader, got {type(loader).__name__}.")
    return loader


def started(model: Network, checkpoint: Path | None, argument: str = "checkpoint") -> nn.Module:
    """Return a network, with the weights of a checkpoint if there is one."""
    network = model()
    if checkpoint is None:
        return network
    state = read_checkpoint(argument, checkpoint).state
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()[1:])
        raise ValueError(
            f"`{argument}` must hold the weights of the model, got {checkpoint}: {reason}"
        ) from error
    check_finite_tensors(argument, network.state_dict())
    return network


def named_tasks(tasks: Tasks | None, data: Data | None, default: Sequence[str]) -> dict[str, Data]:
    """Return the data of each task by its name.

    Args:
        tasks: Data, or data by name; unnamed data modules are called like their class.
        data: One task more.
        default: Tasks where neither is given.

    Raises:
        ValueError: If two have one name, or a data module cannot be made.
    """
    if isinstance(tasks, dict):
        named = [(name, _data(spec)) for name, spec in tasks.items()]
    else:
        unnamed = [tasks] if isinstance(tasks, str) else tasks or []
        named = [_called(_data(spec)) for spec in unnamed]
    if data is not None:
        named.append(_called(data))
    named = named or [_called(name) for name in default]
    found = dict(named)
    if len(found) < len(named):
        names = [name for name, _ in named]
        raise ValueError(
            f"`tasks` must have different names, got {names}; names are given as {{a: …, b: …}}."
        )
    return found


def _called(data: Data) -> tuple[str, Data]:
    return data if isinstance(data, str) else type(data).__name__, data


def _data(spec: Spec) -> Data:
    """Return the data that a user wrote down."""
    if isinstance(spec, str):
        if not is_import_path(spec):
            return spec
        spec = {"class_path": spec}
    maker = find(str(spec.get("class_path")), "tasks")
    return made(DataModule, maker, spec.get("init_args", {}), "tasks")


def prepared(
    tasks: Mapping[str, Data], *, max_samples: int, size: int, seed: int = 0
) -> dict[str, PreparedTask]:
    """Return the training samples of each task, shuffled, and at most so many of them.

    Args:
        tasks: Data modules, or names or paths of ready data, by name.
        max_samples: At most this many samples.
        size: Height and width of the embedded digits and letters.
        seed: Seed of the shuffling, and of random labels.
    """
    found = {}
    for name, data in tasks.items():
        if isinstance(data, str):
            found[name] = prepare_task(data, max_samples=max_samples, size=size, seed=seed)
            continue
        inputs, targets = read_pair(read_part(data, "train"), argument=f"tasks[{name!r}]")
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(targets), generator=generator)[:max_samples]
        classes = int(targets.max()) + 1
        found[name] = PreparedTask(name, inputs[order], targets[order], classes)
    return found


def draw(path: Path, drawn: Sequence[Any]) -> None:
    """Write the figure of ``(figure, axes)``, whose format is the suffix of the file."""
    with atomic_write(path) as file:
        drawn[0].savefig(file, format=path.suffix[1:], dpi=150)
