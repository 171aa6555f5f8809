"""A trace holds no more tensors at once than a plain step does, and a diagonal a copy of the weights besides."""

from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from lightning_taskinfo.fisher import fisher_diagonal, fisher_trace
from tests.fisher.networks import Checkpointed

ROWS, WIDTH = 512, 64


def peak(call) -> int:
    """Return how many bytes of tensors a call holds at most; not the first two, which look for the samples."""
    call()
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("positions", [1, 16])
def test_memory_beside_a_plain_step(positions):
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(12)]
    body = [layer for block in layers for layer in block]
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(positions * WIDTH, 4)).eval()
    n = ROWS // positions
    x, y = torch.randn(n, positions, WIDTH), torch.randint(4, (n,))
    weights = sum(p.nbytes for p in net.parameters())

    def plain():
        cross_entropy(net(x), y).backward()
        net.zero_grad()

    step = peak(plain)
    options = {"labels": "empirical", "chunk_size": n}
    assert peak(lambda: fisher_trace(net, x, y, **options)) <= 1.05 * step
    assert peak(lambda: fisher_diagonal(net, x, y, **options)) <= 1.05 * step + weights


@pytest.mark.parametrize(("labels", "scores", "largest"), [("sampled", 1, 150), ("exact", 5, 38)])
def test_no_gradient_of_a_chunk_has_more_than_32_megabytes(labels, scores, largest):
    pooled = (nn.AvgPool2d(64), nn.Flatten(), nn.Linear(10, 5))
    net = nn.Sequential(nn.Conv2d(1, 10, 1), *pooled).eval()
    sizes = []
    net[0].register_forward_hook(lambda layer, inputs, outputs: sizes.append(outputs.nbytes))
    fisher_trace(net, torch.randn(300, 1, 64, 64), labels=labels)
    assert max(sizes) == largest * 10 * 64 * 64 * 4  # chunks of about one size
    assert scores * max(sizes) <= 2**25


def test_what_checkpointing_computes_again_is_computed_once_for_all_uses():
    model = Checkpointed(use_reentrant=False).eval()
    runs = []
    model.body.register_forward_pre_hook(lambda *_: runs.append(1))
    for _ in range(3):
        runs.clear()
        fisher_trace(model, torch.randn(6, 5))
    assert len(runs) == 3  # forward, for what the uses have kept, and backward
