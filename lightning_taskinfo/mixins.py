"""The regularizers as methods of a LightningModule, added to the loss in plain sight.

Put the mixins before the LightningModule of either namespace, in any order; none of them overrides
a hook::

    class Net(MutualInformationMixin, LautumMixin, LightningModule):
        def __init__(self):
            super().__init__()
            self.lautum = Lautum(input_shape=(1, 28, 28), num_outputs=10, weight=0.001)
            self.mutual_information = MutualInformation(input_shape=(1, 28, 28), feature_dim=128, weight=0.1)

        def training_step(self, batch, batch_idx):
            x, y = batch["labeled"]
            x_u = batch["unlabeled"]
            return self.penalised(
                cross_entropy(self(x), y),
                lautum=self.lautum_penalty(x_u, self(x_u)),
                mutual_information=self.mutual_information_penalty(x_u, self.features(x_u)),
            )

``loss + self.lautum_penalty(...)`` does as well; :meth:`PenaltyMixin.penalised` also logs. A
forward on ``x_u`` moves the statistics of batch normalisation towards the target: where that is not
wanted, run it inside :func:`lightning_taskinfo.regularizers.frozen_batchnorm_statistics`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo._wandb import PREFIX
from lightning_taskinfo._warn import warn
from lightning_taskinfo.regularizers import (
    Lautum,
    LocalMinimumRegularizer,
    MultiKernelMMD,
    MutualInformation,
    Regularizer,
    TemporalEnsembling,
    WeightInformation,
)
from lightning_taskinfo.regularizers._base import check_scalar
from lightning_taskinfo.regularizers.information import warn_of_decay

if TYPE_CHECKING:
    from lightning_taskinfo._lightning import LightningModule, Trainer

    Base = LightningModule
else:
    Base = object

__all__ = [
    "InformationMixin",
    "LautumMixin",
    "LocalMinimumMixin",
    "MultiKernelMMDMixin",
    "MutualInformationMixin",
    "PenaltyMixin",
    "TemporalEnsemblingMixin",
]

Terms = Mapping[str, Tensor]


class PenaltyMixin(Base):
    """Sums a loss and its penalties, and shows whether the penalties do anything."""

    gradient_ratio_every_n_steps: int = 100
    """Optimizer steps between two measurements of the gradient-norm ratios; 0 turns them off."""
    _ratio_step: int = -1
    # Of the last step, without penalties: what callbacks compare theirs with.
    _likelihood_loss: Tensor | None = None

    def penalised(self, loss: Tensor, **penalties: Tensor) -> Tensor:
        """Return the loss plus all penalties, and log what each is made of.

        Logged are, all behind ``taskinfo/``, ``loss_without_penalties``, and for every penalty by
        name:

        - ``<name>/added_to_loss``, the objective that training descends, weight and sign included;
        - ``<name>/quantity``, what the penalty is about, e.g. an information in nats, and
          ``<name>/weight``, where ``self.<name>`` is a regularizer. The quantity may be another
          function than the objective: the mutual information is read with one estimator and trained
          with another;
        - every :attr:`gradient_ratio_every_n_steps`, from the first, where the penalty acts,
          ``<name>/gradient_ratio``, the norm of its gradient over the loss's own. That costs a
          backward pass for each, and leaves ``.grad`` alone. Below 0.05 early in a training no
          penalty has been seen to change the accuracy by a point; above, some cost nothing and
          others nearly everything (``benchmarks/gradient_ratio.py``): choose the weight by the
          accuracy.

        Args:
            loss: The loss itself, a scalar.
            **penalties: Penalties by name, e.g. ``lautum=self.lautum_penalty(x_u, self(x_u))``.

        Returns:
            The sum, to be returned by ``training_step``.

        Raises:
            ValueError: If the loss or a penalty is not a scalar tensor.
        """
        for name, term in {"loss": loss, **penalties}.items():
            check_scalar(name, term)
        self._likelihood_loss = loss.detach()
        if _trainer(self) is not None:
            self._log_penalties(loss, penalties)
        return loss + sum(penalties.values())

    def _log_penalties(self, loss: Tensor, penalties: Terms) -> None:
        values: dict[str, Any] = {f"{PREFIX}/loss_without_penalties": loss.detach()}
        for name, penalty in penalties.items():
            values[f"{PREFIX}/{name}/added_to_loss"] = penalty.detach()
            regularizer = getattr(self, name, None)
            if isinstance(regularizer, Regularizer) and regularizer.value is not None:
                values[f"{PREFIX}/{name}/quantity"] = regularizer.value
                values[f"{PREFIX}/{name}/weight"] = regularizer.weight
        self.log_dict(values, on_step=True, on_epoch=False)
        every = self.gradient_ratio_every_n_steps
        step = self.global_step
        # Once a step, also where several batches are accumulated in it.
        if not every or step % every or step == self._ratio_step or not self.training:
            return
        self._ratio_step = step
        ratios = self._gradient_ratios(loss, penalties)
        # Not `self.log`, which drops what falls between `log_every_n_steps`.
        for logger in self.loggers:
            logger.log_metrics(ratios, step=step)
        self.log_dict(ratios, on_step=True, on_epoch=False, logger=False)

    def _gradient_ratios(self, loss: Tensor, penalties: Terms) -> dict[str, float]:
        parameters = list(trainable_parameters(self).values())
        ratios = {}
        try:
            whole = max(gradient_norm(loss, parameters), 1e-30)
            for name, penalty in penalties.items():
                if penalty.requires_grad:  # not with a weight of 0
                    norm = gradient_norm(penalty, parameters)
                    ratios[f"{PREFIX}/{name}/gradient_ratio"] = norm / whole
        except RuntimeError as error:
            # A compiled backward pass that gives its buffers away runs only once.
            self.gradient_ratio_every_n_steps = 0
            warn(f"Gradient ratios of the penalties cannot be measured here: {error}")
        return ratios


def gradient_norm(term: Tensor, parameters: Sequence[Tensor]) -> float:
    """Return the norm of a scalar's gradient over all parameters; ``.grad`` and the graph stay as they are.

    Example:
        >>> w = torch.ones(4, requires_grad=True)
        >>> gradient_norm(w.sum(), [w])
        2.0
    """
    gradients = torch.autograd.grad(
        term, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.stack([g.float().norm() for g in gradients]).norm().item()


class InformationMixin(PenaltyMixin):
    """Trains the information in noisy weights; ``add_weight_noise`` and set ``self.information`` in ``__init__``."""

    information: WeightInformation
    _looked_at_decay = False

    def information_penalty(self) -> Tensor:
        """Return ``(beta / N) * KL`` in nats per sample; N is the number of labelled samples, or ``num_samples``.

        Weight decay on the log-variances is warned about, once.

        Raises:
            ValueError: If ``num_samples`` was not given and the size of the training set cannot be
                told.
        """
        trainer = _trainer(self)
        optimizers = getattr(trainer, "optimizers", None)
        if optimizers and not self._looked_at_decay:
            self._looked_at_decay = True
            warn_of_decay(self, optimizers)
        N = self.information.num_samples or labeled_samples(trainer)
        return self.information(self, num_samples=N, epoch=self.current_epoch)


class LautumMixin(PenaltyMixin):
    """Raises the Lautum information of unlabelled inputs; set ``self.lautum`` in ``__init__``, and fit it once."""

    lautum: Lautum

    def lautum_penalty(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Return ``-weight * L``, the Lautum information in nats.

        Args:
            inputs: Unlabelled inputs, shape ``[B, *input_shape]``; with ``proxy="jacobian"`` they
                must require a gradient before the network sees them.
            outputs: Their logits, shape ``[B, num_outputs]``.
        """
        return self.lautum(inputs, outputs, epoch=self.current_epoch)


