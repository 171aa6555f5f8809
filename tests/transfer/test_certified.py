"""``transfer(..., certify=True)``: three bounds for every start and for scratch, those of ``certify`` by hand."""

import functools
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from lightning_taskinfo import Prior, TransferReport, certify
from lightning_taskinfo.transfer import transfer
from lightning_taskinfo.transfer.starts import Start, adapted, read_start
from tests.transfer.own_nets import Net, Regression, clusters
from tests.transfer.results import minimal, same

TRAIN, TEST = clusters(400, 3, seed=0), clusters(300, 3, seed=1)
DATA = {"train": TRAIN, "test": TEST}
LABELS = 120


class Plain(Net):
    """No batch normalisation, whose statistics are outside a certificate."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, classes)


@functools.cache
def pretrained():
    torch.manual_seed(0)
    net = Plain(classes=4)
    x, y = clusters(300, 4, seed=5)
    optimizer = net.configure_optimizers()
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.state_dict()


@contextmanager
def quickly():
    """Certificates of fewer draws and a shorter search than by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(certify.__kwdefaults__, "draws", 100)
        patch.setitem(certify.__kwdefaults__, "betas", (0.1, 1.0, 10.0, 100.0))
        yield


def run(folder=None, *, make=Plain, data=DATA, **options):
    options = {"labels": LABELS, "seeds": 1, "trainer": {"max_epochs": 10}, **options}
    options = {"starts": {"four": pretrained()}, "adapt": ["full", "linear"], **options}
    with quickly():
        return transfer(make, data, folder=folder, certify=True, progress=False, **options)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certified")
    return run(folder), folder


def test_every_start_and_scratch_has_three_bounds_above_its_test_error(reference):
    report, _ = reference
    assert report.methods == ["scratch", "four, full", "four, linear"]
    for result in report.results:
        found = result.certificate
        assert found["valid"], found["reasons"]
        for name in ("network", "test_set"):
            assert result.test["error"] < found[name] <= 1, name
        assert found["risk"] < found["stochastic"] <= found["network"]
        assert found["confidence"] == pytest.approx(0.95)


@pytest.mark.parametrize("method", ["scratch", "four, full", "four, linear"])
def test_the_bounds_are_those_of_certify(reference, method):
    """By hand: the start with its fresh head is the centre, rows are in a random order, and the rest is fresh."""
    report, folder = reference
    name, _, way = method.partition(", ")
    start = Start(Plain, {})
    if name == "four":
        start = read_start("four", pretrained(), Plain)
    net = adapted(start.module(0), way or "full", start.fresh)
    prior = Prior.of(net, origin="the start")
    everything = {name for name, _ in net.named_parameters()}
    assert {*prior.center} == ({"head.weight", "head.bias"} if way == "linear" else everything)
    stage = folder / "stages" / f"{name}-{way or 'full'}-{LABELS}-seed0"
    net.load_state_dict(torch.load(stage / "weights.pt", weights_only=True), strict=False)
    rows = torch.from_numpy(np.random.default_rng(0).permutation(400))
    labelled = tuple(part[rows[:LABELS]] for part in TRAIN)
    fresh = TRAIN[0][rows[LABELS:]]
    with quickly():
        found = certify(net, labelled, prior, unlabelled=fresh, held_out=TEST, progress=False)
    kept = report.cell(method, LABELS)[0].certificate
    assert kept["stochastic"] == pytest.approx(found.bound, rel=1e-6)
    assert kept["network"] == pytest.approx(found.network.bound, rel=1e-6)
    assert kept["test_set"] == pytest.approx(found.test_set.bound, rel=1e-6)


def test_the_report_shows_them_and_what_could_not_be_checked(reference, tmp_path):
    report, _ = reference
    files = report.save(tmp_path)
    assert same(TransferReport.load(tmp_path), report)
    bound = report.cell("four, linear", LABELS)[0].certificate["network"]
    up = f"{math.ceil(1000 * bound) / 10:.1f}"  # never less than was proved
    text = files["report.md"].read_text()
    assert "Each bound holds with a probability of" in text
    assert up in text
    assert "pretrained on other samples" in text
    assert f"{up} % (the network itself)" in report.to_terminal()
    row = next(row for row in report.table() if row["method"] == "four, linear")
    assert row["certified_network"] == bound


def test_bounds_are_rounded_up_and_those_that_may_not_be_claimed_are_in_no_sentence():
    def certified(seed, bound, **changes):
        proofs = {"stochastic": bound, "network": None, "test_set": bound}
        words = {"valid": True, "reasons": [], "assumptions": ["trust"], "confidence": 0.95}
        return {**minimal("scratch", 50, seed, 0.5), "certificate": {**proofs, **words, **changes}}

    report = TransferReport([certified(0, 0.1001), certified(1, 0.2001)], {})
    sentence = "50 labels, scratch, certified, the largest bound of a seed: 20.1 % (randomised), 20.1 % (by test"
    assert sentence in report.to_terminal()
    bad = TransferReport([certified(0, 0.1, valid=False, reasons=["it was moved"])], {})
    assert "certified, the largest" not in bad.to_terminal()
    assert "Not valid where: it was moved" in bad.to_markdown()
    assert "certified in 0 of 1 seeds" in bad.to_terminal()


def test_a_finished_run_is_read_and_one_without_certificates_is_another(reference):
    report, folder = reference
    assert same(run(folder), report)
    with pytest.raises(ValueError, match=r"(?s)was begun with another.*certify"):
        transfer(
            Plain,
            DATA,
            starts={"four": pretrained()},
            labels=LABELS,
            seeds=1,
            trainer={"max_epochs": 10},
            folder=folder,
            progress=False,
        )


def test_statistics_of_batch_normalisation_are_said_to_spoil_it():
    torch.manual_seed(0)
    starts = {"other": Net(classes=4).state_dict()}
    report = run(make=Net, starts=starts, adapt=["full", "linear"], trainer={"max_epochs": 2})
    full, linear = (
        report.cell(f"other, {way}", LABELS)[0].certificate for way in ("full", "linear")
    )
    assert not full["valid"]
    assert "BatchNorm statistic" in full["reasons"][0]
    assert linear["valid"], "frozen parts run as in evaluation"
    assert "Not valid where" in report.to_markdown()


def test_without_inputs_to_spare_there_is_no_bound_for_the_network_itself():
    report = run(labels=350, adapt=["linear"], trainer={"max_epochs": 2})
    found = report.cell("four", 350)[0].certificate
    assert found["network"] is None
    assert found["stochastic"] <= 1
    assert any("needs 100 inputs" in text for text in found["assumptions"])


def test_refuses_real_targets_and_the_ready_parts():
    x, _ = TRAIN
    data = {"train": (x[:60], x[:60, 0]), "test": (x[60:], x[60:, 0])}
    with pytest.raises(ValueError, match="`certify` must go with one class for each sample"):
        run(make=Regression, data=data, starts={"a": Regression().state_dict()}, labels=20)
    with pytest.raises(ValueError, match="`certify` must be left out without `starts`"):
        transfer("mlp", DATA, certify=True)
