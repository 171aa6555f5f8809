"""Ranking starts: what is known to be better comes first, any network goes, and nothing is left behind."""

import json
import math
import resource
import warnings
from copy import deepcopy
from dataclasses import replace
from statistics import variance

import pytest
import torch
from scipy.stats import t as student
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_taskinfo import FineTuning, TaskInfoWarning, feature_overlap, rank_starts
from lightning_taskinfo._random import seed_from
from lightning_taskinfo.functional.readout import (
    held_out_readout,
    sharpened_brier,
    stratified_folds,
)
from lightning_taskinfo.functional.transferability import h_score, leep, logme, nce
from lightning_taskinfo.transfer import StartRanking, small_cnn
from lightning_taskinfo.transfer.overlap import ObservedNetwork
from lightning_taskinfo.transfer.rank import call_of
from tests.ranks import forked


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Body(nn.Module):
    """Two layers and a head; the first layer keeps some of the coordinates that the label needs, and adds noise."""

    def __init__(self, kept, classes=4, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 8)
        self.act = nn.Tanh()
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, classes)
        with torch.no_grad():
            self.first.weight[:, kept:] = 0

    def forward(self, x):
        return self.head(self.drop(self.act(self.first(x))))


def target(n=120, seed=0):
    x = randn(n, 6, seed=seed)
    return x, (x[:, :4].sum(1) > 0).long() + 2 * (x[:, 0] > 0).long()


@pytest.fixture(scope="module")
def ranking():
    starts = {f"keeps {kept}": Body(kept) for kept in (0, 2, 4)}
    return rank_starts(
        starts, target(), scratch="keeps 0", curve={20: 0.5, 2000: 0.05}, progress=False
    )


def test_starts_are_ordered_by_what_their_features_know(ranking):
    assert [start.name for start in ranking.starts] == ["keeps 4", "keeps 2", "keeps 0"]
    assert ranking.tied == ("keeps 4",)
    assert ranking.samples == 120
    assert ranking.classes == 4
    assert (
        ranking["keeps 4"].call is ranking["keeps 4"].frozen_call is None
    )  # nothing was fine-tuned
    for start in ranking.starts:
        low, high = start.interval
        assert low <= start.error <= high
        assert start.error == min(layer.error for layer in start.layers)
        assert start.missed == start.layers[-1].missed
        assert start.behind[1] == pytest.approx(start.missed - ranking.best.missed, rel=1e-3)
    with pytest.raises(KeyError, match="nobody"):
        ranking["nobody"]


def test_scores_are_those_of_the_functions(ranking):
    model, (x, y) = Body(4).eval(), target()
    features, logits = model.act(model.first(x)).detach(), model(x).detach()
    start = ranking["keeps 4"]
    assert [layer.name for layer in start.layers] == [
        "first",
        "drop",
    ]  # which hands on what "act" puts out
    assert start.logme == pytest.approx(logme(features, y).item())
    assert start.h_score == pytest.approx(h_score(features, y).item())
    assert start.leep == pytest.approx(leep(logits.double().softmax(1), y).item(), rel=1e-5)
    assert start.nce == pytest.approx(nce(logits.argmax(1), y).item())


def test_missed_share_is_that_of_feature_overlap_on_the_same_folds():
    x, y = target()
    order = y.argsort(
        stable=True
    )  # in this order, folds by turns are those with equal shares of classes
    start = rank_starts({"a": Body(4)}, (x[order], y[order]), layers=["act"], progress=False).best
    overlap = feature_overlap(Body(4), (x[order], y[order]), layers=["act"])
    assert start.missed == pytest.approx(overlap.outside.item())


def test_starts_that_cannot_be_told_apart_are_said_to_be_so():
    ranking = rank_starts(
        {"a": Body(4), "b": Body(4, seed=1), "c": Body(0)}, target(), progress=False
    )
    assert set(ranking.tied) == {"a", "b"}
    assert "cannot tell" in ranking.reading()
    assert str(ranking).count("= ") == 3  # the two, and what the sign means


