"""Two real processes: what must be the same on both ranks is, and what must differ does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_taskinfo.regularizers import Lautum
from tests.penalised_net import D, K, N, Pairs
from tests.test_mixins import same


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.ddp_penalised", str(folder)]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def test_network_critic_averages_and_ensembles_are_the_same_on_both_ranks(ranks):
    first, second = (rank["state"] for rank in ranks)
    assert any(name.startswith("mutual_information.critic") for name in first)
    shared = [
        name for name in first if "running_" not in name
    ]  # batch norm's statistics are each rank's own in DDP
    assert [name for name in shared if not same(first[name], second[name])] == []


def test_noise_differs_over_ranks(ranks):
    assert not torch.equal(ranks[0]["noise"], ranks[1]["noise"])


def test_lautum_averages_the_batches_of_both_ranks(ranks):
    first = [rank["first"] for rank in ranks]
    for a, b, average in zip(
        first[0]["local"], first[1]["local"], first[0]["average"], strict=True
    ):
        assert not torch.equal(a, b)
        torch.testing.assert_close(0.1 * (a + b) / 2, average)


def test_the_inputs_covariance_is_that_of_all_ranks(ranks):
    whole = Lautum((D,), K).fit_inputs([Pairs().x_u])
    state = ranks[1]["state"]
    assert state["lautum.samples"] == N
    torch.testing.assert_close(state["lautum.whitener"], whole.whitener)
    torch.testing.assert_close(state["lautum.mean"], whole.mean)


def test_the_ensemble_has_seen_the_samples_of_both_ranks(ranks):
    assert ranks[0]["state"]["temporal_ensembling.count"].tolist() == [2] * N


def test_the_number_of_samples_is_that_of_all_ranks(ranks):
    penalty, kl = ranks[1]["information"]
    assert penalty.item() == pytest.approx(0.5 * kl.item() / N)


def test_rows_of_different_numbers_are_gathered(ranks):
    assert all(rank["gathered"].tolist() == [0, 0, 1] for rank in ranks)
