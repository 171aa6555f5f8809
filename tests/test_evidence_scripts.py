"""What the experiments of the evidence compute from their rows, against something dumber."""

import importlib
import json
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import binomtest

from lightning_taskinfo import Task2Vec
from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.tasks import ready

SCRIPTS = Path(__file__).parents[1] / "benchmarks" / "evidence"
RESULTS = SCRIPTS.parent / "results"


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


def coverage_rows(**controls):
    """Rows of an experiment in which all holds; the controls are those given, of 100 each."""
    rows = []
    for kind in ("stochastic", "network"):
        rows.append({"kind": kind, "repeats": 100, "violated": 2, "control": controls[kind]})
    for kind in ("normal", "skewed", "heavy-tailed", "tied"):
        for seeds in (3, 5, 10):
            row = {"kind": kind, "seeds": seeds, "intervals": 100, "covered": 95, "none": 0}
            rows.append(row | {"control": controls["normal"], "unit": f"{kind} {seeds}"})
    return rows


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "reproduced"),
        ({"stochastic": 11}, "undecided"),  # [5.6, 18.8]: it could be a valid bound
        ({"network": 11}, "undecided"),
        ({"normal": 94}, "undecided"),
    ],
)
def test_coverage_is_decided_only_where_bounds_that_are_too_small_fail(script, changed, said):
    rows = coverage_rows(**{"stochastic": 40, "network": 40, "normal": 70, **changed})
    assert script("interval_coverage").verdict(rows)["verdict"] == said


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


def cells(gains, table="small network", pair="digits", labels=50, seeds=10):
    """Rows in which plain fine-tuning has 60 %, with a little spread over seeds."""
    network, _, change = table.partition(" network")
    rows = []
    for seed in range(seeds):
        for method, gain in {"standard": 0.0, **gains}.items():
            accuracy = 0.6 + gain / 100 + 0.001 * ((seed + len(method)) % 3)
            row = {"kind": "cell", "network": network, "pair": pair, "labels": labels}
            row |= {"method": method, "seed": seed, "accuracy": accuracy, "seconds": 1.0}
            row |= {"normalised": not change, "unit": f"{table}{labels}{method}{seed}"}
            rows.append(row)
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
    assert found["numbers"]["gains"]["small network, 50 labels, lautum"]["seeds"] == 10
    for seeds, decided in ((5, said), (4, "undecided")):
        few = [row for row in rows if row["seed"] < seeds]
        assert semi.verdict(few)["verdict"] == decided


NO_GAIN = {"lautum": -1.0, "mutual_information": -1.0}
GAIN = {"lautum": 10.0, "mutual_information": 20.0}


@pytest.mark.parametrize(
    ("paper", "unnormalised", "small", "said"),
    [
        (NO_GAIN, {}, GAIN, "not reproduced, decided"),
        (GAIN, NO_GAIN, NO_GAIN, "reproduced"),
        (NO_GAIN, GAIN, NO_GAIN, "reproduced in part"),
        ({}, NO_GAIN, NO_GAIN, "not reproduced, decided"),
        ({}, GAIN, {}, "reproduced in part"),
    ],
)
def test_the_paper_s_network_decides_where_it_can(script, paper, unnormalised, small, said):
    semi = script("semi_supervised")
    tables = zip((paper, unnormalised, small), semi.TABLES, strict=True)
    rows = [row for gains, table in tables for row in cells(gains, table) if gains]
    assert semi.verdict(rows)["verdict"] == said