def test_the_order_is_that_of_two_mean_ranks():
    x, y = target()
    generator = torch.Generator().manual_seed(3)
    starts = {f"{k}": Body(k % 5, seed=k) for k in range(8)}
    with torch.no_grad():
        for model in starts.values():
            model.first.bias += torch.rand(8, generator=generator)
    found = rank_starts(starts, (x, y), progress=False).starts
    by_error = sorted(found, key=lambda s: s.missed)
    by_logme = sorted(found, key=lambda s: -s.logme)
    ranks = [by_error.index(s) + by_logme.index(s) for s in found]
    assert ranks == sorted(ranks)
    assert by_error != by_logme  # otherwise nothing is shown


def at_best_temperature(scores, y):
    """Brier scores, by trying many temperatures."""
    columns = nn.functional.one_hot(y).double()
    tried = [
        ((sharpness * scores.double()).softmax(1) - columns).square().sum(1)
        for sharpness in torch.logspace(-3, 3, 500).tolist()
    ]
    return min(tried, key=lambda found: found.mean())


def dumb_losses(model, x, y, how, fold):
    """Brier scores at the best temperature, and errors, of held-out samples, by a plain loop."""
    logits = torch.zeros(len(y), 4)
    for k in fold.unique():
        torch.manual_seed(how.seed)
        net = deepcopy(model).train()
        net.head = nn.Linear(8, 4)
        optimizer = torch.optim.Adam(net.parameters(), lr=how.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, how.learning_rate, total_steps=how.steps
        )
        batches = torch.Generator().manual_seed(how.seed)
        order = torch.empty(0, dtype=torch.long)
        kept = (fold != k).nonzero().flatten()
        for _ in range(how.steps):
            if len(order) < how.batch_size:
                order = kept[torch.randperm(len(kept), generator=batches)]
            picked, order = order[: how.batch_size], order[how.batch_size :]
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[picked]), y[picked]).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            logits[fold == k] = net.eval()(x[fold == k])
    return at_best_temperature(logits, y), (logits.argmax(1) != y).double()


def folds_of(y, how):
    return stratified_folds(y, 5, torch.Generator().manual_seed(how.seed))


def dumb_losses_of_scratch(model, x, y, how):
    """The same, averaged over repetitions with other folds and seeds; and how the mean loss varies between them."""
    found = [dumb_losses(model, x, y, how, folds_of(y, how))]
    for repeat in range(1, how.scratch_repeats):
        how = replace(how, seed=seed_from(how.seed, repeat))
        found.append(dumb_losses(model, x, y, how, folds_of(y, how)))
    losses, errors = zip(*found, strict=True)
    luck = variance([one.mean().item() for one in losses])
    return torch.stack(losses).mean(0), torch.stack(errors).mean(0), luck


def test_fine_tuning_is_ordered_by_brier_scores_at_the_best_temperature():
    x, y = target()
    starts = {"a": Body(6).eval(), "b": Body(0).eval(), "c": Body(3, seed=2).eval()}
    with torch.no_grad():
        starts["b"].first.weight.zero_()
        starts["b"].first.bias.fill_(30.0)  # saturated: it cannot learn
    how = FineTuning(steps=60, learning_rate=0.02)
    ranking = rank_starts(starts, (x, y), scratch="b", fine_tune=how, progress=False)
    fold = folds_of(y, how)
    losses = {name: dumb_losses(model, x, y, how, fold) for name, model in starts.items()}
    losses["b"] = dumb_losses_of_scratch(starts["b"], x, y, how)[:2]
    for name, (own, errors) in losses.items():
        assert ranking[name].fine_tuned == pytest.approx(errors.mean().item())
        difference = own - losses[ranking.best.name][0]
        assert ranking[name].behind[1] == pytest.approx(
            difference.mean().item(), abs=1e-3
        )  # two grids
    assert ranking["a"].call == ranking["a"].frozen_call == "helps"
    assert ranking["b"].call is ranking["b"].frozen_call is None
    means = [losses[start.name][0].mean() for start in ranking.starts]
    assert means == sorted(means)


