"""The page of the evidence says what the stored results say."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks" / "evidence"
TABLE = "# Evidence\n\n| Claim | Verdict |\n|---|---|\n| old | **reproduced** |\n| ρ > 0 | **{verdict}** |\n\n"
HEAD = TABLE.format(verdict="reproduced in part")
OLD = "## old\n\n**reproduced** · seed 0, 36 s · `benchmarks/phase_diagram.py`\n\n- 0 of 252\n\n"
STORED = {
    "sentence": "ρ = 0.50 [0.25, 0.75]; 3 seeds",
    "verdict": "reproduced in part",
    "seeds": [0, 1, 2],
    "units": 5,
    "planned": 6,
    "seconds": 240.0,
    "environment": {"commit": "abc1234"},
}
NEW = (
    "## ρ > 0\n\n**reproduced in part** · seeds 0 to 2, 5 of 6 units, 4 min, `abc1234` · "
    "`benchmarks/evidence/rho.py --store`\n\n- ρ = 0.50 [0.25, 0.75]\n- 3 seeds\n"
)


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import page

    return page


def test_the_page_agrees_with_what_is_stored(page):
    found = page.problems(page.PAGE.read_text(), page.read_results(), page.script_names())
    assert not found, "\n".join(found)


def test_a_page_that_agrees_has_no_problems(page):
    assert page.problems(HEAD + OLD + NEW, {"rho": STORED}, ["rho"]) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("0.50 [0.25", "0.51 [0.25", "differs from evidence_rho.json"),
        ("reproduced in part", "reproduced", "differs from evidence_rho.json"),
        ("abc1234", "abc1235", "differs from evidence_rho.json"),
        ("reproduced in part", "nearly", "the verdict must be one of reproduced"),
        ("- 3 seeds", "- 4 seeds", "differs from evidence_rho.json"),
        ("seeds 0 to 2, 5 of 6 units, 4 min, `abc1234` · ", "", "a section is a line of verdict"),
        ("rho.py", "tau.py", "rho: the page has 0 sections"),
    ],
)
def test_a_page_that_differs_is_named(page, before, after, said):
    changed = HEAD + OLD + NEW.replace(before, after)
    first, *_ = page.problems(changed, {"rho": STORED}, ["rho"])
    assert said in first


def test_a_table_that_differs_from_the_sections_is_named(page):
    changed = TABLE.format(verdict="reproduced") + OLD + NEW
    (found,) = page.problems(changed, {"rho": STORED}, ["rho"])
    assert "table" in found


def test_a_script_without_a_result_is_undecided(page):
    undecided = NEW.replace("reproduced in part", "undecided")
    assert page.problems(TABLE.format(verdict="undecided") + OLD + undecided, {}, ["rho"]) == []
    (found,) = page.problems(HEAD + OLD + NEW, {}, ["rho"])
    assert "nothing is stored for rho" in found


def test_writing_copies_the_stored_result_and_keeps_claim_and_command(page):
    other = "## ρ > 0\n\n**undecided** · old · `benchmarks/evidence/rho.py --store`\n\n- old\n"
    before = TABLE.format(verdict="undecided") + OLD + other
    assert page.written(before, {"rho": STORED}) == HEAD + OLD + NEW


COMPARED = (
    "large network (by itself undecided), 50 labels: plain 63.2 [61.0, 65.5] % (seeds: 10), "
    "a+b −0.8 [−3.3, +1.8] points (p = 1, seeds: 10); 1000 labels: plain 86.4 %, a+b +1.0 points; "
    "small network, 50 labels: plain 70.5 %; the paper has 34.0 %, +14.4 points"
)
TABLES = """| large network (by itself undecided) | 50 labels | 1000 labels |
| --- | --- | --- |
| plain | 63.2 [61.0, 65.5] % (seeds: 10) | 86.4 % |
| a+b | −0.8 [−3.3, +1.8] points (p = 1, seeds: 10) | +1.0 points |

| small network | 50 labels |
| --- | --- |
| plain | 70.5 % |

- the paper has 34.0 %, +14.4 points
"""


def test_comparisons_of_methods_are_tables_and_are_compared_with_the_stored_result(page):
    stored = {"rho": {**STORED, "sentence": COMPARED}}
    listed = "- ρ = 0.50 [0.25, 0.75]\n- 3 seeds\n"
    expected = HEAD + OLD + NEW.replace(listed, TABLES)
    assert page.written(HEAD + OLD + NEW, stored) == expected
    assert page.problems(expected, stored, ["rho"]) == []
    (found,) = page.problems(expected.replace("70.5", "70.6"), stored, ["rho"])
    assert "differs from evidence_rho.json" in found


def test_no_point_of_the_page_is_too_long_to_be_read(page):
    longest = max(page.PAGE.read_text().splitlines(), key=len)
    assert len(longest) < 400, longest


def test_short_seeds_and_times_are_said(page):
    one = page.basis({**STORED, "seeds": [7], "seconds": 12.4})
    assert one == "seed 7, 5 of 6 units, 12 s, `abc1234`"
    assert page.basis({**STORED, "seeds": []}).startswith("5 of 6 units")
    assert page.basis({**STORED, "seeds": [0, 1, 9]}).startswith("seeds 0, 1, 9, 5 of 6 units")


def test_scripts_are_those_with_an_experiment(page):
    names = page.script_names()
    assert "interval_coverage" in names
    assert not {"units", "intervals", "page"} & {*names}