class MutualInformationMixin(PenaltyMixin):
    """Lowers what features tell about unlabelled inputs; set ``self.mutual_information`` in ``__init__``."""

    mutual_information: MutualInformation

    def mutual_information_penalty(self, inputs: Tensor, features: Tensor) -> Tensor:
        """Return the weighted objective of the encoder, after the critic's own steps.

        Args:
            inputs: Unlabelled inputs, shape ``[B, *input_shape]``.
            features: Their features, shape ``[B, feature_dim]``.
        """
        return self.mutual_information(inputs, features, epoch=self.current_epoch)


class LocalMinimumMixin(PenaltyMixin):
    """Prefers flat minima; set ``self.local_minimum`` in ``__init__``."""

    local_minimum: LocalMinimumRegularizer

    def local_minimum_penalty(self, loss_fn: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Return ``weight * R`` for the mean loss that ``loss_fn`` computes of a part of ``batch``.

        Args:
            loss_fn: The mean loss of a part of the batch, a scalar.
            batch: A tensor, or a tuple, list or dict of tensors, whose first axes are cut into
                equal parts.
        """
        return self.local_minimum(self, loss_fn, batch, epoch=self.current_epoch)


class MultiKernelMMDMixin(PenaltyMixin):
    """Aligns source and target features; set ``self.mk_mmd`` in ``__init__``."""

    mk_mmd: MultiKernelMMD

    def mk_mmd_penalty(self, source: Tensor, target: Tensor) -> Tensor:
        """Return ``weight * MMD²``.

        Args:
            source: Features of source inputs, shape ``[B, D]``.
            target: Features of unlabelled target inputs, shape ``[B', D]``.
        """
        return self.mk_mmd(source, target, epoch=self.current_epoch)


class TemporalEnsemblingMixin(PenaltyMixin):
    """Holds predictions near their average over the epochs; set ``self.temporal_ensembling`` in ``__init__``."""

    temporal_ensembling: TemporalEnsembling

    def temporal_ensembling_penalty(self, outputs: Tensor, index: Tensor | Sequence[int]) -> Tensor:
        """Return the weighted squared difference of the predictions from their average over the epochs.

        Args:
            outputs: Logits, shape ``[B, num_outputs]``.
            index: Number of each sample in the training set, whole numbers from 0, shape ``[B]``.
        """
        return self.temporal_ensembling(outputs, index, epoch=self.current_epoch)


def labeled_samples(trainer: "Trainer | None") -> int:
    """Return the size of the labelled training set over all ranks, from the Trainer's loaders.

    Raises:
        ValueError: If it cannot be told.
    """
    loader: Any = getattr(trainer, "train_dataloader", None)  # Fabric has none
    loader = getattr(loader, "iterables", loader)  # of a CombinedLoader
    if isinstance(loader, dict):
        loader = loader.get("labeled")
    with suppress(AttributeError, TypeError):  # no loader, or something without a length
        batches = loader.batch_sampler
        sampler = loader.sampler if batches is None else batches.sampler
        if isinstance(sampler, DistributedSampler):
            sampler = sampler.dataset  # which is the user's sampler where Lightning shares that
        if len(sampler) >= len(loader.dataset):
            return len(loader.dataset)
    raise ValueError(
        "`num_samples` must be given to WeightInformation where no training loader says how many samples there are, "
        f"got {type(loader).__name__}."
    )


def _trainer(module: Any) -> "Trainer | None":
    try:
        return module.trainer
    except RuntimeError:  # not attached: a plain loop
        return None
