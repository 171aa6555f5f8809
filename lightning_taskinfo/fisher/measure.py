r"""One measurement, from a batch to per-sample gradients.

The Fisher information is a mean over samples of squared gradients, so every sample's own gradient
is needed, and a plain backward pass only has their sum. A measurement goes over the batch in
chunks. For each chunk:

1. **Forward.** The model runs once, in eval mode and in float32 or better. Its autograd graph knows
   every use of every parameter.
2. **Plan** (:mod:`~lightning_taskinfo.fisher.graph`, :mod:`~lightning_taskinfo.fisher.proof`). In
   the graph, weights meet samples in certain operations, the *uses*. Where they are, and which
   sample each row of their outputs belongs to, is shown by a few backward passes. What was shown
   holds for every graph of the same operations and shapes, unless an operation moves rows by their
   values; it is kept with the model, so that most of the later measurements do without these
   passes.
3. **Scores.** The likelihood turns outputs into scores: gradients of log-probabilities by the
   outputs. Labels are the dataset's, drawn from the model, or all of them by their probability.
4. **Backward.** Each score is backpropagated to the outputs of the uses, no further: no weight
   gradient of the whole batch is formed. Uses take the gradients as the pass arrives at them, so
   that it holds no more than that of a training step.
5. **Terms** (:mod:`~lightning_taskinfo.fisher.terms`, :mod:`~lightning_taskinfo.fisher.ops`). Input
   and output gradient of a use give each sample's gradient of its weight, or only its norm. A
   weight that was computed from parameters hands it on to them, by a backward pass over that part
   of the graph alone.
6. **Accumulate** (:mod:`~lightning_taskinfo.fisher.accumulators`). Norms, the diagonal or inner
   products are what remains of the gradients.

For a chunk of one sample nothing has to be shown: all rows are its own. Samples are measured alone,
one after the other, where the graph does not show which gradients are theirs, and where their
outputs depend on the others of their batch, on their place in it, or on chance. One warning says
so. What the graph of a single sample does not show either takes a plain backward pass.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_taskinfo._batches import with_targets
from lightning_taskinfo._calls import call_on, outputs_of
from lightning_taskinfo._nested import sample_count, take, tensors
from lightning_taskinfo._observe import (
    ParamDict,
    at_least_float32,
    full_precision,
    observing_once,
    parts,
    trainable_parameters,
)
from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo._sharded import gathered_parameters, resharding, sharded
from lightning_taskinfo._warn import warn
from lightning_taskinfo.fisher.accumulators import Accumulator, Diagonal, Norms
from lightning_taskinfo.fisher.graph import (
    CHECKPOINT,
    Graph,
    Signature,
    fetched_by,
    pulled_back,
    restored,
    shape_of,
)
from lightning_taskinfo.fisher.ops import BLOCK
from lightning_taskinfo.fisher.proof import Plan, Plans, Prover, plan_of_one, some_of
from lightning_taskinfo.fisher.terms import Gradients, backward, other_uses
from lightning_taskinfo.functional.likelihood import (
    Labels,
    Likelihood,
    as_likelihood,
    output_scores,
)

LABELS = ("sampled", "exact", "empirical")
Forward = Callable[[nn.Module, Any], Tensor]
SCORES = 16  # output scores whose gradients are held at once


@dataclass(frozen=True)
class Request:
    """How to measure, checked; see :func:`lightning_taskinfo.fisher.fisher_trace` for what the fields mean."""

    labels: Labels = "sampled"
    likelihood: str | Likelihood = "categorical"
    mc_samples: int = 1
    generator: Generator | None = None
    chunk_size: int | None = None
    forward_fn: Forward | None = None

    def __post_init__(self) -> None:
        if self.labels not in LABELS:
            raise ValueError(f"`labels` must be one of {', '.join(LABELS)}, got {self.labels!r}.")
        check_counts(mc_samples=self.mc_samples, chunk_size=self.chunk_size)
        as_likelihood(self.likelihood)

    def scores(
        self,
        outputs: Tensor,
        targets: Tensor | None,
        at_once: int = SCORES,
    ) -> Iterator[tuple[list[Tensor], bool]]:
        """Yield the output scores of a chunk, a few at a time, and whether they are the last."""
        likelihood = as_likelihood(self.likelihood)
        likelihood.check(outputs, targets)
        scores = output_scores(
            outputs,
            targets,
            labels=self.labels,
            likelihood=likelihood,
            mc_samples=self.mc_samples,
            generator=self.generator,
        )
        some = list(islice(scores, at_once))
        while some:
            following = list(islice(scores, at_once))
            yield some, not following
            some = following


def measure(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    request: Request,
    accumulator: Accumulator,
) -> None:
    """Send the gradients of every sample into ``accumulator``; there may be none."""
    n = number_of_samples(inputs)
    if not n:
        return
    inputs, targets = with_targets(model, inputs, targets, request.forward_fn)
    observed = parts(model)
    _check_modules(model, observed.modules)
    _check_targets(targets, n)
    if request.forward_fn is None:
        call_on(model, inputs)  # before anything is watched
    with (
        observing_once(observed),
        full_precision(observed),
        resharding(model),
        _without_hooks(model, observed.parameters),
    ):
        Measurement(model, take(inputs, _usable), targets, request, accumulator).run(n)


@contextmanager
def _without_hooks(
    model: nn.Module,
    parameters: list[nn.Parameter],
) -> Iterator[None]:
    """Set aside the hooks of parameters, such as masks, and loggers that would take our gradients for a step's.

    The graph is never followed as far as these hooks. A plain backward pass would run them.
    """
    hooked: list[Any] = [p for p in parameters if p._backward_hooks]
    if hooked:
        names = [name for name, p in model.named_parameters() if p._backward_hooks]
        warn(
            f"Hooks on {some_of(names)} do not run in a measurement: a gradient that they mask or scale counts as "
            "it is; `requires_grad=False` leaves a parameter out."
        )
    kept = [(p, dict(p._backward_hooks)) for p in hooked]
    try:
        for p in hooked:
            p._backward_hooks.clear()
        yield
    finally:
        for p, hooks in kept:
            p._backward_hooks.update(hooks)


def squared_norms_by_name(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    request: Request,
) -> ParamDict:
    """Return the squared gradient norms ``[N]`` of each trainable parameter, by one measurement; ``N`` may be 0."""
    n = number_of_samples(inputs)
    norms = Norms(n)
    measure(model, inputs, targets, request, norms)
    found = norms.values
    some = next(iter(found.values()), torch.empty(n, device="cpu"))
    zeros = torch.zeros_like(some)
    return {name: found.get(name, zeros) for name in trainable_parameters(model)}


def squared_gradients_by_name(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    request: Request,
) -> ParamDict:
    """Return the squared gradients of each trainable parameter, summed over ``N`` samples; ``N`` may be 0."""
    found = Diagonal()
    measure(model, inputs, targets, request, found)
    squares = {}
    for name, p in trainable_parameters(model).items():
        known = found.values.get(name)
        squares[name] = torch.zeros_like(p).detach() if known is None else known
    return squares


def number_of_samples(inputs: Any) -> int:
    """Return the number of samples, also if it is 0.

    Raises:
        ValueError: If there is no tensor, or the lengths differ.
    """
    lengths = {len(x) for x in tensors(inputs)}
    return 0 if lengths == {0} else sample_count(inputs)


# --- What is used again


@dataclass
class Known:
    """What is known of a model on samples of one shape, called in one way.

    Attributes:
        call: Shapes and types of one sample, and a weak reference to how the model is called. A
            ``forward_fn`` can mix the samples before they reach the model, where no graph shows it:
            what was found with one says nothing about another.
        outputs: Numbers that the model puts out for one sample.
        elements: Numbers that all uses put out for one sample, or three times those of the largest one: there are 96
            MB for all, and 32 for each.
        alone: The signature of the graph of one sample.
        plans: What was shown, for graphs of several sizes.
        mixes: Whether samples were seen to depend on their batch.
    """

    call: Any
    outputs: int = 0
    elements: int = 0
    alone: Signature = field(default_factory=list)
    plans: Plans = field(default_factory=Plans)
    mixes: bool = False


_KNOWN: "WeakKeyDictionary[nn.Module, Known]" = WeakKeyDictionary()  # as long as the model lives


# --- The measurement


@dataclass
class Measurement:
    """One measurement: what is asked, and what has been found out about the model."""

    model: nn.Module
    inputs: Any
    targets: Tensor | None
    request: Request
    accumulator: Accumulator

    def __post_init__(self) -> None:
        self.parameters = gathered_parameters(self.model)
        check_parameters(self.parameters)
        # All processes gather shards in step: what one happens to know must not change its passes.
        self.sharded = sharded(self.model)
        forward_fn = self.request.forward_fn
        shapes = [(x.shape[1:], x.dtype) for x in tensors(self.inputs)]
        self.known = Known((shapes, forward_fn and ref(forward_fn)))
        self.first: Tensor | None = None  # outputs of the first sample without the others
        self.looked = False  # whether samples depend on their batch

    def run(self, n: int) -> None:
        """Measure ``n`` samples, chunk by chunk."""
        step = min(n, self.request.chunk_size or n)
        if step > 1:
            self._recall()
            if self.request.chunk_size is None:
                chunks = math.ceil(n / self._affordable())
                step = math.ceil(n / chunks)  # chunks of about one size
        start = 0
        while start < n:
            stop = min(start + step, n)
            if self._measure(slice(start, stop)):
                start = stop
            else:
                step = 1  # from here on

    def _measure(self, samples: slice) -> bool:
        """Measure a chunk; return False if its samples have to be measured alone."""
        inputs, targets = take((self.inputs, self.targets), itemgetter(samples))

        # 1. Forward. The graph that leads to the outputs has every use of every weight.
        outputs = self._outputs(inputs, samples.stop - samples.start)
        graph = Graph(outputs, self.parameters)

        # 2. Plan: where weights meet samples, and whose the rows are.
        plan = self._plan(graph, len(outputs))
        if len(outputs) > 1 and (self._mixes(inputs, graph, plan) or self._hides(graph, plan)):
            return False
        receive = partial(self.accumulator.add, samples)

        # 3. Scores of the outputs, a few at a time, or one where functions of the user's run.
        at_once = 1 if graph.functions else SCORES
        for scores, last in self.request.scores(outputs, targets, at_once):
            if plan is not None:
                # 4. Backward, from the scores to the outputs of the uses. As it arrives at them,
                # 5. terms make gradients of samples, with what the operations have seen,
                # 6. and what is asked of these is accumulated.
                backward(graph, plan, scores, receive, retain_graph=not last)
                continue
            for score in scores:
                with restored(graph.functions):
                    found = self._gradients_of_one(graph, score)
                for name, g in found.items():
                    receive(name, Gradients(g))
        return True

    def _outputs(
        self,
        inputs: Any,
        count: int,
    ) -> Tensor:
        """Run the model, and check that its outputs have a row for each sample and depend on parameters."""
        outputs = outputs_of(self.model, inputs, self.request.forward_fn)
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"`model` must return a tensor of outputs, got {type(outputs).__name__}; "
                "set `forward_fn` to a function of (model, inputs) that picks it."
            )
        if outputs.shape[:1] != (count,):
            raise ValueError(
                f"`model` must return one row of outputs a sample: expected [{count}, ...] for {count} inputs, "
                f"got {list(outputs.shape)}."
            )
        if not outputs.requires_grad:
            raise ValueError(
                "`model` must return outputs that depend on its trainable parameters by autograd."
            )
        return outputs

    # --- What is known of the model, and what has to be found out

    def _recall(self) -> None:
        """Remember what is known of the model, or run it on the first sample alone, for sizes and outputs."""
        known = None if self.sharded else _KNOWN.get(self.model)
        if known is not None and known.call == self.known.call:
            self.known = known
            return
        outputs = self._outputs(_first(self.inputs), 1)
        self.first = outputs.detach()
        self.known.outputs = outputs.numel()
        graph = Graph(outputs, self.parameters)
        self.known.alone = graph.signature
        if not graph.opaque:
            uses = map(graph.edge, graph.uses(set()))
            sizes = [shape_of(use).numel() for use in uses]
            self.known.elements = max(sum(sizes), 3 * max(sizes, default=0))
        if not self.sharded:
            _KNOWN[self.model] = self.known

    def _affordable(self) -> int:
        """Return how many samples to take at once: as many as keep the uses' gradients in 96 MB, and each in 32.

        Memory for larger ones is given back to the system at once. To get it anew takes as long as to compute with it.
        There are always 32 samples, and in float64 twice as many megabytes.
        """
        labels = self.request.labels
        scores = {"sampled": self.request.mc_samples, "exact": self.known.outputs, "empirical": 1}
        held = min(SCORES, scores[labels]) * self.known.elements
        samples = 12 * BLOCK // max(1, held)
        return min(max(samples, 32), 512)

    def _plan(
        self,
        graph: Graph,
        n: int,
    ) -> Plan | None:
        """Return where weights meet samples in a graph, and which sample each row belongs to: known, or shown now."""
        if graph.opaque:
            return None
        plan = self.known.plans.find(graph, n)
        if plan is not None:
            return plan
        if n == 1:
            plan = plan_of_one(graph)
            return plan and self.known.plans.keep(plan)
        rounds = 1 if self.sharded else 4
        before = self.known.plans.like(graph.signature, n)
        prover = Prover(graph, n, rounds=rounds, alone=self.known.alone, before=before)
        plan = prover.plan()
        for name, p in self.parameters.items():
            if p.grad is not None:  # by a backward pass inside of an operation, unseen in the graph
                p.grad = None
                plan.unshown[name] = "a use that autograd does not see"
        if not plan.unshown:
            plan.others = other_uses(graph, plan)
        if self.sharded:  # what is computed from a weight has no graph once the weight is a shard
            for at in plan.places:
                if at.way is None:
                    plan.unshown |= dict.fromkeys(at.names, "a weight that is computed from it")
            return plan
        return self.known.plans.keep(plan)

    def _mixes(
        self,
        inputs: Any,
        graph: Graph,
        plan: Plan | None,
    ) -> bool:
        """Whether the outputs of a sample depend on its batch, or on its place in it: looked at if that is unknown."""
        if not self.known.mixes:
            if self.looked or (plan is not None and plan.seen):
                return False
            self.looked = True
            self.known.mixes = self._seen_to_mix(inputs, graph)
            if not self.known.mixes:
                if plan is not None:
                    plan.seen = True
                return False
        if self.sharded:  # processes would not run the same passes any more
            raise ValueError(
                "`model` must be unsharded: its outputs for a sample depend on the others of its batch, on its place "
                "in it, or on chance."
            )
        warn(
            "The model's outputs for a sample depend on the others of its batch, on its place in it, or on chance; "
            "each sample is measured alone."
        )
        return True

    def _seen_to_mix(
        self,
        inputs: Any,
        graph: Graph,
    ) -> bool:
        """Whether samples have other outputs elsewhere: the first alone, all where the next one was, and in parts.

        The parts have 1, 2, 4, … samples, the last ones first. So no place and no neighbour matters. Where a part of
        a network has float32, outputs in float64 differ by its rounding.
        """
        outputs = graph.outputs
        rounded = {torch.float32} & graph.dtypes | {outputs.dtype}
        differ = partial(_differ, eps=max(torch.finfo(dtype).eps for dtype in rounded))
        first = self.first
        if first is None:
            first = self._outputs_alone(_first(inputs), 1)
        if differ(first, outputs[:1]):
            return True
        changes: list[Callable[[Tensor], Tensor]] = [_turned]
        stop = len(outputs)
        while stop > 0:
            start = max(0, stop - 2 ** (len(changes) - 1))
            changes.append(itemgetter(slice(start, stop)))
            stop = start
        for change in changes:
            expected = change(outputs)
            if differ(self._outputs_alone(take(inputs, change), len(expected)), expected):
                return True
        return False

    def _outputs_alone(
        self,
        inputs: Any,
        count: int,
    ) -> Tensor:
        """Return the outputs, and keep nothing for a backward pass, unless the model runs one of its own."""
        try:
            # With gradients on, as hooks inside of a network need it.
            with saved_tensors_hooks(_forgotten, _forgotten):
                return self._outputs(inputs, count).detach()
        except Exception:  # as of forces, which are gradients of an energy; others come again
            return self._outputs(inputs, count).detach()

    # --- What the graph does not show

    def _hides(
        self,
        graph: Graph,
        plan: Plan | None,
    ) -> bool:
        """Whether the graph of a batch does not show which gradients belong to which sample, with a warning."""
        if plan is None:
            hidden = dict.fromkeys(self.parameters, graph.opaque)
        else:
            hidden = dict(plan.unshown)
            for number, name in plan.others:
                if CHECKPOINT in fetched_by(graph.nodes[number]):  # which no second sample gets
                    hidden[name] = graph.kind(number)
        if not hidden:
            return False
        reason = hidden[min(hidden)]
        text = f"The graph does not show which sample gradients of {some_of(hidden)} belong to ({reason})"
        if self.sharded:
            raise ValueError(f"{text}; `model` must be unsharded to measure samples one by one.")
        warn(
            f"{text}: each sample takes a backward pass of its own; measure fewer where that is too slow "
            "(`max_samples`)."
        )
        return True

    def _gradients_of_one(
        self,
        graph: Graph,
        score: Tensor,
    ) -> ParamDict:
        """Return the gradients of the only sample of a forward pass, by plain autograd: right for any model."""
        found: dict[str, Tensor | None] = {}
        if self.sharded:
            # By the weights that were gathered: one to the shards would add up the samples of all processes.
            leaves = [graph.edge(number) for number in graph.leaves.values()]
            found.update(zip(graph.leaves, pulled_back(graph.outputs, leaves, score), strict=True))
        else:
            self.model.zero_grad()
            # Not `autograd.grad`, which reentrant checkpointing refuses.
            graph.outputs.backward(score, retain_graph=True)
            found.update((name, p.grad) for name, p in self.parameters.items())
            self.model.zero_grad()
        return {name: g.to_dense().clone()[None] for name, g in found.items() if g is not None}


def _check_modules(
    model: nn.Module,
    modules: list[nn.Module],
) -> None:
    """Raise a ``ValueError`` if a module mixes the samples."""
    for module in modules:
        if not isinstance(module, _BatchNorm):
            continue
        if module.training or module.running_mean is None:
            (name,) = [name for name, part in model.named_modules() if part is module]
            raise ValueError(
                f"BatchNorm {name!r} is in train mode, or has no other, and normalises with the "
                "statistics of the batch: it mixes the samples, and none has a gradient of its own; call "
                "`model.eval()` first, or measure inside `observing(model)`, with `track_running_stats=True`."
            )


def _check_targets(
    targets: Any,
    n: int,
) -> None:
    """Raise a ``ValueError`` if targets are not those of ``n`` samples."""
    if targets is None:
        return
    if not isinstance(targets, Tensor):
        got = targets if isinstance(targets, str) else type(targets)
        raise ValueError(f"`targets` must be a tensor, got {got!r}.")
    if len(targets) != n:
        raise ValueError(f"`targets` must have one entry per sample ({n}), got {len(targets)}.")


def check_parameters(parameters: dict[str, nn.Parameter]) -> None:
    """Raise a ``ValueError`` if there are none, or complex ones."""
    if not parameters:
        raise ValueError("`model` must have a parameter with `requires_grad=True`, got none.")
    for name, p in parameters.items():
        if p.is_complex():
            raise ValueError(
                f"`model` must have real parameters where it is trained, got complex {name!r}."
            )


def _forgotten(saved: Any) -> Any:
    """Keep nothing of what an operation saves."""
    return None


def _first(inputs: Any) -> Any:
    """Return the first sample, as a batch."""
    return take(inputs, itemgetter(slice(1)))


def _turned(x: Tensor) -> Tensor:
    """Return rows in another order: each takes the place of the next."""
    return torch.cat([x[-1:], x[:-1]])


def _differ(
    found: Tensor,
    expected: Tensor,
    eps: float,
) -> bool:
    """Whether outputs are others, by more than rounding; not if they are NaN."""
    largest = partial(torch.linalg.vector_norm, ord=math.inf)
    difference = largest(found.detach() - expected.detach())
    return bool(difference > eps**0.5 * largest(expected))


def _usable(x: Tensor) -> Tensor:
    """Return an input that autograd takes, in full precision."""
    x = x.detach()
    return at_least_float32(x.clone() if x.is_inference() else x)
