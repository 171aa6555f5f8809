"""A certificate adds up from its own numbers, leaves no trace, and holds on samples nobody has seen."""

import json
import math
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_taskinfo.certificates import PRIOR_STDS, Prior, certify, zero_one_loss
from lightning_taskinfo.certificates.certificate import round_up
from lightning_taskinfo.certificates.samples import read_labelled, read_pair
from lightning_taskinfo.distributions import IsotropicGaussian, diagonal_curvature
from lightning_taskinfo.functional.pac_bayes import kl_bound
from lightning_taskinfo.variational import add_weight_noise
from tests.certificates.conftest import blobs, fit

SHORT = {"draws": 100, "betas": (0.1, 1.0, 10.0, 100.0)}
QUICK = {**SHORT, "structure": "diagonal"}
STRUCTURES = ["isotropic", "diagonal", "neuron", "kron"]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_adds_up_and_holds_on_new_samples(trained, data, prior, structure):
    certificate = certify(trained, data, prior, structure=structure, **SHORT)
    assert certificate.valid, certificate.reasons
    low, high = certificate.risk_interval
    assert low < certificate.risk < high
    assert certificate.bound == kl_bound(high, certificate.kl + certificate.price, 600, 0.04).item()
    assert certificate.confidence == pytest.approx(0.95)
    g = torch.Generator().manual_seed(7)
    unseen, errors = blobs(5_000, seed=99), []
    for _ in range(20):
        with torch.no_grad(), certificate.post.with_weights(trained, g):
            errors.append(zero_one_loss(trained(unseen[0]), unseen[1]).mean().item())
    assert sum(errors) / 20 < certificate.bound < 0.5


def test_the_betting_interval_is_that_of_the_networks(trained, data, prior):
    """Two certificates that differ in their confidence only rest on the same networks: wider for the surer one."""
    sure, unsure = (certify(trained, data, prior, delta_draws=d, **QUICK) for d in (0.001, 0.5))
    assert (
        sure.risk_interval[0]
        < unsure.risk_interval[0]
        < unsure.risk_interval[1]
        < sure.risk_interval[1]
    )


def test_kl_and_price_are_those_of_the_prior_it_names(trained, data, start, prior):
    certificate = certify(trained, data, prior, **QUICK)
    std = {
        name: certificate.prior_std[name.rpartition(".")[0]] for name, _ in start.named_parameters()
    }
    assert certificate.kl == certificate.post.kl(IsotropicGaussian(start, prior_std=std)).item()
    places = [PRIOR_STDS.index(value) + 1 for value in certificate.prior_std.values()]
    assert len(places) == 2
    assert certificate.price == pytest.approx(sum(math.log(math.pi**2 * j**2 / 6) for j in places))


def test_one_scale_for_all_layers_is_paid_once(trained, data, start):
    certificate = certify(
        trained, data, Prior(start, "random initialisation", per_layer=False), **QUICK
    )
    ((layer, std),) = certificate.prior_std.items()
    assert layer == ""
    assert certificate.price == pytest.approx(
        math.log(math.pi**2 * (PRIOR_STDS.index(std) + 1) ** 2 / 6)
    )


def test_a_scale_that_was_not_chosen_is_not_paid(trained, data, start):
    certificate = certify(
        trained, data, Prior(start, "random initialisation", stds=(0.2,)), **QUICK
    )
    assert certificate.price == 0.0
    assert set(certificate.prior_std.values()) == {0.2}


def test_the_winner_is_tested_on_fresh_draws(trained, data, prior):
    """With one β nothing is chosen by draws; the risk must still come from others than the search's."""
    one = certify(trained, data, prior, structure="diagonal", draws=16, betas=(1.0,))
    assert one.risk != one.candidates[0].risk
    assert len(one.candidates) == 1


def test_the_best_candidate_wins(trained, data, prior):
    certificate = certify(trained, data, prior, **QUICK)
    best = min(certificate.candidates, key=lambda row: row.bound)
    assert (certificate.beta, certificate.kl, certificate.price) == (best.beta, best.kl, best.price)


