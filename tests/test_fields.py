"""Targets are told from inputs by their names or places."""

import pytest
import torch

from lightning_taskinfo._batches import read_batch
from lightning_taskinfo._fields import labeled_part

X, Y = torch.arange(6.0).view(6, 1), torch.arange(6)


def test_the_labelled_part_is_the_only_one_with_labels_or_the_one_that_is_called_so():
    assert labeled_part({"labeled": (X, Y), "other": (X, Y)}) == (X, Y)
    assert labeled_part({"a": X, "b": (X, Y)}) == (X, Y)
    with pytest.raises(ValueError, match="got dict with a, b; set `batch_fn`"):
        read_batch({"a": (X, Y), "b": (X, Y)})
