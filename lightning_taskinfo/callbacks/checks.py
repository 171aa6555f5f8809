"""What is known before a training, or after its first step: that module, batches and weights suit a probe."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._calls import NoLogitsError
from lightning_taskinfo._lightning import Trainer
from lightning_taskinfo._nested import first_samples, sample_count
from lightning_taskinfo._observe import observing, trainable_parameters
from lightning_taskinfo._sharded import gathered_parameters, sharded
from lightning_taskinfo._warn import warn
from lightning_taskinfo.fisher.accumulators import Norms
from lightning_taskinfo.fisher.measure import measure
from lightning_taskinfo.functional.likelihood import (
    Bernoulli,
    Categorical,
    as_likelihood,
    look_like_probabilities,
)
from lightning_taskinfo.regularizers import Regularizer
from lightning_taskinfo.variational import noisy_weights

RELATIVE, ABSOLUTE = 0.1, 0.05  # losses differ clearly beyond both, the latter in nats


def check_samples(probe: Any, model: nn.Module, inputs: Any, targets: Tensor | None) -> None:
    """Run the model on two samples, and let the probe check outputs and targets; call it inside ``observing``.

    Raises:
        ValueError: If it cannot be run, or its outputs are not what the probe needs.
    """
    sample_count(inputs)  # refuses what has none
    few, few_targets = first_samples(inputs, targets, 2)
    try:
        outputs = probe.reader.outputs(model, few)
    except NoLogitsError:
        raise
    except Exception as error:
        raise ValueError(
            f"{probe.state_key}: calling the module on the inputs of a batch failed ({type(error).__name__}: {error}); "
            "set `forward_fn` to a function of (module, inputs) that returns the outputs."
        ) from error
    if sharded(model):  # what no hook follows is known now, not at the first measurement
        request = replace(probe._asked, labels="sampled")
        measure(model, few, few_targets, request, Norms(sample_count(few)))
    probe._check_outputs(outputs, few_targets)


def check_module(probe: Any, trainer: Trainer, model: nn.Module) -> bool:
    """Return whether the weights of a module are spread over processes.

    Raises:
        ValueError: If a probe cannot work with them: there are none to measure, complex ones, whose
            squares are no norms, noisy ones, whose log-variances would count as weights, or ones
            that are spread in another way.
    """
    who = probe.state_key
    weights = trainable_parameters(model)
    if not weights:
        raise ValueError(f"{who} needs a parameter with `requires_grad=True`, got none.")
    for name, p in weights.items():
        if p.is_complex():
            raise ValueError(f"{who} needs real parameters, got complex {name!r}.")
    if probe.needs_plain_weights and any(noisy_weights(model)):
        raise ValueError(
            f"{who} measures plain weights, got noisy ones: the information in them is `weight_kl(module)`, which "
            "`penalised` logs as taskinfo/information/quantity."
        )
    kind = kind_of_shards(model) or kind_of_shards(trainer.strategy.model or model)
    if kind is None:
        return False
    reason = probe.needs_whole_weights
    if not sharded(model):
        reason = reason or "follows weights of FSDP2 only"
    if reason:
        raise ValueError(
            f"{who} {reason} and cannot work with sharded weights, got {kind}; "
            "use a strategy that keeps them whole, e.g. 'ddp'."
        )
    if probe.max_samples < trainer.world_size:
        raise ValueError(
            f"`max_samples` must be at least 1 for each of {trainer.world_size} processes with sharded weights, got "
            f"{probe.max_samples}."
        )
    gathered_parameters(model)  # refuses what it cannot gather
    return True


def kind_of_shards(model: nn.Module) -> str | None:
    """Return what the weights of a module, or of the strategy's wrapper around it, are sharded as, if they are."""
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            return "FullyShardedDataParallel"  # whose parameters may look like others, only smaller
    for p in model.parameters():
        if hasattr(p, "ds_id"):  # how DeepSpeed tells them itself
            return "DeepSpeed ZeRO stage 3"
        if hasattr(p, "full_tensor"):
            return "DTensor"
    return None


def first_losses(probe: Any, module: nn.Module) -> list[float]:
    """Return the loss of the first batch before its training step, averaged in every way that the step may do it.

    It is that of the module in its own modes, from the random state that the training step will
    find: dropout and batch norm do the same in both. There is none where it cannot be compared.
    """
    likelihood = as_likelihood(probe.likelihood)
    has_one_scale = isinstance(likelihood, Categorical | Bernoulli)
    if not has_one_scale or any(noisy_weights(module)):
        return []
    modes = [(part, part.training) for part in module.modules()]
    try:
        inputs, targets = probe.reader.read(module, probe._batch)
        with observing(module), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part, mode in modes:
                part.training = mode
            outputs = probe.reader.outputs(module, inputs).float()
            likelihood.check(outputs, targets)
            if targets is None or look_like_probabilities(outputs):
                return []  # the latter has been said
            loss = -likelihood.log_prob(outputs, targets).double()  # [N]
            counted = likelihood.counted(outputs, targets).flatten(1).double().sum(1)  # [N]
    except Exception:  # of the user's own code: measurements will say what is wrong
        return []
    means = [
        loss.mean(),
        loss.sum() / counted.sum(),
        (loss / counted).mean(),
        loss.sum(),
    ]
    return [float(mean) for mean in means if math.isfinite(mean)]


def compare_losses(probe: Any, outputs: Any) -> None:
    """Warn where the loss that the first training step returned is clearly none of those that the probe has found."""
    losses = probe._first_losses
    trained = _trained_loss(probe._trainer, outputs)
    if trained is None or not math.isfinite(trained):
        return
    if not any(math.isclose(loss, trained, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for loss in losses):
        warn(
            f"{probe.state_key} finds a loss of {losses[0]:.4g} nats per sample on the first batch, and "
            f"`training_step` returned {trained:.4g}: what is measured may not be what is trained. `batch_fn`, "
            "`forward_fn` and `likelihood` say how batches are read; dropout, label smoothing, class weights and "
            "other terms of the loss are further causes."
        )


def _trained_loss(trainer: Trainer, outputs: Any) -> float | None:
    """Return the loss of a training step without its penalties, as far as it can be known."""
    returned = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        return None
    module = trainer.lightning_module
    likelihood = getattr(module, "_likelihood_loss", None)  # what `penalised` was given
    if likelihood is not None:
        return float(likelihood)
    if any(isinstance(part, Regularizer) for part in module.modules()):
        return None
    return float(returned) * trainer.accumulate_grad_batches
