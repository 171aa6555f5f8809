"""One forward, one backward to the layers' outputs, and every use of a parameter on the way.

Calls are observed where parameters are used, at the level of ``torch.nn.functional``, rather than on modules: a tied
weight, a module called twice, a raw parameter and the inside of ``nn.MultiheadAttention`` are then seen like
everything else. What was seen is checked against the autograd graph, which knows of every use: a parameter with a use
that was not seen, or not understood, is left to the per-sample engine.
"""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lightning_taskinfo.fisher.calls import READERS
from lightning_taskinfo.fisher.layers import Layout, Slot, Use

MOVING = re.compile("Index|Gather|Scatter|Sort|Topk|Flip|Masked(?!Fill|Softmax)|Take|Put|Roll|Unique|Kthvalue")


@dataclass
class Captured:
    """A forward pass: its outputs, the uses that were seen, and the parameters all of whose uses were seen.

    ``graph`` has the kinds of the nodes of the autograd graph, if it was looked at.
    """

    outputs: Tensor
    uses: list[Use]
    seen: set[str]
    graph: list[type]

    def backward(self, scores: list[Tensor], *, retain_graph: bool) -> list[tuple[Tensor, ...] | None]:
        """Return the gradients by each use's output, one for each score of the outputs."""
        if not self.uses:
            return []
        by_use = self._batched(scores) if len(scores) > 1 else None
        if by_use is None:
            last = len(scores) - 1
            passes = [self._pass(score, retain_graph or i < last) for i, score in enumerate(scores)]
            by_use = [None if bs[0] is None else bs for bs in zip(*passes, strict=True)]
        return [
            None if bs is None else tuple(b.reshape(use.shape) for b in bs)
            for use, bs in zip(self.uses, by_use, strict=True)
        ]

    def _pass(self, score: Tensor, retain_graph: bool, *, batched: bool = False) -> tuple[Tensor | None, ...]:
        edges = [use.edge for use in self.uses]
        return torch.autograd.grad(
            self.outputs, edges, score, retain_graph=retain_graph, allow_unused=True, is_grads_batched=batched
        )

    def _batched(self, scores: list[Tensor]) -> list[tuple[Tensor, ...] | None] | None:
        """Return the gradients from one pass for all scores; None where vmap cannot run an operation of the graph."""
        try:
            with warnings.catch_warnings():  # operations that it takes one by one are no slower than without it
                warnings.filterwarnings("ignore", message="There is a performance drop")
                stacked = self._pass(torch.stack(scores), True, batched=True)
        except Exception:  # of any type, in an operation of the user's; if it is no matter of vmap, it comes again
            return None
        return [None if b is None else b.unbind() for b in stacked]

    def lay_out(self, layouts: list[Layout | None]) -> set[str]:
        """Say where the samples are, and return the parameters that can be served."""
        if len(layouts) != len(self.uses):  # the model took another path than in the probe
            return set()
        served = set(self.seen)
        n = len(self.outputs)
        for use, layout in zip(self.uses, layouts, strict=True):
            use.layout = layout or Layout()
            known = layout is not None and use.shape[layout.axis : layout.axis + 1] == (n * layout.repeat,)
            if not known or use.spoiled or not use.fits():
                served -= {slot.name for slot in use.slots.values()}
        return served

    def disproved(self, names: set[str]) -> set[str]:
        r"""Return the parameters of which it is not shown that row ``n`` of each use belongs to sample ``n``.

        Backpropagate :math:`\sum_n u_n` and :math:`\sum_n a_n u_n` with any scores :math:`u_n` and weights
        :math:`a_n` that differ: if only sample ``n`` depends on row ``n``, the second gradient is :math:`a_n` times
        the first there. Rows without a gradient count for nothing.
        """
        n = len(self.outputs)
        generator = torch.Generator().manual_seed(n)
        score = torch.randn(self.outputs.shape, generator=generator, dtype=torch.float64, device="cpu").to(self.outputs)
        weights = torch.exp2(torch.randperm(n, generator=generator, device="cpu") * (8 / n)).to(self.outputs)
        weighted = score * weights.view(-1, *[1] * (score.dim() - 1))
        pairs = self.backward([score, weighted], retain_graph=True)
        largest = max((float(pair[0].abs().max()) for pair in pairs if pair and pair[0].numel()), default=0.0)
        failed: set[str] = set()
        for use, pair in zip(self.uses, pairs, strict=True):
            wanted = {slot.name for slot in use.slots.values()} & names
            if pair is None or not wanted or wanted <= failed:
                continue
            plain, scaled = (use.layout.samples_first(b).reshape(n, -1) for b in pair)
            eps = torch.finfo(plain.dtype).eps
            norms = torch.linalg.vector_norm(plain, dim=1)
            off = torch.linalg.vector_norm(scaled - weights.view(-1, 1) * plain, dim=1)
            allowed = weights * (eps**0.5 * norms + 32 * eps * largest)
            if not bool((off <= allowed).all()):
                failed |= wanted
        return failed


