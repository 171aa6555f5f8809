"""What a result of a transfer experiment must look like: one plain dict for each method, number of labels and seed."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

OPTIONAL: dict[str, Any] = {  # what a result may leave out, and what then stands there
    "validation": None,
    "source": None,
    "curves": [],
    "information": None,
    "fisher_trace": None,
    "overlap": None,
    "epochs": {},
    "seconds": {},
}
REQUIRED = ("method", "labels", "seed", "test")
Cell = tuple[str, int, int]


def plain(value: Any, argument: str) -> Any:
    """Return a copy of ``value`` in JSON's types alone, as it would be read from a file.

    Raises:
        ValueError: If it holds anything else, such as a tensor.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{argument}` must hold plain JSON-like values: {error}.") from error


def checked_results(results: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return plain copies of the results, with every key there.

    Raises:
        ValueError: If there is none, two are of the same cell, or one has a key too many, too few or of a wrong kind.
    """
    rows = tuple(_checked(row) for row in plain(list(results), "results"))
    if not rows:
        raise ValueError("`results` must hold at least one result, got none.")
    seen: set[Cell] = set()
    for row in rows:
        if cell_of(row) in seen:
            raise ValueError(
                f"`results` must hold one result a method, number of labels and seed, got two {_name(row)}."
            )
        seen.add(cell_of(row))
        if row["test"].keys() != rows[0]["test"].keys():
            raise ValueError(
                f"`test` must hold the same numbers in all results, got {', '.join(row['test'])} in {_name(row)} and "
                f"{', '.join(rows[0]['test'])} in {_name(rows[0])}."
            )
    return rows


def cell_of(row: Mapping[str, Any]) -> Cell:
    """Return what a result is of: method, number of labels, seed."""
    return row["method"], row["labels"], row["seed"]


def without_timings(results: Iterable[Mapping[str, Any]]) -> dict[Cell, str]:
    """Return each result without its timings by its cell, as text: NaN equals NaN there, and order plays no part."""
    return {
        cell_of(row): json.dumps({k: v for k, v in row.items() if k != "seconds"}, sort_keys=True) for row in results
    }


def _checked(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"`results` must hold dicts, got {row!r}.")
    if missing := [key for key in REQUIRED if key not in row]:
        raise ValueError(f"`results` must have the keys {list(REQUIRED)}, got none for {missing[0]!r}.")
    if unknown := [key for key in row if key not in REQUIRED and key not in OPTIONAL]:
        raise ValueError(f"`results` may have the keys {[*REQUIRED, *OPTIONAL]}, got {unknown[0]!r}.")
    if not isinstance(row["method"], str) or not row["method"]:
        raise ValueError(f"`method` must be a name, got {row['method']!r}.")
    for key, least in (("labels", 1), ("seed", 0)):
        if not _is(row[key], int) or row[key] < least:
            raise ValueError(f"`{key}` must be a whole number of at least {least}, got {row[key]!r} in {_name(row)}.")
    row |= {key: plain(value, key) for key, value in OPTIONAL.items() if row.get(key) is None}
    for part in ("test", "validation", "source"):
        if part == "test" or row[part] is not None:
            _check_risk(row, part)
    for point in row["curves"]:
        if not isinstance(point, dict) or not {"stage", "epoch"} <= point.keys():
            raise ValueError(f"`curves` must have a stage and an epoch at each point, got {point} in {_name(row)}.")
    _check_measurements(row)
    return row


def _check_risk(row: dict[str, Any], part: str) -> None:
    values = row[part] if isinstance(row[part], dict) else {}
    if not values or not all(_is(value, (int, float)) for value in values.values()):
        raise ValueError(f"`{part}` must hold numbers by name, got {row[part]!r} in {_name(row)}.")
    if not 0 <= values.get("accuracy", 0) <= 1:
        raise ValueError(f"`{part}` must hold an accuracy between 0 and 1, got {values['accuracy']} in {_name(row)}.")


def _check_measurements(row: dict[str, Any]) -> None:
    for part in ("information", "fisher_trace"):
        for moment, values in (row[part] or {}).items():
            if values is not None and not (isinstance(values, dict) and {"total", "layers"} <= values.keys()):
                raise ValueError(f"`{part}` must hold total and layers for {moment!r}, got {values!r} in {_name(row)}.")
    overlap = row["overlap"]
    if overlap and len({len(overlap.get(key, ())) for key in ("layers", "outside", "standard_error")}) != 1:
        raise ValueError(
            f"`overlap` must hold as many shares and standard errors as layers, got {overlap} in {_name(row)}."
        )


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _name(row: Mapping[str, Any]) -> str:
    return f"({row['method']}, {row['labels']} labels, seed {row['seed']})"
