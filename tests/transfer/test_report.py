"""The report says what the results say: gains against scipy, tables, files, and bad input."""

import copy
import json
import math
import re
from dataclasses import replace

import pytest
import torch
from scipy import stats

from lightning_taskinfo.transfer.report import TransferReport, is_higher_better
from tests.transfer.results import METHODS, minimal, report, result, same


def simple(**accuracies):
    """Accuracies by seed, of each method, at 50 labels."""
    return TransferReport(
        [minimal(m, 50, s, a) for m, row in accuracies.items() for s, a in enumerate(row)], {}
    )


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_gains_are_scipys_paired_tests(confidence):
    experiment = report(METHODS[:4], labels=(50, 100), seeds=4)
    experiment = replace(experiment, confidence=confidence)
    comparisons = experiment.transferability()
    assert len(comparisons) == 2 * 2 * (
        3 + 2
    )  # labels, measures; three over scratch and two over standard
    for c in comparisons:
        tests = [
            [row.test for row in experiment.results if (row.method, row.labels) == (name, c.labels)]
            for name in (c.baseline, c.method)
        ]
        risks = [
            [1 - t["accuracy"] if c.measure == "accuracy" else t["loss"] for t in rows]
            for rows in tests
        ]
        expected = stats.ttest_rel(*risks).confidence_interval(confidence)
        assert (c.gain.low, c.gain.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
        assert c.gain.mean == pytest.approx(
            (torch.tensor(risks[0]) - torch.tensor(risks[1])).mean().item(), abs=1e-6
        )
        assert c.verdict == (
            "helps" if expected.low > 0 else "hurts" if expected.high < 0 else "cannot tell"
        )


def test_words():
    experiment = simple(
        scratch=[0.5, 0.6, 0.7], a=[0.8, 0.9, 0.99], b=[0.3, 0.41, 0.5], c=[0.4, 0.6, 0.9]
    )
    words = {c.method: c.verdict for c in experiment.transferability() if c.measure == "accuracy"}
    assert words == {"a": "helps", "b": "hurts", "c": "cannot tell"}


def test_one_seed_cannot_tell_and_says_why():
    experiment = simple(scratch=[0.1], lautum=[0.9])
    error, _ = experiment.transferability()
    assert (error.gain.mean, error.verdict, error.gain.reason) == (
        pytest.approx(0.8),
        "cannot tell",
        "one seed",
    )
    for text in (experiment.to_markdown(), experiment.to_terminal()):
        assert "+80.0 cannot tell (one seed)" in text
    assert "One seed has no interval, and no verdict rests on it." in experiment.to_markdown()
    assert "[" not in experiment.to_terminal()


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ({"a": [0.8, 0.91], "b": [0.7, 0.81]}, "take a (+30.5 points over scratch)"),
        ({"a": [0.3, 0.41]}, "train from scratch"),
        ({"a": [0.3, 0.81]}, "nothing was seen to help: train from scratch, or add seeds"),
        ({"a": [0.9]}, "one seed cannot tell: add seeds"),
    ],
)
def test_one_sentence_advises(accuracies, said):
    experiment = simple(scratch=[0.5, 0.6], **accuracies)
    assert experiment.to_terminal().endswith(f"Advice: with 50 labels {said}.")
    assert "Advice: with 50 labels" in experiment.to_markdown()


def test_the_table_names_the_level_of_its_intervals():
    experiment = simple(scratch=[0.5, 0.6], a=[0.8, 0.91])
    assert "transfer, 90 % intervals" in replace(experiment, confidence=0.9).to_terminal()


def test_without_scratch_there_is_no_gain_over_it():
    experiment = simple(standard=[0.5, 0.6], lautum=[0.7, 0.9])
    assert {c.baseline for c in experiment.transferability()} == {"standard"}
    assert "gain over scratch" not in experiment.to_markdown()
    assert "No run from scratch is among the results" in experiment.to_terminal()
    assert "Advice" not in experiment.to_terminal()


def test_without_any_baseline():
    experiment = simple(lautum=[0.7, 0.9])
    assert experiment.transferability() == []
    assert "gain over" not in experiment.to_markdown()


def test_a_baseline_that_lacks_the_cell_is_named():
    rows = [
        minimal("scratch", 50, 0, 0.5),
        minimal("lautum", 50, 1, 0.5),
        minimal("lautum", 100, 0, 0.5),
    ]
    comparisons = TransferReport(rows, {}).transferability()
    assert [(c.labels, c.gain.reason) for c in comparisons[::2]] == [
        (50, "no seed in common"),
        (100, "no seed in common"),
    ]
    assert "cannot tell (no seed in common)" in TransferReport(rows, {}).to_markdown()


