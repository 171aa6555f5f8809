"""A parameter that is used where autograd does not look, and yet has a gradient: the graph must leave it to others."""

import pytest
import torch
from torch import nn

from lightning_taskinfo.fisher import fisher_diagonal, per_sample_squared_norms


class Recomputed(torch.autograd.Function):
    """Runs a layer without a graph, and again in the backward pass, which adds to the layer's ``.grad`` by itself."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)  # without gradients, as always inside of a function

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        return x.grad, None


class Net(nn.Module):
    def __init__(self, hide):
        super().__init__()
        torch.manual_seed(0)
        self.hide = hide
        self.first, self.middle, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        h = Recomputed.apply(h, self.middle) if self.hide else self.middle(h)
        return self.last(h.tanh())


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 5, generator=generator), torch.randint(3, (6,), generator=generator)


@pytest.mark.filterwarnings("ignore:The graph does not show")
def test_the_gradient_of_a_hidden_use_counts(batch):
    x, y = batch
    hidden, plain = (fisher_diagonal(Net(hide), x, y, labels="empirical") for hide in (True, False))
    for name, diagonal in plain.items():
        assert diagonal.sum() > 0
        torch.testing.assert_close(
            hidden[name], diagonal, msg=lambda text, name=name: f"{name}: {text}"
        )
    norms = [
        per_sample_squared_norms(Net(hide), x, y, labels="empirical") for hide in (True, False)
    ]
    torch.testing.assert_close(*norms)


def test_only_what_is_hidden_is_left_to_the_loop(batch):
    with pytest.warns(UserWarning, match=r"gradients of middle.bias, middle.weight belong to"):
        fisher_diagonal(Net(hide=True), *batch, labels="empirical")
