r"""All that a parameter's uses contribute to its gradient.

The gradient of a use's weight is pulled back to the parameter that it was computed from. Where that
only moved entries, squares can be pulled back instead of gradients, and norms stay as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_taskinfo.fisher.capture import Plan
from lightning_taskinfo.fisher.conv import read_convolution
from lightning_taskinfo.fisher.graph import (
    Edge,
    Graph,
    inside_a_pass,
    moves_entries,
    ones_at,
    pulled_to_weight,
    shape_of,
    unpack_hooks,
)
from lightning_taskinfo.fisher.ops import (
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
ALL = slice(None)


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
        way: list[str] = []
        node = self.source.node
        while node.next_functions:
            if not moves_entries(node):
                return None
            if type(node).__name__ != "ToCopyBackward0":
                way.append(type(node).__name__)
            node = next(n for n, _ in node.next_functions if n is not None)
        return tuple(way)

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


class Gradients:
    """Gradients ``[n, *shape]`` of one parameter, of a few samples for one score."""

    # Uses, with output gradients [S, ...], where gradients are made of them.
    parts: "list[tuple[Term, Tensor]]"
    factored = False  # whether these are sums of products of two vectors

    def __init__(self, gradients: Tensor) -> None:
        self.parts = []
        self.whole = gradients

    def formed(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield samples, and their gradients ``[n, *shape]`` for one score after the other."""
        yield slice(0, len(self.whole)), self.whole

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
    """The gradients of one parameter from all its uses, for some scores."""

    def __init__(self, parts: list[tuple[Term, Tensor]], leaf: Edge, apart: bool) -> None:
        self.parts = parts
        self.leaf = leaf
        self.shape = shape_of(leaf.node)
        moved = all(term.way is not None for term, _ in parts)
        self.separate = moved and (len(parts) == 1 or apart)
        self.factored = len(self.shape) == 2 and all(term.factored for term, _ in parts)

    @cached_property
    def _arranged(self) -> list[tuple[Term, list[Tensor]]]:
        return [(term, [term.use.arranged(b) for b in scores]) for term, scores in self.parts]

    def norms(self) -> Tensor:
        if self.separate:
            return total(term.use.norms(scores) for term, scores in self._arranged)
        if self.factored:
            return total(_factored_norms(*pairs) for pairs in self._pairs)
        return super().norms()

    def diagonal(self) -> Tensor:
        if not self.separate:
            return super().diagonal()
        return total(
            self._pulled(term, term.use.diagonal(scores)[None])[0]
            for term, scores in self._arranged
        )

    def one_product(self) -> Pair | None:
        if len(self.parts) > 1 or not self.factored or isinstance(self.parts[0][0].use, Embedding):
            return None
        ((term, scores),) = self._arranged
        left, right = term.factors(scores[0])
        return (left[:, 0], right[:, 0]) if left.shape[1] == 1 else None

    def formed(self) -> Iterator[tuple[slice, Tensor]]:
        elements = max(self.shape.numel(), *(term.use.elements for term, _ in self.parts))
        n = len(self._arranged[0][1][0])
        for samples in blocks(n, elements):
            for i in range(len(self.parts[0][1])):
                yield samples, self._formed(i, samples)

    def _formed(self, i: int, samples: slice) -> Tensor:
        if len(self.parts) > 1 and self.factored:
            return _from_factors(*self._pairs[i], samples, self.shape)
        first, *others = (
            self._pulled(term, term.use.gradients(scores[i], samples))
            for term, scores in self._arranged
        )
        return sum(others, start=first)

    def _pulled(self, term: Term, gradients: Tensor) -> Tensor:
        """Pull gradients of a use's weight back to the parameter."""
        return pulled_to_weight(term.source, self.leaf, gradients)

    @cached_property
    def _pairs(self) -> list[tuple[Pair | None, Pair | None]]:
        """The factors of all matrix products, and those of all lookups, by score."""
        scores = range(len(self.parts[0][1]))
        return [(self._joined(i, Product), self._joined(i, Embedding)) for i in scores]

    def _joined(self, i: int, kind: type[Use]) -> Pair | None:
        """Put the positions of several uses behind each other."""
        pairs = [t.factors(scores[i]) for t, scores in self._arranged if isinstance(t.use, kind)]
        if len(pairs) < 2:
            return pairs[0] if pairs else None
        left, right = (torch.cat(of_uses, 1) for of_uses in zip(*pairs, strict=True))
        return left, right


