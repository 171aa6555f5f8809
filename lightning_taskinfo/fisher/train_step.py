"""Per-sample squared gradient norms from a training step's own backward pass.

The uses of weights are found in the graph of the step's loss, and it is shown which sample each of
their rows belongs to, as for every other measurement (:mod:`~lightning_taskinfo.fisher.capture`).
No score is backpropagated: when the backward pass of the training comes by a use, its input and the
gradient of its output give each sample's share of the weight gradient.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo._sharded import gathered_parameters
from lightning_taskinfo.fisher.graph import Edge, Graph, Plan, Prover, known_plan
from lightning_taskinfo.fisher.terms import Arrivals, Gradients, unpack_hooks

PLANS = 64  # kept of a training, as for sentences of different lengths
# Products of two tensors, with the place of the first of the two.
PRODUCTS = {"MmBackward0": 0, "BmmBackward0": 0, "AddmmBackward0": 1, "ConvolutionBackward0": 0}


class StepRecorder:
    """Reads the squared gradient norm of each sample off one training step at a time.

    A BatchNorm in train mode mixes the samples of a batch; the norms are then those of each
    sample's contribution to the batch's gradient.

    Args:
        model: The model that is trained.
        max_samples: At most this many samples of a batch are measured.

    Attributes:
        norms: Squared, by parameter name, each ``[samples]``; there after the backward pass.
        first: The number of the first sample that is measured.
        problem: Why there are no norms.
    """

    busy: ClassVar[bool] = False  # whether a backward pass is a recorder's own, which none may read

    def __init__(self, model: nn.Module, max_samples: int) -> None:
        self.model = model
        self.max_samples = max_samples
        self.all = [*model.parameters()]
        self.trained: list[bool] = []
        self.parameters: dict[str, nn.Parameter] = {}
        self.plans: list[Plan] = []
        self.step = 0
        self.skip(None)

    def skip(self, reason: str | None) -> None:
        """Forget the step before, and hold nothing of its graph; of the next one nothing is read, for this reason."""
        self.step += 1
        self.arrivals: Arrivals | None = None
        self.partial: ParamDict = {}
        self.norms: ParamDict = {}
        self.first = 0
        self.count = 0
        self.problem = reason

    def graph(self, loss: Tensor) -> Graph:
        """Return the graph of a loss, down to the parameters that are trained now."""
        trained = [p.requires_grad for p in self.all]
        if trained != self.trained:  # as when a backbone is unfrozen
            self.parameters = gathered_parameters(self.model)
            self.trained = trained
        return Graph(loss, self.parameters)

    def listen(self, graph: Graph, root: Edge | None, samples: int, first: int = 0) -> None:
        """Read the backward pass that follows.

        Args:
            graph: Of the loss.
            root: Where the rows of the samples lie one after the other in it, if that is known.
            samples: Samples of the batch.
            first: The number of the first sample to be measured.
        """
        self.skip(None)
        self.first = first
        self.count = min(samples - first, self.max_samples)
        try:
            for name in self.parameters:
                if name not in graph.leaves:
                    raise ValueError(f"{name!r} was not used with gradients in the training step")
            plan = known_plan(self.plans, graph, samples) or self._shown(graph, root, samples)
            self._wait(graph, plan)
        except Exception as error:  # which would end the training
            self.skip(_told(error))

    # Between the forward and the backward pass

    def _shown(self, graph: Graph, root: Edge | None, samples: int) -> Plan:
        """Find where weights meet samples, and which sample each row belongs to, by a few backward passes."""
        if root is None or any("SyncBatchNorm" in type(node).__name__ for node in graph.nodes):
            raise ValueError("it cannot be shown which row belongs to which sample")
        _check_saved(graph.nodes)
        with self._own_passes(), _without_statistics(graph):
            # What knows nothing of the samples need not be told from what depends on all: so does a
            # sample's loss.
            plan = Prover(graph, samples, alone=graph.signature, root=root).plan()
        reasons = plan.unshown | _mixing(graph, plan)
        for name, kind in reasons.items():
            raise ValueError(
                f"it cannot be shown which sample the gradient of {name!r} belongs to: {kind} mixes the samples, or "
                "is no part of their outputs"
            )
        if plan.lasting:
            self.plans = [*self.plans[1 - PLANS :], plan]
        return plan

    @contextmanager
    def _own_passes(self) -> Iterator[None]:
        """Run backward passes that no recorder reads, and that leave no gradients and random states behind."""
        gradients = [(p, p.grad) for p in self.all]
        StepRecorder.busy = True
        try:
            for p, _ in gradients:
                p.grad = None
            with torch.random.fork_rng(devices=[]):
                yield
            if any(p.grad is not None for p, _ in gradients):
                raise ValueError("an operation runs a backward pass of its own")
        finally:
            StepRecorder.busy = False
            for p, gradient in gradients:
                p.grad = gradient

    def _wait(self, graph: Graph, plan: Plan) -> None:
        """Let the uses tell when their gradients are there."""
        chosen = slice(self.first, self.first + self.count)
        _check_saved([graph.nodes[at.number] for at in plan.places])
        arrivals = Arrivals(graph, plan, self._add_norms, chosen=chosen, training=True)
        self.arrivals = arrivals
        for operation in arrivals.waiting:
            # What a node calls must hold no part of the graph: it would keep itself alive.
            hook = partial(self._arrived, self.step, operation)
            graph.nodes[operation].register_prehook(hook)

    # The backward pass

    def _arrived(self, step: int, operation: int, gradients: tuple[Tensor | None, ...]) -> None:
        """Take the gradient of an operation's output."""
        if StepRecorder.busy or step != self.step or self.arrivals is None:
            return
        if operation not in self.arrivals.waiting:
            self.skip("a layer received more than one gradient")
            return
        StepRecorder.busy = True
        try:
            with self._plainly():
                self.arrivals.add_one(operation, gradients)
            if not self.arrivals.waiting:
                for name, p in self.parameters.items():  # in the same order on all processes
                    norms = self.partial.get(name)
                    self.norms[name] = p.new_zeros(self.count) if norms is None else norms
        except Exception as error:  # which would end the training
            self.skip(_told(error))
        finally:
            StepRecorder.busy = False

    def _plainly(self) -> AbstractContextManager[Any]:
        """Compute without a graph, and in the precision of what is given, which a backward pass mostly does."""
        kind = self.all[0].device.type
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled(kind):
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(kind, enabled=False))
        return stack

    def _add_norms(self, name: str, found: Gradients) -> None:
        self.partial[name] = found.norms()


