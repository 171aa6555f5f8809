"""``ArrayData`` refuses what is not a dataset, and scales what is."""

import dataclasses

import numpy as np
import pytest
import torch

from lightning_taskinfo.data import ArrayData
from lightning_taskinfo.data.arrays import from_any


@pytest.mark.parametrize("split", ["train", "test"])
def test_datasets_are_the_images_between_0_and_1(arrays, split):
    data = ArrayData(**arrays, name="some", num_classes=10)
    images, labels = getattr(data, split)().tensors
    assert images.dtype == torch.float32
    np.testing.assert_allclose(images.numpy(), arrays[f"x_{split}"] / 255.0, rtol=1e-6)
    assert labels.tolist() == arrays[f"y_{split}"].tolist()
    assert data.image_shape == (3, 8, 9)


def test_is_frozen(arrays):
    with pytest.raises(dataclasses.FrozenInstanceError):
        ArrayData(**arrays, name="some", num_classes=10).name = "other"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"x_train": np.zeros((12, 3, 8, 9))},
            "`x_train` must be uint8, got float64; (255 * x).round().astype('uint8') makes them of floats from 0 to 1.",
        ),
        ({"y_test": np.zeros(10)}, "`y_test` must be int64, got float64."),
        ({"x_test": np.zeros((10, 72), np.uint8)}, "`x_test` must have the shape [N, C, H, W], got (10, 72)."),
        ({"y_train": np.zeros((12, 1), np.int64)}, "`y_train` must have the shape [N], got (12, 1)."),
        ({"y_train": np.arange(9)}, "`x_train` and `y_train` must have the same positive length, got 12 and 9."),
        (
            {"x_test": np.zeros((0, 3, 8, 9), np.uint8), "y_test": np.zeros(0, np.int64)},
            "`x_test` and `y_test` must have the same positive length, got 0 and 0.",
        ),
        ({"y_test": np.arange(10) + 1}, "`y_test` must lie between 0 and 9, got 1 to 10."),
        ({"y_test": np.arange(10) - 1}, "`y_test` must lie between 0 and 9, got -1 to 8."),
        (
            {"x_test": np.zeros((10, 1, 8, 9), np.uint8)},
            "`x_test` must hold images of the shape of `x_train`, (3, 8, 9), got (1, 8, 9).",
        ),
        ({"num_classes": 1}, "`num_classes` must be at least 2, got 1."),
    ],
)
def test_refuses(arrays, change, message):
    with pytest.raises(ValueError) as info:  # noqa: PT011
        ArrayData(**{**arrays, "name": "some", "num_classes": 10, **change})
    assert str(info.value) == message


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_from_any_takes_channels_first_last_or_none_and_any_integers(arrays, dtype):
    labels = {key: arrays[key].astype(dtype) for key in ("y_train", "y_test")}
    first = from_any({**arrays, **labels}, name="some")
    last = from_any({**labels, **{k: np.moveaxis(arrays[k], 1, -1) for k in ("x_train", "x_test")}}, name="some")
    none = from_any({**labels, **{k: arrays[k][:, 0] for k in ("x_train", "x_test")}}, name="some")
    assert first.num_classes == 10
    assert np.array_equal(first.x_train, arrays["x_train"])
    assert np.array_equal(last.x_train, arrays["x_train"])
    assert np.array_equal(none.x_test, arrays["x_test"][:, :1])


def test_from_any_does_not_round_labels(arrays):
    with pytest.raises(ValueError, match="`y_train` must be int64, got float32"):
        from_any({**arrays, "y_train": arrays["y_train"].astype(np.float32)}, name="some")
