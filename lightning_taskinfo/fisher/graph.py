"""The autograd graph of a forward pass, and gradients that are pulled back through it or a part of it."""

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import cache, cached_property
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

Edge = GradientEdge

# Operations whose output has entries of one input, each once at most: of a weight they make a
# weight.
MOVE_ENTRIES = re.compile(
    r"(T|Transpose|Permute|View|UnsafeView|ReshapeAlias|Unsqueeze|Squeeze|Alias|Clone|Slice|Select|Split|"
    r"SplitWithSizes|UnsafeSplit|Unbind|Narrow|Diagonal)Backward\d"
)


def shape_of(node: Node, number: int = 0) -> torch.Size:
    """Return the shape of what an operation put out."""
    return torch.Size(node._input_metadata[number].shape)


def ones_at(edge: Edge) -> Tensor:
    """Return a tensor of ones like what an operation put out."""
    like: Any = edge.node._input_metadata[edge.output_nr]
    return torch.ones(like.shape, dtype=like.dtype, device=like.device)


def pulled_back(
    output: Tensor | Edge, sources: Sequence[Edge], gradients: Tensor
) -> list[Tensor | None]:
    """Pull gradients ``[S, ...]`` back to some places: ``[S, ...]`` each, None where none arrives.

    They go in one pass, or one by one where vmap fails. The graph stays.
    """

    def once(gradient: Tensor, *, batched: bool = False) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            [output],  # type: ignore[arg-type]
            sources,
            [gradient],
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=batched,
        )

    if not sources:
        return []
    if len(gradients) > 1:
        try:
            with warnings.catch_warnings():  # what vmap takes one by one is no slower than without
                warnings.filterwarnings("ignore", message="There is a performance drop")
                return [*once(gradients, batched=True)]
        except Exception:
            pass  # of an operation of the user's; if it is no matter of vmap, it comes again
    found = zip(*map(once, gradients), strict=True)
    return [None if of_place[0] is None else stacked([*of_place]) for of_place in found]


def pulled_to_weight(output: Edge, weight: Edge, gradients: Tensor) -> Tensor:
    """Pull gradients ``[n, ...]`` back to what ``output`` was computed from, zeros where none arrives."""
    if output == weight:
        return gradients
    turned = type(output.node).__name__ == "TBackward0" and gradients.dim() == 3
    if turned and output.node.next_functions[0][0] is weight.node:
        return gradients.mT  # as of every linear layer
    (found,) = pulled_back(output, [weight], gradients)
    if found is None:
        return gradients.new_zeros(len(gradients), *shape_of(weight.node, weight.output_nr))
    return found


def stacked(gradients: list[Tensor]) -> Tensor:
    """Return ``[S, ...]``, without a copy of a single one."""
    if len(gradients) == 1:
        return gradients[0].unsqueeze(0)
    return torch.stack(gradients)


