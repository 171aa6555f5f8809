"""Does simulated transfer follow the theory? Every cell of a phase diagram, with its z-score, none left out.

    python benchmarks/phase_diagram.py

For linear transfer and fine-tuning, on a grid of angles, sample numbers and noise: simulated mean and standard error of
the risk, the theory (means over datasets of this size, exact for linear transfer), the formula for fine-tuning as it is
printed in *Features are fate* (right without noise only), and by how many standard errors each is off. All angles of a
column share inputs and noise, so their z-scores are not independent. The points at which gradient flow ends are
taken in closed form; gradient descent from a small initialisation through pretraining and fine-tuning checks them.

The summary counts cells beyond three standard errors beside the number that chance alone would put there. For linear
transfer that number is large with few repetitions (``--repetitions 20``): its risk varies as the square of one
Gaussian, so that a sample of 20 often has both too small a mean and too small a standard error. The standard error is
known there, and ``z_known`` uses it. For fine-tuning it is not known; ``z_pilot`` takes the standard deviation from
other, more repetitions (``--pilot``), for both modes.
"""

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path

import torch
from descent import descend, product, small_layers
from evidence.linear_students import draw_tasks, simulate_transfer
from scipy.stats import norm
from scipy.stats import t as student

from lightning_taskinfo import __version__
from lightning_taskinfo.functional.deep_linear import (
    fine_tuning_risk,
    linear_transfer_risk,
)

THETA = torch.tensor([0.0, 20.0, 40.0, 60.0, 75.0, 90.0], dtype=torch.float64).deg2rad()
GAMMA = [0.1, 0.25, 0.5, 0.75, 0.9, 1.25, 2.0]
SIGMA = [0.0, 0.2, 1.0]
EXACT = (
    1e-9  # simulated values that agree to this, in all repetitions, have no spread to compare with
)


def z_score(mean, error, expected):
    if abs(mean - expected) < EXACT:
        return 0.0
    return (mean - expected) / error if error > 0 else math.copysign(math.inf, mean - expected)


def known_error(theta, sigma, n, repetitions):
    """Standard error of the mean risk of linear transfer: of s²·g²/q with g Gaussian and q chi-squared (n)."""
    variance = (math.sin(theta) ** 2 + sigma**2) ** 2 * (3 / ((n - 2) * (n - 4)) - 1 / (n - 2) ** 2)
    return (variance / repetitions) ** 0.5


def column(gamma, sigma, args, generator):
    """All angles of both modes at one number of samples and one noise."""
    n = round(gamma * args.dimension)
    sizes = {"dimension": args.dimension, "repetitions": args.repetitions}
    risks = simulate_transfer(THETA, n / args.dimension, sigma, generator=generator, **sizes)
    pilot = simulate_transfer(
        THETA, n / args.dimension, sigma, dimension=args.dimension, repetitions=args.pilot,
        generator=torch.Generator().manual_seed(args.seed + 1000 + n),
    )  # fmt: skip
    one_layer = fine_tuning_risk(
        THETA, n / args.dimension, sigma, depth=1, dimension=args.dimension
    )
    theories = {
        "linear": (risks.linear, pilot.linear, linear_transfer_risk(THETA, sigma, n), None),
        "fine-tuning": (
            risks.fine_tune,
            pilot.fine_tune,
            fine_tuning_risk(THETA, n / args.dimension, sigma, dimension=args.dimension),
            one_layer,  # the printed formula, with the exact mean of the risk from scratch
        ),
    }
    for mode, (values, others, theory, printed) in theories.items():
        for a, theta in enumerate(THETA.tolist()):
            mean, error = values[a].mean().item(), (values[a].std() / args.repetitions**0.5).item()
            cell = {
                "mode": mode,
                "sigma": sigma,
                "theta_degrees": math.degrees(theta),
                "gamma": gamma,
                "n": n,
            }
            cell |= {"mean": mean, "standard_error": error, "theory": theory[a].item()}
            spread = (others[a].std() / args.repetitions**0.5).item()
            cell |= {
                "z": z_score(mean, error, theory[a].item()),
                "z_pilot": z_score(mean, spread, theory[a].item()),
            }
            if mode == "linear":
                cell["z_known"] = z_score(
                    mean, known_error(theta, sigma, n, args.repetitions), theory[a].item()
                )
            else:
                cell["limit"] = fine_tuning_risk(theta, torch.tensor(gamma).double(), sigma).item()
                cell["printed"] = fine_tuning_risk(
                    theta, torch.tensor(gamma).double(), sigma, depth=1
                ).item()
                cell["z_printed"] = z_score(mean, error, printed[a].item())
            yield cell


