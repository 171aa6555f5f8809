"""Jakubovitz et al.'s table 1 again: MNIST → notMNIST, seven methods, 50, 100 and 200 labels, several seeds.

Weights are chosen for every seed by itself, and within its own budget of 50 labels: a network is pretrained with each
weight of a grid, fine-tuned on 30 of the 50, and judged by its loss on the other 20. The chosen weights then serve
all numbers of labels. Nothing is chosen on the test set, and no other label of the target is seen.

    python benchmarks/transfer_table.py --data-dir FOLDER        # mnist.npz and notmnist.npz in it

A run that was interrupted goes on where it was. Without a data folder the embedded digits and letters are used.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_taskinfo._lightning import DEFAULT
from lightning_taskinfo._parallel import run_jobs
from lightning_taskinfo.transfer import Stages, TransferDataModule, TransferReport, transfer
from lightning_taskinfo.transfer.logs import RunLog
from lightning_taskinfo.transfer.ready.stages import Ready
from lightning_taskinfo.transfer.training import Trial

METHODS = (
    "standard", "temporal_ensembling", "mk_mmd", "lautum+mutual_information", "lautum", "lautum+temporal_ensembling",
    "mutual_information",
)  # fmt: skip
PAPER = {  # target test accuracy in percent
    50: (34.02, 37.28, 46.72, 46.51, 48.42, 67.3, 70.50),
    100: (57.58, 61.45, 63.32, 62.01, 65.94, 76.8, 78.38),
    200: (67.78, 74.87, 80.35, 76.31, 82.8, 84.5, 85.85),
}
GRID = {"mk_mmd": (0.1, 1.0), "lautum": (0.01, 0.1), "mutual_information": (0.03, 0.3)}
BUDGET, HELD_OUT = 50, 20


def search_trials(args: argparse.Namespace, seed: int) -> list[list[Trial]]:
    """One pretraining and one fine-tuning for every weight of the grid, on 30 of the seed's 50 labels."""
    data = make_data(args, seed)
    data.setup()
    rows = data.split.labeled[:BUDGET].tolist()  # in turns of classes: the last 20 are two of each
    search = data.replaced(labels=rows[:-HELD_OUT], validation=rows[-HELD_OUT:])
    pairs = []
    for method, weights in GRID.items():
        for weight in weights:
            recipe = Ready(
                args.model,
                search,
                None,
                [seed],
                "cpu",
                DEFAULT,
                methods=[method],
                stages=stages(args),
                weights={method: weight},
            )
            folder = args.folder / "search" / f"seed{seed}-{method}-{weight}"
            trials = recipe.trials(folder, RunLog())
            pairs.append([trial for trial in trials if trial.stage != "scratch"])
    return pairs


def run_pair(pair: list[Trial]) -> dict[str, Any]:
    """Pretrain and fine-tune, and return the last loss on the held-out labels."""
    _, tuned = (trial.run() for trial in pair)
    return {"loss": tuned["curve"][-1]["val_loss"], "accuracy": tuned["curve"][-1]["val_accuracy"]}


def choose(found: dict[str, Any], seed: int) -> dict[str, float]:
    """The weight of each method with the smallest held-out loss."""
    return {
        method: min(weights, key=lambda weight, m=method: found[f"seed{seed}-{m}-{weight}"]["loss"])
        for method, weights in GRID.items()
    }


def stages(args: argparse.Namespace) -> Stages:
    return Stages(pretrain_epochs=args.pretrain_epochs, fine_tune_epochs=args.fine_tune_epochs)


def make_data(args: argparse.Namespace, seed: int) -> TransferDataModule:
    source, target = ("mnist", "notmnist") if args.data_dir else ("digits", "letters")
    return TransferDataModule(
        source, target, labels=BUDGET, validation=0, max_source=args.max_source, max_unlabeled=args.max_unlabeled,
        seed=seed, data_dir=args.data_dir,
    )  # fmt: skip