@pytest.mark.parametrize(
    ("many", "few", "said"),
    [
        (GAIN, GAIN, "reproduced"),
        (GAIN, {"lautum": -8.0, "mutual_information": -1.0}, "reproduced in part"),
        (NO_GAIN, NO_GAIN, "not reproduced, decided"),
    ],
)
def test_gains_between_classes_are_averaged_over_numbers_of_labels(script, many, few, said):
    classes = script("semi_supervised_classes")
    rows = cells(many, "paper network", "objects", 50, seeds=classes.SEEDS)
    rows += cells(few, "paper network", "objects", 250, seeds=classes.SEEDS)
    rows += cells(GAIN, "paper network", "objects", 100, seeds=classes.SEEDS - 1)  # does not count
    found = classes.verdict(rows)
    assert found["numbers"]["averaged_over"] == [50, 250]
    expected = (many["lautum"] + few["lautum"]) / 2
    assert found["numbers"]["gains"]["lautum"]["gain"][0] == pytest.approx(expected, abs=0.2)
    assert found["verdict"] == said


def test_an_open_verdict_says_how_many_seeds_it_would_take(script):
    classes = script("semi_supervised_classes")
    gains = [-2.0, 4.0, -6.0, 5.0, -8.0]  # mean -1.4
    interval = classes.mean_interval(gains)
    needed = classes.seeds_to_decide({"gain": interval, "seeds": 5}, 3.0)
    spread = np.std(gains, ddof=1)

    def upper(n):
        return np.mean(gains) + stats.t.ppf(0.975, n - 1) * spread / np.sqrt(n)

    assert upper(needed) < 3.0 <= upper(needed - 1)


def test_the_search_and_the_cells_of_transfer_share_no_seed(script):
    planned = script("semi_supervised").units(False).values()
    seeds = {
        kind: {unit["seed"] for unit in planned if unit["kind"] == kind}
        for kind in ("search", "cell")
    }
    assert not seeds["search"] & seeds["cell"]


def test_the_weights_of_transfer_are_those_of_the_search(script):
    semi = script("semi_supervised")
    rows = json.loads((RESULTS / "evidence_semi_supervised.json").read_text())["rows"]
    for network, found in script("semi_supervised_training").found_weights(rows).items():
        assert semi.CHOSEN[network] == pytest.approx(found), network


def test_a_search_takes_the_smallest_mean_loss(script):
    row = {"kind": "search", "network": "paper", "method": "lautum"}
    losses = {0.1: (1.0, 2.0), 1.0: (0.5, 3.0), 10.0: (1.4, 1.4)}
    rows = [{**row, "weight": w, "loss": loss} for w, several in losses.items() for loss in several]
    found = script("semi_supervised_training").found_weights(rows)
    assert found == {"paper": {"lautum": 10.0}}


@pytest.mark.parametrize(
    "change",
    [
        {"labels": 100},
        {
            "method": "lautum+temporal_ensembling",
            "weights": {"lautum": 0.01, "temporal_ensembling": 9.0},
        },
    ],
    ids=["labels", "fine-tuning"],
)
def test_a_pretraining_that_is_shared_changes_no_result(script, tmp_path, monkeypatch, change):
    training = script("semi_supervised_training")
    made = []
    pretrained = training.pretrained
    monkeypatch.setattr(
        training, "pretrained", lambda *given: made.append(given) or pretrained(*given)
    )
    planned = script("semi_supervised").units(True)
    first = planned["cell: small network, digits, 50 labels, lautum 0.01, seed 0"]
    second = {
        key: value for key, value in first.items() if key != "weight" or "weights" not in change
    } | change
    alone = training.fine_tuned(second, None, tmp_path / "alone")
    training.fine_tuned(first, None, tmp_path / "shared")
    assert training.fine_tuned(second, None, tmp_path / "shared") == alone
    assert len(made) == 2
    assert alone["gradient_ratios"]["lautum"] > 0


@pytest.mark.parametrize(
    "change",
    [{"weight": 0.1}, {"kind": "search"}, {"seed": 1}, {"normalised": False}, {"pair": "objects"}],
    ids=lambda change: next(iter(change)),
)
def test_another_pretraining_is_not_taken_for_the_same(script, change):
    training = script("semi_supervised_training")
    planned = script("semi_supervised").units(True)
    settings = planned["cell: small network, digits, 50 labels, lautum 0.01, seed 0"]
    assert training.start_key(settings | change, None) != training.start_key(settings, None)
    assert training.start_key(settings, "files") != training.start_key(settings, None)