def capture(forward: Callable[[], Tensor], parameters: dict[str, nn.Parameter], *, confirm: bool = True) -> Captured:
    """Run ``forward`` and note every use of ``parameters`` that the layers understand.

    ``confirm`` checks them against the autograd graph, without which nothing may be served.

    Raises:
        ValueError: If the outputs are not a tensor that depends on the parameters.
    """
    with _Recorder(parameters) as recorder:
        outputs = forward()
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"`model` must return a tensor of outputs, got {type(outputs).__name__}; "
            "set `forward_fn` to a function of (model, inputs) that picks it."
        )
    if not outputs.requires_grad:
        raise ValueError("`model` must return outputs that depend on its trainable parameters by autograd.")
    consumers = _consumers(outputs) if confirm else Counter[Node]()
    seen = recorder.confirmed(outputs, consumers) if confirm else set()
    return Captured(outputs, recorder.uses, seen, [*map(type, consumers)])


def moves_rows(graph: list[type]) -> bool:
    """Whether an operation of the graph moves rows to places that depend on data."""
    return any(MOVING.search(kind.__name__) for kind in {*graph})


def find_layouts(probe: Captured, captured: Captured) -> list[Layout | None]:
    """Find out where the samples are in each use's output, from passes over different numbers of samples.

    The axis that grows with the number of samples holds them. Where each has several entries there, backward passes
    from the first and from the last sample of the probe show which: the gradient is zero wherever another sample is.
    The entry is None where this does not tell.
    """
    if len(probe.uses) != len(captured.uses):  # the model took another path
        return [None] * len(captured.uses)
    few, many = len(probe.outputs), len(captured.outputs)
    pairs = zip(probe.uses, captured.uses, strict=True)
    layouts = [_growing_axis(a.shape, b.shape, few, many) for a, b in pairs]
    if any(layout and layout.repeat > 1 for layout in layouts):
        first, last = (_only(probe, n) for n in (0, few - 1))
        layouts = [layout and _sorted_out(layout, *b) for layout, *b in zip(layouts, first, last, strict=True)]
    return layouts


