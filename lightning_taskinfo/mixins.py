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

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset

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
from lightning_taskinfo.regularizers._network import gradient_norms
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

R = TypeVar("R", bound=Regularizer)


class PenaltyMixin(Base):
    """Sums a loss and its penalties, and shows whether the penalties do anything."""

    gradient_ratio_every_n_steps: int = 100
    """Optimizer steps between two measurements of the gradient-norm ratios; 0 turns them off."""
    _ratio_step: int = -1
    # Of the last step, without penalties: what callbacks compare theirs with.
    _likelihood_loss: Tensor | None = None
    _acting: frozenset[str] = frozenset()  # penalties whose ratio was measured

    def penalised(self, loss: Tensor, *unnamed: NoReturn, **penalties: Tensor) -> Tensor:
        """Return the loss plus all penalties, and log what each is made of.

        Logged are, all behind ``taskinfo/``, ``loss_without_penalties``, and for every penalty by
        name:

        - ``<name>/added_to_loss``, the objective that training descends, weight and sign included;
        - ``<name>/quantity``, what the penalty is about, e.g. an information in nats, and
          ``<name>/weight``, where ``self.<name>`` is a regularizer. The quantity may be another
          function than the objective: the mutual information is read with one estimator and trained
          with another;
        - in the first step in which a penalty acts, and every :attr:`gradient_ratio_every_n_steps`,
          ``<name>/gradient_ratio``, the norm of its gradient over the loss's own. That costs a
          backward pass for each, and leaves ``.grad`` alone. Below 0.05 early in a training no
          penalty has been seen to change the accuracy by a point; above, some cost nothing and
          others nearly everything (``benchmarks/gradient_ratio.py``): choose the weight by the
          accuracy.

        Args:
            loss: The loss itself, a scalar.
            *unnamed: Refused: a penalty needs the name that it is logged under.
            **penalties: Penalties by name, e.g. ``lautum=self.lautum_penalty(x_u, self(x_u))``.

        Returns:
            The sum, to be returned by ``training_step``.

        Raises:
            TypeError: If a penalty has no name.
            ValueError: If the loss or a penalty is not a scalar tensor.
        """
        if unnamed:
            raise TypeError(
                f"Penalties must have names, `penalised(loss, name=penalty)`, got {len(unnamed)} without."
            )
        for name, term in {"loss": loss, **penalties}.items():
            check_scalar(name, term)
        self._likelihood_loss = loss.detach()
        if _trainer(self) is not None:
            self._log_penalties(loss, penalties)
        return loss + sum(penalties.values())

    def _log_penalties(self, loss: Tensor, penalties: dict[str, Tensor]) -> None:
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
        differentiable = self.training and torch.is_grad_enabled()
        if not every or step == self._ratio_step or not differentiable:
            return
        # A weight of 0 leaves no graph.
        acting = {name: term for name, term in penalties.items() if term.requires_grad}
        due = acting
        if step % every:
            due = {name: term for name, term in acting.items() if name not in self._acting}
        if due:
            self._ratio_step = step  # once a step, also where several batches are accumulated in it
            self._acting |= due.keys()
            ratios = self._gradient_ratios(loss, due)
            # Not `self.log`, which drops what falls between `log_every_n_steps`.
            for logger in self.loggers:
                logger.log_metrics(ratios, step=step)
            self.log_dict(ratios, on_step=True, on_epoch=False, logger=False)

    def _gradient_ratios(self, loss: Tensor, penalties: dict[str, Tensor]) -> dict[str, float]:
        parameters = list(trainable_parameters(self).values())
        try:
            whole = gradient_norms({"loss": loss}, parameters)["loss"]
            norms = gradient_norms(penalties, parameters)
            return {
                f"{PREFIX}/{name}/gradient_ratio": norm / max(whole, 1e-30)
                for name, norm in norms.items()
            }
        except RuntimeError as error:
            # A compiled backward pass that gives its buffers away runs only once.
            if "donated" not in str(error):
                raise
            self.gradient_ratio_every_n_steps = 0
            warn(f"Gradient ratios of the penalties cannot be measured here: {error}")
            return {}


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
        information = _regularizer(self, "information", WeightInformation)
        trainer = _trainer(self)
        if not self._looked_at_decay and (optimizers := getattr(trainer, "optimizers", None)):
            self._looked_at_decay = True
            warn_of_decay(self, optimizers)
        N = information.num_samples or labeled_samples(trainer)
        return information(self, num_samples=N, epoch=self.current_epoch)


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
        return _regularizer(self, "lautum", Lautum)(inputs, outputs, epoch=self.current_epoch)


class MutualInformationMixin(PenaltyMixin):
    """Lowers what features tell about unlabelled inputs; set ``self.mutual_information`` in ``__init__``."""

    mutual_information: MutualInformation

    def mutual_information_penalty(self, inputs: Tensor, features: Tensor) -> Tensor:
        """Return the weighted objective of the encoder, after the critic's own steps.

        Args:
            inputs: Unlabelled inputs, shape ``[B, *input_shape]``.
            features: Their features, shape ``[B, feature_dim]``.
        """
        regularizer = _regularizer(self, "mutual_information", MutualInformation)
        return regularizer(inputs, features, epoch=self.current_epoch)


