"""What every script of the evidence shares: units of work that are kept as they are done, a verdict, a stored result.

A script ``benchmarks/evidence/NAME.py`` registers in its docstring, before its first run, the claim, the settings, the
seeds and the test that decides, and says there what was changed after a look. It ends in ``main(Experiment(...))``:

    python benchmarks/evidence/NAME.py --data-dir DIR --minutes 3      # goes on where the last run stopped
    python benchmarks/evidence/NAME.py --data-dir DIR --store          # runs what is missing, then stores the result
    python benchmarks/evidence/NAME.py --data-dir DIR --from-stored    # the same, from the units that are stored
    python benchmarks/evidence/NAME.py --short                         # a small version of everything, in seconds

One line for each finished unit goes to ``FOLDER/NAME.jsonl``. ``--store`` writes ``evidence_NAME.png`` and
``evidence_NAME.json`` to ``benchmarks/results``, the latter with

    name, claim, verdict (one of ``VERDICTS``), sentence (what ``docs/evidence.md`` quotes word for word), numbers,
    seeds, units (finished), planned, seconds (processor time of all units), data ("files" or "embedded"),
    environment, rows
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_taskinfo._files import write_json

sys.path.append(str(Path(__file__).parents[1]))
from environment import commit, environment

BENCHMARKS = Path(__file__).parents[1]
VERDICTS = ("reproduced", "reproduced in part", "not reproduced, decided", "undecided")
Row = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """One claim and how it is tested.

    Attributes:
        name: That of the script.
        claim: One sentence, with paper and figure.
        units: Settings of every unit by its name, all JSON values; called with True for the short version.
        run: Makes a unit's JSON result of its settings and the data folder, and of nothing else.
        verdict: From rows (settings and result of each finished unit) to ``verdict``, ``sentence`` and ``numbers``.
        figure: Draws the rows into an empty matplotlib figure.
        kept: What of the rows is stored.
        shares: Whether ``run`` takes a third argument: a folder for files that several units need. It may be empty at
            any time, and the results must not depend on that.
    """

    name: str
    claim: str
    units: Callable[[bool], dict[str, Row]]
    run: Callable[..., Row]
    verdict: Callable[[list[Row]], Row]
    figure: Callable[[list[Row], Any], None]
    kept: Callable[[list[Row]], list[Row]] = list
    shares: bool = False

    def shared(self, folder: Path) -> Path:
        """Return the folder of files that several units need."""
        return folder / f"{self.name}_shared"


def read_lines(path: Path) -> dict[str, Row]:
    """Return the finished units of a file by name; a last line that was torn by a crash is no unit."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for number, line in enumerate(lines, start=1):
        try:
            unit = json.loads(line)
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}: line {number} is damaged.") from None
            continue
        found[unit["unit"]] = unit
    return found


def restore(planned: Mapping[str, Row], path: Path, stored: Path) -> None:
    """Write the planned units of a stored result to a new file, so that only the others are run."""
    if path.exists():
        raise ValueError(f"{path} is there already; --from-stored begins a new --folder.")
    result = json.loads(stored.read_text())
    rows = {row["unit"]: row for row in result["rows"]}
    for name, settings in planned.items():
        row = rows.get(name, {})
        plain = json.loads(json.dumps(settings))
        if not row or {key: row[key] for key in plain} != plain:
            continue
        own = {*plain, "unit", "seconds"}
        found = {key: value for key, value in row.items() if key not in own}
        unit = {"unit": name, "settings": plain, "data": result["data"]}
        unit |= {"commit": result["environment"]["commit"], "seconds": row["seconds"]}
        append_line(path, unit | {"found": found})


