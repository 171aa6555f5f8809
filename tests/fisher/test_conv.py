"""Each way to a convolution's per-sample gradients against a loop, whatever the way its sizes would choose."""

import pytest
import torch
import torch.nn.functional as F

from lightning_taskinfo.fisher.conv import Conv
from lightning_taskinfo.fisher.ops import Product, Rows, Slot

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
WAYS = ["patches", "rows", "grouped"]


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
    use = Conv({"weight": Slot("w", tuple(w.shape))}, scores[0].shape, (a,), config)
    use._way = way
    return use, scores, expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_every_way_gives_the_gradients_of_a_loop(case, way):
    use, scores, expected = made(case, way)
    torch.testing.assert_close(use.grads("weight", scores[0]), expected[0])
    torch.testing.assert_close(
        use.norms("weight", scores), sum(g.flatten(1).square().sum(1) for g in expected)
    )
    torch.testing.assert_close(
        use.diagonal("weight", scores), sum(g.square().sum(0) for g in expected)
    )
    gram = 0
    for parts in use.features("weight", scores[0]):
        for (part,) in parts:
            rows = part.formed() if isinstance(part, Product) else part
            gram = gram + rows @ rows.T
    torch.testing.assert_close(gram, expected[0].flatten(1) @ expected[0].flatten(1).T)


@pytest.mark.parametrize("way", WAYS)
def test_inputs_may_lie_in_memory_as_they_like(way):
    use, scores, expected = made("3x3", way, memory_format=torch.channels_last)
    torch.testing.assert_close(use.grads("weight", scores[0]), expected[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_few_samples_at_a_time_give_the_same(way):
    use, scores, expected = made("3x3", way)
    use._samples_at_once = 2
    torch.testing.assert_close(
        use.norms("weight", scores), sum(g.flatten(1).square().sum(1) for g in expected)
    )
    torch.testing.assert_close(use.grads("weight", scores[1]), expected[1])
    torch.testing.assert_close(
        use.diagonal("weight", scores), sum(g.square().sum(0) for g in expected)
    )


@pytest.mark.parametrize("way", WAYS)
def test_repeats_of_a_sample_add_up(way):
    use, scores, expected = made("3x3", way)
    use = Conv(use.slots, use.shape, use.saved, use.config, Rows(repeat=N))
    use._way = way
    torch.testing.assert_close(use.grads("weight", scores[0]), expected[0].sum(0, keepdim=True))


@pytest.mark.parametrize(
    ("sizes", "way"),
    [
        ((128, 3, 32, 3, 32, 1), "patches"),  # few entries
        ((128, 1, 4, 5, 28, 1), "rows"),  # a single channel with few outputs
        ((128, 16, 64, 4, 32, 4), "patches"),  # apart
        ((16, 16, 32, 3, 14, 1), "patches"),  # few altogether
        ((128, 16, 32, 3, 14, 1), "grouped"),  # a large map
        ((128, 64, 64, 3, 16, 1), "rows"),  # a large map with many channels
        ((128, 64, 64, 3, 8, 1), "rows"),  # a small map
    ],
)
def test_sizes_choose_the_way(sizes, way):
    n, channels, out, kernel, size, stride = sizes
    outputs = torch.Size((n, out, size // stride, size // stride))
    padding = [kernel // 2] * 2 if stride == 1 else [0, 0]
    config = {"stride": [stride] * 2, "padding": padding, "dilation": [1, 1], "groups": 1}
    use = Conv({"weight": Slot("w", (out, channels, kernel, kernel))}, outputs, (), config)
    assert use._way == way
    for other in ({"groups": 2}, {"dilation": [2, 1]}):
        odd = Conv(use.slots, outputs, (), {**config, **other})
        assert odd._way == "grouped"
