"""What is remembered of a model never makes a later measurement wrong, whatever has changed in between."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo import trainable_parameters
from lightning_taskinfo.fisher import engines_used, per_sample_squared_norms
from lightning_taskinfo.fisher.convolution import Conv
from lightning_taskinfo.fisher.findings import recall
from lightning_taskinfo.fisher.hooks import Captured, capture
from tests.fisher.test_engines import empirical


class Changing(nn.Module):
    """A network whose way of computing hangs on things that no shape of an input or parameter shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.gate = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.way = "plain"

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        if self.way == "twice":
            h = self.b(self.b(h).tanh())
        elif self.way == "raw":
            h = h @ self.b.weight.T + self.b.bias
        elif self.way == "time first":
            h = self.b(h.transpose(0, 1)).transpose(0, 1)
        else:
            h = self.b(h)
        h = h + self.gate * h.mean(0)
        return self.c(h.tanh())[:, -1]


@pytest.fixture
def model() -> Changing:
    torch.manual_seed(0)
    return Changing().double()


def data(n: int, positions: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, positions, 4, dtype=torch.float64), torch.randint(3, (n,))


def check(model: nn.Module, n: int, positions: int = 6) -> None:
    x, y = data(n, positions)
    expected = sum(g.flatten(1).square().sum(1) for g in empirical(model, x, y).values())
    norms = per_sample_squared_norms(model, x, y, labels="empirical")
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
def test_other_numbers_of_samples(model, n):
    check(model, 8)
    assert recall(model, data(n)[0]) is not None
    check(model, n)


@pytest.mark.parametrize("n", [6, 7])  # as many as there are positions, where shapes do not tell, and not
@pytest.mark.parametrize("way", ["twice", "raw", "time first"])
def test_another_way_through_the_same_modules(model, way, n):
    check(model, n)
    model.way = way
    check(model, n)
    model.way = "plain"
    check(model, n)


def test_samples_that_begin_to_depend_on_each_other(model):
    check(model, 7)
    model.gate.data.fill_(1.0)
    with pytest.warns(UserWarning, match="outputs for a sample depend on the others"):
        check(model, 7)  # the loop runs batches of one


def test_other_inputs_and_other_layers(model):
    check(model, 7)
    assert recall(model, data(7, positions=5)[0]) is None
    check(model, 7, positions=5)
    model.b = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 5)).double()
    check(model, 7, positions=5)


def test_a_parameter_that_is_frozen_or_tied_later(model):
    check(model, 7)
    model.a.weight.requires_grad_(False)
    check(model, 7)
    model.b.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
    model.d = nn.Linear(5, 5)
    model.d.weight = model.b.weight
    check(model, 7)


def test_a_model_is_not_kept_alive():
    model = Changing().double()
    check(model, 7)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_every_sign_of_another_way_counts(model):
    check(model, 7)
    found = recall(model, data(7)[0])

    def captured(n: int = 7) -> Captured:
        return capture(lambda: model(data(n)[0]), trainable_parameters(model))

    assert found.fit(captured())
    assert not found.fit(captured(6))  # as many samples as positions
    assert not found.fit(replace(captured(), graph=captured().graph[::-1]))
    assert not found.fit(replace(captured(), uses=captured().uses[:-1]))
    for attribute, value in (("shape", torch.Size([6, 7, 5])), ("slots", {}), ("__class__", Conv)):
        seen = captured()
        setattr(seen.uses[0], attribute, value)
        assert not found.fit(seen), attribute


def test_is_served_by_hooks_all_the_same(model):
    x, y = data(7)
    first, again = (engines_used(model, x, y) for _ in range(2))
    assert first == again == dict.fromkeys(first, "hooks")
