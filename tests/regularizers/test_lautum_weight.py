"""The default weight of the Lautum information leaves a network able to learn from its labels."""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo.data import load_digits
from lightning_taskinfo.regularizers import Lautum


def trained_error(lautum: Lautum | None) -> tuple[float, int]:
    """Train on the digits, with their training images as the unlabelled ones; return test error and test size."""
    torch.manual_seed(0)
    data = load_digits(size=8)
    (x, y), (x_test, y_test) = (split.tensors for split in (data.train(), data.test()))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if lautum is not None:
        lautum.fit_inputs([x])
    optimizer, g = torch.optim.Adam(net.parameters(), lr=2e-3), torch.Generator().manual_seed(0)
    for _ in range(200):
        i, j = torch.randint(len(x), (2, 64), generator=g)
        loss = cross_entropy(net(x[i]), y[i])
        if lautum is not None:
            loss = loss + lautum(x[j], net(x[j]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return (net(x_test).argmax(1) != y_test).float().mean().item(), len(y_test)


def test_small_images_are_learned_with_the_default_weight():
    alone, n = trained_error(None)
    together, _ = trained_error(Lautum((1, 8, 8), 10))
    assert together - alone < 2 * math.sqrt(
        2 * alone * (1 - alone) / n
    )  # two standard errors of the difference


def test_a_weight_ten_times_as_large_takes_over():
    """Why the default is no larger: accuracy falls to less than half."""
    assert trained_error(Lautum((1, 8, 8), 10, weight=0.01))[0] > 0.5
