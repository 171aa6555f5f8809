"""Seeds of several numbers, and global generators that are what they were."""

import random
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch

from lightning_taskinfo._random import (
    keep_random_states,
    own_randomness,
    seed_everything,
    seed_from,
)


def drawn() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002


def test_a_seed_belongs_to_its_numbers_in_their_order():
    assert len({seed_from(a, b) for a in range(10) for b in range(10)}) == 100
    assert seed_from(3, 4) == seed_from(3, 4)
    assert all(0 <= seed_from(-1, n) < 2**63 for n in range(100))


def test_everything_is_seeded():
    restore = keep_random_states()
    try:
        seed_everything(2**40)
        first = drawn()
        seed_everything(2**40)
        assert drawn() == first
        seed_everything(1)
        assert all(a != b for a, b in zip(drawn(), first, strict=True))
    finally:
        restore()


@pytest.mark.parametrize("count", [0, 1])
def test_devices_are_seeded_where_there_are_some_and_cuda_is_left_to_forked_processes(
    monkeypatch, count
):
    seeds = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(
        torch.cuda, "is_available", None
    )  # after which they could not begin with it
    seed_everything(3)
    assert seeds == [3] * count


def test_own_randomness_repeats_itself_and_leaves_the_generators_as_they_were():
    restore = keep_random_states()
    after = drawn()
    restore()
    with own_randomness(3):
        first = torch.rand(())
        drawn()
    assert drawn() == after
    with own_randomness(3):
        assert torch.equal(torch.rand(()), first)


@pytest.mark.parametrize(("name", "arguments"), [("cuda", [torch.device("cuda", 0)]), ("mps", [])])
def test_random_states_of_accelerators_come_back(monkeypatch, name, arguments):
    """There may be none here, so their functions stand in; older versions of the one for mps take no device."""
    module, state = getattr(torch, name), torch.tensor([1])
    read, write = (
        create_autospec(getattr(module, f"{verb}_rng_state"), return_value=state)
        for verb in ("get", "set")
    )
    monkeypatch.setattr(module, "get_rng_state", read)
    monkeypatch.setattr(module, "set_rng_state", write)
    restore = keep_random_states({torch.device(name, 0), torch.device("cpu")})
    read.assert_called_once_with(*arguments)
    write.assert_not_called()
    restore()
    write.assert_called_once_with(state, *arguments)
