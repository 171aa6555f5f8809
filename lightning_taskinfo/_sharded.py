"""Weights that are sharded over processes (FSDP2): which tensors a forward pass really uses.

``torch.distributed.fsdp.fully_shard`` leaves a shard of each parameter in the module, gathers the
whole one for the forward pass of its module and again for the backward pass, and frees it
afterwards. The gathered parameter is one object for the whole training, so that a use of it can be
recognised once it has been seen.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_taskinfo._observe import trainable_parameters


def sharded(model: nn.Module) -> bool:
    """Whether the model, or a part of it, gathers its weights for every pass."""
    return bool(_fsdp_modules(model))


def gathered_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters as forward passes use them, by name; those of the model if it is not sharded.

    They are gathered a module at a time, and freed again: outside of a pass, a parameter of a
    sharded model has a name and a shape, and no values. All processes have to call this, and to run
    the same passes afterwards.

    Raises:
        ValueError: If a parameter is sharded in another way than by FSDP2, or gathered in half
            precision.
    """
    parameters = trainable_parameters(model)
    if not any(map(_is_shard, parameters.values())):
        return parameters
    for shard in _fsdp_modules(model):
        shard.unshard()
        for name, p in trainable_parameters(model).items():
            if _is_shard(parameters[name]):
                parameters[name] = p
        shard.reshard()
    for name, p in parameters.items():
        if _is_shard(p):
            raise ValueError(
                f"`model` must be sharded by `fully_shard` alone, got {name!r} sharded in another way."
            )
        if p.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"`model` must gather its shards in float32 or better, got {name!r} in {p.dtype}."
            )
    return parameters


@contextmanager
def resharding(model: nn.Module) -> Iterator[None]:
    """Leave the model sharded: a pass without a backward keeps the outermost module gathered."""
    try:
        yield
    finally:
        for shard in _fsdp_modules(model):
            shard.reshard()


def _is_shard(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "full_tensor")


def _fsdp_modules(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if not fsdp:  # not imported: nothing is sharded by it
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