def test_several_structures_are_searched_together(trained, data, prior):
    """The winner is the best of all rows, and what is claimed of it is what its own structure gives."""
    several = certify(trained, data, prior, structure=("isotropic", "kron"), **SHORT)
    rows = [(row.structure, row.beta) for row in several.candidates]
    assert rows == [(name, beta) for name in ("isotropic", "kron") for beta in SHORT["betas"]]
    assert several.structures == ("isotropic", "kron")
    best = min(several.candidates, key=lambda row: row.bound)
    assert (several.structure, several.beta, several.kl) == (best.structure, best.beta, best.kl)
    one, listed = (
        certify(trained, data, prior, structure=name, **SHORT)
        for name in ("diagonal", ("diagonal",))
    )
    assert one == listed


def test_all_structures_are_tried_unless_told_otherwise(trained, data, prior):
    found = certify(trained, data, prior, draws=5, betas=(0.1, 1.0))
    assert found.structures == tuple(STRUCTURES)
    assert found.structure == min(found.candidates, key=lambda row: row.bound).structure


def test_a_layer_too_wide_for_matrices_is_left_to_the_cheap_structures(trained, data, monkeypatch):
    monkeypatch.setattr("lightning_taskinfo.certificates.search.WIDEST", 7)
    assert certify(trained, data, draws=5, betas=(1.0,)).structures == ("isotropic", "diagonal")


def test_a_picked_winner_does_not_look_better_than_it_is(trained, data, prior):
    """Of post-distributions that are all alike, the luckiest looks good; its fresh draws tell the truth."""
    options = {"structure": ("isotropic", "diagonal"), "betas": (1.0,) * 8, "draws": 200}
    certificate = certify(trained, data, prior, **options)
    g, risks = torch.Generator().manual_seed(5), []
    for _ in range(300):
        with torch.no_grad(), certificate.post.with_weights(trained, g):
            risks.append(zero_one_loss(trained(data[0]), data[1]).mean())
    truth, error = (
        torch.stack(risks).mean().item(),
        torch.stack(risks).std().item() / math.sqrt(300),
    )
    lucky = min(
        row.risk for row in certificate.candidates if row.structure == certificate.structure
    )
    low, high = certificate.risk_interval
    assert lucky < truth - 3 * error
    assert low < truth < high
    assert certificate.risk > lucky


@pytest.mark.parametrize("structure", [(), []])
def test_no_structure_is_refused(trained, data, prior, structure):
    with pytest.raises(ValueError, match="`structure` must name at least one structure, got none"):
        certify(trained, data, prior, structure=structure, **SHORT)


def test_a_bound_is_rounded_up():
    assert [round_up(value) for value in (0.20001, 0.2, 0.99999, 1.0, 0.0)] == [
        0.2001,
        0.2,
        1.0,
        1.0,
        0.0,
    ]


def test_a_given_curvature(trained, data, prior):
    diagonal = {name: torch.ones_like(p) for name, p in trained.named_parameters()}
    blocks = certify(trained, data, prior, structure=diagonal_curvature(diagonal), **SHORT)
    assert blocks.structure == "given"
    del diagonal["2.bias"]
    with pytest.raises(ValueError, match=r"`structure` .*got a difference in \['2.bias'\]"):
        certify(trained, data, prior, structure=diagonal_curvature(diagonal), **SHORT)


def test_leaves_no_trace_and_repeats_itself(trained, data, prior):
    model = deepcopy(trained).train()
    for p in model.parameters():
        p.grad = None
    state, random = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    one, two = (certify(model, data, prior, **QUICK) for _ in range(2))
    assert one == two
    assert one.risk != certify(model, data, prior, seed=1, **QUICK).risk
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_loader_is_read_whole_and_in_order(data):
    dataset = TensorDataset(*data)
    skewed = DataLoader(
        dataset, batch_size=7, drop_last=True, sampler=WeightedRandomSampler([1.0] * 600, 50)
    )
    for source in (dataset, skewed, data):
        inputs, targets = read_labelled(source)
        assert torch.equal(inputs, data[0])
        assert torch.equal(targets, data[1])


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": SubsetRandomSampler(range(50)), "batch_size": 10},
        {"sampler": WeightedRandomSampler([0.0] + [1.0] * 599, 600), "batch_size": 10},
        {"batch_sampler": [[0, 1], [2, 3]]},
    ],
    ids=["subset", "weights", "batches"],
)
def test_a_loader_that_may_leave_samples_out_is_refused(data, options):
    """A prior that was trained on the samples that are left out would be no prior for those that are read."""
    loader = DataLoader(TensorDataset(*data), **options)
    with pytest.raises(ValueError, match="`held_out` must be a loader of all samples"):
        read_labelled(loader, argument="held_out")


