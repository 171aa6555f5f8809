"""Where a training on the target starts from, and how it is adapted.

A start is a checkpoint, a state dict, a module of another architecture, or scratch. All of it is
adapted, its head, adapters, or what comes after a layer.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, product
from pathlib import Path
from typing import Any, TypeAlias
from weakref import ref

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_taskinfo._batches import read_batch
from lightning_taskinfo._calls import outputs_of
from lightning_taskinfo._files import digest, read_checkpoint, read_tensors
from lightning_taskinfo._lightning import NAMESPACES
from lightning_taskinfo._observe import observing
from lightning_taskinfo._ranges import check_finite_tensors
from lightning_taskinfo._warn import reason_of, warn
from lightning_taskinfo.transfer.sampling import reseed

Weights: TypeAlias = Mapping[str, Tensor]
MakeModule: TypeAlias = Callable[[], Any]
Given: TypeAlias = str | os.PathLike[str] | Weights | MakeModule
Adapt: TypeAlias = str | Callable[[Any], None]
RANK = 8  # of the adapters
STATISTICS = (".running_mean", ".running_var")


@dataclass(frozen=True)
class Start:
    """One start of a transfer.

    Attributes:
        make: Makes the module.
        weights: Weights that replace those of the fresh module, under its names; or the file that
            holds them.
        fresh: Names of weights that stay as they were made: a head of another size.
        last: Names of the parameters of its last layer.
    """

    make: MakeModule
    weights: Weights | Path
    fresh: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    def module(self, seed: int) -> Any:
        """Return the module at its start; what is fresh in it depends on the seed alone."""
        reseed(seed, 3)
        module = make_module(self.make)
        weights = self.weights
        if isinstance(weights, Path):
            weights = read_tensors(weights, advice="Delete it to have it written again.")
        if weights:
            module.load_state_dict(dict(weights), strict=False)
        return module

    def origin(self) -> str:
        """Return which of its weights are fresh and which are taken over, in words."""
        if not self.weights:
            return "all weights as its function makes them"
        said = "all weights are taken over"
        if self.fresh:
            said = f"fresh {', '.join(self.fresh)}; all other weights are taken over"
        if not {*self.last} <= {*self.fresh}:
            head = f"the last layer too ({', '.join(self.last)})"
            said += f", {head}; if its classes are others, leave it out of the state dict"
        return said

    def digest(self) -> str:
        """Return what tells this start from others of its name."""
        return digest(self.module(0).state_dict().items())


def read_start(argument: str, given: Given, make: MakeModule) -> Start:
    """Return the start that a user gave.

    Args:
        argument: What it is called.
        given: A path of a checkpoint or of a state dict, a state dict, or a function that makes a
            module.
        make: Makes the user's module, into which weights go.

    Raises:
        ValueError: If the file cannot be read, or the weights do not fit.
        TypeError: If it is something else.
    """
    if isinstance(given, str | os.PathLike):
        given = read_checkpoint(argument, given).state
    if isinstance(given, Mapping):
        state: Any = given.get("state_dict", given)
        return _fitted(argument, state, make)
    if isinstance(given, nn.Module) or not callable(given):
        rule = "a checkpoint, a state dict or a function that makes a module"
        raise TypeError(f"`{argument}` must be {rule}, got a {type(given).__name__}.")
    check_new(given, argument)
    return Start(given, {})


def check_new(make: MakeModule, argument: str) -> None:
    """Raise a ``ValueError`` if a function makes no whole LightningModule, or one that it has made before.

    Trainings would begin with what others have left in its weights.
    """
    parameters = [*make_module(make, argument).parameters()]
    if not parameters or any(map(is_lazy, parameters)):
        raise ValueError(
            f"`{argument}` must make a network with all its weights, got one that makes some when it is run."
        )
    before = [ref(parameter) for parameter in parameters]
    del parameters
    kept = {id(parameter) for parameter in (known() for known in before) if parameter is not None}
    if any(id(parameter) in kept for parameter in make_module(make, argument).parameters()):
        raise ValueError(
            f"`{argument}` must make a new network at each call, got the same weights twice."
        )


def make_module(make: MakeModule, argument: str = "model") -> Any:
    """Return what a function makes, if it is a LightningModule.

    Raises:
        ValueError: If it is something else, or the function fails.
    """
    try:
        module = make()
    except Exception as error:  # of the user's own function
        rule = f"`{argument}` must make a network"
        raise ValueError(f"{rule}, but it failed ({reason_of(error)}).") from error
    if namespace_of(module) is None:
        rule = f"`{argument}` must make a LightningModule"
        raise ValueError(f"{rule}, got {type(module).__name__}.")
    return module


def namespace_of(module: Any) -> str | None:
    """Return whose LightningModule it is, if it is one."""
    for name, namespace in NAMESPACES.items():
        if isinstance(module, namespace.LightningModule):
            return name
    return None


def _fitted(
    argument: str,
    given: Mapping[str, Any],
    make: MakeModule,
) -> Start:
    """Weights under the names of the user's module; those of another size are left out."""
    if not given or not all(isinstance(tensor, Tensor) for tensor in given.values()):
        rule = "must hold tensors by name"
        raise ValueError(f"`{argument}` {rule}, got a mapping without or with other things.")
    module = make_module(make)
    given = {key.replace("_orig_mod.", ""): x for key, x in given.items()}  # of compiled parts
    shapes = {key: getattr(tensor, "shape", None) for key, tensor in module.state_dict().items()}
    # Of all names that a module inside another may give them, those that suit most.
    weights: dict[str, Tensor] = {}
    taken = into = ""
    for old, new in product(_prefixes(given), _prefixes(shapes)):
        renamed = {new + key.removeprefix(old): given[key] for key in given if key.startswith(old)}
        fitting = {key: x for key, x in renamed.items() if x.shape == shapes.get(key)}
        as_many = fitting and len(fitting) == len(weights)
        if as_many and _apart(old, taken):
            raise ValueError(
                f"`{argument}` must hold one set of weights for `model`, got {taken!r} and {old!r}."
            )
        if as_many and _apart(new, into):
            raise ValueError(
                f"`{argument}` must fit one part of `model`, got weights that fit {into!r} and {new!r} alike: let "
                "their names begin with one of these."
            )
        if len(fitting) > len(weights):
            weights, taken, into = fitting, old, new
    weights = {key: weight.detach().cpu().clone() for key, weight in weights.items()}
    parameters = [key for key, _ in module.named_parameters()]
    fresh = tuple(key for key in parameters if key not in weights)
    if 2 * len(fresh) > len(parameters):
        count = f"{len(parameters) - len(fresh)} of {len(parameters)} parameters"
        lacking = f"{fresh[0]} {list(module.get_parameter(fresh[0]).shape)}"
        raise ValueError(
            f"`{argument}` must fit `model` but for its head, got weights for {count}, none for {lacking}."
        )
    check_finite_tensors(argument, weights)
    left = [key for key in shapes if key not in weights and key.endswith(STATISTICS)]
    if left:
        warn(f"`{argument}` has no {', '.join(left[:3])}: batch norm starts as in a fresh module.")
    return Start(make, weights, fresh)