def run(args: argparse.Namespace) -> tuple[TransferReport, dict[str, Any]]:
    """Search and train, seed by seed, and return all results in one report."""
    pairs = {
        pair[0].root.name: pair for seed in range(args.seeds) for pair in search_trials(args, seed)
    }
    shown = lambda name, result: print(name, json.dumps(result), flush=True)  # noqa: E731
    found = run_jobs(
        run_pair, pairs, folder=args.folder / "searched", workers=args.workers, on_done=shown
    )
    results, chosen = [], {}
    for seed in range(args.seeds):
        chosen[seed] = choose(found, seed)
        print(f"seed {seed}: {chosen[seed]}", flush=True)
        report = transfer(
            args.model,
            make_data(args, seed),
            methods=METHODS,
            labels=args.labels,
            seeds=[seed],
            stages=stages(args),
            weights=chosen[seed],
            folder=args.folder / f"seed{seed}",
            workers=args.workers,
            on_done=lambda cell, result: print(cell.name, result.get("test"), flush=True),
        )
        results += report.results
    return TransferReport(results, {**report.configuration, "weights": chosen}, report.name), found


def table(report: TransferReport, labels: list[int]) -> str:
    """Ours with its interval over seeds, the gain over standard, and the paper's."""
    compared = [
        c for c in report.transferability() if c.baseline == "standard" and c.measure == "error"
    ]
    gains = {(c.method, c.labels): c for c in compared}
    lines = [
        "| labels | method | accuracy, % | over standard, points | paper, % | paper over standard |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for count in labels:
        for method in ("scratch", *METHODS):
            mean = report.summary(method, count, "accuracy")
            gain = gains.get((method, count))
            paper = (
                PAPER.get(count, ())[METHODS.index(method)]
                if method in METHODS and count in PAPER
                else None
            )
            lines.append(
                "| "
                + " | ".join(row(count, method, mean, gain, paper, PAPER.get(count, (0,))[0]))
                + " |"
            )
    return "\n".join(lines) + "\n"


def row(
    count: int, method: str, mean: Any, gain: Any, paper: float | None, standard: float
) -> list[str]:
    own = f"{100 * mean.mean:.1f}" + (
        "" if mean.low is None else f" [{100 * mean.low:.1f}, {100 * mean.high:.1f}]"
    )
    over = ""
    if gain is not None:
        ends = gain.gain
        over = f"{100 * ends.mean:+.1f}"
        over += (
            ""
            if ends.low is None
            else f" [{100 * ends.low:+.1f}, {100 * ends.high:+.1f}] {gain.verdict}"
        )
    theirs = ["", ""] if paper is None else [f"{paper:.1f}", f"{paper - standard:+.1f}"]
    return [str(count), method, own, over, *theirs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="holds mnist.npz and notmnist.npz; TASKINFO_DATA_DIR is not read",
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/transfer_table"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--labels", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--model", default="small_cnn")
    parser.add_argument("--pretrain-epochs", type=int, default=5)
    parser.add_argument("--fine-tune-epochs", type=int, default=12)
    parser.add_argument("--max-source", type=int, default=6000)
    parser.add_argument("--max-unlabeled", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--store", type=Path, help="write NAME.json and NAME.md there")
    args = parser.parse_args()
    start = time.perf_counter()
    report, found = run(args)
    text = table(report, args.labels)
    print(text)
    args.folder.mkdir(parents=True, exist_ok=True)
    report.save(args.folder / "report")
    if args.store:
        store(args, report, found, text, time.perf_counter() - start)


def store(
    args: argparse.Namespace, report: TransferReport, found: Any, text: str, seconds: float
) -> None:
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    kept = ("method", "labels", "seed", "test", "source")
    values = {
        "environment": environment,
        "settings": {
            key: value
            for key, value in vars(args).items()
            if key not in ("data_dir", "folder", "store")
        },
        "grid": GRID,
        "searched": found,
        "weights": report.configuration["weights"],
        "results": [{key: getattr(row, key) for key in kept} for row in report.results],
        "seconds_of_the_last_run": seconds,
    }
    args.store.parent.mkdir(parents=True, exist_ok=True)
    args.store.with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n")
    told = " ".join(str(__doc__).split("    python")[0].split())
    notes = f"# {report.name}: seven methods of semi-supervised transfer\n\n{told}"
    sizes = (
        f"This run: {', '.join(map(str, args.labels))} labels. "
        f"Backbone {args.model}, {args.max_source} source samples, {args.max_unlabeled} unlabelled target inputs, "
        f"{args.pretrain_epochs} and {args.fine_tune_epochs} epochs, {args.seeds} seeds; Student's 95 % intervals, "
        "paired by seed for the gain over standard. The paper's networks and data sizes are larger."
    )
    args.store.with_suffix(".md").write_text(f"{notes}\n\n{sizes}\n\n{text}")


if __name__ == "__main__":
    main()
