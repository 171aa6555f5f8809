"""Ways to adapt a pretrained network: all of it, its head, adapters, or from a layer on."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

from torch import nn

Adapt: TypeAlias = str | Callable[[Any], None]
RANK = 8  # of the adapters


def way_name(way: Adapt) -> str:
    """Return what a way to adapt is called."""
    if isinstance(way, str):
        return way
    return getattr(way, "__name__", type(way).__name__)


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
        ValueError: If it is no way, the module has no layer for it, or nothing is left to train.
    """
    head = set(fresh) or last_layer(module)
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


def last_layer(module: nn.Module) -> set[str]:
    """Return names of the parameters of the last layer that has any."""
    names = [name for name, _ in module.named_parameters()]
    last, _, _ = names[-1].rpartition(".")
    return {name for name in names if name.rpartition(".")[0] == last}


def _freeze_up_to(module: nn.Module, layer: str) -> None:
    """Freeze a layer and what was defined before it."""
    if layer not in dict(module.named_modules()):
        raise ValueError(
            f"`adapt` must be 'full', 'linear', 'lora', a function, or a layer's name to freeze up to, got {layer!r}."
        )
    reached = False
    for name, part in module.named_modules():
        inside = f"{name}.".startswith(f"{layer}.")
        if reached and not inside:
            return
        reached = reached or inside
        for parameter in part.parameters(recurse=False):
            parameter.requires_grad_(False)


def _add_adapters(module: nn.Module, head: set[str]) -> None:
    if find_spec("peft") is None:
        raise ValueError(
            "`adapt` must be a way that is installed, got 'lora', which needs peft: pip install peft."
        )
    from peft import LoraConfig, inject_adapter_in_model

    layers = []
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and f"{name}.weight" not in head:
            layers.append(name)
    if not layers:
        raise ValueError(
            "`adapt` must suit the network, got 'lora' for one without linear layers before its head."
        )
    adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers)
    inject_adapter_in_model(adapters, module)
    for name, parameter in module.named_parameters():
        if name in head:
            parameter.requires_grad_(True)
