"""The harness of the evidence: finished units are kept and skipped, torn lines are not; intervals against scipy."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

SCRIPTS = Path(__file__).parents[1] / "benchmarks" / "evidence"


@pytest.fixture
def units(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import units

    return units


@pytest.fixture
def intervals(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import intervals

    return intervals


def squares(units, calls, planned=3):
    def run(settings, data_dir):
        calls.append(settings["x"])
        return {"square": settings["x"] ** 2}

    def verdict(rows):
        total = sum(row["square"] for row in rows)
        return {"verdict": "undecided", "sentence": f"{total}", "numbers": {"total": total}}

    return units.Experiment(
        "squares",
        "numbers have squares",
        lambda short: {f"x{x}": {"x": x, "seed": x % 2} for x in range(1 if short else planned)},
        run,
        verdict,
        lambda rows, figure: figure.subplots().plot([row["square"] for row in rows]),
    )


def run(units, experiment, path, **options):
    given = {"data_dir": None, "minutes": 1.0, **options}
    return units.run_units(experiment, experiment.units(False), path, **given)


def test_finished_units_are_kept_and_skipped(units, tmp_path):
    calls = []
    path = tmp_path / "new" / "squares.jsonl"
    run(units, squares(units, calls, planned=2), path)
    rows = run(units, squares(units, calls), path)
    assert calls == [0, 1, 2]
    assert [(row["unit"], row["x"], row["square"]) for row in rows] == [
        ("x0", 0, 0),
        ("x1", 1, 1),
        ("x2", 2, 4),
    ]


def test_a_torn_last_line_is_run_again(units, tmp_path):
    calls = []
    path = tmp_path / "squares.jsonl"
    run(units, squares(units, calls), path)
    path.write_text(path.read_text()[:-20])
    rows = run(units, squares(units, calls), path)
    assert calls == [0, 1, 2, 2]
    assert [row["square"] for row in rows] == [0, 1, 4]
    assert [json.loads(line)["unit"] for line in path.read_text().splitlines()] == [
        "x0",
        "x1",
        "x2",
    ]


def test_a_damaged_line_in_the_middle_is_named(units, tmp_path):
    path = tmp_path / "squares.jsonl"
    run(units, squares(units, []), path)
    path.write_text("{" + path.read_text())
    with pytest.raises(ValueError, match="line 1 is damaged"):
        run(units, squares(units, []), path)


def test_no_unit_starts_after_the_time(units, tmp_path, monkeypatch):
    clock = iter(range(0, 6000, 60))
    monkeypatch.setattr(units.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(units, "cpu_seconds", iter((7.0, 37.0)).__next__)
    # Looked at: the start at 0 s, then 60 before the first unit, 120 before the second.
    calls = []
    rows = run(units, squares(units, calls), tmp_path / "squares.jsonl", minutes=1.5)
    assert calls == [0]
    assert [row["seconds"] for row in rows] == [30.0]


def test_results_of_other_settings_or_data_are_not_mixed(units, tmp_path):
    path = tmp_path / "squares.jsonl"
    run(units, squares(units, []), path)
    with pytest.raises(ValueError, match="'x0' was run with"):
        run(units, squares(units, []), path, data_dir="elsewhere")


def test_a_result_is_stored_with_its_verdict(units, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "BENCHMARKS", tmp_path)
    (tmp_path / "results").mkdir()
    units.main(squares(units, []), ["--folder", str(tmp_path / "runs"), "--store"])
    stored = json.loads((tmp_path / "results" / "evidence_squares.json").read_text())
    assert (stored["verdict"], stored["numbers"], stored["seeds"]) == (
        "undecided",
        {"total": 5},
        [0, 1],
    )
    assert (stored["units"], stored["planned"], stored["data"]) == (3, 3, "embedded")
    assert [row["square"] for row in stored["rows"]] == [0, 1, 4]
    assert "commit" in stored["environment"]
    assert (tmp_path / "results" / "evidence_squares.png").exists()


def test_stored_units_are_not_run_again(units, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "BENCHMARKS", tmp_path)
    (tmp_path / "results").mkdir()
    units.main(squares(units, [], planned=2), ["--folder", str(tmp_path / "first"), "--store"])
    calls = []
    again = ["--folder", str(tmp_path / "second"), "--from-stored", "--store"]
    units.main(squares(units, calls), again)
    assert calls == [2]
    stored = json.loads((tmp_path / "results" / "evidence_squares.json").read_text())
    assert [row["square"] for row in stored["rows"]] == [0, 1, 4]
    with pytest.raises(ValueError, match="--from-stored begins a new --folder"):
        units.main(squares(units, calls), again)
    changed = replace(squares(units, calls), units=lambda short: {"x0": {"x": 3, "seed": 0}})
    units.main(changed, ["--folder", str(tmp_path / "third"), "--from-stored"])
    assert calls == [2, 3], "other settings are another unit"


def test_the_short_version_starts_anew_and_stores_nothing(units, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "BENCHMARKS", tmp_path)
    calls = []
    for _ in range(2):
        units.main(squares(units, calls), ["--folder", str(tmp_path / "runs"), "--short"])
    assert calls == [0, 0]
    assert (tmp_path / "runs" / "short" / "squares.png").exists()
    assert not (tmp_path / "results").exists()
    with pytest.raises(SystemExit):
        units.main(squares(units, calls), ["--short", "--store"])


def test_units_share_a_folder_that_the_short_version_empties(units, tmp_path):
    seen = []

    def run(settings, data_dir, folder):
        folder.mkdir(parents=True, exist_ok=True)
        seen.append(len([*folder.iterdir()]))
        (folder / f"{settings['x']}").touch()
        return {"square": 0}

    experiment = replace(squares(units, [], planned=2), run=run, shares=True)
    units.run_units(
        experiment, experiment.units(False), tmp_path / "squares.jsonl", data_dir=None, minutes=1.0
    )
    assert seen == [0, 1]
    for _ in range(2):
        units.main(experiment, ["--folder", str(tmp_path), "--short"])
    assert seen == [0, 1, 0, 0]


def test_an_unknown_verdict_is_refused(units):
    experiment = squares(units, [])
    object.__setattr__(
        experiment, "verdict", lambda rows: {"verdict": "sure", "sentence": "", "numbers": {}}
    )
    with pytest.raises(ValueError, match=r"`verdict` must be one of .* got 'sure'"):
        units.judged(experiment, [])


def test_intervals_against_scipy(intervals):
    x = np.random.default_rng(0).normal(size=12)
    y = x + np.random.default_rng(1).normal(size=12)
    low, high = stats.ttest_1samp(x, 0).confidence_interval(0.95)
    assert intervals.mean_interval(x) == pytest.approx((x.mean(), low, high))
    assert intervals.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert np.isnan(intervals.spearman(x, np.zeros(12)))
    scipys = stats.bootstrap(
        (x, y), intervals.spearman, paired=True, vectorized=False, method="percentile", rng=0, n_resamples=2000
    ).confidence_interval  # fmt: skip
    middle, low, high = intervals.bootstrap_interval(intervals.spearman, x, y, draws=2000)
    assert middle == intervals.spearman(x, y)
    assert (low, high) == pytest.approx((scipys.low, scipys.high), abs=0.06)


def test_holm_by_hand(intervals):
    assert intervals.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert intervals.holm([0.6, 0.7]) == [1.0, 1.0]


def test_an_interval_is_shown_with_signs(intervals):
    assert intervals.shown((0.5, -0.25, 1.0)) == "0.50 [−0.25, 1.00]"
