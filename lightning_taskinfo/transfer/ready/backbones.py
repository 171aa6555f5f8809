"""Networks to transfer: anything that maps images to features will do, and these are ready."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_taskinfo._observe import observing
from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo._warn import reason_of
from lightning_taskinfo.transfer.overlap import device_of

Shape = tuple[int, int, int]
Backbone: TypeAlias = str | Callable[[Shape], nn.Module]
"""A name in :data:`BACKBONES`, or a function at the top of a module that makes a network for a shape of images."""


def mlp(image_shape: Shape, *, width: int = 128) -> nn.Module:
    """Two hidden layers on the flattened image.

    Args:
        image_shape: Channels, height and width of an image.
        width: Neurons of each layer.

    Example:
        >>> mlp((1, 8, 8))(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 128])
    """
    channels, height, wide = image_shape
    check_counts(width=width)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * wide, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
    )


def small_cnn(image_shape: Shape, *, width: int = 16, feature_dim: int = 64) -> nn.Module:
    """Two convolutions with pooling and a linear layer: seconds per epoch on a processor.

    Args:
        image_shape: Channels, height and width of an image.
        width: Channels of the first convolution; the second has twice as many.
        feature_dim: Number of features.

    Example:
        >>> small_cnn((1, 8, 8))(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 64])
    """
    channels, height, wide = _at_least(image_shape, 8)
    check_counts(width=width, feature_dim=feature_dim)
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 4) * (wide // 4), feature_dim),
        nn.ReLU(),
    )


def large_cnn(image_shape: Shape, *, width: int = 128) -> nn.Module:
    """Nine convolutions with batch normalisation and dropout, the network of Laine and Aila (2017).

    It is the usual one of semi-supervised learning, and of Temporal Ensembling, one of the methods
    here.

    Args:
        image_shape: Channels, height and width of an image.
        width: Channels of the first convolutions, and number of features.

    Example:
        >>> large_cnn((3, 32, 32), width=4)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 4])
    """
    channels, *_ = _at_least(image_shape, 20)
    check_counts(width=width)
    return nn.Sequential(
        _convolutions(channels, *[width] * 3, padding=1),
        nn.Sequential(nn.MaxPool2d(2), nn.Dropout()),
        _convolutions(width, *[2 * width] * 3, padding=1),
        nn.Sequential(nn.MaxPool2d(2), nn.Dropout()),
        _convolutions(2 * width, 4 * width),
        _convolutions(4 * width, 2 * width, width, kernel=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def resnet20(image_shape: Shape, *, width: int = 16) -> nn.Module:
    """The residual network of 20 layers for small images (He et al., 2016), without its last layer.

    Args:
        image_shape: Channels, height and width of an image.
        width: Channels of the first stage; each of the other two has twice those of the one before.

    Example:
        >>> resnet20((3, 16, 16), width=4)(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 16])
    """
    channels, *_ = _at_least(image_shape, 8)
    check_counts(width=width)
    stages = [  # channels before and behind, and the stride
        (width, width, 1),
        (width, 2 * width, 2),
        (2 * width, 4 * width, 2),
    ]
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ),
        *(
            nn.Sequential(
                _Residual(inner, outer, stride),
                _Residual(outer, outer),
                _Residual(outer, outer),
            )
            for inner, outer, stride in stages
        ),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp, "small_cnn": small_cnn, "large_cnn": large_cnn, "resnet20": resnet20,
}  # fmt: skip


def make_backbone(
    backbone: Backbone,
    image_shape: Shape,
    *,
    argument: str = "backbone",
) -> nn.Module:
    """Return the network of a name or a function for images of a shape.

    Raises:
        ValueError: If the name is unknown, it is a network already, or what came out is no module
            that takes such images.

    Example:
        >>> feature_dim(make_backbone("mlp", (1, 8, 8)), (1, 8, 8))
        128
    """
    if isinstance(backbone, nn.Module):
        kind = type(backbone).__name__
        raise ValueError(
            f"`{argument}` must be a function that makes a network for an image shape, got a {kind}, a network "
            "already: every seed makes its own."
        )
    make = BACKBONES.get(backbone) if isinstance(backbone, str) else backbone
    if make is None:
        known = ", ".join(BACKBONES)
        raise ValueError(f"`{argument}` must be one of {known} or a function, got {backbone!r}.")
    try:
        network = make(image_shape)
        if not isinstance(network, nn.Module):
            raise ValueError(f"`{argument}` must make an nn.Module, got {type(network).__name__}.")
        feature_dim(network, image_shape)
    except ValueError:
        raise
    except Exception as error:  # of the user's own function
        name = getattr(make, "__qualname__", make)
        raise ValueError(
            f"`{argument}` must make a network for an image shape, but {name}({tuple(image_shape)}) failed "
            f"({reason_of(error)})."
        ) from error
    return network


def backbone_name(backbone: Backbone, *, argument: str = "backbone") -> str:
    """Return a name by which to know the network again: that of :data:`BACKBONES`, or module and function.

    Raises:
        ValueError: If it is a function that another process could not import.
    """
    if isinstance(backbone, str):
        return backbone
    name = f"{getattr(backbone, '__module__', '?')}.{getattr(backbone, '__qualname__', '?')}"
    if "<" in name or "?" in name:
        raise ValueError(
            f"`{argument}` must be a name, or a function or class defined at the top of a module, got {backbone!r}: "
            "other processes import it by its name."
        )
    return name


def feature_dim(backbone: nn.Module, image_shape: Shape) -> int:
    """Return the number of features that ``backbone`` puts out, from one forward pass that leaves no trace."""
    images = torch.zeros(2, *image_shape, device=device_of(backbone))
    with observing(backbone), torch.no_grad():
        return flat(backbone(images)).shape[1]


def flat(features: Any) -> Tensor:
    """Return features as ``[N, F]``.

    Raises:
        ValueError: If they are no tensor with a sample axis.
    """
    if not isinstance(features, Tensor) or features.ndim < 2:
        raise ValueError(
            f"`backbone` must put out a tensor [N, ...], got {type(features).__name__}."
        )
    return features.flatten(1)


class _Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        # Made in any case: the weights of later blocks are drawn after it.
        projection = nn.Conv2d(inner, outer, 1, stride, bias=False)
        shortcut = nn.Sequential(projection, nn.BatchNorm2d(outer))
        self.shortcut = shortcut if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm1(self.first(x)).relu()
        y = self.norm2(self.second(hidden))
        return (y + self.shortcut(x)).relu()


def _convolutions(
    inner: int,
    *outer: int,
    kernel: int = 3,
    padding: int = 0,
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in outer:
        layers += [
            nn.Conv2d(inner, width, kernel, padding=padding),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.1),
        ]
        inner = width
    return nn.Sequential(*layers)


def _at_least(image_shape: Shape, size: int) -> Shape:
    if min(image_shape[1:]) < size:
        raise ValueError(
            f"`image_shape` must have a height and width of at least {size}, got {image_shape}."
        )
    return image_shape
