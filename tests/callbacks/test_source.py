"""Outputs and losses of a process's samples, beside the model called on each of them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_taskinfo.callbacks.source import CHUNK, Samples
from lightning_taskinfo.fisher.measure import Request

N = CHUNK + 22


def samples(counted, generator):
    x = torch.randn(N, 4, generator=generator)
    y = torch.randint(3, (N,), generator=generator)
    trainer = SimpleNamespace(world_size=1)
    return Samples(x, y, counted, 0, counted, 0, Request("sampled", "categorical", 1), trainer)


@pytest.mark.parametrize("counted", [N, CHUNK + 5, CHUNK, 7, 0])
@pytest.mark.parametrize("some", [slice(None), slice(1, None, 2), slice(0, None, 2)])
def test_outputs_and_losses_are_those_of_the_samples_that_count(counted, some):
    generator = torch.Generator().manual_seed(0)
    mine = samples(counted, generator)
    model = nn.Linear(4, 3)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    outputs = [*mine.outputs(model, some)]
    assert len(passes) == -(-len(range(N)[some]) // CHUNK), "of all inputs, counted or not"
    with torch.no_grad():
        expected = model(mine.inputs[:counted][some])
    torch.testing.assert_close(torch.cat([torch.empty(0, 3), *outputs]), expected)
    assert not any(part.requires_grad for part in outputs)
    losses = cross_entropy(expected, mine.targets[:counted][some], reduction="none")
    torch.testing.assert_close(mine.losses(model, some), losses.double())
