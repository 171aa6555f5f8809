"""What a user's own files lead to."""

import warnings

import numpy as np

from lightning_taskinfo.data.arrays import save_npz
from lightning_taskinfo.transfer import TransferDataModule, transfer
from tests.transfer.tiny import STAGES, tiny_net, tiny_task


def test_a_warning_about_a_file_is_given_once(tmp_path):
    task = tiny_task(0)
    arrays = {key: getattr(task, key) for key in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(
        tmp_path / "lacking.npz", **arrays | {"y_train": arrays["y_train"].clip(1)}
    )  # none of class 0
    save_npz(tmp_path / "target.npz", tiny_task(1))
    data = TransferDataModule(
        tmp_path / "lacking.npz", tmp_path / "target.npz", labels=9, batch_size=16
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        transfer(tiny_net, data, methods=["standard"], seeds=2, stages=STAGES)
    assert (
        len([1 for warning in heard if "'lacking' has no training sample" in str(warning.message)])
        == 1
    )
