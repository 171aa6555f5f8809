"""What a pass over a few samples tells about a model, kept from one measurement of the model to the next.

Which axis of a layer's output holds the samples follows from how the model computes, not from its weights or its data.
A later measurement uses what was found only where its own pass agrees in everything that can be seen: the same
parameters in the same operations, outputs that are longer along that axis and along no other, and an autograd graph
with operations of the same kinds in the same order. Whether samples depend on each other is looked at every time.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import tensors
from lightning_taskinfo.fisher.hooks import Captured
from lightning_taskinfo.fisher.layers import Layout, Slot, Use


class Sizes(NamedTuple):
    """How large a measurement gets.

    Attributes:
        uses: Elements of all layers' outputs for one sample.
        shared: Elements of the largest parameter that is used twice: its gradients are formed in full.
        outputs: Elements of the model's outputs for one sample.
    """

    uses: int
    shared: int
    outputs: int


@dataclass(frozen=True)
class Findings:
    """What a measurement has found out about a model.

    Attributes:
        sample: Shape and type of one sample of each input.
        sizes: How large a measurement gets.
        layouts: Where the samples are in the output of each use.
        uses: Kind, parameters and output shape of each use, with -1 for the number of samples.
        graph: Kinds of the nodes of the autograd graph.
    """

    sample: list[tuple[torch.Size, torch.dtype]]
    sizes: Sizes
    layouts: list[Layout]
    uses: list[tuple[type[Use], dict[str, Slot], list[int]]]
    graph: list[type]

    def fit(self, captured: Captured) -> bool:
        """Whether a pass agrees with the one that told."""
        if captured.graph != self.graph or len(captured.uses) != len(self.uses):
            return False
        n = len(captured.outputs)
        for use, (kind, slots, expected) in zip(captured.uses, self.uses, strict=True):
            shape = list(use.shape)
            if shape.count(n) != 1:  # which of them holds the samples cannot be seen
                return False
            shape[shape.index(n)] = -1
            if shape != expected or type(use) is not kind or use.slots != slots:
                return False
        return True


_KEPT: "WeakKeyDictionary[nn.Module, Findings]" = WeakKeyDictionary()

_PROOFS: "WeakKeyDictionary[nn.Module, set[Hashable]]" = WeakKeyDictionary()


def proofs(model: nn.Module) -> set[Hashable]:
    """Return operations, shapes and parameters for which the rows were shown to be the samples; a few of them."""
    known = _PROOFS.setdefault(model, set())
    if len(known) > 16:
        known.clear()
    return known


def recall(model: nn.Module, inputs: Any) -> Findings | None:
    """Return what is known of ``model`` on inputs of these shapes, if anything."""
    known = _KEPT.get(model)
    return known if known is not None and known.sample == _sample(inputs) else None


def remember(model: nn.Module, inputs: Any, sizes: Sizes, layouts: list[Layout | None], captured: Captured) -> None:
    """Keep what is known of ``model``, if every use has one entry a sample along one axis."""
    plain = [layout for layout in layouts if layout is not None and layout.repeat == 1]
    if len(plain) != len(layouts):
        return
    shapes = [list(use.shape) for use in captured.uses]
    for shape, layout in zip(shapes, plain, strict=True):
        shape[layout.axis] = -1
    uses = [(type(use), use.slots, shape) for use, shape in zip(captured.uses, shapes, strict=True)]
    _KEPT[model] = Findings(_sample(inputs), sizes, plain, uses, captured.graph)


def sizes_of(probe: Captured, parameters: Mapping[str, Tensor]) -> Sizes:
    """Return the sizes that a pass over a few samples shows."""
    few = len(probe.outputs)
    shared = (parameters[name].numel() for name, uses in by_name(probe).items() if not disjoint(uses))
    elements = sum(use.shape.numel() for use in probe.uses) // few
    return Sizes(elements, max(shared, default=1), probe.outputs.numel() // few)


def by_name(captured: Captured) -> dict[str, list[tuple[Use, str]]]:
    """Return the uses of each parameter, and the part it has in them."""
    uses = defaultdict(list)
    for use in captured.uses:
        for key, slot in use.slots.items():
            uses[slot.name].append((use, key))
    return uses


def disjoint(uses: list[tuple[Use, str]]) -> bool:
    """Whether no entry of a parameter is used twice."""
    rows = [use.slots[key].rows for use, key in uses]
    if len(rows) == 1:
        return True
    spans = sorted((r.start, r.stop) for r in rows if r is not None)
    return len(spans) == len(rows) and all(a[1] <= b[0] for a, b in pairwise(spans))


def differ(few: Tensor, many: Tensor) -> bool:
    """Whether the rows that two batches of outputs have in common differ by more than rounding; not if they are NaN."""
    rows = min(len(few), len(many))
    largest = torch.linalg.vector_norm(few, math.inf)
    difference = torch.linalg.vector_norm(few[:rows] - many[:rows], math.inf)
    return bool(difference > torch.finfo(few.dtype).eps ** 0.5 * largest)


def _sample(inputs: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(x.shape[1:], x.dtype) for x in tensors(inputs)]
