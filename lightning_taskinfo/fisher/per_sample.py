"""The universal fallback: the gradient of each sample by ``torch.func``, or one sample after the other."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo.fisher.batches import take

Forward = Callable[[nn.Module, Any], Tensor]


class _Scored(nn.Module):
    """``Σ score ⊙ outputs`` of one sample: its gradient is the score pulled back to the weights."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self.run = model, forward

    def forward(self, inputs: Any, score: Tensor) -> Tensor:
        return (self.run(self.model, inputs) * score).sum()


def vmapped_gradients(
    model: nn.Module, forward: Forward, inputs: Any, score: Tensor, names: set[str], step: int
) -> Iterator[tuple[int, ParamDict]]:
    """Yield blocks of per-sample gradients ``[n, *shape]`` of the named parameters, by ``torch.func``."""
    scored = _Scored(model, forward)
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    moving = {f"model.{name}": state.pop(f"model.{name}") for name in names}

    def value(weights: ParamDict, sample: Any, sample_score: Tensor) -> Tensor:
        one = take(sample, lambda x: x.unsqueeze(0))
        return functional_call(scored, {**state, **weights}, (one, sample_score.unsqueeze(0)))

    for start in range(0, len(score), step):
        block = slice(start, start + step)
        gradients = vmap(grad(value), in_dims=(None, 0, 0), randomness="different")(
            moving, take(inputs, itemgetter(block)), score[block]
        )
        yield start, {name.removeprefix("model."): g for name, g in gradients.items()}


def looped_gradients(
    model: nn.Module, forward: Forward, inputs: Any, score: Tensor, names: set[str]
) -> Iterator[tuple[int, ParamDict]]:
    """Yield the gradients of one sample after the other, by plain autograd: slow, and right for any model."""
    parameters = {name: p for name, p in model.named_parameters() if name in names}
    for n in range(len(score)):
        block = slice(n, n + 1)
        for p in parameters.values():
            p.grad = None
        # `backward`, not `autograd.grad`, which reentrant checkpointing refuses.
        (forward(model, take(inputs, itemgetter(block))) * score[block]).sum().backward()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
        yield n, {name: g.to_dense().unsqueeze(0) for name, g in gradients.items()}
    for p in parameters.values():
        p.grad = None