def call_by_hand(t, degrees, before):
    """The probability of a call by Bayes' rule, with Student's probabilities of both signs as likelihoods."""
    helps = before * student.cdf(t, degrees)
    hurts = (1 - before) * student.sf(t, degrees)
    return max(helps, hurts) / (helps + hurts), "helps" if helps > hurts else "hurts"


@pytest.mark.parametrize(("frozen", "before"), [(True, 0.8), (False, 0.5), (False, 0.6)])
def test_calls_compare_scratch_with_fine_tuned_and_with_frozen_starts(frozen, before):
    """Just below and just above the probability that a t-test and the odds before give."""
    x, y = target()
    starts = {"a": Body(3 if frozen else 4).eval(), "b": Body(3, seed=3).eval()}
    how = FineTuning(steps=20, learning_rate=0.02)
    scratch, _, luck = dumb_losses_of_scratch(starts["b"], x, y, how)
    if frozen:
        features = starts["a"].act(starts["a"].first(x)).detach()
        columns = nn.functional.one_hot(y).double()
        said = held_out_readout(features, columns, stratified_folds(y, 5)).predicted
        mine = at_best_temperature(said, y)
    else:
        mine, _ = dumb_losses(starts["a"], x, y, how, folds_of(y, how))
        luck *= 4  # that of the start's one cross-validation, and of the mean of scratch's three
    gain = (scratch - mine).double()
    t = gain.mean() / math.sqrt(gain.var() / len(y) + luck / 3)
    # What is known beforehand does not count for frozen features.
    sure, called = call_by_hand(t.item(), len(y) - 1, 0.5 if frozen else before)
    assert before < sure - 0.01
    for level, expected in ((sure - 0.01, called), (sure + 0.01, "cannot tell")):
        options = {"helps_before": before, "confidence": level, "progress": False}
        found = rank_starts(starts, (x, y), scratch="b", fine_tune=how, **options)["a"]
        assert (found.frozen_call if frozen else found.call) == expected


def test_scratch_is_repeated_with_weights_of_its_own_if_it_is_a_function():
    weights = []

    def drawn():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        weights.append(model[0].weight.detach().clone())
        return model

    starts = {"a": Body(4), "b": drawn}

    def rank(**options):
        weights.clear()
        how = FineTuning(steps=2, **options)
        torch.manual_seed(5)
        found = rank_starts(starts, target(), scratch="b", fine_tune=how, progress=False)
        return found["b"].fine_tuned, torch.rand(1).item()

    once = rank(scratch_repeats=1)
    assert len(weights) == 1
    thrice = rank()
    assert len(weights) == 3
    assert not torch.equal(weights[1], weights[0])
    assert not torch.equal(weights[1], weights[2])
    assert thrice[1] == once[1]  # the global generator is where it would be without them
    assert thrice[0] != once[0]
    assert rank() == thrice


def test_functions_that_draw_weights_give_the_same_ranking_and_leave_the_generators():
    def rank(seed):
        torch.manual_seed(seed)
        starts = {"a": Body(4), "drawn": lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))}
        torch.manual_seed(seed)
        found = rank_starts(starts, target(), progress=False)
        return found["drawn"].missed, torch.rand(1).item()

    (missed, after), (again, other) = rank(1), rank(2)
    assert missed == again
    assert after != other
    torch.manual_seed(1)
    assert after == torch.rand(1).item()


@pytest.mark.parametrize("luck", [0.0, 0.001])
@pytest.mark.parametrize("before", [0.5, 0.8])
@pytest.mark.parametrize("shift", [0.15, -0.2])
def test_a_call_is_made_where_its_probability_is_large_enough(luck, before, shift):
    gain = randn(200)
    gain += shift - gain.mean()
    t = shift / math.sqrt(gain.var() / 200 + luck)
    sure, called = call_by_hand(t, 199, before)
    assert called == ("helps" if shift > 0 else "hurts")
    assert before < sure - 0.001 < sure + 0.001 < 1
    assert call_of(gain, luck, sure - 0.001, before) == called
    assert call_of(gain, luck, sure + 0.001, before) == "cannot tell"


