"""The universal fallback: the gradient of each sample by ``torch.func``, or one sample after the other."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lightning_taskinfo._batches import take
from lightning_taskinfo._observe import ParamDict

Forward = Callable[[nn.Module, Any], Tensor]
Blocks = Iterator[tuple[int, ParamDict]]  # gradients of some samples, and the number of the first


class _Scored(nn.Module):
    """``Σ score ⊙ outputs`` of one sample: its gradient is the score pulled back to the weights."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self.run = model, forward

    def forward(self, inputs: Any, score: Tensor) -> Tensor:
        return (self.run(self.model, inputs) * score).sum()


def vmapped_gradients(
    model: nn.Module, forward: Forward, inputs: Any, score: Tensor, names: set[str], step: int
) -> Blocks:
    """Yield blocks of per-sample gradients ``[n, *shape]`` of the named parameters, by ``torch.func``."""
    scored, places = _Scored(model, forward), _places(model)
    state = {name: p.detach() for name, p in model.named_parameters()}
    moving = {name: state.pop(name) for name in names}

    def value(weights: ParamDict, sample: Any, sample_score: Tensor) -> Tensor:
        one, all_weights = take(sample, lambda x: x.unsqueeze(0)), {**state, **weights}
        placed = {f"model.{place}": all_weights[name] for place, name in places.items()}
        return functional_call(scored, placed, (one, sample_score.unsqueeze(0)), tie_weights=False)

    for start in range(0, len(score), step):
        block = slice(start, start + step)
        gradients = vmap(grad(value), in_dims=(None, 0, 0), randomness="different")(
            moving, take(inputs, itemgetter(block)), score[block]
        )
        yield start, gradients


def _places(model: nn.Module) -> dict[str, str]:
    """Return the parameter's first name for every place that holds it, a submodule with two names taken once.

    ``functional_call`` finds tied weights by itself, but leaves the new ones behind in a submodule
    with two names.

    Example:
        >>> net = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
        >>> net["c"], net["b"].weight = net["a"], net["a"].weight
        >>> _places(net)
        {'a.weight': 'a.weight', 'b.weight': 'a.weight'}
    """
    first = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{path}.{key}" if path else key: first[id(p)]
        for path, module in model.named_modules()
        for key, p in module._parameters.items()
        if p is not None
    }


def looped_gradients(
    model: nn.Module, forward: Forward, inputs: Any, score: Tensor, names: set[str]
) -> Blocks:
    """Yield the gradients of one sample after the other, by plain autograd: slow, and right for any model."""
    parameters = {name: p for name, p in model.named_parameters() if name in names}
    for n in range(len(score)):
        block = slice(n, n + 1)
        for p in parameters.values():
            p.grad = None
        # `backward`, not `autograd.grad`, which reentrant checkpointing refuses.
        (forward(model, take(inputs, itemgetter(block))) * score[block]).sum().backward()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in parameters.items()
        }
        yield n, {name: g.to_dense().unsqueeze(0) for name, g in gradients.items()}
    for p in parameters.values():
        p.grad = None
