"""The phase diagram shows what it says."""

import math

import numpy as np
import pytest
import torch

from lightning_taskinfo.functional.deep_linear import (
    fine_tuning_boundary,
    negative_transfer_interval,
)
from lightning_taskinfo.tasks.deep_linear import plot_phase_map, transferability

MODES = ["linear", "fine_tune"]


@pytest.mark.parametrize("mode", MODES)
def test_map_has_the_boundaries_of_the_signs(mode):
    """The drawn lines are those of the closed forms, to the width of a cell."""
    _, ax = plot_phase_map(mode, 0.2)
    drawn = torch.as_tensor(np.concatenate([p.vertices for p in ax.collections[-1].get_paths()]))
    gamma, theta = drawn.T[0], drawn.T[1].deg2rad()
    assert len(gamma) > 100
    inside = (theta > 0.05) & ((gamma - 1).abs() > 0.02)
    gamma, theta = gamma[inside], theta[inside]
    if mode == "fine_tune":
        known = fine_tuning_boundary(gamma, 0.2)
        assert (known - theta).abs().max() < math.pi / 300
    else:
        ends = torch.stack(negative_transfer_interval(theta, 0.2))
        gaps = (ends.nan_to_num(math.inf) - gamma).abs().amin(0)
        assert gaps.quantile(0.95) < 2 / 300
        assert all((ends[i] - gamma).abs().nan_to_num(9).min() < 0.01 for i in range(3))


def test_map_colours_are_the_gains():
    _, ax = plot_phase_map("linear", 0.2)
    gains = torch.as_tensor(ax.collections[0].get_array())
    assert gains.min() < 0 < gains.max()
    assert gains.isfinite().all()  # none on the pole at gamma = 1


def test_draws_on_given_axes():
    from matplotlib.figure import Figure

    fig = Figure()
    ax = fig.add_subplot()
    assert plot_phase_map("linear", 0.2, ax=ax) == (fig, ax)


def test_refuses():
    with pytest.raises(ValueError, match="`mode` must be one of linear, fine_tune, got 'frozen'"):
        transferability("frozen", 0.0, 0.5, 0.0)
    with pytest.raises(ValueError, match=r"`sigma` must be non-negative and finite, got -1\.0"):
        plot_phase_map("linear", -1.0)
