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
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from lightning_taskinfo._batches import tensors
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.fisher.graph import Edge, Graph, shape_of
from lightning_taskinfo.fisher.ops import Rows

# Operations that move rows to places that depend on data: what was shown for one batch says nothing
# of another.
MOVE_ROWS = re.compile(
    "Index|Gather|Scatter|Sort|Topk|Flip|Masked(?!Fill|Softmax)|Take|Put|Unique|Kthvalue|Embedding"
)


PLANS = 8  # kept for a model, as for the last chunk of a batch, which is smaller
# Number of an operation; number and output of the source of each weight, by place; whose the rows
# are.
Place = tuple[int, dict[int, tuple[int, int]], Rows]


@dataclass
class Plan:
    """What was shown about a graph, good for all graphs like it if it is ``lasting``.

    Attributes:
        signature: Kinds and shapes of the graph's operations.
        uses: Where weights meet samples.
        left: Parameters whose gradients cannot be told apart by sample, with the reason.
        lasting: Whether what was shown holds for other data.
        apart: Parameters with several uses, none of the same entry.
        seen: Whether a sample's outputs were seen not to depend on the others of its batch.
    """

    signature: list[Any]
    uses: list[Place]
    left: dict[str, str]
    lasting: bool
    apart: set[str] = field(default_factory=set)
    seen: bool = False


def _numbered(
    graph: Graph, uses: dict[Node, dict[int, Edge]], rows: dict[Node, Rows]
) -> list[Place]:
    """Return uses and their rows in a form that fits every graph of this signature."""
    return [
        (
            graph.number[node],
            {place: (graph.number[e.node], e.output_nr) for place, e in uses[node].items()},
            found,
        )
        for node, found in rows.items()
    ]


def _counts_batch(node: Any) -> bool:
    """Whether the backward pass of an operation divides by how often an index occurs in the whole batch."""
    return bool(getattr(node, "_saved_scale_grad_by_freq", False))