def test_how_sure_a_start_is_of_itself_makes_no_call():
    """The log-losses of scratch are far worse, as it is sure of all that it says; its errors are not."""
    y = torch.arange(200) % 4
    columns = nn.functional.one_hot(y).double()
    said = columns + 0.6 * randn(200, 4, seed=1)
    others = columns + 0.6 * randn(200, 4, seed=2)
    sure = 30 * others
    worse = nn.functional.cross_entropy(sure, y, reduction="none")
    better = nn.functional.cross_entropy(said, y, reduction="none")
    assert call_of(worse - better, 0.0, 0.999) == "helps"
    gain = sharpened_brier(sure, columns) - sharpened_brier(said, columns)
    assert call_of(gain, 0.0, 0.95) == "cannot tell"


def test_onset_is_where_the_curve_of_scratch_crosses_the_error(ranking):
    lower, middle, upper = ranking.best.onset
    assert 0.5 * (middle / 20) ** -0.5 == pytest.approx(ranking.best.error)
    assert lower < middle < upper
    assert "  scratch wins from  " in str(ranking)


@pytest.mark.parametrize("numbers", [(20, 80), (20_000, 80_000)])
def test_says_where_a_curve_is_followed_far(numbers):
    few, many = numbers
    curve = {few: 0.5, many: 0.4}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        onset = rank_starts({"a": Body(4)}, target(), curve=curve, progress=False).best.onset[1]
    far = not few / 10 <= onset <= 10 * many
    said = [f"`curve` was measured at {few} to {many} labels, far from {onset:.2g}"] * far
    assert [str(one.message).split(", where")[0] for one in told] == said


def test_freezes_up_to_the_deepest_layer_that_is_as_good():
    class Ruined(Body):
        def forward(self, x):
            return self.head(self.drop(0 * self.act(self.first(x))))

    assert rank_starts({"a": Ruined(4)}, target(), progress=False).best.freeze == "act"
    assert rank_starts({"a": Body(4)}, target(), progress=False).best.freeze == "drop"


def test_real_labels():
    x = randn(80, 6)
    starts = {"good": Body(4, classes=1), "poor": Body(1, classes=1)}
    ranking = rank_starts(starts, (x, x[:, :4].sum(1)), progress=False)
    assert ranking.best.name == "good"
    assert ranking.classes is None
    assert ranking.best.h_score is ranking.best.leep is None
    assert ranking.best.error <= ranking.best.missed < 0.3
    low, high = ranking.best.interval
    assert low < ranking.best.error < high


def test_whole_numbers_of_a_floating_type_are_warned_about_once():
    x, y = target()
    with pytest.warns(TaskInfoWarning, match=r"whole numbers .*with \.long\(\)") as caught:
        ranking = rank_starts({"a": Body(4), "b": Body(2)}, (x, y.float()), progress=False)
    assert len(caught) == 1
    assert ranking.classes is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rank_starts({"a": Body(4)}, (x, y), progress=False)
        rank_starts({"a": Body(4)}, (x, y + 0.5), progress=False)


