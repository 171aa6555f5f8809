"""Labelled rows are stratified, nested, and the same on every machine."""

import numpy as np
import pytest
import torch

from lightning_taskinfo.transfer.sampling import chosen_rows

Y = np.repeat(np.arange(5), [40, 30, 20, 10, 10])


def chosen(labels=10, seed=0, y=Y):
    return chosen_rows(torch.from_numpy(y), len(y), [labels], seed)[:labels]


@pytest.mark.parametrize("labels", [5, 10, 25])
def test_every_class_has_its_share_of_the_labels(labels):
    assert np.bincount(Y[chosen(labels)]).tolist() == [labels // 5] * 5


def test_a_remainder_goes_to_some_classes_once():
    counts = np.bincount(Y[chosen(12)])
    assert sorted(counts.tolist()) == [2, 2, 2, 3, 3]


def test_more_labels_are_the_same_and_others():
    few, many = chosen(10).tolist(), chosen(20).tolist()
    assert many[:10] == few


def test_the_rows_of_a_seed_are_these_on_every_machine():
    """Pinned: a change of the numbers drawn would make old results and new ones incomparable."""
    assert chosen(5).tolist() == [91, 85, 39, 104, 68]
    assert chosen(5, seed=1).tolist() != chosen(5).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"labels": 111},
            "`labels` must be between 1 and the 110 training samples there are, got 111",
        ),
        ({"labels": 4}, "`labels` must give every one of the 5 classes at least one label, got 4"),
        (
            {"y": np.zeros(50, dtype=np.int64)},
            "`data` must have training samples of at least two classes, got class 0 only",
        ),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        chosen(**arguments)
