"""What a user's own files lead to."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.data.files import save_npz
from lightning_taskinfo.transfer import TransferDataModule, transfer
from lightning_taskinfo.transfer.images import as_task
from tests.transfer.tiny import STAGES, tiny_data, tiny_net, tiny_task


def test_a_warning_about_a_file_is_given_once(tmp_path):
    task = tiny_task(0)
    arrays = {key: getattr(task, key) for key in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(tmp_path / "from_one.npz", **arrays | {key: arrays[key] + 1 for key in ("y_train", "y_test")})
    save_npz(tmp_path / "target.npz", tiny_task(1))
    data = TransferDataModule(
        tmp_path / "from_one.npz", tmp_path / "target.npz", labels=9, validation=12, batch_size=16
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        transfer(tiny_net, data, methods=["standard"], seeds=2, stages=STAGES)
    assert len([1 for warning in heard if "'from_one' has no sample" in str(warning.message)]) == 1


def test_datasets_whose_classes_count_from_one_are_a_warning():
    part = TensorDataset(torch.zeros(6, 1, 8, 8), torch.arange(6) % 3 + 1)
    with pytest.warns(TaskInfoWarning, match="`source` has no training sample of 1 of 4 classes, the first of them 0"):
        assert as_task((part, part), argument="source").num_classes == 4


@pytest.mark.parametrize("largest", [1.0, 255.0])
def test_datasets_of_real_images_up_to_255_are_a_warning(largest):
    part = TensorDataset(torch.full((6, 1, 8, 8), largest), torch.arange(6) % 3)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        as_task((part, part), argument="target")
    told = [str(warning.message) for warning in heard]
    assert bool(told) == (largest > 1)
    assert all("`target` has real images up to 255, which are used as they are; divide them by 255" in t for t in told)


def test_real_unlabelled_images_up_to_255_are_a_warning():
    with pytest.warns(
        TaskInfoWarning, match="`unlabeled` has real images up to 255, .* divide them by 255, or make bytes"
    ):
        tiny_data(unlabeled=np.full((9, 8, 8), 255.0)).setup()