def test_fine_tuning_orders_where_it_is_asked_for():
    how = FineTuning(steps=40, learning_rate=0.02)
    starts = {"poor": Body(0), "good": Body(4)}
    with torch.no_grad():
        starts["poor"].first.bias.fill_(30.0)  # saturated: no gradient gets through
    state = torch.get_rng_state()
    before = {k: v.clone() for k, v in starts["good"].state_dict().items()}
    ranking = rank_starts(starts, target(), fine_tune=how, progress=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(
        torch.equal(value, before[name]) for name, value in starts["good"].state_dict().items()
    )
    assert ranking.best.name == "good"
    assert ranking.best.fine_tuned < ranking["poor"].fine_tuned
    again = rank_starts(starts, target(), fine_tune=how, progress=False)
    assert again.best.fine_tuned == ranking.best.fine_tuned
    x = randn(60, 6)
    real = rank_starts(
        {"a": Body(6, classes=1)}, (x, x[:, :1]), fine_tune=FineTuning(200, 0.02), progress=False
    )
    assert real.best.fine_tuned < 0.3


def test_batches_loaders_functions_and_fields_are_the_same(ranking):
    x, y = target()
    loader = DataLoader(TensorDataset(x, y), batch_size=50)
    fields = [{"x": x, "label": y}]
    for data in (loader, fields, [(x[:70], y[:70]), (x[70:], y[70:])]):
        again = rank_starts({"keeps 4": lambda: Body(4)}, data, progress=False).best
        assert again.error == ranking["keeps 4"].error
    swapped = rank_starts(
        {"a": Body(4)}, [(y, x)], batch_fn=lambda batch: batch[::-1], progress=False
    ).best
    assert swapped.error == ranking["keeps 4"].error


def test_a_forward_function_says_how_to_call():
    x, y = target()
    inputs = {"left": x[:, :3], "right": x[:, 3:]}
    both = lambda model, parts: model(torch.cat([parts["left"], parts["right"]], 1))  # noqa: E731
    found = rank_starts({"a": Body(4)}, [(inputs, y)], forward_fn=both, progress=False).best
    assert found.error == rank_starts({"a": Body(4)}, (x, y), progress=False).best.error


def test_the_networks_are_only_observed():
    model = Body(4).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    rank_starts({"a": model}, target(), progress=False)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(1, 50, (48, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[::2, 5:] = 0
    return model, {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 3}


def vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
    )
    torch.manual_seed(0)
    pixels = randn(48, 3, 16, 16)
    labels = (pixels.mean((1, 2, 3)) > 0).long()
    return transformers.ViTForImageClassification(config), {
        "pixel_values": pixels,
        "labels": labels,
    }


def cnn():
    torch.manual_seed(0)
    images = randn(48, 1, 12, 12)
    return nn.Sequential(small_cnn((1, 12, 12)), nn.Linear(64, 5)), (
        images,
        (images.mean((1, 2, 3)) > 0).long(),
    )


def mlp():
    return Body(4), target(48)


@pytest.mark.parametrize("make", [bert, vit, cnn, mlp])
def test_any_network(make):
    model, data = make()
    ranking = rank_starts({"a": model}, data, layers=2, progress=False)
    assert len(ranking.best.layers) == 2
    assert ranking.best.leep is not None
    assert ranking.samples == 48
    tuned = rank_starts(
        {"a": model}, data, layers=1, fine_tune=FineTuning(2), folds=2, progress=False
    )
    assert 0 <= tuned.best.fine_tuned <= 1


def test_layers_of_transformers_are_their_blocks():
    model, data = bert()
    inputs = {name: value[:2] for name, value in data.items() if name != "labels"}
    blocks = [f"bert.encoder.layer.{k}" for k in range(3)]
    assert ObservedNetwork(model, inputs, None).spread_layers(5) == [
        "bert.embeddings",
        *blocks,
        "dropout",
    ]
    assert ObservedNetwork(model, inputs, None).spread_layers(3) == [
        "bert.embeddings",
        blocks[1],
        "dropout",
    ]
    assert ObservedNetwork(model, inputs, None).spread_layers(1) == ["dropout"]


def test_layers_of_a_network_without_a_head_end_in_its_last():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
    assert ObservedNetwork(model, randn(2, 6), None).spread_layers(5) == ["0", "1"]
    start = rank_starts({"a": model}, target(), progress=False).best
    assert start.leep is start.nce is None


def test_layers_before_all_weights_are_left_out():
    model = nn.Sequential(
        nn.Flatten(), nn.ReLU(), nn.Sequential(nn.Identity(), nn.Linear(6, 5)), nn.Linear(5, 2)
    )
    assert ObservedNetwork(model, randn(2, 6, 1), None).spread_layers(5) == ["2.1"]


def test_padding_does_not_count():
    model, data = bert()
    padded = dict(data)
    padded["input_ids"] = data["input_ids"].masked_fill(data["attention_mask"] == 0, 7)
    layers = ["bert.encoder.layer.1"]
    one, other = (
        rank_starts({"a": model}, d, layers=layers, progress=False).best for d in (data, padded)
    )
    assert one.missed == pytest.approx(other.missed, rel=1e-4)


def test_saves_loads_draws_prints_and_shows_a_page(ranking, tmp_path):
    assert [start["name"] for start in json.loads(ranking.to_json())["starts"]] == [
        start.name for start in ranking.starts
    ]
    ranking.save(tmp_path / "ranking.json")
    assert StartRanking.load(tmp_path / "ranking.json") == ranking
    json.loads(
        (tmp_path / "ranking.json").read_text(), parse_constant=lambda word: pytest.fail(word)
    )
    figure, ax = ranking.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        start.name for start in ranking.starts
    ]
    figure.savefig(tmp_path / "ranking.png")
    page = ranking._repr_html_()
    text = str(ranking)
    for start in ranking.starts:
        assert start.name in text
        assert start.name in page
    assert text.endswith(ranking.reading())
    columns, rows = ranking.table()
    assert all(len(row) == len(columns) for row in rows)


def test_a_legend_says_what_the_columns_mean_and_what_orders(ranking):
    header, *_, first, second, third, _ = str(ranking).splitlines()
    assert first.startswith("120 labels of 4 classes, 95% intervals.")
    assert first.endswith("The order is by the mean of the ranks by missed and LogME.")
    for column in ("missed", "LogME", "H-score"):
        assert column in header
        assert column in second
    for column in ("error", "layer", "LEEP", "NCE"):
        assert column in header
        assert column in third
    assert "error: share missed" in str(replace(ranking, classes=None))


@pytest.mark.parametrize(
    ("classes", "measure"), [(4, "Brier score at the best temperature"), (None, "squared error")]
)
def test_a_legend_says_which_losses_order_and_which_calls_compare(ranking, classes, measure):
    starts = [replace(start, fine_tuned=0.3, call="helps") for start in ranking.starts]
    text = str(replace(ranking, starts=tuple(starts), classes=classes))
    assert f"The order is by the {measure} after fine-tuning" in text
    assert "mean of the ranks" not in text
    assert "Tuned: whether fine-tuning the start beats training from scratch" in text
    assert f"features does. By the {measure}" in text


@pytest.mark.parametrize(("calls", "said"), [(["helps"], "helps"), (["helps"] * 2, "help")])
def test_the_advice_names_starts_that_help_frozen_where_scratch_leads(ranking, calls, said):
    first, *others = ranking.starts
    helping = [replace(start, frozen_call=call) for start, call in zip(others, calls, strict=False)]
    found = replace(ranking, starts=(first, *helping), tied=(first.name,), scratch=first.name)
    names = ", ".join(start.name for start in helping)
    assert f"frozen, {names} {said}." in found.reading()


def test_an_onset_that_is_never_reached_survives_the_file(tmp_path):
    x = randn(60, 6)
    y = (x[:, 0] > 0).long()
    perfect = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2))
    with torch.no_grad():
        perfect[0].weight.zero_()
        perfect[0].weight[0, 0] = 1e3
        perfect[0].bias.zero_()
    ranking = rank_starts(
        {"a": nn.Sequential(perfect[0], nn.Hardtanh(), perfect[1])},
        (x, y),
        curve={10: 0.5, 50: 0.2},
    )
    assert ranking.best.error == 0
    assert ranking.best.onset[1] == math.inf
    ranking.save(tmp_path / "ranking.json")
    assert StartRanking.load(tmp_path / "ranking.json") == ranking


