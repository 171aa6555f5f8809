"""Agreement, speed and peak memory of one contender or a field of them, each run in a forked process of its own."""

import gc
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from contenders import LOOP, Result, floor, plain
from networks import make
from peers import CONTENDERS

WRONG = 1e-4  # a relative error that float32 does not explain
SAMPLES_COMPARED = 4
SAMPLES_TRIED = 16  # who takes HOPELESS times as long as the quickest on these is not raced
HOPELESS = 8.0
SHORT = 0.1  # seconds
SHOWN_ANEW = 5  # calls of "auto" before the rounds: more of them show where the samples are than of later ones


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function`` in a fork of this process, which has imported everything and computed nothing."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *args).result()


def seconds(call: Callable[[], Any]) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def relative_error(result: Result, reference: Result) -> float:
    """Return ``max |a - b| / max |b|``, for a diagonal the largest over parameters; a missing parameter is zero."""
    if isinstance(reference, dict):
        assert isinstance(result, dict)
        parts = [(result.get(name, torch.zeros_like(b)), b) for name, b in reference.items()]
        return max(relative_error(a, b) for a, b in parts)
    return ((result.double() - reference).abs().max() / reference.abs().max()).item()


def reason(error: Exception) -> str:
    """Return the first line of an error, short enough for a table."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:120]


def agreement(network: str, quantity: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Compare every contender, in float32, with the batch-of-one loop in float64."""
    model, x, y = make(network, SAMPLES_COMPARED)
    reference = LOOP[quantity](deepcopy(model).double(), x.double(), y)()
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            result = CONTENDERS[name][quantity](deepcopy(model), x.clone(), y)()
            found[name] = {"error": relative_error(result, reference)}
        except Exception as error:  # whatever a peer raises: it does not serve this network
            found[name] = {"refused": reason(error)}
    return found


def race(
    network: str, n: int, quantity: str, names: list[str], repeats: int, limit: float
) -> dict[str, dict[str, float | int]]:
    """Time contenders and a plain forward and backward pass of the same batch, in turn, round by round.

    What takes more than ``limit`` times as long as the quickest in a first trial is not repeated. Most calls of "auto"
    that show where the samples are come before the rounds; the first one is told apart.
    """
    model, x, y = make(network, n)
    yardstick = plain(deepcopy(model), x, y)
    builders = {name: CONTENDERS[name][quantity] for name in hopeful(network, quantity, names)}
    calls = {
        name: build(deepcopy(model), x.clone(), y)
        for name, build in {"floor": floor, **builders}.items()
    }
    yardstick()
    results: dict[str, Result] = {}

    def trial(name: str) -> tuple[float, float]:
        return seconds(yardstick), seconds(lambda: results.update({name: calls[name]()}))

    pairs = {name: [trial(name)] for name in calls}
    quickest = min(pairs[name][0][1] for name in builders)
    repeated = [
        name for name in calls if pairs[name][0][1] <= limit * quickest or name in ("auto", "floor")
    ]
    first = {name: call / step for name, [(step, call)] in pairs.items()}
    if repeats > 1:  # the trial does not count where there are others
        for _ in range(SHOWN_ANEW - 1 if "auto" in calls else 0):
            calls["auto"]()
        pairs |= rounds(yardstick, {name: calls[name] for name in repeated}, repeats)
    found = {name: summary(pairs[name]) | {"first": first[name]} for name in calls}
    for name in builders if "torch.func" in builders else ():
        found[name]["deviation"] = relative_error(results[name], results["torch.func"])
    return found


def rounds(
    yardstick: Callable[[], Any], calls: dict[str, Callable[[], Any]], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the times of the plain pass and of each call: a plain pass a round, before every call if it is short."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats):
        gc.collect()
        step = 0.0
        for name, call in calls.items():
            if step < SHORT:
                step = seconds(yardstick)
            pairs[name].append((step, seconds(call)))
    return pairs


def hopeful(network: str, quantity: str, names: list[str]) -> list[str]:
    """Return the contenders that are not far behind on a few samples."""
    times = {}
    for name in names:
        call = CONTENDERS[name][quantity](*make(network, SAMPLES_TRIED))
        call()
        times[name] = min(seconds(call) for _ in range(2))
    return [name for name in names if times[name] <= HOPELESS * min(times.values())]


def summary(pairs: list[tuple[float, float]]) -> dict[str, float | int]:
    """Median and range of the ratio, and the median times."""
    ratios = [contender / yardstick for yardstick, contender in pairs]
    return {
        "ratio": median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "seconds": median(contender for _, contender in pairs),
        "plain_seconds": median(yardstick for yardstick, _ in pairs),
        "repeats": len(pairs),
    }


def peak_megabytes(network: str, n: int, quantity: str, name: str) -> float:
    """Return by how much one call raises the peak of the resident memory over what the process held before it.

    The process has run the same call on two samples, so that kernels are loaded; run this in a child of its own.
    """
    model, x, y = make(network, n)
    build = plain if name == "plain" else CONTENDERS[name][quantity]
    build(deepcopy(model), x[:2].clone(), y[:2])()
    call = build(model, x, y)
    gc.collect()
    before = resident_bytes()
    call()
    return (1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6


def resident_bytes() -> int:
    """Resident memory of this process, now (Linux)."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def tensor_bytes(call: Callable[[], Any]) -> int:
    """Return how many bytes of tensors a call holds at most, as torch allocates and frees them on the CPU."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0)


def growth(quantity: str, name: str, n: int, repeats: int) -> dict[str, Any]:
    """Time per sample and peak memory of one contender on LeNet with ``n`` samples."""
    peak = in_child(peak_megabytes, "lenet", n, quantity, name)
    return {
        "quantity": quantity,
        "contender": name,
        "n": n,
        "peak_mb": peak,
        **in_child(per_sample, quantity, name, n, repeats),
    }


def per_sample(quantity: str, name: str, n: int, repeats: int) -> dict[str, float]:
    """Median, least and largest time of a call, per sample."""
    model, x, y = make("lenet", n)
    call = (plain if name == "plain" else CONTENDERS[name][quantity])(model, x, y)
    call()
    times = [1e6 * seconds(call) / n for _ in range(repeats)]
    return {"microseconds": median(times), "low": min(times), "high": max(times)}
