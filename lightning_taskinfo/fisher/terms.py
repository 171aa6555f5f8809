r"""All that a parameter's uses contribute to its gradient.

The gradient of a use's weight is pulled back to the parameter that it was computed from. Where that
only moved entries, squares can be pulled back instead of gradients, and norms stay as they are.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_taskinfo._observe import at_least_float32
from lightning_taskinfo.fisher.capture import Plan
from lightning_taskinfo.fisher.conv import read_convolution
from lightning_taskinfo.fisher.graph import (
    Edge,
    Graph,
    inside_a_pass,
    pulled_back,
    pulled_to_weight,
    shape_of,
    stacked,
    unpack_hooks,
    way_to_leaf,
)
from lightning_taskinfo.fisher.ops import (
    ALL,
    READERS,
    Embedding,
    Other,
    Product,
    Rows,
    Use,
    add_lookups,
    blocks,
    product_norms,
    sum_of_norms,
    sum_of_squares,
    total,
)

Pair = tuple[Tensor, Tensor]
Receive = Callable[[str, "Gradients"], None]  # takes the gradients of a parameter


@dataclass
class Term:
    """A weight at ``source`` in the graph, used by the operation of ``output`` as its input at ``place``.

    ``operation`` is the operation's number among those whose output gradients are wanted, and
    ``rows`` has the samples of its rows.
    """

    output: Edge
    place: int
    source: Edge
    rows: Rows
    operation: int

    @cached_property
    def use(self) -> Use:
        """What the operation has seen, which is held from now on."""
        weight = self.source.node._input_metadata[self.source.output_nr]
        kind = type(self.output.node).__name__
        reader = read_convolution if kind == "ConvolutionBackward0" else READERS.get(kind)
        try:
            use = None if reader is None else reader(self.output.node, self.place, weight)
        except AttributeError:  # another version of torch keeps other things
            use = None
        if use is not None:
            use.rows = self.rows
            if use.fits():
                return use
        return Other(tuple(weight.shape), self.output, self.source, rows=self.rows)

    @cached_property
    def way(self) -> tuple[str, ...] | None:
        """The kinds of the operations from the weight to its parameter if they only move entries."""
        return way_to_leaf(self.source)

    @property
    def needs_graph(self) -> bool:
        """Whether gradients are made by a backward pass over the operation, or over those that made the weight."""
        return self.way is None or isinstance(self.use, Other)

    @property
    def factored(self) -> bool:
        """Whether the gradient of a matrix is a sum of products of two vectors."""
        if isinstance(self.use, Embedding):
            return self.way == ()
        return isinstance(self.use, Product) and self.way in ((), ("TBackward0",))

    @property
    def inputs_in_rows(self) -> bool:
        """Whether a row of the parameter belongs to an entry of the inputs, rather than of the outputs."""
        if isinstance(self.use, Product):  # a weight [D, C] that rows are multiplied by as it is
            return self.use.turned != (self.way == ("TBackward0",))
        return isinstance(self.use, Embedding)

    def factors(self, b: Tensor) -> Pair:
        """Return ``left`` and ``right``, each ``[N, T, ...]``, of a factored gradient ``Σ_t left_t right_tᵀ``.

        Of a lookup, ``left`` has indices instead of vectors.
        """
        if isinstance(self.use, Embedding):
            return self.use.tokens, b
        assert isinstance(self.use, Product)
        inputs = self.use.a.flatten(1, 2)
        outputs = b.flatten(1, 2)
        return (inputs, outputs) if self.inputs_in_rows else (outputs, inputs)


class Factors(NamedTuple):
    r"""Gradients of samples as sums of products, :math:`\sum_s l_s r_s^\top + \sum_t e_{x_t} v_t^\top`.

    Attributes:
        dense: :math:`l` and :math:`r`, each ``[N, S, ...]``, of all matrix products; None without one.
        lookups: Indices :math:`x` ``[N, T]`` and vectors :math:`v` ``[N, T, D]`` of all lookups; None
            without one.
    """

    dense: Pair | None
    lookups: Pair | None

    def formed(self, samples: slice, shape: torch.Size) -> Tensor:
        """Return the gradients of some samples, ``[n, *shape]``."""
        if self.dense is not None:
            left, right = self.dense
            gradients = left[samples].mT @ right[samples]
        if self.lookups is not None:
            index, v = self.lookups
            if self.dense is None:
                gradients = v.new_zeros(len(v[samples]), *shape)
            add_lookups(gradients, index[samples], v[samples])
        return gradients

    def norms(self) -> Tensor:
        r"""Return the squared norm of each sample's gradient, without forming it.

        As of a table that is a language model's head as well. The products of all pairs of
        positions are needed: :math:`(l_s \cdot l_{s'})(r_s \cdot r_{s'})`,
        :math:`v_t \cdot v_{t'}` where the tokens are equal, and twice
        :math:`l_s[x_t]\,(r_s \cdot v_t)`.
        """
        norms = []
        if self.dense is not None:
            left, right = self.dense
            norms.append(product_norms(left, right))
        if self.lookups is not None:
            index, v = self.lookups
            same = index.unsqueeze(1) == index.unsqueeze(2)
            products = (v @ v.mT) * same
            norms.append(products.sum((1, 2)))
        if self.dense is not None and self.lookups is not None:
            tokens = index.unsqueeze(1).expand(-1, left.shape[1], -1)
            products = left.gather(2, tokens) * (right @ v.mT)
            norms.append(2 * products.sum((1, 2)))
        return total(norms)


class Gradients:
    """Gradients ``[n, *shape]`` of one parameter, of a few samples for one score."""

    # Uses, with output gradients [S, ...], where gradients are made of them.
    parts: "list[tuple[Term, Tensor]]"

    def __init__(self, gradients: Tensor) -> None:
        self.parts = []
        self.gradients = gradients

    @property
    def factored(self) -> bool:
        """Whether gradients are sums of products of two vectors."""
        return False

    def formed(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield samples, and their gradients ``[n, *shape]`` for one score after the other."""
        yield slice(0, len(self.gradients)), self.gradients

    def norms(self) -> Tensor:
        """Return the squared norm of each sample's gradient, summed over scores."""
        return sum_of_norms(self.formed())

    def diagonal(self) -> Tensor:
        """Return the squared gradients, summed over samples and scores."""
        return sum_of_squares(g for _, g in self.formed())

    def one_product(self) -> Pair | None:
        """Return ``left`` and ``right``, each ``[N, ...]``, where each sample's gradient is ``left rightᵀ``."""
        return None


