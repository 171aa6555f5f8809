"""Each way to a convolution's per-sample gradients against a loop, whatever the way its sizes would choose."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_taskinfo.fisher.graph import Edge
from lightning_taskinfo.fisher.ops import CONVOLUTION, Conv, Grouped, Weight, blocks
from lightning_taskinfo.fisher.proof import Rows
from lightning_taskinfo.fisher.terms import OfUses

N = 5
CASES = {  # channels, outputs, kernel, input, options
    "3x3": (3, 4, (3, 3), (7, 6), {"padding": [1, 1]}),
    "one channel": (1, 4, (3, 2), (6, 7), {"stride": [2, 1], "padding": [1, 0]}),
    "stride leaves rows": (2, 3, (3, 3), (8, 7), {"stride": [3, 2]}),
    "one row": (2, 3, (1, 3), (4, 6), {}),
    "one column": (2, 3, (3, 1), (6, 4), {"padding": [1, 0]}),
    "many channels": (9, 4, (3, 2), (7, 6), {"padding": [1, 2], "stride": [2, 1]}),
    "apart": (3, 4, (2, 3), (4, 6), {"stride": [2, 3]}),
    "1x1": (3, 4, (1, 1), (4, 4), {}),
}
WAYS = [Conv, Grouped]  # by patches, or as groups


def use_of(way: type[Conv], a: torch.Tensor, w: torch.Tensor, **config: Any) -> Conv:
    """The use of a kernel in a convolution that is run."""
    options = {"bias": None, "transposed": False, "output_padding": [0, 0], "groups": 1, **config}
    node = torch.convolution(a, w, **options).grad_fn
    at = Weight(node, 1, Edge(node.next_functions[1][0], 0), Rows(), ())
    return way(at, a, **{name: options[name] for name in CONVOLUTION})


def made(case, way, *, memory_format=torch.contiguous_format):
    channels, out, kernel, size, options = CASES[case]
    torch.manual_seed(0)
    config = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1, **options}
    a = torch.randn(N + 2, channels, *size, dtype=torch.float64).to(memory_format=memory_format)[
        1:-1
    ]
    w = torch.randn(out, channels, *kernel, dtype=torch.float64, requires_grad=True)
    scores = [torch.randn_like(F.conv2d(a, w, None, **config)) for _ in range(2)]
    expected = [
        torch.stack(
            [
                torch.autograd.grad((F.conv2d(x[None], w, None, **config) * y).sum(), w)[0]
                for x, y in pairs
            ]
        )
        for pairs in (list(zip(a, b, strict=True)) for b in scores)
    ]
    use = use_of(way, a, w, **config)
    return use, scores, expected


def found(use, scores):
    return OfUses(use.at.source, [(use, torch.stack(scores))])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_every_way_gives_the_gradients_of_a_loop(case, way):
    use, scores, expected = made(case, way)
    everybody = slice(0, N)
    first, second = use.arranged(torch.stack(scores))
    torch.testing.assert_close(use.gradients(first, everybody), expected[0])
    torch.testing.assert_close(use.gradients(second, slice(1, 3)), expected[1][1:3])
    gradients = found(use, scores)
    torch.testing.assert_close(
        gradients.norms(), sum(g.flatten(1).square().sum(1) for g in expected)
    )
    torch.testing.assert_close(gradients.diagonal(), sum(g.square().sum(0) for g in expected))


@pytest.mark.parametrize("way", WAYS)
def test_inputs_may_lie_in_memory_as_they_like(way):
    use, scores, expected = made("3x3", way, memory_format=torch.channels_last)
    (first, _) = use.arranged(torch.stack(scores))
    gradients = use.gradients(first, slice(0, N))
    torch.testing.assert_close(gradients, expected[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_few_samples_at_a_time_give_the_same(monkeypatch, way):
    use, scores, expected = made("3x3", way)
    of_one = use.copied if way is Conv else use.shape.numel()
    monkeypatch.setattr("lightning_taskinfo.fisher.ops.BLOCK", 2 * of_one)
    assert len([*blocks(N, use.elements)]) == 3
    gradients = found(use, scores)
    torch.testing.assert_close(
        gradients.norms(), sum(g.flatten(1).square().sum(1) for g in expected)
    )
    torch.testing.assert_close(gradients.diagonal(), sum(g.square().sum(0) for g in expected))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("rows", "samples"),
    [
        (Rows(repeat=3), [[0, 1, 2], [3, 4, 5]]),
        (Rows(repeat=3, index=torch.tensor([[0, 2, 4], [1, 3, 5]])), [[0, 2, 4], [1, 3, 5]]),
        (Rows(repeat=3, index=torch.tensor([[5, 0, 6], [1, 2, 4]])), [[5, 0], [1, 2, 4]]),
    ],
    ids=["in order", "interleaved", "in any order"],
)
def test_rows_of_a_sample_add_up(way, rows, samples):
    use, _, _ = made("3x3", way)
    torch.manual_seed(0)
    inputs = torch.randn(6, 3, 7, 6, dtype=torch.float64)
    use = replace(use, inputs=inputs, at=replace(use.at, rows=rows))
    b = torch.randn(6, 4, 7, 6, dtype=torch.float64)
    single = replace(use, at=replace(use.at, rows=Rows()))
    each = single.gradients(single.arranged(b[None])[0], slice(0, 6))
    expected = torch.stack([each[numbers].sum(0) for numbers in samples])
    (arranged,) = use.arranged(b[None])
    torch.testing.assert_close(use.gradients(arranged, slice(0, 2)), expected)
    torch.testing.assert_close(found(use, [b]).norms(), expected.flatten(1).square().sum(1))


@pytest.mark.parametrize(
    ("sizes", "by_patches"),
    [
        ((128, 3, 32, 3, 32, 1), True),  # few entries
        ((128, 16, 64, 4, 32, 4), True),  # apart
        ((16, 16, 32, 3, 14, 1), True),  # few altogether
        ((128, 16, 32, 3, 14, 1), False),  # a large map
        ((128, 64, 64, 3, 16, 1), True),  # a large map with many channels
        ((128, 64, 64, 3, 8, 1), True),  # a small map
    ],
)
def test_sizes_choose_the_way(sizes, by_patches):
    n, channels, out, kernel, size, stride = sizes
    padding = [kernel // 2] * 2 if stride == 1 else [0, 0]
    inputs = torch.empty(n, channels, size, size, device="meta")
    weight = torch.empty(out, channels, kernel, kernel, device="meta", requires_grad=True)
    use = use_of(Conv, inputs, weight, stride=[stride] * 2, padding=padding, dilation=[1, 1])
    assert use.by_patches == by_patches
    assert not replace(use, groups=2).by_patches
    assert not replace(use, transposed=True).by_patches
