"""Which layers a training step can be read off."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_taskinfo.fisher import calls


def _batch_norm(m: Any, x: Tensor) -> calls.Call:
    if not (m.training or m.running_mean is None):
        return calls.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, eps=m.eps)

    def normalised(a: Tensor) -> Tensor:
        return F.batch_norm(a, None, None, None, None, True, 0.0, m.eps)

    return calls._scale_and_shift(x, m.weight, m.bias, normalised)


def _instance_norm(m: Any, x: Tensor) -> calls.Call:
    own = m.training or not m.track_running_stats
    return calls.instance_norm(x, m.running_mean, m.running_var, m.weight, m.bias, own, eps=m.eps)


READERS: dict[type[nn.Module], Callable[[Any, Tensor], calls.Call | None]] = {
    nn.Linear: lambda m, x: calls.linear(x, m.weight, m.bias),
    _ConvNd: lambda m, x: calls.conv(
        x, m.weight, m.bias, m.stride, m.padding, m.dilation, m.groups
    ),
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


class Trained(NamedTuple):
    """What a model trains: layers by name, and by name the parameters that belong to no such layer."""

    layers: dict[str, nn.Module]
    raw: dict[str, nn.Parameter]


def trained_layers(model: nn.Module) -> Trained:
    """Return the layers that own trainable parameters, and parameters of modules that are not torch's.

    Raises:
        ValueError: If a parameter cannot be read, is tied, or belongs to a compiled module; by name.
    """
    compiled = [name for name, module in model.named_modules() if _compiled(module)]
    if compiled:
        raise ValueError(
            f"The training step of a compiled module cannot be read, got {compiled[0] or 'the model'!r}."
        )
    owners: dict[int, str] = {}
    found = Trained({}, {})
    readable: tuple[type[nn.Module], ...] = tuple(READERS)
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            full_name = f"{name}.{key}".lstrip(".")
            odd = _odd(module, key)
            if odd is not None:
                kinds = ", ".join(_NAMES)
                raise ValueError(
                    f"The training step is read at layers of the kinds {kinds}, got "
                    f"'{full_name} of {type(module).__name__}'{odd}."
                )
            if owners.setdefault(id(p), name) != name:
                raise ValueError(
                    f"The training step is read where each weight has one layer, got {owners[id(p)]!r} and {name!r} "
                    "tied."
                )
            if isinstance(module, readable):
                found.layers[name] = module
            else:
                found.raw[full_name] = p
    return found


def _compiled(module: nn.Module) -> bool:
    in_lightning = getattr(module, "_compiler_ctx", None) is not None
    return in_lightning or module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _odd(module: nn.Module, parameter: str) -> str | None:
    """Return what keeps a layer's parameter from being read, in words that may be none; None where it can be."""
    if not isinstance(module, tuple(READERS)) and not _from_torch(type(module)):
        return None  # a parameter that is used as it is, where the graph shows how
    if not isinstance(module, tuple(READERS)) or isinstance(module, _ConvTransposeNd):
        return ""
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f" with padding_mode={module.padding_mode!r}"
    if parameter not in ("weight", "bias"):
        return ", from which another weight is computed"
    methods = [name for name in ("forward", "_conv_forward") if hasattr(module, name)]
    own = any(
        name in vars(module) or not _from_torch(getattr(type(module), name)) for name in methods
    )
    return " with a `forward` of its own" if own else None


def _from_torch(method: Any) -> bool:
    return str(method.__module__).startswith("torch.nn.modules.")
