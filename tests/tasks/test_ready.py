"""Tasks by name: what happens to images and labels, and what is refused."""

import numpy as np
import pytest
import torch

from lightning_taskinfo.data import ArrayData, load_dataset, save_npz
from lightning_taskinfo.tasks.ready import network_for, prepare_task, trunk_of


@pytest.fixture(scope="module")
def digits():
    return prepare_task("digits")


def test_a_dataset_alone_is_its_training_split_shuffled(digits):
    x, y = load_dataset("digits", size=8).train().tensors
    assert digits.inputs.shape == x.shape
    assert digits.num_classes == 10
    assert torch.bincount(digits.targets).tolist() == torch.bincount(y).tolist()
    assert not torch.equal(digits.targets, y)
    assert torch.equal(prepare_task("digits", max_samples=50).inputs, digits.inputs[:50])
    assert not torch.equal(
        prepare_task("digits", max_samples=50, seed=1).targets, digits.targets[:50]
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [("even-odd", lambda y: y % 2), ("small-large", lambda y: (y > 4).long())],
)
def test_labels_of_two_classes(digits, change, expected):
    task = prepare_task(f"digits:{change}")
    assert torch.equal(task.inputs, digits.inputs)
    assert torch.equal(task.targets, expected(digits.targets))
    assert task.num_classes == 2


def test_inverted_images_keep_their_labels(digits):
    task = prepare_task("digits:inverted")
    torch.testing.assert_close(task.inputs, 1 - digits.inputs)
    assert torch.equal(task.targets, digits.targets)


def test_random_labels_say_nothing_about_the_digit(digits):
    task = prepare_task("digits:random-labels", seed=0)
    counts = torch.bincount(task.targets, minlength=10)
    assert (counts - len(task.targets) / 10).abs().max() < 5 * (len(task.targets) * 0.09) ** 0.5
    assert torch.equal(task.inputs, digits.inputs)
    assert (digits.targets == task.targets).float().mean() < 0.15


def test_a_subset_of_classes_is_numbered_anew():
    task = prepare_task("digits:only-8-3:inverted")
    x, y = load_dataset("digits", size=8).train().tensors
    assert task.num_classes == 2
    assert torch.bincount(task.targets).tolist() == [(y == 8).sum(), (y == 3).sum()]
    assert task.inputs.sum() == pytest.approx((1 - x[(y == 3) | (y == 8)]).sum().item(), rel=1e-6)


def test_datasets_together_have_their_own_classes():
    task = prepare_task("digits+letters", max_samples=101)
    assert task.num_classes == 20
    assert (task.targets < 10).sum() == 51
    assert (task.targets >= 10).sum() == 50


def test_files_are_tasks_too(tmp_path):
    x, y = np.zeros((9, 1, 4, 4), np.uint8), np.arange(9) % 3
    save_npz(tmp_path / "mine.npz", ArrayData(x, y, x, y, name="mine", num_classes=3))
    task = prepare_task("mine:only-0-2", data_dir=tmp_path)
    assert task.inputs.shape == (6, 1, 4, 4)
    assert prepare_task(tmp_path / "mine.npz").name == str(tmp_path / "mine.npz")
    with pytest.raises(
        ValueError, match=r"images of one shape together, got \(1, 8, 8\), \(1, 4, 4\)"
    ):
        prepare_task("digits+mine", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("digits:upside-down", "A variant must be like one of even-odd, .* got 'upside-down'"),
        (
            "digits:only-3",
            "A variant must name different classes from 0 to 9, two or more behind only, got 'only-3'",
        ),
        (
            "digits:only-3-12",
            "A variant must name different classes from 0 to 9, two or more behind only, got 'only-3-12'",
        ),
        ("numbers", "A dataset must be digits or letters or name a file; 'numbers' was not found"),
    ],
)
def test_refuses(spec, match, monkeypatch):
    monkeypatch.delenv("TASKINFO_DATA_DIR", raising=False)
    with pytest.raises(ValueError, match=match):
        prepare_task(spec)


def test_refuses_arguments():
    with pytest.raises(ValueError, match="`max_samples` must be at least 1, got 0"):
        prepare_task("digits", max_samples=0)
    with pytest.raises(TypeError, match=r"`max_samples` must be a whole number, got 10\.0"):
        prepare_task("digits", max_samples=10.0)


def test_networks_fit_their_task():
    task = prepare_task("digits:even-odd", max_samples=10)
    assert network_for(task, width=4)()(task.inputs).shape == (10, 2)
    assert trunk_of(network_for(task, width=4))()(task.inputs).shape == (10, 4)
