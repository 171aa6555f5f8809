r"""Which sample each row of a use belongs to: **shown, not guessed**.

Let :math:`u_n` be any scores of the outputs of sample :math:`n`, and *uses* the operations in a
graph where weights may meet samples.

1. Backpropagate :math:`\sum_n u_n` and :math:`\sum_n \pm u_n` with random signs. Where every entry
   of a gradient belongs to one sample, the entries change their signs at most, and the norm stays.
   Where the norm changes, samples are added up: the operation knows nothing of the samples, or
   mixes them.
2. Backpropagate :math:`\sum_n a_n u_n` to the uses, with powers of two :math:`a_n \neq 1` that stand
   for digits of :math:`n`: one pass for each digit, so that there are as many different samples as
   are needed. A row of sample :math:`n` is :math:`a_n` times what it was, which tells :math:`n`:
   also where a batch was sorted, masked or routed to experts.
3. Backpropagate infinite scores of some samples. What was shown for one batch holds for another one
   only if no operation between uses and outputs can move rows by their values. By its name or its
   settings an operation tells (sorting, a row that is selected). Others move rows by zeros and ones
   that they multiply with, or by masks: infinite gradients show where they could flow, as they do
   not vanish in products, and masks are passed by.
   What else there may be shows when the proof is made again for some of the later batches
   (:class:`Plans`).
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.utils.rnn import pad_sequence

from lightning_taskinfo._warn import warn
from lightning_taskinfo.fisher.graph import (
    Graph,
    Note,
    Signature,
    Source,
    Uses,
    copied,
    hooked,
    pulled_back,
    restored,
    shape_of,
)

# Operations that move rows to places that depend on data: what was shown for one batch says nothing
# of another.
MOVE_ROWS = re.compile(
    "Index|Gather|Scatter|Sort|Topk|Flip|Masked(?!Fill|Softmax)|Take|Put|Unique|Kthvalue|Embedding|"
    "Segment|Sparse|CopySlices|Cummax|Cummin|Median|Mode|Unpool|GridSampler"
)

PLANS = 64  # kept of a model, as for sentences of different lengths
HELD = 1 << 26  # elements of gradients that are held together: 256 MB in float32


@dataclass(frozen=True, eq=False)
class Rows:
    """Which sample each row of a tensor belongs to; a row is a slice along one axis.

    Attributes:
        axis: The axis of the rows, after ``merged`` leading axes were made one.
        merged: How many leading axes are read as one.
        repeat: Rows of one sample, next to each other.
        index: Row numbers ``[N, repeat]`` where they have another order; the number of rows stands
            for no row.
    """

    axis: int = 0
    merged: int = 1
    repeat: int = 1
    index: Tensor | None = None

    def rows_first(
        self,
        x: Tensor,
        place: int = 0,
    ) -> Tensor:
        """Return ``x`` with its rows along axis 0, or behind other axes at another ``place``."""
        if self.merged > 1:
            x = x.flatten(place, place + self.merged - 1)
        return x.movedim(place + self.axis, place) if self.axis else x

    def samples_first(
        self,
        x: Tensor,
        place: int = 0,
    ) -> Tensor:
        """Return ``x`` as ``[N, repeat, ...]``, or with these behind other axes, and with zeros for no row."""
        rows = self.rows_first(x, place)
        if self.index is not None:
            before, after = rows.shape[:place], rows.shape[place + 1 :]
            no_row = rows.new_zeros(*before, 1, *after)
            every = torch.cat([rows, no_row], place)
            chosen = every.index_select(place, self.index.flatten().to(rows.device))
            return chosen.unflatten(place, self.index.shape)
        if self.repeat == 1:  # as a rule
            return rows.unsqueeze(place + 1)
        return rows.unflatten(place, (-1, self.repeat))

    def numbers(self, rows: int) -> Tensor:
        """Return the numbers ``[N, repeat]`` of the samples' rows."""
        if self.index is not None:
            return self.index
        return torch.arange(rows, device="cpu").view(-1, self.repeat)


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
        mixed: Operations that were taken for parts of a weight, as they add samples up.
        others: Operations whose own backward pass runs for each sample, each with a parameter.
    """

    signature: Signature
    samples: int
    places: list[Place]
    lowest: list[int]
    unshown: dict[str, str] = field(default_factory=dict)
    lasting: bool = False
    seen: bool = False
    moved: set[str] = field(default_factory=set)
    asked: int = 0
    mixed: set[int] = field(default_factory=set)
    others: list[tuple[int, str]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        graph: Graph,
        samples: int,
        uses: Uses,
        rows: dict[int, Rows],
    ) -> "Plan":
        """Return a plan of the uses whose rows are known."""
        places = []
        for number, found in rows.items():
            for place, source in uses[number].items():
                names = graph.roots(source[0])
                way = graph.way(source)
                places.append(Place(number, place, source, found, names, way))
        return cls(graph.signature, samples, places, graph.lowest(rows))


class Plans:
    """What was shown about a model, kept for graphs like those that it was shown for.

    A plan that is asked for again for the 1st, 4th, 16th, … time is not given: then it is shown anew, for other data.
    A network that moves rows by their values, in a way that no operation tells, and that had them in the usual order
    at first, is found out by this, and nothing about it is kept any more.
    """

    def __init__(self) -> None:
        self.kept: list[Plan] = []
        self.moving = False

    def find(
        self,
        graph: Graph,
        samples: int,
    ) -> Plan | None:
        """Return the plan that fits a graph; None if there is none, or if it is to be shown again."""
        plan = self.like(graph.signature, samples)
        if plan is None:
            return None
        plan.asked += 1
        power_of_four = (math.log2(plan.asked) / 2).is_integer()
        return None if power_of_four else plan

    def keep(self, plan: Plan) -> Plan:
        """Keep a plan that was just shown, if it lasts, in the place of the one before, and return it."""
        before = self.like(plan.signature, plan.samples)
        changed = plan.moved | plan.unshown.keys()
        if before is not None:
            plan.asked = before.asked
            self.kept.remove(before)
            if changed:
                self.kept = []
                self.moving = True
                warn(
                    f"The model moves samples by their values on the way from {some_of(changed)}, which the batches "
                    "before did not show: what was measured on it so far may be wrong, from here on it is right."
                )
        if plan.lasting and not plan.unshown and not self.moving:
            self.kept = [*self.kept[1 - PLANS :], plan]
        return plan

    def like(
        self,
        signature: Signature,
        samples: int,
    ) -> Plan | None:
        """Return the plan of such graphs, also if it is to be shown again."""
        plans = (plan for plan in self.kept if plan.samples == samples)
        return next((plan for plan in plans if plan.signature == signature), None)


def some_of(names: Collection[str]) -> str:
    """Name the first few."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def plan_of_one(graph: Graph) -> Plan | None:
    """Return the plan of a graph of one sample, to whom all rows belong; None where a use is unusual."""
    uses = graph.uses(set())
    rows = {}
    for number in uses:
        shape = shape_of(graph.edge(number))
        if not shape or graph.unusual(number):
            return None
        if shape.numel():  # not as of an expert without a token
            rows[number] = Rows(repeat=shape[0])
    if graph.functions:
        return None
    plan = Plan.of(graph, 1, uses, rows)
    plan.lasting = True
    return plan


