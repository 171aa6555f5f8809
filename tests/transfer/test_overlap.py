"""The share of a target outside frozen features: against known shares, and a plain loop over folds and penalties."""

import math
import re

import pytest
import torch
from torch import nn

from lightning_taskinfo.transfer.overlap import feature_overlap, fitted_curve, is_far


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Frozen(nn.Module):
    """Features are the first coordinates of the inputs; dropout and batch norm are there to be disturbed."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept
        self.first = nn.Identity()
        self.norm = nn.BatchNorm1d(kept, dtype=torch.float64)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(kept, 2, dtype=torch.float64)
        self.loss = nn.MSELoss()  # never runs in a forward pass

    def forward(self, x):
        return self.head(self.drop(self.norm(self.first(x[:, : self.kept]))))


@pytest.mark.parametrize(("kept", "share"), [(4, 0.0), (3, 0.25), (1, 0.75)])
def test_share_of_a_linear_target_is_that_of_its_missing_coordinates(kept, share):
    inputs = randn(2000, 6)
    labels = inputs[:, :4].sum(1)
    overlap = feature_overlap(Frozen(kept), [(inputs, labels)], layers=["first"])
    assert abs(overlap.outside - share) <= 2.6 * overlap.standard_error + 1e-9
    assert overlap.samples == 2000
    assert overlap.standard_error < 0.02


def test_batches_and_all_layers():
    inputs = randn(120, 6)
    labels = (inputs[:, 0] > 0).long()
    whole = feature_overlap(Frozen(5), [(inputs, labels)])
    model = Frozen(5)
    torch.manual_seed(0)
    parts = feature_overlap(
        model, zip(inputs.split(50), labels.split(50), strict=True), layers=["first"]
    )
    assert whole.layers == ("first", "norm", "drop", "head")
    torch.testing.assert_close(parts.outside[0], whole.outside[0])
    assert (whole.outside[:3] < 0.6).all()


def test_random_labels_are_outside():
    inputs, labels = (
        randn(600, 20),
        torch.randint(4, (600,), generator=torch.Generator().manual_seed(1)),
    )
    found = feature_overlap(Frozen(20), [(inputs, labels)], layers=["first"])
    assert abs(found.outside - 1) <= 1.96 * found.standard_error


def test_the_model_is_only_observed():
    model = Frozen(3).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    feature_overlap(model, [(randn(40, 4), randn(40))])
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not any(module._forward_hooks for module in model.modules())


def test_far_is_more_than_ten_times_the_largest_or_less_than_a_tenth_of_the_smallest():
    onsets = [4.9, 5, 1000, 1001, math.inf]
    assert [is_far(onset, [50, 100]) for onset in onsets] == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"layers": ["nowhere"]},
            r"`layers` must name modules that run once a pass and put out one tensor with a row for each sample, got "
            r"'nowhere'; there are \['first', 'norm', 'drop', 'head', ''\]",
        ),
        ({"layers": ["loss"]}, "`layers` must name modules that run once a pass .* got 'loss'"),
        ({"layers": []}, "`layers` must name at least one module, got none"),
        ({"folds": 1}, "`folds` must be at least 2, got 1"),
        ({"folds": 11}, "`data` must have at least 44 samples, 4 for each of 11 folds, got 40"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        feature_overlap(Frozen(3), [(randn(40, 4), randn(40))], **arguments)


class Twice(Frozen):
    """The first layer runs twice."""

    def forward(self, x):
        return super().forward(self.first(x))


def test_refuses_a_layer_that_runs_twice_a_pass():
    message = "`layers` must name modules that run once a pass .* got 'first'"
    with pytest.raises(ValueError, match=message):
        feature_overlap(Twice(3), [(randn(40, 4), randn(40))], layers=["first"])


def test_layers_that_run_twice_a_pass_are_left_out_where_none_are_named():
    found = feature_overlap(Twice(3), [(randn(40, 4), randn(40))])
    assert found.layers == ("norm", "drop", "head")


def test_refuses_a_layer_without_a_row_for_each_sample():
    class Mixed(Frozen):
        def forward(self, x):
            return super().forward(self.first(x.T).T)

    message = "`layers` must .* put out one tensor with a row for each sample, got 'first'"
    with pytest.raises(ValueError, match=message):
        feature_overlap(Mixed(3), [(randn(40, 4), randn(40))], layers=["first"])


def test_features_are_kept_before_an_operation_in_place_changes_them():
    x = randn(40, 4).float()
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    found = [
        feature_overlap(nn.Sequential(linear, nn.ReLU(inplace=inplace)), (x, x[:, 0]))
        for inplace in (True, False)
    ]
    assert torch.equal(found[0].outside, found[1].outside)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"image": 1, "name": 2},
            r"A batch must be a pair \(inputs, targets\), .* got dict with image, name; set `batch_fn`",
        ),
        (
            (torch.zeros(4), torch.tensor(1)),
            r"got labels of shape \[\] for 4 inputs; a dataset of single samples goes",
        ),
        (
            (torch.zeros(4), torch.zeros(1)),
            r"got labels of shape \[1\] for 4 inputs; a dataset of single samples goes",
        ),
        (
            (torch.zeros(4, 4), torch.zeros(4, 3, 3).long()),
            r"a class index or .* got labels of shape \[4, 3, 3\] for 4",
        ),
    ],
    ids=["dict", "sample", "sample of a regression", "segmentation"],
)
def test_refuses_what_is_no_batch(batch, message):
    with pytest.raises(ValueError, match=message):
        feature_overlap(Frozen(3), [batch] * 40)


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (randn(40, 4) * math.nan, randn(40), "`data` must be finite, got 160 values that are not"),
        (randn(40, 4), randn(40) * math.inf, "`data` must be finite, got 40 values that are not"),
        (
            randn(40, 4),
            torch.ones(40).long(),
            r"`data` must have labels that differ \(of two classes .* got 40 equal ones",
        ),
        (
            randn(40, 4),
            torch.full((40, 2), 0.1),
            "`data` must have labels that differ .* got 40 equal ones",
        ),
    ],
    ids=["inputs", "labels", "one class", "one value"],
)
def test_refuses_numbers_that_say_nothing(inputs, labels, message):
    with pytest.raises(ValueError, match=message):
        feature_overlap(Frozen(3), [(inputs, labels)])


def test_refuses_features_that_are_not_finite():
    model = Frozen(3)
    nn.init.constant_(model.head.weight, math.nan)
    with pytest.raises(
        ValueError,
        match="`features of head` must be finite, got 80 values that are not",
    ):
        feature_overlap(model, [(randn(40, 4), randn(40))])


@pytest.mark.parametrize("data", [[], iter([])], ids=["list", "used up"])
def test_refuses_no_batches(data):
    with pytest.raises(ValueError, match=r"`data` must yield batches \(inputs, labels\), got none"):
        feature_overlap(Frozen(3), data)


@pytest.mark.parametrize(
    "curve",
    [{50: 60, 100: 50}, {50: 4.1, 100: 4}, {50: 0.6, 100: math.nan}, {50: 0.5, 100: 0}, {50: 0.5, 100: -0.1},
     {50: 0.5}, {0: 0.5, 50: 0.4}, {}],
    ids=str,
)  # fmt: skip
def test_refuses_a_curve_that_is_no_share_or_no_curve(curve):
    message = (
        "`curve` must hold positive shares, not in per cent, at two or more numbers of labels, got "
    )
    with pytest.raises(ValueError, match=re.escape(f"{message}{curve}.")):
        fitted_curve(curve)


def test_one_batch_is_all_of_them_and_lone_tensors_are_refused():
    inputs, labels, model = randn(40, 4), randn(40), Frozen(3)
    one, several = (feature_overlap(model, data) for data in ((inputs, labels), [(inputs, labels)]))
    assert torch.equal(one.outside, several.outside)
    with pytest.raises(
        ValueError,
        match=r"A batch must be a pair .* got Tensor of torch.float64 and shape \[40, 4\]",
    ):
        feature_overlap(Frozen(3), [inputs])


@pytest.mark.parametrize("curve", [{1: 1.0, 2: 2.0}, {50: 1.0, 100: 1.0}], ids=str)
def test_refuses_a_rising_curve(curve):
    with pytest.raises(ValueError, match="`curve` must fall with the number of labels, got "):
        fitted_curve(curve)


def test_being_sure_of_the_wrong_class_is_the_largest_share():
    amplitude, exponent = fitted_curve({50: 4.0, 100: 2.0})
    assert (amplitude.item(), exponent.item()) == pytest.approx((200, 1))


def test_two_folds_and_four_samples_in_each_are_enough():
    assert feature_overlap(Frozen(3), (randn(8, 4), randn(8)), folds=2).samples == 8
    with pytest.raises(
        ValueError, match="`data` must have at least 40 samples, 4 for each of 10 folds, got 39"
    ):
        feature_overlap(Frozen(3), (randn(39, 4), randn(39)), folds=10)


def test_samples_without_a_label_count_for_nothing():
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randint(3, (60,))
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    few = y.clone()
    few[::4] = -100
    kept = few != -100
    found = feature_overlap(net, [(x[:20], few[:20]), (x[20:], few[20:])])
    expected = feature_overlap(net, [(x[kept], y[kept])])
    assert found.samples == expected.samples == 45
    torch.testing.assert_close(found.outside, expected.outside)


def test_a_real_label_of_minus_100_is_a_label():
    """And a row of several labels counts once."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.randn(60, 2)
    y[3, 0] = -100.0
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    assert feature_overlap(net, [(x, y)]).samples == 60


def test_data_that_is_no_batches_is_refused_in_one_sentence():
    net = nn.Linear(4, 3)
    lengths = [(randn(20, length), randn(20)) for length in (4, 5)]
    with pytest.raises(ValueError, match="`data` must have batches of one shape, or an `attention"):
        feature_overlap(net, lengths)