def _told(error: Exception) -> str:
    known = type(error) is ValueError
    return str(error) if known else f"it could not be read ({type(error).__name__}: {error})"


def _mixing(graph: Graph, plan: Plan) -> dict[str, str]:
    """Return the parameters that every sample of a batch would need a backward pass of its own for, with a reason.

    A weight is one that was computed from samples if a product with what is no weight is on its
    way.
    """
    mixing: dict[str, str] = {}
    for at in plan.places:
        nodes = graph.below(at.source[0]) if at.way is None else set()
        reasons = [number for number in nodes if _with_a_constant(graph, number)]
        if isinstance(graph.nodes[at.number], BackwardCFunction):
            reasons.append(at.number)
        if reasons:
            mixing |= dict.fromkeys(at.names, graph.kind(reasons[0]))
    return mixing


def _with_a_constant(graph: Graph, number: int) -> bool:
    place = PRODUCTS.get(graph.kind(number))
    return place is not None and None in graph.signature[number][2][place : place + 2]


@contextmanager
def _without_statistics(graph: Graph) -> Iterator[None]:
    """Take the statistics of a batch for constants in backward passes, so that BatchNorm mixes no samples."""

    def pass_on(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> Any:
        return None if inputs[0] is None else (outputs[0], *inputs[1:])

    nodes = [node for node in graph.nodes if "BatchNorm" in type(node).__name__]
    handles = [node.register_hook(pass_on) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_saved(nodes: list[Node]) -> None:
    """Raise a ``ValueError`` if what operations have saved may allow one backward pass only.

    Non-reentrant checkpointing computes it again, as often as one likes.
    """
    for node in nodes:
        for hook in unpack_hooks(node):
            frame = _enclosed(hook, "frame")
            context = _enclosed(getattr(frame, "recompute_fn", None), "recompute_context")
            if not isinstance(context, nullcontext):
                raise ValueError("saved tensors are kept in a way that may allow one pass only")


def _enclosed(function: Any, name: str) -> Any:
    """Return a variable that a function was made with; other ones may be gone."""
    code = getattr(function, "__code__", None)
    names = getattr(code, "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None
