"""The phase diagram shows what it says."""

import math

import pytest
import torch

from lightning_taskinfo.tasks.deep_linear import plot_phase_map, transferability

MODES = ["linear", "fine_tune"]


def test_map_has_the_boundaries_of_the_signs():
    """Each drawn line separates signs: the gain changes across it."""
    for mode in MODES:
        _, ax = plot_phase_map(mode, 0.2)
        assert len(ax.lines) == {"linear": 3, "fine_tune": 1}[mode]
        for line in ax.lines:
            gamma, theta = (
                torch.as_tensor(values, dtype=torch.float64) for values in line.get_data()
            )
            theta = theta / 180 * math.pi
            inside = (
                (gamma > 0.05)
                & (gamma < 2)
                & (theta > 0.01)
                & (theta < 1.55)
                & ((gamma - 1).abs() > 1e-3)
            )
            gamma, theta = gamma[inside], theta[inside]
            assert len(gamma) > 10
            below, above = (
                transferability(mode, theta + step, gamma, 0.2) for step in (-5e-3, 5e-3)
            )
            assert (below * above < 0).all()


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
