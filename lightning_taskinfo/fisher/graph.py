r"""The autograd graph of a forward pass: which operations use which weights, and which sample each row belongs to.

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
   sample :math:`n` is :math:`a_n` times what it was, which tells :math:`n`: also where a batch was
   sorted, masked or routed to experts.

What was shown for one batch holds for another one only if no operation between uses and outputs can
move rows by their values. By its name or its settings an operation tells (sorting, a row that is
selected), a product by what is multiplied: ``onehot.T @ rows`` moves rows as the first factor says.
What else there may be, such as a mask and a sum, shows when the proof is made again for some of the
later batches (:class:`Plans`).
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import compress, permutations
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge as Edge
from torch.nn.utils.rnn import pad_sequence

from lightning_taskinfo._warn import warn

# Operations whose output has entries of one input, each once at most: of a weight they make a
# weight.
MOVE_ENTRIES = re.compile(
    r"(T|Transpose|Permute|View|UnsafeView|ReshapeAlias|Unsqueeze|Squeeze|Alias|Clone|Slice|Select|Split|"
    r"SplitWithSizes|UnsafeSplit|Unbind|Narrow|Diagonal)Backward\d"
)
# Operations that move rows to places that depend on data: what was shown for one batch says nothing
# of another.
MOVE_ROWS = re.compile(
    "Index|Gather|Scatter|Sort|Topk|Flip|Masked(?!Fill|Softmax)|Take|Put|Unique|Kthvalue|Embedding"
)
# Products of two matrices, with the place of the left one.
PRODUCTS = {"MmBackward0": 0, "BmmBackward0": 0, "AddmmBackward0": 1, "BaddbmmBackward0": 1}
ATTENTION = "ScaledDotProduct"  # what such operations' names begin with

Source: TypeAlias = tuple[int, int]  # number of an operation, and which of its outputs
Uses: TypeAlias = dict[int, dict[int, Source]]  # numbers of operations, with weights by place
Signature: TypeAlias = list[tuple[Any, ...]]
Axes: TypeAlias = tuple[int, ...]


class Graph:
    """The autograd graph of a forward pass, its operations numbered in the order of a walk from the outputs.

    Attributes:
        nodes: The operations.
        signature: Of each operation the kind, the shapes of its outputs, where each of its inputs comes from (None for
            a constant), the name if it is a parameter, and its settings that are whole numbers, such as the row that
            is selected. Graphs of one signature differ in the numbers of tensors only.
        leaves: The parameters' places by name.
    """

    def __init__(
        self,
        outputs: Tensor,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self.outputs = outputs
        names = {id(p): name for name, p in parameters.items()}
        first: Any = outputs.grad_fn
        self.nodes: list[Any] = [first]
        self.signature: Signature = []
        self.leaves: dict[str, int] = {}
        numbers = {first: 0}
        for number, node in enumerate(self.nodes):  # which grow
            sources: list[Source | None] = []
            for source, output in node.next_functions:
                if source is None:
                    sources.append(None)
                    continue
                if source not in numbers:
                    numbers[source] = len(self.nodes)
                    self.nodes.append(source)
                sources.append((numbers[source], output))
            name = None
            if not sources and hasattr(node, "variable"):
                name = names.get(id(node.variable))
            if name is not None:
                self.leaves[name] = number
            shapes = [tuple(like.shape) for like in node._input_metadata]
            self.signature.append((type(node), shapes, sources, name, _settings(node)))

    def edge(
        self,
        number: int,
        output: int = 0,
    ) -> Edge:
        """Return an output of an operation as a place that gradients can be pulled back to."""
        return Edge(self.nodes[number], output)

    def kind(self, number: int) -> str:
        """Return the name of an operation's kind."""
        return self.signature[number][0].__name__

    def sources(self, number: int) -> list[int]:
        """Return the operations that an operation takes its inputs from."""
        return [source[0] for source in self.signature[number][2] if source is not None]

    @cached_property
    def consumers(self) -> dict[int, list[tuple[int, int, int]]]:
        """By operation: who uses its output, at which place, and which of its outputs."""
        found = defaultdict(list)
        for number, operation in enumerate(self.signature):
            for place, source in enumerate(operation[2]):
                if source is not None:
                    found[source[0]].append((number, place, source[1]))
        return found

    def uses(self, mixed: set[int]) -> Uses:
        """Return the first operations on the ways from parameters that put out rows of samples, with their weights.

        Args:
            mixed: Operations whose outputs are no such rows.
        """
        found: Uses = {}
        stack = [*self.leaves.values()]
        seen = {*stack}
        while stack:
            number = stack.pop()
            for consumer, place, output in self.consumers[number]:
                if consumer not in mixed and not self._moves_entries(consumer):
                    found.setdefault(consumer, {})[place] = (number, output)
                elif consumer not in seen:
                    seen.add(consumer)
                    stack.append(consumer)
        return found

    def behind(
        self,
        numbers: Iterable[int],
        blocked: Collection[int] = (),
    ) -> set[int]:
        """Return the operations between some and the outputs, without those behind ``blocked``."""
        return _reached(numbers, lambda i: [found[0] for found in self.consumers[i]], blocked)

    def below(self, number: int) -> set[int]:
        """Return an operation, and all that it was computed from."""
        return {number} | _reached([number], self.sources)

    def roots(self, number: int) -> set[str]:
        """Return the names of the parameters that something was computed from."""
        below = self.below(number)
        return {name for name, leaf in self.leaves.items() if leaf in below}

    def unusual(
        self,
        number: int,
        weights: dict[int, Source],
    ) -> bool:
        """Whether the output gradient of a use does not tell the gradients of its weights by sample."""
        # How often an index occurs in the whole batch divides the gradient.
        by_frequency = getattr(self.nodes[number], "_saved_scale_grad_by_freq", False)
        outputs = {output for _, _, output in self.consumers[number]}
        if number == 0:
            outputs.add(self.outputs.output_nr)
        # A weight that is used twice, or computed from another one, has a part in its gradient.
        pairs = permutations([source for source, _ in weights.values()], 2)
        nested = any(first in self.below(second) for first, second in pairs)
        return by_frequency or nested or not outputs <= {0}

    def _moves_entries(self, number: int) -> bool:
        """Whether an operation only moves the entries of its one input, or shifts them by a number."""
        kind = self.kind(number)
        _, shapes, sources, *_ = self.signature[number]
        if kind == "ToCopyBackward0":  # to another precision, as autocast does
            nodes = [self.nodes[i] for i in (number, *self.sources(number))]
            return not any(like.dtype.is_complex for node in nodes for like in node._input_metadata)
        if kind == "AddBackward0" and sources[0] is not None and sources[1] is None:
            return bool(self.signature[sources[0][0]][1] == shapes)
        return MOVE_ENTRIES.fullmatch(kind) is not None

    def way(self, number: int) -> tuple[str, ...] | None:
        """Return the kinds of the operations from a weight to its parameter if they only move entries."""
        way = []
        while sources := self.sources(number):
            if not self._moves_entries(number):
                return None
            if self.kind(number) != "ToCopyBackward0":
                way.append(self.kind(number))
            number = sources[0]
        return tuple(way)


