"""Does the theory of transfer hold beyond the deep linear network without ridge? P3, figures 2, 4 and 5.

Registered before the first run, but for what is named at the end.

**Claims.** (a) The closed form predicts the risk of linear transfer with a ridge, and no ridge turns harmful transfer
into helpful (figure 2). (b) For ReLU students of ReLU teachers, linear transfer starts to hurt where the learning curve
of scratch training falls below the part of the target outside the span of the pretrained features (figure 4); the same
on real networks. (c) This part predicts the gain T of transfer; distances between the datasets, KL and Wasserstein-1,
do not (figure 5).

**Settings.** (a) Dimension 100, 2,000 repetitions, γ = 0.25, 0.5, 2, σ = 0, 0.5, angles of 0, 30, 60 and 85 degrees,
ridges 0, 0.01, 0.1, 1. (b) ``simulate_student_teacher`` in 10 dimensions, teachers of 8 features, of which the source
lacks 0, 1, 2, 4 or 6, students of 40, 2,000 steps, n = 20, 40, 80, 160, 320, 20 repetitions. Real networks: the stored
fine-tuning of ``which_start``, small networks only. (c) Source teachers that lack 0, 1, 2, 3, 4 or 6 of the 8
features, ten pairs each, whose other features have the coefficients r·c + sqrt(1 - r²)·c', c those of the target,
c' drawn anew, r uniform in [-1, 1]; n = 40. KL is that of the labels given the inputs, up to the variance of
their noise, which is taken in proportion to the target's variance; Wasserstein-1 is that of 500 common inputs with
their labels, in units of the target's standard deviation. T and the part outside of the span are in units of the
target's variance.

**Seeds.** (a) 0. (b) 0 to 4, one for each number of features. (c) 10 to 15, likewise.

**Test.** (a) No risk differs from the closed form, two-sided normal test Holm's correction over all cells; and in no
cell whose gain without ridge is negative is the gain with a ridge positive, both by 95 % intervals that are corrected
for the number of cells. (b) Of the cells (features, n) whose gain has a 95 % Student interval
without 0, the share with the predicted sign, with Wilson's interval: reproduced if its lower end is above one half
and the share at least 0.9; the measured onset against the predicted, with a bootstrap over repetitions. On real
networks the same share, of cells (start, target, n), the gain that of test errors with a linear head over those of
scratch, paired over seeds; the part outside of the span is the cross-validated error of a read-out from 1,000 labels,
the learning curve a power law through scratch's test errors. (c) Spearman's correlation of T with minus each
predictor over the 60 pairs, and its difference to that of the part outside, bootstrap over pairs, three intervals at
1 - 0.05/3. Reproduced if the part outside has a positive correlation that is ahead of both distances' by
intervals without 0, and the distances' are below 0.5 at their upper ends.

*Reproduced* if (a), both halves of (b) and (c) hold; *in part* if some do.

Seen before: a trial of (b) with 1 and 4 features missing, three numbers of samples and another seed; and,
when the script was tried out, the share on real networks, which is computed from stored rows. Neither changed anything.
"""

import json
import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from intervals import Interval, bootstrap_interval, holm, mean_interval, shown, spearman
from linear_students import ridge_transfer_risk, simulate_transfer
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from scipy.stats import norm
from students import (
    ReLUNetworks,
    ablate,
    fit_last_layer,
    random_networks,
    simulate_student_teacher,
    span_norms,
    squared_distance,
    train_networks,
)
from torch import Generator, Tensor
from units import BENCHMARKS, Experiment, Row, main

from lightning_taskinfo.functional.features import fit_power_law, transfer_onset
from lightning_taskinfo.functional.intervals import wilson_interval

ANGLES = [0.0, 30.0, 60.0, 85.0]
RIDGES = [0.0, 0.01, 0.1, 1.0]
FEATURES = 8
NUMBERS = [20, 40, 80, 160, 320]
LABELS = [20, 50, 200, 1000]


