"""The matrices of layer inputs against loops over samples and places."""

import pytest
import torch
from torch import nn

from lightning_taskinfo.distributions import layer_input_matrices
from lightning_taskinfo.distributions.curvature import _columns

CONVOLUTIONS = {
    "plain": {},
    "stride_dilation": {"stride": 2, "dilation": 2, "padding": (2, 1)},
    "no_bias": {"bias": False},
    "same": {"padding": "same"},
    "circular": {"padding": 1, "padding_mode": "circular"},
}


@pytest.mark.parametrize("arguments", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_columns_times_weights_are_the_output_of_a_convolution(arguments):
    layer, x = (
        nn.Conv2d(2, 3, 3, **arguments).double(),
        torch.randn(4, 2, 7, 6, dtype=torch.float64),
    )
    matrix = layer.weight.flatten(1)
    if layer.bias is not None:
        matrix = torch.cat([matrix, layer.bias[:, None]], 1)
    expected = layer(x).flatten(2).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(_columns(layer, x) @ matrix.T, expected)


class Reused(nn.Module):
    """Sequence inputs, a layer called twice and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.head = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.act(self.body(self.act(self.body(x)))).mean(1))


def naive(model, inputs):
    """The matrix of every linear layer, sample by sample and place by place."""
    matrices = {}

    def hook(name):
        def add(module, args):
            for row in args[0].flatten(0, -2):
                row = torch.cat([row, torch.ones(1, dtype=row.dtype)])
                matrices[name] = matrices.get(name, 0) + row.outer(row).detach() / len(inputs)

        return add

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    handles = [m.register_forward_pre_hook(hook(n)) for n, m in layers]
    for x in inputs:
        model(x[None])
    for handle in handles:
        handle.remove()
    return matrices


@pytest.fixture(params=["mlp", "reused"])
def model_and_inputs(request):
    torch.manual_seed(0)
    if request.param == "reused":
        return Reused().double(), torch.randn(6, 5, 3, dtype=torch.float64)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)).double(), torch.randn(
        6, 3, dtype=torch.float64
    )


def test_matrices_match_loops(model_and_inputs):
    model, inputs = model_and_inputs
    torch.testing.assert_close(
        layer_input_matrices(model, inputs, chunk_size=4), naive(model, inputs)
    )


def test_leaves_out_what_it_cannot_represent():
    net = nn.Sequential(
        nn.Conv2d(2, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    )  # fmt: skip
    net[3].weight = net[2].weight
    net[4].bias.requires_grad_(False)
    assert layer_input_matrices(net, torch.randn(2, 2, 1, 1)) == {}


def test_leaves_no_trace():
    net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(), nn.Linear(5, 4)).train()
    state = torch.get_rng_state()
    layer_input_matrices(net, torch.ones(8, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    assert all(p.grad is None for p in net.parameters())
    assert not net[0]._forward_pre_hooks