def _settings(node: Any) -> list[Any]:
    """Return the whole numbers that an operation has kept beside its tensors, such as axes, indices and sizes."""
    kind: Any = type(node)
    values = [getattr(node, name) for name in _settings_names(kind)]
    return [value for value in values if isinstance(value, int | tuple)]


@cache
def _settings_names(kind: Any) -> list[str]:
    names = {*dir(kind)}
    return sorted(
        name for name in names if name.startswith("_saved_") and f"_raw{name}" not in names
    )


def _norms_along(
    gradient: Tensor,
    axes: Axes,
) -> Tensor:
    """Return norms over some axes, ``[lines, 1]``."""
    return torch.linalg.vector_norm(gradient, dim=axes).view(-1, 1)


def _reached(
    numbers: Iterable[int],
    following: Callable[[int], list[int]],
    blocked: Collection[int] = (),
) -> set[int]:
    """Return all that follows some operations, without what is blocked or only follows that."""
    found: set[int] = set()
    stack = [*numbers]
    while stack:
        for number in following(stack.pop()):
            if number not in found and number not in blocked:
                found.add(number)
                stack.append(number)
    return found


# --- Gradients that are pulled back through a graph, or a part of it


def pulled_back(
    output: Tensor | Edge,
    sources: Sequence[Edge],
    gradient: Tensor,
    *,
    retain_graph: bool = True,
    batched: bool = False,
) -> tuple[Tensor | None, ...]:
    """Pull a gradient back to some places; None where none arrives."""
    return torch.autograd.grad(
        [output],  # type: ignore[arg-type]
        sources,
        [gradient],
        retain_graph=retain_graph,
        allow_unused=True,
        is_grads_batched=batched,
    )