def units(short: bool) -> dict[str, Row]:
    """Columns of the ridge, students by the features that their source lacks, pairs of teachers, real networks."""
    found: dict[str, Row] = {}
    for sigma in (0.0, 0.5):
        for gamma in (0.25, 0.5, 2.0):
            found[f"ridge, γ {gamma}, σ {sigma}"] = {
                "kind": "ridge",
                "gamma": gamma,
                "sigma": sigma,
                "dimension": 20 if short else 100,
                "repetitions": 200 if short else 2000,
                "seed": 0,
            }
    for seed, missing in enumerate((0, 1, 2, 4, 6)):
        found[f"students, {missing} missing"] = {
            "kind": "students",
            "missing": missing,
            "numbers": NUMBERS[:2] if short else NUMBERS,
            "repetitions": 4 if short else 20,
            "steps": 20 if short else 2000,
            "seed": seed,
        }
    for seed, missing in enumerate((0, 1, 2, 3, 4, 6), start=10):
        found[f"pairs, {missing} missing"] = {
            "kind": "pairs",
            "missing": missing,
            "n": 40,
            "repetitions": 4 if short else 10,
            "steps": 20 if short else 2000,
            "seed": seed,
        }
    found["real networks"] = {"kind": "real"}
    return found


def run(settings: Row, data_dir: str | None) -> Row:
    kinds = {"ridge": ridge_cells, "students": students, "pairs": pairs, "real": real_networks}
    return kinds[settings["kind"]](settings)


def ridge_cells(settings: Row) -> Row:
    """Simulated and predicted risks of linear transfer, and the gain over scratch."""
    theta = torch.tensor(ANGLES, dtype=torch.float64).deg2rad()
    gamma, sigma, d = settings["gamma"], settings["sigma"], settings["dimension"]
    cells = []
    for ridge in RIDGES:
        risks = simulate_transfer(
            theta,
            gamma,
            sigma,
            dimension=d,
            repetitions=settings["repetitions"],
            ridge=ridge,
            generator=Generator().manual_seed(settings["seed"]),
        )
        theory = ridge_transfer_risk(theta, sigma, round(gamma * d), ridge)
        gains = risks.scratch - risks.linear
        for a, angle in enumerate(ANGLES):
            cell = {"angle": angle, "ridge": ridge, "theory": theory[a].item()}
            cell |= {"risk": risks.linear[a].mean().item(), "risk_error": error(risks.linear[a])}
            cell |= {"gain": gains[a].mean().item(), "gain_error": error(gains[a])}
            cells.append(cell)
    return {"cells": cells}


def error(values: Tensor) -> float:
    """Standard error of the mean."""
    return (values.std() / len(values) ** 0.5).item()


def students(settings: Row) -> Row:
    """Risks of students with each number of samples, one list per number."""
    found: Row = {"scratch": [], "linear": [], "outside": []}
    for n in settings["numbers"]:
        risks = simulate_student_teacher(
            settings["missing"] / FEATURES,
            n,
            teacher_width=FEATURES,
            repetitions=settings["repetitions"],
            steps=settings["steps"],
            generator=Generator().manual_seed(settings["seed"]),
        )
        for name, values in found.items():
            values.append(getattr(risks, name).tolist())
    return found


def pairs(settings: Row) -> Row:
    """Gain, part outside of the span, KL and Wasserstein-1 of pairs of teachers."""
    g = Generator().manual_seed(settings["seed"])
    R, n, d = settings["repetitions"], settings["n"], 10
    target = random_networks(R, FEATURES, d, generator=g)
    other = random_networks(R, FEATURES, d, generator=g).coefficients
    r = 2 * torch.rand(R, 1, generator=g, dtype=torch.float64) - 1
    mixed = r * target.coefficients + (1 - r.square()).sqrt() * other
    features = torch.cat([target.weights, mixed.unsqueeze(-1)], -1)
    kept = ablate(features, settings["missing"] / FEATURES, generator=g)
    source = ReLUNetworks(kept[..., :-1].contiguous(), kept[..., -1].contiguous())

    def drawn(n: int) -> Tensor:
        return torch.randn(R, n, d, generator=g, dtype=torch.float64)

    student = random_networks(R, 40, d, generator=g)
    batches = ((x, source(x)) for x in (drawn(256) for _ in range(settings["steps"])))
    pretrained = train_networks(student, batches)
    x = drawn(n)
    labels = target(x)
    scratch = train_networks(student, [(x, labels)] * settings["steps"])
    linear = fit_last_layer(pretrained, x, labels)

    norms = span_norms(pretrained.weights, target.weights, target.coefficients)
    gain = squared_distance(scratch, target) - squared_distance(linear, target)
    x = drawn(500)
    spread = target(x).std(-1, keepdim=True)
    return {
        "gain": (gain / norms.total).tolist(),
        "outside": (norms.outside / norms.total).tolist(),
        "kl": (squared_distance(source, target) / norms.total).tolist(),
        "wasserstein": wasserstein(x, source(x) / spread, target(x) / spread),
    }


