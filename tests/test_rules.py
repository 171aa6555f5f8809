"""Annotations as rules, against values that a user gives and that type checkers would accept or refuse."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_taskinfo._rules import rule_of, shown


class Sized(Protocol):
    def size(self) -> int: ...


class OwnNumber:
    def __index__(self) -> int:
        return 3


class NoNumberYet:
    def __index__(self) -> int:
        raise ValueError("not computed")


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


CASES = {  # annotation -> what it takes, what it does not
    int: (
        [3, -1, np.int64(3), torch.tensor(3), OwnNumber()],
        [
            True,
            np.bool_(True),
            3.0,
            "3",
            None,
            [3],
            torch.ones(2),
            torch.tensor(3, device="meta"),
            NoNumberYet(),
        ],
    ),
    float: (
        [0.5, 3, np.float32(0.5), torch.tensor(0.5), OwnNumber()],
        [False, "0.5", None, [0.5], 1j],
    ),
    bool: ([True, False, np.bool_(True)], [0, 1, "no", None]),
    str: (["a", ""], [3, None, b"a", Path("a")]),
    None: ([None], [0, "None"]),
    int | None: ([3, None], [2.5, "None"]),
    Literal["a"] | None: (["a", None], [3]),
    Sequence[int]: (
        [[1], (1, 2), [], range(3), np.arange(3), torch.arange(3)],
        [3, "12", [1.5], (1, "a"), {1: 2}, {1}, Endless()],
    ),
    Sequence[Any]: ([[1, "a"], (None,), torch.ones(2)], [3, {1: 2}]),
    Sequence[str]: ([["a"], (), "ab"], [[3], 3, {"a": 1}]),
    tuple[int, int]: ([(1, 2), [1, 2], torch.Size([1, 2])], [(1,), (1, 2, 3), (1, 2.0), 3]),
    tuple[int, str]: ([(1, "a")], [("a", 1), (1, 2), ("a", "b")]),
    tuple[Any, int]: ([(None, 1)], [(1, None)]),
    tuple[float, ...]: ([(), (1.0, 2)], [("a",), 1.0]),
    Mapping[str, float]: ([{}, {"a": 1}, {"a": 0.5}], [{"a": "b"}, 0.1, [("a", 1)]]),
    Mapping: ([{"a": "b"}], [3]),
    dict[str, int]: ([{"a": 1}], [[1]]),
    Callable[[int], int]: ([len, lambda x: x, nn.Linear], [3, "len"]),
    Iterable[int]: ([[1], iter([1]), {1}, TensorDataset(torch.ones(2))], [3, None]),
    Literal["a", 3]: (["a", "b", 4], [None, 0.5, [1]]),  # which of them is for the function to say
    nn.Module: ([nn.Linear(1, 1)], ["net", nn.Linear]),
    Tensor | Sequence[float]: ([torch.ones(2), [1.0]], [1.0, "a"]),
    str | Callable[[int], int]: (["a", len], [3]),
}


@pytest.mark.parametrize("hint", CASES, ids=str)
def test_takes_what_the_annotation_takes(hint):
    good, bad = CASES[hint]
    rule = rule_of(hint)
    assert [value for value in good if not rule.holds(value)] == []
    assert [value for value in bad if rule.holds(value)] == []


@pytest.mark.parametrize(
    "hint",
    [
        Any,
        object,
        TypeVar("T"),
        Sized,
        int | Any,
        Literal["a"] | Sized,
        Dataset[Any],
        DataLoader[Any],
        "int",
    ],
    ids=str,
)
def test_what_cannot_be_checked_is_not(hint):
    assert rule_of(hint) is None


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | Sequence[int] | None, "a whole number, a sequence of whole numbers or None"),
        (Literal["full", "linear"], "'full' or 'linear'"),
        (Mapping[str, float] | None, "a mapping to numbers or None"),
        (Mapping[str, Any], "a mapping"),
        (nn.Module | str, "a Module or a string"),
        (Sequence[nn.Module], "a sequence of Modules"),
        (Sequence[Any], "a sequence"),
        (tuple[int, int, int], "a sequence of 3 whole numbers"),
        (tuple[Any, Tensor], "a sequence of 2 values"),
        (Sequence[int | None], "a sequence of whole numbers or None"),
        (tuple[int, str], "a sequence of 2 values"),
        (Callable[[], int] | Exception, "a function or an Exception"),
        (ImportError | OSError, "an ImportError or an OSError"),
        (Iterable[int], "iterable"),
        (Sequence[Mapping[str, int]], "a sequence of mappings"),
        (Sequence[Sequence[int]], "a sequence of sequences"),
        (Sequence[Callable[[], int]], "a sequence of functions"),
        (Mapping[str, Iterable[int]], "a mapping to iterables"),
        (Sequence[bool], "a sequence of True and False"),
        (Sequence[str | None], "a sequence of strings or None"),
    ],
)
def test_says_it_in_words(hint, words):
    assert rule_of(hint).words == words


def test_values_are_shown_in_one_short_line():
    assert shown([1, 2]) == "[1, 2]"
    assert shown("a" * 58) == repr("a" * 58)  # 60 characters
    assert shown("a" * 59) == "a str"
    assert shown(np.zeros((2, 3))) == "a ndarray of shape (2, 3)"
    assert shown(nn.Sequential(nn.ReLU())) == "a Sequential"  # which prints several short lines
