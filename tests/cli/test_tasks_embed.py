"""``taskinfo embed``: what it writes, that it continues, and how it says no."""

import json
from functools import partial

import numpy as np
import pytest

from lightning_taskinfo import cli
from lightning_taskinfo.data import ArrayData, save_npz
from lightning_taskinfo.tasks import reference_network
from tests.transfer.tiny import tiny_task

SMALL = ["--max_samples=20", "--weight_decay=0.1"]


NAMES = ["tiny", "inverted", "two classes"]


@pytest.fixture(autouse=True, scope="module")
def shortly_trained():
    """The reference network of a single epoch, which other tests train too."""
    with pytest.MonkeyPatch.context() as patch:
        short = partial(reference_network, epochs=1)
        patch.setattr("lightning_taskinfo.cli.tasks.reference_network", short)
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory, shortly_trained):
    folder = tmp_path_factory.mktemp("embed")
    save_npz(folder / "tiny.npz", tiny_task())
    path = folder / "tiny.npz"
    specs = [path, f"{path}:inverted", f"{path}:only-0-1"]
    tasks = ", ".join(f'"{name}": "{spec}"' for name, spec in zip(NAMES, specs, strict=True))
    assert cli.main(["embed", f"--tasks={{{tasks}}}", f"--folder={folder / 'new'}", *SMALL]) == 0
    return folder / "new"


def test_writes_embeddings_distances_and_figures(written):
    result = json.loads((written / "embeddings.json").read_text())
    assert [row["task"] for row in result["tasks"]] == NAMES
    assert [row["classes"] for row in result["tasks"]] == [3, 3, 2]
    for row in result["tasks"]:
        file = written / f"task_{row['task'].replace(' ', '_')}.json"
        kept = json.loads(file.read_text())
        assert len(kept["vector"]) == sum(kept["sizes"]) == 16 + 32 + 48 + 64
        assert (kept["name"], sum(kept["vector"])) == (row["task"], pytest.approx(row["norm"]))
        assert 0 <= row["test_error"] < 0.5
    distances = np.array(result["distances"])
    assert np.array_equal(distances, distances.T)
    assert not distances.diagonal().any()
    assert (written / "task_map.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_names_the_nearest_source(tmp_path, capsys, arrays_of_two_classes):
    save_npz(tmp_path / "mine.npz", arrays_of_two_classes)
    command = [
        "embed",
        f"--tasks={{a: {tmp_path / 'mine.npz'}}}",
        f"--data={tmp_path / 'mine.npz'}",
    ]
    assert cli.main([*command, f"--folder={tmp_path / 'out'}", *SMALL]) == 0
    header, first, second, folder = capsys.readouterr().out.splitlines()
    assert header.split() == [
        *("task", "classes", "norm", "test", "error", "nearest", "source", "distance")
    ]
    assert (first.split()[0], first.split()[-2]) == ("a", str(tmp_path / "mine.npz"))
    assert second.split()[1] == "2"
    assert folder == str(tmp_path / "out")


def test_takes_npz_files(tmp_path, arrays_of_two_classes):
    save_npz(tmp_path / "mine.npz", arrays_of_two_classes)
    command = [
        "embed",
        f"--tasks=[{tmp_path / 'mine.npz'}]",
        f"--folder={tmp_path / 'out'}",
        *SMALL,
    ]
    assert cli.main(command) == 0
    (row,) = json.loads((tmp_path / "out" / "embeddings.json").read_text())["tasks"]
    assert (row["task"], row["classes"]) == (str(tmp_path / "mine.npz"), 2)
    assert "nearest_source" not in row


@pytest.fixture
def arrays_of_two_classes():
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    images = (rng.integers(0, 100, (40, 3, 9, 8)) + 100 * labels[:, None, None, None]).astype(
        np.uint8
    )
    return ArrayData(images, labels, images, labels, name="two", num_classes=2)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--tasks=[digits,digits]",
            "`tasks` must have different names, got ['digits', 'digits']",
        ),
        (
            "--tasks=[nothing]",
            "A dataset must be digits or letters or name a file; 'nothing' was not found",
        ),
        ("--tasks=[digits:sideways]", "A variant must be like one of even-odd"),
        ("--weight_decay=0", "`weight_decay` must be positive, got 0.0."),
        ("--max_samples=0", "`max_samples` must be at least 1, got 0."),
    ],
)
def test_wrong_values_end_with_2_and_their_message(argument, message, written, capsys):
    out = written.parent / "other"
    assert cli.main(["embed", f"--folder={out}", *SMALL, argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("taskinfo: error: ")
    assert message in error
    assert not out.exists()


def test_a_wrong_task_is_refused_before_the_network_is_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "lightning_taskinfo.cli.tasks.reference_network", lambda **_: pytest.fail("not needed")
    )
    assert cli.main(["embed", "--tasks=[digits,nothing]", f"--folder={tmp_path / 'new'}"]) == 2
    assert "'nothing' was not found" in capsys.readouterr().err