def test_a_cell_without_a_chosen_weight_is_not_run(script, tmp_path):
    semi = script("semi_supervised")
    settings = semi.units(True)["cell: small network, digits, 50 labels, lautum 0.01, seed 0"]
    unknown = {key: value for key, value in settings.items() if key != "weight"}
    with pytest.raises(ValueError, match="`CHOSEN` has no weight of lautum for the small network"):
        semi.run(unknown, None, tmp_path)


def test_labels_drawn_anew_are_a_share_and_uniform(script):
    y = torch.zeros(20_000, dtype=torch.long)
    noisy = script("fisher_trace_and_error").noisy(y, 0.4, 10, torch.Generator().manual_seed(0))
    assert (noisy > 0).double().mean().item() == pytest.approx(0.4 * 0.9, abs=4 * 0.0034)


def test_the_trace_of_a_task_counts_every_weight_outside_the_head(script, monkeypatch):
    short = partial(ready.reference_network, epochs=1)
    monkeypatch.setattr(ready, "reference_network", short)  # any network will do
    module = script("fisher_trace_and_error")
    found = module.run({"task": "mnist:only-0-1", "noise": 0.5, "samples": 30, "seed": 0}, None)
    (x, y), _ = module.drawn("mnist:only-0-1", samples=30, test=30, seed=0, data_dir=None)
    y = module.noisy(y, 0.5, 2, torch.Generator().manual_seed(0))
    embedder = Task2Vec(seed=0)
    embedder.embed((x, y), name="with a fitted head")
    diagonal = fisher_diagonal(embedder.network, x, labels="exact")
    weights = [name for name in diagonal if name.endswith("weight") and "head" not in name]
    assert len(weights) == 4
    assert found["trace"] == pytest.approx(sum(diagonal[n].sum().item() for n in weights), rel=1e-4)


def test_impaired_images_come_in_the_first_epochs_only(script):
    module = script("critical_period")
    x = torch.arange(6.0)[:, None, None, None].expand(6, 1, 8, 8)
    settings = {"seed": 0, "epochs": 2, "sharp_epochs": 6}
    impaired = module.Impaired(x, -x - 1, torch.arange(6), settings)
    signs = []
    for epoch in range(4):
        impaired.trainer = SimpleNamespace(current_epoch=epoch)
        batches = list(impaired.train_dataloader())
        signs.append(float(torch.cat([a for a, _ in batches]).sign().min()))
        labels = torch.cat([b for _, b in batches])
        assert labels.sort().values.tolist() == list(range(6))
    assert signs == [-1, -1, 0, 0]


def periods(costs, upside_down, spread=0.002):
    """Rows of five seeds: accuracy 0.5, less what each length of blur costs."""
    rows = []
    for seed in range(5):
        jitter = spread * (seed - 2)
        for k, cost in costs.items():
            row = {"deficit": "blurred", "epochs": k, "seed": seed, "traces": [1.0, 4.0, 2.0]}
            rows.append(row | {"accuracy": 0.5 - cost + jitter * (k > 0)})
        row = {"deficit": "upside down", "epochs": 20, "seed": seed, "traces": [1.0]}
        rows.append(row | {"accuracy": 0.5 - upside_down})
        rows.append(row | {"deficit": "none", "epochs": 30, "accuracy": 0.51})
    return rows


