"""``taskinfo embed``: what it writes, that it continues, and how it says no."""

import json

import numpy as np
import pytest

from lightning_taskinfo import cli
from lightning_taskinfo.data import ArrayData, save_npz
from lightning_taskinfo.tasks import TaskEmbedding
from lightning_taskinfo.tasks.task2vec import Task2Vec

SMALL = ["--size=8", "--max_samples=20", "--probe_epochs=1", "--weight_decay=0.1"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("embed") / "new"
    assert (
        cli.main(
            [
                "embed",
                "--tasks=[digits:even-odd,digits:small-large,digits:only-0-1]",
                f"--folder={out}",
                *SMALL,
            ]
        )
        == 0
    )
    return out


def test_writes_embeddings_distances_and_figures(written):
    result = json.loads((written / "embeddings.json").read_text())
    assert [row["task"] for row in result["tasks"]] == [
        "digits:even-odd",
        "digits:small-large",
        "digits:only-0-1",
    ]
    for row in result["tasks"]:
        assert len(row["vector"]) == sum(row["layers"].values()) == 16 + 32 + 48 + 64
        assert sum(row["vector"]) == pytest.approx(row["norm"])
        assert 0 <= row["test_error"] < 0.5
    distances = np.array(result["symmetric_distances"])
    assert np.array_equal(distances, distances.T)
    assert not distances.diagonal().any()
    for figure in ("task_map.png", "difficulty.png"):
        assert (written / figure).read_bytes().startswith(b"\x89PNG")
    kept = TaskEmbedding.load(written / "digits_even-odd.npz")
    assert kept.vector.tolist() == result["tasks"][0]["vector"]


def test_continues_with_what_is_there_and_takes_new_tasks(written, capsys, monkeypatch):
    calls = []
    embed = Task2Vec.embed
    monkeypatch.setattr(
        Task2Vec,
        "embed",
        lambda self, data, *, name: calls.append(name) or embed(self, data, name=name),
    )
    before = json.loads((written / "embeddings.json").read_text())["tasks"][0]["vector"]
    assert (
        cli.main(["embed", "--tasks=[digits:even-odd,digits:one-3]", f"--folder={written}", *SMALL])
        == 0
    )
    assert calls == ["digits:one-3"]
    header, first, second, folder = capsys.readouterr().out.splitlines()
    assert header.split() == ["task", "classes", "norm", "test_error", "distance", "nearest_source"]
    assert (first.split()[0], first.split()[-1]) == ("digits:even-odd", "digits:one-3")
    assert second.split()[1] == "2"
    assert folder == str(written)
    assert json.loads((written / "embeddings.json").read_text())["tasks"][0]["vector"] == before


def test_takes_npz_files(tmp_path, arrays_of_two_classes):
    save_npz(tmp_path / "mine.npz", arrays_of_two_classes)
    command = [
        "embed",
        "--tasks=[mine]",
        f"--data_dir={tmp_path}",
        f"--folder={tmp_path / 'out'}",
        *SMALL,
    ]
    assert cli.main(command) == 0
    (row,) = json.loads((tmp_path / "out" / "embeddings.json").read_text())["tasks"]
    assert (row["task"], row["classes"], row["samples"]) == ("mine", 2, 20)
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
            "`tasks` must name at least one task, each once, got ['digits', 'digits'].",
        ),
        (
            "--tasks=[nothing]",
            "A dataset must be digits or letters or name a file; 'nothing' was not found",
        ),
        ("--tasks=[digits:sideways]", "A variant must be like one of even-odd"),
        ("--weight_decay=0", "`weight_decay` must be positive, got 0.0."),
        ("--probe_epochs=0", "`epochs` must be at least 1, got 0."),
        ("--max_samples=21", "`folder` must be new or of the same configuration"),
    ],
)
def test_wrong_values_end_with_2_and_their_message(argument, message, written, capsys):
    out = written if "21" in argument else written.parent / "other"
    assert cli.main(["embed", f"--folder={out}", *SMALL, argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("taskinfo: error: ")
    assert message in error
    assert (
        out is written or not out.exists()
    )  # or the next call, put right, would find another configuration


def test_a_wrong_task_is_refused_before_the_probe_is_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "lightning_taskinfo.cli.embed.default_probe", lambda **_: pytest.fail("not needed")
    )
    assert cli.main(["embed", "--tasks=[digits,nothing]", f"--folder={tmp_path / 'new'}"]) == 2
    assert "'nothing' was not found" in capsys.readouterr().err
