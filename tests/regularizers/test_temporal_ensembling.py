"""Temporal Ensembling against a dictionary of averages, and its state through checkpoints."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_taskinfo.regularizers import TemporalEnsembling, WeightSchedule


def logits(B: int, seed: int) -> torch.Tensor:
    return torch.randn(B, 3, generator=torch.Generator().manual_seed(seed))


def test_equals_averages_kept_in_a_dictionary():
    ensembling, averages = TemporalEnsembling(10, 3, weight=2.0), {}
    for epoch in range(4):
        for start in (0, 5):
            index = torch.arange(start, start + 5)
            outputs = logits(5, seed=10 * epoch + start)
            penalty = ensembling(outputs, index, epoch=epoch)
            p, total = outputs.softmax(-1), 0.0
            for i, row in zip(index.tolist(), p, strict=True):
                average, t = averages.get(i, (torch.zeros(3), 0))
                if t:
                    total += ((row - average / (1 - 0.6**t)) ** 2).mean().item() / 5
                averages[i] = (0.6 * average + 0.4 * row, t + 1)
            assert ensembling.value.item() == pytest.approx(total, abs=1e-6)
            assert penalty.item() == pytest.approx((2.0 if epoch else 0.0) * total, abs=1e-6)


def test_a_sample_counts_once_an_epoch_even_twice_in_a_batch():
    ensembling = TemporalEnsembling(4, 3, weight=1.0)
    outputs = logits(3, seed=0)
    ensembling(outputs, torch.tensor([2, 1, 2]), epoch=0)  # the loader cycles
    ensembling(logits(1, seed=1), torch.tensor([2]), epoch=0)
    assert ensembling.count.tolist() == [0, 1, 1, 0]
    torch.testing.assert_close(ensembling.average[2], 0.4 * outputs[0].softmax(-1))
    ensembling(logits(1, seed=1), torch.tensor([2]), epoch=1)
    assert ensembling.count.tolist() == [0, 1, 2, 0]


def test_the_gradient_flows_into_the_outputs_only_where_there_is_a_target():
    ensembling = TemporalEnsembling(4, 3, weight=1.0)
    ensembling(logits(1, seed=0), torch.tensor([0]), epoch=0)
    outputs = logits(2, seed=1).requires_grad_()
    ensembling(outputs, torch.tensor([0, 3]), epoch=1).backward()
    assert outputs.grad[0].abs().sum() > 0
    assert outputs.grad[1].abs().sum() == 0


def test_a_hundred_steps_bring_predictions_nearer_to_their_average():
    def train(weight: float) -> float:
        torch.manual_seed(0)
        net, ensembling = nn.Linear(4, 3), TemporalEnsembling(32, 3, weight=weight)
        x, noise = torch.randn(32, 4), torch.Generator().manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        total = 0.0
        for epoch in range(100):  # noisy inputs push the predictions about; the penalty holds them
            labels = torch.randint(3, (32,), generator=noise)
            outputs = net(x + 0.5 * torch.randn(32, 4, generator=noise))
            loss = nn.functional.cross_entropy(outputs, labels) + ensembling(
                outputs, torch.arange(32), epoch=epoch
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += ensembling.value.item()
        return total

    assert train(weight=20.0) < 0.8 * train(weight=0.0)


def test_the_default_weight_is_the_papers():
    ensembling = TemporalEnsembling(1000, 3, num_labeled=50)
    assert ensembling.schedule == WeightSchedule(1.5, "sigmoid", length=80)


def test_a_reloaded_state_goes_on():
    index, whole = torch.arange(5), TemporalEnsembling(5, 3, weight=1.0)
    whole(logits(5, seed=0), index, epoch=0)
    resumed = TemporalEnsembling(5, 3, weight=1.0)
    resumed.load_state_dict(whole.state_dict())
    assert torch.equal(*(e(logits(5, seed=1), index, epoch=1) for e in (whole, resumed)))


def test_outputs_that_diverge_once_do_not_stay():
    ensembling = TemporalEnsembling(2, 3, weight=1.0)
    ensembling(torch.full((2, 3), torch.nan), torch.arange(2), epoch=0)
    assert ensembling.average.isfinite().all()
    assert ensembling.count.sum() == 0


def test_eval_mode_measures_without_moving():
    ensembling = TemporalEnsembling(2, 3, weight=1.0).eval()
    ensembling(logits(2, seed=0), torch.arange(2), epoch=1)
    assert ensembling.count.sum() == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({}, "`num_labeled` or `weight` must be given, .* got None"),
        ({"weight": 1.0, "num_samples": 0}, "`num_samples` must be at least 1, got 0"),
        ({"weight": 1.0, "num_outputs": 0}, "`num_outputs` must be at least 1, got 0"),
        ({"num_labeled": 11}, "`num_labeled` .* from 0 to `num_samples`, 10, got 11"),
        ({"num_labeled": -1}, "`num_labeled` .* from 0 to `num_samples`, 10, got -1"),
        ({"num_labeled": 5, "ramp_epochs": 0}, "`ramp_epochs` must be at least 1, got 0"),
        ({"weight": 1.0, "decay": 1.0}, r"`decay` must be in \[0, 1\), got 1\.0"),
    ],
)
def test_refuses_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        TemporalEnsembling(**{"num_samples": 10, "num_outputs": 3, **arguments})


RULE = r"`index` must be whole numbers, one for each sample, shape \[2\]"


@pytest.mark.parametrize(
    ("outputs", "index", "match"),
    [
        (torch.zeros(2, 4), torch.arange(2), r"`outputs` must have shape \[B, 3\], got \(2, 4\)"),
        (torch.zeros(2, 3), torch.arange(3), rf"{RULE}, got torch.int64 of shape \(3,\)"),
        (torch.zeros(2, 3), 1, rf"{RULE}, got torch.int64 of shape \(\)"),
        (torch.zeros(2, 3), [[0], [1]], rf"{RULE}, got torch.int64 of shape \(2, 1\)"),
        (
            torch.zeros(2, 3),
            torch.tensor([1, 10]),
            r"`index` must be in \[0, 10\), got 1 to 10: is `num_samples`",
        ),
        (torch.zeros(2, 3), torch.tensor([-1, 1]), r"`index` must be in \[0, 10\), got -1 to 1"),
    ],
)
def test_refuses_batches(outputs, index, match):
    with pytest.raises(ValueError, match=match):
        TemporalEnsembling(10, 3, weight=1.0)(outputs, index, epoch=1)


@pytest.mark.parametrize(
    ("index", "found"),
    [
        (torch.zeros(2), "torch.float32"),
        (torch.tensor([True, False]), "torch.bool"),
        (np.array([0.0, 1.0]), "torch.float64"),
        ([0.5, 1.0], "torch.float32"),
        (True, "torch.bool"),
    ],
)
def test_refuses_an_index_of_another_kind(index, found):
    with pytest.raises(ValueError, match=f"{RULE}, got {found}"):
        TemporalEnsembling(10, 3, weight=1.0)(torch.zeros(2, 3), index, epoch=1)


@pytest.mark.parametrize(
    "index", [[7, 3], (7, 3), np.array([7, 3]), torch.tensor([7, 3], dtype=torch.uint8)]
)
def test_whole_numbers_of_any_kind_are_an_index(index):
    ensembling, expected = (TemporalEnsembling(10, 3, weight=1.0) for _ in range(2))
    for epoch in range(2):
        penalty = ensembling(logits(2, seed=epoch), index, epoch=epoch)
        assert penalty == expected(logits(2, seed=epoch), torch.tensor([7, 3]), epoch=epoch)
    assert torch.equal(ensembling.average, expected.average)


def test_refuses_to_be_called_without_the_epoch():
    """With 0 by default every call would be one of epoch 0, where the penalty is nothing."""
    with pytest.raises(TypeError, match="'epoch'"):
        TemporalEnsembling(10, 3, weight=1.0)(torch.zeros(2, 3), torch.arange(2))
