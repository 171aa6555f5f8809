"""Images of a task for an experiment: the files of ``--data-dir``, or the package's own digits in their place."""

from functools import cache

import torch
from torch import Generator, Tensor

from lightning_taskinfo.data import ArrayData, load_task

Split = tuple[Tensor, Tensor]


@cache
def loaded(name: str, data_dir: str | None) -> ArrayData:
    """Return a task by its name; without files, what the name makes of datasets is made of the digits."""
    if data_dir is None:
        name = ":".join(["digits", *name.split(":")[1:]])
    return load_task(name, data_dir=data_dir)


def drawn(
    name: str, *, samples: int, test: int, seed: int, data_dir: str | None
) -> tuple[Split, Split]:
    """Return training and test images in [0, 1] with their classes, at most so many, chosen by the seed."""
    data = loaded(name, data_dir)
    generator = Generator().manual_seed(seed)
    splits = []
    for dataset, count in ((data.train(), samples), (data.test(), test)):
        x, y = dataset.tensors
        chosen = torch.randperm(len(y), generator=generator)[:count]
        splits.append((x[chosen], y[chosen]))
    return splits[0], splits[1]
