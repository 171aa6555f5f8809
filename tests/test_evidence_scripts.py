"""What the experiments of the evidence compute from their rows, against something dumber."""

import importlib
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

SCRIPTS = Path(__file__).parents[1] / "benchmarks" / "evidence"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.mark.parametrize(("hits", "n"), [(0, 300), (3, 40), (40, 40)])
def test_shares_have_the_exact_interval(script, hits, n):
    exact = binomtest(hits, n).proportion_ci(0.95, "exact")
    assert script("interval_coverage").share(hits, n) == pytest.approx(
        (hits / n, exact.low, exact.high)
    )


@pytest.mark.parametrize("kind", ["normal", "skewed", "heavy-tailed", "tied"])
def test_drawn_errors_differ_by_the_gain_on_average(script, kind):
    coverage = script("interval_coverage")
    baseline, method = coverage.drawn_errors(kind, 20_000, torch.Generator().manual_seed(0))
    difference = baseline - method
    error = difference.std() / 20_000**0.5
    assert abs(difference.mean() - coverage.GAIN) < 3 * error
    assert difference.std().item() == pytest.approx(0.02, rel=0.3)


def test_wasserstein_is_that_of_the_best_permutation(script):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, 2, generator=g)
    y, z = (3 * torch.randn(1, 5, generator=g) for _ in range(2))
    first, second = (torch.cat([x[0], labels[0][:, None]], 1) for labels in (y, z))
    best = min((first - second[list(p)]).norm(dim=1).mean().item() for p in permutations(range(5)))
    assert script("theory").wasserstein(x, y, z) == pytest.approx([best])
    assert best < (y - z).abs().mean().item()  # so that a permutation matters


def test_onsets_are_where_the_curves_cross(script):
    numbers = [10, 40, 160]
    scratch = np.array([[n**-0.5] for n in numbers])
    found = script("theory").onsets(scratch, np.full((3, 1), 0.1), np.full((3, 1), 0.1), numbers)
    assert found["predicted"] == pytest.approx(100)
    # The gain at 40 and 160 is 0.0581 and -0.0209: zero at 0.735 of the way between their logarithms.
    assert found["measured"] == pytest.approx(40 * 4**0.735, rel=1e-3)


def test_only_decided_signs_count(script):
    cells = [((0.5, 0.1, 0.9), 1.0), ((-0.5, -0.9, -0.1), 1.0), ((0.5, -0.1, 1.1), -1.0)]
    found = script("theory").right_signs(cells)
    assert (found["decided"], found["right"], found["hurt"]) == (2, 1, 1)
    assert found["share"][0] == 0.5


@pytest.mark.parametrize(
    ("kl", "risk", "crosses"), [(9.0, 0.1, True), (11.0, 0.1, False), (9.0, 0.19, False)]
)
def test_a_front_crosses_where_a_point_has_less_risk_at_no_more_kl(script, kl, risk, crosses):
    front = [
        {"structure": "oracle", "kl": 10.0, "risk": 0.2},
        {"structure": "layer_inputs", "kl": kl, "risk": risk},
    ]
    certificates = script("certificates")
    assert certificates.crosses(front, "layer_inputs") is crosses
    assert not certificates.crosses(front, "diagonal")


def cells(gains, network="small"):
    """Rows of ten seeds in which plain fine-tuning has 60 %, with a little spread."""
    rows = []
    for seed in range(10):
        for method, gain in {"standard": 0.0, **gains}.items():
            accuracy = 0.6 + gain / 100 + 0.001 * ((seed + len(method)) % 3)
            row = {"kind": "cell", "network": network, "pair": "digits", "labels": 50}
            row |= {"method": method, "seed": seed, "accuracy": accuracy, "seconds": 1.0}
            rows.append(row | {"unit": f"{network}{method}{seed}"})
    return rows


@pytest.mark.parametrize(
    ("lautum", "mutual", "said"),
    [
        (10.0, 20.0, "reproduced"),
        (10.0, 2.0, "reproduced in part"),
        (-1.0, -1.0, "not reproduced, decided"),
    ],
)
def test_the_verdict_on_transfer_follows_the_gains(script, lautum, mutual, said):
    semi = script("semi_supervised")
    rows = cells({"lautum": lautum, "mutual_information": mutual})
    rows.append({**rows[0], "kind": "baseline", "network": "paper", "normalised": None})
    found = semi.verdict(rows)
    assert found["verdict"] == said
    assert found["numbers"]["gains"]["small network, digits, 50 labels, lautum"]["seeds"] == 10
    few = [row for row in rows if row["seed"] != 3]
    assert semi.verdict(few)["verdict"] == "undecided"


def test_the_search_and_the_cells_of_transfer_share_no_seed(script):
    planned = script("semi_supervised").units(False).values()
    seeds = {
        kind: {unit["seed"] for unit in planned if unit["kind"] == kind}
        for kind in ("search", "cell")
    }
    assert not seeds["search"] & seeds["cell"]