def wasserstein(inputs: Tensor, first: Tensor, second: Tensor) -> list[float]:
    """Wasserstein-1 between samples with two labels each, by the best assignment."""
    found = []
    for x, y, z in zip(inputs, first, second, strict=True):
        costs = cdist(torch.column_stack([x, y]), torch.column_stack([x, z]))
        found.append(float(costs[linear_sum_assignment(costs)].mean()))
    return found


def real_networks(settings: Row) -> Row:
    """Predicted and measured sign of linear transfer in the stored rows of ``which_start``."""
    scratch: dict[Any, list[float]] = defaultdict(list)
    linear: dict[Any, list[float]] = defaultdict(list)
    outside: dict[Any, list[float]] = defaultdict(list)
    lines = (BENCHMARKS / "results" / "which_start.jsonl").read_text().splitlines()
    for unit in map(json.loads, lines):
        kind, *words = unit["unit"].split(maxsplit=4)
        if kind not in ("truth", "scores") or words[0] != "small":
            continue
        _, _, labels, target = words
        for row in unit["found"]:
            if kind == "scores" and int(labels) == max(LABELS):
                outside[target, row["start"]].append(row["last_error"])
            elif kind == "truth" and row["start"] == "nothing":
                scratch[target, int(labels)].append(row["full"])
            elif kind == "truth":
                linear[target, row["start"], int(labels)].append(row["linear"])
    cells = []
    for (target, start, labels), errors in linear.items():
        curve = torch.tensor([np.mean(scratch[target, n]) for n in LABELS])
        amplitude, exponent = fit_power_law(torch.tensor(LABELS), curve)
        missed = float(np.mean(outside[target, start]))
        gains = [a - b for a, b in zip(scratch[target, labels], errors, strict=True)]
        cell = {"target": target, "start": start, "n": labels, "gain": mean_interval(gains)}
        predicted = float(amplitude) * labels ** -float(exponent) - missed
        cells.append({**cell, "predicted": predicted})
    return {"cells": cells}


def right_signs(cells: list[tuple[Interval, float]]) -> Row:
    """Share of decided gains with the predicted sign, with Wilson's interval."""
    decided = [(gain[0], predicted) for gain, predicted in cells if gain[1] * gain[2] > 0]
    hits = sum(gain * predicted > 0 for gain, predicted in decided)
    found: Row = {"cells": len(cells), "decided": len(decided), "right": hits}
    found["hurt"] = sum(gain < 0 for gain, _ in decided)
    if decided:
        found["share"] = hits / len(decided), *wilson_interval(hits / len(decided), len(decided))
    return found


def judge_ridge(rows: list[Row]) -> Row:
    cells = [cell | {"column": row["unit"]} for row in rows for cell in row["cells"]]
    tested = [cell for cell in cells if cell["risk_error"] > 1e-12]
    z = [(cell["risk"] - cell["theory"]) / cell["risk_error"] for cell in tested]
    p = holm([2 * float(norm.sf(abs(score))) for score in z])
    gains = {(cell["column"], cell["angle"], cell["ridge"]): cell for cell in cells}
    reach = float(norm.isf(0.025 / len(cells)))
    harmful, helped = 0, 0
    for (column, angle, ridge), cell in gains.items():
        before = gains[column, angle, 0.0]
        if ridge > 0 and before["gain"] + reach * before["gain_error"] < 0:
            harmful += 1
            helped += cell["gain"] - reach * cell["gain_error"] > 0
    found: Row = {"cells": len(tested), "off": sum(value < 0.05 for value in p)}
    found |= {"largest_z": max(map(abs, z)), "harmful": harmful, "helped": helped}
    return found | {"holds": found["off"] == 0 and helped == 0}


