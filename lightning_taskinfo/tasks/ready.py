"""Ready tasks and networks: tasks by name, small networks for them, and the head of any network."""

import os
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from lightning_taskinfo._files import StrPath, read_tensors, write_tensors
from lightning_taskinfo._parallel import on_one_thread
from lightning_taskinfo._random import own_randomness
from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo._warn import warn
from lightning_taskinfo.data.names import cache_dir, load_dataset, task_parts
from lightning_taskinfo.tasks.training import ModelFn

VERSION = 1  # part of the cache file's name: raise it when the network or its training changes
SIDE = 28  # height and width of the images of the reference network


@dataclass(frozen=True, eq=False)
class PreparedTask:
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
    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        return self.inputs, self.targets


def prepare_task(
    name: StrPath,
    *,
    max_samples: int | None = None,
    size: int = 8,
    seed: int = 0,
    data_dir: StrPath | None = None,
) -> PreparedTask:
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
    parts = task_parts(name, size=size, data_dir=data_dir, variant_seed=seed)
    generator = Generator().manual_seed(seed)
    inputs = []
    targets = []
    classes = 0
    for place, part in enumerate(parts):
        x, y = part.train().tensors
        order = torch.randperm(len(y), generator=generator)
        if max_samples is not None:
            order = order[: len(range(place, max_samples, len(parts)))]  # datasets take turns
        inputs.append(x[order])
        targets.append(y[order] + classes)
        classes += part.num_classes
    return PreparedTask(name, torch.cat(inputs), torch.cat(targets), classes)


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
    return nn.Sequential(
        Centred(),
        nn.Linear(num_inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
    )


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


def trunk_of(model_fn: ModelFn, head: str | None = None) -> ModelFn:
    """Return what makes the network of ``model_fn`` without its head, for ``task_distance``.

    Args:
        model_fn: Makes a network with a head, such as a LightningModule of your own.
        head: Name of the head, as in ``named_modules()``; the last ``nn.Linear`` where ``None``.

    Example:
        >>> task = prepare_task("digits", max_samples=5)
        >>> trunk_of(network_for(task, width=8))()(task.inputs).shape
        torch.Size([5, 8])
    """
    return partial(_without_head, model_fn, head)


def _without_head(model_fn: ModelFn, head: str | None) -> nn.Module:
    model = model_fn()
    model.set_submodule(find_head(model, head), nn.Identity())
    return model


def network_for(task: PreparedTask, width: int = 32) -> ModelFn:
    """Return what makes a :func:`small_network` for ``task``; good for other processes.

    Args:
        task: What :func:`prepare_task` returns.
        width: Neurons of each of the two hidden layers.
    """
    return partial(small_network, task.inputs[0].numel(), task.num_classes, width)


class ReferenceNetwork(nn.Module):
    """Three convolutions and a hidden layer, for images of any size: they are made grey and 28×28 first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(),  # 14×14
            nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),  # 7×7
            nn.Conv2d(32, 48, 3, 2, 1), nn.ReLU(),  # 4×4
            nn.Flatten(), nn.Linear(48 * 16, 64), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, 20)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[N, C]`` of images ``[N, channels, H, W]`` with values in ``[0, 1]``."""
        if images.dim() != 4:
            raise ValueError(
                f"The reference network takes images [N, channels, height, width], got {list(images.shape)}; "
                "set `network` to one for your inputs."
            )
        grey = images.mean(1, keepdim=True)
        if grey.shape[-2:] != (SIDE, SIDE):
            grey = interpolate(grey, (SIDE, SIDE), mode="bilinear", antialias=True)
        return self.head(self.body(grey))


def reference_network(*, epochs: int = 4, seed: int = 0) -> ReferenceNetwork:
    """Return the network that embeds tasks by default: it tells the 20 embedded digits and letters apart.

    Trained at the first call, in seconds and with one thread, then read from the folder of cached
    data: the same weights every time. A file that cannot be read is made anew, and a folder that
    cannot be written to costs a warning.

    Args:
        epochs: Passes over the 8,000 training images.
        seed: Seed of the initial weights and of the order of the images.

    Raises:
        ValueError: If ``epochs`` is not positive.
    """
    check_counts(epochs=epochs)
    path = cache_dir() / f"probe-{VERSION}-{epochs}-{seed}.pt"
    with own_randomness(seed):  # its first weights are drawn, and replaced
        network = ReferenceNetwork()
    try:
        network.load_state_dict(read_tensors(path))
    except (OSError, ValueError, TypeError, RuntimeError):
        # Not there, damaged, or of another shape.
        on_one_thread(_train, network, epochs, seed)
        try:
            write_tensors(path, network.state_dict())
        except OSError as error:
            warn(f"The reference network is not cached: {error}")
    return network.eval()


def _train(network: ReferenceNetwork, epochs: int, seed: int) -> None:
    """Adam on both embedded datasets; deterministic, and the global random state stays as it is."""
    generator = Generator().manual_seed(seed)
    images, labels = _images_of_all_classes()
    for parameter in network.parameters():
        if parameter.ndim > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
        else:
            nn.init.zeros_(parameter)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(epochs):
            order = torch.randperm(len(images), generator=generator)
            for batch in order.split(64):
                optimizer.zero_grad()
                loss = cross_entropy(network(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()


def _images_of_all_classes() -> tuple[Tensor, Tensor]:
    """Digits as classes 0 to 9, letters as 10 to 19."""
    digits, y = load_dataset("digits").train().tensors
    letters, z = load_dataset("letters").train().tensors
    return torch.cat([digits, letters]), torch.cat([y, z + 10])


def find_head(network: nn.Module, head: str | None) -> str:
    """Return the name of the head: what the user says, or the last ``nn.Linear`` of the network.

    Raises:
        ValueError: If there is no such module, no linear layer, or nothing but the head.
    """
    modules = dict(network.named_modules())
    if head is None:
        linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
        if not linear:
            raise ValueError("`head` must name the network's last layer, as it has no nn.Linear.")
        head = linear[-1]
    if not head or head not in modules:
        raise ValueError(
            f"`head` must name a module of the network, got {head!r}; there are {list(modules)[1:]}."
        )
    return head


def fit_linear_head(
    features: Tensor,
    labels: Tensor,
    *,
    weight_decay: float,
    max_iter: int = 1000,
) -> nn.Linear:
    r"""Fit a linear classifier to frozen features: the one minimum of a strictly convex loss, whatever the order.

    .. math:: \frac1N \sum_n -\log \mathrm{softmax}(W z_n + b)_{y_n} + \frac{\lambda}{2} \|W\|^2,
        \qquad z = (x - \bar x) / s

    with the features standardised; a feature that never varies is left alone. In float64 and from
    zero, by L-BFGS.

    Args:
        features: Shape ``[N, D]``, float64.
        labels: Classes from 0 on, none of them empty, shape ``[N]``.
        weight_decay: :math:`\lambda`, positive: without it the weights of separable classes have no
            bound.
        max_iter: Most steps of L-BFGS.

    Returns:
        A float64 layer from the features as they are (the standardisation is folded in) to the
        classes' logits.
    """
    mean = features.mean(0)
    std = features.std(0, correction=0)
    std = torch.where(std > 1e-12 * features.abs().amax(0), std, 1.0)
    z = (features - mean) / std
    classes = int(labels.max()) + 1
    # No draw from the global generator.
    head = nn.utils.skip_init(nn.Linear, z.shape[1], classes, dtype=torch.float64)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.LBFGS(
        head.parameters(),
        max_iter=max_iter,
        tolerance_grad=1e-9,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = 0.5 * weight_decay * head.weight.square().sum()
        value = cross_entropy(head(z), labels) + penalty
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    with torch.no_grad():
        head.weight /= std
        head.bias -= head.weight @ mean
    head.zero_grad()
    return head