def _growing_axis(small: torch.Size, large: torch.Size, few: int, many: int) -> Layout | None:
    if len(small) != len(large):
        return None
    grown = [axis for axis, sizes in enumerate(zip(small, large, strict=True)) if sizes[0] != sizes[1]]
    if len(grown) != 1 or small[grown[0]] % few or small[grown[0]] * many != large[grown[0]] * few:
        return None
    return Layout(grown[0], small[grown[0]] // few)


def _only(probe: Captured, n: int) -> list[Tensor | None]:
    """Return the gradients of one sample by each use's output."""
    score = torch.zeros_like(probe.outputs)
    score[n] = torch.linspace(0.5, 1.5, score[n].numel(), dtype=score.dtype, device=score.device).view_as(score[n])
    return [None if b is None else b[0] for b in probe.backward([score], retain_graph=True)]


def _sorted_out(layout: Layout, first: Tensor | None, last: Tensor | None) -> Layout | None:
    """Return the one layout for which both gradients lie within their sample, if it is only one."""
    if layout.repeat == 1:
        return layout
    if first is None or last is None:
        return None
    possible = []
    for candidate in (layout, replace(layout, interleaved=True)):
        elsewhere = candidate.samples_first(first)[1:], candidate.samples_first(last)[:-1]
        if not any(part.count_nonzero() for part in elsewhere):
            possible.append(candidate)
    return possible[0] if len(possible) == 1 else None  # a dead branch fits both, and tells nothing


class _Recorder(TorchFunctionMode):
    """Notes every operation with a reader that is called with one of the parameters."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.whole = {id(p): (Slot(name, tuple(p.shape)), None) for name, p in parameters.items()}
        self.parameters = parameters
        self.uses: list[Use] = []
        self.entered: dict[str, list[Node | None]] = defaultdict(list)  # the node that each use enters through
        self.hidden: set[str] = set()  # used where autograd does not look

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return _open_attention(*args, **kwargs)
        read = READERS.get(func)
        call = read(*args, **kwargs) if read else None
        if call is None:
            return func(*args, **kwargs)
        saved = tuple([(x.detach(), x._version) for x in call.saved])
        output = func(*args, **kwargs)
        found = [(key, *at) for key, p in call.parameters.items() if p is not None and (at := self.find(p))]
        if found and not output.requires_grad:
            self.hidden.update(slot.name for _, slot, _ in found)
        elif found and (computed := written(output)) is not None:
            for _, slot, node in found:
                self.entered[slot.name].append(node)
            slots = {key: slot for key, slot, _ in found}
            self.uses.append(call.kind(slots, get_gradient_edge(computed), output.shape, saved, call.config))
        return output

    def find(self, tensor: Tensor) -> tuple[Slot, Node | None] | None:
        """Return which parameter this is, or which rows of one, and the node of the view that took them."""
        if whole := self.whole.get(id(tensor)):
            return whole
        base = tensor._base
        if base is None or not (whole := self.whole.get(id(base))) or not tensor.requires_grad:
            return None
        if not tensor.is_contiguous() or tensor.shape[1:] != base.shape[1:]:
            return None
        first = (tensor.storage_offset() - base.storage_offset()) // max(1, base[0].numel())
        return Slot(whole[0].name, tuple(tensor.shape), slice(first, first + len(tensor))), tensor.grad_fn

    def confirmed(self, outputs: Tensor, consumers: Counter[Node]) -> set[str]:
        """Return the parameters whose uses in the graph are exactly those that were noted."""
        if any(kind.__name__ == "CheckpointFunctionBackward" for kind in {*map(type, consumers)}):
            return set()  # reentrant checkpointing allows a backward pass to the parameters only
        nodes = {id(node.variable): node for node in consumers if hasattr(node, "variable")}
        cut_off = {
            slot.name
            for use in self.uses
            if use.edge.node not in consumers and use.edge.node is not outputs.grad_fn
            for slot in use.slots.values()
        }
        return {
            name
            for name, p in self.parameters.items()
            if name not in self.hidden and name not in cut_off and self._all_seen(name, nodes.get(id(p)), consumers)
        }

    def _all_seen(self, name: str, node: Node | None, consumers: Counter[Node]) -> bool:
        """Whether a parameter, with this node in the graph, is used there as often as it was noted."""
        views = Counter(view for view in self.entered[name] if view is not None)
        direct, in_graph = self.entered[name].count(None) + len(views), 0 if node is None else consumers[node]
        return direct == in_graph and all(consumers[view] == uses for view, uses in views.items())


def written(output: Tensor) -> Tensor | None:
    """Return the tensor whose gradient is that of an operation's output, whatever happens to the output later.

    An output that is a view of what was computed, as of a linear layer on sequences, loses its place in the graph when
    it is changed in place; the tensor behind it does not.
    """
    base = output._base
    if base is None or isinstance(base, nn.Parameter):
        return output
    whole = base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
    return base if whole else None


def _consumers(outputs: Tensor) -> Counter[Node]:
    """Count, for each node of the graph, the edges that lead into it."""
    consumers: Counter[Node] = Counter()
    stack = [outputs.grad_fn]
    while stack:
        for node, _ in stack.pop().next_functions:  # type: ignore[union-attr]
            if node is not None:
                consumers[node] += 1
                if consumers[node] == 1:
                    stack.append(node)
    return consumers


# torch's own attention, with its first line (which hands the whole call over as one) switched off.
_open_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
