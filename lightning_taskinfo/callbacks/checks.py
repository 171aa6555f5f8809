"""What is known before a training, or after its first step: that module, batches and weights suit a probe."""

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

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
from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._observe import observing, trainable_parameters
from lightning_taskinfo._sharded import gathered_parameters, sharded
from lightning_taskinfo._warn import warn
from lightning_taskinfo.fisher.accumulators import Norms
from lightning_taskinfo.fisher.measure import Request, measure
from lightning_taskinfo.functional.likelihood import (
    Bernoulli,
    Categorical,
    Likelihood,
    look_like_probabilities,
)
from lightning_taskinfo.regularizers import Regularizer
from lightning_taskinfo.variational import noisy_weights

RELATIVE, ABSOLUTE = 0.1, 0.05  # losses differ clearly beyond both, the latter in nats

_compared: "WeakKeyDictionary[Trainer, set[Any]]" = WeakKeyDictionary()


def check_batch(
    who: str,
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None,
    asked: Request,
    check: Callable[[Tensor, Tensor | None], None],
) -> None:
    """Run the model on two samples, and let their outputs and targets be checked; call it inside ``observing``.

    Raises:
        ValueError: If it cannot be run, or its outputs are refused.
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
        outputs = asked.forward(model, few)
    except NoLogitsError:
        raise
    except Exception as error:
        raise ValueError(
            f"{who}: calling the module on the inputs of a batch failed ({type(error).__name__}: {error}); set "
            "`forward_fn` to a function of (module, inputs) that returns the outputs."
        ) from error
    check(outputs, few_targets)
    if sharded(model):  # what no hook follows is known now, not at the first measurement
        request = replace(asked, labels="sampled")
        measure(model, few, few_targets, request, Norms(size(few)))


def check_fit(who: str, outputs: Tensor, targets: Tensor | None, likelihood: Likelihood) -> None:
    """Refuse outputs and targets that do not fit the likelihood, and warn of probabilities in the place of logits."""
    likelihood.check(outputs, targets)
    if isinstance(likelihood, Categorical) and look_like_probabilities(outputs):
        warn(
            f"{who} takes outputs for logits, and those of the first samples are probabilities: set `forward_fn`, "
            "e.g. to lambda module, inputs: module(inputs).log()."
        )


def check_weights(who: str, model: nn.Module) -> None:
    """Raise a ``ValueError`` if there is nothing to measure, or complex numbers, whose squares are no norms."""
    weights = trainable_parameters(model)
    if not weights:
        raise ValueError(f"{who} needs a parameter with `requires_grad=True`, got none.")
    for name, p in weights.items():
        if p.is_complex():
            raise ValueError(f"{who} needs real parameters, got complex {name!r}.")


def check_plain(who: str, model: nn.Module) -> None:
    """Raise a ``ValueError`` if the weights are noisy: their log-variances would count as weights."""
    if any(noisy_weights(model)):
        raise ValueError(
            f"{who} measures plain weights, got noisy ones: the information in them is `weight_kl(module)`, which "
            "`penalised` logs as taskinfo/information/quantity."
        )


def check_finite_weights(model: nn.Module) -> None:
    """Raise a ``ValueError`` if a trainable weight is NaN or infinite."""
    weights: dict[str, Any] = trainable_parameters(model)
    for name, p in weights.items():
        if hasattr(p, "to_local"):
            weights[name] = p.to_local()
    with torch.no_grad():  # one number a tensor first: this runs at every measurement
        sums = torch.stack([p.sum() for p in weights.values()])
        if all(map(math.isfinite, sums.tolist())):
            return
        for name, p in weights.items():
            if not bool(p.isfinite().all()):
                raise ValueError(f"the weights of {name!r} are not finite")


def check_shards(
    who: str,
    trainer: Trainer,
    model: nn.Module,
    needs_whole_weights: str,
    max_samples: int,
) -> bool:
    """Return whether weights are spread over processes.

    Raises:
        ValueError: If a probe cannot work with weights that are spread in this way.
    """
    kind = kind_of_shards(model, trainer.strategy.model or model)
    if kind is None:
        return False
    if reason := needs_whole_weights or ("" if sharded(model) else "follows weights of FSDP2 only"):
        raise ValueError(
            f"{who} {reason} and cannot work with sharded weights, got {kind}; "
            "use a strategy that keeps them whole, e.g. 'ddp'."
        )
    if max_samples < trainer.world_size:
        needed = f"at least 1 for each of {trainer.world_size} processes with sharded weights"
        raise ValueError(f"`max_samples` must be {needed}, got {max_samples}.")
    gathered_parameters(model)  # refuses what it cannot gather
    return True


def kind_of_shards(*models: nn.Module) -> str | None:
    """Return what the weights of a module, or of the strategy's wrapper around it, are sharded as, if they are."""
    modules = [module for model in models for module in model.modules()]
    parameters = [p for model in models for p in model.parameters()]
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded: nothing is sharded so
    tensor = sys.modules.get("torch.distributed.tensor")
    if fsdp and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
        return "FullyShardedDataParallel"  # whose parameters may look like others, only smaller
    if any(hasattr(p, "ds_id") for p in parameters):  # how DeepSpeed tells them itself
        return "DeepSpeed ZeRO stage 3"
    if tensor and any(isinstance(p, tensor.DTensor) for p in parameters):
        return "DTensor"
    return None


