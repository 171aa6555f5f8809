"""Tasks by name: of users' own data modules, or made of ready data."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Generator

from lightning_taskinfo.certificates.samples import read_pair
from lightning_taskinfo.cli._own import Data, read_part
from lightning_taskinfo.tasks import PreparedTask, prepare_task

Tasks: TypeAlias = list[Data] | dict[str, Data] | str


def named_tasks(tasks: Tasks | None, data: Data | None, default: Sequence[str]) -> dict[str, Data]:
    """Return the data of each task by its name.

    Args:
        tasks: Data, or data by name; unnamed data modules are called like their class.
        data: One task more.
        default: Tasks where neither is given.

    Raises:
        ValueError: If there is none, or two have one name.
    """
    if tasks is None:
        tasks = [] if data is not None else [*default]
    if isinstance(tasks, str):
        tasks = [tasks]
    pairs: list[tuple[str, Data]] = []
    if isinstance(tasks, dict):
        pairs += tasks.items()
    else:
        pairs += [(_name(one), one) for one in tasks]
    if data is not None:
        pairs.append((_name(data), data))
    names = [name for name, _ in pairs]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"`tasks` must be at least one, with different names, got {names}; names are given as {{a: …, b: …}}."
        )
    return dict(pairs)


def _name(data: Data) -> str:
    return data if isinstance(data, str) else type(data).__name__


def labelled(name: str, data: Data, *, max_samples: int, size: int, seed: int = 0) -> PreparedTask:
    """Return the training samples of a task, shuffled, and at most so many of them.

    Args:
        name: What to call it.
        data: A data module, or a name or path of ready data.
        max_samples: At most this many samples.
        size: Height and width of the embedded digits and letters.
        seed: Seed of the shuffling, and of random labels.
    """
    if isinstance(data, str):
        task = prepare_task(data, max_samples=max_samples, size=size, seed=seed)
        return replace(task, name=name)
    loader = read_part(data, "train")
    inputs, targets = read_pair(loader, argument=f"tasks[{name!r}]")
    generator = Generator().manual_seed(seed)
    order = torch.randperm(len(targets), generator=generator)[:max_samples]
    classes = int(targets.max()) + 1
    return PreparedTask(name, inputs[order], targets[order], classes)
