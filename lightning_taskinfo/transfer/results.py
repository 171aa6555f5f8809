"""What a transfer found: one result for each method, number of labels and seed."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Key = tuple[str, int, int]


@dataclass(frozen=True)
class Result:
    """What came out for one method, number of labels and seed, in plain values.

    Attributes:
        method: What was trained; ``"scratch"`` is the baseline.
        labels: Number of target labels.
        seed: The seed.
        test: Numbers on the target test set by name: ``accuracy``, and ``loss`` in nats, or another
            metric.
        source: The same on the source's test set.
        curves: One dict per epoch, with its ``stage``.
        information: Information in the weights, whole and by layer, before and after fine-tuning,
            and added by it.
        fisher_trace: Trace of the Fisher information, in the same way.
        overlap: Share of the target labels that the features of each layer miss.
        certificate: Bounds on the true error, where they were asked for.
        seconds: Seconds by stage.
    """

    method: str
    labels: int
    seed: int
    test: dict[str, float]
    source: dict[str, float] | None = None
    curves: list[dict[str, Any]] = field(default_factory=list)
    information: dict[str, Any] | None = None
    fisher_trace: dict[str, Any] | None = None
    overlap: dict[str, Any] | None = None
    certificate: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise ValueError(f"`method` must be a name, got {self.method!r}.")
        for name, least in (("labels", 1), ("seed", 0)):
            value = getattr(self, name)
            if not _is(value, int) or value < least:
                raise ValueError(
                    f"`{name}` must be a whole number of at least {least}, got {value!r} in {self}."
                )
        for name, numbers in {"test": self.test, "source": self.source or {"loss": 0.0}}.items():
            values = numbers.values() if isinstance(numbers, dict) else ()
            if not values or not all(_is(value, int | float) for value in values):
                raise ValueError(f"`{name}` must hold numbers by name, got {numbers!r} in {self}.")
            if not 0 <= numbers.get("accuracy", 0) <= 1:
                raise ValueError(
                    f"`{name}` must hold an accuracy between 0 and 1, got {numbers['accuracy']} in {self}."
                )

    @property
    def key(self) -> Key:
        """What it is a result of: method, number of labels, seed."""
        return self.method, self.labels, self.seed

    def __str__(self) -> str:
        return f"({self.method}, {self.labels} labels, seed {self.seed})"


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def plain(value: Any, argument: str) -> Any:
    """Return a copy of ``value`` in JSON's types alone, as it would be read from a file.

    Raises:
        ValueError: If it holds anything else, such as a tensor.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{argument}` must hold plain JSON-like values: {error}.") from error


def checked_results(results: Iterable[Result | Mapping[str, Any]]) -> tuple[Result, ...]:
    """Return plain copies of the results.

    Raises:
        ValueError: If there is none, two have the same key, or one has a key too many, too few
            or of a wrong kind.
    """
    rows = plain([asdict(r) if isinstance(r, Result) else r for r in results], "results")
    try:
        found = tuple(Result(**row) for row in rows)
    except TypeError as error:
        raise ValueError(f"`results` must hold results, or dicts like them: {error}.") from error
    if not found:
        raise ValueError("`results` must hold at least one result, got none.")
    seen: set[Key] = set()
    for result in found:
        if result.key in seen:
            raise ValueError(
                f"`results` must hold one result per method, number of labels and seed, got two {result}."
            )
        seen.add(result.key)
        if result.test.keys() != found[0].test.keys():
            raise ValueError(
                f"`test` must hold the same numbers in all results, got {', '.join(result.test)} in {result} and "
                f"{', '.join(found[0].test)} in {found[0]}."
            )
    return found


def without_timings(results: Iterable[Result]) -> dict[Key, str]:
    """Return each result without its timings by its key, as text: NaN equals NaN there, and order plays no part."""
    return {r.key: json.dumps({**asdict(r), "seconds": None}, sort_keys=True) for r in results}