def _apart(one: str, other: str) -> bool:
    return not (one.startswith(other) or other.startswith(one))


def _prefixes(names: Collection[str]) -> list[str]:
    """What at least half of the names begin with, up to a dot."""
    starts = Counter[str]()
    for name in names:
        parts = name.split(".")[:-1]
        starts.update(accumulate((f"{part}." for part in parts), initial=""))
    return [prefix for prefix, count in starts.items() if 2 * count >= len(names)]


def way_name(way: Adapt) -> str:
    """Return what a way to adapt is called."""
    if isinstance(way, str):
        return way
    return getattr(way, "__name__", type(way).__name__)


def adapted(module: Any, way: Adapt, head: Collection[str]) -> Any:
    """Leave trainable what a way to adapt trains; the module is changed in place and returned.

    Args:
        module: The module at its start.
        way: ``"full"``; ``"linear"``, the head alone; ``"lora"``, low-rank adapters of all linear
            layers, and the head; the name of a layer, which is frozen with all before it; or a
            function that freezes what it likes.
        head: Names of the parameters of the head.

    Raises:
        ValueError: If it is no way, the module has no layer for it, or nothing is left to train.
    """
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


def last_layer(module: Any, batch: Any) -> tuple[str, ...]:
    """Return names of the parameters that outputs are computed with from the last matrix on.

    Where the module cannot be called on the batch, they are those of the layer that was defined last.
    All of the module is trainable afterwards.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    for known in names:
        known.requires_grad_(known.is_floating_point())
    outputs = seen_outputs(module, batch)
    used: dict[nn.Parameter, int] = {}  # when it was used last
    nodes: list[Any] = [] if outputs is None else [outputs.grad_fn]
    seen = {*nodes}
    for node in nodes:  # which grows
        for source, _ in getattr(node, "next_functions", ()):
            parameter: Any = getattr(source, "variable", None)
            if parameter in names:
                used[parameter] = max(used.get(parameter, 0), node._sequence_nr())
            elif source is not None and source not in seen:
                seen.add(source)
                nodes.append(source)
    matrices = [when for parameter, when in used.items() if parameter.dim() > 1]
    if matrices:
        return tuple(
            name for parameter, name in names.items() if used.get(parameter, 0) >= max(matrices)
        )
    layers = [part for part in module.modules() if not [*part.children()] and [*part.parameters()]]
    return tuple(names[parameter] for layer in layers[-1:] for parameter in layer.parameters())


def seen_outputs(module: Any, batch: Any) -> Tensor | None:
    """Return a module's outputs for a batch, where it can be called; what is wrong is said when it is trained."""
    with observing(module):
        try:
            inputs, _ = read_batch(batch, module)
            return outputs_of(module, inputs)
        except Exception:  # of the user's own module
            return None


def _freeze_up_to(module: nn.Module, layer: str) -> None:
    """Freeze a layer and what was defined before it."""
    names = [name for name, _ in module.named_modules()]
    if layer not in names:
        rule = "'full', 'linear', 'lora', a function, or a layer's name to freeze up to"
        raise ValueError(f"`adapt` must be {rule}, got {layer!r}.")
    inside = [name for name in names if f"{name}.".startswith(f"{layer}.")]
    for name in names[: names.index(inside[-1]) + 1]:
        for parameter in module.get_submodule(name).parameters(recurse=False):
            parameter.requires_grad_(False)


def _add_adapters(module: nn.Module, head: Collection[str]) -> None:
    if find_spec("peft") is None:
        raise ValueError(
            "`adapt` must be a way that is installed, got 'lora', which needs peft: pip install peft."
        )
    from peft import LoraConfig, inject_adapter_in_model

    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    layers = [name for name in linear if not any(part.startswith(f"{name}.") for part in head)]
    if not layers:
        raise ValueError(
            "`adapt` must suit the network, got 'lora' for one without linear layers before its head."
        )
    # A pattern for whole names: in a list, "head" would stand for "decoder.head" too.
    pattern = "|".join(map(re.escape, layers))
    inject_adapter_in_model(
        LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=pattern),
        module,
    )
    for name, parameter in module.named_parameters():
        if name in head:
            parameter.requires_grad_(True)