def test_diverged_runs_are_told_as_such():
    rows = [minimal("scratch", 50, s, 0.5 + 0.01 * s) for s in range(2)]
    rows += [minimal("lautum", 50, s, 0.1 + 0.02 * s, loss=math.nan) for s in range(2)]
    experiment = TransferReport(rows, {})
    assert [c.gain.reason for c in experiment.transferability()] == ["", "a value is not finite"]
    assert "nan cannot tell (a value is not finite)" in experiment.to_markdown()
    assert same(experiment, TransferReport(rows, {}))


def test_table_has_one_row_a_cell_and_the_same_columns_everywhere():
    experiment = report(METHODS[:3], labels=(200, 50), seeds=2)
    table = experiment.table()
    assert [(row["labels"], row["method"]) for row in table] == [
        (n, m) for n in (50, 200) for m in METHODS[:3]
    ]
    assert len({tuple(row) for row in table}) == 1
    row, cell = table[-1], list(experiment.cell("lautum", 200).values())
    for key, value in {
        "accuracy": lambda r: r.test["accuracy"],
        "source_accuracy": lambda r: r.source["accuracy"],
        "information_added": lambda r: r.information["added"]["total"],
        "fisher_trace_after": lambda r: r.fisher_trace["after"]["total"],
        "seconds": lambda r: r.seconds["pretrain"] + r.seconds["fine_tune"],
    }.items():
        assert row[key] == pytest.approx(sum(map(value, cell)) / 2), key
    assert table[0]["information_before"] is None  # from scratch
    assert table[0]["over_scratch_accuracy"] is None
    assert row["over_standard_accuracy"] == pytest.approx(row["accuracy"] - table[-2]["accuracy"])


def test_methods_begin_with_the_baselines():
    experiment = simple(lautum=[0.5], standard=[0.5], scratch=[0.5], another=[0.5])
    assert experiment.methods == ["scratch", "standard", "lautum", "another"]


def test_markdown_has_the_numbers_and_no_markup_of_others():
    experiment = TransferReport([minimal("a|b_c*", 50, 0, 0.625)], {}, "<b>name</b>")
    text = experiment.to_markdown("accuracy.png")
    assert "| 50 | a\\|b\\_c\\* | 1 | 62.5 | 1.000 |" in text
    assert text.startswith("# \\<b\\>name\\</b\\>\n")
    assert "(accuracy.png)" in text
    assert text.count("\n# ") == 0


def test_markdown_tables_are_rectangular():
    text = report(METHODS, labels=(50, 100), seeds=2).to_markdown()
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_terminal_has_the_main_table():
    experiment = report(METHODS[:3])
    wide = experiment.to_terminal()
    assert str(experiment) == wide
    rows = [re.split(r"\s{2,}", line.strip()) for line in wide.splitlines()[2:5]]
    table = experiment.table()
    assert [row[:3] for row in rows] == [["50", method, "3"] for method in METHODS[:3]]
    assert [row[3].split()[0] for row in rows] == [f"{100 * r['accuracy']:.1f}" for r in table]
    assert rows[2][4].endswith(f"] {table[2]['over_scratch_accuracy_verdict']}")


def test_saved_and_loaded_is_the_same(tmp_path):
    experiment = report(METHODS[:2], seeds=2)
    files = experiment.save(tmp_path / "new")
    for path in (tmp_path / "new", files["report.json"]):
        again = TransferReport.load(path)
        assert again == experiment
        assert same(again, experiment)
        assert again.table() == experiment.table()
    assert all(path.is_file() for path in files.values())


def test_saved_files_are_there_and_whole(tmp_path):
    files = report(METHODS[:2], seeds=1, measured=False).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    pictures = [name for name in files if name.endswith(".png")]
    assert all(files[name].read_bytes().startswith(b"\x89PNG") for name in pictures)
    named = re.findall(r"\((\w+\.png)\)", files["report.md"].read_text())
    assert named == pictures


