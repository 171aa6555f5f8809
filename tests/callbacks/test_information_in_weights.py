"""``InformationInWeights`` against the formula on the same samples, and its center through checkpoints."""

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_taskinfo import TaskInfoWarning, add_weight_noise
from lightning_taskinfo.callbacks import InformationInWeights
from lightning_taskinfo.fisher import fisher_diagonal
from tests.callbacks.runs import Classifier, digits, fit


@pytest.fixture
def loader():
    return DataLoader(digits(), batch_size=8)


def steady():
    return Classifier(dropout=0.0)


def expected(model, center, *, prior_std, beta, n=32):
    """Maths §2, a parameter at a time in a loop, from the whole training set."""
    x, y = digits().tensors
    model.eval()
    diagonal = fisher_diagonal(model, x, labels="exact")
    kl, penalty, effective, layers = 0.0, 0.0, 0.0, {}
    for name, p in model.named_parameters():
        part = 0.0
        moved = (p - center[name]).flatten().tolist()
        for h, delta in zip((n * diagonal[name]).flatten().tolist(), moved, strict=True):
            v = 1 / (1 + prior_std**2 * h / beta)
            part += 0.5 * (delta**2 / prior_std**2 + v - 1 - math.log(v))
            penalty += 0.5 * h * v * prior_std**2
            effective += prior_std**2 * h / (prior_std**2 * h + beta)
        layer = name.rpartition(".")[0]
        layers[layer] = layers.get(layer, 0.0) + part
        kl += part
    loss = F.cross_entropy(model(x), y, reduction="sum").item()
    return {
        "information_nats": kl,
        "expected_loss": loss,
        "curvature_penalty": penalty,
        "c_beta": loss + penalty + beta * kl,
        "effective_parameters": effective,
        "information_nats_per_parameter": kl / sum(p.numel() for p in model.parameters()),
        **{f"information_nats/{layer}": part for layer, part in layers.items()},
    }


@pytest.mark.parametrize(("prior_std", "beta"), [(0.1, 1.0), (0.5, 3.0)])
@pytest.mark.parametrize("center", ["initial", "zero"])
def test_equals_the_formula_on_the_whole_training_set(tmp_path, loader, prior_std, beta, center):
    start = {}

    class Kept(Classifier):
        def on_train_start(self):
            start.update({n: p.detach().clone() for n, p in self.named_parameters()})

    callback = InformationInWeights(prior_std=prior_std, beta=beta, prior_center=center, labels="exact")
    model = fit(tmp_path, callback, model=Kept, loader=loader).lightning_module
    if center == "zero":
        start = {name: torch.zeros_like(w) for name, w in start.items()}
    row, reference = callback.history[-1], expected(model, start, prior_std=prior_std, beta=beta)
    assert [entry["step"] for entry in callback.history] == [4, 8]
    assert {name: row[name] for name in reference} == pytest.approx(reference, rel=1e-5)
    assert row["c_beta"] == pytest.approx(
        row["expected_loss"] + row["curvature_penalty"] + beta * row["information_nats"]
    )


def test_other_prior_stds_come_free(tmp_path, loader):
    def last(prior_std):
        callback = InformationInWeights(prior_std=prior_std, labels="exact")
        fit(tmp_path, callback, loader=loader)
        return callback.history[-1]

    row = last(0.1)
    for std in (0.01, 1.0, 10.0):
        measured = row[f"information_nats_at_prior_std/{std:g}"]
        assert measured == pytest.approx(last(std)["information_nats"])


def test_a_subset_stands_for_the_whole_set(tmp_path, loader):
    def last(**arguments):
        callback = InformationInWeights(labels="exact", per_layer=False, **arguments)
        fit(tmp_path, callback, loader=loader)
        return callback.history[-1]

    whole, part = last(), last(max_samples=16)
    assert part["expected_loss"] == pytest.approx(whole["expected_loss"], rel=0.5)
    assert part["expected_loss"] != whole["expected_loss"]
    assert last(num_samples=64)["expected_loss"] == pytest.approx(2 * whole["expected_loss"])
    assert not any(name.startswith("information_nats/") for name in whole)