def warn_nothing(
    who: str,
    steps: int,
    data: str,
    every_n_steps: int | None,
    every_n_epochs: int | None,
) -> None:
    """Say why a training was not measured at all: it was shorter than the schedule, or there is none."""
    if data in ("train", "val"):  # measured at the end as well
        reason = "`max_samples` is more than it has seen"
    elif every_n_steps is not None:
        reason = f"`every_n_steps={every_n_steps}` is longer"
    elif every_n_epochs is not None:
        reason = f"`every_n_epochs={every_n_epochs}` is longer"
    else:
        reason = "set one of `every_n_steps`, `every_n_epochs`"
    warn(f"{who} has measured nothing during training, which ended after {steps} steps; {reason}.")


class LossComparison:
    """Is what is measured what is trained? Its loss on the first batch beside that of the training step.

    Made once for all callbacks that read batches in the same way. The loss is that of the module in
    its own modes, from the random state that the training step will find: dropout and batch norm do
    the same in both. A comparison that is not possible is left out, and never stops a training.

    Args:
        who: The callback, for the warning.
        reader: How it reads batches.
        likelihood: What it takes outputs for.
    """

    def __init__(self, who: str, reader: Reader, likelihood: Likelihood) -> None:
        self.who = who
        self.reader = reader
        self.likelihood = likelihood
        self.losses: list[float] = []

    def before_the_step(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        """Note the loss of the batch, before its training step."""
        self.losses = []
        comparable = isinstance(self.likelihood, Categorical | Bernoulli)  # those with one scale
        if not comparable or any(noisy_weights(pl_module)):
            return
        compared = _compared.setdefault(trainer, set())
        same = (self.reader.batch_fn, self.reader.forward_fn, self.likelihood)
        try:
            if same not in compared:
                compared.add(same)
                self.losses = self._losses(pl_module, batch)
        except Exception:  # of the user's own code: measurements will say what is wrong
            self.losses = []

    def _losses(self, module: nn.Module, batch: Any) -> list[float]:
        """Return the loss of a batch, averaged in every way that a training step may do it."""
        modes = [(part, part.training) for part in module.modules()]
        inputs, targets = self.reader.read(module, batch)
        if targets is None:
            return []
        with observing(module), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part, mode in modes:
                part.training = mode
            outputs = self.reader.outputs(module, inputs).float()
            self.likelihood.check(outputs, targets)
            if isinstance(self.likelihood, Categorical) and look_like_probabilities(outputs):
                return []  # which has been said
            loss = -self.likelihood.log_prob(outputs, targets).double()  # [N]
            counted = self.likelihood.counted(outputs, targets).double()
            counted = counted.flatten(1).sum(1)  # [N]
        means = [
            loss.mean(),
            loss.sum() / counted.sum(),
            (loss / counted).mean(),
            loss.sum(),
        ]
        return [float(mean) for mean in means if math.isfinite(mean)]

    def after_the_step(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> None:
        """Warn where the loss that the training step returned is clearly another one."""
        trained = _trained_loss(trainer, pl_module, outputs)
        if not self.losses or trained is None:
            return
        nearest = min(self.losses, key=lambda loss: abs(loss - trained))
        gap = abs(nearest - trained)
        larger = max(abs(nearest), abs(trained))
        if gap > ABSOLUTE and gap > RELATIVE * larger:
            warn(
                f"{self.who} finds a loss of {self.losses[0]:.4g} nats per sample on the first batch, and "
                f"`training_step` returned {trained:.4g}: what is measured may not be what is trained. `batch_fn`, "
                "`forward_fn` and `likelihood` say how batches are read; dropout, label smoothing, class weights and "
                "other terms of the loss are further causes."
            )


def _trained_loss(trainer: Trainer, pl_module: LightningModule, outputs: Any) -> float | None:
    """Return the loss of a training step without its penalties, as far as it can be known."""
    returned = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        return None
    likelihood = getattr(pl_module, "_likelihood_loss", None)  # what `penalised` was given
    if likelihood is not None:
        return float(likelihood)
    if any(isinstance(part, Regularizer) for part in pl_module.modules()):
        return None
    return float(returned) * trainer.accumulate_grad_batches
