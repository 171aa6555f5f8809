"""The networks that the Fisher engines are measured on."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp() -> nn.Module:
    """784-300-300-10."""
    return nn.Sequential(
        nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10)
    )


def lenet() -> nn.Module:
    """LeNet-5 with ReLU and max pooling, on 28×28."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def vgg() -> nn.Module:
    """A VGG-like net with BatchNorm, on 32×32: 32-32-64-64-128-128."""
    layers: list[nn.Module] = []
    width = 3
    for out in (32, 32, 0, 64, 64, 0, 128, 128, 0):
        if out:
            layers += [
                nn.Conv2d(width, out, 3, padding=1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(),
            ]
            width = out
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(128 * 16, 128), nn.ReLU(), nn.Linear(128, 10)
    )


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        same = width == out and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def resnet20() -> nn.Module:
    """ResNet-20 for 32×32 images (He et al. 2016)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for out, stride in (
        (16, 1),
        (16, 1),
        (16, 1),
        (32, 2),
        (32, 1),
        (32, 1),
        (64, 2),
        (64, 1),
        (64, 1),
    ):
        layers.append(Block(width, out, stride))
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(n, t, d))


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = (
            nn.LayerNorm(width),
            nn.LayerNorm(width),
            Attention(width, heads),
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A small vision transformer on 32×32: 64 tokens, d = 128, 4 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.position = (
            nn.Conv2d(3, 128, 4, 4),
            nn.Parameter(0.02 * torch.randn(1, 64, 128)),
        )
        self.body = nn.Sequential(*(Encoder(128, 4) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.body(x)).mean(1))


class Reused(nn.Module):
    """A module that is called twice: its two gradients must be added before they are squared."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shared(self.shared(x).tanh()).tanh())


class Raw(nn.Module):
    """A parameter that belongs to no layer, like the position of a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.body, self.head = (
            nn.Parameter(torch.randn(16)),
            nn.Linear(16, 16),
            nn.Linear(16, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x + self.position).tanh())


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


def depthwise() -> nn.Module:
    """A depthwise convolution between two pointwise ones."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU(), nn.Conv2d(8, 8, 1),
        nn.Flatten(), nn.Linear(8 * 64, 10),
    )  # fmt: skip


def in_place() -> nn.Module:
    """ReLUs that write over the outputs of the layers before them."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 16), nn.ReLU(inplace=True),
        nn.Linear(16, 10),
    )  # fmt: skip


NETWORKS = {
    "mlp": (mlp, (784,)),
    "lenet": (lenet, (1, 28, 28)),
    "vgg": (vgg, (3, 32, 32)),
    "vit": (ViT, (3, 32, 32)),
    "resnet20": (resnet20, (3, 32, 32)),
}

CORNERS = {  # small networks on which a short way may go wrong
    "reused module": (Reused, (16,)),
    "raw parameter": (Raw, (16,)),
    "tied weight": (Tied, (16,)),
    "depthwise conv": (depthwise, (4, 8, 8)),
    "in-place ReLU": (in_place, (4, 8, 8)),
}


def make(name: str, n: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network in eval mode, ``n`` inputs and labels."""
    torch.manual_seed(0)
    build, shape = (NETWORKS | CORNERS)[name]
    return build().eval(), torch.randn(n, *shape), torch.randint(10, (n,))
