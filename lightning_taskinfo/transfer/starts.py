"""Where a training on the target starts from: a checkpoint, a state dict, a module of another architecture, scratch."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from lightning_taskinfo._files import digest, read_checkpoint, read_tensors
from lightning_taskinfo._lightning import NAMESPACES
from lightning_taskinfo._warn import reason_of
from lightning_taskinfo.transfer.adapt import last_layer
from lightning_taskinfo.transfer.sampling import reseed

MakeModule: TypeAlias = Callable[[], Any]
Given: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor] | MakeModule


@dataclass(frozen=True)
class Start:
    """One start of a transfer.

    Attributes:
        name: What it is called.
        make: Makes the module.
        weights: Weights that replace those of the fresh module, under its names; or the file that
            holds them.
        fresh: Names of weights that stay as they were made: a head of another size.
    """

    name: str
    make: MakeModule
    weights: Mapping[str, Tensor] | Path
    fresh: tuple[str, ...] = ()

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

    def stored(self, folder: Path) -> "Start":
        """Return this start with its weights in a file: every run reads them there, none carries them."""
        return replace(self, weights=folder / "weights.pt") if self.weights else self

    def origin(self) -> str:
        """Return which of its weights are fresh and which are taken over, in words."""
        if not self.weights:
            return "all weights as its function makes them"
        said = "all weights are taken over"
        if self.fresh:
            said = f"fresh {', '.join(self.fresh)}; all other weights are taken over"
        if last_layer(make_module(self.make)) <= set(self.fresh):
            return said
        return (
            f"{said}, the last layer too; if its classes are others, leave it out of the state dict"
        )

    def digest(self) -> str:
        """Return what tells this start from others of its name."""
        return digest(self.module(0).state_dict().items())


def read_start(name: str, given: Given, make: MakeModule) -> Start:
    """Return the start that a user gave.

    Args:
        name: What it is called.
        given: A path of a checkpoint or of a state dict, a state dict, or a function that makes a
            module.
        make: Makes the user's module, into which weights go.

    Raises:
        ValueError: If the file cannot be read, or the weights do not fit.
        TypeError: If it is something else.
    """
    argument = f"starts[{name!r}]"
    if isinstance(given, str | os.PathLike):
        given = read_checkpoint(argument, given).state
    if isinstance(given, nn.Module):
        raise TypeError(
            f"`{argument}` must be a function that makes a module, got a module; its state_dict() is a start."
        )
    if isinstance(given, Mapping):
        return _fitted(name, given, make, argument)
    if callable(given):
        make_module(given, argument=argument)
        return Start(name, given, {})
    raise TypeError(
        f"`{argument}` must be a checkpoint, a state dict or a function, got {type(given).__name__}."
    )


def make_module(make: MakeModule, *, argument: str = "model") -> Any:
    """Return what a function makes, if it is a LightningModule.

    Raises:
        ValueError: If it is something else, or the function fails.
    """
    try:
        module = make()
    except Exception as error:  # of the user's own function
        reason = reason_of(error)
        raise ValueError(
            f"`{argument}` must make a LightningModule, but it failed ({reason})."
        ) from error
    if namespace_of(module) is None:
        raise ValueError(f"`{argument}` must make a LightningModule, got {type(module).__name__}.")
    return module


def namespace_of(module: Any) -> str | None:
    """Return whose LightningModule it is, if it is one."""
    for name, namespace in NAMESPACES.items():
        if isinstance(module, namespace.LightningModule):
            return name
    return None


def _fitted(name: str, given: Mapping[str, Any], make: MakeModule, argument: str) -> Start:
    """Weights under the names of the user's module; those of another size are left out."""
    only_tensors = all(isinstance(tensor, Tensor) for tensor in given.values())
    if not given or not only_tensors:
        raise ValueError(
            f"`{argument}` must hold tensors by name, got a mapping without or with other things."
        )
    module = make_module(make)
    state = module.state_dict()
    own = {key: tensor for key, tensor in state.items() if isinstance(tensor, Tensor)}
    renamed = _renamed(given, own)
    weights = _shared(renamed, own)
    parameters = [key for key, _ in module.named_parameters()]
    fresh = tuple(key for key in parameters if key not in weights)
    if len(fresh) == len(parameters):
        first = _described(renamed, next(iter(renamed)))
        mine = _described(own, next(iter(own)))
        raise ValueError(
            f"`{argument}` must have weights in common with `model`, got none: {first} there, {mine} here."
        )
    if 2 * len(fresh) > len(parameters):
        odd = next((key for key in fresh if key in renamed), fresh[0])
        raise ValueError(
            f"`{argument}` must fit `model` but for its head, got weights for {len(parameters) - len(fresh)} of "
            f"{len(parameters)} parameters: {_described(renamed, odd)} there for {_described(own, odd)} here."
        )
    for key, tensor in weights.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(
                f"`{argument}` must hold finite weights, got NaN or infinity in {key}."
            )
        weights[key] = tensor.detach().cpu().clone()
    return Start(name, make, weights, fresh)


def _described(state: Mapping[str, Tensor], key: str) -> str:
    """Name and shape of a weight, if it is there."""
    return f"{key} {list(state[key].shape)}" if key in state else "nothing"


def _renamed(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The given weights under the names, of all that a module inside another may give them, that suit most."""
    every = []
    for old in _prefixes(given):
        inside = [key for key in given if key.startswith(old)]
        for new in _prefixes(own):
            state = {}
            for key in inside:
                state[new + key.removeprefix(old)] = given[key]
            every.append(state)
    return max(every, key=lambda state: len(_shared(state, own)))


def _prefixes(names: Iterable[str]) -> list[str]:
    """What at least half of the names begin with, up to a dot."""
    starts: Counter[str] = Counter()
    for name in names:
        starts[""] += 1
        for place in range(len(name)):
            start = name[:place]
            if start.endswith("."):
                starts[start] += 1
    half = starts[""] / 2
    return [prefix for prefix, count in starts.items() if count >= half]


def _shared(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the same name and shape."""
    shared = {}
    for key, tensor in state.items():
        if key in own and tensor.shape == own[key].shape:
            shared[key] = tensor
    return shared
