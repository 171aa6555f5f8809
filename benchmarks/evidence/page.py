"""Does ``docs/evidence.md`` say what the stored results say, and does every script still run?

    python benchmarks/evidence/page.py            # compares the page with the stored results
    python benchmarks/evidence/page.py --write    # copies them into the page
    python benchmarks/evidence/page.py --short    # compares, and runs the short version of every script (make evidence)

Every claim has a section: a line with the verdict, what it is based on (seeds, time, commit) and the command, and below
it what was found, point by point. A section whose command is a script of this folder quotes its stored result: the
points are its sentence, cut at the semicolons. Points that compare methods with the same number of labels become a
table, with a column for each number of labels. The claim, which is the heading, is written by hand. A script that was
registered and not run yet has a section by hand, which must say *undecided*. The table at the top lists all claims with
their verdicts.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

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


class Section(NamedTuple):
    """What the page says about a claim."""

    claim: str
    verdict: str
    based_on: str
    command: str
    found: str

    @property
    def script(self) -> str | None:
        """The script that the command names, if it is one of this folder."""
        _, found, rest = self.command.partition("benchmarks/evidence/")
        return rest.partition(".py")[0] if found else None

    def __str__(self) -> str:
        head = " · ".join((f"**{self.verdict}**", self.based_on, f"`{self.command}`"))
        return f"## {self.claim}\n\n{head}\n\n{self.found}\n"


SECTION = re.compile(r"## (.+)\n\n\*\*(.+)\*\* · (.+) · `(.+)`\n\n((?:[-|].+\n+)+)")
COMPARISON = re.compile(r"(?:(?P<network>.+), )?(?P<labels>\d+ labels): (?P<methods>.+)")
COMMA = re.compile(r", (?![^\[(]*[\])])")  # not inside of brackets
METHOD = re.compile(r"(?P<name>.+?) (?P<figures>[−+\d].+)")


def parts_of(page: str) -> tuple[str, list[str]]:
    """Return what is before the sections, and the sections."""
    head, *sections = re.split(r"(?m)^(?=## )", page)
    return head, sections


def section_of(text: str) -> Section | None:
    """Return a section of the page; None where it has another form."""
    match = SECTION.fullmatch(text.rstrip("\n") + "\n")
    if match is None:
        return None
    *words, found = match.groups()
    return Section(*words, found.rstrip("\n"))


def in_markdown(points: Iterable[str]) -> str:
    """Return points as a list; runs of comparisons as tables."""
    blocks = []
    for is_comparison, run in groupby(points, lambda point: bool(COMPARISON.fullmatch(point))):
        if is_comparison:
            blocks += comparison_tables(run)
        else:
            blocks.append("\n".join(f"- {point}" for point in run))
    return "\n\n".join(blocks)


def comparison_tables(points: Iterable[str]) -> list[str]:
    """Return a table for each network: a row for each method, a column for each number of labels.

    The first point of a network names it: ``small network, 50 labels: plain 70 %, lautum +1 points``.
    """
    tables: list[tuple[str, dict[str, dict[str, str]]]] = []
    for point in points:
        network, labels, methods = COMPARISON.fullmatch(point).groups()
        if network or not tables:
            tables.append((network or "method", {}))
        _, columns = tables[-1]
        columns[labels] = dict(METHOD.fullmatch(part).groups() for part in COMMA.split(methods))
    return [comparison_table(corner, columns) for corner, columns in tables]


def comparison_table(corner: str, columns: dict[str, dict[str, str]]) -> str:
    """Return a Markdown table of columns, which hold a cell for each method."""
    methods = dict.fromkeys(method for column in columns.values() for method in column)
    lines = [[corner, *columns], ["---"] * (1 + len(columns))]
    for method in methods:
        lines.append([method, *(column.get(method, "") for column in columns.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(sections: list[Section]) -> str:
    """Return the table of all claims with their verdicts."""
    rows = [f"| {section.claim} | **{section.verdict}** |" for section in sections]
    return "\n".join(["| Claim | Verdict |", "|---|---|", *rows]) + "\n"


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


def wanted(section: Section, stored: dict[str, Any]) -> Section:
    """Return the section as the stored result has it: only its claim and its command stay."""
    found = in_markdown(stored["sentence"].split("; "))
    return section._replace(verdict=stored["verdict"], based_on=basis(stored), found=found)


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return the stored results by the names of their scripts."""
    paths = sorted(folder.glob("evidence_*.json"))
    return {path.stem.removeprefix("evidence_"): json.loads(path.read_text()) for path in paths}


def problems(page: str, results: dict[str, dict[str, Any]], scripts: list[str]) -> list[str]:
    """Return what is wrong with the page, one sentence each."""
    found = []
    sections = []
    head, texts = parts_of(page)
    for text in texts:
        section = section_of(text)
        if section is None:
            claim = text.partition("\n")[0].removeprefix("## ")
            found.append(
                f"{claim}: a section is a line of verdict, basis and command, and points or tables."
            )
        else:
            sections.append(section)
    named = [section.script for section in sections]
    for name in scripts:
        if named.count(name) != 1:
            found.append(f"{name}: the page has {named.count(name)} sections in place of one.")
    for section in sections:
        name = section.script
        if section.verdict not in VERDICTS:
            found.append(f"{section.claim}: the verdict must be one of {', '.join(VERDICTS)}.")
        elif name in results and section != wanted(section, results[name]):
            found.append(f"{section.claim}: the section differs from evidence_{name}.json.")
        elif name in scripts and name not in results and section.verdict != "undecided":
            found.append(f"{section.claim}: nothing is stored for {name}, so that it is undecided.")
    if not found and not head.endswith(f"\n{table_of(sections)}\n"):
        found.append("The table must have the claims and verdicts of the sections.")
    return found


def written(page: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the page with the stored results in its sections, and a table of their verdicts."""
    head, texts = parts_of(page)
    sections = []
    for text in texts:
        section = section_of(text)
        if section is None:
            raise ValueError(f"A section of the page has another form: {text[:80]!r}.")
        stored = results.get(section.script or "")
        sections.append(wanted(section, stored) if stored else section)
    introduction, _, _ = head.partition("| Claim |")
    body = "\n".join(map(str, sections))
    return f"{introduction}{table_of(sections)}\n{body}"


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
