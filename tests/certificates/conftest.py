"""A small classification task, and a network trained on it from a known start."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo.certificates import Prior


def blobs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two overlapping Gaussian classes in four dimensions."""
    g = torch.Generator().manual_seed(seed)
    targets = torch.randint(2, (n,), generator=g)
    return torch.randn(n, 4, generator=g) + 1.5 * (targets[:, None] - 0.5), targets


def fit(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor], steps: int = 60) -> nn.Module:
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="session")
def data():
    return blobs(600, seed=0)


@pytest.fixture(scope="session")
def start():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture(scope="session")
def trained(start, data):
    return fit(deepcopy(start), data)


@pytest.fixture
def prior(start):
    return Prior(start, origin="random initialisation")
