"""What can be known before training: that the module, its batches and its weights suit a probe."""

import sys
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import (
    NoLogitsError,
    Reader,
    described,
    first_samples,
    size,
    tensors,
)
from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo._warn import warn
from lightning_taskinfo.fisher.accumulators import Norms
from lightning_taskinfo.fisher.measure import Request, measure
from lightning_taskinfo.fisher.sharded import gathered_parameters, sharded
from lightning_taskinfo.functional._tensors import look_like_probabilities
from lightning_taskinfo.functional.likelihood import Categorical, Likelihood, as_likelihood
from lightning_taskinfo.variational import noisy_weights


def check_batch(
    who: str,
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    likelihood: str | Likelihood,
    reader: Reader,
) -> None:
    """Run the model on two samples; call it inside ``observing``.

    Raises:
        ValueError: If it cannot be run, or outputs and targets do not fit the likelihood.
    """
    if not any(True for _ in tensors(inputs)):
        raise ValueError(
            f"{who} needs inputs that are tensors, samples along the first axis, or lists and dicts of them, got "
            f"{described(inputs)}; set `batch_fn` to a function of the batch that returns such inputs and the targets."
        )
    if not size(inputs):
        return
    few, few_targets = first_samples(inputs, targets, 2)
    try:
        outputs = reader.outputs(model, few)
    except NoLogitsError:
        raise
    except Exception as error:
        raise ValueError(
            f"{who}: calling the module on the inputs of a batch failed ({type(error).__name__}: {error}); set "
            "`forward_fn` to a function of (module, inputs) that returns the outputs."
        ) from error
    as_likelihood(likelihood).check(outputs, few_targets)
    if isinstance(as_likelihood(likelihood), Categorical) and look_like_probabilities(outputs):
        warn(
            f"{who} takes outputs for logits, and those of the first samples are probabilities: set `forward_fn`, "
            "e.g. to lambda module, inputs: module(inputs).log()."
        )
    if sharded(model):  # what no hook follows is known now, not at the first measurement
        measure(
            model,
            few,
            few_targets,
            Request(likelihood=likelihood, forward_fn=reader.forward_fn),
            Norms(size(few)),
        )


def check_weights(who: str, model: nn.Module) -> None:
    """Raise a ``ValueError`` if there is nothing to measure, or complex numbers, whose squares are no norms."""
    weights = trainable_parameters(model)
    if not weights:
        raise ValueError(f"{who} needs a parameter with `requires_grad=True`, got none.")
    if unreal := [name for name, p in weights.items() if p.is_complex()]:
        raise ValueError(f"{who} needs real parameters, got complex {unreal[0]!r}.")


def check_shards(
    who: str,
    model: nn.Module,
    kind: str,
    needs_whole_weights: str,
    max_samples: int,
    processes: int,
) -> None:
    """Raise a ``ValueError`` if a probe cannot work with sharded weights of this kind."""
    if reason := needs_whole_weights or ("" if sharded(model) else "follows weights of FSDP2 only"):
        raise ValueError(
            f"{who} {reason} and cannot work with sharded weights, got {kind}; "
            "use a strategy that keeps them whole, e.g. 'ddp'."
        )
    if max_samples < processes:
        needed = f"at least 1 for each of {processes} processes with sharded weights"
        raise ValueError(f"`max_samples` must be {needed}, got {max_samples}.")
    gathered_parameters(model)  # refuses what it cannot gather


def check_plain(who: str, model: nn.Module) -> None:
    """Raise a ``ValueError`` if the weights are noisy: their log-variances would count as weights."""
    if any(noisy_weights(model)):
        raise ValueError(
            f"{who} measures plain weights, got noisy ones: the information in them is `weight_kl(module)`, which "
            "`penalised` logs as taskinfo/information/quantity."
        )


def warn_nothing(
    who: str, steps: int, data: str, every_n_steps: int | None, every_n_epochs: int | None
) -> None:
    """Say why a training was not measured at all: it was shorter than the schedule, or there is none."""
    every = {"every_n_steps": every_n_steps, "every_n_epochs": every_n_epochs}
    if data in ("train", "val"):  # measured at the end as well
        reason = "`max_samples` is more than it has seen"
    else:
        given = [
            f"`{name}={value}` is longer" for name, value in every.items() if value is not None
        ]
        reason = given[0] if given else f"set one of {', '.join(f'`{name}`' for name in every)}"
    warn(f"{who} has measured nothing: training ended after {steps} steps; {reason}.")


def check_finite(model: nn.Module) -> None:
    """Raise a ``ValueError`` if a trainable weight is NaN or infinite."""
    weights: dict[str, Any] = trainable_parameters(model)
    weights = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in weights.items()}
    with torch.no_grad():
        if all(
            isfinite(total) for total in torch.stack([p.sum() for p in weights.values()]).tolist()
        ):
            return  # one number a tensor first: this runs at every measurement
        for name, p in weights.items():
            if not bool(p.isfinite().all()):
                raise ValueError(f"the weights of {name!r} are not finite")


def kind_of_shards(*models: nn.Module) -> str | None:
    """Return what the weights of a module, or of the strategy's wrapper around it, are sharded as, if they are."""
    modules, parameters = (
        [x for model in models for x in each(model)]
        for each in (nn.Module.modules, nn.Module.parameters)
    )
    fsdp, tensor = (
        sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor")
    )  # or nothing is
    if fsdp and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
        return "FullyShardedDataParallel"  # whose parameters may look like others, only smaller
    if any(hasattr(p, "ds_id") for p in parameters):  # how DeepSpeed tells them itself
        return "DeepSpeed ZeRO stage 3"
    return "DTensor" if tensor and any(isinstance(p, tensor.DTensor) for p in parameters) else None
