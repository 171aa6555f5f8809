"""A submodule with two names, as N-BEATS has it, is measured right and left as it was."""

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo.fisher import fisher_diagonal, fisher_trace
from tests.fisher.test_measure import empirical


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


def test_the_parameters_stay_where_they_are(net):
    before = dict(net.named_parameters(remove_duplicate=False))
    fisher_trace(net, torch.randn(4, 3).double(), labels="exact")
    after = dict(net.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is p for name, p in before.items())


def test_the_diagonal_is_that_of_one_sample_after_the_other(net):
    x, y = torch.randn(5, 3).double(), torch.randint(3, (5,))
    found = fisher_diagonal(net, x, y, labels="empirical")
    for name, g in empirical(net, x, y).items():
        torch.testing.assert_close(found[name], g.square().mean(0))
