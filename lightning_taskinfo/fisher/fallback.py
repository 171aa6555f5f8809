"""The universal fallback: the gradient of each sample by ``torch.func``, or one sample after the other."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from lightning_taskinfo._nested import take
from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo._warn import first_line, warn
from lightning_taskinfo.fisher.graph import Graph, pulled_back
from lightning_taskinfo.fisher.ops import BLOCK

Parameters: TypeAlias = dict[str, nn.Parameter]
Forward = Callable[[nn.Module, Any], Tensor]
Blocks = Iterator[tuple[int, ParamDict]]  # gradients of some samples, and the number of the first


@dataclass
class Fallback:
    """Gradients of single samples where the graph does not show them, with a warning.

    Args:
        model: The network.
        forward: How to get its outputs.
        asked: The engine that the user wants.

    Attributes:
        engine: ``"per_sample"`` for ``torch.func``, or ``"loop"``, also once that has failed.
    """

    model: nn.Module
    forward: Forward
    asked: str

    def __post_init__(self) -> None:
        self.engine = "loop" if self.asked == "loop" else "per_sample"
        self.named = False

    def gradients(
        self,
        inputs: Any,
        outputs: Tensor,
        score: Tensor,
        names: set[str],
        reason: str,
    ) -> Blocks:
        """Yield blocks of gradients ``[n, *shape]`` of some parameters.

        Args:
            inputs: The inputs of a chunk.
            outputs: Their outputs. Those of a single sample are pulled back as they are, so that a
                model that draws random numbers has the score and the gradient of the same ones.
            score: A score of the outputs.
            names: The parameters.
            reason: Why the graph does not show them.
        """
        parameters = {name: p for name, p in self.model.named_parameters() if name in names}
        if len(outputs) == 1 and outputs.requires_grad:
            yield 0, self._of_one(outputs, score, parameters)
            return
        if self.engine == "per_sample":
            blocks = self._vmapped(inputs, score, parameters)
            try:
                first = next(blocks)
                self._check_first(inputs, score, parameters, first[1])
            except Exception as error:  # torch.func names no type of its own for what it cannot run
                if self.asked == "per_sample":
                    raise
                self.engine = "loop"
                told = first_line(error)[:80]
                warn(
                    f"torch.func cannot run this model ({type(error).__name__}: {told}): {some_of(names)} take a "
                    f"backward pass for each of {len(score)} samples; measure fewer where that is too slow "
                    "(`max_samples`)."
                )
            else:
                if self.asked == "auto" and not self.named:
                    self.named = True
                    warn(
                        f"The graph does not show which sample gradients of {some_of(names)} belong to ({reason}); "
                        "torch.func computes them, which is slower."
                    )
                yield first
                yield from blocks
                return
        yield from self._looped(inputs, score, parameters)

    def _vmapped(
        self,
        inputs: Any,
        score: Tensor,
        parameters: Parameters,
    ) -> Blocks:
        names = {id(p): name for name, p in parameters.items()}
        places: list[tuple[Any, str, str]] = []  # a tied parameter has several
        for module in self.model.modules():
            for key, p in module._parameters.items():
                if id(p) in names:
                    places.append((module._parameters, key, names[id(p)]))

        def value(
            weights: ParamDict,
            sample: Any,
            sample_score: Tensor,
        ) -> Tensor:
            """Return ``Σ score ⊙ outputs``: its gradient is the score pulled back to the weights."""
            one = take(sample, lambda x: x.unsqueeze(0))
            try:
                for held, key, name in places:
                    held[key] = weights[name]
                return (self.forward(self.model, one) * sample_score).sum()
            finally:
                for held, key, name in places:
                    held[key] = parameters[name]

        elements = sum(p.numel() for p in parameters.values())
        step = max(1, 8 * BLOCK // elements)
        each = vmap(grad(value), in_dims=(None, 0, 0), randomness="different")
        weights = {name: p.detach() for name, p in parameters.items()}
        for start in range(0, len(score), step):
            block = itemgetter(slice(start, start + step))
            with torch.no_grad():
                found = each(weights, take(inputs, block), block(score))
            yield start, found

    def _check_first(
        self,
        inputs: Any,
        score: Tensor,
        parameters: Parameters,
        found: ParamDict,
    ) -> None:
        """Raise a ``ValueError`` if the gradients of the first sample are not those of plain autograd.

        ``torch.func`` does not see a weight that the model also holds outside of its modules, as in
        a list.
        """
        _, expected = next(self._looped(inputs, score, parameters))
        norms = {name: float(torch.linalg.vector_norm(g)) for name, g in expected.items()}
        for name, g in expected.items():
            eps = torch.finfo(g.dtype).eps
            # A gradient that is 0 but for rounding, as of the bias of keys, agrees with none.
            allowed = eps**0.5 * norms[name] + eps**0.75 * max(norms.values())
            if float(torch.linalg.vector_norm(found[name][:1] - g)) > allowed:
                raise ValueError(
                    f"it does not see all uses of {name!r}, or the model draws random numbers in eval mode"
                )

    def _looped(
        self,
        inputs: Any,
        score: Tensor,
        parameters: Parameters,
    ) -> Blocks:
        """Yield the gradients of one sample after the other: slow, and right for any model."""
        for n in range(len(score)):
            one = itemgetter(slice(n, n + 1))
            outputs = self.forward(self.model, take(inputs, one))
            yield n, self._of_one(outputs, one(score), parameters)

    def _of_one(
        self,
        outputs: Tensor,
        score: Tensor,
        parameters: Parameters,
    ) -> ParamDict:
        """Return the gradients of the only sample of a forward pass, by plain autograd."""
        self.model.zero_grad()
        # Not `autograd.grad`, which reentrant checkpointing refuses.
        outputs.backward(score, retain_graph=True)
        gradients: ParamDict = {}
        for name, p in parameters.items():
            g = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            gradients[name] = g.detach().unsqueeze(0)
        self.model.zero_grad()
        return gradients


def gradients_of_one(
    graph: Graph,
    score: Tensor,
) -> ParamDict:
    """Return the gradients of the only sample of a graph, by the weights that were gathered for it.

    A backward pass over sharded weights themselves would add up the samples of all processes.
    """
    leaves = [graph.edge(number) for number in graph.leaves.values()]
    pairs = zip(graph.leaves, pulled_back(graph.outputs, leaves, score), strict=True)
    return {name: g.to_dense().unsqueeze(0) for name, g in pairs if g is not None}


def some_of(names: Collection[str]) -> str:
    """Name the first few."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more
