"""Which layers a training step can be read off, and whether its graph uses their parameters in no other way."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_taskinfo.fisher import calls


def _batch_norm(m: Any, x: Tensor) -> calls.Call:
    if not (m.training or m.running_mean is None):
        return calls.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, eps=m.eps)
    normalised: Callable[[Tensor], Tensor] = lambda a: F.batch_norm(a, None, None, None, None, True, 0.0, m.eps)  # noqa: E731
    return calls._scale_and_shift(x, m.weight, m.bias, normalised)


def _instance_norm(m: Any, x: Tensor) -> calls.Call:
    own = m.training or not m.track_running_stats
    return calls.instance_norm(x, m.running_mean, m.running_var, m.weight, m.bias, own, eps=m.eps)


READERS: dict[type[nn.Module], Callable[[Any, Tensor], calls.Call | None]] = {
    nn.Linear: lambda m, x: calls.linear(x, m.weight, m.bias),
    _ConvNd: lambda m, x: calls.conv(x, m.weight, m.bias, m.stride, m.padding, m.dilation, m.groups),
    _InstanceNorm: _instance_norm,
    _BatchNorm: _batch_norm,
    nn.GroupNorm: lambda m, x: calls.group_norm(x, m.num_groups, m.weight, m.bias, m.eps),
    nn.LayerNorm: lambda m, x: calls.layer_norm(x, m.normalized_shape, m.weight, m.bias, m.eps),
    nn.RMSNorm: lambda m, x: calls.rms_norm(x, m.normalized_shape, m.weight, m.eps),
    nn.Embedding: lambda m, x: calls.embedding(
        x, m.weight, m.padding_idx, m.max_norm, scale_grad_by_freq=m.scale_grad_by_freq
    ),
}
_NAMES = [kind.__name__.strip("_").removesuffix("Nd") for kind in READERS]


def reader(module: nn.Module) -> Callable[[Any, Tensor], calls.Call | None]:
    """Return how a layer's call is read."""
    return next(read for kind, read in READERS.items() if isinstance(module, kind))


def trained_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that own all trainable parameters, or say which one is in the way."""
    compiled = [name for name, module in model.named_modules() if _compiled(module)]
    if compiled:
        raise ValueError(f"`data='train_step'` cannot look into compiled modules, got {compiled[0] or 'the model'!r}.")
    owners: dict[int, str] = {}
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            if (odd := _odd(module, key)) is not None:
                kind = f"{name}.{key}".lstrip(".") + f" of {type(module).__name__}"
                raise ValueError(f"`data='train_step'` reads {', '.join(_NAMES)}, got {kind!r}{odd}.")
            if owners.setdefault(id(p), name) != name:
                raise ValueError(
                    f"`data='train_step'` needs weights of one layer each, got {owners[id(p)]!r} and {name!r} tied."
                )
            layers[name] = module
    return layers


def _compiled(module: nn.Module) -> bool:
    in_lightning = getattr(module, "_compiler_ctx", None) is not None
    return in_lightning or module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _odd(module: nn.Module, parameter: str) -> str | None:
    """Return what keeps a layer's parameter from being read, in words that may be none; None where it can be."""
    if not isinstance(module, tuple(READERS)) or isinstance(module, _ConvTransposeNd):
        return ""
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f" with padding_mode={module.padding_mode!r}"
    if parameter not in ("weight", "bias"):
        return ", from which another weight is computed"
    methods = [name for name in ("forward", "_conv_forward") if hasattr(module, name)]
    own = any(name in vars(module) or not _from_torch(getattr(type(module), name)) for name in methods)
    return " with a `forward` of its own" if own else None


def _from_torch(method: Any) -> bool:
    return str(method.__module__).startswith("torch.nn.modules.")


def used_elsewhere(loss: Tensor, parameters: dict[str, nn.Parameter]) -> str | None:
    """Return which parameter the graph uses other than once, which its layer's hook alone would not show."""
    consumers: dict[Node, list[Node]] = defaultdict(list)
    stack, visited = [loss.grad_fn], {loss.grad_fn}
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions if node is not None else ():
            if following is not None:
                consumers[following].append(node)  # type: ignore[arg-type]
                if following not in visited:
                    visited.add(following)
                    stack.append(following)
    leaves = {id(node.variable): node for node in consumers if hasattr(node, "variable")}
    for name, p in parameters.items():
        users = consumers[leaves[id(p)]] if id(p) in leaves else []
        while len(users) == 1 and users[0].name() == "ToCopyBackward0":  # autocast
            users = consumers[users[0]]
        if len(users) != 1:
            return f"parameter {name!r} was used {len(users)} times in the training step"
    return None
