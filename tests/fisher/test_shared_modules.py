"""A submodule with two names, as N-BEATS has it, is measured right and left as it was by every engine."""

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo.fisher import fisher_diagonal, fisher_trace


class TwoNames(nn.Module):
    """One linear layer under two names, and its weight once more in another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.forecast = self.backcast = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.forecast.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.forecast(x)) - torch.tanh(self.backcast(2 * x)))


@pytest.fixture
def net() -> TwoNames:
    torch.manual_seed(0)
    return TwoNames().double()


@pytest.mark.parametrize("engine", ["auto", "per_sample", "loop"])
def test_the_parameters_stay_where_they_are(net, engine):
    before = dict(net.named_parameters(remove_duplicate=False))
    fisher_trace(net, torch.randn(4, 3).double(), labels="exact", engine=engine)
    after = dict(net.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is p for name, p in before.items())


@pytest.mark.parametrize("engine", ["auto", "per_sample"])
def test_the_diagonal_is_that_of_one_sample_after_the_other(net, engine):
    x = torch.randn(5, 3).double()
    expected = fisher_diagonal(net, x, labels="exact", engine="loop")
    found = fisher_diagonal(net, x, labels="exact", engine=engine)
    torch.testing.assert_close(found, expected)
