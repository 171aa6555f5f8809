"""Measure the Fisher engines beside other packages: agreement, time against a plain training step, peak memory.

Usage::

    make bench                                                   # all of it, in an environment of its own
    .venv-bench/bin/python benchmarks/fisher.py --networks mlp --repeats 1
    .venv-bench/bin/python benchmarks/fisher.py --memory-growth  # and LeNet with 128 … 8,192 samples
    .venv-bench/bin/python benchmarks/fisher.py --networks fine-tuned    # language models, vision transformer, adapters

Every number is taken in a fork of a process that has imported everything and computed nothing. Contenders
take turns with a plain forward and backward pass of the same batch; what counts is the ratio of the two in a round.
What is wrong on a network is not timed there; what is far behind on 16 samples, or at the smaller batch, is not timed.
"""

import argparse
import importlib
import json
import os
import platform
import resource
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fine_tuned
import torch
from measure import WRONG, agreement, growth, in_child, peak_megabytes, race, reason
from networks import CORNERS, NETWORKS
from peers import CONTENDERS
from report import OURS, markdown

QUANTITIES = ("trace", "diagonal", "exact", "gram")
GRAM_SAMPLES = 100
LIGHT = ("mlp", "lenet")  # the exact diagonal takes ten times the work: by default on these only
PACKAGES = {  # contender -> module, distribution
    "BackPACK": ("backpack", "backpack-for-pytorch"),
    "nngeometry": ("nngeometry", "nngeometry"),
    "Opacus": ("opacus", "opacus"),
    "laplace-torch": ("laplace", "laplace-torch"),
    "ASDL": ("asdl", "asdfghjkl"),
}
LOOPS = ("one by one", "batch-of-one loop")
FINE_TUNED = "fine-tuned"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--networks", nargs="*", choices=[*NETWORKS, FINE_TUNED], default=[*NETWORKS, FINE_TUNED]
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=fine_tuned.CASES,
        default=[*fine_tuned.CASES],
        metavar="CASE",
        help="which of the fine-tuned ones",
    )
    parser.add_argument("--samples", nargs="+", type=int, default=[128, 512], help="batch sizes")
    parser.add_argument("--quantities", nargs="+", choices=QUANTITIES, default=QUANTITIES)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument(
        "--repeats", type=int, default=7, help="rounds; at least 7 for figures worth quoting"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=1.6,
        help="one trial only beyond this many times the quickest",
    )
    parser.add_argument(
        "--exact-everywhere", action="store_true", help="time the exact diagonal on all networks"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--memory-growth", action="store_true", help="also LeNet with 128 … 8,192 samples"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="a folder"
    )
    return parser.parse_args()


def available() -> dict[str, str]:
    """Import every peer and return the reason for each that is not there."""
    importlib.import_module(
        "torch._dynamo"
    )  # imported at first use otherwise, in every child again
    missing = {}
    for name, (module, distribution) in PACKAGES.items():
        try:
            importlib.import_module(module)
            version(distribution)
        except (ImportError, PackageNotFoundError) as error:
            missing[name] = "needs torchvision" if "torchvision" in str(error) else "not installed"
    return missing


def environment(threads: int) -> dict[str, Any]:
    """What a reader needs to judge the figures; nothing that tells whose machine it was."""
    versions = {}
    for distribution in (
        "torch",
        "lightning-taskinfo",
        *(distribution for _, distribution in PACKAGES.values()),
    ):
        try:
            versions[distribution] = version(distribution)
        except PackageNotFoundError:
            versions[distribution] = None
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "load_at_start": round(os.getloadavg()[0], 2),
        "packages": versions,
    }


def check(names: list[str], networks: list[str], quantities: list[str]) -> dict[str, Any]:
    """Compare all contenders with the loop, on the networks and on the small corner cases."""
    able = {
        quantity: [name for name in names if quantity in CONTENDERS[name]]
        for quantity in quantities
    }
    return {
        network: {
            quantity: in_child(agreement, network, quantity, able[quantity])
            for quantity in quantities
        }
        for network in [*networks, *CORNERS]
    }


def cells(args: argparse.Namespace) -> list[tuple[str, int, str]]:
    """Return what is raced: network, samples, quantity, smaller batches first."""
    found = []
    for network in args.networks:
        for n in sorted(args.samples):
            for quantity in args.quantities:
                if quantity == "gram":
                    if n == min(args.samples):
                        found.append((network, GRAM_SAMPLES, quantity))
                elif quantity != "exact" or network in LIGHT or args.exact_everywhere:
                    found.append((network, n, quantity))
    return found


