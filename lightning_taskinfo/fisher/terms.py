r"""All that a parameter's uses contribute to its gradient, as backward passes bring it.

The gradient of a use's weight is pulled back to the parameter that it was computed from. Where that
only moved entries, squares can be pulled back instead of gradients, and norms stay as they are.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_taskinfo._observe import at_least_float32
from lightning_taskinfo.fisher.graph import (
    Edge,
    Graph,
    fetched_by,
    hooked,
    inside_a_pass,
    pulled_back,
    several_pulled_back,
    shape_of,
)
from lightning_taskinfo.fisher.ops import (
    Embedding,
    Other,
    Product,
    Use,
    Weight,
    blocks,
    read,
    squared_norms,
    total,
)
from lightning_taskinfo.fisher.proof import Plan

FEW = 4096  # elements of a gradient up to which samples are squared together rather than one by one

Formed = Iterator[tuple[slice, Tensor]]  # samples, and gradients of theirs
Part = tuple[Use, Tensor]  # a use, with arranged gradients by its output


class Gradients:
    """Gradients ``[n, *shape]`` of one parameter, of a few samples for one score."""

    only: Part | None = None  # the use that they are made of, if it is the only one

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients

    def formed(self) -> Formed:
        """Yield samples, and their gradients ``[n, *shape]`` for one score after the other."""
        yield slice(0, len(self.gradients)), self.gradients

    def norms(self) -> Tensor:
        """Return the squared norm of each sample's gradient, summed over scores."""
        norms: dict[int, Tensor] = {}
        for samples, gradients in self.formed():
            some = squared_norms(gradients)
            if samples.start in norms:
                some += norms[samples.start]
            norms[samples.start] = some
        return torch.cat([*norms.values()])

    def diagonal(self) -> Tensor:
        """Return the squared gradients, summed over samples and scores, with no copy of large ones."""
        squares: Any = None
        for _, gradients in self.formed():
            if squares is None:
                squares = torch.zeros_like(gradients[0])
            if squares.numel() < FEW:
                squares += gradients.square().sum(0)
            else:
                for g in gradients:
                    squares.addcmul_(g, g)
        return squares

    def one_product(self) -> tuple[Tensor, Tensor] | None:
        """Return ``left`` and ``right``, each ``[N, ...]``, where the gradients for one score are ``left rightᵀ``."""
        return None


class OfUses(Gradients):
    """The gradients of one parameter from all its uses, for some scores.

    Args:
        leaf: Where the parameter is in the graph.
        parts: Uses, with the gradients ``[S, ...]`` by their outputs. They add up before they are
            squared.
    """

    def __init__(
        self,
        leaf: Edge,
        parts: list[tuple[Use, Tensor]],
    ) -> None:
        self.leaf = leaf
        groups: dict[Any, list[Part]] = {}
        for use, scores in parts:
            part = (use, use.arranged(scores))
            groups.setdefault(use.joint or id(use), []).append(part)
        self.parts = [*map(_joined, groups.values())]
        self.only = self.parts[0] if len(parts) == 1 else None

    def norms(self) -> Tensor:
        (use, scores), *others = self.parts
        quick = None if others or use.at.way is None else use.norms(scores)
        if quick is not None:
            return quick
        kinds: dict[type, Any] = {
            type(use): (use, scores) for use, scores in self.parts if use.joint is not None
        }
        if len(self.parts) == 2 and kinds.keys() == {Product, Embedding}:
            return _tied_norms(*kinds[Product], *kinds[Embedding])
        return super().norms()

    def diagonal(self) -> Tensor:
        (use, scores), *others = self.parts
        quick = None if others or use.at.way is None else use.diagonal(scores)
        if quick is None:
            return super().diagonal()
        (pulled,) = self._pulled(use, quick.unsqueeze(0))
        return pulled

    def one_product(self) -> tuple[Tensor, Tensor] | None:
        (use, scores), *others = self.parts
        if others or type(use) is not Product or use.joint is None or scores.shape[2] != 1:
            return None
        return use.left_and_right(scores[0, :, 0], use.a[:, 0])

    def formed(self) -> Formed:
        elements = [use.elements for use, _ in self.parts]
        elements.append(shape_of(self.leaf).numel())
        _, scores = self.parts[0]
        for samples in blocks(scores.shape[1], max(elements)):
            for i in range(len(scores)):
                of_uses = []
                for use, arranged in self.parts:
                    of_uses.append(self._pulled(use, use.gradients(arranged[i], samples)))
                yield samples, reduce(torch.add, of_uses)

    def _pulled(
        self,
        use: Use,
        gradients: Tensor,
    ) -> Tensor:
        """Return gradients ``[n, ...]`` of the parameter, from those of the weight that a use has seen."""
        if use.at.way == ("TBackward0",) and gradients.dim() == 3:  # as of every linear layer
            return gradients.mT
        if use.at.source == self.leaf:
            return gradients
        at = use.at
        (found,) = several_pulled_back(at.source, [self.leaf], gradients, at.functions)
        if found is None:
            return gradients.new_zeros(len(gradients), *shape_of(self.leaf))
        return found


