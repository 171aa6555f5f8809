"""Write the list of public modules into ``api.md``, and the stored results with a summary into ``benchmarks.md``."""

import ast
import json
import math
from collections.abc import Iterator
from pathlib import Path
from re import Match
from re import compile as pattern
from typing import Any

PACKAGE = Path(__file__).parents[1] / "lightning_taskinfo"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MARKER = "<!-- modules -->"
RESULT = pattern(r"<!-- results: (\S+) -->")
SUMMARY = "<!-- summary -->"
HEADING = pattern(r"(?m)^#+ ")
LONG = 20  # lines of a stored table that are shown at once; longer ones can be unfolded


def public_modules(folder: Path = PACKAGE) -> Iterator[str]:
    """Yield the dotted names to document: a package that has an ``__all__`` speaks for its modules."""
    for path in sorted(folder.iterdir()):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if path.name.startswith("_"):
            continue
        if path.suffix == ".py":
            yield name
        elif (path / "__init__.py").is_file():
            if _has_all(path / "__init__.py"):
                yield name
            else:
                yield from public_modules(path)


def _has_all(path: Path) -> bool:
    targets = [
        t
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign)
        for t in node.targets
    ]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace the markers (an mkdocs event)."""
    if MARKER in markdown:
        markdown = markdown.replace(MARKER, "\n".join(map(_section, public_modules())))
    if SUMMARY in markdown:
        markdown = markdown.replace(SUMMARY, table(summary()))
    return RESULT.sub(_stored, markdown)


def _section(name: str) -> str:
    options = "    options: {show_root_heading: false, show_root_toc_entry: false}"
    return f"## {name.removeprefix('lightning_taskinfo.')}\n\n::: {name}\n{options}\n"


def _stored(match: Match[str]) -> str:
    """Return a stored table as Markdown; headings go below those of the page."""
    path = RESULTS / match[1]
    stored = path.read_text()
    text = HEADING.sub("### ", stored) if path.suffix == ".md" else table(rows(json.loads(stored)))
    if len(text.splitlines()) <= LONG:
        return text
    return f'<details markdown="1"><summary>Show the table</summary>\n\n{text}\n\n</details>'


def summary() -> list[dict[str, str]]:
    """Return one row for each question, with the answer in numbers of the stored results."""
    answers = {
        "[What does a callback cost?](#callbacks)": _callbacks_summary,
        "[What does a penalty cost?](#regularisers)": _regularizers_summary,
        "[Which number shows memorisation?](#what-shows-memorisation)": _memorised_summary,
        "[Does the training loss find wrong labels?](#wrong-labels)": _wrong_labels_summary,
        "[Do penalties help transfer?](evidence.md)": _transfer_summary,
        "[Is the sign of linear transfer predicted?](#feature-overlap)": _overlap_summary,
        "[How good are certificates?](#certificates)": _certificate_summary,
        "[Does theory match simulated transfer?](#deep-linear-networks)": _phase_summary,
        "[Do task distances behave as they should?](#distances-between-tasks)": _distance_summary,
        "[Is γ a good measure of minima?](#local-minima)": _minima_summary,
    }
    return [{"question": question, "answer": answer()} for question, answer in answers.items()]


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _callbacks_summary() -> str:
    networks = _read("callbacks.json")["results"].values()
    parts = []
    for name in ("FisherTrace()", "InformationInWeights()", "HardSamples()"):
        shares = [100 * network["ratios"][name]["own"] for network in networks]
        parts.append(f"`{name}`: {min(shares):.1f} to {max(shares):.1f} % of an epoch")
    return "; ".join(parts)


def _regularizers_summary() -> str:
    stored = rows(_read("regularizers.json"))
    parts = []
    for penalty in dict.fromkeys(row["penalty"] for row in stored):
        ratios = [row["step over plain step"] for row in stored if row["penalty"] == penalty]
        parts.append(
            f"{penalty.replace('_', ' ')}: {min(ratios):.2g} to {max(ratios):.2g} times a plain step"
        )
    return "; ".join(parts)


def _memorised_summary() -> str:
    stored = _read("memorised_information.json")
    good = [
        name.replace("_", " ")
        for name, found in stored["verdicts"].items()
        if found["ordered"] and found["stable"]
    ]
    return f"{' and '.join(good)}, of {len(stored['verdicts'])} candidates"


def _wrong_labels_summary() -> str:
    stored = _read("wrong_labels.json")
    areas = [float(row["area, loss"].split()[0]) for row in stored["rows"]]
    shares = [float(row["precision, loss"].split()[0]) for row in stored["rows"]]
    return (
        f"mean area under the ROC curve {sum(areas) / len(areas):.2f}; "
        f"{100 * sum(shares) / len(shares):.0f} % of the first tenth are wrong"
    )


def _transfer_summary() -> str:
    stored = _read("evidence_semi_supervised.json")
    cells = stored["numbers"]["gains"]
    helped = sum(cell["gain"][1] > 0 and cell["p_holm"] < 0.05 for cell in cells.values())
    parts = [f"{stored['verdict']}: {helped} of {len(cells)} comparisons show a gain"]
    for method in ("lautum", "mutual_information"):
        gain, low, high = cells[f"paper network, 50 labels, {method}"]["gain"]
        name = method.replace("_", " ")
        parts.append(f"{name} with 50 labels: {gain:+.1f} [{low:+.1f}, {high:+.1f}] points")
    return "; ".join(parts)


def _overlap_summary() -> str:
    confusion = _read("feature_overlap.json")["confusion"]
    right = sum(confusion[f"measured {word}, predicted {word}"] for word in ("helps", "hurts"))
    wrong = (
        confusion["measured helps, predicted hurts"] + confusion["measured hurts, predicted helps"]
    )
    return f"right in {right} of {right + wrong} decided cases"


def _certificate_summary() -> str:
    bounds: dict[str, float] = {}
    for row in _read("certificate.json")["rows"]:
        name = (
            "prior at the initialisation"
            if "initialisation" in row["prior_origin"]
            else "prior trained on half"
        )
        bounds[name] = min(row["bound"], bounds.get(name, 1.0))
    return "error on MNIST in two classes at most " + "; ".join(
        f"{math.ceil(1000 * bound) / 10:.1f} % ({name})" for name, bound in bounds.items()
    )


def _phase_summary() -> str:
    cells = [
        found
        for name, found in _read("phase_diagram_400.json")["summary"].items()
        if name.endswith(", z")
    ]
    beyond, total = (sum(found[key] for found in cells) for key in ("cells_beyond_3", "cells"))
    return f"{beyond} of {total} cells differ by more than 3 standard errors"


def _distance_summary() -> str:
    claims = _read("task_distance.json")["rows"]
    return f"{sum(row['holds'] for row in claims)} of {len(claims)} claims hold"


def _minima_summary() -> str:
    found = _read("local_minima.json")["correlations"].items()
    parts = [f"{name.replace('_', ' ')} {row['gamma']['spearman']:+.2f}" for name, row in found]
    return f"rank correlation with the test error: {', '.join(parts)}"


def rows(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a stored result: its own, or those of its callbacks, its checks or its regularisers."""
    if "rows" in stored:
        return stored["rows"]
    if "results" in stored:
        return [
            {
                "network": network,
                "watched by": name,
                "epoch over plain epoch": ratio["wall"],
                "range": " to ".join(map(_shown, ratio["wall_range"])),
                "share of the callbacks' own methods": ratio["own"],
                "start": ratio["start"],
                "step over plain step": ratio.get("by_steps", {}).get("of_means", ""),
            }
            for network, result in stored["results"].items()
            for name, ratio in result["ratios"].items()
        ]
    if "summary" in stored:
        shown = ("cells", "cells_beyond_3", "largest")
        return [
            {"compared": name} | {key: row[key] for key in shown}
            for name, row in stored["summary"].items()
        ]
    return [
        {"penalty": penalty, "network": network, "step over plain step": values[penalty]["ratio"]}
        for penalty, networks in stored.items()
        for network, values in (networks.items() if isinstance(networks, dict) else ())
        if isinstance(values, dict) and "ratio" in values.get(penalty, {})
    ]


def table(found: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table, numbers with three digits; what a row does not have stays empty.

    >>> print(table([{"network": "mlp", "ratio": 1.23456}, {"network": "cnn", "weights": 7}]))
    | network | ratio | weights |
    | --- | --- | --- |
    | mlp | 1.23 |  |
    | cnn |  | 7 |
    """
    columns = list(dict.fromkeys(column for row in found for column in row))
    cells = [[_shown(row.get(column, "")) for column in columns] for row in found]
    return "\n".join(
        f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *cells]
    )


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