def several_pulled_back(
    output: Tensor | Edge,
    sources: Sequence[Edge],
    gradients: Tensor,
) -> list[Tensor | None]:
    """Pull gradients ``[S, ...]`` back to some places, ``[S, ...]`` each, in one pass, or in many where vmap fails."""
    if len(gradients) > 1:
        try:
            with warnings.catch_warnings():  # what vmap takes one by one is no slower than without
                warnings.filterwarnings("ignore", message="There is a performance drop")
                return [*pulled_back(output, sources, gradients, batched=True)]
        except Exception:
            pass  # of an operation of the user's; if it is no matter of vmap, it comes again
    one_by_one = [pulled_back(output, sources, gradient) for gradient in gradients]
    found = zip(*one_by_one, strict=True)
    return [None if parts[0] is None else torch.stack(parts) for parts in found]


def pulled_to_weight(
    output: Edge,
    weight: Edge,
    gradients: Tensor,
) -> Tensor:
    """Pull gradients ``[n, ...]`` back to what ``output`` was computed from, zeros where none arrives."""
    if output == weight:
        return gradients
    turned = type(output.node).__name__ == "TBackward0" and gradients.dim() == 3
    if turned and output.node.next_functions[0][0] is weight.node:
        return gradients.mT  # as of every linear layer
    (found,) = several_pulled_back(output, [weight], gradients)
    if found is None:
        return gradients.new_zeros(len(gradients), *shape_of(weight))
    return found


def shape_of(edge: Edge) -> torch.Size:
    """Return the shape of what an operation put out."""
    return torch.Size(like(edge).shape)


def like(edge: Edge) -> Any:
    """Return shape, type and device of what an operation put out."""
    return edge.node._input_metadata[edge.output_nr]


# --- What was shown


@dataclass(frozen=True, eq=False)
class Rows:
    """Which sample each row of a tensor belongs to; a row is a slice along one axis.

    Attributes:
        axis: The axis of the rows, after ``merged`` leading axes were made one.
        merged: How many leading axes are read as one.
        repeat: Rows of one sample, next to each other.
        index: Row numbers ``[N, repeat]`` where they have another order; the number of rows stands
            for no row.
        chosen: The samples that are measured, if not all.
    """

    axis: int = 0
    merged: int = 1
    repeat: int = 1
    index: Tensor | None = None
    chosen: slice | None = None

    def rows_first(self, x: Tensor) -> Tensor:
        """Return ``x`` with its rows along axis 0."""
        if self.merged > 1:
            x = x.flatten(0, self.merged - 1)
        return x.movedim(self.axis, 0) if self.axis else x

    def samples_first(self, x: Tensor) -> Tensor:
        """Return ``x`` as ``[N, repeat, ...]``, with zeros for no row."""
        rows = self.rows_first(x)
        if self.index is not None:
            no_row = rows.new_zeros(1, *rows.shape[1:])
            return torch.cat([rows, no_row])[self.numbers(len(rows))]
        samples = rows.unsqueeze(1) if self.repeat == 1 else rows.unflatten(0, (-1, self.repeat))
        return samples if self.chosen is None else samples[self.chosen]

    def numbers(self, rows: int) -> Tensor:
        """Return the numbers ``[N, repeat]`` of the samples' rows."""
        numbers = self.index
        if numbers is None:
            numbers = torch.arange(rows, device="cpu").view(-1, self.repeat)
        return numbers if self.chosen is None else numbers[self.chosen]