class Contribution(Gradients):
    """The gradients of one parameter from all its uses, for some scores.

    They add up before they are squared, so that uses wait for each other.

    Args:
        name: The parameter's name.
        leaf: Where it is in the graph.
        terms: Its uses.
        apart: Whether no entry of it is used twice.
        can_wait: Whether the graph is there until all gradients have arrived. Otherwise, if a use
            needs it, the gradients of all uses are formed at once.
    """

    def __init__(
        self, name: str, leaf: Edge, terms: list[Term], *, apart: bool, can_wait: bool
    ) -> None:
        self.name = name
        self.leaf = leaf
        self.shape = shape_of(leaf.node)
        self.terms = terms
        self.apart = apart
        self.missing = {term.operation for term in terms}
        alone = len(terms) == 1
        self.waits = alone or can_wait or not any(term.needs_graph for term in terms)
        self.parts = []
        self.sum: Tensor | None = None  # of the gradients that were formed at once

    def add(self, operation: int, scores: Tensor | None) -> None:
        """Take the gradients ``[S, ...]`` by an operation's output; None if there are none."""
        self.missing.discard(operation)
        if scores is None:
            return
        arrived = [term for term in self.terms if term.operation == operation]
        if self.waits:
            self.parts += [(term, scores) for term in arrived]
            return
        for term in arrived:
            one = Contribution(self.name, self.leaf, [term], apart=False, can_wait=True)
            one.add(operation, scores)
            gradients = torch.cat([some for _, some in one.formed()])
            self.sum = gradients if self.sum is None else self.sum + gradients

    def whole(self) -> Gradients | None:
        """Return the gradients from all uses, once they have arrived; None if there are none."""
        if self.sum is not None:
            return Gradients(self.sum)
        return self if self.parts else None

    @property
    def separate(self) -> bool:
        """Whether squares of the uses' gradients add up."""
        moved = all(term.way is not None for term, _ in self.parts)
        return moved and (len(self.parts) == 1 or self.apart)

    @property
    def factored(self) -> bool:
        return len(self.shape) == 2 and all(term.factored for term, _ in self.parts)

    @cached_property
    def _arranged(self) -> list[tuple[Term, list[Tensor]]]:
        arranged = []
        for term, scores in self.parts:
            arranged.append((term, [term.use.arranged(b) for b in scores]))
        return arranged

    def norms(self) -> Tensor:
        if self.separate:
            return total(term.use.norms(scores) for term, scores in self._arranged)
        if self.factored:
            return total(factors.norms() for factors in self._factors)
        return super().norms()

    def diagonal(self) -> Tensor:
        if not self.separate:
            return super().diagonal()
        squares = ((term, term.use.diagonal(scores)) for term, scores in self._arranged)
        return total(self._pulled(term, of_use[None])[0] for term, of_use in squares)

    def one_product(self) -> Pair | None:
        if len(self.parts) > 1 or not self.factored:
            return None
        ((term, scores),) = self._arranged
        left, right = term.factors(scores[0])
        if isinstance(term.use, Embedding) or left.shape[1] != 1:
            return None
        return left[:, 0], right[:, 0]

    def formed(self) -> Iterator[tuple[slice, Tensor]]:
        of_uses = [term.use.elements for term, _ in self.parts]
        elements = max(self.shape.numel(), *of_uses)
        _, scores = self._arranged[0]
        for samples in blocks(len(scores[0]), elements):
            for i in range(len(scores)):
                yield samples, self._formed(i, samples)

    def _formed(self, i: int, samples: slice) -> Tensor:
        if len(self.parts) > 1 and self.factored:
            return self._factors[i].formed(samples, self.shape)
        parts = []
        for term, scores in self._arranged:
            gradients = term.use.gradients(scores[i], samples)
            parts.append(self._pulled(term, gradients))
        first, *others = parts
        return sum(others, start=first)

    def _pulled(self, term: Term, gradients: Tensor) -> Tensor:
        """Pull gradients of a use's weight back to the parameter."""
        return pulled_to_weight(term.source, self.leaf, gradients)

    @cached_property
    def _factors(self) -> list[Factors]:
        """The factors of all uses, by score."""
        _, scores = self.parts[0]
        factors = []
        for i in range(len(scores)):
            dense = self._joined(i, Product)
            lookups = self._joined(i, Embedding)
            factors.append(Factors(dense, lookups))
        return factors

    def _joined(self, i: int, kind: type[Use]) -> Pair | None:
        """Put the positions of several uses behind each other."""
        pairs = []
        for term, scores in self._arranged:
            if isinstance(term.use, kind):
                pairs.append(term.factors(scores[i]))
        if len(pairs) < 2:
            return pairs[0] if pairs else None
        lefts, rights = zip(*pairs, strict=True)
        return torch.cat(lefts, 1), torch.cat(rights, 1)


