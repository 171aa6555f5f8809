"""Per-sample squared gradient norms from a training step's own backward pass: no forward or backward is added.

Layers are hooked for one step. Each call notes its input, and the gradient of the loss by its output is read when the
backward pass of the training comes by; input and gradient give every sample's share of the weight gradient.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from lightning_taskinfo._observe import ParamDict, is_observing
from lightning_taskinfo._warn import warn
from lightning_taskinfo.fisher.hooks import written
from lightning_taskinfo.fisher.layers import Slot, Use
from lightning_taskinfo.fisher.sharded import gathered_parameters
from lightning_taskinfo.fisher.step_layers import reader, trained_layers, used_elsewhere

CHECKED = 50  # steps from one look at the graph to the next
SEQUENCES = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)  # whose outputs may have the samples behind time


class StepRecorder:
    """Reads the squared gradient norm of each sample off one training step at a time.

    Args:
        model: The model that is trained; all its trainable parameters must belong to layers that are understood, each
            of which is called once a step.
        max_samples: The first samples of a batch that are measured.

    Raises:
        ValueError: If a parameter belongs to no such layer or to two, or a module is compiled; by name.
    """

    def __init__(self, model: nn.Module, max_samples: int) -> None:
        self.model, self.all = model, [*model.parameters()]
        self.handles: list[RemovableHandle] = []
        self.norms: ParamDict = {}  # squared, by parameter name, each [max_samples], after the backward pass
        self.seen: set[str] = set()
        self.problem: str | None = None
        self.listening = self.graph_checked = self.warned = False
        self.batch_size, self.count, self.max_samples = 0, 0, max_samples
        self._look_again()

    def _look_again(self) -> None:
        """Find the layers that are trained now."""
        self.trained, self.unchecked = [p.requires_grad for p in self.all], 0
        self.refused: str | None = None
        self.layers: dict[str, nn.Module] = {}
        self.uses: dict[str, tuple[Any, Use]] = {}
        self.layers = trained_layers(self.model)
        self.readers = {name: reader(module) for name, module in self.layers.items()}
        self.parameters = gathered_parameters(self.model)

    def start(self, batch_size: int) -> None:
        """Listen to one forward pass over ``batch_size`` samples."""
        if self.trained != [p.requires_grad for p in self.all]:  # as when a backbone is unfrozen
            self.stop()
            try:
                self._look_again()
            except ValueError as error:
                self.refused = str(error)
        self.skip(self.refused)
        if self.refused:
            return
        self.listening, self.batch_size, self.count = True, batch_size, min(batch_size, self.max_samples)
        if not self.handles:
            hooks = ((module, _Hook(self, name)) for name, module in self.layers.items())
            self.handles = [module.register_forward_hook(hook) for module, hook in hooks]

    def skip(self, reason: str | None) -> None:
        """Forget the step before; there is nothing to read of the next one, for this reason."""
        self.listening = False
        self.norms, self.seen, self.problem = {}, set(), reason

    def stop(self) -> None:
        """Take the hooks away; to leave them for the next step is quicker than to hook the layers again."""
        self.listening = False
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def before_backward(self, loss: Tensor) -> None:
        """Listen no longer, and note what speaks against a measurement of this step."""
        self.listening = False
        left = [name for name in self.layers if name not in self.seen]
        if left and self.problem is None:
            self.problem = f"layer {left[0]!r} was not called with gradients in the training step"
        if self.unchecked == 0 and self.problem is None:
            self.problem = used_elsewhere(loss, self.parameters)
        self.graph_checked, self.unchecked = True, (self.unchecked + 1) % CHECKED

    def heard(self, name: str, module: nn.Module, x: Tensor, output: Tensor) -> None:
        """Note a layer's call, whose gradient is read when the backward pass comes by."""
        edge = self._once(name, output)
        if edge is None:
            return
        (node, number), shape, version = edge, output.shape, x._version
        if len(shape) > 2 and shape[1] == self.batch_size > 1 and isinstance(module, SEQUENCES) and not self.warned:
            self.warned = True
            warn(f"Layer {name!r} has outputs {list(shape)}, with the samples on axis 0 or 1; axis 0 is taken.")
        held = [x]  # until it was read, so that its memory is free when it would be without us

        def read(gradients: tuple[Tensor | None, ...]) -> None:
            if not held:
                self.problem = self.problem or f"the backward pass came by layer {name!r} more than once"
                return
            x, b = held.pop(), gradients[number]
            if x._version != version:
                self.problem = f"the input of layer {name!r} was changed in place"
            elif b is not None:
                if torch.is_grad_enabled():  # in a backward pass that makes a graph
                    x, b = x.detach(), b.detach()
                try:
                    self._add(name, module, x, b if b.shape == shape else b.reshape(shape))
                except Exception as error:  # which would end the training
                    self.problem = f"layer {name!r} could not be read ({type(error).__name__}: {error})"

        node.register_prehook(read)  # which has no part of the graph: it would keep itself alive

    def _once(self, name: str, output: Tensor) -> tuple[Node, int] | None:
        """Return where the output's gradient comes by, or note what speaks against reading it."""
        computed = written(output)
        node = None if computed is None else computed.grad_fn
        if name in self.seen:
            self.problem = f"layer {name!r} was called more than once in the training step"
        elif output.shape[0] != self.batch_size:
            self.problem = f"layer {name!r} had {output.shape[0]} rows of outputs for {self.batch_size} samples"
        elif node is None:
            self.problem = f"layer {name!r} had a part of a tensor as output"
        self.seen.add(name)
        return None if self.problem or computed is None or node is None else (node, computed.output_nr)

    def _add(self, name: str, module: nn.Module, x: Tensor, b: Tensor) -> None:
        b = _full(b.narrow(0, 0, self.count))
        if b.dim() == 2 and type(module) is nn.Linear:
            self._add_linear(name, module, _full(x.narrow(0, 0, self.count)), b)
            return
        with _no_autocast(x.device.type):
            if use := self._use(name, module, x, b):
                for slot, named in use.slots.items():
                    self.norms[named.name] = use.norms(slot, [b])
                use.saved = ()

    def _use(self, name: str, module: nn.Module, x: Tensor, b: Tensor) -> Use | None:
        """Return what the layer did; the same as at the step before where only the values of its input are others."""
        whole = isinstance(module, _BatchNorm) and not isinstance(module, _InstanceNorm)  # needs the whole batch
        x = _full(x if whole else x[: self.count])
        owned = {slot: p for slot, p in module._parameters.items() if p is not None and p.requires_grad}
        key = (x.shape, b.shape, *owned)
        if name in self.uses and self.uses[name][0] == key:
            use = self.uses[name][1]
            use.saved = ((x, 0),)
            return use
        call = self.readers[name](module, x)
        if call is None:
            self.problem = f"layer {name!r} ({type(module).__name__}) has options that cannot be read from hooks"
            return None
        if whole and (factor := call.config["factor"].get("weight")):
            call.config["factor"]["weight"] = lambda: factor()[: len(b)]
        slots = {slot: Slot(f"{name}.{slot}", tuple(p.shape)) for slot, p in owned.items()}
        use = call.kind(slots, None, b.shape, tuple((s, 0) for s in call.saved), call.config)  # type: ignore[arg-type]
        if "factor" not in call.config:  # which is a function of the input
            self.uses[name] = key, use
        return use

    def _add_linear(self, name: str, layer: nn.Linear, a: Tensor, b: Tensor) -> None:
        """Use the rank of ``b aᵀ``: its squared norm is the product of two."""
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]  # quicker than as attributes
        outputs = torch.linalg.vecdot(b, b)
        if bias is not None and bias.requires_grad:
            self.norms[f"{name}.bias"] = outputs
        if weight is not None and weight.requires_grad:
            self.norms[f"{name}.weight"] = torch.linalg.vecdot(a, a) * outputs


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
        return getattr, (nullcontext(), "__exit__")  # takes anything, does nothing, and is there without this package


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
