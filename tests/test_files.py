"""A file is whole or not there, and a folder belongs to one configuration."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from lightning_taskinfo._files import (
    atomic_write,
    claim_folder,
    digest,
    make_folder,
    read_json,
    read_result,
    read_tensors,
    write_json,
    write_result,
    write_tensors,
)


def test_the_old_file_stays_when_writing_fails(tmp_path):
    path = tmp_path / "result"
    path.write_text("old")
    with pytest.raises(TypeError, match="must be str"), atomic_write(path, "w") as file:
        file.writelines(["new, but", None])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result"]


def test_folders_above_a_file_are_made(tmp_path):
    write_json(tmp_path / "new" / "inside" / "result", 1)
    assert read_json(tmp_path / "new" / "inside" / "result") == 1


def test_the_old_file_stays_when_the_process_is_killed(tmp_path):
    path = tmp_path / "result"
    path.write_text("old")
    code = (
        "import os, sys; from lightning_taskinfo._files import atomic_write\n"
        "with atomic_write(sys.argv[1], 'w') as f: f.write('new'); f.flush(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2
    write_json(tmp_path / "other", 1)
    assert len(os.listdir(tmp_path)) == 3, "of another file"
    write_json(path, "new")
    assert sorted(os.listdir(tmp_path)) == ["other", "result"], (
        "what the killed process left is gone"
    )


def test_what_another_process_is_writing_stays_and_old_remains_of_other_machines_go(tmp_path):
    path = tmp_path / "result"
    with atomic_write(path, "w") as mine:
        mine.write("first")
        write_json(path, "second")
        assert len(os.listdir(tmp_path)) == 2
    assert path.read_text() == "first"
    young, old = (tmp_path / f"result.elsewhere.{number}.0123abcd.tmp" for number in (1, 2))
    for file in (young, old):
        file.touch()
    os.utime(old, (time.time() - 90_000,) * 2)
    write_json(path, "third")
    assert (young.exists(), old.exists()) == (True, False)


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


@pytest.mark.parametrize("result", [None, 1.5, {"kl": [0.1, float("nan")], 10: 1, 9: 2}], ids=str)
def test_a_result_comes_back(tmp_path, result):
    write_result(tmp_path / "x.json", result)
    assert str(read_result(tmp_path / "x.json")) == str(json.loads(json.dumps(result)))


@pytest.mark.parametrize(
    "text", ["null", '{"a": [1, 2]}', "[]", '{"result": 1}', '{"result": 1, "sha256": "0"}', "{"]
)
def test_what_is_no_result_is_named_with_true_advice(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: .* Delete it"):
        read_result(tmp_path / "x.json")


def test_a_changed_digit_of_a_result_is_noticed(tmp_path):
    write_result(tmp_path / "x.json", {"accuracy": 0.25})
    text = (tmp_path / "x.json").read_text()
    (tmp_path / "x.json").write_text(text.replace("0.25", "0.75"))
    with pytest.raises(ValueError, match=r"x\.json: .*checksum"):
        read_result(tmp_path / "x.json")


def test_no_flipped_byte_of_a_file_of_tensors_changes_what_is_read(tmp_path):
    """A bit of every third byte, each bit in turns: the file is refused, or what it holds is what was written."""
    path = tmp_path / "weights.pt"
    weights = {"weight": torch.arange(6.0), "rows": [{"beta": 0.5}]}
    write_tensors(path, weights)
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 3):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :]
        )
        try:
            read = read_tensors(path)
        except ValueError:
            refused += 1
        else:
            assert torch.equal(read["weight"], weights["weight"])
            assert read["rows"] == weights["rows"]
    assert refused > 150


def test_code_in_a_file_of_tensors_is_not_run(tmp_path):
    write_tensors(tmp_path / "x.pt", torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"x\.pt: .* Go\.$") as caught:
        read_tensors(tmp_path / "x.pt", advice="Go.")
    assert "weights_only" not in str(caught.value)


def test_results_that_lost_their_configuration_are_refused(tmp_path):
    claim_folder(tmp_path, {"steps": 60}, results=["results/*"])
    claim_folder(tmp_path, {"steps": 60}, results=["results/*"])
    write_result(make_folder(tmp_path / "results") / "a.json", 1)
    (tmp_path / "configuration.json").unlink()
    with pytest.raises(ValueError, match=r"`folder` must .*results/a\.json"):
        claim_folder(tmp_path, {"steps": 30}, results=["results/*"])
    assert not (tmp_path / "configuration.json").exists()
    claim_folder(tmp_path, {"steps": 30})  # files of others are in nobody's way


def test_a_folder_keeps_its_configuration(tmp_path):
    claim_folder(tmp_path / "run", {"seed": 0, "stage": {"epochs": 3, "sizes": (1, 2)}})
    claim_folder(tmp_path / "run", {"seed": 0, "stage": {"epochs": 3, "sizes": (1, 2)}})
    with pytest.raises(
        ValueError, match=r"`folder` must be new(.|\n)*stage\.epochs: 3 there, 4 now"
    ) as caught:
        claim_folder(
            tmp_path / "run",
            {"seed": 0, "stage": {"epochs": 4, "sizes": (1, 2)}, "new": 1},
        )
    assert "new: (not set) there, 1 now" in str(caught.value)
    assert "seed" not in str(caught.value)
    assert "sizes" not in str(caught.value)
    with pytest.raises(ValueError, match=r"\n  seed: 0 there, \(not set\) now$"):
        claim_folder(tmp_path / "run", {"stage": {"epochs": 3, "sizes": (1, 2)}})
    claim_folder(
        tmp_path / "run", {"seed": 0, "stage": {"epochs": 3, "sizes": (1, 2)}}
    )  # nothing was overwritten


@pytest.mark.parametrize("below", ["", "run", "run/of/mine"])
def test_a_file_is_no_folder(tmp_path, below):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ValueError, match=rf"^`folder` must be a folder, got the file {tmp_path}/file\.$"
    ):
        claim_folder(tmp_path / "file" / below, {"seed": 0})
    assert (tmp_path / "file").read_text() == "in the way"
    assert make_folder(tmp_path / "new" / below).is_dir()


def test_a_digest_knows_names_types_shapes_and_values():
    tensors = [
        torch.arange(6),
        torch.arange(6).float(),
        torch.arange(6).view(2, 3),
        torch.arange(6).flip(0),
    ]
    assert len({digest([("x", tensor)]) for tensor in tensors}) == 4
    transposed = torch.arange(6).view(2, 3).T
    assert digest([("x", transposed)]) == digest([("x", transposed.contiguous())])
    assert digest([("x", tensors[0])]) != digest([("y", tensors[0])])
    assert digest([("x", torch.zeros(0))]) != digest([("x", torch.zeros(2).bfloat16())])
