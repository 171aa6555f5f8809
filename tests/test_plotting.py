"""Figures show the numbers they were given, and need no pyplot."""

import math
import sys

import matplotlib
import pytest
from matplotlib.figure import Figure

from lightning_taskinfo.plotting import plot_curves

HISTORY = [
    {"step": 1, "loss": 3.0, "accuracy": 0.1},
    {"step": 2, "loss": 2.0},
    {"step": 4, "loss": math.nan, "accuracy": 0.5},
    {"loss": 1.0},
]


def points(ax):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in ax.get_lines()}


def test_draws_every_measurement_that_was_made(tmp_path):
    figure, ax = plot_curves(iter(HISTORY), ylabel="value")
    assert points(ax) == {"loss": [(1, 3.0), (2, 2.0)], "accuracy": [(1, 0.1), (4, 0.5)]}
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "value")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["loss", "accuracy"]
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_draws_what_is_named_where_it_is_told():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plot_curves(HISTORY, ["loss"], x="accuracy", ax=right) == (figure, right)
    assert points(right) == {"loss": [(0.1, 3.0)]}
    assert not left.get_lines()


@pytest.mark.parametrize("name", ["losses", "epoch"])
def test_refuses_what_was_never_measured(name):
    with pytest.raises(
        ValueError, match=f"`names` must have been measured together with 'step', got '{name}'"
    ):
        plot_curves([*HISTORY, {"epoch": 3.0}], [name])


def test_needs_no_pyplot(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it fails
    monkeypatch.delattr(matplotlib, "pyplot", raising=False)
    plot_curves([{"step": 1, "loss": 2.0}])
