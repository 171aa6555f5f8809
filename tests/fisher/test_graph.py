"""What of a graph is the same for another batch, and what of a parameter flows where."""

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo.fisher.graph import Graph
from tests.fisher.test_proof import Changing, data


def graph_of(model: nn.Module, x: Tensor) -> Graph:
    return Graph(model(x), trainable_parameters(model))


def test_signatures_differ_with_operations_and_shapes():
    model = Changing().double()

    def signature(n: int) -> list:
        return graph_of(model, data(n)[0]).signature

    first = signature(7)
    assert first == signature(7)
    assert first != signature(6)
    for way in ("twice", "raw", "time first"):
        model.way = way
        assert first != signature(7), way
    model.way = "plain"
    model.b.weight.requires_grad_(False)
    assert first != signature(7)


@pytest.mark.parametrize(
    "moved",
    [
        lambda h, i: h.roll(i, 0),
        lambda h, i: torch.stack([h[i], h[1 - i]]),
        lambda h, i: torch.cat([h.narrow(0, i, 1), h.narrow(0, 1 - i, 1)]),
        lambda h, i: torch.stack([h.unbind(0)[i], h.unbind(0)[1 - i]]),
    ],
    ids=["rolled", "selected", "cut out", "unbound"],
)
def test_signatures_differ_with_what_operations_are_told(moved):
    """Operations and shapes are the same, and rows are in another order."""

    class Moving(nn.Linear):
        which = 0

        def forward(self, x: Tensor) -> Tensor:
            return moved(super().forward(x), self.which)

    model = Moving(3, 2)
    x = torch.randn(2, 3)
    first = graph_of(model, x).signature
    assert first == graph_of(model, x).signature
    model.which = 1
    assert first != graph_of(model, x).signature


def test_uses_are_the_first_operations_that_do_more_than_move_entries():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    graph = graph_of(model, torch.randn(5, 3))
    uses = graph.uses(set())
    assert [graph.kind(number) for number in uses] == ["AddmmBackward0"] * 2
    names = [graph.roots(source) for weights in uses.values() for source, _ in weights.values()]
    assert sorted(map(min, names)) == ["0.bias", "0.weight", "2.bias", "2.weight"]
