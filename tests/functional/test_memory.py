"""Memory is used again only when nobody could notice."""

import copy
import pickle

import pytest
import torch

from lightning_taskinfo.functional import _memory
from lightning_taskinfo.functional._memory import Recycler

LIKE = torch.zeros(128, 160)
HOLDERS = {
    "the tensor": lambda t: t,
    "a view": lambda t: t[3:5, ::2],
    "a detached view": lambda t: t.detach().flatten(),
    "a numpy array": lambda t: t.numpy(),
    "a graph": lambda t: torch.ones_like(t, requires_grad=True) * t.zero_(),
}


@pytest.fixture
def recycler():
    return Recycler()


def address(tensor):
    return tensor.data_ptr()


def test_memory_that_was_let_go_is_used_again(recycler):
    assert len({address(recycler.empty_like(LIKE)) for _ in range(5)}) == 1
    assert len({address(t) for t in [recycler.empty_like(LIKE) for _ in range(5)]}) == 5
    assert len(recycler._kept) == 5


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_memory_that_is_held_is_left_alone(recycler, hold):
    first = recycler.empty_like(LIKE)
    where, held = address(first), hold(first)
    del first
    assert address(recycler.empty_like(LIKE)) != where
    del held
    assert where in {address(t) for t in [recycler.empty_like(LIKE), recycler.empty_like(LIKE)]}


def test_a_gradient_is_held_by_its_parameter(recycler):
    parameter = torch.nn.Parameter(LIKE.clone())
    torch.autograd.backward(parameter, recycler.empty_like(LIKE).fill_(2))
    recycler.empty_like(LIKE).fill_(7)
    assert parameter.grad.eq(2).all()


@pytest.mark.parametrize(
    "like", [LIKE, LIKE.double(), LIKE.mT, torch.zeros(3), torch.zeros(0), LIKE.to("meta")], ids=str
)
def test_looks_like_what_it_was_asked_for(recycler, like):
    for _ in range(2):
        made, expected = recycler.empty_like(like), torch.empty_like(like)
        assert (made.shape, made.stride(), made.dtype, made.device) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
            expected.device,
        )
        assert not made.requires_grad


def test_memory_of_another_size_is_let_go(recycler):
    recycler.empty_like(LIKE)
    recycler.empty_like(LIKE.double())
    assert [storage.nbytes() for storage, _ in recycler._kept] == [8 * LIKE.numel()]


def test_in_inference_mode_and_after(recycler):
    with torch.inference_mode():
        recycler.empty_like(LIKE).normal_()
    again = recycler.empty_like(LIKE)
    assert not again.is_inference()


def test_copies_begin_empty(recycler):
    recycler.empty_like(LIKE)
    assert copy.deepcopy(recycler)._kept == pickle.loads(pickle.dumps(recycler))._kept == []


def test_without_a_count_of_users_nothing_is_used_again(recycler, monkeypatch):
    monkeypatch.setattr(_memory, "_use_count", None)
    recycler.empty_like(LIKE)
    assert not recycler._kept