def plan_of_one(graph: Graph) -> Plan | None:
    """Return the plan of a graph of one sample, to whom all rows belong; None where a use is unusual."""
    uses = graph.uses(set())
    unusual = any(
        not graph.single_output(node) or not shape_of(node) or graph.nested(sources)
        for node, sources in uses.items()
    )
    if unusual or any(isinstance(node, BackwardCFunction) for node in graph.nodes):
        return None
    rows = {
        node: Rows(repeat=shape_of(node)[0])
        for node in uses
        if shape_of(node).numel()  # as of an expert without a token
    }
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
        self.like = {"device": like.device, "dtype": like.dtype}
        kinds = graph.dtypes() | {like.dtype}
        generator = torch.Generator().manual_seed(samples)
        score = torch.randn(like.shape[1:], generator=generator, dtype=torch.float64, device="cpu")
        own = torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu")
        self.score = (score * (0.5 + own)).to(**self.like)
        signs = torch.randint(2, (samples,), generator=generator, device="cpu") * 2.0 - 1
        signs[:2] = torch.tensor([1.0, -1.0], device="cpu")[:samples]
        order = torch.randperm(samples, generator=generator, device="cpu")
        self.signs = signs.to(**self.like)
        # Powers of two scale a gradient without rounding, so that even what is left of a sum of
        # zero is told apart.
        span = 12 if torch.float16 in kinds else 40  # which float16 has little room for
        weights = torch.exp2((order - samples // 2) * min(1.0, span / samples))
        self.weights = weights.to(**self.like)
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
        left = self._left(uses, rows, mixed, silent)
        served = [node for node in uses if rows[node] is not None]
        behind = graph.behind({*served})
        moving = any(MOVE_ROWS.search(type(node).__name__) for node in behind)
        lasting = not (moving or behind & mixed or (behind | {*served}) & silent or left)
        lasting = lasting and self._independent(mixed)
        found = {node: of_node for node in served if (of_node := rows[node]) is not None}
        return Plan(graph.signature, _numbered(graph, uses, found), left, lasting)

    def _independent(self, mixed: set[Node]) -> bool:
        """Whether what samples are added up in looks the same for one sample, as what knows nothing of samples does."""
        numbers = [self.graph.number[node] for node in mixed]
        if not numbers:
            return True
        if self.alone is None or len(self.alone) != len(self.graph.signature):
            return False
        return all(self.alone[i] == self.graph.signature[i] for i in numbers)

    def _left(
        self,
        uses: dict[Node, dict[int, Edge]],
        rows: dict[Node, Rows | None],
        mixed: set[Node],
        silent: set[Node],
    ) -> dict[str, str]:
        """Return the parameters that other engines have to serve, each with the operation that is the reason."""
        graph = self.graph
        left: dict[str, str] = {}
        odd = {
            node
            for node in uses
            if rows[node] is None
            or not graph.single_output(node)
            or _counts_batch(node)
            or graph.nested(uses[node])
        }
        # What mixes samples, and has rows of samples behind it, would count these rows twice.
        odd |= graph.behind({*uses} - odd, blocked=silent) & mixed
        if self.root.node in mixed:
            odd.add(self.root.node)
        odd |= uses.keys() - graph.below(self.root.node)  # as of a penalty on weights
        for node in odd:
            for name in graph.roots(node):
                left.setdefault(name, type(node).__name__)
        return left

    def _mixed(self, uses: list[Node]) -> tuple[set[Node], set[Node]]:
        """Return the operations at whose outputs samples are added up, and those that no gradient reaches."""
        norms = [self._norms(uses, weights) for weights in (None, self.signs)]
        nodes = [node for node in norms[0] if node in norms[1]]
        plain, signed = (torch.stack([by_node[node] for node in nodes]) for by_node in norms)
        largest = torch.maximum(plain, signed)
        changed = ((plain - signed).abs() > 512 * self.eps * largest).tolist()
        nothing = (largest == 0).tolist()
        mixed = {node for node, flag in zip(nodes, changed, strict=True) if flag}
        return mixed, {node for node, flag in zip(nodes, nothing, strict=True) if flag}

    def _norms(self, uses: list[Node], weights: Tensor | None) -> dict[Node, Tensor]:
        """Return the squared norm of the gradient at the output of every operation down to ``uses``."""
        norms: dict[Node, Tensor] = {}

        def note(node: Node) -> Any:
            def hook(gradients: tuple[Tensor | None, ...]) -> None:
                if any(g is not None and g.numel() for g in gradients):
                    norms[node] = self._squared(gradients)

            return hook

        inner = self.graph.behind({*uses})
        handles = [node.register_prehook(note(node)) for node in inner]
        try:
            captured = self._backward(uses, weights)
        finally:
            for handle in handles:
                handle.remove()
        return norms | {node: self._squared((b,)) for node, b in zip(uses, captured, strict=True)}

    def _squared(self, gradients: tuple[Tensor | None, ...]) -> Tensor:
        parts = [torch.linalg.vector_norm(g).square().double() for g in gradients if g is not None]
        return (
            torch.stack(parts).sum()
            if parts
            else torch.zeros((), dtype=torch.float64, device=self.signs.device)
        )

    def _backward(self, nodes: list[Node], weights: Tensor | None) -> list[Tensor | None]:
        score = self.score
        if weights is not None:
            by_row = weights.repeat_interleave(len(score) // self.samples)
            score = score * by_row.view(-1, *[1] * (score.dim() - 1))
        edges = [Edge(node, 0) for node in nodes]
        if not edges:
            return []
        return [
            *torch.autograd.grad([self.root], edges, [score], retain_graph=True, allow_unused=True)
        ]

    def _rows(self, nodes: list[Node]) -> dict[Node, Rows | None]:
        """Return which sample each row belongs to, by operation; None where a row belongs to several."""
        plain = self._backward(nodes, None)
        scaled = self._backward(nodes, self.weights)
        rows: dict[Node, Rows | None] = {}
        for node, b, c in zip(nodes, plain, scaled, strict=True):
            if b is None or c is None:
                rows[node] = Rows(
                    index=torch.zeros(self.samples, 0, dtype=torch.long, device=self.signs.device)
                )
            else:
                rows[node] = self._rows_of(b, c)
        return rows

    def _rows_of(self, plain: Tensor, scaled: Tensor) -> Rows | None:
        sizes = plain.shape
        floor = 16 * self.eps * float(torch.linalg.vector_norm(plain))  # rows below it are rounding
        axes = sorted(
            range(len(sizes)), key=lambda axis: axis > 0 and sizes[axis] % self.samples != 0
        )
        ways = [(1, axis) for axis in axes] + [(merged, 0) for merged in range(2, len(sizes))]
        for merged, axis in ways:
            rows = Rows(axis=axis, merged=merged)
            samples = self._samples(rows.rows_first(plain), rows.rows_first(scaled), floor)
            if samples is not None:
                return self._in_order(samples, axis, merged)
        return None

    def _samples(self, plain: Tensor, scaled: Tensor, floor: float) -> Tensor | None:
        """Return the sample of each row, -1 where it has no gradient; None if a row belongs to several samples."""
        if plain.numel() == 0:
            return torch.full((len(plain),), -1, device=plain.device)
        plain, scaled = plain.reshape(len(plain), -1), scaled.reshape(len(scaled), -1)
        norms = torch.linalg.vector_norm(plain, dim=1)
        ratio = torch.linalg.vector_norm(scaled, dim=1) / norms
        known, order = self.weights.sort()
        middle = (known[1:] * known[:-1]).sqrt()
        sample = order[torch.bucketize(ratio, middle)]
        off = torch.linalg.vector_norm(scaled - self.weights[sample].unsqueeze(1) * plain, dim=1)
        nothing = norms <= floor
        fits = off <= self.eps**0.5 * self.weights[sample] * norms
        if not bool((fits | nothing).all()):
            return None
        return sample.masked_fill(nothing & ~fits, -1).masked_fill(norms == 0, -1)

    def _in_order(self, samples: Tensor, axis: int, merged: int) -> Rows:
        """Return rows of a simple order if they have one."""
        n, count = self.samples, len(samples)
        numbers = torch.arange(n, device=samples.device)
        known = samples >= 0
        if count and count % n == 0:
            repeat = count // n
            if bool(((samples == numbers.repeat_interleave(repeat)) | ~known).all()):
                return Rows(axis, repeat, False, merged)
            if bool(((samples == numbers.repeat(repeat)) | ~known).all()):
                return Rows(axis, repeat, True, merged)
        counts = torch.bincount(samples[known], minlength=n)
        repeat = int(counts.max()) if count else 0
        index = torch.full((n, repeat), count, device=samples.device)
        rows = known.nonzero().squeeze(1)
        rows = rows[samples[rows].argsort(stable=True)]
        first = counts.cumsum(0) - counts
        place = torch.arange(len(rows), device=samples.device) - first[samples[rows]]
        index[samples[rows], place] = rows
        return Rows(axis, repeat, False, merged, index)


# --- What is used again


@dataclass
class Known:
    """What is known of a model on samples of one shape, called in one way.

    Attributes:
        call: The way, see :func:`call_of`.
        outputs: Numbers that the model puts out for one sample.
        elements: Numbers that all uses put out for one sample.
        alone: The signature of the graph of one sample.
        plans: What was shown, for graphs of several sizes.
    """

    call: "Call"
    outputs: int
    elements: int = 0
    alone: list[Any] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def keep(self, plan: Plan) -> None:
        """Use a plan again."""
        self.plans = [*self.plans[1 - PLANS :], plan]


Call = tuple[list[tuple[torch.Size, torch.dtype]], Any]
_KNOWN: "WeakKeyDictionary[nn.Module, Known]" = WeakKeyDictionary()


def call_of(inputs: Any, forward_fn: Forward | None) -> Call:
    """Return shapes and types of one sample, and a weak reference to how the model is called.

    A ``forward_fn`` can mix the samples before they reach the model, where no graph shows it: what
    was found with one says nothing about another.
    """
    shapes = [(x.shape[1:], x.dtype) for x in tensors(inputs)]
    return shapes, None if forward_fn is None else ref(forward_fn)


def recall(model: nn.Module, call: Call) -> Known | None:
    """Return what is known of a model that is called in this way, if anything."""
    known = _KNOWN.get(model)
    return known if known is not None and known.call == call else None


def remember(model: nn.Module, known: Known) -> None:
    """Keep what is known as long as the model lives."""
    _KNOWN[model] = known
