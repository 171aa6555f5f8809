"""Two real processes: what must be the same on both ranks is, and what must differ does."""

import os

import pytest
import torch

from lightning_taskinfo.regularizers import Lautum
from lightning_taskinfo.regularizers._base import gather_rows
from lightning_taskinfo.variational import noisy_weights
from tests.penalised_net import WEIGHTS, D, K, N, Net, Pairs, fit
from tests.test_mixins import same

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


class RecordingLautum(Lautum):
    """Keeps what this rank's first batch gave, beside what the ranks made of it."""

    first = None

    def _average(self, local):
        average = super()._average(local)
        if self.first is None:
            self.first = {"local": local.detach(), "average": self.covariance.clone()}
        return average


class DistributedNet(Net):
    """Writes what each rank has in the end."""

    def __init__(self, folder):
        super().__init__(WEIGHTS)
        self.folder = folder

    def on_fit_start(self):
        self.lautum = RecordingLautum((D,), K, weight=0.1, decay=0.9)
        self.lautum.fit_inputs([Pairs().x_u[self.global_rank :: 2]])  # each rank brings its part

    def on_train_end(self):
        _, mean, noise = next(noisy_weights(self))
        state = {
            "state": self.state_dict(),
            "first": self.lautum.first,
            "noise": (noise(mean) - mean).detach(),
            "gathered": gather_rows(torch.arange(self.global_rank + 1)),
            "information": (self.information_penalty().detach(), self.information.value),
        }
        torch.save(state, self.folder / f"rank{self.global_rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    model = DistributedNet(folder)
    fit(model, strategy="ddp_fork", devices=2, accumulate_grad_batches=2)
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
    a, b = (rank["first"]["local"] for rank in ranks)
    assert not torch.equal(a, b)
    torch.testing.assert_close(0.1 * (a + b) / 2, ranks[0]["first"]["average"])


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
