"""What all regularizers share: schedules, zero weights, precision, batch-norm statistics."""

import math
import re

import pytest
import torch
from torch import nn

from lightning_taskinfo._ranges import check_finite
from lightning_taskinfo.regularizers import (
    Lautum,
    MultiKernelMMD,
    MutualInformation,
    Regularizer,
    WeightSchedule,
    frozen_batchnorm_statistics,
)


class Square(Regularizer):
    def forward(self, x, epoch=0):
        return self.penalty(x.square().sum(), self.schedule(epoch))


def test_sigmoid_ramp_is_the_one_of_temporal_ensembling():
    schedule = WeightSchedule(30.0, "sigmoid", length=80)
    assert [schedule(epoch) for epoch in (0, 40, 80, 200)] == pytest.approx(
        [30 * math.exp(-5), 30 * math.exp(-1.25), 30, 30]
    )


def test_a_constant_weight_begins_at_its_start():
    assert [WeightSchedule(2.0, start=3)(epoch) for epoch in (2, 3, 4)] == [0.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"weight": -1.0}, r"`weight` must be non-negative and finite, got -1\.0"),
        ({"weight": math.nan}, "`weight` must be non-negative and finite, got nan"),
        ({"weight": math.inf}, "`weight` must be non-negative and finite, got inf"),
        (
            {"weight": 1.0, "ramp": "cosine"},
            r"`ramp` must be one of constant, linear, sigmoid, got 'cosine'",
        ),
        ({"weight": 1.0, "start": -1}, "`start` must be non-negative and finite, got -1"),
        ({"weight": 1.0, "length": -1}, "`length` must be non-negative and finite, got -1"),
        ({"weight": 1.0, "ramp": "linear"}, "`length` must be at least 1 for a linear ramp, got 0"),
    ],
)
def test_refuses_schedules(arguments, match):
    with pytest.raises(ValueError, match=match):
        WeightSchedule(**arguments)


@pytest.mark.parametrize("make", [MultiKernelMMD, lambda weight: Lautum((2,), 2, weight=weight)])
def test_refuses_a_negative_weight_by_name(make):
    with pytest.raises(ValueError, match=r"`weight` must be non-negative and finite, got -0\.1"):
        make(weight=-0.1)


def test_the_penalty_is_weight_times_objective_and_both_are_remembered():
    regularizer, x = (
        Square(WeightSchedule(2.0, "linear", length=2)),
        torch.ones(3, requires_grad=True),
    )
    regularizer(x, epoch=1).backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert (regularizer.value.item(), regularizer.weight) == (3.0, 1.0)
    assert not regularizer.value.requires_grad


def test_a_zero_weight_leaves_no_graph_even_where_the_objective_is_not_finite():
    penalty = Square(0.0)(torch.full((1,), torch.inf, requires_grad=True))
    assert penalty.item() == 0.0
    assert not penalty.requires_grad


def test_a_regularizer_keeps_its_precision_inside_a_half_precision_model():
    model = nn.ModuleList([nn.Linear(2, 2), MutualInformation((2,), 2), Lautum((2,), 2)])
    before = {
        name: (t.dtype, t.clone())
        for name, t in model[1:].state_dict().items()
        if isinstance(t, torch.Tensor)
    }
    model.bfloat16()
    assert model[0].weight.dtype == torch.bfloat16
    for name, (dtype, value) in before.items():
        assert model[1:].state_dict()[name].dtype == dtype, name
        assert torch.equal(model[1:].state_dict()[name], value), name


@pytest.mark.parametrize("momentum", [0.1, None])
def test_frozen_statistics_stay_while_outputs_do_not_change(momentum):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) * 4 + 1
    net, twin = nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3, momentum=momentum)
    with frozen_batchnorm_statistics(net):
        assert torch.equal(net(x), twin(x))
    assert torch.equal(net.running_mean, torch.zeros(3))
    assert net.num_batches_tracked == 0
    assert twin.num_batches_tracked == 1
    net(x)
    assert torch.equal(net.running_var, twin.running_var)  # and go on moving afterwards


def test_frozen_statistics_are_used_in_eval_mode():
    net, x = nn.BatchNorm1d(3).eval(), torch.randn(8, 3) + 5
    with frozen_batchnorm_statistics(net):
        torch.testing.assert_close(net(x), x, rtol=1e-4, atol=1e-4)


def test_statistics_are_released_on_errors():
    net = nn.BatchNorm1d(3)
    with (
        pytest.raises(ValueError, match="expected 2D or 3D input"),
        frozen_batchnorm_statistics(net),
    ):
        net(torch.zeros(()))
    assert net.track_running_stats


def test_large_values_whose_sum_overflows_are_finite_and_others_are_counted():
    check_finite("x", torch.full((4,), 3e38))
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="`x` must be finite, got 1 values that are not"):
            check_finite("x", torch.tensor([3e38, 3e38, bad]))


@pytest.mark.parametrize("weight", [-1, math.inf])
def test_a_weight_out_of_range_is_named(weight):
    with pytest.raises(ValueError, match=f"`weight` must .*, got {weight}"):
        Regularizer(weight)


@pytest.mark.parametrize("make", [Lautum, MutualInformation])
@pytest.mark.parametrize("shape", [(), (1, 0), (1, -8)])
def test_a_shape_that_is_none_is_named(make, shape):
    rule = "`input_shape` must be the sizes of one input, such as (1, 28, 28), got "
    with pytest.raises(ValueError, match=re.escape(f"{rule}{shape!r}")):
        make(shape, 10)
