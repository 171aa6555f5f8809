"""Tasks by name: a dataset, and what is done to its images and labels."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo.data import load_dataset, vary
from lightning_taskinfo.tasks.head import find_head

Labelled: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """Labelled images of a task, from the training split of its dataset.

    Attributes:
        name: The specification it was made from.
        inputs: Images in [0, 1], shape ``[N, C, H, W]``.
        targets: Classes, shape ``[N]``.
        num_classes: Number of classes.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    num_classes: int

    @property
    def data(self) -> Labelled:
        """Inputs and targets."""
        return self.inputs, self.targets


def prepare_task(
    name: str | os.PathLike[str],
    *,
    max_samples: int | None = None,
    size: int = 8,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
) -> Task:
    """Return the training part of the task that ``name`` describes, as tensors for a network.

    A specification is a dataset or several, and what to make of them, as in
    :func:`lightning_taskinfo.data.load_task`.

    Args:
        name: Such as ``"digits"``, ``"digits:even-odd"``, ``"digits+letters"`` or
            ``"mnist:only-0-1:inverted"``; or a path.
        max_samples: At most this many samples, shuffled; all where ``None``.
        size: Height and width of the embedded digits and letters: 28, or 8.
        seed: Seed of the shuffling, and of random labels, which leave the choice of images as it
            is.
        data_dir: Folder of further datasets; ``TASKINFO_DATA_DIR`` where not given.

    Raises:
        ValueError: If a dataset or a variant is unknown, a class does not exist, datasets that are
            put together differ in the shape of their images, or ``max_samples`` is less than 1.

    Example:
        >>> task = prepare_task("digits:only-3-8", max_samples=100)
        >>> task.inputs.shape, task.num_classes
        (torch.Size([100, 1, 8, 8]), 2)
    """
    check_counts(max_samples=max_samples)
    name = os.fspath(name)
    names, *variants = name.split(":")
    parts = [load_dataset(part, size=size, data_dir=data_dir) for part in names.split("+")]
    if len({part.image_shape for part in parts}) > 1:
        shapes = ", ".join(str(part.image_shape) for part in parts)
        raise ValueError(f"{name!r} must put images of one shape together, got {shapes}.")
    generator = Generator().manual_seed(seed)
    each, rest = (None, 0) if max_samples is None else divmod(max_samples, len(parts))
    shares = [None if each is None else each + (i < rest) for i in range(len(parts))]
    inputs = []
    targets = []
    classes = 0
    for part, share in zip(parts, shares, strict=True):
        for variant in variants:
            part = vary(part, variant, seed=seed)
        x, y = part.train().tensors
        order = torch.randperm(len(y), generator=generator)[:share]
        inputs.append(x[order])
        targets.append(y[order] + classes)
        classes += part.num_classes
    return Task(name, torch.cat(inputs), torch.cat(targets), classes)


class Centred(nn.Module):
    """Flattened images with grey values from -1/2 to 1/2, so that an inverted image is the negative of its original."""

    def forward(self, images: Tensor) -> Tensor:
        """Return ``[N, D]`` for images ``[N, ...]`` in [0, 1]."""
        return images.flatten(1) - 0.5


def small_trunk(num_inputs: int, width: int = 32) -> nn.Module:
    """Return two hidden layers over centred pixels: small enough for a laptop, large enough for digits.

    Args:
        num_inputs: Number of pixels, channels included.
        width: Neurons of each layer.

    Raises:
        ValueError: If a number is below 1.
    """
    check_counts(num_inputs=num_inputs, width=width)
    first, second = nn.Linear(num_inputs, width), nn.Linear(width, width)
    return nn.Sequential(Centred(), first, nn.ReLU(), second, nn.ReLU())


def small_network(num_inputs: int, num_outputs: int, width: int = 32) -> nn.Module:
    """Return :func:`small_trunk` with a linear head.

    Args:
        num_inputs: Number of pixels, channels included.
        num_outputs: Number of logits, one for each class.
        width: Neurons of each hidden layer.

    Example:
        >>> small_network(64, 10)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    return nn.Sequential(small_trunk(num_inputs, width), nn.Linear(width, num_outputs))


def trunk_for(task: Task, width: int = 32) -> Callable[[], nn.Module]:
    """Return what makes a :func:`small_trunk` for the images of ``task``; good for other processes.

    Args:
        task: What :func:`prepare_task` returns.
        width: Neurons of each of the two hidden layers.
    """
    return partial(small_trunk, task.inputs[0].numel(), width)


def trunk_of(model_fn: Callable[[], nn.Module], head: str | None = None) -> Callable[[], nn.Module]:
    """Return what makes the network of ``model_fn`` without its head, for ``task_distance``.

    Args:
        model_fn: Makes a network with a head, such as a LightningModule of your own.
        head: Name of the head, as in ``named_modules()``; the last ``nn.Linear`` where ``None``.

    Example:
        >>> trunk_of(lambda: small_network(64, 10, width=8))()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 8])
    """
    return partial(_without_head, model_fn, head)


def _without_head(model_fn: Callable[[], nn.Module], head: str | None) -> nn.Module:
    model = model_fn()
    model.set_submodule(find_head(model, head), nn.Identity())
    return model


def network_for(task: Task, width: int = 32) -> Callable[[], nn.Module]:
    """Return what makes a :func:`small_network` for ``task``; good for other processes.

    Args:
        task: What :func:`prepare_task` returns.
        width: Neurons of each of the two hidden layers.
    """
    return partial(small_network, task.inputs[0].numel(), task.num_classes, width)
