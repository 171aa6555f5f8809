"""Trace, diagonal and Gram matrix of networks that people fine-tune, beside a loop over samples."""

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo.fisher import (
    fisher_diagonal,
    gradient_gram,
    per_sample_squared_norms,
)
from tests.fisher.zoo import CASES, Case

N = 5


def loop(model: nn.Module, case: Case, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Gradients ``[N, *shape]``, one sample at a time."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for n in range(len(x)):
        outputs = case.forward(model, x[n : n + 1]).flatten(0, -2)
        loss = nn.functional.cross_entropy(outputs, y[n : n + 1].flatten(), reduction="sum")
        found = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
        pairs = zip(found, parameters.values(), strict=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in pairs])
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(parameters)}


@pytest.mark.parametrize("name", CASES)
def test_no_parameter_takes_a_slower_engine_and_all_are_right(name):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().to(case.dtype).eval()
    x = case.inputs(N)
    if x.is_floating_point():
        x = x.to(case.dtype)
    with torch.no_grad():
        outputs = case.forward(model, x)
    y = torch.randint(outputs.shape[-1], outputs.shape[:-1])
    rows = loop(model, case, x, y)
    flat = torch.cat([g.reshape(N, -1) for g in rows.values()], 1).double()
    options = {"forward_fn": case.forward, "labels": "empirical"}
    norms = per_sample_squared_norms(model, x, y, **options)
    assert norms.max() > 0
    torch.testing.assert_close(norms.double(), flat.square().sum(1), rtol=1e-5, atol=0.0)
    diagonal = fisher_diagonal(model, x, y, chunk_size=3, **options)
    largest = max(float(part.max()) for part in diagonal.values())
    for key, g in rows.items():
        expected = g.square().mean(0)
        noise = 1e-10 * largest + 1e-5 * float(
            expected.max()
        )  # some gradients are zero but for rounding
        torch.testing.assert_close(
            diagonal[key], expected, rtol=1e-5, atol=noise, msg=lambda m, key=key: f"{key}: {m}"
        )
    gram = gradient_gram(model, x, y, **options)
    torch.testing.assert_close(gram, flat @ flat.T, rtol=1e-5, atol=1e-5 * float(gram.abs().max()))
