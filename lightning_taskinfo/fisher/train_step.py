"""Per-sample squared gradient norms from a training step's own backward pass.

Layers are hooked for one step. Each call notes its input, and the gradient of the loss by its output is read when the
backward pass of the training comes by; input and gradient give every sample's share of the weight gradient.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from lightning_taskinfo._observe import ParamDict, is_observing
from lightning_taskinfo._warn import warn
from lightning_taskinfo.fisher.ops import Slot, Use
from lightning_taskinfo.fisher.sharded import gathered_parameters, sharded
from lightning_taskinfo.fisher.step_graph import (
    Consumer,
    Root,
    StepGraph,
    full_precision,
    rows_are_samples,
)
from lightning_taskinfo.fisher.step_layers import reader, trained_layers

SEQUENCES = (
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Embedding,
)  # whose outputs may have the samples behind time
SHARED = {
    "AddBackward0",
    "SubBackward0",
    "ExpandBackward0",
}  # what may give all samples the same weight


class StepRecorder:
    """Reads the squared gradient norm of each sample off one training step at a time.

    Layers are read where they are called, once a step. A table that is looked up once for all samples, as position
    embeddings are, and a parameter of no layer are read where they are added to the samples.

    Before a number is given out, it is shown which row belongs to which sample: by two more backward passes over the
    step, if its graph has not been seen before or picks rows by number. A BatchNorm in train mode mixes the samples of
    a batch; the norms are then those of each sample's contribution to the batch's gradient.

    Args:
        model: The model that is trained; all its trainable parameters must belong to layers that are understood, or be
            added to the samples.
        max_samples: At most this many samples of a batch are measured.

    Raises:
        ValueError: If a parameter cannot be read or belongs to two layers, or a module is compiled; by name.
    """

    proving: ClassVar[bool] = (
        False  # whether a backward pass is one of a recorder's own, which none may read
    )

    def __init__(self, model: nn.Module, max_samples: int) -> None:
        self.model = model
        self.max_samples = max_samples
        self.all = [*model.parameters()]
        self.may_run_passes = not sharded(model)
        self.handles: list[RemovableHandle] = []
        self.shown: set[Any] = set()  # the graphs whose rows are known to be samples
        self.warned = False
        self.batch_size = 0
        self.first = 0
        self.count = 0
        self.skip(None)
        self._look_again()

    def _look_again(self) -> None:
        """Find the layers that are trained now."""
        self.trained = [p.requires_grad for p in self.all]
        self.refused: str | None = None
        self.layers: dict[str, nn.Module] = {}
        self.raw: dict[str, nn.Parameter] = {}
        self.uses: dict[str, tuple[Any, Use]] = {}
        self.layers, self.raw = trained_layers(self.model)
        self.readers = {name: reader(module) for name, module in self.layers.items()}
        self.parameters = gathered_parameters(self.model)

    def start(self, batch_size: int, first: int = 0) -> None:
        """Listen to one forward pass over ``batch_size`` samples, and measure those from number ``first`` on."""
        if self.trained != [p.requires_grad for p in self.all]:  # as when a backbone is unfrozen
            self.stop()
            try:
                self._look_again()
            except ValueError as error:
                self.refused = str(error)
        self.skip(self.refused)
        if self.refused:
            return
        self.listening = True
        self.batch_size = batch_size
        self.first = first
        self.count = min(batch_size - first, self.max_samples)
        if not self.handles:
            hooks = ((module, _Hook(self, name)) for name, module in self.layers.items())
            self.handles = [module.register_forward_hook(hook) for module, hook in hooks]

    def skip(self, reason: str | None) -> None:
        """Forget the step before; there is nothing to read of the next one, for this reason."""
        self.listening = False
        self.intercepted = False  # whether operations are, as by selective checkpointing
        self.norms: ParamDict = {}  # squared, by parameter name, each [count], after the backward pass
        self.seen: set[str] = set()
        self.problem = reason
        self._let_go()

    def _let_go(self) -> None:
        """Hold nothing of the graph."""
        self.edges: dict[str, GradientEdge] = {}  # where gradients of outputs pass by
        self.lookups: dict[
            str, tuple[Tensor, torch.Size]
        ] = {}  # made once for all samples: numbers, and the output
        self.root: Root | None = None  # the last layer
        self.shapes: list[torch.Size] = []

    def stop(self) -> None:
        """Take the hooks away; to leave them for the next step is quicker than to hook the layers again."""
        self.listening = False
        self._let_go()
        for handle in self.handles:
            handle.remove()
        self.handles = []

    # The forward pass

    def heard(self, name: str, module: nn.Module, x: Tensor, output: Tensor) -> None:
        """Note a layer's call, whose gradient is read when the backward pass comes by."""
        edge = self._once(name, module, output)
        if edge is None:
            return
        self.edges[name] = edge
        self.intercepted = self.intercepted or torch._C._len_torch_dispatch_stack() > 0
        shape, version = output.shape, x._version
        self.shapes.append(shape)
        if _for_all_samples(module, shape, self.batch_size):
            self.lookups[name] = x, shape
            return
        self.root = Root(edge, shape, output.dtype, output.device)
        if (
            len(shape) > 2
            and shape[1] == self.batch_size > 1
            and isinstance(module, SEQUENCES)
            and not self.warned
        ):
            self.warned = True
            warn(
                f"Layer {name!r} has outputs {list(shape)}, with the samples on axis 0 or 1; axis 0 is taken."
            )
        held = [x]  # until it was read, so that its memory is free when it would be without us
        number = edge.output_nr

        def read(gradients: tuple[Tensor | None, ...]) -> None:
            if StepRecorder.proving:
                return
            if not held:
                self.problem = (
                    self.problem or f"the backward pass came by layer {name!r} more than once"
                )
                return
            x, b = held.pop(), gradients[number]
            if x._version != version:
                self.problem = f"the input of layer {name!r} was changed in place"
            elif b is not None:
                self._add_safely(name, module, x, b if b.shape == shape else b.reshape(shape))

        edge.node.register_prehook(
            read
        )  # which has no part of the graph: it would keep itself alive

    def _once(self, name: str, module: nn.Module, output: Tensor) -> GradientEdge | None:
        """Return where the output's gradient comes by, or note what speaks against reading it."""
        computed = written(output)
        node = None if computed is None else computed.grad_fn
        rows = len(output)
        if name in self.seen:
            self.problem = f"layer {name!r} was called more than once in the training step"
        elif rows != self.batch_size and not _for_all_samples(
            module, output.shape, self.batch_size
        ):
            self.problem = (
                f"layer {name!r} had {rows} rows of outputs for {self.batch_size} samples"
            )
        elif node is None:
            self.problem = f"layer {name!r} had a part of a tensor as output"
        self.seen.add(name)
        if self.problem or computed is None or node is None:
            return None
        return GradientEdge(node, computed.output_nr)

    # Between the forward and the backward pass

    def before_backward(self, graph: StepGraph) -> None:
        """Listen no longer, and note what speaks against a measurement of this step."""
        self.listening = False
        left = [name for name in self.layers if name not in self.seen]
        if left and self.problem is None:
            self.problem = f"layer {left[0]!r} was not called with gradients in the training step"
        if self.problem is None:
            self.problem = graph.used_elsewhere(self.parameters)
        if self.problem is None:
            self._find_shared(graph)
        if self.problem is None and self.may_run_passes:
            self.problem = self._not_shown(graph)
        self._let_go()

    def _find_shared(self, graph: StepGraph) -> None:
        """Find where the samples meet what was made once for all of them."""
        for name, (numbers, shape) in self.lookups.items():
            users = graph.users(self.edges.pop(name).node)
            self._read_where_met(name, users, shape, numbers)
        for name in self.raw:
            p = self.parameters[name]
            users = graph.users(graph.leaves.get(id(p)))
            self._read_where_met(name, users, p.shape, None)

    def _read_where_met(
        self, name: str, users: list[Consumer], shape: torch.Size, numbers: Tensor | None
    ) -> None:
        if len(users) != 1 or users[0].node.name() not in SHARED:
            kinds = ", ".join(user.node.name() for user in users) or "nothing"
            self.problem = f"{name!r} must be added to the samples once, got {kinds}"
            return
        node, position = users[0]
        alpha = getattr(node, "_saved_alpha", 1.0) if position == 1 else 1.0
        self.edges[name] = GradientEdge(node, 0)
        pending = [name]

        def read(gradients: tuple[Tensor | None, ...]) -> None:
            b = gradients[0]
            if StepRecorder.proving or b is None:
                return
            if not pending:
                self.problem = self.problem or f"the backward pass came by {name!r} more than once"
                return
            pending.clear()
            aligned = [*[1] * (b.dim() - len(shape)), *shape]
            if b.shape[0] != self.batch_size or aligned[0] != 1:
                self.problem = (
                    f"{name!r} must be added to {self.batch_size} samples, got {list(b.shape)}"
                )
                return
            b = alpha * b
            if numbers is None:
                self._add_raw(name, b, aligned)
            elif [1, *b.shape[1:]] != aligned:
                self.problem = (
                    f"{name!r} must be added to the samples as it is, got {list(b.shape)}"
                )
            else:
                everywhere = numbers.reshape(b.shape[1:-1]).expand(b.shape[:-1])
                self._add_safely(name, self.layers[name], everywhere, b)

        node.register_prehook(read)

    def _not_shown(self, graph: StepGraph) -> str | None:
        """Return why it is not known which row belongs to which sample; a graph that was looked at is known."""
        known = (*graph.kinds, *self.shapes)
        if known in self.shown:
            return None
        root = graph.root() or self.root
        if self.intercepted or root is None or root.shape[0] % self.batch_size:
            return "it cannot be shown which row belongs to which sample"
        StepRecorder.proving = True
        try:
            apart = rows_are_samples(root, [*self.edges.values()], self.batch_size)
        except Exception as error:  # which would end the training
            return f"it cannot be shown which row belongs to which sample ({type(error).__name__}: {error})"
        finally:
            StepRecorder.proving = False
        if not apart and (graph.reorders or not graph.mixes):
            return "it mixes the samples, or has them in another order"
        if not graph.reorders:
            self.shown.add(known)
        return None

    # The backward pass

    def _add_safely(self, name: str, module: nn.Module, x: Tensor, b: Tensor) -> None:
        if torch.is_grad_enabled():  # in a backward pass that makes a graph
            x, b = x.detach(), b.detach()
        try:
            self._add(name, module, x, b)
        except Exception as error:  # which would end the training
            self.problem = f"layer {name!r} could not be read ({type(error).__name__}: {error})"

    def _add(self, name: str, module: nn.Module, x: Tensor, b: Tensor) -> None:
        b = full_precision(b.narrow(0, self.first, self.count))
        if b.dim() == 2 and type(module) is nn.Linear:
            self._add_linear(name, module, full_precision(x.narrow(0, self.first, self.count)), b)
            return
        with _no_autocast(x.device.type):
            if use := self._use(name, module, x, b):
                for slot, named in use.slots.items():
                    self.norms[named.name] = use.norms(slot, [b])
                use.saved = ()

    def _use(self, name: str, module: nn.Module, x: Tensor, b: Tensor) -> Use | None:
        """Return what the layer did; the same as at the step before where only the values of its input are others."""
        whole = isinstance(module, _BatchNorm) and not isinstance(
            module, _InstanceNorm
        )  # needs the whole batch
        x = full_precision(x if whole else x.narrow(0, self.first, self.count))
        owned = {
            slot: p for slot, p in module._parameters.items() if p is not None and p.requires_grad
        }
        key = (x.shape, b.shape, *owned)
        if name in self.uses and self.uses[name][0] == key:
            use = self.uses[name][1]
            use.saved = (x,)
            return use
        call = self.readers[name](module, x)
        if call is None:
            self.problem = f"layer {name!r} ({type(module).__name__}) has options that cannot be read from hooks"
            return None
        if whole and (factor := call.config["factor"].get("weight")):
            first = self.first
            call.config["factor"]["weight"] = lambda: factor().narrow(0, first, len(b))
        slots = {slot: Slot(f"{name}.{slot}", tuple(p.shape)) for slot, p in owned.items()}
        use = call.kind(slots, b.shape, call.saved, call.config)
        if "factor" not in call.config:  # which is a function of the input
            self.uses[name] = key, use
        return use

    def _add_linear(self, name: str, layer: nn.Linear, a: Tensor, b: Tensor) -> None:
        """Use the rank of ``b aᵀ``: its squared norm is the product of two."""
        weight, bias = (
            layer._parameters["weight"],
            layer._parameters["bias"],
        )  # quicker than as attributes
        outputs = torch.linalg.vecdot(b, b)
        if bias is not None and bias.requires_grad:
            self.norms[f"{name}.bias"] = outputs
        if weight is not None and weight.requires_grad:
            self.norms[f"{name}.weight"] = torch.linalg.vecdot(a, a) * outputs

    def _add_raw(self, name: str, b: Tensor, aligned: list[int]) -> None:
        """Add a sample's gradient up over the axes along which the parameter is repeated."""
        b = full_precision(b.detach().narrow(0, self.first, self.count))
        repeated = [axis for axis, size in enumerate(aligned) if size == 1 and axis > 0]
        if repeated:
            b = b.sum(repeated)
        self.norms[name] = b.reshape(self.count, -1).square().sum(1)


class _Hook:
    """A layer's forward hook; in a copy of the layer it is nothing, so that a model can be pickled in between."""

    def __init__(self, recorder: StepRecorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        recorder = self.recorder
        listening = recorder.listening and recorder.problem is None and not is_observing()
        if listening and isinstance(output, Tensor) and output.requires_grad:
            if args:
                recorder.heard(self.name, module, args[0], output)
            else:
                recorder.problem = f"layer {self.name!r} was given its input by keyword"

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (
            nullcontext(),
            "__exit__",
        )  # takes anything, does nothing, and is there without this package


def _for_all_samples(module: nn.Module, shape: torch.Size, batch_size: int) -> bool:
    """Whether a table was looked up once for all samples: the output has no rows of samples, or one."""
    if not isinstance(module, nn.Embedding) or batch_size == 1:
        return False
    return shape[0] == 1 or (len(shape) == 2 and shape[0] != batch_size)


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    return (
        torch.autocast(device_type, enabled=False)
        if torch.is_autocast_enabled(device_type)
        else nullcontext()
    )


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
