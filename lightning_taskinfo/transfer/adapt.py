"""Ways to adapt a pretrained network: all of it, its head, adapters, or from a layer on."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

from torch import nn

Adapt: TypeAlias = str | Callable[[Any], None]
WAYS = ("full", "linear", "lora")
RANK = 8  # of the adapters


def way_name(way: Adapt) -> str:
    """Return what a way to adapt is called."""
    return way if isinstance(way, str) else getattr(way, "__name__", type(way).__name__)


def check_way(way: Adapt, module: nn.Module) -> None:
    """Raise a ``ValueError`` for a way that is none, or that the module has no layer for."""
    if not isinstance(way, str):
        return
    if way == "lora" and find_spec("peft") is None:
        raise ValueError(
            "`adapt` must be a way that is installed, got 'lora', which needs peft: pip install peft."
        )
    if way not in WAYS and way not in dict(module.named_modules()):
        raise ValueError(
            f"`adapt` must be 'full', 'linear', 'lora', a function, or a layer's name to freeze up to, got {way!r}."
        )


def adapted(module: Any, way: Adapt, fresh: Sequence[str]) -> Any:
    """Leave trainable what a way to adapt trains; the module is changed in place and returned.

    Args:
        module: The module at its start.
        way: ``"full"``; ``"linear"``, the head alone; ``"lora"``, low-rank adapters of all linear
            layers, and the head; the name of a layer, which is frozen with all before it; or a
            function that freezes what it likes.
        fresh: Names of parameters that have no pretrained weights: the head. The last layer, where
            there are none.

    Raises:
        ValueError: If nothing is left to train.
    """
    head = set(fresh) or _last_layer(module)
    if not isinstance(way, str):
        way(module)
    elif way == "linear":
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name in head)
    elif way == "lora":
        _add_adapters(module, head)
    elif way != "full":
        _freeze_up_to(module, way)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError(
            f"`adapt` must leave something to train, got {way_name(way)!r} which freezes everything."
        )
    return module


def frozen_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules with weights of which none is trained: they run as in evaluation."""
    found = []
    for part in module.modules():
        parameters = list(part.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            found.append(part)
    return found


def _last_layer(module: nn.Module) -> set[str]:
    """Names of the parameters of the last layer that has any."""
    names = [name for name, _ in module.named_parameters()]
    layer = names[-1].rpartition(".")[0]
    return {name for name in names if name.rpartition(".")[0] == layer}


def _freeze_up_to(module: nn.Module, layer: str) -> None:
    """Freeze a layer and what was defined before it."""
    names = [name for name, _ in module.named_parameters()]
    inside = [place for place, name in enumerate(names) if name.startswith(f"{layer}.")]
    last = inside[-1] if inside else _place_of(module, layer, names)
    for name in names[: last + 1]:
        module.get_parameter(name).requires_grad_(False)


def _place_of(module: nn.Module, layer: str, names: Sequence[str]) -> int:
    """Number of the last parameter that is defined before a layer without any."""
    last = -1
    for name, part in module.named_modules():
        if name == layer:
            break
        own = [f"{name}.{key}".lstrip(".") for key, _ in part.named_parameters(recurse=False)]
        last = max([last, *(names.index(key) for key in own if key in names)])
    return last


def _add_adapters(module: nn.Module, head: set[str]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    layers = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and f"{name}.weight" not in head
    ]
    if not layers:
        raise ValueError(
            "`adapt` must suit the network, got 'lora' for one without linear layers before its head."
        )
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers), module)
    for name, parameter in module.named_parameters():
        if name in head:
            parameter.requires_grad_(True)
