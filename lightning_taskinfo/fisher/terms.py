r"""All that a parameter's uses contribute to its gradient.

The gradient of a use's weight is pulled back to the parameter that it was computed from. Where that only moved
entries, squares can be pulled back instead of gradients, and norms stay as they are.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_taskinfo.fisher.capture import Graph, Plan, moves_entries
from lightning_taskinfo.fisher.ops import (
    BLOCK,
    Embedding,
    Factor,
    Linear,
    Use,
    product_norms,
    squared_norms,
    total,
)
from lightning_taskinfo.fisher.readers import read
from lightning_taskinfo.fisher.vjp import Edge, batched_vjp, ones_at, shape_of, vjp


@dataclass
class Term:
    """One use of a parameter: of a weight at ``source`` in the graph, computed from the parameter at ``leaf``.

    ``operation`` numbers the operations whose output gradients are wanted; ``way`` has the kinds of the operations
    between source and leaf if these only move entries, and is None otherwise.
    """

    use: Use
    slot: str
    operation: int
    source: Edge
    leaf: Edge
    way: tuple[str, ...] | None

    def blocks(self, b: Tensor) -> Iterator[Tensor]:
        """Yield gradients of the parameter, a few samples at a time."""
        size = shape_of(self.leaf.node).numel()
        step = max(1, 4 * BLOCK // max(1, size))
        for gradients in self.use.blocks(self.slot, b):
            if self.way == ():
                yield gradients
                continue
            for some in gradients.split(step):
                yield batched_vjp(self.source, self.leaf, some)

    @property
    def factored(self) -> bool:
        """Whether the gradient of a matrix is a sum of products of two vectors."""
        if len(shape_of(self.leaf.node)) != 2:
            return False
        if isinstance(self.use, Embedding):
            return self.way == ()
        known = isinstance(self.use, Linear) and self.slot == "weight"
        return known and self.way in ((), ("TBackward0",))

    def factors(self, b: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return ``left`` and ``right``, each ``[N, T, ...]``, of a gradient ``Σ_t left_t right_tᵀ``; None for others.

        Of a lookup, ``left`` has indices instead of vectors.
        """
        use = self.use
        if not self.factored:
            return None
        if isinstance(use, Embedding):
            return use.lookups(b)
        assert isinstance(use, Linear)
        pair = (use.flat(b), use.inputs())
        left, right = (x if x.dim() == 3 else x.unsqueeze(1) for x in pair)
        turned = bool(use.config.get("transposed")) != (self.way == ("TBackward0",))
        return (right, left) if turned else (left, right)