def onsets(scratch: np.ndarray, linear: np.ndarray, outside: np.ndarray, numbers: list[int]) -> Row:
    """Predicted onset, and the measured one where the mean gain changes its sign; arrays are [n, repetitions]."""
    curve = torch.tensor(scratch.mean(1))
    amplitude, exponent = fit_power_law(torch.tensor(numbers), curve)
    missed = torch.tensor(outside.mean())
    found: Row = {"measured": math.nan, "curve": (amplitude * torch.tensor(numbers) ** -exponent)}
    found["predicted"] = float(transfer_onset(missed, amplitude, exponent.clamp(min=1e-3)))
    found["missed"] = float(missed)
    gains = (scratch - linear).mean(1)
    for i in range(len(numbers) - 1):
        if gains[i] > 0 >= gains[i + 1]:
            share = gains[i] / (gains[i] - gains[i + 1])
            found["measured"] = numbers[i] * (numbers[i + 1] / numbers[i]) ** share
    return found


def judge_students(rows: list[Row]) -> Row:
    cells = []
    compared = {}
    for row in rows:
        arrays = [np.array(row[name]) for name in ("scratch", "linear", "outside")]  # [n, R]
        found = onsets(*arrays, row["numbers"])
        for i in range(len(row["numbers"])):
            gain = mean_interval(arrays[0][i] - arrays[1][i])
            cells.append((gain, float(found["curve"][i]) - found["missed"]))

        def ratio(chosen: np.ndarray, arrays=arrays, row=row) -> float:
            drawn = [a[:, chosen.astype(int)] for a in arrays]
            found = onsets(*drawn, row["numbers"])
            return math.log(found["measured"] / found["predicted"])

        if math.isfinite(found["measured"]):
            ends = bootstrap_interval(ratio, np.arange(arrays[0].shape[1]), draws=500)
            compared[str(row["missing"])] = {
                "measured": found["measured"],
                "predicted": found["predicted"],
                "ratio": tuple(math.exp(end) for end in ends),
            }
    signs = right_signs(cells)
    share = signs.get("share", (0.0, 0.0, 0.0))
    return signs | {"onsets": compared, "holds": share[0] >= 0.9 and share[1] > 0.5}


def judge_real(rows: list[Row]) -> Row:
    cells = [(tuple(cell["gain"]), cell["predicted"]) for row in rows for cell in row["cells"]]
    found = right_signs(cells)
    share = found.get("share", (0.0, 0.0, 0.0))
    large = [(tuple(c["gain"]), c["predicted"]) for r in rows for c in r["cells"] if c["n"] >= 200]
    return found | {
        "from_200_labels": right_signs(large),
        "holds": share[0] >= 0.9 and share[1] > 0.5,
    }


def judge_pairs(rows: list[Row]) -> Row:
    names = ("gain", "outside", "kl", "wasserstein")
    columns = [[value for row in rows for value in row[name]] for name in names]
    level = 1 - 0.05 / 3
    found: Row = {"pairs": len(columns[0])}

    def correlation(gain: Any, predictor: Any) -> float:
        return -spearman(gain, predictor)

    for name, column in zip(names[1:], columns[1:], strict=True):
        found[name] = bootstrap_interval(correlation, columns[0], column, draws=2000, level=level)
    for name, column in zip(names[2:], columns[2:], strict=True):
        found[f"ahead_of_{name}"] = bootstrap_interval(
            lambda gain, outside, other: correlation(gain, outside) - correlation(gain, other),
            columns[0],
            columns[1],
            column,
            draws=2000,
            level=level,
        )
    ahead = [found[f"ahead_of_{name}"][1] > 0 for name in names[2:]]
    weak = [found[name][2] < 0.5 for name in names[2:]]
    return found | {"holds": found["outside"][1] > 0 and all(ahead) and all(weak)}


