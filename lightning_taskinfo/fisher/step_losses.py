"""The loss of each sample, from the graph of a training step's loss.

The losses of torch keep what they have seen, outputs and targets, for their backward pass. So the loss of each sample
is computed again, without another run of the network.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_taskinfo._observe import at_least_float32

COPIED = 1 << 14  # numbers of a step that may be copied

LOSSES: dict[str, Callable[..., Tensor]] = {
    "NllLossBackward0": F.nll_loss,  # of cross_entropy, too
    "NllLoss2DBackward0": F.nll_loss,
    "BinaryCrossEntropyWithLogitsBackward0": F.binary_cross_entropy_with_logits,
    "BinaryCrossEntropyBackward0": F.binary_cross_entropy,
    "MseLossBackward0": F.mse_loss,
}


class StepLosses:
    """What the loss of a training step shows of its samples.

    Args:
        loss: What the training step has returned.
        samples: Samples of the batch.
        targets: The labels of the batch, to see that the loss has the samples in the same order;
            None if unknown.

    Attributes:
        known: The operations of :data:`LOSSES` that it was computed from.
        seen: The targets that the loss saw if it is one: it has a row for each.
        in_order: Whether they are those of the samples in the order of the batch; a tensor where
            a device would have to be waited for.
    """

    def __init__(
        self,
        loss: Tensor,
        samples: int,
        targets: Any,
    ) -> None:
        self.loss = loss
        self.samples = samples
        self.known = _known_losses(loss)
        self.in_order: Tensor | bool = False
        if len(self.known) == 1:
            self.seen = self.known[0]._saved_target
            self.in_order = _same_order(self.seen, targets, samples)

    @property
    def problem(self) -> str | None:
        """Why losses of samples cannot be read."""
        if len(self.known) != 1:
            kinds = ", ".join(kind.removesuffix("Backward0") for kind in LOSSES)
            return f"the training step must compute one loss of {kinds}, not compiled, got {len(self.known)}"
        if self.in_order:
            return None
        return (
            f"the loss must see the targets of the {self.samples} samples of the batch in their order, got others "
            f"of shape {list(self.seen.shape)}"
        )

    def later(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """Return a function that computes sums over the rows of each sample, and holds no part of the graph.

        It returns the sum of each sample's loss over its rows (tokens, outputs), and how many of
        them count. Both are ``[samples]``, and 0 where the losses are not known: dividing can wait
        until there are several steps. Weights of classes and label smoothing are left out.

        A step leaves nothing of the processor's cache to others, and copying a small step takes a
        third of the time of computing with it.
        """
        if self.in_order is False:
            unknown = torch.zeros(self.samples, device=self.loss.device)
            return lambda: (unknown, unknown)
        (node,) = self.known
        rule = LOSSES[type(node).__name__]
        outputs, seen = node._saved_self.detach(), self.seen
        if seen.requires_grad:
            seen = seen.detach()
        ignored = getattr(node, "_saved_ignore_index", None)
        in_order, samples = self.in_order, self.samples

        def compute() -> tuple[Tensor, Tensor]:
            options = {}
            if ignored is not None:  # it is shown without its sign
                options["ignore_index"] = ignored - 2**64 if ignored >= 2**63 else ignored
            rows = rule(
                at_least_float32(outputs), at_least_float32(seen), reduction="none", **options
            )
            counted = torch.ones_like(rows) if ignored is None else seen != options["ignore_index"]
            if in_order is not True:
                counted = counted * in_order
            if rows.shape != (samples,):
                rows = rows.reshape(samples, -1).sum(1)
                counted = counted.reshape(samples, -1).sum(1)
            return rows, counted

        if outputs.numel() > COPIED:
            computed = compute()
            return lambda: computed
        outputs, seen = outputs.clone(), seen.clone()  # which it computes with, later
        return compute


def losses_of(steps: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the losses of the samples of several steps, one after the other; not finite where none is known.

    Args:
        steps: What :meth:`StepLosses.later` computes for each.
    """
    sums, counts = map(torch.cat, zip(*steps, strict=True))
    return sums / counts


def _known_losses(loss: Tensor) -> list[Any]:
    """Return the operations of :data:`LOSSES` that a loss was computed from; what is below them is no matter."""
    first: Any = loss.grad_fn
    found = []
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


def _same_order(
    seen: Tensor,
    targets: Any,
    samples: int,
) -> Tensor | bool:
    """Whether a loss saw these targets: as they are, or shifted by one as those of a language model."""
    if seen is targets and targets.shape[:1] == (samples,):  # as a rule
        return samples > 0
    if not seen.dim() or not seen.numel() or len(seen) % samples:
        return False
    if targets is None:
        return len(seen) == samples
    if not isinstance(targets, Tensor) or targets.shape[:1] != (samples,):
        return False
    rows = seen.reshape(samples, -1)
    labels = targets.reshape(samples, -1).to(seen.dtype)
    same: Any = False
    if rows.shape == labels.shape:
        same = (rows == labels).all()
        rows = rows[:, :-1]  # the last one is padding where they are shifted
    shifted = labels[:, 1:]
    if targets.dim() == 2 and shifted.numel() and rows.shape == shifted.shape:
        same = (rows == shifted).all() | same
    return same
