"""``InformationInWeights`` against the formula on the same samples, and its center through checkpoints."""

import math
import warnings
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_taskinfo import TaskInfoWarning, add_weight_noise
from lightning_taskinfo._random import seed_from
from lightning_taskinfo.callbacks import InformationInWeights
from lightning_taskinfo.callbacks.information_in_weights import AUTO_STDS, _Trials
from lightning_taskinfo.distributions.post_family import standard_noise
from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.functional.information import label_entropy
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
    kl, curvature, penalty, effective, layers = 0.0, 0.0, 0.0, 0.0, {}
    for name, p in model.named_parameters():
        part = 0.0
        moved = (p - center[name]).flatten().tolist()
        for h, delta in zip((n * diagonal[name]).flatten().tolist(), moved, strict=True):
            v = 1 / (1 + prior_std**2 * h / beta)
            part += 0.5 * (delta**2 / prior_std**2 + v - 1 - math.log(v))
            curvature += 0.5 * (v - 1 - math.log(v))
            penalty += 0.5 * h * v * prior_std**2
            effective += prior_std**2 * h / (prior_std**2 * h + beta)
        layer = name.rpartition(".")[0]
        layers[layer] = layers.get(layer, 0.0) + part
        kl += part
    loss = F.cross_entropy(model(x), y, reduction="sum").item()
    return {
        "information_nats": kl,
        "curvature_nats": curvature,
        "displacement_nats": kl - curvature,
        "squared_displacement": 2 * prior_std**2 * (kl - curvature),
        "prior_std": prior_std,
        "loss_nats": loss,
        "quadratic_loss_nats": loss + penalty,
        "effective_parameters": effective,
        **{f"information_nats/{layer}": part for layer, part in layers.items()},
    }


@pytest.mark.parametrize(("prior_std", "beta"), [(0.1, 1.0), (0.5, 3.0)])
@pytest.mark.parametrize("center", ["initial", "zero"])
def test_equals_the_formula_on_the_whole_training_set(tmp_path, loader, prior_std, beta, center):
    start = {}

    class Kept(Classifier):
        def on_train_start(self):
            start.update({n: p.detach().clone() for n, p in self.named_parameters()})

    callback = InformationInWeights(
        prior_std=prior_std, beta=beta, prior_center=center, labels="exact"
    )
    model = fit(tmp_path, callback, model=Kept, loader=loader).lightning_module
    if center == "zero":
        start = {name: torch.zeros_like(w) for name, w in start.items()}
    row, reference = callback.history[-1], expected(model, start, prior_std=prior_std, beta=beta)
    assert [entry["step"] for entry in callback.history] == [4, 8]
    assert {name: row[name] for name in reference} == pytest.approx(reference, rel=1e-5)
    assert row["c_beta"] == pytest.approx(
        row["expected_loss_nats"] + beta * row["information_nats"]
    )
    assert row["gaussian_misfit"] == pytest.approx(
        row["expected_loss_nats"] / row["quadratic_loss_nats"]
    )


def test_the_measured_loss_is_that_of_brute_force(tmp_path, loader):
    callback = InformationInWeights(prior_std=0.3, beta=2.0, labels="exact", draws=600)
    model = fit(tmp_path, callback, model=steady, loader=loader).lightning_module.eval()
    row = callback.history[-1]
    x, y = digits().tensors
    fisher = fisher_diagonal(model, x, labels="exact")
    means = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, generator = [], torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _ in range(3000):
            for name, p in model.named_parameters():
                std = (2.0 / (32 * fisher[name] + 2.0 / 0.3**2)).sqrt()
                p.copy_(means[name] + std * torch.randn(p.shape, generator=generator))
            losses.append(F.cross_entropy(model(x), y, reduction="sum"))
    brute = torch.stack(losses)
    error = math.hypot(row["expected_loss_nats_standard_error"], brute.std().item() / 3000**0.5)
    assert abs(row["expected_loss_nats"] - brute.mean().item()) < 3 * error
    assert row["expected_loss_nats_standard_error"] < 0.03 * row["expected_loss_nats"]
    assert row["expected_loss_nats"] - row["loss_nats"] > 10 * error, (
        "which is more than the network's own loss"
    )


