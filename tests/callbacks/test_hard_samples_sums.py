"""Sums over the steps of a training beside a dictionary of lists, and the ranking that comes of them."""

import math
from functools import partial

import pytest
import torch

from lightning_taskinfo import SampleScores
from lightning_taskinfo.callbacks.hard_samples import STEPS, SampleSums


def filled(generator):
    """Return sums of more batches than wait, and the same by a loop."""
    sums, losses, norms, seen = SampleSums(), {}, {}, {}
    for step in range(STEPS + 20):
        index = torch.randint(
            30 if step < 10 else 90, (8,), generator=generator
        )  # some of them twice
        loss, norm = torch.rand(8, generator=generator), torch.rand(3, generator=generator)
        loss[step % 8] = math.nan if step % 3 else math.inf
        rows = torch.randint(1, 4, (8,), generator=generator)
        if step == 5:  # its losses are not known
            rows = torch.zeros(8)
        shown = loss * rows, rows
        norms_of_step = torch.full((8,), math.nan)
        if step != 6:
            norms_of_step[2:5] = norm
        sums.add(index.tolist(), partial(tuple, shown), norms_of_step)
        for i, n in enumerate(index.tolist()):
            seen[n] = seen.get(n, 0) + 1
            if step != 5 and loss[i].isfinite():
                losses.setdefault(n, []).append(loss[i].item())
            if step != 6 and 2 <= i < 5:
                norms.setdefault(n, []).append(norm[i - 2].item())
    return sums, losses, norms, seen


def test_sums_are_those_of_a_loop():
    sums, losses, norms, seen = filled(torch.Generator().manual_seed(0))
    scores = sums.scores("loss")
    assert len(scores.seen) == max(seen) + 1
    for n in range(len(scores.seen)):
        assert scores.seen[n] == seen.get(n, 0)
        for values, expected in ((scores.loss, losses), (scores.squared_norm, norms)):
            mean = sum(expected[n]) / len(expected[n]) if n in expected else math.nan
            assert values[n].item() == pytest.approx(mean, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("rank_by", ["loss", "squared_norm"])
def test_the_largest_score_is_first_and_what_has_none_is_left_out(rank_by):
    values = torch.tensor([1.0, math.nan, 3.0, 2.0, 3.0])
    other = torch.zeros(5)
    parts = (values, other) if rank_by == "loss" else (other, values)
    scores = SampleScores(*parts, torch.ones(5, dtype=torch.long), rank_by)
    assert scores.ranking().tolist() == [2, 4, 3, 0]
    rows = scores.top(2)
    assert [(row["rank"], row["index"], row[rank_by]) for row in rows] == [(1, 2, 3.0), (2, 4, 3.0)]
    assert len(scores.top(10)) == 4
    assert len(str(scores).splitlines()) == 5


def test_nothing_seen_is_an_empty_ranking():
    scores = SampleSums().scores("loss")
    assert not scores.top(3)
    assert len(str(scores).splitlines()) == 1


def test_plot_has_all_samples_and_marks_the_first():
    _, ax = SampleScores(torch.arange(9.0), torch.zeros(9), torch.ones(9), "loss").plot(k=4)
    everything, first = (line.get_ydata() for line in ax.get_lines())
    assert list(everything) == [*range(8, -1, -1)]
    assert list(first) == [8, 7, 6, 5]
