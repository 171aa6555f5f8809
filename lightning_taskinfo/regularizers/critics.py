"""Critics: networks that score how well inputs and features belong together."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from lightning_taskinfo._random import own_randomness
from lightning_taskinfo._ranges import check_counts

CriticKind = Literal["separable", "bilinear", "concatenated"]


class SeparableCritic(nn.Module):
    r"""Scores :math:`M(x_i, z_j) = f(x_i) \cdot g(z_j)`: one pass over each batch, whatever the number of pairs.

    Args:
        input_shape: Shape of one input; an image-shaped one gets a small convolutional tower.
        feature_dim: Width of the features.
        hidden: Width of the hidden layers.
        embedding: Width of the space in which the product is taken.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        feature_dim: int,
        hidden: int = 256,
        embedding: int = 32,
    ) -> None:
        super().__init__()
        self.input_tower = tower(input_shape, hidden, embedding)
        self.feature_tower = tower((feature_dim,), hidden, embedding)

    def forward(self, inputs: Tensor, features: Tensor) -> Tensor:
        """Return the scores of all pairs, shape ``[B, B]``."""
        return self.input_tower(inputs) @ self.feature_tower(features).T


class BilinearCritic(nn.Module):
    r"""Scores :math:`M(x_i, z_j) = f(x_i)^\top A z_j`, linear in the features.

    Args:
        input_shape: Shape of one input; an image-shaped one gets a small convolutional tower.
        feature_dim: Width of the features.
        hidden: Width of the hidden layers.
        embedding: Width of the inputs' embedding.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        feature_dim: int,
        hidden: int = 256,
        embedding: int = 32,
    ) -> None:
        super().__init__()
        self.input_tower = tower(input_shape, hidden, embedding)
        self.bilinear = nn.Linear(feature_dim, embedding, bias=False)

    def forward(self, inputs: Tensor, features: Tensor) -> Tensor:
        """Return the scores of all pairs, shape ``[B, B]``."""
        return self.input_tower(inputs) @ self.bilinear(features).T


class ConcatenatedCritic(nn.Module):
    r"""Scores :math:`M(x_i, z_j) = h([f(x_i), z_j])`: the most expressive, at :math:`B^2` passes through :math:`h`.

    Args:
        input_shape: Shape of one input; an image-shaped one gets a small convolutional tower first.
        feature_dim: Width of the features.
        hidden: Width of the hidden layers.
        embedding: Width of an image's embedding; flat inputs are taken as they are.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        feature_dim: int,
        hidden: int = 256,
        embedding: int = 32,
    ) -> None:
        super().__init__()
        image = len(input_shape) == 3
        self.input_tower: nn.Module = nn.Flatten()
        if image:
            self.input_tower = tower(input_shape, hidden, embedding)
        # The first layer of [x, z] is the sum of one of x and one of z: B of each instead of B² of
        # both.
        width = embedding if image else math.prod(input_shape)
        self.from_input = nn.Linear(width, hidden)
        self.from_features = nn.Linear(feature_dim, hidden, bias=False)
        self.score = nn.Sequential(
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, inputs: Tensor, features: Tensor) -> Tensor:
        """Return the scores of all pairs, shape ``[B, B]``."""
        a = self.from_input(self.input_tower(inputs))  # [B, H]
        b = self.from_features(features)  # [B, H]
        pairs = a[:, None] + b[None]  # [B, B, hidden]
        return self.score(pairs).squeeze(-1)


def tower(shape: Sequence[int], hidden: int, out: int) -> nn.Sequential:
    """Return a network from samples of ``shape`` to vectors: convolutional for images ``(C, H, W)``, else dense.

    Example:
        >>> from torch import zeros
        >>> tower((1, 28, 28), hidden=64, out=8)(zeros(2, 1, 28, 28)).shape
        torch.Size([2, 8])
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    if len(shape) == 3:
        channels, height, width = shape
        layers = [
            nn.Conv2d(channels, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        ]
        # Halved twice, and rounded up.
        width = 32 * math.ceil(height / 4) * math.ceil(width / 4)
    dense = (
        nn.Linear(width, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, out),
    )
    return nn.Sequential(*layers, *dense)


def make_critic(
    kind: CriticKind,
    input_shape: Sequence[int],
    feature_dim: int,
    *,
    hidden: int = 256,
    embedding: int = 32,
    seed: int = 0,
) -> nn.Module:
    """Build a critic whose initial weights depend on ``seed`` only; the global generator is left alone.

    Raises:
        ValueError: If ``kind`` is unknown or a width is not positive.

    Example:
        >>> from torch import zeros
        >>> critic = make_critic("bilinear", (4,), 2)
        >>> critic(zeros(3, 4), zeros(3, 2)).shape
        torch.Size([3, 3])
    """
    if kind not in get_args(CriticKind):
        raise ValueError(
            f"`critic` must be a module or one of {get_args(CriticKind)}, got {kind!r}."
        )
    check_counts(feature_dim=feature_dim, hidden=hidden, embedding=embedding)
    critics = {
        "separable": SeparableCritic,
        "bilinear": BilinearCritic,
        "concatenated": ConcatenatedCritic,
    }
    with own_randomness(seed):
        return critics[kind](input_shape, feature_dim, hidden, embedding)
