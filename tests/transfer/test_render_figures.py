"""Figures show the numbers of the report, whatever is missing in it."""

import sys
from dataclasses import replace

import pytest

from lightning_taskinfo.plotting import figure_pixels
from lightning_taskinfo.transfer.report import TransferReport
from tests.transfer.results import METHODS, minimal, report


def means_drawn(ax):
    """Accuracies of the large dots, by the row they lie in."""
    dots = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
    return {(round(dot.get_ydata()[0], 3)): dot.get_xdata()[0] for dot in dots}


def test_accuracy_has_means_intervals_and_seeds():
    experiment = replace(report(METHODS[:3], labels=(50,), seeds=3), confidence=0.9)
    _, (ax,) = experiment.plot()
    table = experiment.table()
    assert means_drawn(ax) == pytest.approx(
        {i: 100 * row["accuracy"] for i, row in enumerate(table)}
    )
    bars = [
        line.get_xdata()
        for line in ax.lines
        if line.get_linestyle() == "-" and len(line.get_xdata()) == 2
    ]
    assert [list(bar) for bar in bars] == [
        pytest.approx([100 * row["accuracy_low"], 100 * row["accuracy_high"]]) for row in table
    ]
    strokes = [line.get_xdata() for line in ax.lines if line.get_marker() == "|"]
    assert [len(stroke) for stroke in strokes] == [3, 3, 3]
    assert [text.get_text() for text in ax.get_yticklabels()] == list(METHODS[:3])
    assert ax.get_title() == "50 target labels"


def test_accuracy_with_one_seed_has_no_bars():
    _, panels = report(METHODS[:2], labels=(50, 100), seeds=1).plot()
    for ax in panels:
        assert len(means_drawn(ax)) == 2
        assert not [
            line for line in ax.lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 2
        ]
    assert [ax.get_title() for ax in panels] == ["50 target labels", "100 target labels"]


def test_accuracy_leaves_missing_cells_empty():
    rows = [minimal("scratch", 50, 0, 0.5), minimal("lautum", 100, 0, 0.6)]
    _, panels = TransferReport(rows, {}).plot()
    assert [means_drawn(ax) for ax in panels] == [{0: pytest.approx(50)}, {1: pytest.approx(60)}]


def test_the_figure_shows_something_and_stays_not_open():
    figure, _ = TransferReport([minimal("lautum", 50, 0, 0.5)], {}).plot()
    assert figure_pixels(figure).float().std() > 0
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )
