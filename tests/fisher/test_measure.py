# ruff: noqa: E501
"""Every engine against a loop over single samples, on every kind of layer and every way of using it."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo.fisher import (
    fisher_diagonal,
    fisher_trace,
    gradient_gram,
    layer_traces,
    per_sample_squared_norms,
)
from tests.fisher import networks as nets

N = 7
IMAGES, ROWS, TOKENS, WORDS = (2, 6, 6), (5,), (3, 4), "words"
CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)), ROWS),
    "inplace relu": (lambda: nn.Sequential(nn.Linear(5, 9), nn.ReLU(inplace=True), nn.Linear(9, 3)), ROWS),
    "frozen": (lambda: _freeze(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), "0.weight"), ROWS),
    "frozen first": (lambda: _freeze(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), "0.weight", "0.bias"), ROWS),
    "dropout": (lambda: nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.5), nn.Linear(9, 3)), ROWS),
    "functional": (nets.Functional, ROWS),
    "module twice": (nets.Twice, ROWS),
    "conv twice": (nets.TwiceConv, IMAGES),
    "raw": (nets.Raw, ROWS),
    "raw twice": (nets.RawUsedTwice, ROWS),
    "one number": (nets.Temperature, ROWS),
    "weight also elsewhere": (nets.HalfHidden, ROWS),
    "inplace residual": (nets.InplaceResidual, ROWS),
    "inplace sequence": (nets.InplaceSequence, TOKENS),
    "checkpoint": (lambda: nets.Checkpointed(use_reentrant=False), ROWS),
    "reentrant checkpoint": (lambda: nets.Checkpointed(use_reentrant=True), ROWS),
    "parametrized": (nets.Parametrized, ROWS),
    "mixing": (nets.Mixing, ROWS),
    "tied": (nets.Tied, WORDS),
    "tied, padded": (lambda: nets.Tied(padding_idx=-2), WORDS),
    "tied modules": (nets.TiedModules, WORDS),
    "sequence": (nets.Sequence, TOKENS),
    "long sequence": (nets.Sequence, (40, 4)),
    "time first": (nets.TimeFirst, (N, 4)),
    "flattened": (lambda: nets.Flattened(interleaved=False), TOKENS),
    "interleaved": (lambda: nets.Flattened(interleaved=True), TOKENS),
    "one position": (lambda: nets.OnePosition(interleaved=False), (4, 4)),
    "one position, interleaved": (lambda: nets.OnePosition(interleaved=True), (4, 4)),
    "frames": (nets.Frames, (3, 1, 4, 4)),
    "attention": (nets.Attention, TOKENS),
    "attention, time first": (lambda: nets.Attention(batch_first=False), TOKENS),
    "cross attention": (lambda: nets.Attention(cross=True), TOKENS),
    "attention with kdim": (lambda: nets.Attention(cross=True, kdim=4, vdim=4, bias=False, batch_first=False), TOKENS),
    "attention with bias_kv": (lambda: nets.Attention(batch_first=False, add_bias_kv=True), TOKENS),
    "encoder layer": (lambda: _encoder(), TOKENS),
    "lstm": (lambda: nets.Recurrent(nn.LSTM), TOKENS),
    "gru": (lambda: nets.Recurrent(nn.GRU), TOKENS),
    "rnn": (lambda: nets.Recurrent(nn.RNN), TOKENS),
    "conv1d": (lambda: nets.conv(1), (4, 9)),
    "conv1d stride": (lambda: nets.conv(1, stride=2, padding=2, dilation=2), (4, 9)),
    "conv2d": (lambda: nets.conv(2), (4, 6, 6)),
    "conv2d same": (lambda: nets.conv(2, padding="same", kernel_size=(3, 5)), (4, 6, 6)),
    "conv2d same, even": (lambda: nets.conv(2, padding="same", kernel_size=2), (4, 6, 6)),
    "conv2d stride": (lambda: nets.conv(2, stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (4, 7, 6)),
    "conv2d stride leaves rows": (lambda: nets.conv(2, stride=3, padding=1), (4, 7, 7)),
    "conv2d groups": (lambda: nets.conv(2, groups=2, padding=1), (4, 6, 6)),
    "conv2d depthwise": (lambda: nets.conv(2, groups=4, padding=1, stride=2), (4, 6, 6)),
    "conv2d 1x1 stride": (lambda: nets.conv(2, kernel_size=1, stride=2), (4, 6, 6)),
    "conv2d one channel": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, (3, 2), stride=(2, 1), padding=1), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)),
        (1, 6, 7),
    ),
    "conv2d one channel, wide": (
        lambda: nn.Sequential(nn.Conv2d(1, 16, (3, 2), stride=(2, 1), padding=1), nn.Flatten(), nn.LazyLinear(3)),
        (1, 6, 7),
    ),
    "conv2d large map": (lambda: nets.conv(2, padding=1), (4, 12, 12)),
    "conv2d large map, wide": (
        lambda: nn.Sequential(nn.Conv2d(2, 32, 1), nn.Tanh(), nn.Conv2d(32, 64, 3, padding=1), nn.Flatten(), nn.LazyLinear(3)),
        (2, 12, 12),
    ),
    "conv2d whole": (lambda: nets.conv(2, kernel_size=6), (4, 6, 6)),
    "conv2d reflect": (lambda: nets.conv(2, padding=1, padding_mode="reflect", bias=False), (4, 6, 6)),
    "conv2d ghost": (  # many channels on a small map, where the norm is had without the gradient
        lambda: nn.Sequential(nn.Conv2d(2, 64, 1), nn.Tanh(), nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(), nn.Linear(1024, 3)),
        (2, 4, 4),
    ),
    "conv2d no ghost, groups": (
        lambda: nn.Sequential(nn.Conv2d(2, 64, 1), nn.Tanh(), nn.Conv2d(64, 64, 3, padding=1, groups=2), nn.Flatten(), nn.Linear(1024, 3)),
        (2, 4, 4),
    ),
    "conv3d": (lambda: nets.conv(3, padding=1, stride=2), (4, 5, 4, 4)),
    "batch norm": (lambda: nets.normed(nn.BatchNorm2d(4)), IMAGES),
    "group norm": (lambda: nets.normed(nn.GroupNorm(2, 4)), IMAGES),
    "instance norm": (lambda: nets.normed(nn.InstanceNorm2d(4, affine=True)), IMAGES),
    "instance norm, tracked": (lambda: nets.normed(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), IMAGES),
    "layer norm": (lambda: nets.normed(nn.LayerNorm([4, 4, 4])), IMAGES),
    "rms norm": (lambda: nets.normed(nn.RMSNorm([4, 4])), IMAGES),
    "group norm, depthwise": (lambda: nn.Sequential(nets.normed(nn.GroupNorm(4, 4))[:2], *nets.conv(2, groups=4)), IMAGES),
    "embedding bag of words": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(1), nn.LazyLinear(3)), WORDS),
    "embedding by frequency": (
        lambda: nn.Sequential(nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Flatten(1), nn.LazyLinear(3)),
        WORDS,
    ),
}  # fmt: skip
WARNED = {  # with the parameters that are left to the loop
    "reentrant checkpoint": "of body.0.bias, body.0.weight, body.2.bias and 5 more belong to",
    "mixing": "The model's outputs for a sample depend",
    "embedding by frequency": "The graph does not show which sample gradients of 0.weight belong to",
}


def _freeze(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(1), nn.LazyLinear(3)
    )


def make(case: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """The network of a case in eval mode, its inputs, and targets."""
    build, shape = CASES[case]
    torch.manual_seed(0)
    model = build()
    inputs = (
        torch.randint(7, (N, 3)) if shape == WORDS else torch.randn(N, *shape, dtype=torch.float64)
    )
    model = nets.trained_statistics(model)
    with torch.no_grad():
        outputs = model.float().eval()(
            inputs.float() if inputs.is_floating_point() else inputs
        )  # fills lazy layers
    targets = torch.randint(outputs.shape[-1], outputs.shape[:-1])
    return model.to(dtype).eval(), inputs if shape == WORDS else inputs.to(dtype), targets


def loop(
    model: nn.Module, inputs: Tensor, loss: Callable[[Tensor, int], Tensor]
) -> dict[str, Tensor]:
    """Gradients ``[N, *shape]`` by parameter name, one sample and one backward pass at a time."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for n in range(len(inputs)):
        model.zero_grad()
        loss(model(inputs[n : n + 1]), n).backward()
        for name, p in parameters.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    model.zero_grad()
    return {name: torch.stack(row) for name, row in rows.items()}