def append_line(path: Path, unit: Row) -> None:
    """Add a line, on a line of its own even if the last one was torn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])
    with path.open("a") as file:
        file.write(json.dumps(unit, ensure_ascii=False) + "\n")


def cpu_seconds() -> float:
    """Return the processor time of this process and its finished children, which other programs do not lengthen."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_units(
    experiment: Experiment,
    planned: Mapping[str, Row],
    path: Path,
    *,
    data_dir: str | None,
    minutes: float,
) -> list[Row]:
    """Run what is missing until the time is up; return the rows of all that is finished, in the planned order."""
    start = time.monotonic()
    data = "files" if data_dir else "embedded"
    done = read_lines(path)
    folders = [experiment.shared(path.parent)] if experiment.shares else []
    for name, settings in planned.items():
        if name in done:
            before = done[name]["settings"], done[name]["data"]
            if before != (json.loads(json.dumps(settings)), data):
                raise ValueError(
                    f"{path}: the unit {name!r} was run with {before}; take a new --folder."
                )
            continue
        if time.monotonic() - start > 60 * minutes:
            break
        unit_start = cpu_seconds()
        found = experiment.run(settings, data_dir, *folders)
        if any(
            found.get(key, value) != value for key, value in settings.items()
        ):  # forgotten, and never restored
            raise ValueError(f"results must not be named like settings, got {sorted(found)}.")
        unit = {"unit": name, "settings": settings, "data": data, "commit": commit()}
        unit |= {"seconds": round(cpu_seconds() - unit_start, 2), "found": found}
        append_line(path, unit)
        done[name] = json.loads(json.dumps(unit))
        print(f"{name}: {unit['seconds']:.1f} s", flush=True)
    finished = [done[name] for name in planned if name in done]
    print(f"{len(finished)} of {len(planned)} units", flush=True)
    return [
        {**unit["settings"], **unit["found"], "unit": unit["unit"], "seconds": unit["seconds"]}
        for unit in finished
    ]


def judged(experiment: Experiment, rows: list[Row]) -> Row:
    """Return the verdict on the rows, which must be one of ``VERDICTS``."""
    found = experiment.verdict(rows)
    if found["verdict"] not in VERDICTS:
        raise ValueError(f"`verdict` must be one of {VERDICTS}, got {found['verdict']!r}.")
    return {key: found[key] for key in ("verdict", "sentence", "numbers")}


def draw(experiment: Experiment, rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    experiment.figure(rows, figure)
    figure.savefig(path, dpi=110)


def main(experiment: Experiment, arguments: list[str] | None = None) -> None:
    """The command line of every script."""
    parser = argparse.ArgumentParser(description=experiment.claim)
    parser.add_argument(
        "--data-dir", help="folder of mnist.npz, …; without it the package's own digits"
    )
    parser.add_argument(
        "--short", action="store_true", help="a small version of everything, from the start"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="start no unit after this time")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/evidence"), help="keeps finished units"
    )
    parser.add_argument(
        "--store", action="store_true", help="write benchmarks/results/evidence_NAME"
    )
    parser.add_argument(
        "--from-stored", action="store_true", help="take finished units from benchmarks/results"
    )
    args = parser.parse_args(arguments)
    if args.short and (args.store or args.from_stored):
        parser.error("--short has nothing to do with benchmarks/results.")
    torch.set_num_threads(1)
    folder = args.folder / "short" if args.short else args.folder
    path = folder / f"{experiment.name}.jsonl"
    if args.short:
        path.unlink(missing_ok=True)
        shutil.rmtree(experiment.shared(folder), ignore_errors=True)
    planned = experiment.units(args.short)
    stem = f"evidence_{experiment.name}"
    if args.from_stored:
        restore(planned, path, BENCHMARKS / "results" / f"{stem}.json")
    rows = run_units(experiment, planned, path, data_dir=args.data_dir, minutes=args.minutes)
    if not rows:
        return
    verdict = judged(experiment, rows)
    print(f"{verdict['verdict']}: {verdict['sentence']}", flush=True)
    if args.short:
        draw(experiment, rows, folder / f"{experiment.name}.png")
    if args.store:
        result = {"name": experiment.name, "claim": experiment.claim, **verdict}
        result["seeds"] = sorted({row["seed"] for row in rows if "seed" in row})
        result["units"] = len(rows)
        result["planned"] = len(planned)
        result["seconds"] = round(sum(row["seconds"] for row in rows), 1)
        result["data"] = "files" if args.data_dir else "embedded"
        result["environment"] = environment()
        result["rows"] = experiment.kept(rows)
        write_json(BENCHMARKS / "results" / f"{stem}.json", result)
        draw(experiment, rows, BENCHMARKS / "results" / f"{stem}.png")
