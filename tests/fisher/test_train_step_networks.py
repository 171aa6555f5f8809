"""Norms that are read off a training step of known and of drawn networks, beside a loop over its samples' losses."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_taskinfo.fisher.train_step import StepLosses, StepNorms
from tests.fisher.random_networks import CLASSES, POSITIONS, WIDTH, RandomNet
from tests.fisher.test_random_networks import drawn, networks
from tests.fisher.zoo import CASES


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each output of each sample, over the number of all."""
    rows = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return rows.view(len(targets), -1) / targets.numel()


def looped(forward, parameters: dict[str, nn.Parameter], targets: Tensor) -> dict[str, Tensor]:
    """Squared norms ``[N]`` by parameter: one forward pass over the batch and one backward pass for each sample."""
    rows = []
    for n in range(len(targets)):
        loss = losses(forward(), targets)[n].sum()
        rows.append(torch.autograd.grad(loss, [*parameters.values()], allow_unused=True))
    zero = torch.zeros((), dtype=rows[0][0].dtype)
    norms = [[zero if g is None else g.square().sum() for g in row] for row in rows]
    return {name: torch.stack([row[i] for row in norms]) for i, name in enumerate(parameters)}


def recorded(forward, recorder: StepNorms, targets: Tensor, first: int = 0) -> dict[str, Tensor]:
    loss = F.cross_entropy(forward().flatten(0, -2), targets.flatten())
    recorder.read(loss, StepLosses(loss, len(targets), targets).root, len(targets), first)
    loss.backward()
    assert recorder.problem is None
    return recorder.norms


def close(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Compare, but for gradients that are zero up to rounding."""
    noise = 1e-12 * max(float(norms.max()) for norms in expected.values())
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=rtol, atol=noise)


def used(model: nn.Module, forward) -> dict[str, nn.Parameter]:
    """Train what the outputs depend on."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(forward().sum(), [*trained.values()], allow_unused=True)
    for p, g in zip(trained.values(), found, strict=True):
        p.requires_grad_(g is not None)
    return {name: p for name, p in trained.items() if p.requires_grad}


ZOO = ["BERT", "GPT-2", "ViT", "LoRA on BERT", "DoRA", "ALBERT", "Mixtral", "T5"]


@pytest.mark.parametrize("name", ZOO)
def test_known_networks_with_their_dropout(name):
    case = CASES[name]
    torch.manual_seed(0)
    model, x = case.make().to(case.dtype).train(), case.inputs(5)
    x = x.to(case.dtype) if x.is_floating_point() else x

    def forward() -> Tensor:
        torch.manual_seed(1)
        return case.forward(model, x)

    parameters = used(model, forward)
    outputs = forward()
    targets = torch.randint(outputs.shape[-1], outputs.shape[:-1])
    recorder = StepNorms(model, 3)
    expected = {key: n[1:4] for key, n in looped(forward, parameters, targets).items()}
    for _ in range(2):  # shown, and known
        close(recorded(forward, recorder, targets, first=1), expected, 1e-5)


@settings(drawn, max_examples=150, derandomize=True)
@given(networks, st.integers(1, 7), st.data())
def test_the_same_drawn_networks_at_every_run(network, n, data):
    """Those that mix samples are refused."""
    model = RandomNet(**network).double()
    first, count = data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(network["seed"])
    x = torch.randn(n, POSITIONS, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(
        CLASSES, (n,) if network["pooled"] else (n, POSITIONS), generator=generator
    )
    parameters = used(model, lambda: model(x))
    recorder = StepNorms(model, count)
    expected = looped(lambda: model(x), parameters, targets)
    if any(step == "mixed" for step, _ in network["steps"]) and n > 1:
        loss = F.cross_entropy(model(x).flatten(0, -2), targets.flatten())
        recorder.read(loss, StepLosses(loss, n, targets).root, n, first)
        loss.backward()
        if recorder.problem is not None:
            assert "mixes the samples" in recorder.problem
            return
        norms = recorder.norms
    else:
        norms = recorded(lambda: model(x), recorder, targets, first)
    close(norms, {key: each[first : first + count] for key, each in expected.items()}, 1e-7)