def empirical(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return loop(
        model,
        inputs,
        lambda out, n: nn.functional.cross_entropy(
            out.flatten(0, -2), targets[n : n + 1].flatten(), reduction="sum"
        ),
    )


def total(diagonal: dict[str, Tensor]) -> Tensor:
    return torch.stack([part.sum() for part in diagonal.values()]).sum()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Outputs .* classes last")
def test_auto_equals_a_loop_over_samples(case):
    model, inputs, targets = make(case)
    rows = empirical(model, inputs, targets)
    exact = {"rtol": 1e-9, "atol": 1e-12}
    warned = pytest.warns(UserWarning, match=WARNED[case]) if case in WARNED else nullcontext()
    with warned, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Outputs .* are read with the classes last"
        )  # as many as positions
        diagonal = fisher_diagonal(model, inputs, targets, labels="empirical", chunk_size=4)
        norms = per_sample_squared_norms(model, inputs, targets, labels="empirical", chunk_size=4)
        gram = gradient_gram(model, inputs, targets, chunk_size=4)
        traces = layer_traces(model, inputs, targets, labels="empirical")
        trace = fisher_trace(model, inputs, targets, labels="empirical")
    assert diagonal.keys() == rows.keys()
    for name, g in rows.items():
        torch.testing.assert_close(diagonal[name], g.square().mean(0), **exact)
    flat = torch.cat([g.reshape(len(g), -1) for g in rows.values()], 1)
    torch.testing.assert_close(norms, flat.square().sum(1), **exact)
    torch.testing.assert_close(gram, flat @ flat.T, **exact)
    torch.testing.assert_close(trace, flat.square().sum(1).mean(), **exact)
    torch.testing.assert_close(total(traces), trace, **exact)
    for owner, value in traces.items():
        own = [g for name, g in rows.items() if name.rpartition(".")[0] == owner]
        torch.testing.assert_close(value, sum(g.square().sum() / len(g) for g in own), **exact)
