"""Splits are stratified, nested, and the same on every machine."""

import numpy as np
import pytest

from lightning_taskinfo.transfer.sampling import count_or_rows, split_target

Y = np.repeat(np.arange(5), [40, 30, 20, 10, 10])


def split(labels=10, validation=20, seed=0, y=Y, num_classes=5):
    return split_target(y, num_classes, labels=labels, validation=validation, seed=seed)


@pytest.mark.parametrize("labels", [5, 10, 25])
def test_every_class_has_its_share_of_the_labels(labels):
    assert np.bincount(Y[split(labels).labeled]).tolist() == [labels // 5] * 5


def test_a_remainder_goes_to_some_classes_once():
    counts = np.bincount(Y[split(12).labeled])
    assert sorted(counts.tolist()) == [2, 2, 2, 3, 3]


def test_more_labels_are_the_same_and_others():
    few, many = split(10).labeled.tolist(), split(20).labeled.tolist()
    assert many[:10] == few


def test_parts_do_not_overlap_and_the_unlabeled_are_all_but_the_validation():
    parts = split()
    assert not set(parts.labeled) & set(parts.validation)
    assert set(parts.unlabeled) | set(parts.validation) == set(range(len(Y)))
    assert not set(parts.unlabeled) & set(parts.validation)


def test_validation_does_not_depend_on_the_number_of_labels():
    assert split(5).validation.tolist() == split(25).validation.tolist()


def test_the_split_of_a_seed_is_this_one_on_every_machine():
    """Pinned: a change of the numbers drawn would make old results and new ones incomparable."""
    parts = split(5, 5)
    assert parts.labeled.tolist() == [90, 75, 5, 107, 64]
    assert parts.validation.tolist() == [91, 85, 39, 104, 68]
    assert split(5, 5, seed=1).labeled.tolist() != parts.labeled.tolist()


def test_rows_can_be_given():
    parts = split(labels=[0, 40, 70, 90, 100], validation=[1, 2])
    assert parts.labeled.tolist() == [0, 40, 70, 90, 100]
    assert parts.validation.tolist() == [1, 2]
    assert len(parts.unlabeled) == len(Y) - 2


def test_validation_is_drawn_from_the_rows_that_the_labels_leave():
    rows = split(
        labels=25, validation=0
    ).labeled.tolist()  # the first of the order that validation is drawn from
    parts = split(labels=rows, validation=20)
    assert parts.labeled.tolist() == rows
    assert len(parts.validation) == 20
    assert not set(rows) & set(parts.validation)
    assert np.bincount(Y[parts.validation]).tolist() == [4] * 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"labels": 91},
            "`labels` must be between 0 and 90, the samples beside 20 others, got 91",
        ),
        (
            {"validation": 111},
            "`validation` must be between 0 and 110, the samples beside 0 others, got 111",
        ),
        (
            {"labels": 4},
            "`labels` must give every one of the 5 classes at least one label, got 4 labels",
        ),
        (
            {"num_classes": 6},
            "`target` must have training .* its 6 classes, got none of class 5; classes count from 0",
        ),
        (
            {"labels": [10, 20]},
            r"none for class .*\. A list of `labels` names rows; .* go to `transfer\(labels=",
        ),
        (
            {"y": np.zeros(50, dtype=np.int64), "num_classes": 2},
            "`target` must have training samples of at least two classes",
        ),
        ({"labels": [0, 0, 40, 70, 90, 100]}, "`labels` must not repeat a row, got 1"),
        ({"labels": [0, 40, 70, 90, 110]}, "`labels` must hold rows from 0 to 109, got 0 to 110"),
        (
            {"labels": [0, 40, 70, 90, 100], "validation": [0]},
            r"must not share rows, got \[0\] in both",
        ),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        split(**arguments)


def test_a_number_may_be_one_of_numpy():
    assert isinstance(count_or_rows("labels", np.int64(9)), int)
    assert count_or_rows("labels", [3, 1]) == [3, 1]
