"""Which outputs look like probabilities."""

import pytest
import torch

from lightning_taskinfo.functional.likelihood import look_like_probabilities


@pytest.mark.parametrize("shape", [(4, 2), (4, 3, 5), (1, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_softmax_looks_like_probabilities_in_any_precision(shape, dtype):
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert look_like_probabilities(outputs.to(dtype))


def test_certain_classes_look_like_probabilities():
    assert look_like_probabilities(torch.eye(3))


@pytest.mark.parametrize(
    "outputs",
    [
        [[0.5, 0.52]],
        [[0.5, 0.75], [0.5, 0.5]],  # one row adds up to more
        [[1.5, -0.5]],
        [[1.0], [1.0]],  # one output is a score or a prediction
        [[float("nan"), 0.5]],
    ],
)
def test_scores_do_not(outputs):
    assert not look_like_probabilities(torch.tensor(outputs))
