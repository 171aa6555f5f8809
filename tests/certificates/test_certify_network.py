"""The bound for the network itself adds up, rests on blocks with one draw each, and refuses inputs that were used."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo._progress import silent
from lightning_taskinfo.certificates import Prior, certify, zero_one_loss
from lightning_taskinfo.certificates.certificate import Candidate
from lightning_taskinfo.certificates.certify import block_disagreements
from lightning_taskinfo.certificates.search import best_of
from lightning_taskinfo.certificates.subject import Subject
from lightning_taskinfo.functional.pac_bayes import kl_bound
from lightning_taskinfo.functional.tail_bounds import (
    betting_upper_bound,
    binomial_upper_bound,
    most_errors_below,
)
from tests.certificates.conftest import blobs
from tests.distributions.conftest import isotropic

QUICK = {"draws": 100, "betas": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0), "structure": "diagonal"}
UNLABELLED = blobs(1_000, seed=5)[0]


@pytest.fixture(scope="module")
def certificate(trained, data, start):
    return certify(
        trained,
        data,
        Prior(start, "random initialisation"),
        unlabelled=UNLABELLED,
        held_out=blobs(300, 7),
        **QUICK,
    )


def test_it_adds_up_and_holds_on_new_samples(certificate, trained):
    network = certificate.network
    assert network.bound == network.stochastic_bound + network.disagreement_upper
    complexity = network.kl + network.price
    assert network.stochastic_bound == kl_bound(network.risk_upper, complexity, 600, 0.04).item()
    assert network.risk < network.risk_upper
    assert 0 < network.disagreement < network.disagreement_upper
    assert network.confidence == pytest.approx(0.95)
    assert (network.inputs, network.blocks) == (1_000, 100)
    inputs, targets = blobs(5_000, seed=99)
    with torch.no_grad():
        assert zero_one_loss(trained(inputs), targets).mean() < network.bound


def test_its_post_distribution_trades_disagreement_for_kl(certificate):
    """It is the best of the rows by the sum of both; a narrower one disagrees less."""
    best = min(certificate.candidates, key=lambda row: row.bound + row.disagreement)
    assert (certificate.network.beta, certificate.network.kl) == (best.beta, best.kl)
    by_beta = [row.disagreement for row in sorted(certificate.candidates, key=lambda row: row.beta)]
    assert by_beta[0] < by_beta[len(by_beta) // 2] < by_beta[-1]


def test_the_best_rows_differ_where_disagreement_decides():
    wide = Candidate("diagonal", 10.0, 0.1, 5.0, 1.0, 0.2, {}, disagreement=0.3)
    narrow = Candidate("diagonal", 0.1, 0.05, 50.0, 1.0, 0.3, {}, disagreement=0.1)
    assert best_of([wide, narrow]) == (wide, narrow)


def test_nothing_of_the_certificate_changes_with_unlabelled_inputs(
    certificate, trained, data, start
):
    alone = certify(trained, data, Prior(start, "random initialisation"), **QUICK)
    assert (alone.bound, alone.risk, alone.candidates) == (
        certificate.bound,
        certificate.risk,
        certificate.candidates,
    )
    assert alone.network is None


@pytest.mark.parametrize(
    ("m", "draws", "blocks", "size"), [(1_000, 100, 100, 10), (250, 100, 83, 3), (90, 100, 90, 1)]
)
def test_every_block_has_inputs_and_a_draw_of_its_own(trained, data, m, draws, blocks, size):
    """A network whose draws say which draw they are, on inputs that say which input they are."""

    class Numbered(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.calls = []

        def forward(self, x):
            self.calls.append((self.weight.item(), x[:, 0].tolist()))
            return torch.stack([x[:, 0] * 0, x[:, 0] * 0 + self.weight], dim=1)

    model = Numbered()
    inputs = torch.arange(m)[:, None].float()
    subject = Subject(model, (inputs, torch.zeros(m).long()), seed=0)
    model.calls.clear()
    means, found = block_disagreements(subject, isotropic(model, 1.0), inputs, None, draws, silent)
    (own, *drawn) = [call for call in model.calls if len(call[1]) <= m]
    assert own[0] == 0.0
    assert (len(means), found) == (blocks, size)
    assert [len(rows) for _, rows in drawn] == [size] * blocks
    assert len({weight for weight, _ in drawn}) == blocks
    rows = [row for _, block in drawn for row in block]
    assert len(set(rows)) == len(rows)
    assert rows != sorted(rows)  # at random: the inputs' order may mean something
    expected = [
        float(weight > 0) for weight, _ in drawn
    ]  # ties go to class 0, which the network says
    assert means.tolist() == expected


def test_disagreement_is_that_of_a_loop(certificate, trained):
    """Blocks or single inputs: the same mean, within its error."""
    subject = Subject(trained, blobs(600, 0), seed=1)
    blocks, _ = block_disagreements(subject, certificate.post, UNLABELLED, None, 500, silent)
    g = torch.Generator().manual_seed(3)
    own = trained(UNLABELLED).argmax(1)
    single = []
    for _ in range(200):
        with torch.no_grad(), certificate.post.with_weights(trained, g):
            single.append((trained(UNLABELLED).argmax(1) != own).double().mean())
    difference = blocks.mean() - torch.stack(single).mean()
    error = (blocks.var() / len(blocks) + torch.stack(single).var() / 200).sqrt()
    assert difference.abs() < 4 * error
    assert betting_upper_bound(blocks, 0.01) > blocks.mean()


def test_the_test_set_bound_is_that_of_the_errors(certificate, trained):
    inputs, targets = blobs(300, 7)
    errors = int(zero_one_loss(trained(inputs), targets).sum())
    found = certificate.test_set
    assert (found.n, found.risk) == (300, errors / 300)
    assert found.bound == binomial_upper_bound(errors, 300, 0.05).item()
    assert found.break_even == most_errors_below(certificate.network.bound, 300, 0.05) / 300


def test_without_held_out_labels_a_fifth_is_imagined(trained, data, prior):
    certificate = certify(trained, data, prior, **QUICK)
    found = certificate.test_set
    assert (found.n, found.bound, found.risk) == (120, None, None)
    assert found.break_even == most_errors_below(certificate.bound, 120, 0.05) / 120


def test_the_test_set_bound_of_another_loss_is_not_binomial(trained, data, prior):
    def brier(outputs, targets):
        return 1 - outputs.softmax(1).gather(1, targets[:, None])[:, 0]

    held_out = blobs(300, 7)
    found = certify(trained, data, prior, loss_fn=brier, held_out=held_out, **QUICK).test_set
    with torch.no_grad():
        losses = brier(trained(held_out[0]), held_out[1])
    assert found.bound == pytest.approx(betting_upper_bound(losses, 0.05).item())


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: (x, None),
        lambda x: TensorDataset(x),
        lambda x: list(x),
        lambda x: DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=7, shuffle=True),
    ],
    ids=["tensor", "pair", "dataset", "list", "loader"],
)
def test_unlabelled_inputs_of_any_form(trained, data, prior, certificate, form):
    found = certify(trained, data, prior, unlabelled=form(UNLABELLED), **QUICK)
    assert found.network == certificate.network


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"unlabelled": UNLABELLED[:99]}, "`unlabelled` .*100.*got 99"),
        (
            {"unlabelled": torch.cat([UNLABELLED, blobs(600, 0)[0][:3]])},
            "`unlabelled` .*got 3 of 1003",
        ),
        ({"unlabelled": blobs(600, 0)}, "`unlabelled` .*got 600 of 600"),
        (
            {"unlabelled": UNLABELLED, "loss_fn": lambda outputs, targets: targets * 0.5},
            "`unlabelled` .*`loss_fn`",
        ),
        ({"unlabelled": UNLABELLED * torch.nan}, "`unlabelled` must be finite"),
        ({"held_out": tuple(part[:20] for part in blobs(600, 0))}, "`held_out` .*got 20 of 20"),
        ({"held_out": (UNLABELLED, UNLABELLED)}, "`held_out`|targets"),
        ({"unlabelled": UNLABELLED, "delta_network": 0.0}, r"`delta_network` .*got 0\.0"),
    ],
)
def test_refusals(trained, data, prior, change, match):
    with pytest.raises(ValueError, match=match):
        certify(trained, data, prior, **{**QUICK, **change})


def test_what_could_not_be_checked_is_listed(certificate):
    text = "; ".join(certificate.assumptions)
    assert "unlabelled inputs" in text
    assert "held-out samples" in text


@pytest.mark.parametrize("argument", ["unlabelled", "held_out"])
def test_inputs_of_another_width_are_refused_before_the_search(trained, data, prior, argument):
    wide = torch.randn(200, 5)
    given = wide if argument == "unlabelled" else (wide, torch.zeros(200, dtype=torch.long))
    steps = []
    with pytest.raises(ValueError, match=rf"`{argument}` .*\[600, 4\].*got \[\[200, 5\]\]"):
        certify(
            trained, data, prior, **{argument: given}, progress=lambda *told: steps.append(told)
        )
    assert not steps


def repeated(samples, times):
    return tuple(part.repeat(times, *[1] * (part.ndim - 1)) for part in samples)


def test_samples_given_many_times_prove_nothing(trained, data, prior):
    """Twenty copies would lower the bound by a third without a new sample."""
    once = certify(trained, data, prior, **QUICK)
    copies = certify(trained, repeated(data, 20), prior, **QUICK)
    assert copies.bound < once.bound
    assert (once.valid, once.repeated) == (True, 0)
    assert (copies.valid, copies.repeated) == (False, 12_000)
    assert "600 of 12000 samples of `data` differ" in copies.reasons[0]
    note = (
        "12000 of 12000 samples of `data` occur more than once: they count as drawn independently"
    )
    assert note in copies.assumptions
    assert note in str(copies)
    assert note in copies.to_dict()["assumptions"]
    assert not [line for line in once.assumptions if "more than once" in line]


def test_a_few_samples_that_occur_twice_are_told(trained, data, prior):
    x, y = data
    some = torch.cat([x, x[:5]]), torch.cat([y, y[:5]])
    found = certify(trained, some, prior, **QUICK)
    assert (found.valid, found.repeated) == (True, 10)
    assert any("10 of 605 samples of `data`" in line for line in found.assumptions)
    relabelled = torch.cat([x, x[:5]]), torch.cat([y, 1 - y[:5]])
    assert certify(trained, relabelled, prior, **QUICK).repeated == 0


def test_repeated_unlabelled_and_held_out_samples_prove_nothing(trained, data, prior):
    held_out = repeated(blobs(100, 7), 20)
    found = certify(trained, data, prior, held_out=held_out, **QUICK)
    assert "100 of 2000 samples of `held_out` differ" in found.reasons[0]
    assert "stronger" not in str(found)  # no proof is praised that is none
    (unlabelled,) = repeated((UNLABELLED,), 3)
    found = certify(trained, data, prior, unlabelled=unlabelled, **QUICK)
    assert "1000 of 3000 samples of `unlabelled` differ" in found.reasons[0]
