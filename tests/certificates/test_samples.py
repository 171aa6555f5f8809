"""Inputs that were used are found by their contents; those that are equal by chance are told apart from them."""

import pytest
import torch
from torch import nn

from lightning_taskinfo.certificates import samples
from lightning_taskinfo.certificates.samples import (
    check_fresh,
    count_repeats,
    fingerprints,
    read_labelled,
    read_pair,
)


def test_equal_rows_have_equal_prints_whatever_holds_them():
    x = torch.randn(20, 3, 4)
    assert fingerprints(x) == fingerprints(x.double())
    assert fingerprints(-0.0 * x.abs()) == fingerprints(0.0 * x.abs())
    assert fingerprints({"a": x}) == fingerprints([x])
    assert len(set(fingerprints(x))) == 20
    assert fingerprints(x.bfloat16()) == fingerprints(x.bfloat16().float())
    assert fingerprints(torch.arange(5)) == fingerprints(torch.arange(5, dtype=torch.int32))
    moved = [x.clone(), torch.arange(20)]
    moved[1][3] += 1
    differs = [
        a != b
        for a, b in zip(fingerprints([x, torch.arange(20)]), fingerprints(moved), strict=True)
    ]
    assert differs == [i == 3 for i in range(20)]


def test_one_used_input_among_many_is_refused():
    used = torch.randn(50, 3)
    assert check_fresh("unlabelled", torch.randn(100, 3), used, "them") == []
    with pytest.raises(ValueError, match=r"`unlabelled` .*got 1 of 101"):
        check_fresh("unlabelled", torch.cat([torch.randn(100, 3), used[7:8]]), used, "them")


@pytest.mark.parametrize("seed", range(5))
def test_inputs_that_are_equal_by_chance_are_told_and_not_refused(seed):
    """Independent draws from a few hundred values, half of which meet again, and a copy of the used ones."""
    g = torch.Generator().manual_seed(seed)
    used, fresh = (torch.randint(300, (n, 1), generator=g) for n in (200, 1_000))
    (note,) = check_fresh("unlabelled", fresh, used, "the certified samples")
    assert "of 1000 inputs of `unlabelled`" in note
    with pytest.raises(ValueError, match=r"`unlabelled` .*got 200 of 200"):
        check_fresh("unlabelled", used.flip(0), used, "the certified samples")


def test_complex_inputs_are_told_apart_by_both_parts():
    x = torch.complex(torch.rand(4, 3), torch.rand(4, 3))
    assert fingerprints(x) == fingerprints(x.clone())
    assert not {*fingerprints(x)} & {*fingerprints(x.conj())}
    with pytest.raises(ValueError, match="`unlabelled`"):
        check_fresh("unlabelled", x, x, "the certified samples")


def test_batches_of_several_shapes_are_refused(monkeypatch):
    monkeypatch.setattr(samples, "BATCH", 1)
    data = [(torch.zeros(size), 0) for size in (2, 3, 2)]
    with pytest.raises(ValueError, match="`data` must hold samples of one shape, got several"):
        read_pair(data, argument="data")


def test_samples_that_occur_more_than_once_are_counted_by_input_and_label():
    x = torch.tensor([[0.0], [0.0], [0.0], [1.0], [2.0]])
    y = torch.tensor([0, 0, 1, 0, 0])
    assert count_repeats((x, y)) == (5, 2, 4)
    assert count_repeats((x, None)) == (5, 3, 3)
    assert count_repeats(({"a": x, "b": y}, y)) == (5, 2, 4)


@pytest.mark.parametrize("model", [None, nn.Linear(3, 2)])
@pytest.mark.parametrize("kind", [tuple, lambda pair: {"x": pair[0], "labels": pair[1]}])
def test_a_target_without_an_axis_is_refused(model, kind):
    data = kind((torch.randn(10, 3), torch.tensor(1)))
    with pytest.raises(
        ValueError, match=r"`held_out` must hold a row for each sample.*got shape \[\]"
    ):
        read_labelled(data, argument="held_out", model=model)
