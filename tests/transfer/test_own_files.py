"""What a user's own files lead to."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.data.arrays import save_npz
from lightning_taskinfo.transfer import TransferDataModule, transfer
from lightning_taskinfo.transfer.ready.data import as_images, as_task
from tests.transfer.tiny import STAGES, tiny_data, tiny_net, tiny_task


def test_a_warning_about_a_file_is_given_once(tmp_path):
    task = tiny_task(0)
    arrays = {key: getattr(task, key) for key in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(
        tmp_path / "lacking.npz", **arrays | {"y_train": arrays["y_train"].clip(1)}
    )  # none of class 0
    save_npz(tmp_path / "target.npz", tiny_task(1))
    data = TransferDataModule(
        tmp_path / "lacking.npz", tmp_path / "target.npz", labels=9, validation=12, batch_size=16
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        transfer(tiny_net, data, methods=["standard"], seeds=2, stages=STAGES)
    assert (
        len([1 for warning in heard if "'lacking' has no training sample" in str(warning.message)])
        == 1
    )


def test_datasets_whose_classes_count_from_one_are_a_warning():
    part = TensorDataset(torch.zeros(6, 1, 8, 8), torch.arange(6) % 3 + 1)
    with pytest.warns(
        TaskInfoWarning,
        match="`source` has no training sample of 1 of 4 classes, the first of them 0",
    ):
        assert as_task("source", (part, part)).num_classes == 4


def test_a_class_of_the_test_set_alone_is_a_warning_and_one_of_the_training_set_alone_is_none():
    two, three = (
        TensorDataset(torch.zeros(6, 1, 8, 8), torch.arange(6) % classes) for classes in (2, 3)
    )
    with pytest.warns(
        TaskInfoWarning,
        match="`source` has no training sample of 1 of 3 classes, the first of them 2",
    ):
        assert as_task("source", (two, three)).num_classes == 3
    assert as_task("source", (three, two)).num_classes == 3  # warnings are errors


@pytest.mark.parametrize(
    ("value", "largest"),
    [(1.0, None), (100.0, None), (100.5, "100.5"), (255.0, "255"), (-255.0, "255")],
)
def test_datasets_of_real_images_far_from_1_are_a_warning(value, largest):
    part = TensorDataset(torch.full((6, 1, 8, 8), value), torch.arange(6) % 3)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        task = as_task("target", (part, part))
    assert task.train.x.unique().tolist() == [value]
    told = [str(warning.message) for warning in heard]
    assert bool(told) == (largest is not None)
    message = (
        f"`target` has real images up to {largest}, which are used as they are; divide them by 255"
    )
    assert all(message in t for t in told)


@pytest.mark.parametrize("numbers", [[0, 256], [-1, 90]])
def test_whole_numbers_that_are_no_bytes_stay_what_they_are(numbers):
    images = torch.tensor(numbers)[:, None, None].expand(-1, 8, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*real images up to 256")
        x = as_images("unlabeled", images)
    assert x.dtype == torch.float32
    assert x[:, 0, 0, 0].tolist() == numbers


def test_real_unlabelled_images_up_to_255_are_a_warning():
    with pytest.warns(
        TaskInfoWarning,
        match="`unlabeled` has real images up to 255, .* divide them by 255, or make bytes",
    ):
        tiny_data(unlabeled=np.full((9, 8, 8), 255.0)).setup()