def test_a_loader_collates_as_it_does_in_training(data):
    rows = [{"image": x, "label": y} for x, y in zip(*data, strict=True)]

    def pairs(samples):
        return torch.stack([s["image"] for s in samples]), torch.stack(
            [s["label"] for s in samples]
        )

    inputs, targets = read_labelled(DataLoader(rows, batch_size=7, collate_fn=pairs))
    assert torch.equal(inputs, data[0])
    assert torch.equal(targets, data[1])


def test_a_dataset_that_calls_its_inputs_data_is_a_dataset(data):
    images = TensorDataset(*data)
    images.data = data[0]  # as those of torchvision do
    inputs, targets = read_labelled(images)
    assert torch.equal(inputs, data[0])
    assert torch.equal(targets, data[1])


def test_eight_samples_are_enough(data):
    assert len(read_labelled((data[0][:8], data[1][:8]))[1]) == 8


def test_more_samples_certify_more(start, prior):
    bounds = []
    for n in (100, 1000):
        data = blobs(n, seed=1)
        bounds.append(
            certify(fit(deepcopy(start), data), data, prior, structure="neuron", **SHORT).bound
        )
    assert bounds[0] > bounds[1]


def test_the_table_and_the_json_tell_all(trained, data, prior):
    certificate = certify(trained, data, prior, structure="diagonal", **SHORT)
    again = json.loads(certificate.to_json())
    assert again["bound"] == certificate.bound
    assert again["assumptions"] == list(certificate.assumptions)
    assert [row["beta"] for row in again["candidates"]] == list(SHORT["betas"])
    for part in (
        f"{round_up(certificate.bound):.4f}",
        "(diagonal)",
        "best of 4",
        "random initialisation",
        "stochastic",
        "600",
        "valid              yes",
    ):
        assert part in str(certificate)


def test_outputs_that_are_no_numbers_are_errors():
    outputs = torch.tensor([[math.nan, 1.0], [0.0, 1.0]])
    assert zero_one_loss(outputs, torch.tensor([0, 1])).tolist() == [1.0, 0.0]


def test_scores_without_an_axis_of_classes_and_complex_labels_are_refused():
    with pytest.raises(
        ValueError, match=r"must return logits \[N, C\] of at least 2 classes, got \[3\]"
    ):
        zero_one_loss(torch.zeros(3), torch.zeros(3).long())
    with pytest.raises(
        ValueError, match=r"needs class indices \(integers\) .*, got torch.complex64"
    ):
        zero_one_loss(torch.zeros(3, 2), torch.zeros(3, dtype=torch.cfloat))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"structure": "dense"}, "`structure` .*got 'dense'"),
        ({"structure": ("kron", "dense")}, "`structure` .*got 'dense'"),
        ({"delta": 0.0}, r"`delta` must be in \(0, 1\), got 0\.0"),
        ({"delta_draws": 1.0}, r"`delta_draws` must be in \(0, 1\), got 1\.0"),
        (
            {"delta": 0.75, "delta_draws": 0.5},
            r"`delta` and `delta_draws` must add up to less than 1, got 1\.25",
        ),
        (
            {"loss_fn": nn.functional.cross_entropy},
            r"`loss_fn` must return a value for each of 600, got shape \[\]",
        ),
        ({"draws": 0}, "`draws` must be at least 1, got 0"),
        ({"betas": ()}, r"`betas` must be positive, got \(\)"),
        ({"betas": (1.0, -1.0)}, r"`betas` must be positive, got -1\.0"),
    ],
)
def test_messages(trained, data, prior, arguments, message):
    with pytest.raises(ValueError, match=message):
        certify(trained, data, prior, **arguments)


def test_a_batch_of_a_loader_is_data(trained, data, prior):
    assert certify(
        trained, list(data), prior, draws=5, betas=(1.0,), structure="diagonal"
    ) == certify(trained, data, prior, draws=5, betas=(1.0,), structure="diagonal")


