"""The loss of each sample, and where the samples are, in the graph of a training step."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from lightning_taskinfo._observe import at_least_float32
from lightning_taskinfo.fisher.graph import Edge, shape_of

Rows = tuple[Tensor, Tensor, Tensor]
"""Losses by row, which of them count, and the targets."""


def _nll(node: Any) -> Rows:
    target = node._saved_target
    ignored = node._saved_ignore_index
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored  # it is shown without its sign
    outputs = at_least_float32(node._saved_self)
    losses = F.nll_loss(outputs, target, reduction="none", ignore_index=ignored)
    return losses, target != ignored, target


def _elementwise(loss: Callable[..., Tensor]) -> Callable[[Any], Rows]:
    def read(node: Any) -> Rows:
        target = node._saved_target
        outputs = at_least_float32(node._saved_self)
        losses = loss(outputs, at_least_float32(target), reduction="none")
        return losses, torch.ones_like(losses, dtype=torch.bool), target

    return read


LOSSES: dict[str, Callable[[Any], Rows]] = {
    "NllLossBackward0": _nll,  # of cross_entropy, too
    "NllLoss2DBackward0": _nll,
    "BinaryCrossEntropyWithLogitsBackward0": _elementwise(F.binary_cross_entropy_with_logits),
    "BinaryCrossEntropyBackward0": _elementwise(F.binary_cross_entropy),
    "MseLossBackward0": _elementwise(F.mse_loss),
}


class StepLosses:
    """What the loss of a training step shows of its samples.

    Args:
        loss: What the training step has returned.
        samples: Samples of the batch.
        targets: The labels of the batch, to see that the loss has the samples in the same order;
            None if unknown.

    Attributes:
        values: The loss of each sample, ``[samples]``: the mean over its own tokens or outputs,
            without weights of classes and label smoothing; NaN where all its labels are ignored.
            None where they cannot be read.
        root: Where the rows of the samples lie one after the other in the graph; None if that is
            not known.
        problem: Why losses cannot be read.
    """

    def __init__(self, loss: Tensor, samples: int, targets: Any) -> None:
        self.values: Tensor | None = None
        self.root: Edge | None = None
        self.problem: str | None = None
        found = _known_losses(loss)
        if len(found) == 1:
            self._read(found[0], samples, targets)
            return
        known = ", ".join(kind.removesuffix("Backward0") for kind in LOSSES)
        self.problem = (
            f"the training step must compute one loss of {known}, not compiled, got {len(found)}"
        )
        self.root = _made_scalar(loss, samples)

    def _read(self, node: Node, samples: int, targets: Any) -> None:
        with torch.no_grad():
            losses, counted, seen = LOSSES[type(node).__name__](node)
            rows = len(losses) if losses.dim() else 0
            if not losses.numel() or rows % samples or (targets is None and rows != samples):
                size = list(losses.shape)
                self.problem = f"the loss must have rows for {samples} samples, got {size}"
                return
            if targets is not None and not _same_order(seen, targets, samples):
                self.problem = (
                    "the loss must see the targets of the batch in their order, got others"
                )
                return
            losses, counted = losses.reshape(samples, -1), counted.reshape(samples, -1)
            self.values = torch.where(counted, losses, 0).sum(1) / counted.sum(1)
        source, number = node.next_functions[0]
        self.root = None if source is None else Edge(source, number)


def _known_losses(loss: Tensor) -> list[Node]:
    """Return the operations of :data:`LOSSES` that a loss was computed from; what is below them is no matter."""
    found: list[Node] = []
    nodes: list[Any] = [loss.grad_fn]
    seen = {*nodes}
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
            shape = shape_of(source, number)
            if shape[:1] == (samples,) and samples not in shape[1:]:
                return Edge(source, number)
            if shape.numel() == 1 and source not in scalars:
                scalars.append(source)
    return None


def _same_order(seen: Tensor, targets: Any, samples: int) -> bool:
    """Whether a loss saw these targets: as they are, or shifted by one as those of a language model."""
    if not isinstance(targets, Tensor) or targets.dim() == 0 or len(targets) != samples:
        return False
    if seen.numel() == targets.numel():
        if torch.equal(seen.reshape(-1), targets.reshape(-1).to(seen.dtype)):
            return True
        if targets.dim() == 2:  # of which the last one is padding
            return torch.equal(seen.reshape(samples, -1)[:, :-1], targets[:, 1:])
        return False
    shifted = targets.dim() == 2 and seen.numel() == targets[:, 1:].numel()
    return shifted and torch.equal(seen.reshape(samples, -1), targets[:, 1:])
