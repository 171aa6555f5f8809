"""What the graph of a training step shows: each sample's loss, how parameters are used, and the order of samples."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node


class Consumer(NamedTuple):
    """A node that reads the output of another one, as its input of this number."""

    node: Node
    number: int


class StepGraph:
    """The nodes between a loss and the parameters, walked through once.

    Args:
        loss: The loss of a training step, before its backward pass.
    """

    def __init__(self, loss: Tensor) -> None:
        self.consumers: dict[Node, list[Consumer]] = defaultdict(list)
        self.kinds: list[type] = []  # of all nodes, in the order of the walk
        self.leaves: dict[int, Node] = {}  # by the id of the parameter
        self.losses: list[Node] = []
        stack: list[Node] = [] if loss.grad_fn is None else [loss.grad_fn]
        visited = set(stack)
        while stack:
            node = stack.pop()
            kind = type(node)
            self.kinds.append(kind)
            if kind.__name__ in LOSSES:
                self.losses.append(node)
            elif kind.__name__ == "AccumulateGrad":
                self.leaves[id(node.variable)] = node  # type: ignore[attr-defined]
            for number, (following, _) in enumerate(node.next_functions):
                if following is not None:
                    self.consumers[following].append(Consumer(node, number))
                    if following not in visited:
                        visited.add(following)
                        stack.append(following)

    def users(self, node: Node | None) -> list[Consumer]:
        """Return who reads a node's output, behind the copies that autocast makes."""
        found = self.consumers[node] if node is not None else []
        while len(found) == 1 and found[0].node.name() == "ToCopyBackward0":
            found = self.consumers[found[0].node]
        return found

    def used_elsewhere(self, parameters: Mapping[str, nn.Parameter]) -> str | None:
        """Return which parameter is used other than once, which its layer's hook alone would not show."""
        for name, p in parameters.items():
            times = len(self.users(self.leaves.get(id(p))))
            if times != 1:
                return f"parameter {name!r} was used {times} times in the training step"
        return None

    @property
    def reorders(self) -> bool:
        """Whether rows may be picked and put by number, which may be other numbers in the next step."""
        return any(kind.__name__ in REORDERING for kind in set(self.kinds))

    @property
    def mixes(self) -> bool:
        """Whether a BatchNorm may have normalised with the statistics of the batch."""
        return any("BatchNorm" in kind.__name__ for kind in set(self.kinds))

    def sample_losses(self, samples: int, targets: Any) -> Tensor:
        """Return the loss of each sample, read off the one loss function in the graph.

        Args:
            samples: Samples of the batch.
            targets: The labels of the batch, to see that the loss has the samples in the same order; None if unknown.

        Returns:
            Shape ``[samples]``: the mean over a sample's own tokens or outputs, without weights of classes and label
            smoothing; NaN where all its labels are ignored.

        Raises:
            ValueError: If there is no such function or several, or it sees other labels than the batch has.
        """
        if len(self.losses) != 1:
            known = ", ".join(kind.removesuffix("Backward0") for kind in LOSSES)
            raise ValueError(
                f"the training step must compute one loss of {known}, got {len(self.losses)}"
            )
        (node,) = self.losses
        with torch.no_grad():
            losses, counted, seen = LOSSES[type(node).__name__](node)
            if losses.dim() == 0 or len(losses) % samples or not losses.numel():
                raise ValueError(
                    f"the loss must have rows for {samples} samples, got {list(losses.shape)}"
                )
            if targets is not None and not _same_order(seen, targets, samples):
                raise ValueError(
                    "the loss must see the targets of the batch in their order, got others"
                )
            rows, counted = losses.reshape(samples, -1), counted.reshape(samples, -1)
            return torch.where(counted, rows, 0).sum(1) / counted.sum(1)

    def root(self) -> "Root | None":
        """Return what the loss function reads, where the samples are known, if there is one such function."""
        if len(self.losses) != 1:
            return None
        (node,) = self.losses
        following, number = node.next_functions[0]
        if following is None:
            return None
        read: Tensor = node._saved_self  # type: ignore[attr-defined]
        return Root(GradientEdge(following, number), read.shape, read.dtype, read.device)