@pytest.mark.parametrize("draws", [2, 4, 6])
def test_no_sample_counts_more_than_another(tmp_path, loader, draws):
    """At noise of almost no width, what is measured is the loss of all samples, however they are divided."""
    callback = InformationInWeights(prior_std=0.02, labels="exact", draws=draws)
    model = fit(tmp_path, callback, model=steady, loader=loader).lightning_module.eval()
    x, y = digits().tensors
    means = {name: p.detach().clone() for name, p in model.named_parameters()}
    fisher = fisher_diagonal(model, x, labels="exact")
    stds = {name: (1 / (32 * fisher[name] + 1 / 0.02**2)).sqrt() for name in means}
    noises = [standard_noise(means, seed_from(0, number)) for number in range(draws // 2)]
    parts = 2 if draws == 4 else 1
    plain = F.cross_entropy(model(x), y, reduction="none").detach()
    found = []
    with torch.no_grad():
        for i, noise in enumerate(noises):
            some = slice(i % parts, None, parts)
            for sign in (1, -1):
                for name, p in model.named_parameters():
                    p.copy_(means[name] + sign * stds[name] * noise[name])
                excess = F.cross_entropy(model(x), y, reduction="none")[some] - plain[some]
                found.append(plain.sum() + parts * excess.sum())
    row = callback.history[-1]
    assert row["expected_loss_nats"] == pytest.approx(torch.stack(found).mean().item(), rel=1e-4)


def test_draws_repeat_from_measurement_to_measurement(tmp_path, loader):
    """With the same noise each time, a training that stands still reads the same numbers."""

    class Still(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    callback = InformationInWeights(prior_center="zero", labels="exact", every_n_steps=1)
    model = Still(dropout=0.0)
    model.net[1] = nn.Identity()  # whose statistics would move
    fit(tmp_path, callback, model=model, loader=loader)
    rows = [
        {name: value for name, value in row.items() if name != "step"} for row in callback.history
    ]
    assert all(row == rows[0] for row in rows)


@pytest.mark.parametrize("prior_std", [0.1, "auto"])
def test_an_untrained_network_has_learned_nothing(tmp_path, loader, prior_std):
    callback = InformationInWeights(prior_std=prior_std, at_start=True)
    fit(tmp_path, callback, loader=loader)
    start, *later = callback.history
    assert start["step"] == 0
    for name in ("information_nats", "displacement_nats", "curvature_nats", "squared_displacement"):
        assert start[name] == 0.0
        assert all(row[name] > 0 for row in later)
    assert start["c_beta"] == start["expected_loss_nats"] == start["loss_nats"] > 0
    assert start["gaussian_misfit"] == 1.0
    assert start.keys() == later[0].keys(), "the same keys at any time"
    assert {start[name] for name in start if name.startswith("information_nats/")} == {0.0}
    if prior_std == "auto":
        assert math.isnan(start["prior_std"])
    else:
        assert start["prior_std"] == 0.1


def test_a_layer_that_has_not_moved_has_learned_nothing(tmp_path, loader):
    class Half(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net[7].parameters(), lr=0.1)

    callback = InformationInWeights()
    fit(tmp_path, callback, model=Half, loader=loader)
    nats = {
        name: value
        for name, value in callback.history[-1].items()
        if name.startswith("information_nats/")
    }
    assert [name for name, value in nats.items() if value > 0] == ["information_nats/net.7"]
    assert sum(nats.values()) == pytest.approx(callback.history[-1]["information_nats"])


def test_the_keys_are_the_same_whatever_the_settings(tmp_path, loader):
    keys = []
    for settings in (
        {},
        {"prior_std": "auto"},
        {"prior_std": 3.0, "beta": 7.0},
        {"labels": "exact", "draws": 2},
    ):
        callback = InformationInWeights(**settings)
        fit(tmp_path, callback, loader=loader, max_epochs=1)
        keys.append(list(callback.history[-1]))
    assert all(other == keys[0] for other in keys)


def test_auto_takes_the_width_with_the_smallest_measured_code_length(tmp_path, loader):
    def last(prior_std):
        callback = InformationInWeights(prior_std=prior_std, labels="exact")
        fit(tmp_path, callback, model=steady, loader=loader)
        return callback.history[-1]

    auto = last("auto")
    lengths = {std: last(std)["c_beta"] + math.log(len(AUTO_STDS)) for std in AUTO_STDS}
    assert auto["c_beta"] == pytest.approx(lengths[auto["prior_std"]])
    best = AUTO_STDS.index(min(lengths, key=lengths.get))
    assert abs(AUTO_STDS.index(auto["prior_std"]) - best) <= 1, "the draws that choose are half"
    assert AUTO_STDS[0] < auto["prior_std"] < AUTO_STDS[-1]


@pytest.fixture
def widths(monkeypatch):
    """The widths that are tried, by the number of the noise, one list for each look at the losses."""
    seen = []
    original = _Trials._losses

    def noted(self, number, stds):
        seen.append((number, [AUTO_STDS.index(std) for std in stds]))
        return original(self, number, stds)

    monkeypatch.setattr(_Trials, "_losses", noted)
    return seen


def test_auto_tries_one_neighbour_and_goes_on_after_a_checkpoint(tmp_path, loader, widths):
    first = InformationInWeights(prior_std="auto", every_n_steps=1)
    fit(tmp_path, first, model=steady, loader=loader, max_epochs=1).save_checkpoint(
        tmp_path / "one.ckpt"
    )
    widths.clear()
    resumed = InformationInWeights(prior_std="auto", every_n_steps=1)
    fit(
        tmp_path,
        resumed,
        model=steady,
        loader=loader,
        max_epochs=2,
        ckpt_path=tmp_path / "one.ckpt",
    )
    looks = [*widths]
    whole = InformationInWeights(prior_std="auto", every_n_steps=1)
    fit(tmp_path, whole, model=steady, loader=loader, max_epochs=2)
    count = len(looks) // 2  # measurements after the checkpoint
    assert count >= 2
    assert resumed.history == whole.history[: len(resumed.history)]
    chosen = [AUTO_STDS.index(row["prior_std"]) for row in resumed.history[-count - 1 :]]
    steps = []
    for before, after, first_look, second_look in zip(
        chosen[:-1], chosen[1:], looks[::2], looks[1::2], strict=True
    ):
        number, tried = first_look
        assert (number, tried[0]) == (0, before)
        assert after in tried
        assert second_look == (1, [after]), "the other noise for the better one alone"
        steps.append((tried[-1] - before, after != before))
    assert [bool(step) for step, _ in steps] == [True, False] * 2, "every second time"
    (first_step, moved), _, (second_step, _), _ = steps
    assert abs(first_step) == 1
    assert second_step == (first_step if moved else -first_step)


def test_auto_follows_the_best_width_and_turns_at_the_ends_of_the_grid(tmp_path, loader, widths):
    callback = InformationInWeights(prior_std="auto", every_n_steps=1)
    callback.load_state_dict({**callback.state_dict(), "chosen": len(AUTO_STDS) - 1})
    fit(tmp_path, callback, model=steady, loader=loader, max_epochs=8)
    pairs = [stds for number, stds in widths if number == 0 and len(stds) == 2]
    assert pairs[0] == [16, 15]
    assert {abs(here - there) for here, there in pairs} == {1}
    fresh = InformationInWeights(prior_std="auto", every_n_steps=32)
    fit(tmp_path, fresh, model=steady, loader=loader, max_epochs=8)
    near = AUTO_STDS.index(fresh.history[-1]["prior_std"])
    assert abs(AUTO_STDS.index(callback.history[-1]["prior_std"]) - near) <= 1


def test_a_gaussian_that_destroys_the_network_is_warned_about_once(tmp_path, loader):
    class Fitted(Classifier):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))

    callback = InformationInWeights(prior_std=1.0, every_n_epochs=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            tmp_path, callback, model=Fitted, loader=loader, max_epochs=80
        )  # until the loss has gone to 0
    assert len([w for w in caught if "gaussian_misfit" in str(w.message)]) == 1
    assert callback.history[-1]["gaussian_misfit"] > 2
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*gaussian_misfit")
        fit(tmp_path, InformationInWeights(prior_std=0.01), loader=loader)


def test_the_share_of_the_labels(tmp_path, loader):
    callback = InformationInWeights()
    fit(tmp_path, callback, loader=loader)
    counts = digits().tensors[1].bincount()
    row = callback.history[-1]
    assert row["c_beta_per_label_nat"] == pytest.approx(
        row["c_beta"] / (32 * label_entropy(counts))
    )


def test_a_subset_stands_for_the_whole_set(tmp_path, loader):
    def last(**arguments):
        callback = InformationInWeights(labels="exact", per_layer=False, **arguments)
        fit(tmp_path, callback, loader=loader)
        return callback.history[-1]

    whole, part = last(), last(max_samples=16)
    assert part["loss_nats"] == pytest.approx(whole["loss_nats"], rel=0.5)
    assert part["loss_nats"] != whole["loss_nats"]
    assert last(num_samples=64)["loss_nats"] == pytest.approx(2 * whole["loss_nats"])
    assert not any(name.startswith("information_nats/") for name in whole)


def test_a_resumed_run_measures_from_the_first_center(tmp_path, loader):
    whole = InformationInWeights()
    fit(tmp_path, whole, model=steady, loader=loader, max_epochs=4)
    fit(tmp_path, InformationInWeights(), model=steady, loader=loader).save_checkpoint(
        tmp_path / "half.ckpt"
    )
    resumed = InformationInWeights()
    fit(
        tmp_path,
        resumed,
        model=steady,
        loader=loader,
        max_epochs=4,
        ckpt_path=tmp_path / "half.ckpt",
    )
    assert resumed.history == whole.history
    stored = torch.load(tmp_path / "half.ckpt", weights_only=True)["callbacks"][
        "InformationInWeights"
    ]
    assert stored["prior_center"].keys() == {name for name, _ in steady().named_parameters()}


def test_a_resumed_run_without_a_center_says_so(tmp_path, loader):
    fit(tmp_path, model=steady, loader=loader).save_checkpoint(tmp_path / "half.ckpt")
    callback = InformationInWeights()
    with pytest.warns(
        UserWarning,
        match="found no prior centre in the checkpoint and measures from the resumed weights",
    ):
        fit(
            tmp_path,
            callback,
            model=steady,
            loader=loader,
            max_epochs=3,
            ckpt_path=tmp_path / "half.ckpt",
        )
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
    assert callback.history[-1]["information_nats"] == pytest.approx(
        reference["information_nats"], rel=1e-5
    )


def test_a_new_head_counts_from_the_start(tmp_path, loader):
    class Other(Classifier):
        def __init__(self):
            super().__init__(dropout=0.0)
            self.net[7] = nn.Linear(6, 5)

    torch.save(steady().state_dict(), tmp_path / "weights.pt")
    callback = InformationInWeights(prior_center=str(tmp_path / "weights.pt"))
    with pytest.warns(
        UserWarning,
        match=r"did not find net\.7\.weight, net\.7\.bias in .* measures them from the start",
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
        ({"prior_std": "wide"}, "`prior_std` must be .*'auto', got 'wide'"),
        ({"draws": 3}, "`draws` must be an even number, .*got 3"),
        ({"draws": 0}, "`draws` must be an even number, .*got 0"),
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
    expected = {
        f"taskinfo/mine/{name}": pytest.approx(value)
        for name, value in row.items()
        if name not in layers
    }
    monitored = {
        name: v.item()
        for name, v in trainer.callback_metrics.items()
        if name.startswith("taskinfo/")
    }
    assert monitored == expected


def test_noisy_weights_are_refused(tmp_path, loader):
    with pytest.raises(
        ValueError, match=r"measures plain weights, got noisy ones: .* `weight_kl\(module\)`"
    ):
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


def test_a_history_of_another_prior_is_told():
    states = InformationInWeights(prior_std=0.1).state_dict()
    InformationInWeights(prior_std=0.1).load_state_dict(states)
    with pytest.warns(
        TaskInfoWarning, match=r"goes on with .* \(0.5, 1.0\), .* measured with \(0.1, 1.0\)"
    ):
        InformationInWeights(prior_std=0.5).load_state_dict(states)
