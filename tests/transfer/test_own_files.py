"""What a user's own files lead to."""

import warnings

import numpy as np

from lightning_taskinfo.data.files import save_npz
from lightning_taskinfo.transfer import TransferDataModule, transfer
from tests.transfer.tiny import STAGES, tiny_net, tiny_task


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
