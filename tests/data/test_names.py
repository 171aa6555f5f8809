"""Datasets by name, and a cache that survives kills, damage and folders nobody may write to."""

import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_taskinfo.data import (
    ArrayData,
    load_dataset,
    load_letters,
    load_task,
    names,
    save_npz,
)
from lightning_taskinfo.data.names import cache_dir, cached
from tests.ranks import forked


def write():
    x, y = np.ones((60_000, 1, 32, 32), np.uint8), np.zeros(60_000, np.int64)
    cached("data", lambda: ArrayData(x, y, x, y, name="big", num_classes=2))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TASKINFO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def build(arrays):
    """Builds a small dataset, and counts how often."""

    def make():
        make.calls += 1
        return ArrayData(**arrays, name="small", num_classes=10)

    make.calls = 0
    return make


def test_embedded_data_by_name():
    digits, letters = (load_dataset(name, size=8) for name in ("digits", "letters"))
    assert (digits.name, letters.name) == ("digits 8×8", "letters 8×8")
    assert digits.image_shape == letters.image_shape == (1, 8, 8)
    assert np.array_equal(letters.x_test, load_letters(size=8).x_test)


@pytest.mark.parametrize("data_dir", [None, "elsewhere", "."])
def test_paths_of_files(tmp_path, arrays, monkeypatch, data_dir):
    monkeypatch.delenv("TASKINFO_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    data = ArrayData(**arrays, name="my own", num_classes=10)
    save_npz(tmp_path / "mine.npz", data)
    for name in ("mine.npz", str(tmp_path / "mine.npz")):
        for kind in (str, Path):
            assert np.array_equal(load_dataset(kind(name), data_dir=data_dir).x_test, data.x_test)
            assert np.array_equal(load_task(kind(name), data_dir=data_dir).x_test, data.x_test)
    with pytest.raises(ValueError, match=r"name a file; 'yours\.npz' was not found .*at this path"):
        load_dataset("yours.npz", data_dir=data_dir)
    with pytest.raises(ValueError, match="'' was not found"):
        load_dataset("", data_dir=data_dir)


@pytest.mark.parametrize("variable", [False, True])
def test_names_of_files(tmp_path, arrays, monkeypatch, variable):
    save_npz(tmp_path / "mine.npz", ArrayData(**arrays, name="my own", num_classes=10))
    if variable:
        monkeypatch.setenv("TASKINFO_DATA_DIR", str(tmp_path))
    data = load_dataset("mine", data_dir=None if variable else tmp_path)
    assert data.name == "my own"


def test_paths_may_have_the_characters_of_tasks(tmp_path, arrays):
    save_npz(tmp_path / "a+b:c.npz", ArrayData(**arrays, name="my own", num_classes=10))
    assert load_task(tmp_path / "a+b:c.npz").name == "my own"


def test_refuses_unknown_names(tmp_path, monkeypatch):
    monkeypatch.delenv("TASKINFO_DATA_DIR", raising=False)
    rule = "digits or letters or name a file; 'words' was not found at this path"
    with pytest.raises(ValueError, match=rf"{rule}\. .*TASKINFO_DATA_DIR, which is None"):
        load_dataset("words")
    with pytest.raises(ValueError, match=rf"{rule}\. .*TASKINFO_DATA_DIR, which is {tmp_path}"):
        load_dataset("words", data_dir=tmp_path)


def test_built_once_for_each_name_and_version(folder, build, monkeypatch):
    for name in ("a", "a", "b"):
        cached(name, build)
    assert build.calls == 2
    monkeypatch.setattr(names, "VERSION", names.VERSION + 1)
    cached("a", build)
    assert build.calls == 3
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("other", [{"size": 9}, {"seed": 1}])
def test_another_size_or_seed_is_drawn_anew(folder, build, monkeypatch, other):
    asked = []
    monkeypatch.setitem(names.EMBEDDED, "letters", lambda **given: asked.append(given) or build())
    for given in ({"size": 8, "seed": 0}, {"size": 8, "seed": 0, **other}):
        load_dataset("letters", **given)
        assert asked[-1] == given


def test_the_cache_returns_what_was_built(folder, build, arrays):
    built, read = cached("a", build), cached("a", build)
    assert build.calls == 1
    assert (read.name, read.num_classes) == (built.name, built.num_classes)
    for key, array in arrays.items():
        assert np.array_equal(getattr(read, key), array)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: raw[::-1]]
)
def test_a_corrupt_file_is_rebuilt(folder, build, damage):
    cached("a", build)
    (file,) = folder.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert cached("a", build).name == "small"
    assert build.calls == 2
    assert file.read_bytes() == good


def a_part_is_written(folder):
    try:
        return any(file.stat().st_size for file in folder.glob("*.tmp"))
    except FileNotFoundError:  # renamed since it was listed
        return False


def kill_while_writing(folder):
    """Start a process that fills the cache and kill it as soon as a part of the file is on disk; return that part."""
    for _ in range(5):  # on a busy machine the writer may be done before we look
        writer = forked(write)
        while writer.is_alive() and not a_part_is_written(folder):
            time.sleep(0.001)
        writer.kill()
        writer.join()
        if writer.exitcode == -signal.SIGKILL:
            (part,) = folder.glob("*.tmp")
            return part
        shutil.rmtree(folder)
    raise AssertionError("the writer was never caught in the act")


def test_a_killed_process_leaves_no_broken_cache(folder, build):
    part = kill_while_writing(folder)
    assert 0 < part.stat().st_size < 2 * 60_000 * 32 * 32
    assert list(folder.iterdir()) == [part]
    for _ in range(2):
        assert cached("data", build).name == "small"
    assert build.calls == 1
    assert not part.exists()


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path, build, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TASKINFO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="The data is not cached: .*Not a directory"):
        assert cached("a", build).name == "small"


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        ("", "/xdg", "/xdg/lightning_taskinfo"),
        ("", "", "/home/.cache/lightning_taskinfo"),
    ],
)
def test_cache_folder(monkeypatch, own, xdg, expected):
    for name, value in {"TASKINFO_CACHE_DIR": own, "XDG_CACHE_HOME": xdg, "HOME": "/home"}.items():
        monkeypatch.setenv(name, value)
    assert cache_dir().as_posix() == expected
