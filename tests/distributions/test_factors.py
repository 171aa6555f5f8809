"""Layer inputs and Kronecker factors against loops over samples, one autograd call each."""

import pytest
import torch
from torch import nn

from lightning_taskinfo.distributions import layer_input_matrices, layer_kronecker_factors
from lightning_taskinfo.distributions.factors import _columns, _rows

CONVOLUTIONS = {
    "plain": {},
    "stride_dilation": {"stride": 2, "dilation": 2, "padding": (2, 1)},
    "no_bias": {"bias": False},
    "same": {"padding": "same"},
    "circular": {"padding": 1, "padding_mode": "circular"},
}


@pytest.mark.parametrize("arguments", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_columns_times_weights_are_the_output_of_a_convolution(arguments):
    layer, x = nn.Conv2d(2, 3, 3, **arguments).double(), torch.randn(4, 2, 7, 6, dtype=torch.float64)
    matrix = layer.weight.flatten(1)
    if layer.bias is not None:
        matrix = torch.cat([matrix, layer.bias[:, None]], 1)
    torch.testing.assert_close(_columns(layer, x) @ matrix.T, _rows(layer, layer(x)))


class Reused(nn.Module):
    """Sequence inputs, a layer called twice and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.head = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.act(self.body(self.act(self.body(x)))).mean(1))


def naive(model, inputs, labels):
    """A and B of every linear layer, sample by sample and place by place."""
    factors = {}
    for x, y in zip(inputs, labels, strict=True):
        for call in range(_calls(model, x)):
            name, z, g = _gradient_at_call(model, x, y, call)
            for row, gradient in zip(z.flatten(0, -2), g.flatten(0, -2), strict=True):
                row = torch.cat([row, torch.ones(1, dtype=row.dtype)])
                A, B, places = factors.get(name, (0, 0, 0))
                factors[name] = (
                    A + torch.outer(row, row) / len(inputs),
                    B + torch.outer(gradient, gradient),
                    places + 1,
                )
    return {name: (A, B / places) for name, (A, B, places) in factors.items()}


def _calls(model, x):
    count = []
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    handles = [m.register_forward_hook(lambda *_: count.append(1)) for m in layers]
    model(x[None])
    for handle in handles:
        handle.remove()
    return len(count)


def _gradient_at_call(model, x, y, call):
    """Input of the ``call``-th linear call, and the gradient at its output: add zeros there and differentiate."""
    count, result = [0], {}

    def hook(name):
        def add_zeros(module, args, output):
            if count[0] == call:
                zeros = torch.zeros_like(output, requires_grad=True)
                result.update(name=name, z=args[0].detach().clone(), zeros=zeros)
                output = output + zeros
            count[0] += 1
            return output

        return add_zeros

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    handles = [m.register_forward_hook(hook(n)) for n, m in layers]
    log_p = model(x[None]).log_softmax(-1)[0, y]
    for handle in handles:
        handle.remove()
    (g,) = torch.autograd.grad(log_p, [result["zeros"]])
    return result["name"], result["z"], g


@pytest.fixture(params=["mlp", "reused"])
def model_and_inputs(request):
    torch.manual_seed(0)
    if request.param == "reused":
        return Reused().double(), torch.randn(6, 5, 3, dtype=torch.float64)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)).double(), torch.randn(6, 3, dtype=torch.float64)


def test_factors_match_loops(model_and_inputs):
    model, inputs = model_and_inputs
    g = torch.Generator().manual_seed(4)
    factors = layer_kronecker_factors(model, inputs, generator=g, chunk_size=4)
    g.manual_seed(4)
    labels = [torch.multinomial(model(chunk).softmax(-1), 1, generator=g) for chunk in inputs.split(4)]
    expected = naive(model, inputs, torch.cat(labels).flatten())
    matrices = layer_input_matrices(model, inputs, chunk_size=4)
    assert factors.keys() == expected.keys() == matrices.keys()
    for layer, (A, B) in expected.items():
        torch.testing.assert_close(factors[layer], (A, B))
        torch.testing.assert_close(matrices[layer], A)


def test_a_softmax_layer_has_a_closed_form():
    """B is unbiased for the mean of diag(p) − ppᵀ: the output layer's Fisher."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 3).double(), torch.randn(1, 2, dtype=torch.float64)
    p = model(x).softmax(-1)[0].detach()
    _, B = layer_kronecker_factors(model, x.expand(20_000, 2))[""]
    exact = torch.diag(p) - torch.outer(p, p)
    gradients = torch.eye(3).double() - p  # one a label
    second = torch.einsum("c,ci,cj->ij", p, gradients**2, gradients**2)
    assert ((B - exact) / ((second - exact**2) / 20_000).sqrt()).abs().max() < 4


def test_leaves_out_what_it_cannot_represent():
    net = nn.Sequential(
        nn.Conv2d(2, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    )  # fmt: skip
    net[3].weight = net[2].weight
    net[4].bias.requires_grad_(False)
    assert layer_input_matrices(net, torch.randn(2, 2, 1, 1)) == {}


def test_a_layer_that_the_output_does_not_need_has_no_curvature():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.other = nn.Linear(3, 2), nn.Linear(3, 4)

        def forward(self, x):
            self.other(x)
            return self.head(x)

    factors = layer_kronecker_factors(TwoHeads(), torch.randn(6, 3))
    assert not factors["other"][1].any()
    assert factors["head"][1].any()


def test_leaves_no_trace():
    net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(), nn.Linear(5, 4)).train()
    state = torch.get_rng_state()
    layer_kronecker_factors(net, torch.ones(8, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    assert all(p.grad is None for p in net.parameters())
    assert not net[0]._forward_hooks