class Graph:
    """The autograd graph of a forward pass: nodes in the order of a walk, and who uses the output of whom."""

    def __init__(self, outputs: Tensor, parameters: dict[str, nn.Parameter]) -> None:
        self.outputs = outputs
        names = {id(p): name for name, p in parameters.items()}
        self.number: dict[Node, int] = {outputs.grad_fn: 0}  # type: ignore[dict-item]
        self.nodes: list[Node] = [outputs.grad_fn]  # type: ignore[list-item]
        # By node: who uses its output, at which place, and which of its outputs.
        self.consumers: dict[Node, list[tuple[Node, int, int]]] = defaultdict(list)
        self.leaves: dict[str, Node] = {}
        self.names: dict[Node, str] = {}
        self.signature: list[Any] = []  # of the nodes, in their order
        for node in self.nodes:  # which grows
            sources = node.next_functions
            if not sources and hasattr(node, "variable"):
                name = names.get(id(node.variable))
                if name is not None:
                    self.leaves[name] = node
                    self.names[node] = name
                self.signature.append((type(node), name))
                continue
            shapes = [tuple(like.shape) for like in node._input_metadata]
            self.signature.append((type(node), *shapes))
            for place, (source, number) in enumerate(sources):
                if source is None:
                    continue
                self.consumers[source].append((node, place, number))
                if source not in self.number:
                    self.number[source] = len(self.nodes)
                    self.nodes.append(source)

    def leaf(self, name: str) -> Edge:
        """Return where a parameter is."""
        return Edge(self.leaves[name], 0)

    def uses(self, mixed: set[Node]) -> dict[Node, dict[int, Edge]]:
        """Return the first operations on the ways from parameters that put out rows of samples, with their weights.

        Args:
            mixed: Operations whose outputs are no such rows.
        """
        found: dict[Node, dict[int, Edge]] = {}
        stack = [*self.leaves.values()]
        seen = {*stack}
        while stack:
            node = stack.pop()
            for consumer, place, number in self.consumers[node]:
                if consumer not in mixed and not moves_entries(consumer):
                    found.setdefault(consumer, {})[place] = Edge(node, number)
                elif consumer not in seen:
                    seen.add(consumer)
                    stack.append(consumer)
        return found

    def behind(self, nodes: set[Node], blocked: Collection[Node] = ()) -> set[Node]:
        """Return the operations between some and the outputs, without those behind ``blocked``."""

        def consumers(node: Node) -> list[Node]:
            return [consumer for consumer, _, _ in self.consumers[node]]

        return _reached(nodes, consumers, blocked)

    def below(self, node: Node) -> set[Node]:
        """Return an operation, and all that it was computed from."""

        def sources(node: Node) -> list[Node]:
            return [source for source, _ in node.next_functions if source is not None]

        return {node, *_reached({node}, sources)}

    def roots(self, node: Node) -> set[str]:
        """Return the names of the parameters that something was computed from."""
        if node in self.names:
            return {self.names[node]}
        return {self.names[source] for source in self.below(node) if source in self.names}

    def nested(self, sources: dict[int, Edge]) -> bool:
        """Whether an input of an operation is another one, or was computed from it, and has a part in its gradient."""
        if len({*sources.values()}) < len(sources):
            return True
        pairs = permutations({edge.node for edge in sources.values()}, 2)
        return any(first in self.below(second) for first, second in pairs)

    def single_output(self, node: Node) -> bool:
        """Whether only the first output of an operation is used."""
        numbers = {number for _, _, number in self.consumers[node]}
        if node is self.outputs.grad_fn:
            numbers.add(self.outputs.output_nr)
        return numbers <= {0}

    def dtypes(self) -> set[torch.dtype]:
        """Return the types of number that operations put out: rounding is that of the coarsest."""
        kinds = {like.dtype for node in self.nodes for like in node._input_metadata}
        return {kind for kind in kinds if kind.is_floating_point}

    @cached_property
    def checkpointed(self) -> bool:
        """Whether reentrant checkpointing is used, which allows a backward pass to the parameters only."""
        return any(kind.__name__ == "CheckpointFunctionBackward" for kind, *_ in self.signature)


def _reached(
    nodes: set[Node], following: Callable[[Node], list[Node]], blocked: Collection[Node] = ()
) -> set[Node]:
    """Return all that follows some nodes, without what is blocked or only follows that."""
    found: set[Node] = set()
    stack = [*nodes]
    while stack:
        for node in following(stack.pop()):
            if node not in found and node not in blocked:
                found.add(node)
                stack.append(node)
    return found


def moves_entries(node: Any) -> bool:
    """Whether an operation only moves the entries of its one input, or shifts them by a number."""
    kind = type(node).__name__
    if MOVE_ENTRIES.fullmatch(kind):
        return True
    source: Any = node.next_functions[0][0] if node.next_functions else None
    if kind == "ToCopyBackward0":  # to another precision, as autocast does
        likes = [*node._input_metadata, *source._input_metadata]
        return not any(like.dtype.is_complex for like in likes)
    if kind == "AddBackward0" and source is not None and node.next_functions[1][0] is None:
        shapes = [like.shape for like in source._input_metadata]
        return shapes == [node._input_metadata[0].shape]
    return False


def way_to_leaf(source: Edge) -> tuple[str, ...] | None:
    """Return the kinds of the operations from a weight to its parameter if they only move entries."""
    way: list[str] = []
    node = source.node
    while node.next_functions:
        if not moves_entries(node):
            return None
        if type(node).__name__ != "ToCopyBackward0":
            way.append(type(node).__name__)
        node = next(n for n, _ in node.next_functions if n is not None)
    return tuple(way)


# What has been put in the place of tensors that operations have saved, as by checkpointing


def unpack_hooks(node: Node) -> list[Any]:
    """Return what computes or fetches the tensors that an operation has saved, where something does."""
    saved = [getattr(node, name) for name in _saved_names(type(node))]
    hooks = []
    for value in saved:
        several = value if isinstance(value, tuple | list) else [value]
        hooks += [getattr(x, "unpack_hook", None) for x in several]
    return [hook for hook in hooks if hook is not None]


@cache
def _saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def inside_a_pass(function: Callable[[], Any]) -> None:
    """Call a function in a backward pass, in which checkpointed regions are run once for all that it reads."""

    def call(_: Tensor) -> None:
        function()

    with torch.enable_grad():
        output = torch.zeros((), device="cpu", requires_grad=True) * 1.0
        output.register_hook(call)
        output.backward()
