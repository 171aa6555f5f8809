"""Which target samples are labelled, which validate: seeded, stratified, nested, the same on every machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of the target's training split.

    Attributes:
        labeled: Rows whose labels may be trained on.
        validation: Rows whose labels are only looked at.
        unlabeled: All rows but ``validation``: inputs without labels, those of ``labeled`` among them.
    """

    labeled: Rows
    validation: Rows
    unlabeled: Rows


def split_target(
    y: Rows, num_classes: int, *, labels: int | Sequence[int], validation: int | Sequence[int], seed: int
) -> Split:
    """Choose validation and labelled rows, each class in turn, without regard to the number of the other.

    The first 50 labels are among the first 100: more labels are the same ones and others. The validation rows do
    not depend on the number of labels; rows that are given for the labels are left out of them.

    Args:
        y: Classes of the target's training split.
        num_classes: Number of classes.
        labels: Number of labelled samples, or their rows.
        validation: Number of validation samples, or their rows; 0 for none.
        seed: Seed of the choice.

    Raises:
        ValueError: If there are not enough samples, a class would stay without a label, there is only one class, or
            given rows are out of range, repeated or overlap.

    Example:
        >>> y = np.array([0, 1] * 10)
        >>> split = split_target(y, 2, labels=4, validation=6, seed=0)
        >>> y[split.labeled].tolist().count(0), len(split.validation), len(split.unlabeled)
        (2, 6, 14)
    """
    rng = np.random.default_rng(seed)
    order = by_turns(y, num_classes, rng)
    kept, labeled = _given("validation", validation, len(y)), _given("labels", labels, len(y))
    if kept is None:
        assert isinstance(validation, int)
        kept = _first("validation", order if labeled is None else _without(order, labeled, y), validation)
    if labeled is None:
        assert isinstance(labels, int)
        labeled = _first("labels", _without(order, kept, y), labels, f" beside {len(kept)} for validation")
    _check_classes(y, labeled, num_classes, given=not isinstance(labels, int))
    if both := np.intersect1d(labeled, kept).tolist():
        raise ValueError(f"`labels` and `validation` must not share rows, got {both[:5]} in both.")
    return Split(labeled, kept, np.setdiff1d(np.arange(len(y)), kept))


def count_or_rows(argument: str, value: Any) -> int | Sequence[int]:
    """Return a number of samples, or rows, as they are kept.

    Raises:
        ValueError: If it is a negative number.
    """
    if isinstance(value, int | np.integer):
        if value < 0:
            raise ValueError(f"`{argument}` must not be negative, got {value}.")
        return int(value)
    rows: Sequence[int] = value
    return rows


def by_turns(y: Rows, num_classes: int, rng: np.random.Generator) -> Rows:
    """All rows, shuffled so that every class appears once before any appears twice."""
    shuffled = rng.permutation(len(y))
    ranks = rng.permutation(num_classes)[y[shuffled]]
    return shuffled[np.lexsort((ranks, _turn(y[shuffled])))]


def _turn(y: Rows) -> Rows:
    """How many of the same class come before each."""
    order = np.argsort(y, kind="stable")
    _, starts, counts = np.unique(y[order], return_index=True, return_counts=True)
    turn = np.empty_like(y)
    turn[order] = np.arange(len(y)) - np.repeat(starts, counts)
    return turn


def _without(order: Rows, taken: Rows, y: Rows) -> Rows:
    """The rows that are not taken, in turns of classes again after the gaps that those leave."""
    rest = order[~np.isin(order, taken)]
    return rest[np.argsort(_turn(y[rest]), kind="stable")]


def _first(argument: str, order: Rows, count: int, beside: str = "") -> Rows:
    if count < 0 or count > len(order):
        raise ValueError(f"`{argument}` must be between 0 and the {len(order)} samples there are{beside}, got {count}.")
    return order[:count]


def _given(argument: str, rows: int | Sequence[int], length: int) -> Rows | None:
    if isinstance(rows, int):
        return None
    array = np.asarray(rows, dtype=np.int64)
    if array.size and (array.min() < 0 or array.max() >= length):
        raise ValueError(f"`{argument}` must hold rows from 0 to {length - 1}, got {array.min()} to {array.max()}.")
    if len(np.unique(array)) != len(array):
        raise ValueError(f"`{argument}` must not repeat a row, got {len(array) - len(np.unique(array))} repetitions.")
    return array


def _check_classes(y: Rows, labeled: Rows, num_classes: int, *, given: bool) -> None:
    present = np.unique(y)
    if len(present) < 2:
        raise ValueError(f"`target` must have samples of at least two classes, got class {present.tolist()} only.")
    if absent := sorted(set(range(num_classes)) - set(present.tolist())):
        raise ValueError(
            f"`target` must have training samples of every one of its {num_classes} classes, got none of class "
            f"{', '.join(map(str, absent[:10]))}; classes count from 0."
        )
    if missing := sorted(set(range(num_classes)) - set(y[labeled].tolist())):
        hint = (
            " A list of `labels` names rows; numbers of labels to compare go to `transfer(labels=[…])`."
            if given
            else ""
        )
        raise ValueError(
            f"`labels` must give every one of the {num_classes} classes at least one label, got {len(labeled)} labels "
            f"and none for class {', '.join(map(str, missing[:10]))}.{hint}"
        )
