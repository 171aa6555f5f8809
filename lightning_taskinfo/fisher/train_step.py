"""Losses and squared gradient norms of single samples, from the forward pass of a training step.

The uses of weights are found in the graph of the step's loss, and it is shown which sample each of
their rows belongs to, as for every other measurement (:mod:`~lightning_taskinfo.fisher.graph`). In
place of a score the loss itself is backpropagated to the uses, before the training does it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_taskinfo._observe import ParamDict, at_least_float32
from lightning_taskinfo._sharded import gathered_parameters
from lightning_taskinfo.fisher.accumulators import Norms
from lightning_taskinfo.fisher.graph import Edge, Graph, removed, shape_of
from lightning_taskinfo.fisher.proof import Plan, Plans, Prover
from lightning_taskinfo.fisher.terms import backward

COPIED = 1 << 14  # numbers of a step that may be copied
# Products of two tensors, with the place of the first of the two.
PRODUCTS = {"MmBackward0": 0, "BmmBackward0": 0, "AddmmBackward0": 1, "ConvolutionBackward0": 0}


class StepNorms:
    """Squared gradient norms of single samples, from the graph of one training step at a time.

    One more backward pass over the graph brings them, before that of the training. A BatchNorm in
    train mode mixes the samples of a batch; the norms are then those of each sample's contribution
    to the batch's gradient.

    Args:
        model: The model that is trained.
        max_samples: At most this many samples of a batch are measured.

    Attributes:
        norms: Squared, by parameter name, each ``[samples]``, as of the last step that was read.
        first: The number of the first sample that is measured.
        problem: Why there are no norms.
    """

    def __init__(
        self,
        model: nn.Module,
        max_samples: int,
    ) -> None:
        self.model = model
        self.max_samples = max_samples
        self.all = [*model.parameters()]
        self.trained: list[bool] = []
        self.plans = Plans()
        self.forget()

    def forget(self) -> None:
        """Forget the step before."""
        self.norms: ParamDict = {}
        self.first = 0
        self.problem: str | None = None

    def read(
        self,
        loss: Tensor,
        root: Edge | None,
        samples: int,
        first: int = 0,
    ) -> None:
        """Read the norms between the forward and the backward pass of a step.

        Args:
            loss: What will be differentiated.
            root: Where the rows of the samples lie one after the other in its graph, if that is known.
            samples: Samples of the batch.
            first: The number of the first sample to be measured.
        """
        self.forget()
        self.first = first
        trained = [p.requires_grad for p in self.all]
        if trained != self.trained:  # as when a backbone is unfrozen
            self.parameters = gathered_parameters(self.model)
            self.trained = trained
        chosen = slice(first, min(samples, first + self.max_samples))
        found = Norms(chosen.stop - first)
        try:
            with self._own_passes(), torch.autocast(loss.device.type, enabled=False):
                graph = Graph(loss, self.parameters)
                plan = self._plan(graph, root, samples)
                receive = partial(found.add, slice(None))
                backward(graph, plan, [torch.ones_like(loss)], receive, chosen=chosen)
        except Exception as error:  # which would end the training
            kind = type(error).__name__
            unknown = f"it could not be read ({kind}: {error})"
            self.problem = str(error) if kind == "ValueError" else unknown
            return
        for name, p in self.parameters.items():  # in the same order on all processes
            norms = found.values.get(name)
            self.norms[name] = p.new_zeros(found.n) if norms is None else norms

    def _plan(
        self,
        graph: Graph,
        root: Edge | None,
        samples: int,
    ) -> Plan:
        """Return where weights meet samples, and which sample each row belongs to: known, or shown now."""
        if graph.repacked:
            raise ValueError(
                "what operations have saved is computed or fetched in the backward pass, as by checkpointing"
            )
        for name in self.parameters:
            if name not in graph.leaves:
                raise ValueError(f"{name!r} was not used with gradients in the training step")
        plan = self.plans.find(graph, samples)
        if plan is not None:
            return plan
        if root is None or any("SyncBatchNorm" in type(node).__name__ for node in graph.nodes):
            raise ValueError("it cannot be shown which row belongs to which sample")
        with _without_statistics(graph):
            # What knows nothing of the samples need not be told from what depends on all: so does a
            # sample's loss.
            plan = Prover(graph, samples, alone=graph.signature, root=root).plan()
        plan.unshown |= _mixing(graph, plan)
        plan = self.plans.keep(plan)  # which forgets all if one of them was kept before
        for name, kind in plan.unshown.items():
            raise ValueError(
                f"it cannot be shown which sample the gradient of {name!r} belongs to: {kind} mixes the samples, or "
                "is no part of their outputs"
            )
        return plan

    @contextmanager
    def _own_passes(self) -> Iterator[None]:
        """Run backward passes that leave no gradients and random states behind."""
        gradients = [(p, p.grad) for p in self.all]
        try:
            for p, _ in gradients:
                p.grad = None
            with torch.random.fork_rng(devices=[]):
                yield
            if any(p.grad is not None for p, _ in gradients):
                raise ValueError("an operation runs a backward pass of its own")
        finally:
            for p, gradient in gradients:
                p.grad = gradient


def _mixing(
    graph: Graph,
    plan: Plan,
) -> dict[str, str]:
    """Return the parameters that every sample of a batch would need a backward pass of its own for, with a reason.

    A weight is one that was computed from samples if a product with what is no weight is on its
    way.
    """
    mixing: dict[str, str] = {}
    for at in plan.places:
        reasons = []
        for number in graph.below(at.source[0]) if at.way is None else ():
            place = PRODUCTS.get(graph.kind(number))
            if place is not None and None in graph.signature[number][2][place : place + 2]:
                reasons.append(number)
        if graph.nodes[at.number] in graph.functions:
            reasons.append(at.number)
        for number in reasons[:1]:
            mixing |= dict.fromkeys(at.names, graph.kind(number))
    return mixing


def _without_statistics(graph: Graph) -> AbstractContextManager[None]:
    """Take the statistics of a batch for constants in backward passes, so that BatchNorm mixes no samples."""

    def pass_on(
        inputs: tuple[Tensor | None, ...],
        outputs: tuple[Tensor | None, ...],
    ) -> Any:
        return None if inputs[0] is None else (outputs[0], *inputs[1:])

    nodes = [node for node in graph.nodes if "BatchNorm" in type(node).__name__]
    return removed([node.register_hook(pass_on) for node in nodes])


# --- The loss of each sample, and where the samples are in the graph

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

    @property
    def root(self) -> Edge | None:
        """Where the rows of the samples lie one after the other in the graph; None if that is not known."""
        if len(self.known) != 1:
            return _made_scalar(self.loss, self.samples)
        source, number = self.known[0].next_functions[0]
        return Edge(source, number) if source is not None and self.in_order else None

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


def _made_scalar(
    loss: Tensor,
    samples: int,
) -> Edge | None:
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
