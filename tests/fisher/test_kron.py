"""Kronecker factors against their definition, from a loop over samples and classes."""

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo.fisher import fisher_diagonal, kronecker_factors
from lightning_taskinfo.functional.likelihood import Gaussian


def network(head: int = 3) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, head)).double(), torch.randn(
        7, 5, dtype=torch.float64
    )


def by_hand(model: nn.Sequential, inputs: Tensor, output_fisher: Tensor) -> dict[str, list[Tensor]]:
    """Factors of both layers, one sample at a time; ``output_fisher`` is ``[N, C, C]``."""
    expected = {"0.weight": [0, 0], "2.weight": [0, 0]}
    for x, inner in zip(inputs, output_fisher, strict=True):
        first = model[0](x)
        hidden = first.tanh()
        jacobian = model[2].weight * (1 - hidden**2)  # of the outputs by the first layer's outputs
        for name, a, b in (("0.weight", x, jacobian.T @ inner @ jacobian), ("2.weight", hidden, inner)):
            expected[name][0] += b.detach() / len(inputs)
            expected[name][1] += a.outer(a).detach() / len(inputs)
    return expected


def categorical_fisher(outputs: Tensor) -> Tensor:
    p = outputs.softmax(-1)
    return (p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)).detach()


@pytest.mark.parametrize("chunk_size", [3, 128])
def test_exact_factors(chunk_size):
    model, inputs = network()
    factors = kronecker_factors(model, inputs, labels="exact", chunk_size=chunk_size)
    for name, expected in by_hand(model, inputs, categorical_fisher(model(inputs))).items():
        for got, want in zip(factors[name], expected, strict=True):
            torch.testing.assert_close(got, want)
        (bias,) = factors[name.replace("weight", "bias")]
        torch.testing.assert_close(bias, expected[0])


def test_gaussian_factors_carry_the_variance():
    model, inputs = network()
    factors = kronecker_factors(model, inputs, labels="exact", likelihood=Gaussian(std=0.2**0.5))
    inner = torch.eye(3, dtype=torch.float64).expand(7, 3, 3) / 0.2
    for name, expected in by_hand(model, inputs, inner).items():
        for got, want in zip(factors[name], expected, strict=True):
            torch.testing.assert_close(got, want)


def test_sampled_factors_are_unbiased_and_follow_the_generator():
    model, inputs = network()
    g, state = torch.Generator().manual_seed(0), torch.get_rng_state()
    draws = torch.stack([kronecker_factors(model, inputs, generator=g)["2.weight"][0].trace() for _ in range(200)])
    expected = categorical_fisher(model(inputs)).mean(0).trace()
    assert (draws.mean() - expected).abs() < 4 * draws.std() / len(draws) ** 0.5
    again = kronecker_factors(model, inputs, generator=torch.Generator().manual_seed(0))["2.weight"][0].trace()
    assert draws[0] == again
    assert torch.equal(torch.get_rng_state(), state)


def test_the_model_is_left_alone():
    model, inputs = network()
    kronecker_factors(model, inputs)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(p.grad is None and not hasattr(p, "kfac") for p in model.parameters())


def test_refusals():
    model, inputs = network()
    with pytest.raises(
        ValueError, match="`labels` must be 'sampled' or 'exact' for Kronecker factors, got 'empirical'"
    ):
        kronecker_factors(model, inputs, labels="empirical")
    with pytest.raises(ValueError, match="`likelihood` must be categorical or gaussian for Kronecker factors"):
        kronecker_factors(model, inputs, likelihood="bernoulli")


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(2, 4, 3),
    "strided": lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1),
    "one_position": lambda: nn.Conv2d(2, 4, 5),
}


def convolution_by_hand(layer: nn.Conv2d, head: nn.Module, inputs: Tensor) -> dict[str, list[Tensor]]:
    """Factors of a convolution by the sums that define them (KFC), sample by sample and position by position."""
    patches = nn.functional.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    (n, entries, places), outputs = patches.shape, len(layer.weight)
    A, B = torch.zeros(entries, entries).double(), torch.zeros(outputs, outputs).double()
    bias = torch.zeros_like(B)
    for x, columns in zip(inputs, patches, strict=True):
        for column in columns.T:
            A += column.outer(column) / n
        z = layer(x[None]).detach().requires_grad_()
        logits = head(z)
        p = logits.softmax(-1)[0].detach()
        for c in range(len(p)):
            (g,) = torch.autograd.grad(logits.log_softmax(-1)[0, c], z, retain_graph=True)
            rows = g[0].flatten(1).T  # one position a row
            for row in rows:
                B += p[c] * row.outer(row) / (n * places)
            bias += p[c] * rows.sum(0).outer(rows.sum(0)) / n
    return {"0.weight": [B, A], "0.bias": [bias]}


@pytest.mark.parametrize("layer", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_factors_of_a_convolution(layer):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    inputs = torch.randn(6, 2, 5, 5, dtype=torch.float64)
    model(inputs)
    factors = kronecker_factors(model, inputs, labels="exact", chunk_size=4)
    for name, expected in convolution_by_hand(model[0], model[1:], inputs).items():
        for got, want in zip(factors[name], expected, strict=True):
            torch.testing.assert_close(got, want)


def test_the_trace_of_a_convolution_is_near_that_of_the_fisher():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    inputs = torch.randn(64, 2, 5, 5)
    B, A = kronecker_factors(model, inputs, labels="exact")["0.weight"]
    trace = fisher_diagonal(model, inputs, labels="exact")["0.weight"].sum()
    assert (B.trace() * A.trace()).item() == pytest.approx(trace.item(), rel=0.15)
