"""Make the Markdown tables from the measurements."""

from typing import Any

TITLES = {
    "trace": "Trace, the dataset's labels",
    "diagonal": "Diagonal, the dataset's labels",
    "exact": "Diagonal, exact over 10 classes",
    "gram": "Gram matrix of 100 samples",
}
OURS = ("auto", "one by one", "per_sample", "loop engine")
GOALS = {  # quantity -> network -> samples, ratio
    "trace": {
        "mlp": (512, 0.75),
        "lenet": (512, 1.3),
        "vgg": (128, 1.1),
        "vit": (128, 1.15),
        "resnet20": (128, 1.2),
    },
    "diagonal": {
        "mlp": (512, 1.1),
        "lenet": (512, 1.35),
        "vgg": (128, 1.25),
        "vit": (128, 1.3),
        "resnet20": (128, 1.2),
    },
    "gram": {
        "mlp": (100, 1.0),
        "lenet": (100, 1.2),
        "vgg": (100, 1.5),
        "vit": (100, 1.5),
        "resnet20": (100, 1.5),
    },
}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def markdown(results: dict[str, Any]) -> str:
    """Return the whole report."""
    parts = ["# Fisher engines, measured", introduction(results)]
    for quantity, title in TITLES.items():
        rows = [r for r in results["speed"] if r["quantity"] == quantity]
        if rows:
            parts += [f"## {title}", speed(results, quantity, rows)]
    if results["speed"]:
        parts += [
            "## `auto` beside the best correct peer",
            ahead(results["speed"]),
            exact_beside_backpack(results),
        ]
        parts += ["## Peak memory", memory(results)]
    if "agreement" in results:
        parts += ["## Agreement", agreement(results)]
    if results["growth"]:
        parts += ["## LeNet, more and more samples", growth(results["growth"])]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def introduction(results: dict[str, Any]) -> str:
    env = results["environment"]
    packages = ", ".join(f"{name} {number}" for name, number in env["packages"].items() if number)
    text = (
        f"{env['date']}; {env['cpu']}, {env['cores']} cores, {env['threads']} threads, OpenMP wait policy "
        f"{env['omp_wait_policy']}, load {env['load_at_start']} at the start; {env['system']}, "
        f"Python {env['python']}; "
        f"{packages}. Took {results['minutes']} minutes.\n\n"
        "Times are ratios to a plain forward and backward pass of the same batch in the same round (straight before, "
        f"unless it takes long): median (least–largest) of {results['settings']['repeats']} rounds. `~`: one trial, "
        f"because it took more than {results['settings']['limit']:g} times as long as the quickest; `behind`: slower "
        "at the smaller batch, or far behind on 16 samples. The floor is a forward pass and a backward pass without "
        "any parameter's gradient. Some calls of `auto` also show where the samples are: the first one, with a row "
        "of its own, and fewer and fewer later ones. Five calls come before the rounds. "
        "Wrapping, hooks and copies of the model "
        f"are not timed. `wrong`: off by more than {results['settings']['wrong_above']:g} of the batch-of-one loop in "
        "float64; `refuses`: raises an error."
    )
    missing = "".join(f"\n- {name}: not run, {why}." for name, why in results["not_run"].items())
    return text + ("\n" + missing if missing else "")


def speed(results: dict[str, Any], quantity: str, rows: list[dict[str, Any]]) -> str:
    """One row a contender, one column a network and batch size."""
    columns = list(dict.fromkeys((r["network"], r["n"]) for r in rows))
    by_key = {(r["contender"], r["network"], r["n"]): r for r in rows}
    names = dict.fromkeys(
        ["floor", *(name for cell in results["agreement"].values() for name in cell[quantity])]
    )
    body = []
    for name in names:
        cells = [
            ratio(by_key.get((name, *column))) or absent(results, column[0], quantity, name)
            for column in columns
        ]
        body.append([bold(name), *cells])
        if name == "auto":
            first = [by_key.get((name, *column), {}).get("first") for column in columns]
            body.append(["**auto**, first call", *("" if x is None else f"{x:.1f}" for x in first)])
    plain = [f"{1e3 * by_key[('floor', *column)]['plain_seconds']:.1f} ms" for column in columns]
    return table(
        ["", *(f"{network} {n}" for network, n in columns)], [["plain step", *plain], *body]
    )


def bold(name: str) -> str:
    return f"**{name}**" if name in OURS else name


