"""Figures show the numbers of the report, whatever is missing in it."""

import math
import sys

import pytest

from lightning_taskinfo.plotting import figure_pixels
from lightning_taskinfo.transfer.render import (
    draw_all,
    layer_information,
    plot_accuracy,
    plot_information,
)
from lightning_taskinfo.transfer.report import TransferReport
from tests.transfer.results import LAYERS, METHODS, minimal, report, result


def means_drawn(ax):
    """Accuracies of the large dots, by the row they lie in."""
    dots = [line for line in ax.lines if line.get_marker() == "o" and len(line.get_xdata())]
    return {(round(dot.get_ydata()[0], 3)): dot.get_xdata()[0] for dot in dots}


def drawn(line):
    """Places of the marks that can be seen."""
    return [x for x in line.get_xdata() if math.isfinite(x)]


def test_accuracy_has_means_intervals_and_seeds():
    experiment = report(METHODS[:3], labels=(50,), seeds=3)
    _, (ax,) = plot_accuracy(experiment, 0.9)
    table = experiment.table(0.9)
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
    figure, panels = plot_accuracy(report(METHODS[:2], labels=(50, 100), seeds=1), 0.95)
    for ax in panels:
        assert len(means_drawn(ax)) == 2
        assert not [
            line for line in ax.lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 2
        ]
    assert figure.get_suptitle() == "one seed, no interval"
    assert [ax.get_title() for ax in panels] == ["50 target labels", "100 target labels"]


def test_accuracy_leaves_missing_cells_empty():
    rows = [minimal("scratch", 50, 0, 0.5), minimal("lautum", 100, 0, 0.6)]
    _, panels = plot_accuracy(TransferReport(rows, {}), 0.95)
    assert [means_drawn(ax) for ax in panels] == [{0: pytest.approx(50)}, {1: pytest.approx(60)}]


def test_information_is_by_layer_and_moment():
    experiment = report(METHODS[:3], labels=(50, 100), seeds=2)
    _, axes = plot_information(experiment, 100)
    assert [ax.get_title() for ax in axes] == list(METHODS[:3])
    assert [text.get_text() for text in axes[0].get_yticklabels()] == list(LAYERS)
    marks = {line.get_label(): line for line in axes[2].lines}
    cell = experiment.cell("lautum", 100).values()
    for moment, label in {
        "before": "before fine-tuning",
        "after": "after",
        "added": "added by fine-tuning",
    }.items():
        expected = [
            sum(row.information[moment]["layers"][name] for row in cell) / 2 for name in LAYERS
        ]
        assert list(marks[label].get_xdata()) == pytest.approx(expected)
    low, high = axes[0].get_xlim()
    assert low < min(marks["added by fine-tuning"].get_xdata())
    assert high > max(marks["after"].get_xdata())


def test_information_leaves_out_what_was_not_measured():
    experiment = report(METHODS[:2])
    assert layer_information(experiment, 50)["scratch"].keys() == {"after"}
    _, axes = plot_information(experiment, 50)
    assert {line.get_label(): len(drawn(line)) for line in axes[0].lines} == {
        "before fine-tuning": 0,
        "after": 4,
        "added by fine-tuning": 0,
    }


def test_information_near_zero_and_not_finite_can_be_drawn():
    row = result()
    row["information"]["added"]["layers"] = {"head": 0.0, "backbone.conv1": float("nan")}
    fig, (ax,) = plot_information(TransferReport([row], {}), 50)
    assert -1 < ax.get_xlim()[0] <= 0
    assert [drawn(line) for line in ax.lines if line.get_label() == "added by fine-tuning"] == [
        [0.0]
    ]
    assert figure_pixels(fig).float().std() > 0


@pytest.mark.parametrize(
    ("experiment", "names"),
    [
        (
            report(METHODS[:2], (50, 100), 1),
            ["accuracy", "information_50", "information_100"],
        ),
        (report(METHODS[:2], (50,), 1, measured=False), ["accuracy"]),
        (TransferReport([minimal("lautum", 50, 0, 0.5)], {}), ["accuracy"]),
    ],
    ids=["all", "no information", "accuracy alone"],
)
def test_draws_what_there_is(experiment, names):
    figures = draw_all(experiment, 0.95)
    assert list(figures) == names
    for name in names[1:]:
        assert (
            f"({name.removeprefix('information_')} target labels)" in figures[name].get_suptitle()
        )
    assert (
        "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    )
