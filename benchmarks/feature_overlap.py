"""Does the feature overlap of a network predict whether transfer hurts? Digits, source tasks from good to random.

    python benchmarks/feature_overlap.py

A small network learns a source task on one part of scikit-learn's digits. The target, which of ten digits, is then
learned from n labels of another part: from scratch, or by a linear read-out of the frozen last hidden layer (linear
transfer). Risks are shares of the one-hot labels' variance missed on a third part. The prediction compares the share
that `feature_overlap` measures on a fourth part with a power law through the scratch learning curve; it is held
against the measured gain at each n where the gain's interval over seeds excludes 0. The confusion table counts all.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch
from scipy.stats import t as student
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import mse_loss, one_hot

from lightning_taskinfo import __version__, feature_overlap
from lightning_taskinfo.functional.features import fit_power_law
from lightning_taskinfo.functional.readout import ridge

NUMBERS = (20, 40, 80, 160, 320)
SIZES = {"source": 600, "overlap": 300, "target": 400, "test": 497}


def split(seed):
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data).float() / 8 - 1, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = zip(SIZES, order.split(list(SIZES.values())), strict=True)
    return {name: (inputs[part], labels[part]) for name, part in parts}


def source_labels(kind, inputs, labels, generator):
    """Source tasks in falling order of what they share with the target."""
    if kind == "the same digits":
        return labels
    if kind == "five groups of two":
        return labels // 2
    if kind == "odd or even":
        return labels % 2
    if kind == "ink, in five bins":
        ink = inputs.sum(1)
        return torch.bucketize(ink, ink.quantile(torch.tensor([0.2, 0.4, 0.6, 0.8])))
    return torch.randint(10, labels.shape, generator=generator)


KINDS = (
    "the same digits",
    "five groups of two",
    "odd or even",
    "ink, in five bins",
    "random labels",
)


def train(inputs, targets, seed, steps=300):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, targets.shape[1])
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def missed(predicted, labels):
    """Share of the one-hot labels' variance."""
    targets = one_hot(labels, 10).to(predicted.dtype)
    return (
        (predicted - targets).square().sum() / (targets - targets.mean(0)).square().sum()
    ).item()


def read_out(model, parts, n):
    (x, y), (x_test, y_test) = parts["target"], parts["test"]
    with torch.no_grad():
        hidden, hidden_test = (model[:4](t).double() for t in (x[:n], x_test))
    targets = one_hot(y[:n], 10).double()
    mean_x, mean_y = hidden.mean(0), targets.mean(0)
    return missed(mean_y + ridge(hidden - mean_x, targets - mean_y, hidden_test - mean_x), y_test)


def one_seed(seed):
    """Scratch and transferred risks at each n, and the overlap of each source."""
    parts, generator = split(seed), torch.Generator().manual_seed(seed)
    (x, y), (x_test, y_test) = parts["target"], parts["test"]
    models = [train(x[:n], one_hot(y[:n], 10).float(), seed) for n in NUMBERS]
    scratch = [missed(model(x_test).detach(), y_test) for model in models]
    result = {"scratch": scratch, "linear": {}, "overlap": {}}
    for kind in KINDS:
        labels = source_labels(kind, *parts["source"], generator)
        model = train(parts["source"][0], one_hot(labels).float(), 1000 + seed)
        result["linear"][kind] = [read_out(model, parts, n) for n in NUMBERS]
        result["overlap"][kind] = feature_overlap(
            model, [parts["overlap"]], layers=["3"]
        ).outside.item()
    return result


def judge(seeds):
    """One row a source and n: measured gain with its interval, predicted sign."""
    rows, quantile = [], float(student.ppf(0.975, len(seeds) - 1))
    scratch = torch.tensor([seed["scratch"] for seed in seeds]).double()  # [S, n]
    amplitude, exponent = fit_power_law(torch.tensor(NUMBERS), scratch.mean(0))
    for kind in KINDS:
        gains = scratch - torch.tensor([seed["linear"][kind] for seed in seeds]).double()
        outside = sum(seed["overlap"][kind] for seed in seeds) / len(seeds)
        for i, n in enumerate(NUMBERS):
            gain, reach = (
                gains[:, i].mean().item(),
                quantile * (gains[:, i].std() / len(seeds) ** 0.5).item(),
            )
            curve = (amplitude * n**-exponent).item()
            row = {
                "source": kind,
                "n": n,
                "gain": gain,
                "interval": reach,
                "outside": outside,
                "scratch_curve": curve,
            }
            rows.append(row | {"predicted": curve - outside, "decided": abs(gain) > reach})
    return rows, {"amplitude": amplitude.item(), "exponent": exponent.item()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "feature_overlap.json"
    )
    args = parser.parse_args()
    start = time.perf_counter()
    rows, curve = judge([one_seed(seed) for seed in range(args.seeds)])
    print("source                  n     gain ± 95 %      outside  scratch curve  predicted")
    for r in rows:
        mark = (
            ""
            if not r["decided"]
            else ("  agrees" if r["gain"] * r["predicted"] > 0 else "  DISAGREES")
        )
        print(
            f"{r['source']:20} {r['n']:4} {r['gain']:8.3f} ± {r['interval']:.3f} {r['outside']:10.3f}"
            f" {r['scratch_curve']:12.3f} {'helps' if r['predicted'] > 0 else 'hurts':>10}{mark}"
        )
    decided = [r for r in rows if r["decided"]]
    table = {
        f"measured {'helps' if measured else 'hurts'}, predicted {'helps' if predicted else 'hurts'}": sum(
            (r["gain"] > 0) is measured and (r["predicted"] > 0) is predicted for r in decided
        )
        for measured in (True, False)
        for predicted in (True, False)
    }
    table["undecided"] = len(rows) - len(decided)
    environment = {
        "lightning_taskinfo": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    environment |= {"machine": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()}
    result = {
        "what": "predicted and measured sign of linear transfer on digits",
        "seeds": args.seeds,
    }
    result |= {"environment": environment, "seconds": round(time.perf_counter() - start, 1)}
    result |= {"scratch_curve": curve, "confusion": table, "rows": rows}
    print(json.dumps(table, indent=1))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
