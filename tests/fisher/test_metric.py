"""The metric over uneven batches and processes is the function over all samples, and leaves no trace."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from lightning_taskinfo.fisher import (
    FisherInformation,
    fisher_trace,
    layer_traces,
    per_sample_squared_norms,
)
from tests.ranks import on_ranks

BATCHES = (slice(0, 4), slice(4, 5), slice(5, 11))  # uneven, one of them a single sample


class Net(nn.Sequential):
    """Small, with the two layers an observer could disturb."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)
        )


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net = Net().double()
    net(torch.randn(8, 4, dtype=torch.float64))  # running statistics of its own
    return net, torch.randn(11, 4, dtype=torch.float64), torch.randint(3, (11,))


@pytest.mark.parametrize("labels", ["exact", "empirical"])
def test_uneven_batches_are_one_batch(problem, labels):
    net, x, y = problem
    metric = FisherInformation(labels=labels)
    for batch in BATCHES:
        metric.update(net, x[batch], y[batch])
    result = metric.compute()
    net.eval()
    norms = per_sample_squared_norms(net, x, y, labels=labels)
    torch.testing.assert_close(result.trace, norms.mean())
    torch.testing.assert_close(result.standard_error, norms.std() / math.sqrt(11))
    torch.testing.assert_close(result.layers, layer_traces(net, x, y, labels=labels))
    assert result.samples == 11


def test_merging_after_a_computation_counts(problem):
    net, x, _ = problem
    first, second, whole = (FisherInformation(labels="exact") for _ in range(3))
    for metric, batch in ((first, x[:4]), (second, x[4:]), (whole, x)):
        metric.update(net, batch)
        metric.compute()
    first.merge_state(second)
    torch.testing.assert_close(first.compute(), whole.compute())
    second.merge_state(FisherInformation(labels="exact"))  # which has seen nothing
    assert second.compute().samples == 7


def test_does_not_merge_another_model(problem):
    net, x, _ = problem
    first, second = (FisherInformation(labels="exact") for _ in range(2))
    first.update(net, x)
    second.update(nn.Linear(4, 3).double(), x)
    with pytest.raises(
        ValueError, match=r"must have the trainable parameters of the first update, got others: \["
    ):
        first.merge_state(second)


def measured(rank, net, x, y):
    """The first rank has two batches, the second one, the third none."""
    metric = FisherInformation(labels="exact")
    for batch in ((slice(0, 4), slice(4, 9)), (slice(9, 11),), (slice(11, 11),))[rank]:
        metric.update(net, x[batch], y[batch])
    return metric.compute()._asdict()


def test_processes_are_one_process(problem):
    net, x, y = problem
    whole = FisherInformation(labels="exact")
    whole.update(net, x, y)
    for result in on_ranks(measured, net, x, y, world_size=3):
        torch.testing.assert_close(result, whole.compute()._asdict(), equal_nan=True)


def test_forward_gives_the_batch_and_keeps_the_sum(problem):
    net, x, y = problem
    metric = FisherInformation(labels="exact")
    values = [metric(net, x[batch], y[batch]).trace for batch in BATCHES]
    net.eval()
    torch.testing.assert_close(values[2], fisher_trace(net, x[BATCHES[2]], labels="exact"))
    torch.testing.assert_close(metric.compute().trace, fisher_trace(net, x, labels="exact"))
    metric.reset()
    with pytest.warns(UserWarning, match="called before the ``update`` method"):
        assert metric.compute().trace.isnan()


def test_leaves_no_trace(problem):
    net, x, y = problem
    net.train()
    net[1].eval()
    net(x).sum().backward()
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    grads, state = [p.grad.clone() for p in net.parameters()], torch.get_rng_state()
    metric = FisherInformation()
    metric.update(net, x, y)
    assert not list(metric.modules())[1:], "the model became a part of the metric"
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True)
    )
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_differ_between_updates_and_repeat_with_the_seed(problem):
    net, x, _ = problem

    def traces(seed):
        metric = FisherInformation(seed=seed)
        return [metric(net, x).trace.item() for _ in range(3)]

    assert traces(0) == traces(0)
    assert len({*traces(0), *traces(1)}) == 6


def test_one_sample_has_no_standard_error(problem):
    net, x, _ = problem
    metric = FisherInformation(labels="exact")
    metric.update(net, x[:1])
    assert metric.compute().standard_error.isnan()


def test_survives_a_copy_and_a_pickle(problem):
    net, x, _ = problem
    metric = FisherInformation(labels="exact")
    metric.update(net, x[:5])
    for twin in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        twin.update(net, x[5:])
        net.eval()
        torch.testing.assert_close(twin.compute().trace, fisher_trace(net, x, labels="exact"))


def test_refuses_another_model(problem):
    net, x, _ = problem
    metric = FisherInformation()
    metric.update(net, x)
    with pytest.raises(
        ValueError,
        match=r"`model` must have the trainable parameters of the first update, got others",
    ):
        metric.update(nn.Linear(4, 3).double(), x)
