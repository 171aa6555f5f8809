"""A transfer tells how far it is: epochs of its trainings in a terminal, finished trainings elsewhere."""

import sys
from functools import partial

import pytest

from lightning_taskinfo.transfer import transfer
from lightning_taskinfo.transfer.logs import _look, following
from lightning_taskinfo.transfer.ready.stages import Cell, Experiment
from tests.transfer.tiny import STAGES, tiny_data, tiny_net


@pytest.fixture
def cells(tmp_path):
    experiment = Experiment(tmp_path, tiny_net, tiny_data().arguments, STAGES)
    return [Cell(experiment, "scratch", "scratch", 9, seed) for seed in (0, 1)]


def write_epochs(cell, count):
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / "progress.json").write_text(str(count))


def test_follows_the_files_of_the_trainings(cells):
    told, done = [], set()
    look = partial(_look, lambda *state: told.append(state), cells, done, 4)
    look()
    write_epochs(cells[0], 1)
    look()
    done.add(cells[1].name)
    look()
    assert told == [
        (0, 4, "starting"),
        (1, 4, "from scratch, 9 labels, seed 0"),
        (3, 4, "from scratch, 9 labels, seed 0"),
    ]


def test_a_bar_of_epochs_in_a_terminal(cells, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    drawn = ""
    with following(cells, True, interval=0.01) as finished:
        write_epochs(cells[0], 1)
        finished(cells[1], {})
        while " 3/4 [" not in drawn:  # ends with the test's time
            drawn += capsys.readouterr().err
    assert "transfer from scratch, 9 labels, seed 0: " in drawn


def test_a_function_is_told_of_trainings_and_lines_are_written_elsewhere(cells, capsys):
    told = []
    for progress in (lambda *state: told.append(state), True, False):
        with following(cells, progress) as finished:
            for cell in cells:
                finished(cell, {})
    assert told == [(1, 2, cells[0].description), (2, 2, cells[1].description)]
    assert (
        capsys.readouterr().err == f"[1/2] {cells[0].description}\n[2/2] {cells[1].description}\n"
    )


def test_transfer_tells_of_every_training_those_from_the_disk_too(tmp_path):
    told, done = [], []
    hooks = {
        "progress": lambda *state: told.append(state),
        "on_done": lambda *pair: done.append(pair),
    }
    for _ in range(2):
        transfer(tiny_net, tiny_data(), seeds=1, stages=STAGES, folder=tmp_path, **hooks)
    assert [state[:2] for state in told] == [(1, 3), (2, 3), (3, 3)] * 2
    assert told[2][2] == "fine-tune standard, 9 labels, seed 0"
    assert [(cell.name, result) for cell, result in done[:3]] == [
        (cell.name, result) for cell, result in done[3:]
    ]
    assert done[2][0].stage == "fine_tune"
    assert 0 <= done[2][1]["test"]["accuracy"] <= 1


def test_a_cell_in_words(cells):
    assert cells[0].description == "from scratch, 9 labels, seed 0"