def _squared_norm(g: Tensor) -> Tensor:
    """Return the squared norm of a gradient, which is sparse for a sparse matrix that was computed, as of edges."""
    entries = g if g.layout == torch.strided else g.to_sparse_coo().coalesce().values()
    return vector_norm(entries).square()


@dataclass
class Prover:
    """Finds the uses in a graph, and the sample of each row, as the head of this file says.

    Args:
        graph: The graph.
        samples: How many samples there are.
        rounds: How often uses that mix samples are replaced by what uses them.
        alone: The signature of the graph of one sample.
        before: The plan to show again. What added samples up stays a part of a weight, also if no two samples have
            an entry in common this time, as of a table that is normed and then looked up.
    """

    graph: Graph
    samples: int
    rounds: int = 4
    alone: Signature = field(default_factory=list)
    before: Plan | None = None

    def __post_init__(self) -> None:
        graph, samples = self.graph, self.samples
        outputs = graph.outputs
        # Random numbers are the same on every device. One draw is as large as the outputs, which
        # have a row for each token and a column for each word in a language model.
        generator = torch.Generator().manual_seed(samples)
        drawn: dict[str, Any] = {"device": "cpu", "generator": generator}
        scores = torch.rand(outputs.shape, **drawn).add_(0.5)
        scores.mul_(torch.randn(outputs.shape[1:], **drawn))  # so that samples do not cancel out
        signs = torch.randint(2, (samples,), **drawn) * 2.0 - 1
        signs[:1] = 1.0
        signs[1:2] = -1.0
        # Powers of two scale a gradient without rounding, so that even what is left of a sum of
        # zero is told apart. A sample's number has several digits where there are more samples than
        # powers. None of these is 1, which a gradient that knows no scale would show.
        span = 12 if torch.float16 in graph.dtypes else 40  # which float16 has little room for
        self.base = min(max(samples, 2), span)
        order = torch.randperm(samples, **drawn)
        self.sample = order.argsort().to(outputs.device)  # of each number
        place = 1
        factors: list[Tensor] = []
        while not factors or place < samples:
            exponents = order // place % self.base - self.base // 2
            factors.append(torch.exp2((exponents + (exponents >= 0)).double()))
            place *= self.base
        self.scores, self.signs, *self.factors = (
            x.to(outputs.device, outputs.dtype) for x in (scores, signs, *factors)
        )
        self.eps = max(torch.finfo(kind).eps for kind in graph.dtypes if kind.is_floating_point)

    def plan(self) -> Plan:
        """Return what can be shown."""
        graph = self.graph
        mixed, silent = self._mixed([*graph.uses(set())])
        if self.before is not None:
            mixed |= self.before.mixed
        for _ in range(self.rounds):
            uses = graph.uses(mixed)
            rows = self._rows(sorted(uses))
            failed = uses.keys() - rows.keys()
            if not failed:
                break
            mixed |= failed
        plan = Plan.of(graph, self.samples, uses, rows)
        plan.mixed = mixed
        plan.unshown = self._unshown(uses, rows, mixed, silent)
        for at in plan.places:
            if at.number in self.moved:
                plan.moved |= at.names
        behind = graph.behind(rows)
        # What may move rows to places that depend on data, or does what nobody knows.
        moving = any(
            graph.nodes[i] in graph.functions or MOVE_ROWS.search(graph.kind(i)) or graph.sparse(i)
            for i in behind
        )
        open_ends = behind & mixed or (behind | {*rows}) & silent or self.unsure
        # What knows nothing of samples looks the same for one sample.
        alike = len(self.alone) == len(graph.signature)
        alike = alike and all(self.alone[i] == graph.signature[i] for i in mixed)
        lasting = (alike or not mixed) and not (moving or open_ends or plan.unshown)
        plan.lasting = lasting and self._apart(rows)
        return plan

    def _unshown(
        self,
        uses: Uses,
        rows: dict[int, Rows],
        mixed: set[int],
        silent: set[int],
    ) -> dict[str, str]:
        """Return the parameters that other engines have to serve, each with the operation that is the reason."""
        graph = self.graph
        odd = uses.keys() - rows.keys()
        odd |= {number for number in uses if graph.unusual(number)}
        # What mixes samples, and has rows of samples behind it, would count these rows twice: not
        # where no gradient arrives, as at the first forget gate of an LSTM without samples.
        behind = graph.behind(uses.keys() - odd - silent, blocked=silent)
        odd |= (behind | {0}) & mixed
        unshown: dict[str, str] = {}
        for number in odd:
            unshown = dict.fromkeys(graph.roots(number), graph.kind(number)) | unshown
        return unshown

    def _backward(
        self,
        numbers: list[int],
        by_sample: Tensor | None,
    ) -> list[Tensor | None]:
        """Backpropagate the scores, times a number for each sample, to the outputs of some operations."""
        if not numbers:
            return []
        functions = self.graph.functions
        scores = self.scores
        if by_sample is not None:
            of_samples = scores.view(self.samples, -1) * by_sample.unsqueeze(1)
            scores = of_samples.view(scores.shape)
        edges = [self.graph.edge(number) for number in numbers]
        with restored(functions):
            found = pulled_back(self.graph.outputs, edges, scores)
            return [*map(copied, found)] if functions else [*found]

    def _visit(
        self,
        numbers: Collection[int],
        by_sample: Tensor | None,
        note: Note,
        above: Collection[int] = (),
    ) -> None:
        """Backpropagate as far as some operations, and note gradients when they arrive, so that none is held.

        Args:
            numbers: The operations.
            by_sample: As for :meth:`_backward`.
            note: Takes the number of an operation, and the gradients by its outputs.
            above: Other operations on the way.
        """
        lowest = self.graph.lowest(numbers)
        with hooked(self.graph, {*numbers, *above}.difference(lowest), note):
            captured = self._backward(lowest, by_sample)
        for number, b in zip(lowest, captured, strict=True):
            note(number, [b])

    def _apart(self, rows: dict[int, Rows]) -> bool:
        """Whether no gradient of a sample can reach rows of another one, whatever the numbers on the way are.

        Infinite scores of some samples make all that they flow into infinite or undefined, also where
        a zero hides it: in a product with a matrix of zeros and ones, or with a mask. Selections by
        a mask let everything pass, as another batch may have another mask. The rows of the others
        must stay finite, and so must those that no order of samples explains alone.
        """
        finite: list[Tensor] = []

        def note(
            number: int,
            gradients: Sequence[Tensor | None],
        ) -> None:
            b = gradients[0]
            if b is None:
                return
            finite.append(rows[number].samples_first(b)[others].isfinite().all())
            if number in self.torn:
                each = rows[number].rows_first(b).unsqueeze(-1).flatten(1)
                finite.append(each[self.torn[number]].isfinite().all())

        try:
            for sign in (1, -1) if self.torn else (1,):
                others = self.signs * sign < 0
                infinite = torch.zeros_like(self.signs).masked_fill_(~others, math.inf)
                # Anomaly detection would refuse them.
                with torch.autograd.set_detect_anomaly(False), self.graph.without_masks():
                    self._visit(rows, infinite, note)
        except Exception:  # of a hook of the user's that takes no such numbers
            return False
        return all(map(bool, finite))

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
        nothing = torch.zeros((), dtype=torch.float64, device=self.signs.device)
        norms = dict.fromkeys(uses, nothing)

        def note(
            number: int,
            gradients: Sequence[Tensor | None],
        ) -> None:
            norms[number] = sum((_squared_norm(g) for g in gradients if g is not None), nothing)

        self._visit(uses, by_sample, note, above=self.graph.behind(uses))
        return norms

    # 2. Whose the rows are

    def _rows(self, numbers: list[int]) -> dict[int, Rows]:
        """Return which sample each row belongs to, by operation, without those of which a row belongs to several."""
        self.unsure: set[int] = set()  # operations whose rows may be others in another batch
        self.torn: dict[int, Tensor] = {}  # where two orders fit: the rows on which they disagree
        self.moved: set[int] = set()  # those among them whose rows have an order of their own
        no_rows = torch.zeros(self.samples, 0, dtype=torch.long, device=self.signs.device)
        found = {}
        for number, *gradients in self._compared(numbers):
            b, *scaled = [g for g in gradients if g is not None] or [None]
            if b is None or len(scaled) < len(self.factors):
                found[number] = Rows(index=no_rows)
                continue
            floor = 16 * self.eps * vector_norm(b)
            # Each axis, and then leading axes that are read as one.
            ways = [Rows(axis=axis) for axis in range(b.dim())]
            ways += [Rows(merged=merged) for merged in range(2, b.dim())]
            for way in ways:
                samples = self._samples(way.rows_first(b), map(way.rows_first, scaled), floor)
                if samples is not None:
                    found[number] = self._in_order(number, samples, way)
                    break
        return found

    def _compared(self, numbers: list[int]) -> Iterator[tuple[Any, ...]]:
        """Yield operations, each with its gradients of all passes: of a few at a time, as they are held together."""
        passes = (None, *self.factors)
        while numbers:
            held = accumulate(shape_of(self.graph.edge(number)).numel() for number in numbers)
            few = max(1, sum(elements * len(passes) <= HELD for elements in held))
            some, numbers = numbers[:few], numbers[few:]
            yield from zip(
                some, *[self._backward(some, of_pass) for of_pass in passes], strict=True
            )

    def _samples(
        self,
        plain: Tensor,
        scaled: Iterable[Tensor],
        floor: Tensor,
    ) -> Tensor | None:
        """Return the sample of each row, -1 where it has no gradient; None if a row belongs to several samples.

        A row whose norm is below ``floor`` is rounding. Each of the scaled gradients tells one digit of the number of a
        row's sample, by the power of two that explains the row.
        """
        plain = plain.unsqueeze(-1).flatten(1)
        norms = vector_norm(plain, dim=1)
        fits = norms > 0
        number = torch.zeros_like(norms, dtype=torch.long)
        for place, x in enumerate(scaled):
            rows = x.unsqueeze(-1).flatten(1)
            ratio = vector_norm(rows, dim=1) / norms
            exponent = ratio.log2().round().nan_to_num(0, 0, 0)
            factor = exponent.exp2()
            off = vector_norm(rows - factor.unsqueeze(1) * plain, dim=1)
            digit = torch.where(exponent > 0, exponent - 1, exponent).long() + self.base // 2
            explained = (off <= self.eps**0.5 * factor * norms) & (exponent != 0)
            fits &= explained & (digit >= 0) & (digit < self.base)
            number += digit * self.base**place
        fits &= (number >= 0) & (number < self.samples)
        sample = self.sample[number.clamp(0, self.samples - 1)]
        nothing = norms <= floor
        if not bool((fits | nothing).all()):
            return None
        return sample.masked_fill(~fits, -1)

    def _in_order(
        self,
        number: int,
        samples: Tensor,
        way: Rows,
    ) -> Rows:
        """Return the rows of each sample, and note whether they may be other ones in another batch.

        Rows without a gradient, as behind a mask, tell nothing. Whatever they are taken for is right for this batch.
        For another one their samples must follow from the others': all samples have rows, one after the other or in
        turns. Where both orders fit, as for the first of 9 tokens of 4 samples, they must agree on all rows that a
        gradient can reach.
        """
        n, count = self.samples, len(samples)
        known = samples >= 0
        seen = samples[known]
        self.unsure.add(number)
        if count and count % n == 0:
            repeat = count // n
            numbers = torch.arange(count, device=samples.device)
            in_blocks = torch.equal(seen, numbers[known] // repeat)
            in_turns = torch.equal(seen, numbers[known] % n)
            every_one = len(seen.unique()) == n
            if every_one and (in_blocks or in_turns):
                self.unsure.remove(number)
            if in_blocks and in_turns and repeat > 1:
                self.torn[number] = numbers // repeat != numbers % n
            if in_blocks:
                return replace(way, repeat=repeat)
            if in_turns:
                return replace(way, repeat=repeat, index=numbers.view(repeat, n).T)
        self.moved.add(number)
        counts = torch.bincount(seen, minlength=n).tolist()
        unknown = count - len(seen)
        rows = samples.argsort(stable=True)[unknown:]  # -1 comes first
        index = pad_sequence(rows.split(counts), batch_first=True, padding_value=count)
        return replace(way, repeat=index.shape[1], index=index)
