"""Random labels cannot be compressed: on average over labelings no code for them is shorter than N log C.

Measured C₁ = E_Q[loss] + KL(Q‖P) is such a code for any Q, however it was found, as long as P does not know the labels.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo.callbacks import InformationInWeights
from lightning_taskinfo.variational import add_weight_noise, sampling, weight_kl
from tests.callbacks.runs import Classifier, digits, fit

N, CLASSES, LABELINGS = 32, 3, 6
NATS = N * math.log(CLASSES)


def random_labels(seed):
    return torch.randint(CLASSES, (N,), generator=torch.Generator().manual_seed(seed))


def not_shorter(lengths):
    """Whether the mean of code lengths is not below that of the labels, but for chance."""
    lengths = torch.tensor(lengths)
    return lengths.mean() > NATS - 2 * lengths.std() / math.sqrt(len(lengths))


def test_around_a_trained_network():
    lengths = []
    for seed in range(LABELINGS):
        data = TensorDataset(digits().tensors[0], random_labels(seed))
        callback = InformationInWeights(
            prior_std="auto", labels="exact", draws=16, every_n_epochs=10
        )
        model = Classifier(dropout=0.0)
        fit(Path(), callback, model=model, loader=DataLoader(data, batch_size=8), max_epochs=10)
        lengths.append(callback.history[-1]["c_beta"])
    assert not_shorter(lengths)


@pytest.mark.parametrize("beta", [1.0, 0.001], ids=["best", "by heart"])
def test_where_the_gaussian_is_trained(beta):
    """At β = 1 a good code is found, near N log C; far below, labels are learned by heart, and the KL pays for it."""
    x, lengths, losses = digits().tensors[0], [], []
    for seed in range(LABELINGS):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(x.shape[1], 24), nn.Tanh(), nn.Linear(24, CLASSES))
        add_weight_noise(net, std=0.1)
        optimizer, y = torch.optim.Adam(net.parameters(), 0.1), random_labels(seed)
        for _ in range(100):
            loss = cross_entropy(net(x), y, reduction="sum") + beta * weight_kl(net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad(), sampling(net):
            draws = [cross_entropy(net(x), y, reduction="sum").item() for _ in range(50)]
            losses.append(sum(draws) / len(draws))
            lengths.append(losses[-1] + weight_kl(net).item())
    assert not_shorter(lengths)
    if beta == 1.0:
        assert sum(lengths) / LABELINGS < 1.1 * NATS, "the bound is nearly reached"
    else:
        assert sum(losses) / LABELINGS < 0.2 * NATS, "the labels alone would look compressed"
