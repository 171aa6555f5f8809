r"""Backward passes that bring the uses of weights the gradients by their outputs.

What a use needs is there when a pass arrives at it: the operation still has its input, and the
gradient by its output has just been made. It becomes what is measured at once, and both can go, as
in any backward pass. So a measurement holds no more of a graph than a training step does. Only uses
of the same parameter wait for each other, since their gradients add up before they are squared.
"""

from collections.abc import Callable, Container, Iterable
from functools import partial

import torch
from torch import Tensor

from lightning_taskinfo._observe import at_least_float32
from lightning_taskinfo.fisher.capture import Plan
from lightning_taskinfo.fisher.graph import Edge, Graph, pulled_back, stacked
from lightning_taskinfo.fisher.ops import Other
from lightning_taskinfo.fisher.terms import Contribution, Gradients, Term, terms

Receive = Callable[[str, Gradients], None]


class Group:
    """The uses of one parameter, with the gradients that have arrived.

    Args:
        name: The parameter's name.
        leaf: Where it is in the graph.
        terms: Its uses.
        apart: Whether no entry of it is used twice.
        graph_stays: Whether uses can wait for each other in any case. Otherwise, where one needs the
            graph to form its gradients, all form them at once.
    """

    def __init__(
        self, name: str, leaf: Edge, terms: list[Term], *, apart: bool, graph_stays: bool
    ) -> None:
        self.name = name
        self.leaf = leaf
        self.terms = terms
        self.apart = apart
        self.missing = {term.operation for term in terms}
        self.parts: list[tuple[Term, Tensor]] = []
        self.formed: Tensor | None = None
        alone = len(terms) == 1
        self.waits = alone or graph_stays or not any(term.needs_graph for term in terms)

    def add(self, operation: int, scores: Tensor | None) -> None:
        """Take the gradients ``[S, ...]`` by an operation's output; None if there are none."""
        self.missing.discard(operation)
        if scores is None:
            return
        parts = [(term, scores) for term in self.terms if term.operation == operation]
        if self.waits:
            self.parts += parts
            return
        for part in parts:
            found = Contribution([part], self.leaf, apart=False)
            gradients = torch.cat([some for _, some in found.formed()])
            self.formed = gradients if self.formed is None else self.formed + gradients

    def gradients(self) -> Gradients | None:
        """Return the gradients of the parameter, None where they are zero."""
        if self.formed is not None:
            return Gradients(self.formed)
        return Contribution(self.parts, self.leaf, self.apart) if self.parts else None


class Arrivals:
    """Hands on the gradients of each parameter as soon as those of all its uses have arrived.

    Args:
        groups: The uses of each parameter.
        receive: What takes its gradients.
    """

    def __init__(self, groups: Iterable[Group], receive: Receive) -> None:
        self.receive = receive
        self.waiting: dict[int, list[Group]] = {}  # by operation
        for group in groups:
            for operation in group.missing:
                self.waiting.setdefault(operation, []).append(group)

    def add(self, operation: int, scores: Tensor | None) -> None:
        """Take the gradients ``[S, ...]`` by an operation's output; None if there are none."""
        for group in self.waiting.pop(operation):
            group.add(operation, scores)
            found = None if group.missing else group.gradients()
            if found is not None:
                self.receive(group.name, found)

    def add_one(self, operation: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Take the gradient of a pass, as a hook; a second pass over the operation is one of its use's own."""
        if operation in self.waiting:
            b = gradients[0]
            self.add(operation, None if b is None else at_least_float32(b.detach()).unsqueeze(0))


def backward(
    graph: Graph,
    plan: Plan,
    scores: list[Tensor],
    receive: Receive,
    *,
    without: Container[str] = (),
    retain_graph: bool = True,
) -> None:
    """Backpropagate scores of the outputs to the uses of weights.

    Several scores go together, which is quicker than one by one, and hold what they bring to all
    uses.

    Args:
        graph: The graph.
        plan: Where its uses are.
        scores: The scores, each shaped like the outputs.
        receive: What takes the gradients of a parameter.
        without: Parameters that are not measured.
        retain_graph: Whether other scores will follow.
    """
    edges, uses = terms(graph, plan)
    groups = [
        Group(name, graph.leaf(name), found, apart=name in plan.apart, graph_stays=True)
        for name, found in uses.items()
        if name not in without
    ]
    retain_graph = retain_graph or any(map(_runs_an_operation_again, groups))
    arrivals = Arrivals(groups, receive)
    groups.clear()  # only who waits for gradients holds a use
    uses.clear()
    if not arrivals.waiting:
        return
    if len(scores) == 1:
        _one_pass(graph, edges, scores[0], arrivals, retain_graph)
    else:
        gradients = pulled_back(graph.outputs, edges, stacked(scores))
        for operation in [*arrivals.waiting]:
            arrivals.add(operation, gradients[operation])


def _runs_an_operation_again(group: Group) -> bool:
    """Whether a use that waits for others needs its operation afterwards."""
    return len(group.terms) > 1 and any(isinstance(term.use, Other) for term in group.terms)


def _one_pass(
    graph: Graph, edges: list[Edge], score: Tensor, arrivals: Arrivals, retain_graph: bool
) -> None:
    # Nothing is computed below the lowest uses, which are asked for: no gradient of a weight. The
    # pass comes by all others on its way.
    above = graph.behind({edge.node for edge in edges})
    lowest = {i: edge for i, edge in enumerate(edges) if edge.node not in above}
    passed = [i for i in arrivals.waiting if i not in lowest]
    handles = [edges[i].node.register_prehook(partial(arrivals.add_one, i)) for i in passed]
    try:
        captured = torch.autograd.grad(
            [graph.outputs],
            [*lowest.values()],
            [score],
            retain_graph=retain_graph,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    for i, b in zip(lowest, captured, strict=True):
        arrivals.add_one(i, (b,))
    for i in [*arrivals.waiting]:  # no gradient has come by
        arrivals.add(i, None)