def contributions(
    graph: Graph, plan: Plan, *, chosen: slice = ALL, training: bool = False
) -> tuple[list[Edge], list[Contribution]]:
    """Return where gradients are wanted in a graph that a plan fits, and what waits for them.

    Args:
        graph: The graph.
        plan: The plan.
        chosen: The samples that are measured.
        training: Whether the backward pass is that of a training. It takes away the whole graph,
            and a BatchNorm may normalise with the statistics of the batch, which mixes the samples.
    """
    edges: list[Edge] = []
    by_name: dict[str, list[Term]] = {}
    for number, places, rows in plan.uses:
        output = Edge(graph.nodes[number], 0)
        if chosen != ALL:
            rows = replace(rows, chosen=chosen)
        wanted = False
        for place, (source_number, source_output) in places.items():
            source = Edge(graph.nodes[source_number], source_output)
            term = Term(output, place, source, rows, len(edges))
            for name in graph.roots(source.node) - plan.unshown.keys():
                wanted = True
                by_name.setdefault(name, []).append(term)
        if wanted:
            edges.append(output)
            if not training:
                _check_statistics(output.node, rows)
    if any(unpack_hooks(edge.node) for edge in edges):
        # Checkpointing computes what was saved again: once for all that is read in one pass.
        inside_a_pass(lambda: [term.use for found in by_name.values() for term in found])
    waiting: list[Contribution] = []
    for name, found in by_name.items():
        apart = name in plan.apart
        leaf = graph.leaf(name)
        waiting.append(Contribution(name, leaf, found, apart=apart, can_wait=not training))
    return edges, waiting