def descent(sigma, args, *, gamma=0.5, theta=math.pi / 3, rates=(0.04, 0.02)):
    """Whole networks from a small start: distance to the closed-form end, which must shrink with the learning rate."""
    n, angle = round(gamma * args.dimension), torch.tensor([theta], dtype=torch.float64)
    sizes = {"dimension": args.dimension, "repetitions": 4}
    draws = draw_tasks(angle, n, sigma, **sizes, generator=torch.Generator().manual_seed(args.seed))
    said = simulate_transfer(
        angle, gamma, sigma, **sizes, generator=torch.Generator().manual_seed(args.seed)
    )
    generator = torch.Generator().manual_seed(args.seed + 1)
    start = small_layers(4, args.dimension, scale=1e-3, generator=generator, dtype=torch.float64)
    pretrained = descend(start, draws.source, learning_rate=0.05)
    covariance, cross = (
        draws.inputs.mT @ draws.inputs / n,
        (draws.inputs.mT @ draws.labels).squeeze(-1) / n,
    )
    row = {"sigma": sigma, "gamma": gamma, "theta_degrees": math.degrees(theta)}
    row["closed"] = said.fine_tune.mean().item()
    for rate in rates:
        trained = descend(
            pretrained, cross, covariance, learning_rate=rate, max_steps=100_000, tolerance=1e-6
        )
        risk = (product(trained) - draws.target[:, 0]).square().sum(-1)
        row[f"descent_{rate:g}"] = risk.mean().item()
        row[f"largest_gap_{rate:g}"] = (risk - said.fine_tune[0]).abs().max().item()
    return row


def chance_beyond_3(repetitions):
    """Chance that a mean is off by three standard errors though the theory is right, for each kind of z-score."""
    draws = torch.randn(
        20_000_000 // repetitions, repetitions, generator=torch.Generator().manual_seed(0)
    ).square()
    gap = draws.mean(-1) - 1
    estimated, known = draws.std(-1) / repetitions**0.5, (2 / repetitions) ** 0.5
    return {
        ("linear", "z"): (gap.abs() > 3 * estimated).double().mean().item(),
        ("linear", "z_known"): (gap.abs() > 3 * known).double().mean().item(),
        ("linear", "z_pilot"): (gap.abs() > 3 * known).double().mean().item(),
        ("fine-tuning", "z"): 2 * float(student.sf(3, repetitions - 1)),
        ("fine-tuning", "z_pilot"): 2 * float(norm.sf(3)),
    }


def summarise(cells, repetitions):
    """How the z-scores of each mode are spread, beside what chance alone gives."""
    summary = {}
    for (mode, key), tail in chance_beyond_3(repetitions).items():
        scores = torch.tensor(
            [cell[key] for cell in cells if cell["mode"] == mode], dtype=torch.float64
        )
        z = scores[scores != 0].abs()
        summary[f"{mode}, {key}"] = {
            "cells": len(scores),
            "cells_exact": len(scores) - len(z),
            "cells_beyond_3": int((z > 3).sum()),
            "expected_beyond_3_by_chance": tail * len(z),
            "largest": z.max().item(),
            "root_mean_square": z.square().mean().sqrt().item(),
            "quantiles_50_90_99": z.quantile(torch.tensor([0.5, 0.9, 0.99]).double()).tolist(),
        }
    noisy = [
        abs(c["z_printed"])
        for c in cells
        if c["mode"] == "fine-tuning" and c["sigma"] > 0 and c["gamma"] < 1
    ]
    summary["printed formula with noise, gamma < 1"] = {
        "cells": len(noisy),
        "cells_beyond_3": sum(z > 3 for z in noisy),
        "largest": max(noisy),
    }
    return summary


def environment():
    return {
        "lightning_taskinfo": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def print_cells(cells):
    print(
        "mode         sigma theta  gamma       mean ± se         theory      z   printed  z_printed"
    )
    for c in cells:
        line = f"{c['mode']:12} {c['sigma']:5.1f} {c['theta_degrees']:5.0f} {c['gamma']:6.2f}"
        line += f" {c['mean']:10.5f} ± {c['standard_error']:.5f} {c['theory']:10.5f} {c['z']:6.2f}"
        if "printed" in c:
            line += f" {c['printed']:9.5f} {c['z_printed']:10.2f}"
        print(line)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dimension", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument(
        "--pilot",
        type=int,
        default=400,
        help="repetitions that give z_pilot its standard deviation",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--out",
        type=Path,
        help="default: results/phase_diagram_<repetitions>.json beside this file",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    out = args.out or Path(__file__).parent / "results" / f"phase_diagram_{args.repetitions}.json"
    start, generator = time.perf_counter(), torch.Generator().manual_seed(args.seed)
    cells = [
        cell for sigma in SIGMA for gamma in GAMMA for cell in column(gamma, sigma, args, generator)
    ]
    print_cells(cells)
    checks = [descent(sigma, args) for sigma in SIGMA]
    result = {
        "what": "risks of transfer in deep linear networks, simulated and by theory; depth 2",
        "settings": {
            key: getattr(args, key) for key in ("dimension", "repetitions", "pilot", "seed")
        },
        "environment": environment(),
        "seconds": round(time.perf_counter() - start, 1),
        "summary": summarise(cells, args.repetitions),
        "gradient_descent": checks,
        "cells": cells,
    }
    print(
        json.dumps(
            {key: result[key] for key in ("settings", "seconds", "summary", "gradient_descent")},
            indent=1,
        )
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"Stored in {out}")


if __name__ == "__main__":
    main()
