"""A structure function is the lower hull of its points, and its Legendre transform the complexity."""

import json
from dataclasses import replace

import pytest
import torch

from lightning_taskinfo.tasks.complexity import (
    Estimate,
    StructureFunction,
    plot_structure_functions,
)


def curve(**changes):
    """S(t) = 10 - t until t = 4, then 6 - (t - 4)/2; one point above it."""
    values = {
        "betas": (2.0, 1.0, 0.7, 0.5),
        "kl": (0.5, 4.0, 6.0, 8.0),
        "loss": (9.9, 6.0, 5.8, 4.0),
    }
    values |= {
        "loss_error": (0.1, 0.2, 0.3, 0.4),
        "prior_loss": 10.0,
        "prior_loss_error": 0.5,
        "samples": 5,
    }
    return StructureFunction(**{**values, "label_entropy": 2.0, "name": "toy", **changes})


def test_the_hull_is_convex_falling_and_below_all_points():
    assert curve().hull() == ((0.0, 10.0), (4.0, 6.0), (8.0, 4.0))
    assert curve(loss=(9.9, 6.0, 5.8, 7.0)).hull()[-1] == (
        6.0,
        5.8,
    )  # what comes after costs more and gains nothing
    generator = torch.Generator().manual_seed(0)
    t, S = torch.rand(2, 40, generator=generator, dtype=torch.float64)
    random = curve(
        betas=(1.0,) * 40, kl=tuple(t.tolist()), loss=tuple(S.tolist()), loss_error=(0.0,) * 40
    )
    for beta in (0.0, 0.1, 1.0, 10.0, 100.0):  # hull and points have the same Legendre transform
        assert random.complexity(beta).value == min(
            value + beta * at for at, value in random.hull()
        )


def test_complexity_is_the_best_point_and_has_its_error():
    assert curve().objective == pytest.approx((10.9, 10.0, 10.0, 8.0))
    assert curve().complexity(0.25) == Estimate(6.0, 0.4)
    assert curve().complexity(0.75) == Estimate(9.0, 0.2)
    assert curve().complexity(3.0) == Estimate(10.0, 0.5)  # nothing is worth its price
    with pytest.raises(ValueError, match=r"`beta` must be non-negative and finite, got -1\.0\."):
        curve().complexity(-1.0)


def test_a_point_that_another_undercuts_is_no_minimiser():
    assert curve().unfinished() == (0.7,)  # 10.0 ± 0.3 where the second has 8.8 ± 0.2
    assert curve(loss_error=(0.1, 0.3, 0.3, 0.4)).unfinished() == ()  # which may be chance
    assert curve(loss_error=(0.0,) * 4, prior_loss_error=0.0).unfinished() == (
        2.0,
        0.7,
    )  # the prior has 10.0, not 10.9


def test_the_critical_beta_is_where_the_loss_leaves_the_entropy():
    # The threshold is 0.9 · 2 · 5 = 9, between 9.9 at β = 2 and 6 at β = 1.
    share = 0.9 / 3.9
    assert curve().critical_beta(0.1) == pytest.approx(2.0 ** (1 - share))
    assert (
        curve(label_entropy=1.0, loss=(9.0, 8.0, 7.0, 6.0)).critical_beta() is None
    )  # never below
    assert curve(label_entropy=3.0).critical_beta() is None  # below already at the highest
    with pytest.raises(ValueError, match=r"`margin` must be in \(0, 1\), got 1\.0\."):
        curve().critical_beta(1.0)
    assert curve(label_entropy=None).critical_beta() is None


def test_json_holds_everything():
    read = json.loads(curve().to_json(indent=1))
    assert read["hull"][1] == [4.0, 6.0]
    assert read["critical_beta"] == curve().critical_beta()
    assert json.loads(curve(label_entropy=None).to_json())["critical_beta"] is None


def test_the_picture_has_both_panels():
    fig, (left, right) = curve().plot()
    assert left.get_xscale() == "log"
    assert left.xaxis_inverted()  # the sweep runs from left to right
    dotted = [line for line in left.get_lines() if line.get_linestyle() == ":"]
    assert dotted[0].get_xdata()[0] == curve().critical_beta()
    (hull,) = (line for line in right.get_lines() if len(line.get_xdata()) == 3)
    assert hull.get_ydata() == pytest.approx([2.0, 1.2, 0.8])
    assert curve(label_entropy=None, name="").plot()[0] is not fig


def test_no_curves_no_picture():
    with pytest.raises(
        ValueError, match="`curves` must hold at least one structure function, got none"
    ):
        plot_structure_functions([])


def test_a_sweep_that_begins_below_the_threshold_does_not_enclose_the_critical_beta():
    """A later point that is worse by chance is no crossing."""
    found = curve(
        betas=(10.0, 1.0, 0.1), kl=(1.0, 2.0, 3.0), loss=(20.0, 69.0, 10.0), loss_error=(1.0,) * 3
    )
    found = replace(found, label_entropy=0.7, samples=100)
    assert found.critical_beta() is None
