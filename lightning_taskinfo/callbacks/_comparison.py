"""Is what a callback measures what is trained? Its loss on one batch beside that of the training step."""

import math
import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import Reader
from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._observe import observing
from lightning_taskinfo._warn import warn
from lightning_taskinfo.functional._tensors import look_like_probabilities
from lightning_taskinfo.functional.likelihood import (
    Bernoulli,
    Categorical,
    Likelihood,
    as_likelihood,
)
from lightning_taskinfo.regularizers import Regularizer
from lightning_taskinfo.variational import noisy_weights

RELATIVE, ABSOLUTE = (
    0.1,
    0.05,
)  # differences that are clear: beyond both of these, the latter in nats

_compared: "WeakKeyDictionary[Trainer, set[Any]]" = WeakKeyDictionary()


class LossComparison:
    """Compares the loss of the first training batch, once for all callbacks that read batches in the same way.

    The loss is that of the module in its own modes, from the random state that the training step will find: dropout
    and batch norm do the same in both. A comparison that is not possible is left out, and never stops a training.

    Args:
        who: The callback, for the warning.
        reader: How it reads batches.
        likelihood: What it takes outputs for.
    """

    def __init__(self, who: str, reader: Reader, likelihood: str | Likelihood) -> None:
        self.who = who
        self.reader = reader
        self.likelihood = as_likelihood(likelihood)
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
            if same in compared:
                return
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
            counted = self.likelihood.counted(outputs, targets).double().flatten(1).sum(1)  # [N]
        means = [loss.mean(), loss.sum() / counted.sum(), (loss / counted).mean(), loss.sum()]
        return [float(mean) for mean in means if math.isfinite(mean)]

    def after_the_step(self, trainer: Trainer, pl_module: LightningModule, outputs: Any) -> None:
        """Warn where the loss that the training step returned is clearly another one."""
        losses, self.losses = self.losses, []
        returned = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if not losses or not isinstance(returned, Tensor) or returned.numel() != 1:
            return
        trained = float(returned) * trainer.accumulate_grad_batches
        penalised = any(isinstance(part, Regularizer) for part in pl_module.modules())
        likelihood = getattr(pl_module, "_likelihood_loss", None)  # what `penalised` was given
        if penalised and likelihood is None:
            return
        if likelihood is not None:
            trained = float(likelihood)
        nearest = min(losses, key=lambda loss: abs(loss - trained))
        gap = abs(nearest - trained)
        if gap > ABSOLUTE and gap > RELATIVE * max(abs(nearest), abs(trained)):
            warn(
                f"{self.who} finds a loss of {losses[0]:.4g} nats per sample on the first batch, and `training_step` "
                f"returned {trained:.4g}: what is measured may not be what is trained. `batch_fn`, `forward_fn` and "
                "`likelihood` say how batches are read; dropout, label smoothing, class weights and other terms of "
                "the loss are further causes."
            )