def _joined(parts: list[Part]) -> Part:
    """Return parts of one kind as one, with the rows of all."""
    if len(parts) == 1:
        return parts[0]
    uses, scores = zip(*parts, strict=True)
    whole: Any = copy(uses[0])
    whole.a = torch.cat([use.a for use in uses], 1)
    return whole, torch.cat(scores, 2)


def _tied_norms(
    product: Product,
    dense: Tensor,
    table: Embedding,
    lookups: Tensor,
) -> Tensor:
    r"""Return the squared norms of :math:`\sum_s l_s r_s^\top + \sum_t e_{x_t} v_t^\top` without forming it.

    As of a table that is a language model's head as well. Beside the norms of both there is twice
    :math:`l_s[x_t]\,(r_s \cdot v_t)` of all pairs of positions.
    """
    norms: list[Any] = [product.norms(dense), table.norms(lookups)]
    for b, v in zip(dense, lookups, strict=True):
        left, right = product.left_and_right(b, product.a)
        tokens = table.a.unsqueeze(1).expand(-1, left.shape[1], -1)
        products = left.gather(2, tokens) * (right @ v.mT)
        norms.append(2 * products.sum((1, 2)))
    return total(norms)


# --- Gradients by the outputs of uses, brought by backward passes

Receive = Callable[[str, Gradients], None]  # takes those of a parameter, after its name


def backward(
    graph: Graph,
    plan: Plan,
    scores: list[Tensor],
    receive: Receive,
    *,
    retain_graph: bool = True,
) -> None:
    """Backpropagate scores of the outputs to the uses of weights.

    The gradients of a parameter are handed on as soon as those by the outputs of all its uses have
    arrived. Then input and output gradient of a use have become what is measured, and nothing holds
    them any longer: a backward pass needs no more memory than that of a training. Several scores go
    together, which is quicker than one by one, and hold what they bring to all uses.

    Args:
        graph: The graph.
        plan: Where its uses are.
        scores: The scores, each shaped like the outputs; one where there are functions of the user's.
        receive: What takes the gradients of a parameter, after its name.
        retain_graph: Whether another pass will follow.
    """
    if not plan.places:
        return
    waiting = _uses(graph, plan)
    missing = Counter(name for uses in waiting.values() for name, _ in uses)
    parts: dict[str, list[tuple[Use, Tensor]]] = defaultdict(list)

    def add(
        operation: int,
        gradients: Tensor | None,
    ) -> None:
        """Take those ``[S, ...]`` by an operation's output; None if there are none."""
        if gradients is not None:
            gradients = at_least_float32(gradients)
        # A second pass over the operation is one of its use's own.
        for name, use in waiting.pop(operation, ()):
            missing[name] -= 1
            if gradients is not None:
                parts[name].append((use, gradients))
            if name in parts and not missing[name]:
                leaf = graph.edge(graph.leaves[name])
                receive(name, OfUses(leaf, parts.pop(name)))

    def add_one(
        operation: int,
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Take the gradient of a pass."""
        b = gradients[0]
        add(operation, None if b is None else b.detach().unsqueeze(0))

    if len(scores) > 1 or graph.functions:
        edges = [graph.edge(operation) for operation in waiting]
        found = several_pulled_back(graph.outputs, edges, torch.stack(scores), graph.functions)
        for operation in [*waiting]:
            add(operation, found.pop(0))
        return
    # The lowest uses are asked for, so that nothing is computed below them: no gradient of a
    # weight. The pass comes by all others on its way.
    edges = [graph.edge(operation) for operation in plan.lowest]
    others = waiting.keys() - {*plan.lowest}
    runs_again = any(isinstance(use, Other) for uses in waiting.values() for _, use in uses)
    with hooked(graph, others, add_one):
        keep = retain_graph or runs_again
        captured = pulled_back(graph.outputs, edges, scores[0], retain_graph=keep)
    for operation, b in zip(plan.lowest, captured, strict=True):
        add_one(operation, (b,))
    for operation in [*waiting]:  # no gradient has come by
        add(operation, None)


def other_uses(
    graph: Graph,
    plan: Plan,
) -> list[tuple[int, str]]:
    """Return the operations whose own backward pass runs for each sample, each with a parameter that it is run for."""
    found = []
    for number, uses in _uses(graph, plan).items():
        found += [(number, name) for name, use in uses if isinstance(use, Other)]
    return found


def _uses(
    graph: Graph,
    plan: Plan,
) -> dict[int, list[tuple[str, Use]]]:
    """Return the uses of each operation, once for each parameter, with its name."""
    weights = []
    for at in plan.places:
        own = []  # functions of the user's that it was computed by
        if graph.functions:
            below = graph.below(at.source[0])
            own = [node for node in graph.functions if graph.nodes.index(node) in below]
        node = graph.nodes[at.number]
        source = graph.edge(*at.source)
        weights.append(Weight(node, at.place, source, at.rows, at.way, own))
    uses: list[Use] = []
    if any(fetched_by(at.node) for at in weights):
        inside_a_pass(lambda: uses.extend(map(read, weights)))  # computes it once
    else:
        uses.extend(map(read, weights))
    found: dict[int, list[tuple[str, Use]]] = defaultdict(list)
    for at, use in zip(plan.places, uses, strict=True):
        for name in at.names:
            found[at.number].append((name, use))
    return found
