"""A transfer tells how far it is: of every finished training, those from the disk too."""

from lightning_taskinfo.transfer import transfer
from tests.transfer.tiny import STAGES, tiny_data, tiny_net, tiny_trials


def test_transfer_tells_of_every_training_those_from_the_disk_too(tmp_path):
    told, done = [], []
    hooks = {
        "progress": lambda *state: told.append(state),
        "on_done": lambda *pair: done.append(pair),
    }
    for _ in range(2):
        transfer(tiny_net, tiny_data(), seeds=1, stages=STAGES, folder=tmp_path, **hooks)
    assert [state[:2] for state in told] == [(1, 3), (2, 3), (3, 3)] * 2
    assert told[2][2] == "standard, 9 labels, seed 0"
    assert [(cell.name, result) for cell, result in done[:3]] == [
        (cell.name, result) for cell, result in done[3:]
    ]
    assert done[2][0].stage == "fine_tune"
    assert 0 <= done[2][1]["test"]["accuracy"] <= 1


def test_a_cell_in_words(tmp_path):
    words = [cell.description for cell in tiny_trials(tmp_path, methods=["lautum"])]
    assert words == [
        "pretrain lautum, seed 0",
        "scratch, 9 labels, seed 0",
        "lautum, 9 labels, seed 0",
    ]