def ratio(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return (
        f"{row['ratio']:.2f} ({row['low']:.2f}–{row['high']:.2f})"
        if row["repeats"] > 1
        else f"~{row['ratio']:.2g}"
    )


def absent(results: dict[str, Any], network: str, quantity: str, name: str) -> str:
    found = results["agreement"][network][quantity].get(name, {})
    if "refused" in found:
        return "refuses"
    return "wrong" if found.get("error", 0.0) > results["settings"]["wrong_above"] else "behind"


def ahead(rows: list[dict[str, Any]]) -> str:
    """`auto` beside the quickest peer that is right, and the goal."""
    body = []
    for network, n, quantity in dict.fromkeys((r["network"], r["n"], r["quantity"]) for r in rows):
        cell = {
            r["contender"]: r
            for r in rows
            if (r["network"], r["n"], r["quantity"]) == (network, n, quantity)
        }
        peers = [r for name, r in cell.items() if name not in (*OURS, "floor")]
        samples, goal = GOALS.get(quantity, {}).get(network, (None, None))
        if "auto" in cell and peers:
            best, own = min(peers, key=lambda r: r["ratio"]), cell["auto"]
            quotient = f"{own['ratio'] / best['ratio']:.2f}"
            wanted = f"≤ {goal}: {'yes' if own['ratio'] <= goal else 'no'}" if samples == n else ""
            peer = f"{best['contender']} {ratio(best)}"
            body.append([quantity, f"{network} {n}", ratio(own), peer, quotient, wanted])
    return table(["", "", "auto", "best correct peer", "auto / peer", "goal"], body)


def exact_beside_backpack(results: dict[str, Any]) -> str:
    body = []
    rows = {
        (r["network"], r["n"], r["contender"]): r
        for r in results["speed"]
        if r["quantity"] == "exact"
    }
    for (network, n, name), row in rows.items():
        if name == "BackPACK" and (network, n, "auto") in rows:
            quotient = rows[network, n, "auto"]["ratio"] / row["ratio"]
            goal = (
                f"≤ 0.75: {'yes' if quotient <= 0.75 else 'no'}"
                if network in ("mlp", "lenet")
                else ""
            )
            body.append([f"{network} {n}", f"{quotient:.2f}", goal])
    return table(["exact diagonal", "auto / BackPACK", "goal"], body) if body else ""


def memory(results: dict[str, Any]) -> str:
    """Peak memory of one call, beside a plain forward and backward pass."""
    text = (
        "Megabytes by which one call raises the peak of the resident memory (`ru_maxrss`) over the resident memory "
        "just before it, in a process of its own that was warmed up on two samples.\n\n"
    )
    rows = [r for r in results["speed"] if "peak_mb" in r]
    columns = list(dict.fromkeys((r["network"], r["n"], r["quantity"]) for r in rows))
    by_key = {(r["contender"], r["network"], r["n"], r["quantity"]): r["peak_mb"] for r in rows}
    names = list(dict.fromkeys(r["contender"] for r in rows))
    body = []
    for network, n, quantity in columns:
        values = [by_key.get((name, network, n, quantity)) for name in names]
        values.insert(0, results["plain_mb"][f"{network} {n}"])
        body.append(
            [
                quantity,
                f"{network} {n}",
                *("" if value is None else f"{value:.0f}" for value in values),
            ]
        )
    return text + table(["", "", "plain step", *map(bold, names)], body)


def agreement(results: dict[str, Any]) -> str:
    """The largest error of each contender on each network over the quantities; what it refuses."""
    text = (
        "Largest relative error over the quantities, against the batch-of-one loop in float64, on 4 samples; for a "
        "diagonal, that of the worst parameter. A parameter that is passed over counts as zero.\n\n"
    )
    names = list(
        dict.fromkeys(
            name for cell in results["agreement"].values() for q in cell.values() for name in q
        )
    )
    body = []
    for network, cell in results["agreement"].items():
        body.append(
            [network, *(verdict(cell, name, results["settings"]["wrong_above"]) for name in names)]
        )
    deviations = [r["deviation"] for r in results["speed"] if "deviation" in r]
    if deviations:
        text += f"At the batch sizes raced, nobody is further than {max(deviations):.1e} from torch.func.\n\n"
    refusals = dict.fromkeys(
        f"- {name} on {network}, {quantity}: `{found['refused']}`"
        for network, cell in results["agreement"].items()
        for quantity, by_name in cell.items()
        for name, found in by_name.items()
        if "refused" in found
    )
    details = "\n<details><summary>What is refused, and with which words</summary>\n\n" + "\n".join(
        refusals
    )
    return (
        text
        + table(["", *map(bold, names)], body)
        + (details + "\n\n</details>" if refusals else "")
    )


def verdict(cell: dict[str, Any], name: str, wrong_above: float) -> str:
    found = {quantity: by_name[name] for quantity, by_name in cell.items() if name in by_name}
    wrong = {
        quantity: r["error"] for quantity, r in found.items() if r.get("error", 0.0) > wrong_above
    }
    refused = [quantity for quantity, r in found.items() if "refused" in r]
    right = [r["error"] for quantity, r in found.items() if "error" in r and quantity not in wrong]
    words = []
    if wrong:
        which = "" if len(wrong) == len(found) else f" ({', '.join(wrong)})"
        words.append(f"**wrong** {max(wrong.values()):.1g}{which}")
    if refused:
        words.append("refuses" + ("" if len(refused) == len(found) else f" {', '.join(refused)}"))
    return "; ".join(words or ([f"{max(right):.0e}"] if right else ["–"]))


def growth(rows: list[dict[str, Any]]) -> str:
    """Time per sample and peak memory by the number of samples."""
    keys = list(dict.fromkeys((r["contender"], r["quantity"]) for r in rows))
    names = [
        "plain step" if name == "plain" else f"**{name}**, {quantity}" for name, quantity in keys
    ]
    body = []
    for n in dict.fromkeys(r["n"] for r in rows):
        found = {(r["contender"], r["quantity"]): r for r in rows if r["n"] == n}
        cells = [
            f"{found[key]['microseconds']:.0f} µs, {found[key]['peak_mb']:.0f} MB"
            for key in keys
            if key in found
        ]
        body.append([f"{n:,}", *cells])
    return "Time per sample and peak extra memory.\n\n" + table(["samples", *names], body)
