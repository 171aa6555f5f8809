"""``ArrayData`` refuses what is not a dataset, and scales what is."""

import dataclasses

import numpy as np
import pytest
import torch

from lightning_taskinfo.data import ArrayData


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
            {"x_test": np.zeros((10, 72), np.uint8)},
            "`x_test` must have the shape [N, H, W], [N, C, H, W] or [N, H, W, C], got (10, 72).",
        ),
        (
            {"x_test": np.zeros((10, 1, 3, 8, 9), np.uint8)},
            "`x_test` must have the shape [N, H, W], [N, C, H, W] or [N, H, W, C], got (10, 1, 3, 8, 9).",
        ),
        (
            {"y_train": np.zeros((12, 1), np.int64)},
            "`y_train` must have the shape [N], got (12, 1).",
        ),
        (
            {"y_train": np.arange(9)},
            "`x_train` and `y_train` must have the same positive length, got 12 and 9.",
        ),
        (
            {"x_test": np.zeros((0, 3, 8, 9), np.uint8), "y_test": np.zeros(0, np.int64)},
            "`x_test` and `y_test` must have the same positive length, got 0 and 0.",
        ),
        ({"y_test": []}, "`x_test` and `y_test` must have the same positive length, got 10 and 0."),
        ({"x_test": np.zeros((0, 3, 8, 9))}, "`x_test` must be uint8, from 0 to 255, got float64."),
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


@pytest.mark.parametrize(
    ("images", "found"),
    [
        (np.ones(2), "float64 from 1 to 1."),
        (np.array([0.0, 254.9]), "float64 from 0 to 254.9."),
        (np.array([0, 255]), "int64 from 0 to 255."),
        (np.array([0, 300], np.uint16), "uint16 from 0 to 300."),
        (np.array([-2.5, 2.0], np.float32), "float32 from -2.5 to 2."),
        (np.array([False, True]), "bool from 0 to 1."),
        (np.array([np.nan, np.inf]), "float64 from nan to nan."),
        (np.array(["a", "b"]), "<U1."),
    ],
)
def test_images_that_are_no_bytes_are_refused_with_their_range(arrays, images, found):
    x = np.resize(images, (12, 1, 4, 4))
    with pytest.raises(ValueError) as info:  # noqa: PT011
        ArrayData(**{**arrays, "x_train": x}, name="some", num_classes=10)
    assert str(info.value) == f"`x_train` must be uint8, from 0 to 255, got {found}"


@pytest.mark.parametrize(
    ("labels", "got"),
    [
        (np.array(["cat", "dog"]), "<U3 such as 'cat'"),
        (np.array([0.0, 1.0], np.float32), "float32 such as 0.0"),
        (np.array([False, True]), "bool such as False"),
        (np.array([0.5, 1.0]), "float64 such as 0.5"),
        (np.array([np.nan, 1.0]), "float64 such as nan"),
        (np.array([np.inf, 1.0]), "float64 such as inf"),
    ],
)
def test_labels_that_are_no_whole_numbers_are_refused(arrays, labels, got):
    splits = {**arrays, "y_test": np.resize(labels, 10)}
    with pytest.raises(ValueError) as info:  # noqa: PT011
        ArrayData(**splits, name="some", num_classes=10)
    rule = f"`y_test` must be whole numbers, got {got}; number the classes from 0."
    assert str(info.value) == rule


def test_lists_of_different_lengths_are_no_images(arrays):
    with pytest.raises(ValueError, match=r"`x_train` must be an array of one shape \("):
        ArrayData(**{**arrays, "x_train": [[[1, 2]], [[1]]]}, name="some", num_classes=10)


def test_tensors_are_arrays_too(arrays):
    data = ArrayData(
        **{k: torch.from_numpy(a) for k, a in arrays.items()}, name="some", num_classes=10
    )
    assert all(np.array_equal(getattr(data, key), array) for key, array in arrays.items())
    assert isinstance(data.x_train, np.ndarray)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_takes_channels_first_last_or_none_and_any_whole_numbers(arrays, dtype):
    labels = {key: arrays[key].astype(dtype) for key in ("y_train", "y_test")}
    some = {"name": "some", "num_classes": 10}
    first = ArrayData(**{**arrays, **labels}, **some)
    last = ArrayData(
        **labels, **{k: np.moveaxis(arrays[k], 1, -1) for k in ("x_train", "x_test")}, **some
    )
    none = ArrayData(**labels, **{k: arrays[k][:, 0] for k in ("x_train", "x_test")}, **some)
    assert first.y_train.dtype == np.int64
    assert np.array_equal(first.x_train, arrays["x_train"])
    assert np.array_equal(last.x_train, arrays["x_train"])
    assert np.array_equal(none.x_test, arrays["x_test"][:, :1])


@pytest.mark.parametrize("shape", [(3, 8, 4), (8, 9, 2)], ids=["both ends", "neither end"])
def test_where_both_ends_may_be_channels_or_neither_they_are_first(arrays, shape):
    x = np.zeros((12, *shape), np.uint8)
    assert (
        ArrayData(
            x, arrays["y_train"], x, arrays["y_train"], name="some", num_classes=10
        ).image_shape
        == shape
    )