class Root(NamedTuple):
    """A place of the graph whose rows are known, and the tensor that passes there."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


Rows = tuple[Tensor, Tensor, Tensor]
"""Losses by row, which of them count, and the targets."""


def full_precision(x: Tensor) -> Tensor:
    """Return numbers of half precision in single precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _nll(node: Any) -> Rows:
    target, ignored = node._saved_target, node._saved_ignore_index
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored  # it is shown without its sign
    losses = F.nll_loss(
        full_precision(node._saved_self), target, reduction="none", ignore_index=ignored
    )
    return losses, target != ignored, target


def _elementwise(loss: Callable[..., Tensor]) -> Callable[[Any], Rows]:
    def read(node: Any) -> Rows:
        target = node._saved_target
        losses = loss(full_precision(node._saved_self), full_precision(target), reduction="none")
        return losses, torch.ones_like(losses, dtype=torch.bool), target

    return read


LOSSES: dict[str, Callable[[Any], Rows]] = {
    "NllLossBackward0": _nll,  # of cross_entropy, too
    "NllLoss2DBackward0": _nll,
    "BinaryCrossEntropyWithLogitsBackward0": _elementwise(F.binary_cross_entropy_with_logits),
    "BinaryCrossEntropyBackward0": _elementwise(F.binary_cross_entropy),
    "MseLossBackward0": _elementwise(F.mse_loss),
}
REORDERING = {
    f"{name}Backward{number}"
    for name in (
        "Index", "IndexSelect", "IndexAdd", "IndexPut", "IndexPutImpl", "IndexCopy", "IndexFill", "Gather", "Scatter",
        "ScatterAdd", "ScatterReduce", "Take", "MaskedSelect", "MaskedScatter", "Flip", "Roll", "Sort", "Topk",
    )
    for number in (0, 1, 2)
}  # fmt: skip


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


def rows_are_samples(root: Root, edges: Sequence[GradientEdge], samples: int) -> bool:
    r"""Whether row n of the gradient at every edge comes from sample n alone.

    Two passes go back from ``root``: one with random gradients :math:`s_n`, one with :math:`a_n s_n`. What belongs to
    sample n alone is :math:`a_n` times as large in the second one.

    Args:
        root: Where the samples lie along the first axis, each with the same number of rows.
        edges: The outputs to look at.
        samples: Number of samples.
    """
    generator = torch.Generator().manual_seed(0)
    factors = 0.5 + 1.5 * torch.rand(samples, generator=generator)  # [N]
    plain = torch.randn(root.shape, generator=generator)
    by_row = factors.repeat_interleave(len(plain) // samples).view(-1, *[1] * (plain.dim() - 1))
    first, second = (
        torch.autograd.grad(
            [root.edge],
            edges,
            [seed.to(root.device, root.dtype)],
            retain_graph=True,
            allow_unused=True,
        )
        for seed in (plain, by_row * plain)
    )
    return all(
        a is not None
        and b is not None
        and len(a) % samples == 0
        and _proportional(full_precision(a), full_precision(b), factors)
        for a, b in zip(first, second, strict=True)
    )


def _proportional(plain: Tensor, weighted: Tensor, factors: Tensor) -> bool:
    """Whether each sample of ``weighted`` is its factor times that of ``plain``, up to rounding."""
    plain, weighted = plain.reshape(len(factors), -1), weighted.reshape(len(factors), -1)
    difference = (weighted - factors.to(plain)[:, None] * plain).norm(dim=1)  # [N]
    size = plain.norm(dim=1)
    return bool((difference <= 0.03 * size + 1e-4 * size.amax()).all())
