"""torchvision, absent, broken, and in the form its datasets have."""

import sys

import numpy as np
import pytest

from lightning_taskinfo.data import load_torchvision

DATASETS = """
import numpy as np

__all__ = ["Digits", "Numbers", "Heap"]


class Digits:
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        self.length, self.value, self.download = (12, 200, download) if train else (10, 100, download)

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if i >= self.length:
            raise IndexError(i)
        return np.full((8, 9, 3), self.value + i, np.uint8), i % 10


class Numbers(Digits):
    def __init__(self, root, split="train", transform=None, target_transform=None, download=False):
        super().__init__(root, {"train": True, "test": False}[split], download=download)


class Heap:
    def __init__(self, root, transform=None):
        pass
"""


@pytest.fixture
def torchvision(tmp_path, monkeypatch):
    """A package of that name to import; the test writes what is in it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "datasets.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]


def test_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        ImportError, match="`load_torchvision` needs torchvision, which is not installed or cannot"
    ):
        load_torchvision("MNIST", "root")


@pytest.mark.parametrize("error", ["RuntimeError", "ImportError", "OSError"])
def test_installed_but_cannot_be_loaded(torchvision, error):
    (torchvision / "__init__.py").write_text(
        f"raise {error}('operator torchvision::nms does not exist')"
    )
    with pytest.raises(
        ImportError,
        match=r"cannot be loaded beside this torch.* operator torchvision::nms does not exist",
    ):
        load_torchvision("MNIST", "root")


@pytest.mark.parametrize("name", ["Digits", "Numbers"])
def test_both_ways_of_naming_a_split(torchvision, name):
    data = load_torchvision(name, "root")
    assert (data.name, data.num_classes, data.image_shape) == (name, 10, (3, 8, 9))
    assert np.array_equal(data.x_train[:, 0, 0, 0], 200 + np.arange(12))
    assert np.array_equal(data.x_test[:, 0, 0, 0], 100 + np.arange(10))
    assert np.array_equal(data.y_train, np.arange(12) % 10)


@pytest.mark.parametrize("name", ["Nothing", "np"])
def test_refuses_unknown_datasets(torchvision, name):
    with pytest.raises(ValueError, match=f"`name` must be a dataset of torchvision, got '{name}'"):
        load_torchvision(name, "root")


def test_refuses_datasets_without_splits(torchvision):
    with pytest.raises(
        ValueError, match="`name` must be a dataset with a training and a test split, got 'Heap'"
    ):
        load_torchvision("Heap", "root")
