"""A file is whole or not there, and a folder belongs to one configuration."""

import os
import signal
import subprocess
import sys

import pytest

from lightning_taskinfo._files import atomic_write, claim_folder, make_folder, read_json, write_json


def test_the_old_file_stays_when_writing_fails(tmp_path):
    path = tmp_path / "result"
    path.write_text("old")
    with pytest.raises(TypeError, match="must be str"), atomic_write(path, "w") as file:
        file.writelines(["new, but", None])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result"]


def test_the_old_file_stays_when_the_process_is_killed(tmp_path):
    path = tmp_path / "result"
    path.write_text("old")
    code = (
        "import os, sys; from lightning_taskinfo._files import atomic_write\n"
        "with atomic_write(sys.argv[1], 'w') as f: f.write('new'); f.flush(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -signal.SIGKILL
    assert path.read_text() == "old"


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "result", "w"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_an_unfinished_file_is_beside_its_place_and_named_after_it(tmp_path):
    with atomic_write(tmp_path / "result", "w"):
        (unfinished,) = os.listdir(tmp_path)
    assert unfinished.startswith("result.")
    assert unfinished.endswith(".tmp")


def test_who_reads_the_old_file_goes_on_reading_it(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, "old")
    with path.open() as old:
        write_json(path, "new")
        assert old.read() == '"old"\n'
    assert read_json(path) == "new"


def test_a_written_file_is_readable_as_the_umask_says(tmp_path):
    with atomic_write(tmp_path / "mine", "w") as file:
        file.write("β")
    (tmp_path / "plain").touch()
    assert (tmp_path / "mine").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "β"


def test_json_gives_numbers_back_bit_for_bit(tmp_path):
    values = [0.1 + 0.2, 5e-324, 1e308, float("inf")]
    write_json(tmp_path / "x.json", values)
    assert read_json(tmp_path / "x.json") == values


def test_json_is_written_as_it_is_read_by_people(tmp_path):
    write_json(tmp_path / "x.json", {"β": 1})
    assert '"β": 1' in (tmp_path / "x.json").read_text(encoding="utf-8")


def test_what_json_cannot_hold_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "x.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert read_json(tmp_path / "x.json") == 1


def test_damaged_json_is_named(tmp_path):
    for damaged in (b'{"a": 1', b'"\xff"'):
        (tmp_path / "x.json").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"x\.json: not a readable JSON file"):
            read_json(tmp_path / "x.json")


def test_a_folder_keeps_its_configuration(tmp_path):
    claim_folder(tmp_path / "run", {"seed": 0, "stage": {"epochs": 3, "sizes": (1, 2)}})
    claim_folder(tmp_path / "run", {"seed": 0, "stage": {"epochs": 3, "sizes": (1, 2)}})
    with pytest.raises(ValueError, match=r"`out` must be new(.|\n)*stage\.epochs: 3 there, 4 now") as caught:
        claim_folder(tmp_path / "run", {"seed": 0, "stage": {"epochs": 4, "sizes": (1, 2)}, "new": 1}, argument="out")
    assert "new: (not set) there, 1 now" in str(caught.value)
    assert "seed" not in str(caught.value)
    assert "sizes" not in str(caught.value)
    with pytest.raises(ValueError, match=r"\n  seed: 0 there, \(not set\) now$"):
        claim_folder(tmp_path / "run", {"stage": {"epochs": 3, "sizes": (1, 2)}})
    claim_folder(tmp_path / "run", {"seed": 0, "stage": {"epochs": 3, "sizes": (1, 2)}})  # nothing was overwritten


@pytest.mark.parametrize("below", ["", "run", "run/of/mine"])
def test_a_file_is_no_folder(tmp_path, below):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=rf"^`out` must be a folder, got the file {tmp_path}/file\.$"):
        claim_folder(tmp_path / "file" / below, {"seed": 0}, argument="out")
    assert (tmp_path / "file").read_text() == "in the way"
    assert make_folder(tmp_path / "new" / below).is_dir()