def test_logs_a_table_a_figure_and_errors(ranking):
    pytest.importorskip("wandb")
    logged = {}

    class Run:
        log = logged.update

    ranking.log(Run())
    assert {f"taskinfo/rank_starts/error/{start.name}" for start in ranking.starts} <= set(logged)
    assert len(logged["taskinfo/rank_starts/table"].data) == 3
    assert type(logged["taskinfo/rank_starts/figure"]).__name__ == "Image"


@pytest.mark.parametrize(
    ("models", "got"),
    [
        ("a.ckpt", "got str."),
        ({"a": "a.ckpt"}, "got str for 'a'."),
        ({"a": Body(4), "b": Body(4).state_dict()}, "got OrderedDict for 'b'."),
        (Body(4), "got Body."),
        ([Body(4)], "got list."),
    ],
    ids=["path", "path by name", "state dict", "network", "list"],
)
def test_what_holds_no_networks_is_refused_with_the_rule(models, got):
    rule = "`models` must be a dict of names to networks, or to functions that make or load one"
    with pytest.raises(TypeError) as caught:
        rank_starts(models, target(), progress=False)
    assert str(caught.value).startswith(rule)
    assert "lambda: Net.load_from_checkpoint(path)" in str(caught.value)
    assert str(caught.value).endswith(got)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"models": {}}, "`models` .*none"),
        ({"models": {"a": lambda: 3}}, "`models` .*function that returns int for 'a'"),
        ({"scratch": "nobody"}, r"`scratch` .*\['a'\], got 'nobody'"),
        ({"curve": {20: 0.5}}, "`curve` .*two or more"),
        ({"curve": {20: 0.5, 40: 0.6}}, "`curve` must fall"),
        ({"curve": {20: 0.5, 40: 0.0}}, "`curve` .*positive"),
        ({"layers": 0}, "`layers` .*0"),
        ({"layers": ["nowhere"]}, "`layers` .*'nowhere'"),
        ({"folds": 1}, "`folds` .*1"),
        ({"folds": 40}, "`data` .*160 samples, 4 for each of 40 folds, got 120"),
        ({"confidence": 1.0}, "`confidence` .*1.0"),
        ({"confidence": 0.5}, "`confidence` .*between 0.5 and 1, got 0.5"),
        ({"helps_before": 0.4}, "`helps_before` .*at least 0.5 .*got 0.4 and 0.95"),
        ({"helps_before": 0.95}, "`helps_before` .*less than `confidence`, got 0.95 and 0.95"),
        ({"max_features": 0}, "`max_features` .*0"),
        ({"data": []}, "`data` .*none"),
        ({"data": (randn(40, 6), torch.zeros(40).long())}, "`data` .*40 equal ones"),
        ({"data": (randn(40, 6), torch.zeros(39).long())}, r"\[39\] for 40 inputs"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refuses(arguments, match):
    with pytest.raises(ValueError, match=match):
        rank_starts(**{"models": {"a": Body(4)}, "data": target(), "progress": False, **arguments})


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"steps": 0}, "`steps` .*0"),
        ({"batch_size": 0}, "`batch_size` .*0"),
        ({"scratch_repeats": 0}, "`scratch_repeats` .*0"),
        ({"learning_rate": 0.0}, "`learning_rate` .*0.0"),
    ],
)
def test_fine_tuning_refuses(arguments, match):
    with pytest.raises(ValueError, match=match):
        FineTuning(**arguments)


def test_refuses_to_fine_tune_what_has_no_head():
    headless = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
    with pytest.raises(ValueError, match=r"`fine_tune` .*Linear"):
        rank_starts({"a": headless}, target(), fine_tune=FineTuning(1), progress=False)


def write_growth(path):
    """Write by how many MB the memory of this process grows with 24 samples, after eight."""
    middle = [nn.Sequential(nn.ReLU(), nn.Conv2d(64, 64, 1)) for _ in range(6)]
    net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *middle)
    batch = torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 0, 1])
    feature_overlap(net, [batch] * 2, folds=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    feature_overlap(net, (batch for _ in range(6)), folds=2)
    path.write_text(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def test_memory_does_not_grow_with_the_size_of_feature_maps(tmp_path):
    """24 samples of 13 layers with 262,144 entries would be 650 MB in float64; passes of four take up to 150."""
    forked(write_growth, tmp_path / "MB").join()
    assert float((tmp_path / "MB").read_text()) < 300