def field(results: dict[str, Any], network: str, quantity: str, limit: float) -> list[str]:
    """Return the contenders that are right on this network and not far behind at a smaller batch.

    On the larger networks only `auto` and the quickest peer go on to the larger batch.
    """
    right = [
        name
        for name, r in results["agreement"][network][quantity].items()
        if r.get("error", 1.0) <= WRONG
    ]
    before = [r for r in results["speed"] if (r["network"], r["quantity"]) == (network, quantity)]
    ratios = {r["contender"]: r["ratio"] for r in before if r["contender"] in right}
    if not ratios:
        return [name for name in right if quantity == "trace" or name not in LOOPS]
    if network in LIGHT:
        kept = {name for name, value in ratios.items() if value <= limit * min(ratios.values())}
    else:
        kept = {*sorted(set(ratios) - set(OURS), key=ratios.__getitem__)[:1]}
    return [name for name in ratios if name == "auto" or name in kept]


def run_cell(
    results: dict[str, Any], cell: tuple[str, int, str], repeats: int, limit: float
) -> None:
    """Race one cell and measure the memory of whoever took part; append the rows to ``results``."""
    network, n, quantity = cell
    names = field(results, network, quantity, limit)
    where = {"network": network, "n": n, "quantity": quantity}
    raced = guarded(race, network, n, quantity, names, repeats, limit) or {}
    for name, row in raced.items():
        if row["repeats"] == repeats and name != "floor":
            row["peak_mb"] = guarded(peak_megabytes, network, n, quantity, name)
        results["speed"].append(where | {"contender": name} | row)
    results["plain_mb"][f"{network} {n}"] = guarded(peak_megabytes, network, n, quantity, "plain")


def guarded(function: Callable[..., Any], *args: Any) -> Any:
    """Run in a child; what kills it (out of memory, say) costs one number, not the run."""
    try:
        return in_child(function, *args)
    except Exception as error:
        print(f"  {function.__name__} {args}: {reason(error)}")
        return None


def run_fine_tuned(args: argparse.Namespace) -> None:
    """Time the networks that people fine-tune; of those that are not asked for, what was stored stays."""
    path = args.output / "fine_tuned.json"
    rows = json.loads(path.read_text())["speed"] if path.exists() else []
    for name in args.cases:
        rows = [row for row in rows if row["network"] != name]
        found = guarded(fine_tuned.ratios, name, args.repeats) or []
        memory = {
            "network": name,
            "quantity": "plain",
            **(guarded(fine_tuned.peak, name, "plain") or {}),
        }
        for row in found:
            if "ratio" in row:
                row |= guarded(fine_tuned.peak, name, row["quantity"]) or {}
        rows += [memory, *found]
        print(fine_tuned.table([memory, *found]), flush=True)
        results = {"environment": environment(args.threads), "speed": rows}
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(fine_tuned.table(rows))


def main() -> None:
    args, start = arguments(), time.perf_counter()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    args.output.mkdir(parents=True, exist_ok=True)
    if FINE_TUNED in args.networks:
        args.networks.remove(FINE_TUNED)
        run_fine_tuned(args)
        if not args.networks:
            return
    missing = available()
    names = [name for name in args.contenders if name not in missing]
    results: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {"repeats": args.repeats, "limit": args.limit, "wrong_above": WRONG},
        "not_run": missing,
        "speed": [],
        "plain_mb": {},
        "growth": [],
    }

    def save(done: str) -> None:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{time.perf_counter() - start:6.0f} s, CPU {used.ru_utime + used.ru_stime:6.0f} s  {done}",
            flush=True,
        )
        results["minutes"] = round((time.perf_counter() - start) / 60, 1)
        (args.output / "fisher.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.output / "fisher.md").write_text(markdown(results))

    results["agreement"] = check(names, args.networks, args.quantities)
    save("agreement")
    for cell in cells(args):
        run_cell(results, cell, args.repeats, args.limit)
        save(" ".join(map(str, cell)))
    if args.memory_growth:  # several passes over up to 8,192 samples
        for n in (2**k for k in range(7, 14)):
            for quantity, name in (("trace", "auto"), ("diagonal", "auto"), ("trace", "plain")):
                results["growth"].append(growth(quantity, name, n, min(args.repeats, 3)))
            save(f"memory growth {n}")


if __name__ == "__main__":
    main()
