"""A small network, and its curvature in every structure: as the package takes it, and as one dense matrix."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo.distributions import (
    CurvatureBlock,
    diagonal_curvature,
    kronecker_curvature,
    layer_curvature,
    neuron_curvature,
    with_diagonal,
)
from lightning_taskinfo.fisher import KroneckerFactors


class Case(NamedTuple):
    net: nn.Module
    curvature: list[CurvatureBlock]
    dense: Tensor  # [k, k], in the order of `named_parameters`


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def psd(size: int, seed: int) -> Tensor:
    root = torch.randn(
        size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return root @ root.T


def places(net: nn.Module, layer: str) -> list[list[int]]:
    """Flat index of the weight from input ``i`` (the bias last) to neuron ``j``, as ``places[j][i]``."""
    start = {}
    offset = 0
    for name, parameter in net.named_parameters():
        start[name] = offset
        offset += parameter.numel()
    rows, columns = net.get_submodule(layer).weight.shape
    weight, bias = start[f"{layer}.weight"], start[f"{layer}.bias"]
    return [[weight + j * columns + i for i in range(columns)] + [bias + j] for j in range(rows)]


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


def layer_case(net: nn.Module) -> Case:
    matrices = {"0": psd(16, 2), "2": psd(10, 3)}
    return Case(net, layer_curvature(net, matrices), torch.block_diag(*matrices.values()))


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


def neuron_case(net: nn.Module) -> Case:
    """One layer by neuron, the other left to the diagonal."""
    values, dense = diagonal(net)
    scale = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=torch.float64)
    blocks = with_diagonal(neuron_curvature(net, {"0": psd(4, 4)}, scales={"0": scale}), values)
    first = dense_layers(net, {"0": (psd(4, 4), torch.diag(scale))})
    dense[:16, :16] = first[:16, :16]
    return Case(net, blocks, dense)


def dense_layers(net: nn.Module, factors: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    k = sum(p.numel() for p in net.parameters())
    dense = torch.zeros(k, k, dtype=torch.float64)
    for layer, (A, B) in factors.items():
        where = places(net, layer)
        for j, row in enumerate(where):
            for other, other_row in enumerate(where):
                for i, place in enumerate(row):
                    for m, other_place in enumerate(other_row):
                        dense[place, other_place] = B[j, other] * A[i, m]
    return dense


CASES: dict[str, Callable[[nn.Module], Case]] = {
    "diagonal": diagonal_case,
    "layer": layer_case,
    "neuron": neuron_case,
    "kronecker": kronecker_case,
}


@pytest.fixture(params=CASES)
def case(net: nn.Module, request: pytest.FixtureRequest) -> Case:
    return CASES[request.param](net)
