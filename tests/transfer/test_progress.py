"""A transfer tells how far it is: of every finished training, those from the disk too."""

import re
import time

import pytest

from lightning_taskinfo.transfer import transfer
from lightning_taskinfo.transfer.run import announced
from tests.transfer.own_nets import Net, clusters
from tests.transfer.tiny import STAGES, tiny_data, tiny_net, tiny_trials


def test_transfer_tells_of_every_training_those_from_the_disk_too(tmp_path):
    told = []
    options = {"seeds": 1, "stages": STAGES, "folder": tmp_path}
    for _ in range(2):
        transfer(tiny_net, tiny_data(), progress=lambda *state: told.append(state), **options)
    assert [state[:2] for state in told] == [(1, 3), (2, 3), (3, 3)] * 2
    assert told[2][2] == "standard, 9 labels, seed 0"


def test_a_cell_in_words(tmp_path):
    words = [cell.description for cell in tiny_trials(tmp_path, methods=["lautum"])]
    assert words == [
        "scratch, 9 labels, seed 0",
        "pretrain lautum, seed 0",
        "lautum, 9 labels, seed 0",
    ]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.21, "24 trainings of about 0.21 s, about 5 s in 1 process"),
        (1.4, "24 trainings of about 1.4 s, about 34 s in 1 process"),
        (3.75, "24 trainings of about 3.8 s, about 1.5 min in 1 process"),
        (300.0, "24 trainings of about 5 min, about 120 min in 1 process"),
    ],
)
def test_the_time_of_one_training_agrees_with_that_of_all(seconds, told):
    assert announced(24, seconds, 0, None) == told


class Slow(Net):
    """Takes its time before it trains, whatever the number of steps."""

    def on_fit_start(self):
        time.sleep(0.3)


def test_the_estimate_counts_what_lightning_does_before_the_first_step(capsys):
    target = {"train": clusters(12, 3), "test": clusters(6, 3, seed=1)}
    options = {"trainer": {"max_steps": 1}, "seeds": 1}
    transfer(Slow, target, starts={"mine": Net().state_dict()}, **options)
    estimate = re.search(r"2 trainings of about (\S+) s,", capsys.readouterr().err)
    assert float(estimate[1]) >= 0.3