def _check_statistics(node: Node, rows: Rows) -> None:
    batch_norm = type(node).__name__ == "NativeBatchNormBackward0"
    if batch_norm and node._saved_training and rows.axis == 0:  # type: ignore[attr-defined]
        raise ValueError(
            "BatchNorm that normalises with the statistics of the batch mixes the samples, so that none has a gradient "
            "of its own; use running statistics: `model.eval()` and `track_running_stats=True`."
        )


# --- Gradients by the outputs of uses, brought by backward passes


class Arrivals:
    """Hands on the gradients of each parameter as soon as those of all its uses have arrived.

    Then input and output gradient of a use have become what is measured, and nothing holds them any
    longer: a backward pass needs no more memory than that of a training.

    Args:
        waiting: What waits for gradients.
        receive: What takes the gradients of a parameter.
    """

    def __init__(self, waiting: Iterable[Contribution], receive: Receive) -> None:
        self.receive = receive
        self.waiting: dict[int, list[Contribution]] = {}  # by operation
        for one in waiting:
            for operation in one.missing:
                self.waiting.setdefault(operation, []).append(one)

    def add(self, operation: int, scores: Tensor | None) -> None:
        """Take the gradients ``[S, ...]`` by an operation's output; None if there are none."""
        for one in self.waiting.pop(operation):
            one.add(operation, scores)
            found = None if one.missing else one.whole()
            if found is not None:
                self.receive(one.name, found)

    def add_one(self, operation: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Take the gradient of a pass, as a hook; a second pass over the operation is one of its use's own."""
        if operation not in self.waiting:
            return
        b = gradients[0]
        if b is not None:
            b = at_least_float32(b.detach()).unsqueeze(0)
        self.add(operation, b)


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
    edges, waiting = contributions(graph, plan)
    waiting = [one for one in waiting if one.name not in without]
    retain_graph = retain_graph or any(map(_runs_an_operation_again, waiting))
    arrivals = Arrivals(waiting, receive)
    del waiting  # the arrivals alone hold uses, until these have their gradients
    if not arrivals.waiting:
        return
    if len(scores) == 1:
        _one_pass(graph, edges, scores[0], arrivals, retain_graph)
        return
    gradients = pulled_back(graph.outputs, edges, stacked(scores))
    for operation in [*arrivals.waiting]:
        arrivals.add(operation, gradients[operation])


def _runs_an_operation_again(contribution: Contribution) -> bool:
    """Whether a use that waits for others needs its operation afterwards."""
    terms = contribution.terms
    return len(terms) > 1 and any(isinstance(term.use, Other) for term in terms)


def _one_pass(
    graph: Graph, edges: list[Edge], score: Tensor, arrivals: Arrivals, retain_graph: bool
) -> None:
    # The lowest uses are asked for, so that nothing is computed below them: no gradient of a
    # weight. The pass comes by all others on its way.
    above = graph.behind({edge.node for edge in edges})
    lowest = {i: edge for i, edge in enumerate(edges) if edge.node not in above}
    passed = [i for i in arrivals.waiting if i not in lowest]
    handles = []
    for i in passed:
        take = partial(arrivals.add_one, i)
        handles.append(edges[i].node.register_prehook(take))
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
