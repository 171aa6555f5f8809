"""Small networks on a few thousand real images: data, augmentation and a training that stops at a given loss."""

import functools
import math
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, pad

from lightning_taskinfo.data import load_digits, load_npz
from lightning_taskinfo.regularizers import LocalMinimumRegularizer, WeightSchedule

Split = tuple[Tensor, Tensor]


@functools.cache
def load(data_dir: str | None, samples: int) -> tuple[Split, Split, str]:
    """Return training and test images, standardised by the training set, and what they are."""
    data = (
        load_npz(Path(data_dir) / "cifar10_12k.npz", name="CIFAR-10")
        if data_dir
        else load_digits(size=28)
    )
    (x, y), (x_test, y_test) = data.train()[:samples], data.test()[:]
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return ((x - mean) / std, y), ((x_test - mean) / std, y_test), data.name


def mislabel(y: Tensor, share: float, generator: Generator) -> Tensor:
    """Give a share of the samples another class at random."""
    chosen = torch.randperm(len(y), generator=generator)[: round(share * len(y))]
    wrong = y.clone()
    wrong[chosen] = (y[chosen] + torch.randint(1, 10, chosen.shape, generator=generator)) % 10
    return wrong


def flip(x: Tensor, generator: Generator) -> Tensor:
    flipped = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(flipped[:, None, None, None], x.flip(-1), x)


def crop(x: Tensor, generator: Generator, reach: int = 3) -> Tensor:
    """Shift each image by up to ``reach`` pixels, zeros outside."""
    N, _, H, W = x.shape
    rows, columns = (torch.randint(2 * reach + 1, (N, 1), generator=generator) for _ in range(2))
    rows, columns = rows + torch.arange(H), columns + torch.arange(W)
    samples = torch.arange(N)[:, None, None]
    return pad(x, [reach] * 4)[samples, :, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def cutout(x: Tensor, generator: Generator, size: int = 8) -> Tensor:
    """Set a square of each image to zero."""
    N, _, H, W = x.shape
    top, left = (torch.randint(length - size + 1, (N, 1), generator=generator) for length in (H, W))
    rows, columns = (torch.arange(n)[None] - start for n, start in ((H, top), (W, left)))
    inside = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[
        :, None
    ]
    return x.masked_fill(inside[:, None], 0.0)


AUGMENTATIONS = {
    "none": (), "flip": (flip,), "crop": (crop,), "flip, crop": (flip, crop), "flip, crop, cutout": (flip, crop, cutout)
}  # fmt: skip


def network(shape: torch.Size, seed: int) -> nn.Module:
    """A convolutional network of about 40,000 weights."""
    torch.manual_seed(seed)
    channels, H, W = shape
    layers: list[nn.Module] = []
    for a, b in ((channels, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU()]
    width = 64 * math.ceil(H / 8) * math.ceil(W / 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 10))


@torch.no_grad()
def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return sum(cross_entropy(model(a), b, reduction="sum").item() for a, b in batches(x, y)) / len(
        y
    )


@torch.no_grad()
def error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of samples with a wrong answer."""
    return sum((model(a).argmax(1) != b).sum().item() for a, b in batches(x, y)) / len(y)


def batches(x: Tensor, y: Tensor, size: int = 250):
    return zip(x.split(size), y.split(size), strict=True)


def train(x: Tensor, y: Tensor, settings: dict) -> tuple[nn.Module, int]:
    """Train until the loss on the plain training images is at ``target_loss``; return the model and the epochs.

    Images are augmented for ``augmented_epochs``; what is left of the loss goes on plain images, or a small network
    would not come down to it. Once an epoch ends near that loss, it is looked at every few batches, so that all end at
    nearly the same: the gradients of a network follow what is left of its loss. With ``drops``, the learning rate falls
    to a tenth at these epochs, and training lasts ``max_epochs``, augmented to the end.
    """
    seed, drops, weight = settings["seed"], settings.get("drops", ()), settings.get("weight", 0.0)
    model, generator = network(x.shape[1:], seed), Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["learning_rate"], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops)
    regularizer = LocalMinimumRegularizer(
        weight=WeightSchedule(weight, start=min(drops, default=0)), parts=8
    )
    loss_fn = lambda part: cross_entropy(model(part[0]), part[1])  # noqa: E731
    near = False
    for epoch in range(settings["max_epochs"]):
        augmented = drops or epoch < settings["augmented_epochs"]
        scheme = AUGMENTATIONS[settings["augmentation"]] if augmented else ()
        for number, rows in enumerate(
            torch.randperm(len(x), generator=generator).split(settings["batch_size"])
        ):
            inputs = functools.reduce(lambda a, f: f(a, generator), scheme, x[rows])
            loss = loss_fn((inputs, y[rows]))
            if weight and len(rows) >= 8:
                loss = loss + regularizer(model, loss_fn, (inputs, y[rows]), epoch=epoch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (
                near
                and not scheme
                and number % 4 == 0
                and mean_loss(model, x, y) <= settings["target_loss"]
            ):
                return model, epoch + 1
        scheduler.step()
        if not drops:
            loss_now = mean_loss(model, x, y)
            near = loss_now <= 4 * settings["target_loss"]
            if loss_now <= settings["target_loss"]:
                break
    return model, epoch + 1
