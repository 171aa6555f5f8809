"""Phase diagrams: the simulated grid against theory, and pictures that show what they say."""

import math

import pytest
import torch

from lightning_taskinfo.tasks.deep_linear import (
    plot_phase_map,
    plot_phase_overview,
    plot_phase_slices,
    simulate_phase_diagram,
    simulate_transfer,
    transferability,
)

MODES = ["linear", "fine_tune"]
ANGLES = torch.tensor([0.0, 1.0, math.pi / 2], dtype=torch.float64)
GAMMAS = torch.tensor([0.5, 0.9, 1.5], dtype=torch.float64)
SIZE = {"dimension": 150, "repetitions": 30}


@pytest.fixture(params=MODES)
def simulated(request):
    generator = torch.Generator().manual_seed(0)
    return simulate_phase_diagram(
        request.param, ANGLES, GAMMAS, 1.0, dimension=150, repetitions=30, generator=generator
    )


def test_grid_is_of_paired_differences(simulated):
    generator = torch.Generator().manual_seed(0)
    for column, gamma in enumerate(GAMMAS.tolist()):
        risks = simulate_transfer(ANGLES, gamma, 1.0, **SIZE, generator=generator)
        gain = risks.scratch - (risks.linear if simulated.mode == "linear" else risks.fine_tune)
        torch.testing.assert_close(simulated.mean[:, column], gain.mean(-1))
        torch.testing.assert_close(simulated.standard_error[:, column], gain.std(-1) / 30**0.5)


def test_grid_has_the_signs_of_the_theory(simulated):
    if simulated.mode == "linear":
        assert torch.equal(simulated.mean > 0, simulated.theory > 0)
    else:  # nothing to gain or lose above one sample a dimension
        assert simulated.mean[:, 2].abs().max() < 1e-9
        assert torch.equal(simulated.mean[:, 0] > 0, simulated.theory[:, 0] > 0)


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


def test_slices_have_points_errors_and_lines(simulated):
    _, ax = plot_phase_slices(simulated)
    assert len(ax.containers) == len(ANGLES)
    for index, container in enumerate(ax.containers):
        points, _, (bars,) = container
        assert points.get_ydata() == pytest.approx(simulated.mean[index].tolist())
        low, high = bars.get_segments()[0][:, 1]
        assert (high - low) / 2 == pytest.approx(
            simulated.standard_error[index, 0].item(), abs=1e-12
        )


def test_the_overview_has_map_and_slices_over_one_range_and_needs_no_pyplot(simulated):
    fig, (left, right) = plot_phase_overview(simulated)
    assert left.get_xlim() == right.get_xlim() == (0, pytest.approx(1.1 * GAMMAS.max().item()))
    assert len(right.containers) == len(ANGLES)
    assert (
        fig.canvas.manager is None
    )  # pyplot, which would keep the figure for good, does not know it


def test_draws_on_given_axes():
    from matplotlib.figure import Figure

    fig = Figure()
    ax = fig.add_subplot()
    assert plot_phase_map("linear", 0.2, ax=ax) == (fig, ax)


def test_refuses():
    with pytest.raises(ValueError, match=r"`mode` must be .* got 'frozen'"):
        transferability("frozen", 0.0, 0.5, 0.0)
    with pytest.raises(
        ValueError, match="`repetitions` must be at least 2 for a standard error, got 1"
    ):
        simulate_phase_diagram("linear", ANGLES, GAMMAS, 0.0, repetitions=1)
    with pytest.raises(ValueError, match=r"`sigma` must be non-negative and finite, got -1\.0"):
        simulate_phase_diagram("linear", ANGLES, GAMMAS, -1.0)