class LocalMinimumMixin(PenaltyMixin):
    """Prefers flat minima; set ``self.local_minimum`` in ``__init__``."""

    local_minimum: LocalMinimumRegularizer
    _looked_for_a_drop = False

    def local_minimum_penalty(self, loss_fn: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """Return ``weight * R`` for the mean loss that ``loss_fn`` computes of a part of ``batch``.

        By default it is 0 until the learning rate drops to half; a module without a scheduler is
        warned about that, once.

        Args:
            loss_fn: The mean loss of a part of the batch, a scalar.
            batch: A tensor, or a tuple, list or dict of tensors, whose first axes are cut into
                equal parts.
        """
        regularizer = _regularizer(self, "local_minimum", LocalMinimumRegularizer)
        trainer = _trainer(self)
        if trainer is not None and not self._looked_for_a_drop:
            self._looked_for_a_drop = True
            if regularizer.start == "learning_rate_drop" and not trainer.lr_scheduler_configs:
                warn(
                    "`local_minimum` waits for the learning rate to drop to half, and there is no scheduler to do it: "
                    "the penalty stays 0; set `start` of `LocalMinimumRegularizer` to an epoch."
                )
        rate = (
            trainer.optimizers[0].param_groups[0]["lr"]
            if trainer is not None and trainer.optimizers
            else None
        )
        return regularizer(self, loss_fn, batch, epoch=self.current_epoch, learning_rate=rate)


class MultiKernelMMDMixin(PenaltyMixin):
    """Aligns source and target features; set ``self.mk_mmd`` in ``__init__``."""

    mk_mmd: MultiKernelMMD

    def mk_mmd_penalty(self, source: Tensor, target: Tensor) -> Tensor:
        """Return ``weight * MMD²``.

        Args:
            source: Features of source inputs, shape ``[B, D]``.
            target: Features of unlabelled target inputs, shape ``[B', D]``.
        """
        return _regularizer(self, "mk_mmd", MultiKernelMMD)(
            source, target, epoch=self.current_epoch
        )


class TemporalEnsemblingMixin(PenaltyMixin):
    """Holds predictions near their average over the epochs; set ``self.temporal_ensembling`` in ``__init__``."""

    temporal_ensembling: TemporalEnsembling

    def temporal_ensembling_penalty(self, outputs: Tensor, index: Tensor | Sequence[int]) -> Tensor:
        """Return the weighted squared difference of the predictions from their average over the epochs.

        Args:
            outputs: Logits, shape ``[B, num_outputs]``.
            index: Number of each sample in the training set, whole numbers from 0, shape ``[B]``.
        """
        regularizer = _regularizer(self, "temporal_ensembling", TemporalEnsembling)
        return regularizer(outputs, index, epoch=self.current_epoch)


def labeled_samples(trainer: "Trainer | None") -> int:
    """Return the size of the labelled training set over all ranks, from the Trainer's loaders.

    Raises:
        ValueError: If it cannot be told.
    """
    from lightning_taskinfo.callbacks.source import readable  # late: it loads Lightning

    if trainer is None:
        raise ValueError(
            "`num_samples` must be given to WeightInformation in a module without a Trainer, got None."
        )
    loader: Any = getattr(trainer, "train_dataloader", None)  # Fabric has none
    loader = getattr(loader, "iterables", loader)  # of a CombinedLoader
    if isinstance(loader, dict):
        loader = loader.get("labeled")
    sampler = _sampler(loader)
    with suppress(AttributeError, TypeError):  # no loader, or something without a length
        whole = readable(loader) or isinstance(loader.dataset, IterableDataset)
        if whole or len(sampler) >= len(loader.dataset):
            return len(loader.dataset)
    raise ValueError(
        "`num_samples` must be given to WeightInformation where the training loader does not say how many samples "
        f"there are, got {type(loader).__name__}{f' with {type(sampler).__name__}' if sampler is not None else ''}."
    )


def _sampler(loader: Any) -> Any:
    """What picks the samples of a loader, for all ranks."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = (
        getattr(loader, "sampler", None)
        if batches is None
        else getattr(batches, "sampler", batches)
    )
    drawn = (
        getattr(sampler, "dataset", None) if isinstance(sampler, DistributedSampler) else sampler
    )
    # Lightning wraps a sampler of the user's so that ranks share it.
    return getattr(drawn, "_sampler", drawn)


def _trainer(module: Any) -> "Trainer | None":
    try:
        return module.trainer
    except RuntimeError:  # not attached: a plain loop
        return None


def _regularizer(module: Any, name: str, kind: type[R]) -> R:
    regularizer = getattr(module, name, None)
    if not isinstance(regularizer, kind):
        found = type(regularizer).__name__
        raise TypeError(
            f"`self.{name}` must be a {kind.__name__}, got {found}: set it in `__init__`."
        )
    return regularizer