class Contribution:
    """The gradients of one parameter from all its uses, for some scores."""

    def __init__(
        self,
        terms: list[Term],
        gradients: list[list[Tensor] | None] | dict[int, list[Tensor] | None],
        apart: bool,
    ) -> None:
        reached = [(term, gradients[term.operation]) for term in terms]
        self.parts = [(term, scores) for term, scores in reached if scores is not None]
        self.shape = shape_of(terms[0].leaf.node)
        moved = all(term.way is not None for term, _ in self.parts)
        self.separate = moved and (len(self.parts) == 1 or apart)

    def norms(self) -> Tensor:
        """Return the squared norm of each sample's gradient, summed over scores."""
        if self.separate:
            return total([term.use.norms(term.slot, scores) for term, scores in self.parts])
        if self._factored:
            return total(self._factored_norms(i) for i in range(self._scores))
        return total(
            torch.cat([squared_norms(g) for g in self._summed(i)]) for i in range(self._scores)
        )

    def diagonal(self) -> Tensor:
        """Return the squared gradients, summed over samples and scores."""
        if self.separate:
            squares = ((term, term.use.diagonal(term.slot, scores)) for term, scores in self.parts)
            return total(
                s if term.way == () else vjp(term.source, term.leaf, s) for term, s in squares
            )
        return total(g.square().sum(0) for i in range(self._scores) for g in self._summed(i))

    @property
    def layout(self) -> tuple[Hashable, ...] | None:
        """What must be equal for features of different chunks to belong together.

        Features of a use have the order of entries of that use, formed gradients that of the parameter. Where a use
        sees a part of the parameter, or a moved one, the kind of the use does not say which: then it is None, and
        gradients of chunks have to be formed.
        """
        if not self.separate:
            return ("formed",)
        if any(term.way != () for term, _ in self.parts):
            return None
        ((term, _),) = self.parts  # of several uses of the whole parameter none is separate
        return (type(term.use).__name__, bool(term.use.config.get("transposed")), term.slot)

    def features(self) -> Iterator[tuple[int, list[tuple[Factor, ...]]]]:
        """Yield numbered parts, for blocks of samples, whose inner products add up to those of the gradients."""
        if self.separate:
            for number, (term, scores) in enumerate(self.parts):
                for parts in term.use.features(term.slot, scores[0]):
                    yield number, parts
        else:
            for gradients in self._summed(0):
                yield 0, [(gradients.reshape(len(gradients), -1),)]

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradients for one score after the other, a few samples at a time."""
        for i in range(self._scores):
            yield from self._summed(i)

    @property
    def _scores(self) -> int:
        return len(self.parts[0][1])

    @cached_property
    def _factored(self) -> bool:
        return all(term.factored for term, _ in self.parts)

    def _pairs(self, i: int) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
        """Return the factors of all matrix products, and those of all lookups, for score ``i``."""
        dense: list[tuple[Tensor, Tensor]] = []
        lookups: list[tuple[Tensor, Tensor]] = []
        for term, scores in self.parts:
            pair = term.factors(scores[i])
            assert pair is not None
            (dense if pair[0].is_floating_point() else lookups).append(pair)
        return _joined(dense), _joined(lookups)

    def _factored_norms(self, i: int) -> Tensor:
        r"""Return the norms of :math:`\sum_s l_s r_s^\top + \sum_t e_{x_t} v_t^\top`, without forming it.

        As of a table that is a language model's head as well. The products of all pairs of positions are needed:
        :math:`(l_s \cdot l_{s'})(r_s \cdot r_{s'})`, :math:`v_t \cdot v_{t'}` where the tokens are equal, and twice
        :math:`l_s[x_t]\,(r_s \cdot v_t)`.
        """
        dense, lookups = self._pairs(i)
        norms = []
        if dense is not None:
            norms.append(product_norms(*dense))
        if lookups is not None:
            index, v = lookups
            same = index.unsqueeze(1) == index.unsqueeze(2)
            norms.append(((v @ v.mT) * same).sum((1, 2)))
        if dense is not None and lookups is not None:
            (left, right), (index, v) = dense, lookups
            at_tokens = left.gather(2, index.unsqueeze(1).expand(-1, left.shape[1], -1))
            norms.append(2 * (at_tokens * (right @ v.mT)).sum((1, 2)))
        return total(norms)

    def _summed(self, i: int) -> Iterator[Tensor]:
        """Yield the gradients for score ``i`` in full, a few samples at a time."""
        if self._factored and len(self.parts) > 1:
            yield from self._formed(i)
            return
        if len(self.parts) == 1:
            term, scores = self.parts[0]
            yield from term.blocks(scores[i])
            return
        streams = [_singles(term.blocks(scores[i])) for term, scores in self.parts]
        step = max(1, 4 * BLOCK // max(1, self.shape.numel()))
        some: list[Tensor] = []
        for of_uses in zip(*streams, strict=True):
            some.append(total([g.clone() for g in of_uses]))
            if len(some) == step:
                yield torch.stack(some)
                some = []
        if some:
            yield torch.stack(some)

    def _formed(self, i: int) -> Iterator[Tensor]:
        dense, lookups = self._pairs(i)
        high, wide = self.shape
        n = len(dense[0] if dense is not None else lookups[0])  # type: ignore[index]
        step = max(1, BLOCK // (high * wide))
        for start in range(0, n, step):
            some = slice(start, start + step)
            if dense is not None:
                gradients = dense[0][some].mT @ dense[1][some]
            else:
                gradients = lookups[1].new_zeros(min(step, n - start), high, wide)  # type: ignore[index]
            if lookups is not None:
                index, v = lookups[0][some], lookups[1][some]
                first = torch.arange(len(index), device=index.device).unsqueeze(1) * high
                gradients.view(-1, wide).index_add_(0, (first + index).flatten(), v.flatten(0, 1))
            yield gradients


def _singles(blocks: Iterator[Tensor]) -> Iterator[Tensor]:
    for block in blocks:
        yield from block.unbind()


def _joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Put the positions of several uses behind each other."""
    if len(pairs) < 2:
        return pairs[0] if pairs else None
    return torch.cat([left for left, _ in pairs], 1), torch.cat([right for _, right in pairs], 1)


def terms(
    graph: Graph, plan: Plan, *, batch_statistics: bool = False
) -> tuple[list[Edge], dict[str, list[Term]]]:
    """Return where gradients are wanted in a graph that a plan fits, and the uses of each parameter.

    Args:
        graph: The graph.
        plan: The plan.
        batch_statistics: Whether a BatchNorm may normalise with the statistics of the batch, which mixes the samples.
    """
    edges: list[Edge] = []
    by_name: dict[str, list[Term]] = {}
    for number, places, rows in plan.uses:
        sources = {
            place: Edge(graph.nodes[source], output) for place, (source, output) in places.items()
        }
        node = graph.nodes[number]
        roots = {
            place: graph.roots(edge.node) - plan.left.keys() for place, edge in sources.items()
        }
        wanted = {place: edge for place, edge in sources.items() if roots[place]}
        if not wanted:
            continue
        for use in read(node, wanted, rows, batch_statistics=batch_statistics):
            for slot, named in use.slots.items():
                place = int(named.name)
                source = wanted[place]
                way = way_to_leaf(source)
                for name in roots[place]:
                    leaf = Edge(graph.leaves[name], 0)
                    by_name.setdefault(name, []).append(
                        Term(use, slot, len(edges), source, leaf, way)
                    )
        edges.append(Edge(node, 0))
    return edges, by_name


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


def apart(found: list[Term]) -> bool:
    """Whether no entry of a parameter is used twice."""
    if any(term.way is None for term in found):
        return False
    if any(term.way == () for term in found):
        return len(found) == 1
    counts = [vjp(term.source, term.leaf, ones_at(term.source)) for term in found]
    return bool((total(counts) <= 1).all())