@dataclass(frozen=True)
class Place:
    """Where a weight meets samples.

    Attributes:
        number: Of the operation that uses it.
        place: Its place among the operation's inputs.
        source: Where it comes from.
        rows: Which samples the rows of the operation's output belong to.
        names: The parameters that it was computed from.
        way: The kinds of operations from its parameter to it if they only move entries.
    """

    number: int
    place: int
    source: Source
    rows: Rows
    names: set[str]
    way: tuple[str, ...] | None


@dataclass
class Plan:
    """What was shown about a graph, good for all graphs like it if it is ``lasting``.

    Attributes:
        signature: Of the graph.
        samples: How many there are.
        places: Where weights meet samples.
        lowest: The operations among those that no other one is below.
        unshown: Parameters whose gradients cannot be told apart by sample, with the reason.
        lasting: Whether what was shown holds for other data, as far as operations tell.
        seen: Whether a sample's outputs were seen not to depend on the others of its batch.
        moved: Parameters whose rows have another order than one sample after the other, or in turns.
        asked: How often the plan was asked for again.
    """

    signature: Signature
    samples: int
    places: list[Place]
    lowest: list[int]
    unshown: dict[str, str]
    lasting: bool = False
    seen: bool = False
    moved: set[str] = field(default_factory=set)
    asked: int = 0

    @classmethod
    def of(
        cls,
        graph: Graph,
        samples: int,
        uses: Uses,
        rows: dict[int, Rows],
        unshown: dict[str, str],
    ) -> "Plan":
        """Return a plan of the uses whose rows are known."""
        places = []
        for number, found in rows.items():
            for place, source in uses[number].items():
                names = graph.roots(source[0])
                places.append(Place(number, place, source, found, names, graph.way(source[0])))
        above = graph.behind(rows)
        lowest = [number for number in rows if number not in above]
        return cls(graph.signature, samples, places, lowest, unshown)


class Plans:
    """What was shown about a model, kept for graphs like those that it was shown for.

    A plan that is asked for again for the 1st, 4th, 16th, … time is not given: then it is shown anew, for other data.
    A network that moves rows by their values, in a way that no operation tells, and that had them in the usual order
    at first, is found out by this, and nothing about it is kept any more.

    Args:
        limit: How many are kept, as for the last chunk of a batch, which is smaller.
    """

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self.kept: list[Plan] = []
        self.moving = False

    def find(
        self,
        graph: Graph,
        samples: int,
    ) -> Plan | None:
        """Return the plan that fits a graph; None if there is none, or if it is to be shown again."""
        plan = self._like(graph.signature, samples)
        if plan is None:
            return None
        plan.asked += 1
        power_of_four = plan.asked & (plan.asked - 1) == 0 and plan.asked.bit_length() % 2
        return None if power_of_four else plan

    def keep(self, plan: Plan) -> Plan:
        """Keep a plan that was just shown, if it lasts, and return it, or the same one that was kept before."""
        before = self._like(plan.signature, plan.samples)
        if before is None:
            if plan.lasting and not plan.unshown and not self.moving:
                self.kept = [*self.kept[1 - self.limit :], plan]
            return plan
        changed = plan.moved | plan.unshown.keys()
        if not changed:
            before.seen = False  # look again whether samples depend on each other
            return before if plan.lasting else plan
        self.kept = []
        self.moving = True
        names = ", ".join(sorted(changed)[:3])
        warn(
            f"The model moves samples by their values on the way from {names}, which the batches before did not show: "
            "what was measured on it so far may be wrong, from here on it is right."
        )
        return plan

    def _like(
        self,
        signature: Signature,
        samples: int,
    ) -> Plan | None:
        for plan in self.kept:
            if plan.samples == samples and plan.signature == signature:
                return plan
        return None