def test_a_resumed_run_measures_from_the_first_center(tmp_path, loader):
    whole = InformationInWeights()
    fit(tmp_path, whole, model=steady, loader=loader, max_epochs=4)
    fit(tmp_path, InformationInWeights(), model=steady, loader=loader).save_checkpoint(tmp_path / "half.ckpt")
    resumed = InformationInWeights()
    fit(tmp_path, resumed, model=steady, loader=loader, max_epochs=4, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.history == whole.history
    stored = torch.load(tmp_path / "half.ckpt", weights_only=True)["callbacks"]["InformationInWeights"]
    assert stored["prior_center"].keys() == {name for name, _ in steady().named_parameters()}


def test_a_resumed_run_without_a_center_says_so(tmp_path, loader):
    fit(tmp_path, model=steady, loader=loader).save_checkpoint(tmp_path / "half.ckpt")
    callback = InformationInWeights()
    with pytest.warns(
        UserWarning, match="found no prior centre in the checkpoint and measures from the resumed weights"
    ):
        fit(tmp_path, callback, model=steady, loader=loader, max_epochs=3, ckpt_path=tmp_path / "half.ckpt")
    assert [row["step"] for row in callback.history] == [12]


@pytest.mark.parametrize("kind", [str, Path, "state dict"])
def test_information_added_by_fine_tuning(tmp_path, loader, kind):
    trainer = fit(tmp_path, model=steady, loader=loader)
    trainer.save_checkpoint(tmp_path / "pretrained.ckpt")
    pretrained = {n: p.detach().clone() for n, p in trainer.lightning_module.named_parameters()}
    center = pretrained if kind == "state dict" else kind(tmp_path / "pretrained.ckpt")
    callback = InformationInWeights(prior_center=center, labels="exact")
    model = fit(tmp_path, callback, model=steady, loader=loader, max_epochs=1).lightning_module
    reference = expected(model, pretrained, prior_std=0.1, beta=1.0)
    assert callback.history[-1]["information_nats"] == pytest.approx(reference["information_nats"], rel=1e-5)


def test_a_new_head_counts_from_the_start(tmp_path, loader):
    class Other(Classifier):
        def __init__(self):
            super().__init__(dropout=0.0)
            self.net[7] = nn.Linear(6, 5)

    torch.save(steady().state_dict(), tmp_path / "weights.pt")
    callback = InformationInWeights(prior_center=str(tmp_path / "weights.pt"))
    with pytest.warns(
        UserWarning, match=r"did not find net\.7\.weight, net\.7\.bias in .* measures them from the start"
    ):
        fit(tmp_path, callback, model=Other, loader=loader)
    torch.save({"something.else": torch.zeros(3)}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"`prior_center` .* got none of net\.0\.weight"):
        fit(tmp_path, callback.__class__(prior_center=str(tmp_path / "weights.pt")), loader=loader)


def test_an_unknown_size_has_to_be_given(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(digits())

    stream = DataLoader(Stream(), batch_size=8)
    with pytest.raises(ValueError, match=r"`num_samples` must be given where .*, got DataLoader"):
        fit(tmp_path, InformationInWeights(), loader=stream)
    callback = InformationInWeights(num_samples=32)
    fit(tmp_path, callback, loader=stream)
    assert len(callback.history) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prior_std": 0.0}, r"`prior_std` must be positive, got 0\.0"),
        ({"beta": -1.0}, r"`beta` must be positive, got -1\.0"),
        ({"num_samples": 0}, "`num_samples` must be at least 1, got 0"),
        (
            {"prior_center": "here.ckpt"},
            "`prior_center` must be 'initial', 'zero', a state dict or the path of a checkpoint, got 'here.ckpt'",
        ),
    ],
    ids=str,
)
def test_refuses_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        InformationInWeights(**arguments)


def test_all_but_the_layers_can_be_monitored(tmp_path, loader):
    probe = InformationInWeights(name="mine")
    trainer = fit(tmp_path, probe, loader=loader)
    row = {name: value for name, value in probe.history[-1].items() if name != "step"}
    assert "c_beta" in row
    layers = {name for name in row if name.startswith("information_nats/")}
    assert layers
    assert "information_nats_at_prior_std/1" in row
    expected = {f"mine/{name}": pytest.approx(value) for name, value in row.items() if name not in layers}
    assert {name: v.item() for name, v in trainer.callback_metrics.items() if name.startswith("mine/")} == expected


def test_noisy_weights_are_refused(tmp_path, loader):
    with pytest.raises(ValueError, match=r"measures plain weights, got noisy ones: .* `weight_kl\(module\)`"):
        fit(tmp_path, InformationInWeights(), model=add_weight_noise(Classifier()), loader=loader)


def test_another_module_is_measured_from_its_own_start(tmp_path, loader):
    mine, fresh = InformationInWeights(), InformationInWeights()
    fit(tmp_path, mine, model=Classifier(), loader=loader)
    torch.manual_seed(7)
    second = Classifier()
    with pytest.warns(TaskInfoWarning, match="was used for another module"):
        fit(tmp_path, mine, model=deepcopy(second), loader=loader)
    fit(tmp_path, fresh, model=second, loader=loader)
    assert mine.history[-1]["information_nats"] == fresh.history[-1]["information_nats"]


def test_a_history_of_another_prior_is_told(tmp_path):
    states = InformationInWeights(prior_std=0.1).state_dict()
    InformationInWeights(prior_std=0.1).load_state_dict(states)
    with pytest.warns(TaskInfoWarning, match=r"goes on with .* \(0.5, 1.0\), .* measured with \(0.1, 1.0\)"):
        InformationInWeights(prior_std=0.5).load_state_dict(states)
