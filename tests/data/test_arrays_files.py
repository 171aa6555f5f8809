"""Files are read as they are or refused with their name; nothing is unpickled, nothing half-written is left behind."""

import gzip
import random
import struct

import numpy as np
import pytest

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.data import ArrayData, load_idx, load_npz, save_npz

KEYS = ("x_train", "y_train", "x_test", "y_test")


def same(data, arrays):
    return all(np.array_equal(getattr(data, key), arrays[key]) for key in KEYS)


def test_npz_by_numpy(tmp_path, arrays):
    np.savez_compressed(tmp_path / "some.npz", **arrays)
    data = load_npz(tmp_path / "some.npz")
    assert same(data, arrays)
    assert (data.name, data.num_classes) == ("some", 10)
    named = load_npz(str(tmp_path / "some.npz"), name="other", num_classes=11)
    assert (named.name, named.num_classes) == ("other", 11)


def test_labels_that_count_from_one_are_a_warning(tmp_path, arrays):
    counted_from_one = {
        key: value + 1 if key.startswith("y") else value for key, value in arrays.items()
    }
    np.savez(tmp_path / "some.npz", **counted_from_one)
    with pytest.warns(UserWarning, match="of 'some' have the labels 1, 2"):
        data = load_npz(tmp_path / "some.npz")
    assert data.num_classes == 10
    assert np.array_equal(data.y_train, arrays["y_train"])


def test_save_and_load(tmp_path, arrays):
    save_npz(tmp_path / "file.npz", ArrayData(**arrays, name="letters → α", num_classes=12))
    data = load_npz(tmp_path / "file.npz")
    assert same(data, arrays)
    assert (data.name, data.num_classes) == ("letters → α", 12)
    assert [file.name for file in tmp_path.iterdir()] == ["file.npz"]
    named = load_npz(
        tmp_path / "file.npz", name="other", num_classes=13
    )  # what is given comes first
    assert (named.name, named.num_classes) == ("other", 13)


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


def idx(array, code=0x08):
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


@pytest.fixture
def idx_files(arrays):
    grey = {key: a[:, 0] if key.startswith("x") else a for key, a in arrays.items()}
    return {
        "train-images-idx3-ubyte": idx(grey["x_train"]),
        "train-labels-idx1-ubyte": idx(grey["y_train"]),
        "t10k-images-idx3-ubyte": idx(grey["x_test"]),
        "t10k-labels-idx1-ubyte": idx(grey["y_test"]),
    }


def write(folder, files, gzipped=False, dotted=False):
    for name, raw in files.items():
        name = name.replace("-idx", ".idx") if dotted else name
        (folder / (name + ".gz" * gzipped)).write_bytes(gzip.compress(raw) if gzipped else raw)


@pytest.mark.parametrize("gzipped", [False, True])
@pytest.mark.parametrize("dotted", [False, True])
def test_idx(tmp_path, arrays, idx_files, gzipped, dotted):
    write(tmp_path, idx_files, gzipped, dotted)
    data = load_idx(tmp_path)
    assert same(
        data, {**arrays, "x_train": arrays["x_train"][:, :1], "x_test": arrays["x_test"][:, :1]}
    )
    assert (data.name, data.num_classes) == (tmp_path.name, 10)
    assert len(data.train()) == 12


def test_idx_file_missing(tmp_path, idx_files):
    del idx_files["t10k-images-idx3-ubyte"]
    write(tmp_path, idx_files, gzipped=True)
    with pytest.raises(
        FileNotFoundError,
        match="A folder must hold the idx file t10k-images-idx3-ubyte, gzipped or not",
    ):
        load_idx(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda raw: idx(np.zeros((12, 8, 9)), code=0x0D),
            "not an idx file of unsigned bytes",
        ),
        (lambda raw: raw[:-1], r"the shape \(12, 8, 9\) does not fit the file's 863 values"),
        (lambda raw: raw + b"\0", r"the shape \(12, 8, 9\) does not fit the file's 865 values"),
        (
            lambda raw: raw[:4] + b"\xff" * 12 + raw[16:],
            r"the shape \(4294967295, .*\) does not fit the file's 864 values",
        ),
        (
            lambda raw: (
                raw[:4] + struct.pack(">3I", 2**31, 2**31, 4)
            ),  # 2⁶⁴, which is 0 in as many bits
            r"the shape \(2147483648, 2147483648, 4\) does not fit the file's 0 values",
        ),
        (lambda raw: raw[:9], "not an idx file"),
        (lambda raw: raw[:3], "not an idx file"),
        (lambda raw: b"P5 28 28" + raw, "not an idx file"),
        (lambda raw: b"", "not an idx file"),
        (lambda raw: gzip.compress(raw)[:-20], "not a readable gzip file"),
        (lambda raw: gzip.compress(raw)[:-8] + bytes(8), "not a readable gzip file .*CRC"),
        (
            lambda raw: gzip.compress(raw)[:10] + b"\xff" * 20,
            "not a readable gzip file .*invalid block type",
        ),
        (
            lambda raw: idx(np.zeros((11, 8, 9))),
            "`x_train` and `y_train` must have the same positive length, got 11 and 12",
        ),
    ],
)
def test_idx_refuses(tmp_path, idx_files, damage, message):
    idx_files["train-images-idx3-ubyte"] = damage(idx_files["train-images-idx3-ubyte"])
    write(tmp_path, idx_files)
    with pytest.raises(ValueError, match=f"{tmp_path}.*: {message}"):
        load_idx(tmp_path)


def test_labels_of_a_file_survive_another_one(tmp_path):
    x = np.zeros((4, 2, 2), dtype=np.uint8)
    y = np.array([1, 3, 3, 5])
    np.savez(tmp_path / "first.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.warns(TaskInfoWarning, match="become the classes 0 to 2"):
        first = load_npz(tmp_path / "first.npz")
    save_npz(tmp_path / "second.npz", first)
    assert load_npz(tmp_path / "second.npz").labels == first.labels == (1, 3, 5)
