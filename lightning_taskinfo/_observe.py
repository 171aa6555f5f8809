"""The parts of a model, and how to look at it without leaving a trace."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_taskinfo._random import keep_random_states

ParamDict = dict[str, Tensor]
"""Tensors by parameter name, as in ``model.named_parameters()``."""

WRAPPER = "base_model.model."  # that peft puts around a network
ADAPTERS = ("lora_", "ia3_", "hada_", "lokr_", "oft_", "boft_", "vera_", "modules_to_save")
"""How the parts of a layer begin that peft adds to it; behind them stands the adapter's name."""

_OBSERVED: ContextVar[frozenset[int]] = ContextVar("observed", default=frozenset())  # modules' ids


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training moves, by name; a tied parameter appears once.

    Args:
        model: Any module.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> _ = net[0].requires_grad_(False)
        >>> list(trainable_parameters(net))
        ['1.weight', '1.bias']
    """
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def layer_of(parameter: str) -> str:
    """Return the layer that owns a parameter; all parts of an adapter belong to the layer that it adapts.

    Args:
        parameter: Name of the parameter, as in ``named_parameters()``.

    Returns:
        The layer's name, without what peft puts around it; nothing for a parameter of the model
        itself. An adapter that is not called ``"default"`` has its name behind that of the layer.

    Example:
        >>> layer_of("net.0.weight"), layer_of("net.base_model.model.encoder.0.query.lora_A.default.weight")
        ('net.0', 'net.encoder.0.query')
        >>> layer_of("base_model.model.query.lora_B.german.weight")
        'query:german'
    """
    *owners, last = parameter.replace(WRAPPER, "").split(".")
    for place, part in enumerate(owners):
        if part.startswith(ADAPTERS):
            adapter, *_ = [*owners[place + 1 :], last]
            layer = ".".join(owners[:place])
            return layer if adapter == "default" else f"{layer}:{adapter}"
    return ".".join(owners)


class Parts(NamedTuple):
    """All modules, parameters and buffers of a model, each once."""

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    buffers: list[Tensor]


def parts(model: nn.Module) -> Parts:
    """Return all modules, parameters and buffers of a model.

    Example:
        >>> modules, parameters, buffers = parts(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        >>> len(modules), len(parameters), len(buffers)
        (3, 4, 3)
    """
    modules = [*model.modules()]
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    for module in modules:  # once, where `parameters()` and `buffers()` would walk again
        parameters |= {id(p): p for p in module._parameters.values() if p is not None}
        buffers |= {id(b): b for b in module._buffers.values() if b is not None}
    return Parts(modules, [*parameters.values()], [*buffers.values()])


@contextmanager
def observing(model: nn.Module) -> Iterator[nn.Module]:
    """Run ``model`` in eval mode with gradients on, and put everything back afterwards, even on an exception.

    Inside, autograd works (also within ``validate``, ``test`` and ``predict``), autocast is off and
    compiled modules run eagerly, because hooks added after compilation are silently skipped.
    Afterwards the mode of every module, every buffer, every ``.grad`` and the states of torch's,
    numpy's and Python's random generators are what they were, so a training that is observed ends
    with the same bits as one that is not. What a forward pass keeps elsewhere, such as a plain
    attribute or a generator of its own, is not put back.

    Tensors made under ``torch.inference_mode()`` cannot take part in autograd: clone them inside.

    Args:
        model: The module to look at.

    Yields:
        The same module.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
        >>> with torch.no_grad(), observing(net):
        ...     net.training, net(torch.ones(1, 2)).requires_grad
        (False, True)
        >>> net.training
        True
    """
    with observing_parts(parts(model)):
        yield model


@contextmanager
def observing_parts(observed: Parts) -> Iterator[None]:
    """Do what :func:`observing` does, with the parts of a model that has been walked through already."""
    modules, parameters, buffers = observed
    devices = {torch.device("cpu")}
    devices.update(t.device for t in (*parameters, *buffers))
    kinds = {device.type for device in devices} - {"meta"}
    restore_random_states = keep_random_states(devices)
    modes = [module.training for module in modules]
    places = [dict(module._buffers) for module in modules]
    # What is stretched over one place in memory cannot be written to.
    written = [x for x in buffers if x.layout != torch.strided or not _stretched(x)]
    for m in modules:  # parameters that a forward pass writes to: rows are shortened when used
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            written.append(m.weight)
    values = [tensor.detach().clone() for tensor in written]
    grads = [p.grad for p in parameters]
    ids = {id(module) for module in modules}
    outside = _OBSERVED.set(_OBSERVED.get() | ids)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for kind in sorted(kinds):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            # Otherwise nothing can be compiled, and importing it takes a second.
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module in modules:
                if module.training:
                    # Not `.eval()`: a module may override it, e.g. to keep its batch norm frozen.
                    module.training = False
            for p in parameters:
                p.grad = None  # a `backward()` inside adds to a gradient of its own
            yield
    finally:
        _OBSERVED.reset(outside)
        restore_random_states()
        for module, mode, place in zip(modules, modes, places, strict=True):
            if module.training != mode:
                module.training = mode
            module._buffers.clear()  # of what a forward pass has registered
            module._buffers.update(place)
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
        for tensor, value in zip(written, values, strict=True):
            # Through `.data`, which counts as no change: a graph recorded before stays good for its
            # backward.
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)
            tensor.data.copy_(value)


def _stretched(x: Tensor) -> bool:
    """Whether entries share a place in memory, as after ``expand``."""
    return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


def observing_once(observed: Parts) -> AbstractContextManager[None]:
    """Do what :func:`observing` does, unless that is done: the one outside will put everything back.

    Args:
        observed: The parts of a model, from :func:`parts`.
    """
    modules, parameters, buffers = observed
    outside = _OBSERVED.get()
    kinds = {t.device.type for t in (*parameters, *buffers)} - {"meta"}
    done = (
        all(id(module) in outside and not module.training for module in modules)
        and all(p.grad is None for p in parameters)
        and torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not any(torch.is_autocast_enabled(kind) for kind in kinds)
    )
    return nullcontext() if done else observing_parts(observed)


def weights_now(model: nn.Module) -> ParamDict:
    """Return a copy of the trainable weights, by name.

    Args:
        model: Any module.
    """
    weights = trainable_parameters(model)
    return {name: p.detach().clone() for name, p in weights.items()}


@contextmanager
def holding(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let parameters hold other values, and their own tensors again afterwards, also on an exception.

    Args:
        parameters: Parameters by name.
        values: What each of them is to hold.
    """
    kept = {name: p.data for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.data = values[name]
        yield
    finally:
        for name, p in parameters.items():
            p.data = kept[name]


HALVES = (torch.float16, torch.bfloat16)


def at_least_float32(x: Tensor) -> Tensor:
    """Return a half-precision tensor as float32, and any other as it is."""
    return x.float() if x.dtype in HALVES else x


def full_precision(observed: Parts) -> AbstractContextManager[None]:
    """Turn half-precision parameters and buffers into float32, and put the very same tensors back afterwards.

    Args:
        observed: The parts of a model, from :func:`parts`.

    Example:
        >>> layer = nn.Linear(2, 2).bfloat16()
        >>> with full_precision(parts(layer)):
        ...     layer(torch.ones(1, 2)).dtype
        torch.float32
        >>> layer.weight.dtype
        torch.bfloat16
    """
    everything = (*observed.parameters, *observed.buffers)
    halves = {str(i): t for i, t in enumerate(everything) if t.dtype in HALVES}
    return holding(halves, {name: t.data.float() for name, t in halves.items()})
