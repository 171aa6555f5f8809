"""The information in the weights as a penalty: the right size, and the right direction."""

import pytest
import torch
from torch import nn

from lightning_taskinfo.regularizers import WeightInformation, WeightSchedule
from lightning_taskinfo.variational import add_weight_noise, weight_kl


def test_the_penalty_is_beta_times_kl_over_the_number_of_samples():
    net = add_weight_noise(nn.Linear(3, 2), prior_center="zero")
    information = WeightInformation(beta=WeightSchedule(4.0, "linear", length=2), num_samples=50)
    penalty = information(net, epoch=1)
    assert penalty.item() == pytest.approx(2 / 50 * weight_kl(net).item())
    assert information.value.item() == pytest.approx(weight_kl(net).item())
    assert information.weight == 2.0
    assert information(net, num_samples=10, epoch=2).item() == pytest.approx(
        4 / 10 * weight_kl(net).item()
    )


def test_a_hundred_steps_lower_the_kl():
    def train(beta: float) -> float:
        torch.manual_seed(0)
        net = add_weight_noise(nn.Linear(4, 3), prior_center="zero", std=0.05)
        information, optimizer = (
            WeightInformation(beta, num_samples=64),
            torch.optim.SGD(net.parameters(), lr=0.05),
        )
        x = torch.randn(64, 4)
        for _ in range(100):
            loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1)) + information(net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return weight_kl(net).item()

    assert train(beta=1.0) < 0.8 * train(beta=0.0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"beta": -1.0}, r"`beta` must be non-negative and finite, got -1\.0"),
        ({"num_samples": 0}, "`num_samples` must be at least 1, got 0"),
    ],
)
def test_refuses_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        WeightInformation(**arguments)


def test_refuses_an_unknown_number_of_samples():
    with pytest.raises(
        ValueError, match="`num_samples` must be given: the size of the labeled training set"
    ):
        WeightInformation()(add_weight_noise(nn.Linear(2, 2)))


def test_refuses_a_plain_model():
    with pytest.raises(ValueError, match="`model` has no noisy weights"):
        WeightInformation(num_samples=1)(nn.Linear(2, 2))
