r"""One measurement, from a batch to per-sample gradients.

The Fisher information is a mean over samples of squared gradients, so every sample's own gradient is needed, and a
plain backward pass only has their sum. A measurement goes over the batch in chunks. For each chunk:

1. **Forward.** The model runs once, in eval mode and in float32 or better. Its autograd graph knows every use of
   every parameter.
2. **Plan** (:mod:`~lightning_taskinfo.fisher.capture`). In the graph, weights meet samples in certain operations, the
   *uses*. Where they are, and which sample each row of their outputs belongs to, is shown by a few backward passes.
   What was shown holds for every graph of the same operations and shapes, unless an operation moves rows by their
   values; it is kept with the model, so that later measurements do without these passes.
3. **Scores.** The likelihood turns outputs into scores: gradients of log-probabilities by the outputs. Labels are the
   dataset's, drawn from the model, or all of them by their probability.
4. **Backward.** Each score is backpropagated to the outputs of the uses, no further: no weight gradient of the whole
   batch is formed.
5. **Terms** (:mod:`~lightning_taskinfo.fisher.terms`, :mod:`~lightning_taskinfo.fisher.ops`). Input and output
   gradient of a use give each sample's gradient of its weight, or only its norm. A weight that was computed from
   parameters hands it on to them, by a backward pass over that part of the graph alone.
6. **Accumulate** (:mod:`~lightning_taskinfo.fisher.accumulators`). Norms, the diagonal or inner products are what
   remains of the gradients.

For a chunk of one sample nothing has to be shown: all rows are its own. Parameters whose uses cannot be told apart
by sample take a slower engine (:mod:`~lightning_taskinfo.fisher.fallback`); one warning names those that need a
backward pass for each sample. Samples that depend on the others of their batch are measured alone.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_taskinfo._batches import (
    call_on,
    outputs_of,
    sample_count,
    take,
    tensors,
    with_targets,
)
from lightning_taskinfo._observe import ParamDict, full_precision, observing_once, parts
from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo._warn import warn
from lightning_taskinfo.fisher.backpack import backpack_gradients
from lightning_taskinfo.fisher.capture import Graph, Plan, Prover, plan_of_one
from lightning_taskinfo.fisher.fallback import Forward, looped_gradients, vmapped_gradients
from lightning_taskinfo.fisher.ops import BLOCK, Other
from lightning_taskinfo.fisher.sharded import gathered_parameters, resharding, sharded
from lightning_taskinfo.fisher.terms import Contribution, Term, apart, terms
from lightning_taskinfo.fisher.vjp import Edge, shape_of
from lightning_taskinfo.functional.likelihood import (
    Labels,
    Likelihood,
    as_likelihood,
    output_scores,
)

Engine: TypeAlias = Literal["auto", "hooks", "per_sample", "loop", "backpack"]
OPTIONS = {
    "labels": ("sampled", "exact", "empirical"),
    "engine": ("auto", "hooks", "per_sample", "loop", "backpack"),
}
SCORES = 16  # output scores whose gradients are held at once
PLANS = 8  # kept for a model, as for the last chunk of a batch, which is smaller


class Accumulator(Protocol):
    """Where gradients go: the quantity that is measured."""

    def add(self, name: str, samples: slice, contribution: Contribution) -> None:
        """Take what the uses of a parameter contribute, for some samples and all scores."""
        ...

    def add_gradients(self, name: str, samples: slice, gradients: Tensor) -> None:
        """Take the gradients ``[n, *shape]`` of some samples for one score."""
        ...


@dataclass(frozen=True)
class Request:
    """How to measure; see :func:`lightning_taskinfo.fisher.fisher_trace` for what the fields mean."""

    labels: Labels = "sampled"
    likelihood: str | Likelihood = "categorical"
    mc_samples: int = 1
    generator: Generator | None = None
    engine: Engine = "auto"
    chunk_size: int | None = None
    forward_fn: Forward | None = None

    def __post_init__(self) -> None:
        for name, options in OPTIONS.items():
            if getattr(self, name) not in options:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(options)}, got {getattr(self, name)!r}."
                )
        check_counts(mc_samples=self.mc_samples, chunk_size=self.chunk_size)
        as_likelihood(self.likelihood)

    def forward(self, model: nn.Module, inputs: Any) -> Tensor:
        """Run the model the way its user does."""
        return outputs_of(model, inputs, self.forward_fn)

    def scores(self, outputs: Tensor, targets: Tensor | None) -> Iterator[Tensor]:
        """Yield the output scores of a chunk, after checking that outputs and targets fit the likelihood."""
        likelihood = as_likelihood(self.likelihood)
        likelihood.check(outputs, targets)
        return output_scores(
            outputs,
            targets,
            labels=self.labels,
            likelihood=likelihood,
            mc_samples=self.mc_samples,
            generator=self.generator,
        )


class Sizes(NamedTuple):
    """How large a measurement gets, for one sample: elements of all uses' outputs, and of the model's outputs."""

    uses: int
    outputs: int


@dataclass
class Known:
    """What is known of a model on samples of one shape, called in one way: sizes, the graph of one sample, and plans.

    A ``forward_fn`` can mix the samples before they reach the model, where no graph shows it: what was found with one
    says nothing about another.
    """

    sample: list[tuple[torch.Size, torch.dtype]]
    forward_fn: Callable[[], Any] | None  # a weak reference
    sizes: Sizes
    alone: list[Any]
    plans: list[Plan]

    def fits(self, inputs: Any, forward_fn: Forward | None) -> bool:
        """Whether it was found with samples of this shape, and by calling the model in this way."""
        if self.forward_fn is None or forward_fn is None:
            same_call = self.forward_fn is forward_fn
        else:
            same_call = self.forward_fn() is forward_fn
        return same_call and self.sample == _sample(inputs)


_KNOWN: "WeakKeyDictionary[nn.Module, Known]" = WeakKeyDictionary()


def measure(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    request: Request,
    accumulator: Accumulator,
) -> dict[str, str]:
    """Send the gradients of every sample into ``accumulator``; return which engine served which parameter."""
    observed, n = parts(model), sample_count(inputs)
    if any(isinstance(module, _BatchNorm) and module.training for module in observed.modules):
        name = next(
            name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training
        )
        raise ValueError(
            f"BatchNorm {name!r} is in train mode, where it mixes the samples of a batch and none has a "
            "gradient of its own; call `model.eval()` first, or measure inside `observing(model)`."
        )
    inputs, targets = with_targets(model, inputs, targets, request.forward_fn)
    if targets is not None and not isinstance(targets, Tensor):
        raise ValueError(
            f"`targets` must be a tensor, got {targets if isinstance(targets, str) else type(targets)!r}."
        )
    if targets is not None and len(targets) != n:
        raise ValueError(f"`targets` must have one entry per sample ({n}), got {len(targets)}.")
    if request.forward_fn is None:
        call_on(model, inputs)  # before anything is watched
    with observing_once(observed), full_precision(observed), resharding(model):
        return Measurement(model, take(inputs, _usable), targets, request, accumulator).run(n)


class Measurement:
    """One measurement: what is asked, and what has been found out about the model."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Tensor | None,
        request: Request,
        accumulator: Accumulator,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.targets = targets
        self.request = request
        self.accumulator = accumulator
        self.parameters = gathered_parameters(model)
        if not self.parameters:
            raise ValueError("`model` must have a parameter with `requires_grad=True`, got none.")
        if unreal := [name for name, p in self.parameters.items() if p.is_complex()]:
            raise ValueError(
                f"`model` must have real parameters where it is trained, got complex {unreal[0]!r}."
            )
        self.fallback: str = (
            request.engine if request.engine in ("loop", "backpack") else "per_sample"
        )
        self.from_graph = request.engine in ("auto", "hooks")
        self.engines = dict.fromkeys(self.parameters, "hooks" if self.from_graph else self.fallback)
        self.sharded = sharded(model)
        self.known = self._recall()
        self.alone: Tensor | None = None  # outputs of the first sample without the others
        self.mixing: bool | None = None

    def run(self, n: int) -> dict[str, str]:
        """Measure ``n`` samples and return which engine served which parameter."""
        step = min(n, self.request.chunk_size or n)
        if step > 1 and self.known is None:
            self.known = self._look()
        if self.known is not None and self.request.chunk_size is None:
            step = -(
                -n // max(1, round(n / self._affordable(self.known.sizes)))
            )  # chunks of about one size
        for start in range(0, n, step):
            self._chunk(slice(start, min(start + step, n)))
        return self.engines

    def _chunk(self, samples: slice) -> None:
        """Measure some samples: forward, plan, scores, backward, and what the uses contribute."""
        inputs = take(self.inputs, itemgetter(samples))
        targets = None if self.targets is None else self.targets[samples]
        with torch.set_grad_enabled(self.from_graph):
            outputs = self._forward(inputs)
        self._check(outputs, samples.stop - samples.start)
        graph = Graph(outputs, self.parameters) if self.from_graph else None
        plan = self._plan(graph, outputs)
        if self._is_mixing(inputs, outputs, plan) and len(outputs) > 1:
            plan = None
            outputs = self._one_by_one(inputs)
        alone = len(outputs) == 1 and graph is not None and not graph.checkpointed
        left = self._left(plan, alone)
        edges: list[Edge] = []
        uses: dict[str, list[Term]] = {}
        if graph is not None and plan is not None:
            edges, uses = terms(graph, plan)
            uses = {name: found for name, found in uses.items() if name not in left}
        retain = any(isinstance(term.use, Other) for found in uses.values() for term in found)
        if alone and retain:
            plan = None
        for scores, last in _groups(self.request.scores(outputs, targets), SCORES):
            if plan is None and alone and graph is not None:
                self._from_one(outputs, graph, samples, scores, last)
            elif plan is not None:
                gradients = backward(outputs, edges, scores, retain_graph=retain or not last)
                for name, found in uses.items():
                    contribution = Contribution(found, gradients, name in plan.apart)
                    if contribution.parts:
                        self.accumulator.add(name, samples, contribution)
            if left:
                for score in scores:
                    self._from_gradients(inputs, score, left, samples)

    def _forward(self, inputs: Any) -> Tensor:
        return self.request.forward(self.model, inputs)

    def _check(self, outputs: Any, count: int) -> None:
        """Raise a ``ValueError`` if outputs are no tensor with a row for each sample that depends on parameters."""
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
        if self.from_graph and not outputs.requires_grad:
            raise ValueError(
                "`model` must return outputs that depend on its trainable parameters by autograd."
            )

    # --- What is known of the model, and what has to be found out

    def _recall(self) -> Known | None:
        """Return what is known of the model on inputs of these shapes, if anything."""
        if self.sharded:
            return None  # all processes gather shards in step: what one happens to know must not change its passes
        known = _KNOWN.get(self.model)
        return (
            known
            if known is not None and known.fits(self.inputs, self.request.forward_fn)
            else None
        )

    def _look(self) -> Known:
        """Run the model on the first sample alone, for the sizes, and for what its outputs are without the others."""
        first = take(self.inputs, itemgetter(slice(0, 1)))
        outputs = self._forward(first)
        self._check(outputs, 1)
        self.alone = outputs.detach()
        elements = 0
        signature: list[Any] = []
        if self.from_graph:
            graph = Graph(outputs, self.parameters)
            signature = graph.signature
            elements = sum(shape_of(node).numel() for node in graph.uses(set()))
        sizes = Sizes(elements, outputs.numel())
        known = Known(_sample(self.inputs), _weakly(self.request.forward_fn), sizes, signature, [])
        if self.from_graph and not self.sharded:
            _KNOWN[self.model] = known
        return known

    def _affordable(self, sizes: Sizes) -> int:
        """Return how many samples to take at once: as many as keep the uses' gradients in about 32 MB."""
        scores = {"sampled": self.request.mc_samples, "exact": sizes.outputs, "empirical": 1}
        held = min(SCORES, scores[self.request.labels]) * sizes.uses
        return max(1, min(512, max(32, 4 * BLOCK // max(1, held))))

    def _plan(self, graph: Graph | None, outputs: Tensor) -> Plan | None:
        """Return where weights meet samples in a graph, and which sample each row belongs to: known, or shown now."""
        if graph is None or graph.checkpointed:
            return None
        if len(outputs) == 1:
            return plan_of_one(graph)
        assert self.known is not None
        for plan in self.known.plans:
            if plan.signature == graph.signature:
                return plan
        rounds = 1 if self.sharded else 4
        plan = Prover(graph, len(outputs), rounds, self.known.alone).plan()
        for name, p in self.parameters.items():
            if (
                p.grad is not None
            ):  # by a backward pass inside of an operation, where the graph does not show it
                p.grad = None
                plan.left[name] = "a use that autograd does not see"
        uses = terms(graph, plan)[1]
        plan.apart = {name for name, found in uses.items() if len(found) > 1 and apart(found)}
        if self.sharded:  # what is computed from a weight cannot be differentiated once the weight is a shard again
            for name, found in uses.items():
                if any(term.way is None or isinstance(term.use, Other) for term in found):
                    plan.left[name] = "a weight that is computed from it"
        if plan.lasting and not plan.left and not self.sharded:
            self.known.plans = [*self.known.plans[1 - PLANS :], plan]
        return plan

    def _is_mixing(self, inputs: Any, outputs: Tensor, plan: Plan | None) -> bool:
        """Whether the outputs of a sample depend on the batch it is in: looked at where nothing is known."""
        if self.mixing is None and len(outputs) > 1 and not (plan is not None and plan.seen):
            alone = self.alone
            if alone is None:
                with torch.no_grad():
                    alone = self._forward(take(inputs, itemgetter(slice(0, 1))))
            self.mixing = _differ(alone, outputs.detach())
            if self.mixing:
                warn(
                    "The model's outputs for a sample depend on the others of its batch; each is measured alone."
                )
            elif plan is not None:
                plan.seen = True
        self.alone = None  # it was the first sample of the first chunk
        return bool(self.mixing)

    def _one_by_one(self, inputs: Any) -> Tensor:
        with torch.no_grad():
            singles = (
                take(inputs, itemgetter(slice(n, n + 1))) for n in range(sample_count(inputs))
            )
            return torch.cat([self._forward(single) for single in singles])

    def _left(self, plan: Plan | None, alone: bool) -> set[str]:
        """Return the parameters that another engine has to serve for this chunk, and say so once."""
        if alone:
            return set()
        left = {*self.parameters} if plan is None else {*plan.left}
        left |= {name for name, engine in self.engines.items() if engine not in ("hooks",)}
        if left and self.request.engine == "hooks":
            raise ValueError(
                f"`engine='hooks'` does not cover {', '.join(sorted(left))}; use `engine='auto'`."
            )
        if left and self.sharded:
            raise ValueError(
                f"Hooks do not cover {', '.join(sorted(left))}; other engines need unsharded weights."
            )
        self.engines.update(dict.fromkeys(left, self.fallback))
        return left

    # --- Where gradients come from, if not from the uses

    def _from_one(
        self, outputs: Tensor, graph: Graph, samples: slice, scores: list[Tensor], last: bool
    ) -> None:
        """Take the gradients of a chunk of one sample with unusual uses, which are those of the batch."""
        reached = {name: self.parameters[name] for name in graph.leaves}
        for i, score in enumerate(scores):
            keep = not last or i < len(scores) - 1
            found = torch.autograd.grad(
                outputs, [*reached.values()], score, retain_graph=keep, allow_unused=True
            )
            gradients = {name: g for name, g in zip(reached, found, strict=True) if g is not None}
            for name, p in self.parameters.items():
                if p.grad is not None:  # see `_plan`
                    gradients[name] = gradients[name] + p.grad if name in gradients else p.grad
                    p.grad = None
            for name, g in gradients.items():
                self.accumulator.add_gradients(name, samples, g.to_dense().unsqueeze(0))

    def _from_gradients(self, inputs: Any, score: Tensor, names: set[str], samples: slice) -> None:
        for block, gradients in self._gradients(inputs, score, names):
            for name, g in gradients.items():
                some = slice(samples.start + block, samples.start + block + len(g))
                self.accumulator.add_gradients(name, some, g.detach())

    def _gradients(
        self, inputs: Any, score: Tensor, names: set[str]
    ) -> Iterator[tuple[int, ParamDict]]:
        """Yield blocks of per-sample gradients, each with the number of its first sample."""
        if self.fallback == "per_sample":
            step = max(1, 8 * BLOCK // sum(self.parameters[name].numel() for name in names))
            blocks = vmapped_gradients(self.model, self.request.forward, inputs, score, names, step)
            try:
                first = next(blocks)
            except Exception as error:  # torch.func names no type of its own for what it cannot run
                if self.request.engine == "per_sample":
                    raise
                self.fallback = "loop"
                self.engines.update(dict.fromkeys(names, "loop"))
                reason = str(error).partition("\n")[0][:80]
                some = ", ".join(sorted(names)[:3]) + f" and {len(names) - 3} more" * (
                    len(names) > 3
                )
                warn(
                    f"torch.func cannot run this model ({type(error).__name__}: {reason}): {some} take a backward pass "
                    f"for each of {len(score)} samples; measure fewer where that is too slow (`max_samples`).",
                )
            else:
                yield first
                yield from blocks
                return
        gradients = backpack_gradients if self.fallback == "backpack" else looped_gradients
        yield from gradients(self.model, self.request.forward, inputs, score, names)


def backward(
    outputs: Tensor, edges: list[Edge], scores: list[Tensor], *, retain_graph: bool
) -> list[list[Tensor] | None]:
    """Return the gradients at some places of a graph, one for each score of the outputs; None where none arrives."""
    if not edges:
        return []

    def once(score: Tensor, retain: bool, batched: bool = False) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            outputs, edges, score, retain_graph=retain, allow_unused=True, is_grads_batched=batched
        )

    if len(scores) > 1:
        try:
            with (
                warnings.catch_warnings()
            ):  # operations that vmap takes one by one are no slower than without it
                warnings.filterwarnings("ignore", message="There is a performance drop")
                stacked = once(torch.stack(scores), True, batched=True)
            return [None if b is None else [*b.unbind()] for b in stacked]
        except (
            Exception
        ):  # of any type, in an operation of the user's; if it is no matter of vmap, it comes again
            pass
    passes = [once(score, retain_graph or i < len(scores) - 1) for i, score in enumerate(scores)]
    return [None if bs[0] is None else [*bs] for bs in zip(*passes, strict=True)]


def _differ(few: Tensor, many: Tensor) -> bool:
    """Whether the rows that two batches of outputs have in common differ by more than rounding; not if they are NaN."""
    rows = min(len(few), len(many))
    largest = torch.linalg.vector_norm(many, math.inf)
    difference = torch.linalg.vector_norm(few[:rows] - many[:rows], math.inf)
    return bool(difference > torch.finfo(few.dtype).eps ** 0.5 * largest)


def _weakly(forward_fn: Forward | None) -> Callable[[], Any] | None:
    """Return a reference that keeps neither a function alive nor, through it, a model; of a method it holds nothing."""
    return None if forward_fn is None else ref(forward_fn)


def _sample(inputs: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(x.shape[1:], x.dtype) for x in tensors(inputs)]


def _groups(scores: Iterator[Tensor], size: int) -> Iterator[tuple[list[Tensor], bool]]:
    """Yield lists of at most ``size`` scores, and whether it is the last list."""
    group = list(islice(scores, size))
    while group:
        following = list(islice(scores, size))
        yield group, not following
        group = following


def _usable(x: Tensor) -> Tensor:
    """Return an input that autograd takes, in full precision."""
    x = x.detach().clone() if x.is_inference() else x.detach()
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
