r"""Which operations use which weights, and which sample each row of them belongs to: found in the autograd graph.

The graph of a forward pass knows every use of every parameter. Going from a parameter towards the
outputs, one meets operations that know nothing of the samples (a transposed weight, a table looked
up at the same positions for all, a weight that is normed or computed from two others) and then one
whose output has rows of single samples. That one is the *use*: what flows into it is a weight,
computed from parameters alone, and what flows out belongs to samples.

Which is which is **shown, not guessed**. Let :math:`u_n` be any scores of the outputs of sample
:math:`n`.

1. Backpropagate :math:`\sum_n u_n` and :math:`\sum_n \pm u_n` with random signs. Where every entry
   of a gradient belongs to one sample, the entries change their signs at most, and the norm stays.
   Where the norm changes, samples are added up: the operation knows nothing of the samples, or
   mixes them.
2. Backpropagate :math:`\sum_n a_n u_n` to the uses, with :math:`a_n` that all differ. A row of
   sample :math:`n` is
   :math:`a_n` times what it was, which tells :math:`n`: also where a batch was sorted, masked or routed to experts.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.utils.rnn import pad_sequence

from lightning_taskinfo.fisher.graph import (
    Edge,
    Graph,
    ones_at,
    pulled_to_weight,
    shape_of,
    way_to_leaf,
)
from lightning_taskinfo.fisher.ops import Rows, total

# Operations that move rows to places that depend on data: what was shown for one batch says nothing
# of another.
MOVE_ROWS = re.compile(
    "Index|Gather|Scatter|Sort|Topk|Flip|Masked(?!Fill|Softmax)|Take|Put|Unique|Kthvalue|Embedding"
)

Uses = dict[Node, dict[int, Edge]]  # operations, with their weights by place
# Number of an operation; number and output of the source of each weight, by place; whose the rows
# are.
Place = tuple[int, dict[int, tuple[int, int]], Rows]


@dataclass
class Plan:
    """What was shown about a graph, good for all graphs like it if it is ``lasting``.

    Attributes:
        signature: Kinds and shapes of the graph's operations.
        uses: Where weights meet samples.
        unshown: Parameters whose gradients cannot be told apart by sample, with the reason.
        lasting: Whether what was shown holds for other data.
        apart: Parameters with several uses, none of the same entry.
        seen: Whether a sample's outputs were seen not to depend on the others of its batch.
    """

    signature: list[Any]
    uses: list[Place]
    unshown: dict[str, str]
    lasting: bool
    apart: set[str] = field(default_factory=set)
    seen: bool = False


def _numbered(graph: Graph, uses: Uses, rows: dict[Node, Rows]) -> list[Place]:
    """Return uses and their rows in a form that fits every graph of this signature."""
    numbered: list[Place] = []
    for node, found in rows.items():
        sources = {}
        for place, edge in uses[node].items():
            sources[place] = (graph.number[edge.node], edge.output_nr)
        numbered.append((graph.number[node], sources, found))
    return numbered


def _unusual(graph: Graph, node: Any, weights: dict[int, Edge]) -> bool:
    """Whether the output gradient of a use does not tell the gradients of its weights by sample."""
    # How often an index occurs in the whole batch divides the gradient.
    by_frequency = getattr(node, "_saved_scale_grad_by_freq", False)
    return by_frequency or not graph.single_output(node) or graph.nested(weights)


def plan_of_one(graph: Graph) -> Plan | None:
    """Return the plan of a graph of one sample, to whom all rows belong; None where a use is unusual."""
    uses = graph.uses(set())
    rows: dict[Node, Rows] = {}
    for node, weights in uses.items():
        shape = shape_of(node)
        if not shape or _unusual(graph, node, weights):
            return None
        if shape.numel():  # not as of an expert without a token
            rows[node] = Rows(repeat=shape[0])
    if any(isinstance(node, BackwardCFunction) for node in graph.nodes):
        return None
    return Plan(graph.signature, _numbered(graph, uses, rows), {}, lasting=False)


class Prover:
    """Finds the uses in a graph, and the sample of each row, as the head of this file says."""

    def __init__(
        self,
        graph: Graph,
        samples: int,
        rounds: int,
        alone: list[Any] | None = None,
        root: Edge | None = None,
    ) -> None:
        self.graph = graph
        self.samples = samples
        self.rounds = rounds
        self.alone = alone  # the signature of the graph of one sample
        # Where the samples are known: each has as many rows as the others, one sample after the
        # other.
        self.root = root or Edge(graph.nodes[0], graph.outputs.output_nr)
        like: Any = self.root.node._input_metadata[self.root.output_nr]
        kinds = graph.dtypes() | {like.dtype}
        # Random numbers are the same on every device. One draw is as large as the outputs, which
        # have a row for each token and a column for each word in a language model.
        drawn: dict[str, Any] = {"device": "cpu"}
        drawn["generator"] = torch.Generator().manual_seed(samples)
        scores = torch.rand(like.shape, **drawn).add_(0.5)
        scores.mul_(torch.randn(like.shape[1:], **drawn))  # so that samples do not cancel out
        signs = torch.randint(2, (samples,), **drawn) * 2.0 - 1
        signs[:1] = 1.0
        signs[1:2] = -1.0
        # Powers of two scale a gradient without rounding, so that even what is left of a sum of
        # zero is told apart.
        span = 12 if torch.float16 in kinds else 40  # which float16 has little room for
        order = torch.randperm(samples, **drawn)
        factors = torch.exp2((order - samples // 2) * min(1.0, span / samples))
        where = {"device": like.device, "dtype": like.dtype}
        self.scores = scores.to(**where)
        self.signs = signs.to(**where)
        self.factors = factors.to(**where)
        self.eps = max(torch.finfo(kind).eps for kind in kinds)

    def plan(self) -> Plan:
        """Return what can be shown."""
        graph = self.graph
        mixed, silent = self._mixed([*graph.uses(set())])
        rows: dict[Node, Rows | None] = {}
        for _ in range(self.rounds):
            uses = graph.uses(mixed)
            rows = self._rows([*uses])
            failed = {node for node, found in rows.items() if found is None}
            if not failed:
                break
            mixed |= failed
        shown = {node: found for node, found in rows.items() if found is not None}
        unshown = self._unshown(uses, shown, mixed, silent)
        behind = graph.behind({*shown})
        moving = any(MOVE_ROWS.search(type(node).__name__) for node in behind)
        open_ends = behind & mixed or (behind | {*shown}) & silent
        lasting = not (moving or open_ends or unshown) and self._independent(mixed)
        places = _numbered(graph, uses, shown)
        return Plan(graph.signature, places, unshown, lasting, self._apart(uses, shown))

    def _apart(self, uses: Uses, shown: Iterable[Node]) -> set[str]:
        """Return the parameters with several uses, none of them of the same entry."""
        sources: dict[str, list[Edge]] = defaultdict(list)
        for node in shown:
            for edge in uses[node].values():
                for name in self.graph.roots(edge.node):
                    sources[name].append(edge)
        return {name for name, edges in sources.items() if self._disjoint(name, edges)}

    def _disjoint(self, name: str, sources: list[Edge]) -> bool:
        if len(sources) == 1 or not all(map(way_to_leaf, sources)):
            return False  # or a source has all entries, or is not made by moving entries
        leaf = self.graph.leaf(name)
        counts = [pulled_to_weight(source, leaf, ones_at(source)[None]) for source in sources]
        return bool((total(counts) <= 1).all())

    def _independent(self, mixed: set[Node]) -> bool:
        """Whether what samples are added up in looks the same for one sample, as what knows nothing of samples does."""
        if not mixed:
            return True
        signature = self.graph.signature
        if self.alone is None or len(self.alone) != len(signature):
            return False
        numbers = [self.graph.number[node] for node in mixed]
        return all(self.alone[i] == signature[i] for i in numbers)

    def _unshown(
        self,
        uses: Uses,
        shown: dict[Node, Rows],
        mixed: set[Node],
        silent: set[Node],
    ) -> dict[str, str]:
        """Return the parameters that other engines have to serve, each with the operation that is the reason."""
        graph = self.graph
        odd = uses.keys() - shown.keys()
        odd |= {node for node, weights in uses.items() if _unusual(graph, node, weights)}
        # What mixes samples, and has rows of samples behind it, would count these rows twice.
        odd |= graph.behind({*uses} - odd, blocked=silent) & mixed
        odd |= {self.root.node} & mixed
        odd |= uses.keys() - graph.below(self.root.node)  # as of a penalty on weights
        unshown: dict[str, str] = {}
        for node in odd:
            for name in graph.roots(node):
                unshown.setdefault(name, type(node).__name__)
        return unshown

    def _backward(self, nodes: list[Node], by_sample: Tensor | None) -> list[Tensor | None]:
        """Backpropagate the scores, times a number for each sample, to the outputs of some operations."""
        if not nodes:
            return []
        scores = self.scores
        if by_sample is not None:
            by_row = by_sample.repeat_interleave(len(scores) // self.samples)
            others = [1] * (scores.dim() - 1)
            scores = scores * by_row.view(-1, *others)
        edges = [Edge(node, 0) for node in nodes]
        found = torch.autograd.grad(
            [self.root], edges, [scores], retain_graph=True, allow_unused=True
        )
        return [*found]

    # 1. Where samples are added up

    def _mixed(self, uses: list[Node]) -> tuple[set[Node], set[Node]]:
        """Return the operations at whose outputs samples are added up, and those that no gradient reaches."""
        plain = self._norms(uses, None)
        signed = self._norms(uses, self.signs)
        nodes = [node for node in plain if node in signed]
        before = torch.stack([plain[node] for node in nodes])
        after = torch.stack([signed[node] for node in nodes])
        largest = torch.maximum(before, after)
        changed = (before - after).abs() > 512 * self.eps * largest
        mixed = {*compress(nodes, changed.tolist())}
        silent = {*compress(nodes, (largest == 0).tolist())}
        return mixed, silent

    def _norms(self, uses: list[Node], by_sample: Tensor | None) -> dict[Node, Tensor]:
        """Return the squared norm of the gradient at the output of every operation down to ``uses``."""
        norms: dict[Node, Tensor] = {}

        def note(node: Node, gradients: tuple[Tensor | None, ...]) -> None:
            if any(g is not None and g.numel() for g in gradients):
                norms[node] = self._squared(gradients)

        inner = self.graph.behind({*uses})
        handles = [node.register_prehook(partial(note, node)) for node in inner]
        try:
            captured = self._backward(uses, by_sample)
        finally:
            for handle in handles:
                handle.remove()
        for node, b in zip(uses, captured, strict=True):
            norms[node] = self._squared((b,))
        return norms

    def _squared(self, gradients: tuple[Tensor | None, ...]) -> Tensor:
        squared = torch.zeros((), dtype=torch.float64, device=self.signs.device)
        for g in gradients:
            if g is not None:
                squared = squared + torch.linalg.vector_norm(g).square().double()
        return squared

    # 2. Whose the rows are

    def _rows(self, nodes: list[Node]) -> dict[Node, Rows | None]:
        """Return which sample each row belongs to, by operation; None where a row belongs to several."""
        plain = self._backward(nodes, None)
        scaled = self._backward(nodes, self.factors)
        rows: dict[Node, Rows | None] = {}
        for node, b, c in zip(nodes, plain, scaled, strict=True):
            if b is None or c is None:
                nobody = torch.zeros(self.samples, 0, dtype=torch.long, device=self.signs.device)
                rows[node] = Rows(index=nobody)
            else:
                rows[node] = self._rows_of(b, c)
        return rows

    def _rows_of(self, plain: Tensor, scaled: Tensor) -> Rows | None:
        """Try each axis, those first that samples divide, and then leading axes that are read as one."""
        sizes = plain.shape

        def unlikely(axis: int) -> bool:
            return axis > 0 and sizes[axis] % self.samples != 0

        axes = sorted(range(len(sizes)), key=unlikely)
        floor = 16 * self.eps * float(torch.linalg.vector_norm(plain))  # rows below it are rounding
        ways = [Rows(axis=axis) for axis in axes]
        ways += [Rows(merged=merged) for merged in range(2, len(sizes))]
        for way in ways:
            rows = way.rows_first(plain)
            samples = self._samples(rows, way.rows_first(scaled), floor)
            if samples is not None:
                return self._in_order(samples, way)
        return None

    def _samples(self, plain: Tensor, scaled: Tensor, floor: float) -> Tensor | None:
        """Return the sample of each row, -1 where it has no gradient; None if a row belongs to several samples."""
        if plain.numel() == 0:
            return torch.full((len(plain),), -1, device=plain.device)
        plain = plain.reshape(len(plain), -1)
        scaled = scaled.reshape(len(scaled), -1)
        norms = torch.linalg.vector_norm(plain, dim=1)
        ratio = torch.linalg.vector_norm(scaled, dim=1) / norms
        # The sample whose factor is nearest, and whether it explains the row.
        known, order = self.factors.sort()
        middle = (known[1:] * known[:-1]).sqrt()
        sample = order[torch.bucketize(ratio, middle)]
        factor = self.factors[sample]
        expected = factor.unsqueeze(1) * plain
        off = torch.linalg.vector_norm(scaled - expected, dim=1)
        fits = off <= self.eps**0.5 * factor * norms
        nothing = norms <= floor
        if not bool((fits | nothing).all()):
            return None
        return sample.masked_fill(nothing & ~fits | (norms == 0), -1)

    def _in_order(self, samples: Tensor, way: Rows) -> Rows:
        """Return the rows in a simple order if they have one, otherwise by their numbers."""
        n, count = self.samples, len(samples)
        known = samples >= 0
        if count and count % n == 0:
            repeat = count // n
            numbers = torch.arange(n, device=samples.device)
            in_turn = numbers.repeat_interleave(repeat)
            if torch.equal(samples[known], in_turn[known]):
                return replace(way, repeat=repeat)
            interleaved = numbers.repeat(repeat)
            if torch.equal(samples[known], interleaved[known]):
                return replace(way, repeat=repeat, interleaved=True)
        counts = torch.bincount(samples[known], minlength=n).tolist()
        unknown = count - sum(counts)
        rows = samples.argsort(stable=True)[unknown:]  # -1 comes first
        index = pad_sequence(rows.split(counts), batch_first=True, padding_value=count)
        return replace(way, repeat=index.shape[1], index=index)
