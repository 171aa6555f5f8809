"""The universal fallback: the gradient of each sample by ``torch.func``, or one sample after the other."""

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lightning_taskinfo._batches import take
from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo._warn import first_line, warn
from lightning_taskinfo.fisher.accumulators import Accumulator
from lightning_taskinfo.fisher.graph import Graph
from lightning_taskinfo.fisher.ops import BLOCK
from lightning_taskinfo.fisher.terms import Gradients

Forward = Callable[[nn.Module, Any], Tensor]
Blocks = Iterator[tuple[int, ParamDict]]  # gradients of some samples, and the number of the first


class Fallback:
    """Gradients of single samples where the graph does not show them, with a warning.

    Args:
        model: The network.
        forward: How to get its outputs.
        asked: The engine that the user wants.
        accumulator: Where gradients go.

    Attributes:
        engine: ``"per_sample"`` for ``torch.func``, or ``"loop"``, also once that has failed.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        asked: str,
        accumulator: Accumulator,
    ) -> None:
        self.model = model
        self.forward = forward
        self.asked = asked
        self.accumulator = accumulator
        self.engine = "loop" if asked == "loop" else "per_sample"
        self.named = False

    def add(
        self,
        inputs: Any,
        scores: list[Tensor],
        samples: slice,
        names: set[str],
        reason: str | None,
    ) -> None:
        """Take the gradients of some parameters.

        Args:
            inputs: The inputs of a chunk.
            scores: Scores of their outputs.
            samples: Which samples they are.
            names: The parameters.
            reason: Why the graph does not show them, if that has to be said.
        """
        for score in scores:
            for first, gradients in self._gradients(inputs, score, names, reason):
                for name, g in gradients.items():
                    start = samples.start + first
                    block = slice(start, start + len(g))
                    self.accumulator.add(name, block, Gradients(g.detach()))

    def add_from_graph(
        self,
        graph: Graph,
        scores: list[Tensor],
        sample: slice,
        *,
        retain_graph: bool,
    ) -> None:
        """Take the gradients of the only sample of a graph from it, by the weights that were gathered for it.

        A backward pass over sharded weights themselves would add up the samples of all processes.
        """
        for i, score in enumerate(scores):
            found = torch.autograd.grad(
                graph.outputs,
                [graph.leaf(name) for name in graph.leaves],
                score,
                retain_graph=retain_graph or i < len(scores) - 1,
                allow_unused=True,
            )
            for name, g in zip(graph.leaves, found, strict=True):
                if g is not None:
                    of_sample = g.to_dense().unsqueeze(0)
                    self.accumulator.add(name, sample, Gradients(of_sample))

    def _gradients(self, inputs: Any, score: Tensor, names: set[str], reason: str | None) -> Blocks:
        """Yield blocks of gradients ``[n, *shape]`` of the named parameters for one score."""
        several = len(score) > 1 or self.asked == "per_sample"
        if self.engine == "per_sample" and several:
            blocks = self._vmapped(inputs, score, names)
            try:
                first = next(blocks)
            except Exception as error:  # torch.func names no type of its own for what it cannot run
                if self.asked == "per_sample":
                    raise
                self.engine = "loop"
                told = first_line(error)[:80]
                warn(
                    f"torch.func cannot run this model ({type(error).__name__}: {told}): {_some(names)} take a "
                    f"backward pass for each of {len(score)} samples; measure fewer where that is too slow "
                    "(`max_samples`)."
                )
            else:
                if self.asked == "auto" and reason is not None and not self.named:
                    self.named = True
                    warn(
                        f"The graph does not show which sample gradients of {_some(names)} belong to ({reason}); "
                        "torch.func computes them, which is slower."
                    )
                yield first
                yield from blocks
                return
        yield from self._looped(inputs, score, names)

    def _vmapped(self, inputs: Any, score: Tensor, names: set[str]) -> Blocks:
        scored = _Scored(self.model, self.forward)
        places = _places(self.model)
        state = {name: p.detach() for name, p in self.model.named_parameters()}
        moving = {name: state.pop(name) for name in names}

        def value(weights: ParamDict, sample: Any, sample_score: Tensor) -> Tensor:
            one = take(sample, lambda x: x.unsqueeze(0))
            all_weights = {**state, **weights}
            placed = {f"model.{place}": all_weights[name] for place, name in places.items()}
            arguments = (one, sample_score.unsqueeze(0))
            return functional_call(scored, placed, arguments, tie_weights=False)

        elements = sum(p.numel() for p in moving.values())
        step = max(1, 8 * BLOCK // elements)
        each = vmap(grad(value), in_dims=(None, 0, 0), randomness="different")
        for start in range(0, len(score), step):
            block = itemgetter(slice(start, start + step))
            yield start, each(moving, take(inputs, block), block(score))

    def _looped(self, inputs: Any, score: Tensor, names: set[str]) -> Blocks:
        """Yield the gradients of one sample after the other, by plain autograd: slow, and right for any model."""
        parameters = {name: p for name, p in self.model.named_parameters() if name in names}
        for n in range(len(score)):
            one = itemgetter(slice(n, n + 1))
            for p in parameters.values():
                p.grad = None
            # `backward`, not `autograd.grad`, which reentrant checkpointing refuses.
            outputs = self.forward(self.model, take(inputs, one))
            (outputs * one(score)).sum().backward()
            gradients: ParamDict = {}
            for name, p in parameters.items():
                g = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                gradients[name] = g.unsqueeze(0)
            yield n, gradients
        for p in parameters.values():
            p.grad = None


class _Scored(nn.Module):
    """``Σ score ⊙ outputs`` of one sample: its gradient is the score pulled back to the weights."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = forward

    def forward(self, inputs: Any, score: Tensor) -> Tensor:
        return (self.run(self.model, inputs) * score).sum()


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
    places = {}
    for path, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is not None:
                place = f"{path}.{key}" if path else key
                places[place] = first[id(p)]
    return places


def _some(names: set[str]) -> str:
    """Name the first few."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more
