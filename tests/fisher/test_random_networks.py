"""Networks drawn at random, beside a loop over single samples."""

import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.fisher import (
    FisherInformation,
    fisher_diagonal,
    gradient_gram,
    per_sample_squared_norms,
)
from lightning_taskinfo.functional.likelihood import Categorical
from tests.fisher.random_networks import CLASSES, LAYERS, MOVES, POSITIONS, WIDTH, RandomNet
from tests.fisher.test_measure import empirical

steps = st.tuples(st.sampled_from(MOVES), st.sampled_from(LAYERS))
mixing = st.tuples(st.just("mixed"), st.sampled_from(LAYERS))
networks = st.fixed_dictionaries(
    {
        "steps": st.lists(st.one_of(*[steps] * 12, mixing), min_size=1, max_size=3),
        "seed": st.integers(0, 2**16),
        "pooled": st.booleans(),
    }
)
batches = st.fixed_dictionaries(
    {"n": st.integers(1, 9), "chunk_size": st.none() | st.integers(1, 9)}
)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)


def check_exact(model: RandomNet, inputs: Tensor, chunk_size: int | None) -> None:
    """Compare diagonal and norms of several scores a sample with those of a loop."""
    n = len(inputs)
    squares = {name: p.new_zeros(n, *p.shape) for name, p in model.named_parameters()}
    for i in range(n):
        outputs = model(inputs[i : i + 1])
        for root in Categorical().roots(outputs.detach()):
            model.zero_grad()
            outputs.backward(root, retain_graph=True)
            for name, p in model.named_parameters():
                if p.grad is not None:
                    squares[name][i] += p.grad.square()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TaskInfoWarning)
        diagonal = fisher_diagonal(model, inputs, labels="exact", chunk_size=chunk_size)
        norms = per_sample_squared_norms(model, inputs, labels="exact", chunk_size=chunk_size)
    for name, g in squares.items():
        close(diagonal[name], g.mean(0))
    close(norms, sum(g.reshape(n, -1).sum(1) for g in squares.values()))


def check(network: dict, batch: dict) -> None:
    """Compare trace, standard error, diagonal and Gram matrix with those of a loop."""
    model = RandomNet(**network).double().eval()
    n, chunk_size = batch["n"], batch["chunk_size"]
    generator = torch.Generator().manual_seed(network["seed"])
    inputs = torch.randn(n, POSITIONS, WIDTH, generator=generator, dtype=torch.float64)
    shape = (n,) if network["pooled"] else (n, POSITIONS)
    targets = torch.randint(CLASSES, shape, generator=generator)
    rows = empirical(model, inputs, targets)
    flat = torch.cat([g.reshape(n, -1) for g in rows.values()], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TaskInfoWarning)
        metric = FisherInformation(labels="empirical", chunk_size=chunk_size)
        metric.update(model, inputs, targets)
        diagonal = fisher_diagonal(
            model, inputs, targets, labels="empirical", chunk_size=chunk_size
        )
        gram = gradient_gram(model, inputs, targets, chunk_size=chunk_size)
    norms = flat.square().sum(1)
    estimate = metric.compute()
    close(estimate.trace, norms.mean())
    if n > 1:
        torch.testing.assert_close(
            estimate.standard_error, norms.std() / math.sqrt(n), rtol=1e-5, atol=1e-8
        )
    for name, g in rows.items():
        close(diagonal[name], g.square().mean(0))
    close(gram, flat @ flat.T)
    if network["seed"] % 3 == 0:  # it takes a backward pass for each label of each sample
        check_exact(model, inputs, chunk_size)


drawn = settings(
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# Of the first three samples one has a gradient behind the mask, and of the others another one.
@example(
    {"steps": [("mask_with_zeros", "transposed")], "seed": 33241, "pooled": False},
    {"n": 6, "chunk_size": 3},
)
@settings(drawn, max_examples=200, derandomize=True)
@given(networks, batches)
def test_the_same_networks_at_every_run(network, batch):
    check(network, batch)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(drawn, max_examples=2000)
@given(networks, batches)
def test_other_networks_at_every_run(network, batch):
    check(network, batch)