def verdict(rows: list[Row]) -> Row:
    judges = {
        "ridge": judge_ridge,
        "students": judge_students,
        "pairs": judge_pairs,
        "real": judge_real,
    }
    numbers = {}
    for kind, judge in judges.items():
        own = [row for row in rows if row["kind"] == kind]
        if own:
            numbers[kind] = judge(own)
    words = [sentence(kind, found) for kind, found in numbers.items()]
    holds = [found["holds"] for found in numbers.values()]
    if len(holds) < len(judges):
        said = "undecided"
    elif all(holds):
        said = "reproduced"
    else:
        said = "reproduced in part" if any(holds) else "not reproduced, decided"
    return {"verdict": said, "sentence": "; ".join(words), "numbers": numbers}


def sentence(kind: str, found: Row) -> str:
    """What one part says."""
    if kind == "ridge":
        return (
            f"ridge: {found['off']} of {found['cells']} risks differ from the closed form (largest z "
            f"{found['largest_z']:.1f}), a ridge helped in {found['helped']} of {found['harmful']} harmful cells"
        )
    if kind == "pairs":
        ahead = ", ".join(shown(found[f"ahead_of_{name}"]) for name in ("kl", "wasserstein"))
        return (
            f"rank correlation with T over {found['pairs']} pairs: {shown(found['outside'])} outside of the span, "
            f"{shown(found['kl'])} KL, {shown(found['wasserstein'])} Wasserstein-1, ahead by {ahead}"
        )
    name = "ReLU students" if kind == "students" else "real networks"
    share = shown(found["share"]) if "share" in found else "none"
    said = f"{name}: predicted sign right in {found['right']} of {found['decided']} decided cells, {share}"
    if kind == "students":
        ratios = [shown(onset["ratio"]) for onset in found["onsets"].values()]
        said += f", measured over predicted onset {', '.join(ratios)}" if ratios else ""
    elif "share" in found["from_200_labels"]:
        said += f" (exploratory: {shown(found['from_200_labels']['share'])} from 200 labels on)"
    return said


def figure(rows: list[Row], canvas: Any) -> None:
    """Ridge, students with the predicted boundary, and T against three predictors."""
    canvas.set_size_inches(12, 3.6)
    axes = canvas.subplots(1, 4)
    for row in rows:
        if row["kind"] == "ridge":
            cells = row["cells"]
            risks = [cell["risk"] for cell in cells]
            axes[0].plot([cell["theory"] for cell in cells], risks, "o", ms=3)
        if row["kind"] == "students":
            arrays = [np.array(row[name]) for name in ("scratch", "linear", "outside")]
            gains = np.sign((arrays[0] - arrays[1]).mean(1))
            missing = np.full(len(gains), row["missing"])
            axes[1].scatter(row["numbers"], missing, c=gains, cmap="coolwarm_r", vmin=-1, vmax=1)
            axes[1].plot(onsets(*arrays, row["numbers"])["predicted"], row["missing"], "k|", ms=14)
        if row["kind"] == "pairs":
            axes[2].plot(row["outside"], row["gain"], "C0o", ms=3)
            axes[3].plot(row["kl"], row["gain"], "C1o", ms=3)
            axes[3].plot(row["wasserstein"], row["gain"], "C2x", ms=3)
    axes[0].axline((0, 0), slope=1, color="k", lw=0.5)
    axes[0].set(xlabel="risk by the closed form", ylabel="simulated", title="ridge")
    axes[1].set(xscale="log", xlabel="samples", ylabel="features missing of 8", title="students")
    axes[1].set_xlim(10, 700)
    axes[2].set(xlabel="outside of the span", ylabel="T", title="pairs")
    axes[3].set(xscale="log", xlabel="KL (o), Wasserstein-1 (x)", ylabel="T", title="pairs")


CLAIM = (
    "The theory predicts linear transfer with a ridge and the boundary for ReLU students and real networks; KL and "
    "Wasserstein-1 do not predict T (P3, figures 2, 4, 5)"
)
if __name__ == "__main__":
    main(Experiment("theory", CLAIM, units, run, verdict, figure))