def test_a_dataset_of_dicts_through_a_forward_of_its_own(trained, data, prior):
    x, y = data
    rows = [({"image": x[i]}, y[i]) for i in range(len(y))]
    found = certify(
        trained, rows, prior, forward_fn=lambda model, inputs: model(inputs["image"]), **QUICK
    )
    assert found == certify(trained, data, prior, **QUICK)


def test_batches_are_read_as_callbacks_read_them(trained, data, prior):
    """A dict with a label, inputs as a dict too, and whatever `batch_fn` picks; unlabelled ones without the label."""
    x, y = data
    unlabelled = torch.randn(120, 4)
    named = [{"image": a, "label": b} for a, b in zip(x, y, strict=True)]
    triples = TensorDataset(x, torch.zeros(600), y)
    options = {"draws": 5, "betas": (1.0,), "structure": "diagonal"}
    expected = certify(
        trained, data, prior, unlabelled=unlabelled, held_out=blobs(20, 3), **options
    )
    by_name = certify(
        trained,
        named,
        prior,
        unlabelled={"image": unlabelled},
        held_out=dict(zip(("image", "label"), blobs(20, 3), strict=True)),
        **options,
    )
    assert by_name == expected
    held = (blobs(20, 3)[0], None, blobs(20, 3)[1])
    picked = certify(
        trained,
        triples,
        prior,
        unlabelled=(unlabelled, None, None),
        held_out=held,
        batch_fn=lambda batch: (batch[0], batch[2]),
        **options,
    )
    assert picked == expected


def test_samples_that_influence_each_other_through_a_forward_of_its_own_are_found(
    trained, data, prior
):
    with pytest.warns(UserWarning, match="depend on the others of its batch"):
        mixed = certify(
            trained,
            data,
            prior,
            forward_fn=lambda model, x: model(x - x.mean(0)),
            draws=5,
            betas=(1.0,),
            structure="diagonal",
        )
    assert "depends on the other samples of its batch" in mixed.reasons[0]


def test_refuses_data_that_do_not_fit(trained, data, prior):
    x, y = data
    with pytest.raises(TypeError, match="`prior` must be a Prior or None, got a Sequential"):
        certify(trained, data, deepcopy(trained))
    wide = nn.Sequential(
        *[nn.Linear(x.shape[1], 99) if i == 0 else part for i, part in enumerate(trained)]
    )
    with pytest.raises(
        ValueError,
        match=r"`center` must hold `0.weight` with shape \(8, 4\), got \(99, 4\); `fresh`",
    ):
        certify(trained, data, Prior(wide, "random"))
    with pytest.raises(
        ValueError,
        match=r"`data` must be \(inputs, targets\), .* got 'digits'; `tasks.prepare_task\(",
    ):
        certify(trained, "digits", prior)
    with pytest.raises(ValueError, match="`data` must hold at least 8 samples, got 7"):
        certify(trained, (x[:7], y[:7]), prior)
    for nothing in (TensorDataset(x[:0], y[:0]), DataLoader(TensorDataset(x[:0], y[:0]))):
        with pytest.raises(ValueError, match="`data` must hold at least 8 samples, got 0"):
            certify(trained, nothing, prior)
    with pytest.raises(ValueError, match="`data` must hold at least 8 samples, got 2"):
        certify(
            trained, [(x[0], y[0]), (x[1], y[1])], prior
        )  # a dataset of two samples, and no pair
    with pytest.raises(
        ValueError,
        match=r"needs class indices .* of shape \[2\] as targets, got torch.float32 of shape \[2",
    ):
        certify(trained, (x, y.float()), prior)
    with pytest.raises(
        ValueError,
        match=r"needs class indices \(integers\) .*, got torch.float64 of shape",
    ):
        zero_one_loss(x[:, :2], y.double())
    with pytest.raises(
        ValueError, match=r"`data` .*pair \(inputs, targets\), .* got tuple of Tensor, list; set"
    ):
        certify(trained, (x, y.tolist()), prior)
    with pytest.raises(ValueError, match=r"`data` .*got dict with image, shade; set `batch_fn`"):
        certify(trained, [{"image": a, "shade": b} for a, b in zip(x, y, strict=True)], prior)
    with pytest.raises(
        ValueError, match=r"`data` .*got list of Tensor, Tensor, Tensor; set `batch_fn`"
    ):
        certify(trained, TensorDataset(x, y, y), prior)
    with pytest.raises(ValueError, match="`data` must be finite, got 600 values that are not"):
        certify(trained, (x, y * math.nan), prior, loss_fn=lambda outputs, y: y)
    with pytest.raises(ValueError, match=r"got tuple .*`forward_fn`"):
        certify(trained, data, prior, forward_fn=lambda model, x: (model(x), x))
    with pytest.raises(ValueError, match="`data` must hold one tensor of inputs, got dict"):
        read_pair(({"x": x}, y))
    with pytest.raises(ValueError, match="`data` must hold a target for each input, got 3 for 8"):
        certify(trained, (x[:8], y[:3]), prior)
    with pytest.raises(ValueError, match=r"of shape \[2\] as targets, got .*\[2, 1\]"):
        certify(trained, (x, y[:, None]), prior, structure="diagonal", betas=(1.0,))
    with pytest.raises(ValueError, match=r"`stds` must be positive, got 0\.0"):
        Prior(stds=(0.0,))
    with pytest.raises(
        ValueError,
        match=r"`center` must hold `2.bias` with shape \(2,\), got nothing",
    ):
        certify(
            trained,
            data,
            Prior({n: p for n, p in trained.state_dict().items() if n != "2.bias"}, "no"),
        )


