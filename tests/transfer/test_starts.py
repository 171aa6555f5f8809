"""Starts and ways to adapt: which layer is the head, and what is trained."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from lightning_taskinfo.transfer.starts import adapted, last_layer
from tests.transfer.own_nets import Net, clusters

BATCH = clusters(4, 3)


class HeadFirst(nn.Module):
    """Defines its head before its body."""

    def __init__(self):
        super().__init__()
        self.head, self.body = nn.Linear(8, 3), nn.Linear(6, 8)

    def forward(self, x):
        return self.head(self.body(x))


class Unused(HeadFirst):
    """Defines a layer last that never runs, and its head under two names."""

    def __init__(self):
        super().__init__()
        self.again, self.unused = self.head, nn.Linear(6, 8)


class Nested(nn.Module):
    """Has a layer whose name is the end of its head's."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 8)
        self.decoder = nn.ModuleDict({"head": nn.Linear(8, 3)})

    def forward(self, x):
        return self.decoder["head"](self.head(x))


class Token(nn.Module):
    """Has a weight of its own beside its layers."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(6))
        self.net = HeadFirst()

    def forward(self, x):
        return self.net(x + self.token)


class Bare(nn.Module):
    """Has a head that is no layer: a matrix and a shift of its own."""

    def __init__(self):
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.zeros(3))
        self.body = nn.Linear(6, 8)

    def forward(self, x):
        return self.body(x).tanh() @ self.matrix + self.shift


class Normed(nn.Module):
    """Has a head whose weight is computed from two parameters."""

    def __init__(self):
        super().__init__()
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
        self.body = nn.Linear(6, 8)

    def forward(self, x):
        return self.head(self.body(x))


def trained(module):
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (Net, "head"),
        (HeadFirst, "head"),
        (Unused, "head"),
        (Nested, "decoder.head"),
        (Token, "net.head"),
    ],
)
def test_the_head_is_the_layer_that_runs_last(make, head):
    module = make()
    wanted = {f"{head}.weight", f"{head}.bias"}
    assert {*last_layer(module, BATCH)} == wanted
    assert trained(adapted(module, "linear", last_layer(module, BATCH))) == wanted


def test_a_head_that_is_no_layer_is_found():
    assert {*last_layer(Bare(), BATCH)} == {"matrix", "shift"}


def test_a_head_whose_weight_is_computed_is_found_and_gets_no_adapters():
    module = Normed()
    head = last_layer(module, BATCH)
    weights = "head.parametrizations.weight.original"
    assert {*head} == {"head.bias", f"{weights}0", f"{weights}1"}
    if find_spec("peft"):
        names = trained(adapted(module, "lora", head))
        assert {name.partition(".lora")[0] for name in names - {*head}} == {"body"}


def test_the_head_of_a_module_that_cannot_be_called_is_the_layer_defined_last():
    assert last_layer(HeadFirst(), {"words": "none"}) == ("body.weight", "body.bias")


def test_adapters_are_in_all_linear_layers_but_the_head():
    pytest.importorskip("peft")
    module = Nested()
    names = trained(adapted(module, "lora", last_layer(module, BATCH)))
    assert {name for name in names if "lora" not in name} == {
        "decoder.head.weight",
        "decoder.head.bias",
    }
    assert {name.partition(".lora")[0] for name in names if "lora" in name} == {"head"}
