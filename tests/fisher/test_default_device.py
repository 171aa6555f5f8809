"""No tensor is made without a device: with another default device, all stay where model and data are."""

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo.fisher import (
    FisherInformation,
    engines_used,
    fisher_diagonal,
    fisher_trace,
    gradient_gram,
    kronecker_factors,
    layer_traces,
    per_sample_squared_norms,
)


class Net(nn.Module):
    """Sorted rows, a table that is a head too, and a weight that is computed from another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.position = nn.Embedding(3, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(3, device=tokens.device)
        order = tokens.sum(1).argsort()
        h = self.table(tokens[order]) + self.position(places)
        h = self.normed(h)[order.argsort()]
        return nn.functional.linear(h.tanh(), self.table.weight).mean(1)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(7, (6, 3), generator=generator), torch.randint(
        7, (6,), generator=generator
    )


@pytest.mark.parametrize("labels", ["sampled", "exact", "empirical"])
@pytest.mark.parametrize(
    "measure", [fisher_trace, fisher_diagonal, layer_traces, per_sample_squared_norms, engines_used]
)
def test_functions(measure, labels, batch):
    torch.manual_seed(0)
    model = Net()
    expected = measure(model, *batch, labels=labels, chunk_size=4)
    with torch.device("meta"):
        found = measure(model, *batch, labels=labels, chunk_size=4)
    if labels != "sampled" and measure is not engines_used:
        torch.testing.assert_close(found, expected)


def test_gram_matrix_and_kronecker_factors(batch):
    torch.manual_seed(0)
    model = Net()
    expected = gradient_gram(model, *batch)
    with torch.device("meta"):
        torch.testing.assert_close(gradient_gram(model, *batch), expected)
        factors = kronecker_factors(model, batch[0], labels="exact")
    assert all(part.rows.device.type == "cpu" for part in factors.values())


@pytest.mark.parametrize("quantity", ["trace", "diagonal"])
def test_metric(quantity, batch):
    torch.manual_seed(0)
    model = Net()
    with torch.device("meta"):
        metric = FisherInformation(quantity=quantity, labels="empirical")
        metric.update(model, *batch)
        found = metric.compute().trace
    expected = fisher_trace(model, *batch, labels="empirical")
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=0.0)