def plan_of_one(graph: Graph) -> Plan | None:
    """Return the plan of a graph of one sample, to whom all rows belong; None where a use is unusual."""
    uses = graph.uses(set())
    rows: dict[int, Rows] = {}
    for number, weights in uses.items():
        shape = torch.Size(graph.signature[number][1][0])
        if not shape or graph.unusual(number, weights):
            return None
        if shape.numel():  # not as of an expert without a token
            rows[number] = Rows(repeat=shape[0])
    if any(isinstance(node, BackwardCFunction) for node in graph.nodes):
        return None
    return Plan.of(graph, 1, uses, rows, {})


@dataclass
class Prover:
    """Finds the uses in a graph, and the sample of each row, as the head of this file says.

    Args:
        graph: The graph.
        samples: How many samples there are.
        rounds: How often uses that mix samples are replaced by what uses them.
        alone: The signature of the graph of one sample.
        root: Where the samples are known: each has as many rows as the others, one sample after the
            other. By default, at the outputs.
    """

    graph: Graph
    samples: int
    rounds: int = 4
    alone: Signature | None = None
    root: Any = None

    def __post_init__(self) -> None:
        graph, samples = self.graph, self.samples
        self.root = self.root or graph.edge(0, graph.outputs.output_nr)
        outputs = like(self.root)
        kinds = {outputs.dtype}
        for node in graph.nodes:
            kinds.update(out.dtype for out in node._input_metadata if out.dtype.is_floating_point)
        # Random numbers are the same on every device. One draw is as large as the outputs, which
        # have a row for each token and a column for each word in a language model.
        drawn: dict[str, Any] = {"device": "cpu"}
        drawn["generator"] = torch.Generator().manual_seed(samples)
        scores = torch.rand(outputs.shape, **drawn).add_(0.5)
        scores.mul_(torch.randn(outputs.shape[1:], **drawn))  # so that samples do not cancel out
        signs = torch.randint(2, (samples,), **drawn) * 2.0 - 1
        signs[:1] = 1.0
        signs[1:2] = -1.0
        # Powers of two scale a gradient without rounding, so that even what is left of a sum of
        # zero is told apart.
        span = 12 if torch.float16 in kinds else 40  # which float16 has little room for
        order = torch.randperm(samples, **drawn)
        factors = torch.exp2((order - samples // 2) * min(1.0, span / samples))
        where = (outputs.device, outputs.dtype)
        self.scores = scores.to(*where)
        self.signs = signs.to(*where)
        self.factors = factors.to(*where)
        self.eps = max(torch.finfo(kind).eps for kind in kinds)
        self.unsure: set[int] = set()  # operations whose rows may be others in another batch
        self.moved: set[int] = set()  # those among them whose rows have an order of their own

    def plan(self) -> Plan:
        """Return what can be shown."""
        graph = self.graph
        mixed, silent = self._mixed([*graph.uses(set())])
        for _ in range(self.rounds):
            uses = graph.uses(mixed)
            self.unsure = set()
            self.moved = set()
            rows = self._rows([*uses])
            failed = uses.keys() - rows.keys()
            if not failed:
                break
            mixed |= failed
        unshown = self._unshown(uses, {*rows}, mixed, silent)
        plan = Plan.of(graph, self.samples, uses, rows, unshown)
        for at in plan.places:
            if at.number in self.moved:
                plan.moved |= at.names
        behind = graph.behind(rows)
        moving = any(self._may_move(number) for number in behind)
        open_ends = behind & mixed or (behind | {*rows}) & silent or self.unsure
        plan.lasting = not (moving or open_ends or unshown) and self._independent(mixed)
        return plan

    def _may_move(self, number: int) -> bool:
        """Whether an operation may move rows to places that depend on data, or nothing is known about it."""
        own = isinstance(self.graph.nodes[number], BackwardCFunction)  # a function of the user's
        return own or MOVE_ROWS.search(self.graph.kind(number)) is not None

    def _independent(self, mixed: set[int]) -> bool:
        """Whether what samples are added up in looks the same for one sample, as what knows nothing of samples does."""
        signature = self.graph.signature
        alone = self.alone or []
        same_size = len(alone) == len(signature)
        return not mixed or (same_size and all(alone[i] == signature[i] for i in mixed))

    def _unshown(
        self,
        uses: Uses,
        shown: set[int],
        mixed: set[int],
        silent: set[int],
    ) -> dict[str, str]:
        """Return the parameters that other engines have to serve, each with the operation that is the reason."""
        graph = self.graph
        root = graph.nodes.index(self.root.node)
        odd = uses.keys() - shown
        odd |= {number for number, weights in uses.items() if graph.unusual(number, weights)}
        # What mixes samples, and has rows of samples behind it, would count these rows twice.
        odd |= graph.behind(uses.keys() - odd, blocked=silent) & mixed
        odd |= {root} & mixed
        odd |= uses.keys() - graph.below(root)  # as of a penalty on weights
        unshown: dict[str, str] = {}
        for number in odd:
            unshown = dict.fromkeys(graph.roots(number), graph.kind(number)) | unshown
        return unshown

    def _backward(
        self,
        numbers: list[int],
        by_sample: Tensor | None,
        *,
        watched: Iterable[int],
        note: Callable[[int, Sequence[Tensor | None]], None],
    ) -> list[Tensor | None]:
        """Backpropagate the scores, times a number for each sample, to the outputs of some operations.

        On the way, note the gradients by the outputs of those that are watched.
        """
        if not numbers:
            return []
        scores = self.scores
        if by_sample is not None:
            of_samples = scores.view(self.samples, -1) * by_sample.unsqueeze(1)
            scores = of_samples.view(scores.shape)
        edges = [self.graph.edge(number) for number in numbers]
        nodes = self.graph.nodes
        handles = [nodes[number].register_prehook(partial(note, number)) for number in watched]
        try:
            return [*pulled_back(self.root, edges, scores)]
        finally:
            for handle in handles:
                handle.remove()

    # 1. Where samples are added up

    def _mixed(self, uses: list[int]) -> tuple[set[int], set[int]]:
        """Return the operations at whose outputs samples are added up, and those that no gradient reaches."""
        plain = self._norms(uses, None)
        signed = self._norms(uses, self.signs)
        numbers = [number for number in plain if number in signed]
        before = torch.stack([plain[number] for number in numbers])
        after = torch.stack([signed[number] for number in numbers])
        largest = torch.maximum(before, after)
        changed = (before - after).abs() > 512 * self.eps * largest
        mixed = {*compress(numbers, changed.tolist())}
        silent = {*compress(numbers, (largest == 0).tolist())}
        return mixed, silent

    def _norms(
        self,
        uses: list[int],
        by_sample: Tensor | None,
    ) -> dict[int, Tensor]:
        """Return the squared norm of the gradient at the output of every operation down to ``uses``."""
        norms: dict[int, Tensor] = {}

        def note(
            number: int,
            gradients: Sequence[Tensor | None],
        ) -> None:
            squared = torch.zeros((), dtype=torch.float64, device=self.signs.device)
            for g in gradients:
                if g is not None:
                    squared += torch.linalg.vector_norm(g).square()
            norms[number] = squared

        above = self.graph.behind(uses)
        captured = self._backward(uses, by_sample, watched=above, note=note)
        for number, b in zip(uses, captured, strict=True):
            note(number, [b])
        return norms

    # 2. Whose the rows are

    def _rows(self, numbers: list[int]) -> dict[int, Rows]:
        """Return which sample each row belongs to, by operation, without those of which a row belongs to several."""
        nobody = torch.zeros(self.samples, 0, dtype=torch.long, device=self.signs.device)
        behind = self.graph.behind(numbers)
        lines = self._lines(behind | {*numbers})
        found: dict[int, Rows] = {}
        gradients = []
        norms: list[dict[int, list[Tensor]]] = []
        for by_sample in (None, self.factors):
            noted: dict[int, list[Tensor]] = {}

            def note(
                number: int,
                gradients: Sequence[Tensor | None],
                noted: dict[int, list[Tensor]] = noted,
            ) -> None:
                if gradients[0] is not None:
                    noted[number] = [_norms_along(gradients[0], axes) for axes in lines[number]]

            captured = self._backward(
                numbers, by_sample, watched=lines.keys() - {*numbers}, note=note
            )
            for number, b in zip(numbers, captured, strict=True):
                if number in lines:
                    note(number, [b])
            gradients.append(captured)
            norms.append(noted)
        for number, b, c in zip(numbers, *gradients, strict=True):
            rows = Rows(index=nobody) if b is None or c is None else self._rows_of(number, b, c)
            if rows is not None:
                found[number] = rows
        plain, scaled = norms
        for number in plain.keys() & scaled.keys():
            pairs = zip(plain[number], scaled[number], strict=True)
            if any(self._samples(b, c, self._floor(b)) is None for b, c in pairs):
                self.unsure.add(number)
        return found

    def _lines(self, numbers: set[int]) -> dict[int, list[Axes]]:
        """Return products among operations, and along which axes entries of one sample only leave rows in their place.

        A row of the left factor's gradient is made of the same row of the output's, and a column of the right one's of
        the same column, whatever they are multiplied with. Factors that no row of a sample flows into do not matter.
        """
        lines: dict[int, list[Axes]] = {}
        for number in numbers:
            kind = self.graph.kind(number)
            if kind.startswith(ATTENTION):
                lines[number] = [(-2, -1)]
            if kind not in PRODUCTS:
                continue
            factors = self.graph.signature[number][2][PRODUCTS[kind] :]
            flows = [source is not None and source[0] in numbers for source in factors]
            lines[number] = [*compress([(-1,), (-2,)], flows)]
        return lines

    def _rows_of(
        self,
        number: int,
        plain: Tensor,
        scaled: Tensor,
    ) -> Rows | None:
        """Try each axis, and then leading axes that are read as one."""
        sizes = plain.shape
        floor = self._floor(plain)
        ways = [Rows(axis=axis) for axis in range(len(sizes))]
        ways += [Rows(merged=merged) for merged in range(2, len(sizes))]
        for way in ways:
            rows = way.rows_first(plain)
            samples = self._samples(rows, way.rows_first(scaled), floor)
            if samples is not None:
                return self._in_order(number, samples, way)
        return None

    def _floor(self, plain: Tensor) -> float:
        """Return the norm below which a row is rounding."""
        return 16 * self.eps * float(torch.linalg.vector_norm(plain))

    def _samples(
        self,
        plain: Tensor,
        scaled: Tensor,
        floor: float,
    ) -> Tensor | None:
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

    def _in_order(
        self,
        number: int,
        samples: Tensor,
        way: Rows,
    ) -> Rows:
        """Return the rows of each sample, and note whether they may be other ones in another batch.

        Rows without a gradient, as behind a mask, tell nothing. Whatever they are taken for is right for this batch.
        For another one their samples must follow from the others': all samples have rows, one after the other or in
        turns, and only one of these two orders fits.
        """
        n, count = self.samples, len(samples)
        known = samples >= 0
        self.unsure.add(number)
        if count and count % n == 0:
            repeat = count // n
            numbers = torch.arange(count, device=samples.device)
            in_blocks = torch.equal(samples[known], (numbers // repeat)[known])
            in_turns = torch.equal(samples[known], (numbers % n)[known])
            every_one = len(samples[known].unique()) == n
            if every_one and (in_blocks or in_turns) and (repeat == 1 or in_blocks != in_turns):
                self.unsure.remove(number)
            if in_blocks:
                return replace(way, repeat=repeat)
            if in_turns:
                return replace(way, repeat=repeat, index=numbers.view(repeat, n).T)
        self.moved.add(number)
        counts = torch.bincount(samples[known], minlength=n).tolist()
        unknown = count - sum(counts)
        rows = samples.argsort(stable=True)[unknown:]  # -1 comes first
        index = pad_sequence(rows.split(counts), batch_first=True, padding_value=count)
        return replace(way, repeat=index.shape[1], index=index)
