"""A small network, and its curvature in every structure: as the package takes it, and as one dense matrix."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo.distributions import (
    IsotropicGaussian,
    WeightGaussian,
    diagonal_curvature,
    kronecker_curvature,
    post_distribution,
)
from lightning_taskinfo.distributions.gaussian import Curvature
from lightning_taskinfo.fisher import KroneckerFactors


class Case(NamedTuple):
    net: nn.Module
    curvature: Curvature
    dense: Tensor  # [k, k], in the order of `named_parameters`


def isotropic(center: nn.Module | ParamDict, std: float) -> WeightGaussian:
    """The Gaussian that a loss without curvature leaves: the pre-distribution itself."""
    pre = IsotropicGaussian(center, prior_std=std)
    flat = {name: torch.zeros_like(mean) for name, mean in pre.mean.items()}
    return post_distribution(center, pre, diagonal_curvature(flat))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def psd(size: int, seed: int) -> Tensor:
    root = torch.randn(
        size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return root @ root.T


def diagonal(net: nn.Module) -> tuple[ParamDict, Tensor]:
    g = torch.Generator().manual_seed(1)
    values = {
        n: 5 * torch.rand(p.shape, generator=g, dtype=torch.float64)
        for n, p in net.named_parameters()
    }
    return values, torch.diag(torch.cat([v.flatten() for v in values.values()]))


def diagonal_case(net: nn.Module) -> Case:
    values, dense = diagonal(net)
    return Case(net, diagonal_curvature(values), dense)


def kronecker_case(net: nn.Module) -> Case:
    """Matrices on both sides, a diagonal on either, and vectors."""
    factors = {
        "0.weight": KroneckerFactors(psd(4, 4), psd(3, 5)),
        "0.bias": KroneckerFactors(psd(4, 6)),
        "2.weight": KroneckerFactors(psd(2, 7).diagonal(), psd(4, 8)),
        "2.bias": KroneckerFactors(psd(2, 9).diagonal()),
    }
    one = torch.ones(1).double()
    whole = [
        torch.kron(rows if rows.dim() == 2 else rows.diag(), columns.reshape(len(columns), -1))
        for rows, columns in (
            (f.rows, one if f.columns is None else f.columns) for f in factors.values()
        )
    ]
    return Case(net, kronecker_curvature(factors, scale=3.0), 3 * torch.block_diag(*whole))


CASES: dict[str, Callable[[nn.Module], Case]] = {
    "diagonal": diagonal_case,
    "kronecker": kronecker_case,
}


@pytest.fixture(params=CASES)
def case(net: nn.Module, request: pytest.FixtureRequest) -> Case:
    return CASES[request.param](net)