def _from_factors(
    dense: Pair | None, lookups: Pair | None, samples: slice, shape: torch.Size
) -> Tensor:
    """Return the gradients of some samples as one product of the rows of all uses, and lookups added to it."""
    if dense is not None:
        gradients = dense[0][samples].mT @ dense[1][samples]
    if lookups is not None:
        index, v = lookups[0][samples], lookups[1][samples]
        if dense is None:
            gradients = v.new_zeros(len(v), *shape)
        add_lookups(gradients, index, v)
    return gradients


def _factored_norms(dense: Pair | None, lookups: Pair | None) -> Tensor:
    r"""Return the norms of :math:`\sum_s l_s r_s^\top + \sum_t e_{x_t} v_t^\top`, without forming it.

    As of a table that is a language model's head as well. The products of all pairs of positions
    are needed:
    :math:`(l_s \cdot l_{s'})(r_s \cdot r_{s'})`, :math:`v_t \cdot v_{t'}` where the tokens are equal, and twice
    :math:`l_s[x_t]\,(r_s \cdot v_t)`.
    """
    norms = []
    if dense is not None:
        norms.append(product_norms(*dense))
    if lookups is not None:
        index, v = lookups
        same = index.unsqueeze(1) == index.unsqueeze(2)
        norms.append(((v @ v.mT) * same).sum((1, 2)))
    if dense is not None and lookups is not None:
        left, right = dense
        at_tokens = left.gather(2, index.unsqueeze(1).expand(-1, left.shape[1], -1))
        norms.append(2 * (at_tokens * (right @ v.mT)).sum((1, 2)))
    return total(norms)


def terms(
    graph: Graph, plan: Plan, chosen: slice = ALL, *, batch_statistics: bool = False
) -> tuple[list[Edge], dict[str, list[Term]]]:
    """Return where gradients are wanted in a graph that a plan fits, and the uses of each parameter.

    Args:
        graph: The graph.
        plan: The plan.
        chosen: The samples that are measured.
        batch_statistics: Whether a BatchNorm may normalise with the statistics of the batch, which
            mixes the samples.
    """
    edges: list[Edge] = []
    by_name: dict[str, list[Term]] = {}
    for number, places, rows in plan.uses:
        output = Edge(graph.nodes[number], 0)
        wanted = False
        for place, (source_number, source_output) in places.items():
            source = Edge(graph.nodes[source_number], source_output)
            term = Term(output, place, source, replace(rows, chosen=chosen), len(edges))
            for name in graph.roots(source.node) - plan.unshown.keys():
                wanted = True
                by_name.setdefault(name, []).append(term)
        if wanted:
            edges.append(output)
            if not batch_statistics:
                _check_statistics(output.node, rows)
    if any(unpack_hooks(edge.node) for edge in edges):
        # Checkpointing computes what was saved again: once for all that is read in one pass.
        inside_a_pass(lambda: [term.use for found in by_name.values() for term in found])
    return edges, by_name


def _check_statistics(node: Node, rows: Rows) -> None:
    batch_norm = type(node).__name__ == "NativeBatchNormBackward0"
    if batch_norm and node._saved_training and rows.axis == 0:  # type: ignore[attr-defined]
        raise ValueError(
            "BatchNorm that normalises with the statistics of the batch mixes the samples, so that none has a gradient "
            "of its own; use running statistics: `model.eval()` and `track_running_stats=True`."
        )


def apart(graph: Graph, uses: dict[str, list[Term]]) -> set[str]:
    """Return the parameters that have several uses, none of them of the same entry."""

    def disjoint(leaf: Edge, found: list[Term]) -> bool:
        if any(not term.way for term in found):  # not computed by moving entries, or all entries
            return False
        counts = [pulled_to_weight(term.source, leaf, ones_at(term.source)[None]) for term in found]
        return bool((total(counts) <= 1).all())

    several = {name: found for name, found in uses.items() if len(found) > 1}
    return {name for name, found in several.items() if disjoint(graph.leaf(name), found)}
