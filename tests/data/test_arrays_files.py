"""Files are read as they are or refused with their name; nothing is unpickled, nothing half-written is left behind."""

import random

import numpy as np
import pytest

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.data import ArrayData, load_npz, save_npz

KEYS = ("x_train", "y_train", "x_test", "y_test")


def same(data, arrays):
    return all(np.array_equal(getattr(data, key), arrays[key]) for key in KEYS)


def test_npz_by_numpy(tmp_path, arrays):
    np.savez_compressed(tmp_path / "some.npz", **arrays)
    data = load_npz(tmp_path / "some.npz")
    assert same(data, arrays)
    assert (data.name, data.num_classes) == ("some", 10)
    assert load_npz(str(tmp_path / "some.npz"), name="other").name == "other"


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_classes_reach_up_to_the_largest_label_of_any_kind(tmp_path, arrays, dtype):
    labels = {key: (arrays[key] + 1).astype(dtype) for key in ("y_train", "y_test")}
    np.savez(tmp_path / "some.npz", **{**arrays, **labels})
    absent = "`y_train` of 'some' has no training sample of 1 of 11 classes, the first of them 0"
    with pytest.warns(TaskInfoWarning, match=absent):
        data = load_npz(tmp_path / "some.npz")
    assert data.num_classes == 11
    assert np.array_equal(data.y_train, arrays["y_train"] + 1)


def test_save_and_load(tmp_path, arrays):
    save_npz(tmp_path / "file.npz", ArrayData(**arrays, name="letters → α", num_classes=12))
    data = load_npz(tmp_path / "file.npz")
    assert same(data, arrays)
    assert (data.name, data.num_classes) == ("letters → α", 12)
    assert [file.name for file in tmp_path.iterdir()] == ["file.npz"]
    assert load_npz(tmp_path / "file.npz", name="other").name == "other"  # it comes first


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, arrays, monkeypatch):
    save_npz(tmp_path / "file.npz", ArrayData(**arrays, name="old", num_classes=10))
    monkeypatch.setattr(np, "savez", lambda file, **_: file.write(b"half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_npz(tmp_path / "file.npz", ArrayData(**arrays, name="new", num_classes=10))
    assert [file.name for file in tmp_path.iterdir()] == ["file.npz"]
    assert load_npz(tmp_path / "file.npz").name == "old"


def test_no_npz_file(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"A dataset must be an npz file, but there is no file at .*none.npz",
    ):
        load_npz(tmp_path / "none.npz")
    with pytest.raises(
        FileNotFoundError, match="A dataset must be an npz file, but there is no file at "
    ):
        load_npz(tmp_path)  # a folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"y_test": None},
            "some.npz: the arrays y_test are missing; there are x_train, y_train, x_test",
        ),
        (
            {"x_train": np.zeros((12, 3, 8, 9), np.float32)},
            "some.npz: `x_train` must be uint8, from 0 to 255, got float32",
        ),
        ({"y_train": np.zeros(12, bool)}, "some.npz: `y_train` must be whole numbers, got bool"),
        (
            {"y_train": np.array(["cat", "dog"] * 6)},
            "some.npz: `y_train` must be whole numbers, got <U3 such as 'cat'",
        ),
        (
            {"y_test": np.resize([0, 10**9], 10)},
            "some.npz: `y_train` and `y_test` must count the classes from 0, got 1000000000 among 22",
        ),
        (
            {"y_test": np.resize([-1, 0, 1], 10)},
            "some.npz: `y_test` must lie between 0 and 9, got -1",
        ),
        (
            {"y_train": np.zeros(12, int), "y_test": np.zeros(10, int)},
            "some.npz: `num_classes` must be at least 2, got 1",
        ),
        (
            {key: np.zeros((0, 3, 8, 9)[: 4 if key[0] == "x" else 1], np.uint8) for key in KEYS},
            "some.npz: `x_train` and `y_train` must have the same positive length, got 0 and 0",
        ),
        (
            {"y_train": np.arange(9)},
            "some.npz: `x_train` and `y_train` must have the same positive length, got 12 and 9",
        ),
        (
            {"y_train": np.array([None] * 12)},
            "some.npz: not a readable npz file of plain arrays .*allow_pickle=False",
        ),
    ],
)
def test_npz_refuses(tmp_path, arrays, change, message):
    np.savez(
        tmp_path / "some.npz", **{k: v for k, v in {**arrays, **change}.items() if v is not None}
    )
    with pytest.raises(ValueError, match=message):
        load_npz(tmp_path / "some.npz")


def test_npz_refuses_other_files(tmp_path):
    np.save(tmp_path / "single.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("not a zip file")
    (tmp_path / "empty.npz").touch()
    for file in tmp_path.iterdir():
        with pytest.raises(
            ValueError, match=f"{file.name}: not a readable npz file of plain arrays"
        ):
            load_npz(file)


def test_an_npz_without_arrays_has_none_of_them(tmp_path):
    np.savez(tmp_path / "some.npz")
    message = "some.npz: the arrays x_train, y_train, x_test, y_test are missing; there are none"
    with pytest.raises(ValueError, match=message):
        load_npz(tmp_path / "some.npz")


@pytest.mark.parametrize(
    ("where", "damage", "message"),
    [
        (
            b"PK\x01\x02",
            (10, b"\x61"),
            "compression",
        ),  # a method that nobody knows, in the list of arrays
        (b"PK\x03\x04", (80, b"\xff" * 40), "decompressing"),
    ],
    ids=["method", "values"],
)
def test_a_damaged_compressed_npz_is_refused(tmp_path, arrays, where, damage, message):
    path = tmp_path / "some.npz"
    np.savez_compressed(path, **arrays)
    raw, (offset, new) = path.read_bytes(), damage
    start = raw.index(where) + offset
    path.write_bytes(raw[:start] + new + raw[start + len(new) :])
    with pytest.raises(
        ValueError, match=rf"some.npz: not a readable npz file of plain arrays \(.*{message}"
    ):
        load_npz(path)


def test_a_damaged_npz_is_refused_or_still_right(tmp_path, arrays):
    path = tmp_path / "file.npz"
    save_npz(path, ArrayData(**arrays, name="some", num_classes=10))
    raw, rng = path.read_bytes(), random.Random(0)
    cut = [raw[: rng.randrange(len(raw))] for _ in range(100)]
    directory = raw.index(b"PK\x01\x02")  # the list of arrays, which no checksum covers
    where = [*range(0, directory, 11), *range(directory, len(raw))]
    flipped = [raw[:i] + bytes([raw[i] ^ 1 << rng.randrange(8)]) + raw[i + 1 :] for i in where]
    for damaged in cut + flipped:
        path.write_bytes(damaged)
        try:
            data = load_npz(path)
        except ValueError:
            continue
        assert same(data, arrays)
        assert (data.name, data.num_classes) == ("some", 10)
