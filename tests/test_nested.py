"""Batches of any structure are taken apart and joined."""

from collections import namedtuple
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo._nested import joined, pick, sample_count, take, tensors

Pair = namedtuple("Pair", ["x", "y"])
X, Y = torch.arange(6.0).view(6, 1), torch.arange(6)


@pytest.mark.parametrize(
    "batch", [X, (X, Y), [X, {"y": Y}], Pair(X, (Y, Y)), {"x": X, "pair": Pair(X, Y)}]
)
def test_the_parts_of_a_batch_make_the_batch(batch):
    parts = [take(batch, itemgetter(slice(start, start + 4))) for start in (0, 4)]
    whole = joined(parts)
    assert type(whole) is type(batch)
    assert sample_count(whole) == 6
    assert all(torch.equal(a, b) for a, b in zip(tensors(whole), tensors(batch), strict=True))


@pytest.mark.parametrize(
    "index", [slice(1, 4, 2), torch.tensor([3, 1, 1]), Y % 2 == 1], ids=["slice", "rows", "mask"]
)
def test_samples_are_picked_out_of_every_part(index):
    batch = {"x": X, "pair": Pair(X, [Y, "name"])}
    some = pick(batch, index)
    assert type(some["pair"]) is Pair
    assert some["pair"].y[1] == "name"
    for found in (some["x"], some["pair"].x):
        assert torch.equal(found, X[index])
    assert torch.equal(some["pair"].y[0], Y[index])
    assert {x.device.type for x in tensors(pick(batch, index, torch.device("meta")))} == {"meta"}


PAD = 9


def text(lengths: list[int], *, padded: bool) -> dict[str, Tensor]:
    """Texts, padded with a token of the network's own, or all of one length."""
    rows = [torch.arange(1, n + 1) for n in lengths]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    assert padded == bool((ids == PAD).any())
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "token_type_ids": ids * 0}


class WithToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=PAD)


def test_fields_of_a_decoder_have_a_length_of_their_own():
    def batch(length):
        answer = torch.ones(1, length).long()
        pixels = torch.zeros(1, 3, 4, 4)
        return text([2], padded=False) | {
            "labels": answer, "decoder_input_ids": answer, "decoder_attention_mask": answer, "pixels": pixels
        }  # fmt: skip

    whole = joined([batch(3), batch(1)], WithToken())
    assert whole["labels"][1].tolist() == [1, -100, -100]
    assert whole["decoder_input_ids"][1].tolist() == [1, PAD, PAD]
    assert whole["decoder_attention_mask"][1].tolist() == [1, 0, 0]
    assert whole["pixels"].shape == (2, 3, 4, 4)


@pytest.mark.parametrize("padded", [True, False])
def test_texts_are_padded_with_the_token_of_the_batches_or_of_the_model(padded):
    """Some networks find the end of a text by that token, and not by the mask."""
    first = text([2, 3] if padded else [3, 3], padded=padded)
    model = None if padded else nn.Sequential(WithToken())
    whole = joined([first, text([5], padded=False)], model)
    assert whole["input_ids"][1].tolist() == [1, 2, 3, PAD, PAD]
    assert whole["attention_mask"][1].tolist() == [1, 1, 1, 0, 0]
    assert whole["token_type_ids"][1].tolist() == [0] * 5