def test_without_matplotlib_there_are_no_figures(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_taskinfo.transfer.report.find_spec", lambda name: None)
    files = report(METHODS[:2]).save(tmp_path)
    assert list(files) == ["report.md", "report.json"]
    assert "png" not in files["report.md"].read_text()


def test_an_error_above_one_is_no_share():
    rows = []
    for seed in range(4):
        for method, error in (("scratch", 30.0 + seed), ("a", 20.0 - seed)):
            rows.append({"method": method, "labels": 9, "seed": seed, "test": {"error": error}})
    experiment = TransferReport(rows, {})
    assert not experiment.measures[0].share
    assert experiment.transferability()[0].verdict == "helps"
    assert "error, %" not in str(experiment)


def test_same_forgives_timings_and_order_alone():
    one, other = report(METHODS[:2]), copy.deepcopy(report(METHODS[:2]))
    other.results[0].seconds["fine_tune"] += 1
    assert one != other
    assert same(one, other)
    assert same(one, TransferReport(one.results[::-1], one.configuration, one.name))
    assert not same(one, TransferReport(one.results[1:], one.configuration, one.name))
    assert not same(one, TransferReport(one.results, {}, one.name))
    assert not same(one, TransferReport(one.results, one.configuration, "another"))
    other.results[0].curves[0]["val_loss"] += 1e-9
    assert not same(one, other)


def test_what_is_left_out_is_filled_in():
    row = TransferReport([minimal("lautum", 50, 0, 0.5)], {}).results[0]
    assert (row.curves, row.seconds, row.source, row.certificate) == ([], {}, None, None)


def test_keeps_what_it_was_given():
    rows = [result()]
    experiment = TransferReport(rows, {})
    rows[0]["test"]["accuracy"] = 0.0
    assert experiment.results[0].test["accuracy"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"test": None},
            "like them: `test` must hold numbers by name, got None. This is one: {'method': 'lautum'",
        ),
        ({"test": {"accuracy": 0.5, "loss": "low"}}, "`test` must hold numbers"),
        (
            {"test": {"accuracy": 61.0, "loss": 1.0}},
            "`test` must hold an accuracy between 0 and 1, got 61.0",
        ),
        ({"test": {"accuracy": True, "loss": 1.0}}, "`test` must hold numbers"),
        ({"labels": 0}, "`labels` must be at least 1, got 0"),
        ({"labels": 5.0}, "`labels` must be a whole number, got 5.0"),
        ({"accuracy": 0.5}, "`results` must hold results, or dicts like them: "),
        (
            {"test": {"accuracy": torch.tensor(0.5), "loss": 1.0}},
            "`results` must hold plain JSON-like values",
        ),
    ],
)
def test_refuses_bad_results(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TransferReport([{**result(), **change}], {})


@pytest.mark.parametrize("key", ["method", "labels", "seed", "test"])
def test_refuses_a_missing_key(key):
    with pytest.raises(ValueError, match=f"`results` must hold results, .*'{key}'"):
        TransferReport([{k: v for k, v in result().items() if k != key}], {})


def test_refuses_nothing_and_twice_the_same():
    with pytest.raises(ValueError, match="`results` must hold at least one result, got none"):
        TransferReport([], {})
    with pytest.raises(ValueError, match=r"got two \(lautum, 50 labels, seed 0\)"):
        TransferReport([result(), result()], {})
    with pytest.raises(ValueError, match="`results` must hold results, or dicts like them"):
        TransferReport([1], {})
    with pytest.raises(ValueError, match=r"`confidence` must be in \(0, 1\), got 95"):
        TransferReport([result()], {}, confidence=95)


def test_refuses_files_that_are_no_report(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="not a report of a transfer experiment"):
        TransferReport.load(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not a readable JSON file"):
        TransferReport.load(path)


def test_refuses_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=rf"`folder` must be a folder, got the file {tmp_path}/file\."
    ):
        TransferReport([result()], {}).save(tmp_path / "file")


def test_what_was_measured_beside_it_has_a_table_of_its_own():
    experiment = report(METHODS[:2], seeds=2)
    text = experiment.to_markdown()
    row = experiment.table()[1]
    cells = [row["source_accuracy"], row["information_before"], row["information_after"]]
    assert f"| 50 | standard | {' | '.join(f'{cell:.4g}' for cell in cells)} |" in text
    assert row["features_miss"] == 0.6  # of the last layer
    assert "| 0.6 |" in text
    assert "measured beside it" not in report(METHODS[:1], measured=False).to_markdown()


@pytest.mark.parametrize(
    ("name", "shown", "gain"),
    [
        ("error", "error, %  gain over scratch: error, points", "+12.5"),
        ("squared error", "squared error  gain over scratch: squared error", "+0.125"),
        ("test_error", "test_error  gain over scratch: test_error", "+0.125"),
        ("loss", "loss, nats  gain over scratch: loss, nats", "+0.125"),
    ],
)
def test_only_our_own_shares_are_shown_in_percent(name, shown, gain):
    rows = [minimal("scratch", 50, 0, 0.5), minimal("a", 50, 0, 0.5)]
    for row, value in zip(rows, (0.5, 0.375), strict=True):
        row["test"] = {name: value}
    text = str(TransferReport(rows, {}))
    assert text.splitlines()[1].split("  ", 3)[-1].lstrip().endswith(shown)
    assert f"{gain} cannot tell (one seed)" in text


@pytest.mark.parametrize(
    ("metric", "mode", "higher"),
    [
        ("test_acc", None, True),
        ("val_rmse", None, False),
        ("brier_score", "min", False),
        ("mIoU", "max", True),
    ],
)
def test_a_metric_is_better_as_its_mode_or_its_name_says(metric, mode, higher):
    assert is_higher_better(metric, mode) is higher


@pytest.mark.parametrize(
    "metric", ["dice", "brier_score", "negative_log_likelihood", "accuracy_loss"]
)
def test_a_name_that_does_not_say_which_is_better_needs_a_mode(metric):
    with pytest.raises(ValueError, match=f"`mode` must be 'min' or 'max' .*'{metric}', got None"):
        is_higher_better(metric, None)
