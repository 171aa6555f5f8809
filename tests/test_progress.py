"""A bar where somebody looks, nothing where nobody does, and what a user's own function is told."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_taskinfo import Prior, Training, certify, structure_function, task_distance
from lightning_taskinfo._progress import counted, shown

X, Y = torch.linspace(-1, 1, 16)[:, None], (torch.arange(16) > 8).long()
QUICK = Training(pretrain_steps=1, steps=1)


def network() -> nn.Module:
    return nn.Linear(1, 2)


def of_certify(progress):
    return certify(
        network(), (X, Y), Prior(), structure="diagonal", draws=3, betas=[1, 2], progress=progress
    )


def of_structure_function(progress):
    return structure_function(network, (X, Y), [2, 1], training=QUICK, progress=progress)


def of_task_distance(progress):
    return task_distance(
        {"a": (X, Y)}, 1.0, trunk_fn=nn.Flatten, training=QUICK, seeds=1, progress=progress
    )


TOLD = {  # the call -> what a function of ours is told
    of_certify: [
        (1, 2, "search"),
        (2, 2, "search"),
        (1, 3, "draws"),
        (2, 3, "draws"),
        (3, 3, "draws"),
    ],
    of_structure_function: [(1, 2, "β = 2"), (2, 2, "β = 1")],
    of_task_distance: [(1, 2, "seed-0_task-0"), (2, 2, "seed-0_task-0-0")],
}
all_calls = pytest.mark.parametrize("call", TOLD, ids=lambda call: call.__name__[3:])


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr("lightning_taskinfo._progress.visible", lambda: True)


@all_calls
def test_a_function_is_told(call):
    told = []
    call(lambda *state: told.append(state))
    assert told == TOLD[call]


@all_calls
def test_a_bar_in_a_terminal(call, terminal, capsys):
    call(True)
    title, (_, total, label) = call.__name__[3:], TOLD[call][-1]
    assert f"{title} {label}: " in (drawn := capsys.readouterr().err)
    assert f"/{total} [" in drawn


@all_calls
def test_nothing_on_request(call, terminal, capsys):
    call(False)
    assert capsys.readouterr().err == ""


@all_calls
def test_nothing_of_short_calls_where_nobody_looks(call, capsys):
    call(True)
    assert capsys.readouterr().err == ""


@all_calls
def test_a_line_now_and_then_where_nobody_looks(call, capsys, monkeypatch):
    monkeypatch.setattr("lightning_taskinfo._progress.PAUSE", 0.0)
    call(True)
    told = [f"[{done}/{total}] {call.__name__[3:]} {label}" for done, total, label in TOLD[call]]
    assert capsys.readouterr().err.splitlines() == told


def test_lines_end_where_all_is_done(capsys, monkeypatch):
    clock = iter([0, 11, 11, 12, 13, 13])  # at first, and at each look and line
    time = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("lightning_taskinfo._progress.time", time)
    with shown(True, "work", 3) as tell:
        for done in (1, 2, 3):
            tell(done, 3, "all")
    assert capsys.readouterr().err.splitlines() == ["[1/3] work all", "[3/3] work all"]


def test_a_bar_follows_what_it_is_told_and_starts_anew_with_a_new_total(terminal, capsys):
    with shown(True, "work", 9) as tell:
        tell(7, 9, "first")
        tell(1, 4, "second")
        tell(3, 4, "third")
    lines = capsys.readouterr().err.split("\r")
    assert lines[1].startswith("work:   0%|")
    assert any(line.startswith("work first") and " 7/9 [" not in line for line in lines)
    assert any(line.startswith("work third") and " 1/4 [" in line for line in lines)
    assert not lines[-1].strip()  # nothing is left behind


def test_a_bar_shows_how_many_are_done_and_not_how_many_a_second(terminal, capsys):
    with shown(True, "work", 4) as tell:
        for done, label in enumerate("abc", 1):
            tell(done, 4, label)
    drawn = capsys.readouterr().err
    assert any(line.startswith("work c") and " 2/4 [" in line for line in drawn.split("\r"))
    assert "it/s" not in drawn


def test_an_item_counts_when_it_is_done():
    events = []
    for item in counted("ab", 2, lambda done, total, label: events.append(done), "letters"):
        events.append(item)
    assert events == ["a", 1, "b", 2]
