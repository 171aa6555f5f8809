"""Every way to a trace, a diagonal or a Gram matrix that is measured: ours, the peers', and the batch-of-one loop.

A contender is a dict from a quantity to a builder. ``builder(model, x, y)`` does once what can be done once (wrapping,
hooks, copies; not timed) and returns a call without arguments that is timed. It returns the trace (a scalar), the
diagonal (a dict by parameter name, means over samples) or the Gram matrix. A parameter that a peer passes over is
missing in its dict, and counts as zero where results are compared.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lightning_taskinfo import fisher

Result: TypeAlias = Tensor | dict[str, Tensor]
Call: TypeAlias = Callable[[], Result]
Gradients: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Callable[[], dict[str, Tensor]]]
Builder: TypeAlias = Callable[[nn.Module, Tensor, Tensor], Call]
CLASSES = 10


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The yardstick: one forward and backward pass, as in a training step."""

    def call() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    return call


def floor(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Forward, and backward to the first layer's outputs without any parameter's gradient: what hooks cannot avoid."""
    model = deepcopy(model).requires_grad_(False)
    first = next(m for m in model.modules() if not [*m.children()] and [*m.parameters()])
    first.register_forward_hook(lambda _module, _inputs, outputs: outputs.requires_grad_())
    return lambda: F.cross_entropy(model(x), y).backward()


def ours(**size: int) -> dict[str, Builder]:
    """This package."""

    def through(function: Callable[..., Result], **options: str) -> Builder:
        return lambda model, x, y: lambda: function(model, x, y, **size, **options)

    return {
        "trace": through(fisher.fisher_trace, labels="empirical"),
        "diagonal": through(fisher.fisher_diagonal, labels="empirical"),
        "exact": through(fisher.fisher_diagonal, labels="exact"),
        "gram": through(fisher.gradient_gram),
    }


def by_gradients(gradients: Gradients) -> dict[str, Builder]:
    """Make the quantities for fixed labels from a call that returns per-sample gradients ``[N, *shape]`` by name."""

    def trace(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        call = gradients(model, x, y)
        return lambda: sum(g.square().sum() for g in call().values()) / len(x)

    def diagonal(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        call = gradients(model, x, y)
        return lambda: {name: g.square().mean(0) for name, g in call().items()}

    def gram(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        call = gradients(model, x, y)
        return lambda: sum(g.flatten(1) @ g.flatten(1).T for g in call().values())

    return {"trace": trace, "diagonal": diagonal, "gram": gram}


def vmapped(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], dict[str, Tensor]]:
    """``vmap(grad)`` as in the tutorial on per-sample gradients of torch.func."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach() for name, b in model.named_buffers()}

    def loss(
        parameters: dict[str, Tensor], buffers: dict[str, Tensor], sample: Tensor, target: Tensor
    ) -> Tensor:
        outputs = functional_call(model, (parameters, buffers), (sample.unsqueeze(0),))
        return F.cross_entropy(outputs, target.unsqueeze(0))

    per_sample = vmap(grad(loss), in_dims=(None, None, 0, 0))
    return lambda: per_sample(parameters, buffers, x, y)


def over_classes(gradients: Gradients) -> Builder:
    """The exact diagonal from per-sample gradients: every class in turn, weighted by its probability."""

    def build(model: nn.Module, x: Tensor, y: Tensor) -> Call:
        calls = [gradients(model, x, torch.full_like(y, c)) for c in range(CLASSES)]

        def call() -> Result:
            with torch.no_grad():
                weights = model(x).softmax(-1).T / len(x)  # [C, N]
            total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            for weight, one in zip(weights, calls, strict=True):
                for name, g in one().items():
                    total[name] += (weight @ g.flatten(1).square()).view_as(total[name])
            return total

        return call

    return build


def looped(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], dict[str, Tensor]]:
    """Gradients of one sample after the other, by plain autograd: the reference."""

    def call() -> dict[str, Tensor]:
        parameters = dict(model.named_parameters())
        rows = [
            torch.autograd.grad(
                F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]), [*parameters.values()]
            )
            for n in range(len(x))
        ]
        return dict(zip(parameters, map(torch.stack, zip(*rows, strict=True)), strict=True))

    return call


def one_by_one(
    model: nn.Module, x: Tensor, y: Tensor, square: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Sum ``square(gradient)`` over samples without keeping the gradients."""
    total: dict[str, Tensor] = {}
    for n in range(len(x)):
        for name, g in looped(model, x[n : n + 1], y[n : n + 1])().items():
            total[name] = total.get(name, 0) + square(g[0])
    return total


LOOP: dict[str, Builder] = {
    "trace": lambda model, x, y: (
        lambda: sum(one_by_one(model, x, y, lambda g: g.square().sum()).values()) / len(x)
    ),
    "diagonal": lambda model, x, y: (
        lambda: {
            name: total / len(x) for name, total in one_by_one(model, x, y, torch.square).items()
        }
    ),
    "exact": over_classes(looped),
    "gram": by_gradients(looped)["gram"],
}