@pytest.mark.parametrize(
    ("longest", "upside_down", "said"),
    [
        (0.05, 0.0, "reproduced"),
        (0.05, 0.05, "reproduced in part"),
        (0.0, 0.0, "not reproduced, decided"),
    ],
)
def test_the_verdict_on_critical_periods_follows_the_costs(script, longest, upside_down, said):
    costs = {0: 0.0, 5: longest / 4, 10: longest / 3, 20: longest / 2, 30: longest}
    found = script("critical_period").verdict(periods(costs, upside_down))
    assert found["verdict"] == said
    assert found["numbers"]["cost"][30][0] == pytest.approx(100 * longest)
    assert found["numbers"]["end_over_peak"][0] == 0.5
    assert found["numbers"]["more_sharp_epochs"][0] == pytest.approx(-1.0)
    assert found["numbers"]["less_than_blur_as_long"][0] == pytest.approx(1 + 100 * longest)


def test_a_wide_spread_of_costs_is_undecided(script):
    costs = dict.fromkeys((0, 5, 10, 20, 30), 0.0)
    rows = periods(costs, 0.0, spread=0.02)
    assert script("critical_period").verdict(rows)["verdict"] == "undecided"


def prices(slope, change=0.0):
    """Rows of three seeds whose β* follows a power of N, with another power after half of the training."""
    rows = []
    for seed in range(3):
        for width, length in ((256, 1.0), (256, 0.5), (128, 1.0)):
            for n in (250, 500, 2000):
                power = slope - change * (length < 1) + 0.001 * seed
                row = {"samples": n, "width": width, "length": length, "seed": seed}
                rows.append(row | {"critical_beta": 0.1 * (n / 250) ** power, "unfinished": []})
    return [row | {"seconds": 2.0, "steps": 100} for row in rows]


@pytest.mark.parametrize(
    ("slope", "change", "said"),
    [(0.0, 0.0, "reproduced"), (-0.7, 0.0, "not reproduced, decided"), (-0.7, 0.3, "undecided")],
)
def test_the_verdict_on_random_labels_follows_slope_and_convergence(script, slope, change, said):
    found = script("beta_of_random_labels").verdict(prices(slope, change))
    assert found["verdict"] == said
    assert found["numbers"]["slopes"]["wide"][0] == pytest.approx(slope + 0.001)
    assert found["numbers"]["longer"][0] == pytest.approx(change)
    # 0.02 s a step, 2.5 times the 4,800 steps of all four N, four times as long, five seeds
    hours = 0.02 * 2.5 * 4800 * 4 * 5 / 3600
    assert (f"about {hours:.1f} core-hours" in found["sentence"]) == (said == "undecided")


def test_numbers_of_samples_that_a_case_lacks_do_not_count(script):
    rows = [r for r in prices(-0.5) if (r["samples"], r["width"], r["seed"]) != (500, 128, 2)]
    assert script("beta_of_random_labels").complete(rows) == [250, 2000]


@pytest.mark.parametrize(
    ("inverted", "seeds", "said"),
    [(10.0, 5, "reproduced"), (90.0, 5, "reproduced in part"), (10.0, 4, "undecided")],
)
def test_the_verdict_on_the_task_matrix_follows_the_distances(script, inverted, seeds, said):
    module = script("task_matrix")
    names = list(module.TASKS)
    distances = np.full((len(names), len(names)), 50.0)
    for known, new in {less for less, _ in module.CLAIMS}:
        distances[names.index(known), names.index(new)] = 10.0
    distances[names.index("MNIST"), names.index("inverted")] = inverted
    noise = np.random.default_rng(0).normal(size=(seeds, *distances.shape))
    rows = [{"seed": s, "distances": (distances + noise[s]).tolist()} for s in range(seeds)]
    assert module.verdict(rows)["verdict"] == said


def test_errors_are_averaged_over_seeds_only(script):
    found = {
        "truth small 0 20 usps": [{"start": "a", "full": 0.1}],
        "truth small 1 20 usps": [{"start": "a", "full": 0.3}],
        "truth small 0 50 usps": [{"start": "a", "full": 0.5}],
        "truth small 0 20 mnist": [{"start": "a", "full": 0.9}],
    }
    errors = script("claim_3").mean_errors(found, "usps", "full")
    assert errors == {20: {"a": pytest.approx(0.2)}, 50: {"a": 0.5}}
