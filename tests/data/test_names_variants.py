"""The same data as another task."""

import numpy as np
import pytest

from lightning_taskinfo.data import ArrayData, load_dataset, load_task, vary


@pytest.fixture
def data(arrays):
    return ArrayData(**arrays, name="small", num_classes=10)


@pytest.mark.parametrize(
    ("variant", "rule"),
    [
        ("even-odd", lambda y: y % 2),
        ("small-large", lambda y: y // 5),
        ("one-3", lambda y: (y == 3).astype(int)),
    ],
)
def test_other_labels_for_the_same_images(data, variant, rule):
    varied = vary(data, variant)
    for split in ("train", "test"):
        assert np.array_equal(getattr(varied, f"x_{split}"), getattr(data, f"x_{split}"))
        assert np.array_equal(getattr(varied, f"y_{split}"), rule(getattr(data, f"y_{split}")))
    assert (varied.name, varied.num_classes) == (f"small:{variant}", 2)


def test_the_class_in_the_middle_belongs_to_the_upper_half(data):
    three = vary(data, "only-0-1-2")
    assert three.y_test.tolist() == [0, 1, 2]
    assert vary(three, "small-large").y_test.tolist() == [0, 1, 1]


def test_inverted_images_under_the_same_labels(data):
    varied = vary(data, "inverted")
    assert np.array_equal(
        varied.x_train.astype(int) + data.x_train, np.full(data.x_train.shape, 255)
    )
    assert np.array_equal(varied.y_test, data.y_test)
    assert varied.num_classes == 10


def test_random_labels_are_uniform_and_belong_to_a_seed(data):
    varied = vary(data, "random-labels", seed=1)
    assert set(varied.y_train.tolist()) <= set(range(10))
    assert not np.array_equal(varied.y_train, data.y_train)
    assert np.array_equal(varied.y_train, vary(data, "random-labels", seed=1).y_train)
    assert not np.array_equal(varied.y_train, vary(data, "random-labels", seed=2).y_train)
    counts = np.bincount(vary(load_dataset("digits", size=8), "random-labels").y_train)
    assert np.abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean() * 0.9)


def test_chosen_classes_are_numbered_in_the_order_of_the_choice(data):
    varied = vary(data, "only-7-0-1")
    assert varied.num_classes == 3
    kept = np.isin(data.y_train, [0, 1, 7])
    assert np.array_equal(varied.x_train, data.x_train[kept])
    assert [[7, 0, 1][y] for y in varied.y_train] == data.y_train[kept].tolist()


def test_tasks_by_name():
    even_odd, plain = load_task("digits:even-odd", size=8), load_dataset("digits", size=8)
    assert np.array_equal(even_odd.y_test, plain.y_test % 2)
    assert np.array_equal(load_task("digits", size=8).y_test, plain.y_test)


def test_datasets_together_have_classes_of_their_own_and_variants_apply_to_each():
    both, digits = (
        load_task("digits+letters:only-1-2", size=8),
        load_task("digits:only-1-2", size=8),
    )
    assert both.num_classes == 4
    assert np.array_equal(both.x_test[both.y_test < 2], digits.x_test)
    assert np.array_equal(load_task("digits:only-1-2:inverted", size=8).x_test, 255 - digits.x_test)


@pytest.mark.parametrize("variant", ["sideways", "only-", "one-", "one-x", "only-1-"])
def test_refuses_unknown_variants(data, variant):
    with pytest.raises(
        ValueError, match=f"A variant must be like one of even-odd, .* got '{variant}'"
    ):
        vary(data, variant)


@pytest.mark.parametrize("variant", ["only-11-2", "one-10", "only-3", "only-3-3"])
def test_refuses_classes_that_there_are_not_and_less_than_two(data, variant):
    rule = f"must name different classes from 0 to 9, two or more behind only, got '{variant}'"
    with pytest.raises(ValueError, match=rule):
        vary(data, variant)
