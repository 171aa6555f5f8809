"""What can be known before training: that the module, its batches and its weights suit a probe."""

import sys
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo.callbacks._samples import first_samples, size
from lightning_taskinfo.fisher.engine import Request, measure
from lightning_taskinfo.fisher.sharded import sharded
from lightning_taskinfo.fisher.sinks import Norms
from lightning_taskinfo.functional.likelihood import Likelihood, as_likelihood


def check_batch(
    who: str,
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    likelihood: str | Likelihood,
    forward_fn: Callable[[Any, Any], Any] | None,
) -> None:
    """Run the model on two samples; call it inside ``observing``.

    Raises:
        ValueError: If it cannot be run, or outputs and targets do not fit the likelihood.
    """
    if not size(inputs):
        return
    few, few_targets = first_samples(inputs, targets, 2)
    try:
        outputs = Request(forward_fn=forward_fn).forward(model, few)
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"{who} calls the module on the inputs of a batch, which failed ({error}); "
            "set `forward_fn` to a function of (module, inputs) that returns the outputs."
        ) from error
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"{who} needs a tensor of outputs, got {type(outputs).__name__}; "
            "set `forward_fn` to a function of (module, inputs) that picks it."
        )
    as_likelihood(likelihood).check(outputs, few_targets)
    if sharded(model):  # what no hook follows is known now, not at the first measurement
        measure(model, few, few_targets, Request(likelihood=likelihood, forward_fn=forward_fn), Norms(size(few)))


def check_finite(model: nn.Module) -> None:
    """Raise a ``ValueError`` if a trainable weight is NaN or infinite."""
    weights: dict[str, Any] = trainable_parameters(model)
    weights = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in weights.items()}
    with torch.no_grad():
        if all(isfinite(total) for total in torch.stack([p.sum() for p in weights.values()]).tolist()):
            return  # one number a tensor first: this runs at every measurement
        for name, p in weights.items():
            if not bool(p.isfinite().all()):
                raise ValueError(f"the weights of {name!r} are not finite")


def kind_of_shards(model: nn.Module) -> str | None:
    """Return the kind of a sharded parameter, if there is one."""
    modules = {"torch.distributed.fsdp": "FlatParameter", "torch.distributed.tensor": "DTensor"}
    kinds = tuple(getattr(sys.modules[module], kind) for module, kind in modules.items() if module in sys.modules)
    return next((type(p).__name__ for p in model.parameters() if isinstance(p, kinds)), None)


def refuse_twins(callback: Any) -> None:
    """Say which argument to set where Lightning compares the keys of a new Trainer's callbacks, and would not.

    To be called by the key itself: it is all that Lightning asks before it gives up. Other callers see nothing.

    Raises:
        ValueError: If another callback of the Trainer has the same class and name.
    """
    caller = sys._getframe(2)
    if caller.f_code.co_name != "_validate_callbacks_list":
        return
    kind, others = type(callback), caller.f_locals.get("callbacks", ())
    if any(type(other) is kind and other.name == callback.name and other is not callback for other in others):
        raise ValueError(
            f"`name` must be another one for each {kind.__name__} of a Trainer, got {callback.name!r} twice; "
            f"give one of them its own, such as {kind.__name__}(name='second')."
        )
