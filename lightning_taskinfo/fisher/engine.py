"""Which engine serves which parameter, chunk by chunk; squared gradients go into a :class:`Sink`."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_taskinfo._arguments import check_counts
from lightning_taskinfo._batches import call_on, outputs_of, sample_count, take, with_targets
from lightning_taskinfo._observe import ParamDict, full_precision, observing_parts, parts
from lightning_taskinfo._warn import warn
from lightning_taskinfo.fisher.backpack import backpack_gradients
from lightning_taskinfo.fisher.findings import Findings, by_name, differ, disjoint, proofs, recall, remember, sizes_of
from lightning_taskinfo.fisher.hooks import Captured, capture, find_layouts, moves_rows
from lightning_taskinfo.fisher.layers import BLOCK, Layout, Use
from lightning_taskinfo.fisher.per_sample import Forward, looped_gradients, vmapped_gradients
from lightning_taskinfo.fisher.sharded import gathered_parameters, resharding, sharded
from lightning_taskinfo.functional.likelihood import Labels, Likelihood, as_likelihood, output_scores

Engine: TypeAlias = Literal["auto", "hooks", "per_sample", "loop", "backpack"]
OPTIONS = {
    "labels": ("sampled", "exact", "empirical"),
    "engine": ("auto", "hooks", "per_sample", "loop", "backpack"),
}
SCORES = 16  # output scores whose gradients are held at once


class Sink(Protocol):
    """Where squared gradients go: the quantity that is measured."""

    def add_use(self, name: str, samples: slice, use: Use, slot: str, gradients: list[Tensor]) -> None:
        """Take one use of a parameter, and the gradients by its output for each score."""
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
                raise ValueError(f"`{name}` must be one of {', '.join(options)}, got {getattr(self, name)!r}.")
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


def measure(model: nn.Module, inputs: Any, targets: Tensor | None, request: Request, sink: Sink) -> dict[str, str]:
    """Send the squared gradients of every sample into ``sink`` and return which engine served which parameter."""
    observed, n = parts(model), sample_count(inputs)
    if any(isinstance(module, _BatchNorm) and module.training for module in observed.modules):
        name = next(name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training)
        raise ValueError(
            f"BatchNorm {name!r} is in train mode, where it mixes the samples of a batch and none has a "
            "gradient of its own; call `model.eval()` first, or measure inside `observing(model)`."
        )
    inputs, targets = with_targets(model, inputs, targets, request.forward_fn)
    if targets is not None and not isinstance(targets, Tensor):
        raise ValueError(f"`targets` must be a tensor, got {targets if isinstance(targets, str) else type(targets)!r}.")
    if targets is not None and len(targets) != n:
        raise ValueError(f"`targets` must have one entry a sample ({n}), got {len(targets)}.")
    if request.forward_fn is None:
        call_on(model, inputs)  # before anything is watched
    with observing_parts(observed), full_precision(observed), resharding(model):
        return _Measurement(model, take(inputs, _usable), targets, request, sink).run(n)


class _Measurement:
    """One measurement: what is asked, and what has been found out about the model."""

    def __init__(self, model: nn.Module, inputs: Any, targets: Tensor | None, request: Request, sink: Sink) -> None:
        self.model, self.inputs, self.targets, self.request, self.sink = model, inputs, targets, request, sink
        self.parameters = gathered_parameters(model)
        if not self.parameters:
            raise ValueError("`model` must have a parameter with `requires_grad=True`, got none.")
        if unreal := [name for name, p in self.parameters.items() if p.is_complex()]:
            raise ValueError(f"`model` must have real parameters where it is trained, got complex {unreal[0]!r}.")
        self.fallback: str = request.engine if request.engine in ("loop", "backpack") else "per_sample"
        first = "hooks" if request.engine in ("auto", "hooks") else self.fallback
        self.engines = dict.fromkeys(self.parameters, first)
        self.layouts: list[Layout | None] = []
        # Shards are gathered by all processes in step: what one of them happens to know must not change its passes.
        self.known: Findings | None = recall(model, inputs) if first == "hooks" and not sharded(model) else None
        self.probe: Captured | None = None  # a pass over a few samples, where nothing is known
        self.compared = self.mixing = False

    def run(self, n: int) -> dict[str, str]:
        """Measure ``n`` samples chunk by chunk and return which engine served which parameter."""
        if self.known is None:
            self.probe = self._probe(min(n, self.request.chunk_size or n))
        step = self.request.chunk_size or -(-n // max(1, round(n / self._affordable())))  # chunks of about one size
        for start in range(0, n, step):
            self._chunk(slice(start, start + step))
        return self.engines

    def _forward(self, inputs: Any) -> Tensor:
        return self.request.forward(self.model, inputs)

    def _few(self, few: int) -> Any:
        return take(self.inputs, lambda x: x[:few] if few <= len(x) else x[torch.arange(few, device=x.device) % len(x)])

    def _probe(self, chunk: int) -> Captured:
        """Run the model on a few samples, not as many as a chunk has."""
        few = 2 if chunk == 3 else 3
        probe = capture(lambda: self._forward(self._few(few)), self.parameters, confirm=False)
        if probe.outputs.shape[0] != few:
            raise ValueError(
                f"`model` must return one row of outputs a sample: expected [{few}, ...] for {few} inputs, "
                f"got {list(probe.outputs.shape)}."
            )
        return probe

    def _affordable(self) -> int:
        """Return how many samples to take at once: as many as keep the layers' gradients in about 32 MB."""
        sizes = self.known.sizes if self.known else sizes_of(self.probe, self.parameters)  # type: ignore[arg-type]
        scores = {"sampled": self.request.mc_samples, "exact": sizes.outputs, "empirical": 1}
        held = min(SCORES, scores[self.request.labels]) * sizes.uses
        few = 32 * BLOCK // sizes.shared
        return max(1, min(512, few, max(32, 4 * BLOCK // max(1, held))))

    def _chunk(self, samples: slice) -> None:
        inputs = take(self.inputs, itemgetter(samples))
        targets = None if self.targets is None else self.targets[samples]
        captured, outputs = self._pass(inputs)
        hooked = captured.lay_out(self.layouts) if captured else set()
        hooked &= {name for name, engine in self.engines.items() if engine == "hooks"}
        if captured and hooked:
            hooked -= self._disproved(captured, hooked)
        left = self.engines.keys() - hooked
        if left and self.request.engine == "hooks":
            raise ValueError(f"`engine='hooks'` does not cover {', '.join(sorted(left))}; use `engine='auto'`.")
        if left and sharded(self.model):
            raise ValueError(f"Hooks do not cover {', '.join(sorted(left))}; other engines need unsharded weights.")
        self.engines.update(dict.fromkeys(left, self.fallback))
        for scores, last in _groups(self.request.scores(outputs, targets), SCORES):
            if captured and hooked:
                self._from_uses(captured, hooked, samples, scores, last)
            for score in scores if left else ():
                self._from_gradients(inputs, score, set(left), samples)

    def _disproved(self, captured: Captured, names: set[str]) -> set[str]:
        """Return the parameters whose rows are not those of the samples, and say so once.

        What was shown before holds again if shapes and operations are the same, and none of them moves rows.
        """
        shapes = tuple(use.shape for use in captured.uses)
        signature = (tuple(captured.graph), shapes, frozenset(names))
        if signature in proofs(self.model):
            return set()
        failed = captured.disproved(names)
        if not failed and not moves_rows(captured.graph):
            proofs(self.model).add(signature)
        elif failed and self.request.engine == "auto":
            layers = sorted({name.rpartition(".")[0] or name for name in failed})
            some = ", ".join(layers[:3]) + f" and {len(layers) - 3} more" * (len(layers) > 3)
            warn(
                f"The rows that {some} worked on could not be told apart by sample, as where a batch is sorted, "
                "routed or masked; a slower engine measures these layers."
            )
        return failed

    def _pass(self, inputs: Any) -> tuple[Captured | None, Tensor]:
        """Run the model on a chunk; return what the hooks saw, if they serve anything, and the outputs."""
        captured = None
        if "hooks" in self.engines.values() and not self.mixing:
            captured = capture(lambda: self._forward(inputs), self.parameters)
            outputs = captured.outputs
        else:
            with torch.no_grad():
                outputs = self._forward(inputs)
        if not self.compared:
            self._compare(captured, outputs)
        if not self.mixing:
            return captured, outputs
        with torch.no_grad():
            singles = (take(inputs, itemgetter(slice(n, n + 1))) for n in range(sample_count(inputs)))
            return None, torch.cat([self._forward(single) for single in singles])

    def _compare(self, captured: Captured | None, outputs: Tensor) -> None:
        """Find out where the samples are, and whether the outputs of a sample depend on the batch it is in."""
        if self.known and captured and self.known.fit(captured):
            self.layouts = [*self.known.layouts]
            with torch.no_grad():
                few = self._forward(self._few(3 if len(outputs) == 2 else 2))
        else:
            probe = self.probe or self._probe(len(outputs))
            few, self.layouts = probe.outputs, find_layouts(probe, captured) if captured else []
            if captured:
                remember(self.model, self.inputs, sizes_of(probe, self.parameters), self.layouts, captured)
        self.compared, self.probe = True, None
        self.mixing = differ(few.detach(), outputs.detach())
        if self.mixing:
            warn(
                "The model's outputs for a sample depend on the others of its batch; each is measured alone.",
            )

    def _from_uses(self, captured: Captured, names: set[str], samples: slice, scores: list[Tensor], last: bool) -> None:
        by_use = zip(captured.uses, captured.backward(scores, retain_graph=not last), strict=True)
        gradients = {id(use): [*by_score] for use, by_score in by_use if by_score is not None}
        for name, uses in by_name(captured).items():
            reached = [(use, slot) for use, slot in uses if id(use) in gradients]
            if name not in names or not reached:
                continue
            if disjoint(reached):
                for use, slot in reached:
                    self.sink.add_use(name, samples, use, slot, gradients[id(use)])
            else:  # uses add up before they are squared
                for i in range(len(scores)):
                    parts = [_whole(use, slot, gradients[id(use)][i], self.parameters[name]) for use, slot in reached]
                    self.sink.add_gradients(name, samples, torch.stack(parts).sum(0))

    def _from_gradients(self, inputs: Any, score: Tensor, names: set[str], samples: slice) -> None:
        for block, gradients in self._gradients(inputs, score, names):
            for name, g in gradients.items():
                self.sink.add_gradients(name, slice(samples.start + block, samples.start + block + len(g)), g.detach())

    def _gradients(self, inputs: Any, score: Tensor, names: set[str]) -> Iterator[tuple[int, ParamDict]]:
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
                some = ", ".join(sorted(names)[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
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


def _whole(use: Use, slot: str, gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return a use's per-sample gradients as gradients of the whole parameter."""
    part, rows = use.grads(slot, gradient), use.slots[slot].rows
    if rows is None:
        return part
    whole = part.new_zeros(len(part), *parameter.shape)
    whole[:, rows] = part
    return whole


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
