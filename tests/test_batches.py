"""Batches of any structure are joined as they are taken apart."""

from collections import namedtuple
from operator import itemgetter

import pytest
import torch

from lightning_taskinfo._batches import joined, sample_count, take, tensors

Pair = namedtuple("Pair", ["x", "y"])
X, Y = torch.arange(6.0).view(6, 1), torch.arange(6)


@pytest.mark.parametrize("batch", [X, (X, Y), [X, {"y": Y}], Pair(X, (Y, Y)), {"x": X, "pair": Pair(X, Y)}])
def test_the_parts_of_a_batch_make_the_batch(batch):
    parts = [take(batch, itemgetter(slice(start, start + 4))) for start in (0, 4)]
    whole = joined(parts)
    assert type(whole) is type(batch)
    assert sample_count(whole) == 6
    assert all(torch.equal(a, b) for a, b in zip(tensors(whole), tensors(batch), strict=True))