def test_real_targets_are_fine_for_a_loss_that_expects_them(trained, data, prior):
    distances = certify(
        trained,
        (data[0], data[1].double()),
        prior,
        loss_fn=lambda outputs, y: (outputs.softmax(1)[:, 1] - y).abs(),
        draws=5,
        betas=(1.0,),
    )
    assert distances.valid


def test_a_single_layer_is_a_model_too(data):
    model = nn.Linear(4, 2)
    certificate = certify(model, data, draws=10, betas=(1.0,))
    assert certificate.valid
    assert certificate.prior_origin == "0"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda x, y: (x, y + 1),
            "needs targets from 0 to 1, as `model` returns 2 logits, got 2",
        ),
        (lambda x, y: (x, y - 1), "got -1"),
        (lambda x, y: (x * math.nan, y), "`data` must be finite, got .* values that are not"),
    ],
)
def test_refuses_labels_and_inputs_before_anything_is_measured(trained, data, prior, change, match):
    with pytest.raises(ValueError, match=match):
        certify(trained, change(*data), prior)


def test_refuses_one_score_and_noisy_weights(trained, data, prior):
    with pytest.raises(ValueError, match=r"`model` .*\[N, C\].*got \[2, 1\]"):
        certify(trained, data, prior, forward_fn=lambda model, x: model(x)[:, :1])
    with pytest.raises(ValueError, match=r"`model` .*\[N, C\].*got \[2, 1, 2\]"):
        certify(trained, data, prior, forward_fn=lambda model, x: model(x)[:, None])
    with pytest.raises(
        ValueError, match="`model` must have plain weights, got noisy ones: `remove_weight_noise`"
    ):
        certify(add_weight_noise(deepcopy(trained)), data, prior)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_networks_drawn_around_half_precision_weights_are_not_rounded(
    trained, data, start, structure
):
    """The certificate of a bfloat16 network is that of the float32 network with the same weights."""
    inputs, targets = data[0].bfloat16(), data[1]
    halves = [deepcopy(net).bfloat16() for net in (trained, start)]
    model, center = halves
    half = certify(
        model, (inputs, targets), Prior(center, origin="random"), structure=structure, **SHORT
    )
    model, center = (deepcopy(net).float() for net in halves)
    full = certify(
        model,
        (inputs.float(), targets),
        Prior(center, origin="random"),
        structure=structure,
        **SHORT,
    )
    assert (half.valid, full.valid) == (True, True)
    assert (half.bound, half.kl, half.risk) == pytest.approx(
        (full.bound, full.kl, full.risk), rel=1e-6
    )
    assert all(p.dtype == torch.bfloat16 for p in halves[0].parameters())
