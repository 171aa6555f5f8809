"""The same data as another task."""

import numpy as np
import pytest

from lightning_taskinfo.data import ArrayData, load_dataset, load_task, vary


@pytest.fixture
def data(arrays):
    return ArrayData(**arrays, name="small", num_classes=10)


@pytest.mark.parametrize(
    ("variant", "rule"),
    [("parity", lambda y: y % 2), ("halves", lambda y: y // 5), ("3/rest", lambda y: (y == 3).astype(int))],
)
def test_other_labels_for_the_same_images(data, variant, rule):
    varied = vary(data, variant)
    for split in ("train", "test"):
        assert np.array_equal(getattr(varied, f"x_{split}"), getattr(data, f"x_{split}"))
        assert np.array_equal(getattr(varied, f"y_{split}"), rule(getattr(data, f"y_{split}")))
    assert (varied.name, varied.num_classes) == (f"small:{variant}", 2)


def test_the_class_in_the_middle_belongs_to_the_lower_half(data):
    three = vary(data, "0+1+2")
    assert three.y_test.tolist() == [0, 1, 2]
    assert vary(three, "halves").y_test.tolist() == [0, 0, 1]


def test_inverted_images_under_the_same_labels(data):
    varied = vary(data, "inverted")
    assert np.array_equal(varied.x_train.astype(int) + data.x_train, np.full(data.x_train.shape, 255))
    assert np.array_equal(varied.y_test, data.y_test)
    assert varied.num_classes == 10


def test_shuffled_labels_are_the_same_labels_in_another_order(data):
    varied = vary(data, "shuffled", seed=1)
    assert sorted(varied.y_train) == sorted(data.y_train)
    assert not np.array_equal(varied.y_train, data.y_train)
    assert np.array_equal(varied.y_train, vary(data, "shuffled", seed=1).y_train)
    assert not np.array_equal(varied.y_train, vary(data, "shuffled", seed=2).y_train)


def test_chosen_classes_are_numbered_in_the_order_of_the_choice(data):
    varied = vary(data, "7+0+1")
    assert varied.num_classes == 3
    kept = np.isin(data.y_train, [0, 1, 7])
    assert np.array_equal(varied.x_train, data.x_train[kept])
    assert [[7, 0, 1][y] for y in varied.y_train] == data.y_train[kept].tolist()


def test_tasks_by_name():
    parity, plain = load_task("digits:parity", size=8), load_dataset("digits", size=8)
    assert np.array_equal(parity.y_test, plain.y_test % 2)
    assert np.array_equal(load_task("digits", size=8).y_test, plain.y_test)


@pytest.mark.parametrize("variant", ["sideways", "3+", "11+2", "x/rest", "-1+2"])
def test_refuses_unknown_variants(data, variant):
    with pytest.raises(ValueError, match=r"`variant` must be like one of parity, .* from 0 to 9, got"):
        vary(data, variant)


@pytest.mark.parametrize("variant", ["3", "3+3"])
def test_refuses_less_than_two_classes(data, variant):
    with pytest.raises(ValueError, match="`variant` must name two or more different classes, got"):
        vary(data, variant)
