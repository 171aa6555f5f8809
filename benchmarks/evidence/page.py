"""Does ``docs/evidence.md`` say what the stored results say, and does every script still run?

    python benchmarks/evidence/page.py            # compares the page with the stored results
    python benchmarks/evidence/page.py --write    # copies them into the rows of the page
    python benchmarks/evidence/page.py --short    # compares, and runs the short version of every script (make evidence)

A row of the page has five cells: the claim, what was found, the verdict, what it is based on (seeds, time, commit), and
the command. A row whose command is a script of this folder quotes its stored result: the second cell is the sentence,
the third and fourth come from the same file. The claim is written by hand. A script that was registered and not run yet
has a row by hand, which must say *undecided*.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from units import BENCHMARKS, VERDICTS

SCRIPTS = Path(__file__).parent
RESULTS = BENCHMARKS / "results"
PAGE = BENCHMARKS.parent / "docs" / "evidence.md"
MOST_SECONDS = 600
IMPORT = r"^from units import .*\bExperiment\b"


def script_names(folder: Path = SCRIPTS) -> list[str]:
    """Return the names of the scripts with an experiment."""
    sources = {path.stem: path.read_text() for path in folder.glob("*.py")}
    return sorted(name for name, text in sources.items() if re.search(IMPORT, text, re.MULTILINE))


def cells_of(line: str) -> list[str]:
    """Return the cells of a row of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def rows_of(page: str) -> list[str]:
    """Return the lines of the page's table below its head."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    return lines[2:]


def script_of(row: str) -> str | None:
    """Return the script that a row's command names, if it is one of this folder."""
    _, found, rest = cells_of(row)[-1].partition("benchmarks/evidence/")
    return rest.partition(".py")[0] if found else None


def basis(stored: dict[str, Any]) -> str:
    """Return seeds, time and commit of a stored result in words."""
    seeds = stored["seeds"]
    said = ""
    if seeds:
        run = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
        numbers = f"{seeds[0]} to {seeds[-1]}" if run else ", ".join(map(str, seeds))
        said = f"seeds {numbers}" if len(seeds) > 1 else f"seed {numbers}"
    seconds = stored["seconds"]
    taken = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    parts = [said, f"{stored['units']} of {stored['planned']} units", taken]
    return ", ".join(filter(None, [*parts, f"`{stored['environment']['commit']}`"]))


def wanted_row(row: str, stored: dict[str, Any]) -> str:
    """Return the row as the stored result has it: only its claim and its command stay."""
    claim, *_, command = cells_of(row)
    cells = [claim, stored["sentence"], f"**{stored['verdict']}**", basis(stored), command]
    return f"| {' | '.join(cells)} |"


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the stored results by the names of their scripts."""
    paths = sorted(folder.glob("evidence_*.json"))
    return {path.stem.removeprefix("evidence_"): json.loads(path.read_text()) for path in paths}


def problems(page: str, results: dict[str, dict[str, Any]], scripts: list[str]) -> list[str]:
    """Return what is wrong with the page, one sentence each."""
    found = []
    rows = rows_of(page)
    named = [script_of(row) for row in rows]
    for name in scripts:
        if named.count(name) != 1:
            found.append(f"{name}: the page has {named.count(name)} rows in place of one.")
    for row, name in zip(rows, named, strict=True):
        claim, *others = cells_of(row)
        if len(others) != 4 or not all(others):
            found.append(f"{claim}: there must be five cells, none empty.")
        elif not others[1].startswith(tuple(f"**{verdict}**" for verdict in VERDICTS)):
            found.append(f"{claim}: the verdict must be one of {', '.join(VERDICTS)}.")
        elif name in results and row != wanted_row(row, results[name]):
            found.append(f"{claim}: the row differs from evidence_{name}.json.")
        elif name in scripts and name not in results and "**undecided**" not in others[1]:
            found.append(f"{claim}: nothing is stored for {name}, so that it is undecided.")
    return found


def written(page: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the page with the stored results in its rows."""
    for row in rows_of(page):
        name = script_of(row)
        if name in results:
            page = page.replace(row, wanted_row(row, results[name]))
    return page


def run_short() -> float:
    """Run the short version of every script, and return the seconds that it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name in script_names():
            begin = time.monotonic()
            command = [sys.executable, SCRIPTS / f"{name}.py", "--short", "--folder", folder]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="copy the stored results to the page")
    parser.add_argument("--short", action="store_true", help="run the short version of each script")
    args = parser.parse_args()
    results = read_results()
    if args.write:
        PAGE.write_text(written(PAGE.read_text(), results))
    found = problems(PAGE.read_text(), results, script_names())
    if found:
        sys.exit("\n".join(found))
    print(f"The page agrees with {len(results)} stored results.")
    if args.short:
        seconds = run_short()
        print(f"All short versions took {seconds:.0f} s.")
        if seconds > MOST_SECONDS:
            sys.exit(f"They must take at most {MOST_SECONDS} s.")


if __name__ == "__main__":
    main()
