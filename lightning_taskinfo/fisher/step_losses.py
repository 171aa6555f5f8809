"""The loss of each sample, and where the samples are, in the graph of a training step."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from lightning_taskinfo._observe import at_least_float32
from lightning_taskinfo.fisher.graph import Edge, shape_of

Rule = Callable[[Tensor, Tensor, int | None], Tensor]
"""The loss of each row, from outputs, targets, and the target of rows that do not count: 0 for those."""

FEW = 1 << 14  # outputs of a step up to which they are kept, and their losses computed later


class SampleLosses(NamedTuple):
    """The losses of a training step's samples, as what they are computed from.

    Little is done in the step itself; :func:`losses_of` does the rest for many steps at once.

    Attributes:
        outputs: What the loss was computed from.
        rule: How, by row (a sample, a token, an output).
        seen: The targets that the loss saw.
        ignored: The target of rows that do not count, if there is one.
        samples: Samples of the batch.
        targets: The labels of the batch, to see that the loss has the samples in the same order;
            None if unknown.
    """

    outputs: Tensor
    rule: Rule
    seen: Tensor
    ignored: int | None
    samples: int
    targets: Any

    def kept(self) -> "SampleLosses":
        """Return the same, to be read later, when the memory of outputs and labels may have other uses."""
        rule = self.rule
        if self.outputs.numel() > FEW:
            outputs = self.rows
            rule = _as_they_are
        else:
            outputs = self.outputs.clone()
        seen = self.seen.clone()
        targets = self.targets
        if targets is self.seen:  # as a rule
            targets = seen
        elif isinstance(targets, Tensor):
            targets = targets.clone()
        return SampleLosses(outputs, rule, seen, self.ignored, self.samples, targets)

    @property
    def rows(self) -> Tensor:
        """The loss of each row, 0 where it does not count."""
        return self.rule(self.outputs, self.seen, self.ignored)

    @property
    def problem(self) -> str | None:
        """Why the rows are not known to be those of the samples."""
        return self._problem(self.rows)

    def _problem(self, rows: Tensor) -> str | None:
        count = len(rows) if rows.dim() else 0
        whole = rows.numel() > 0 and count % self.samples == 0
        if not whole or (self.targets is None and count != self.samples):
            size = list(rows.shape)
            return f"the loss must have rows for {self.samples} samples, got {size}"
        if self.targets is not None and not _same_order(self.seen, self.targets, self.samples):
            return "the loss must see the targets of the batch in their order, got others"
        return None

    @property
    def values(self) -> Tensor:
        """The loss of each sample, ``[samples]``: the mean over its rows, NaN where none counts or is known."""
        rows = self.rows
        if self._problem(rows) is not None:
            return rows.new_full((self.samples,), math.nan)
        return self._means(rows)

    def _means(self, rows: Tensor) -> Tensor:
        rows = rows.reshape(self.samples, -1)
        if self.ignored is None:
            return rows.mean(1)
        counted = self.seen.reshape(self.samples, -1) != self.ignored
        return rows.sum(1) / counted.sum(1)


def losses_of(steps: Sequence[SampleLosses]) -> Tensor:
    """Return the losses of the samples of several steps, one after the other.

    Steps that are alike are put together first, which takes little longer than one of them.
    """
    together = _together(steps)
    if together is not None:
        rows = together.rows
        if together._problem(rows) is None:
            return together._means(rows)
    return torch.cat([step.values for step in steps])


def _together(steps: Sequence[SampleLosses]) -> SampleLosses | None:
    """Return several steps as one, if they are alike."""
    first = steps[0]
    kinds = set()
    for step in steps:
        if not isinstance(step.targets, Tensor):
            return None
        shapes = (step.outputs.shape, step.seen.shape, step.targets.shape)
        kinds.add((step.rule, step.ignored, step.samples, *shapes))
    if len(kinds) > 1 or 0 in (first.seen.dim(), first.targets.dim()):
        return None
    seen = torch.cat([step.seen for step in steps])
    targets = seen
    if any(step.targets is not step.seen for step in steps):
        targets = torch.cat([step.targets for step in steps])
    return SampleLosses(
        torch.cat([step.outputs for step in steps]),
        first.rule,
        seen,
        first.ignored,
        first.samples * len(steps),
        targets,
    )


def _as_they_are(losses: Tensor, seen: Tensor, ignored: int | None) -> Tensor:
    return losses


def _nll(outputs: Tensor, seen: Tensor, ignored: int | None) -> Tensor:
    assert ignored is not None
    return F.nll_loss(at_least_float32(outputs), seen, reduction="none", ignore_index=ignored)


def _elementwise(loss: Callable[..., Tensor]) -> Rule:
    def rule(outputs: Tensor, seen: Tensor, ignored: int | None) -> Tensor:
        return loss(at_least_float32(outputs), at_least_float32(seen), reduction="none")

    return rule


LOSSES: dict[str, Rule] = {
    "NllLossBackward0": _nll,  # of cross_entropy, too
    "NllLoss2DBackward0": _nll,
    "BinaryCrossEntropyWithLogitsBackward0": _elementwise(F.binary_cross_entropy_with_logits),
    "BinaryCrossEntropyBackward0": _elementwise(F.binary_cross_entropy),
    "MseLossBackward0": _elementwise(F.mse_loss),
}


def _read(node: Any, samples: int, targets: Any) -> SampleLosses:
    """Read what a loss has kept for its backward pass."""
    rule = LOSSES[type(node).__name__]
    ignored = None
    if rule is _nll:
        ignored = node._saved_ignore_index
        if ignored >= 2**63:  # it is shown without its sign
            ignored -= 2**64
    outputs = node._saved_self.detach()
    return SampleLosses(outputs, rule, node._saved_target, ignored, samples, targets)


class StepLosses:
    """What the loss of a training step shows of its samples.

    Args:
        loss: What the training step has returned.
        samples: Samples of the batch.
        targets: The labels of the batch, to see that the loss has the samples in the same order;
            None if unknown.

    Attributes:
        found: The losses of the samples, without weights of classes and label smoothing; None where
            the step has not one loss that can be read.
    """

    def __init__(self, loss: Tensor, samples: int, targets: Any) -> None:
        self.found: SampleLosses | None = None
        nodes = _known_losses(loss)
        self._known = len(nodes)
        self._node: Any = None
        if self._known != 1:
            self._scalar = _made_scalar(loss, samples)
            return
        self._node = nodes[0]
        self.found = _read(self._node, samples, targets)

    @property
    def problem(self) -> str | None:
        """Why losses of samples cannot be read."""
        if self.found is not None:
            return self.found.problem
        known = ", ".join(kind.removesuffix("Backward0") for kind in LOSSES)
        return (
            f"the training step must compute one loss of {known}, not compiled, got {self._known}"
        )

    @property
    def root(self) -> Edge | None:
        """Where the rows of the samples lie one after the other in the graph; None if that is not known."""
        if self.found is None:
            return self._scalar
        source, number = self._node.next_functions[0]
        unknown = source is None or self.found.problem is not None
        return None if unknown else Edge(source, number)


def _known_losses(loss: Tensor) -> list[Node]:
    """Return the operations of :data:`LOSSES` that a loss was computed from; what is below them is no matter."""
    first: Any = loss.grad_fn
    if type(first).__name__ in LOSSES:  # as a rule
        return [first]
    found: list[Node] = []
    nodes = [first]
    seen = {first}
    for node in nodes:  # which grows
        if type(node).__name__ in LOSSES:
            found.append(node)
            continue
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                nodes.append(source)
    return found


def _made_scalar(loss: Tensor, samples: int) -> Edge | None:
    """Return what a loss of one's own is the mean or the sum of, if that has one axis of samples, the first."""
    scalars: list[Any] = [loss.grad_fn]
    for node in scalars:  # which grows
        for source, number in node.next_functions:
            if source is None or not source.next_functions:
                continue
            shape = shape_of(Edge(source, number))
            if shape[:1] == (samples,) and samples not in shape[1:]:
                return Edge(source, number)
            if shape.numel() == 1 and source not in scalars:
                scalars.append(source)
    return None


def _same_order(seen: Tensor, targets: Any, samples: int) -> bool:
    """Whether a loss saw these targets: as they are, or shifted by one as those of a language model."""
    if not isinstance(targets, Tensor) or targets.dim() == 0 or len(targets) != samples:
        return False
    if seen is targets:
        return True
    if seen.numel() == targets.numel():
        if torch.equal(seen.reshape(-1), targets.reshape(-1).to(seen.dtype)):
            return True
        if targets.dim() == 2:  # of which the last one is padding
            return torch.equal(seen.reshape(samples, -1)[:, :-1], targets[:, 1:])
        return False
    shifted = targets.dim() == 2 and seen.numel() == targets[:, 1:].numel()
    return shifted and torch.equal(seen.reshape(samples, -1), targets[:, 1:])
