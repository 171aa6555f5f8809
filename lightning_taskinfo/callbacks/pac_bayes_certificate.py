"""Certify a network at the end of its training, or every few epochs."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

from torch import Tensor, nn

from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._ranges import check_choice
from lightning_taskinfo._warn import warn
from lightning_taskinfo.callbacks.information_in_weights import CenteredProbe
from lightning_taskinfo.callbacks.source import Samples
from lightning_taskinfo.certificates import (
    BETAS,
    Certificate,
    Prior,
    certify,
)
from lightning_taskinfo.certificates.certify import check_choices
from lightning_taskinfo.certificates.prior import fixed_hashes
from lightning_taskinfo.certificates.search import Structures, named_structures
from lightning_taskinfo.certificates.subject import ErrorKind, check_scores


class PACBayesCertificate(CenteredProbe):
    r"""Log ``certificate_bound``: at most this is the true error of the trained network turned stochastic.

    The prior is centred at the weights with which training began. They are copied when training
    starts, kept in checkpoints, and independent of the training data only if ``prior_origin`` can
    say so. The last certificate is the attribute ``certificate``; beside its bound go
    ``certificate_risk``, ``certificate_risk_upper``, ``certificate_kl``, ``certificate_model_risk``,
    ``certificate_valid`` (1 or 0) and ``certificate_repeated_samples`` to the loggers. At the end of
    training, unless told otherwise.

    Args:
        prior_origin: Where the weights at the start of training come from:
            ``"random initialisation"``, or a network trained on other data. The certificate repeats
            it.
        structure: Curvature that shapes the post-distribution, several to take the best, or
            ``"auto"`` for all that the network's width allows; see
            :func:`~lightning_taskinfo.certify`.
        betas: Weights of the KL to try.
        draws: Number of fresh networks that the bound rests on.
        delta: Probability with which the theorem may fail.
        delta_draws: Probability with which the Monte-Carlo interval may fail.
        error: What counts as an error: ``"class"`` for logits ``[N, C]``; for ``[N, T, V]`` the
            share of wrong ``"token"`` positions of each sequence, or whether a ``"sequence"`` has
            any.
        every_n_epochs: Epochs between two certificates; only at the end by default. Each holds with
            its own confidence.
        max_samples: At most this many random training samples are certified on; they are kept in
            memory.
        name: Prefix of the logged names, and identity in checkpoints.
        seed: Seed of all draws.
        batch_fn: Picks ``(inputs, targets)`` out of a batch.
        forward_fn: How to get the logits, ``forward_fn(module, inputs)``; ``module(inputs)`` by
            default.

    Example::

        trainer = Trainer(callbacks=[PACBayesCertificate(prior_origin="random initialisation")])
    """

    ylabel = "error"
    headline = ("certificate_bound", "certificate_risk")
    default_at_start = False  # nothing is learned yet, and it takes a thousand networks to say so
    split_over_ranks = False
    needs_whole_weights = "draws whole networks on every process"

    def __init__(
        self,
        *,
        prior_origin: str,
        structure: Structures = "auto",
        betas: Sequence[float] = BETAS,
        draws: int = 1000,
        delta: float = 0.04,
        delta_draws: float = 0.01,
        error: ErrorKind = "class",
        every_n_epochs: int | None = None,
        max_samples: int = 1_000_000,
        name: str | None = None,
        seed: int = 0,
        batch_fn: Callable[[Any], Any] | None = None,
        forward_fn: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        super().__init__(
            every_n_epochs=every_n_epochs,
            max_samples=max_samples,
            data="train",
            name=name,
            seed=seed,
            batch_fn=batch_fn,
            forward_fn=forward_fn,
        )
        if not prior_origin:
            raise ValueError(
                f"`prior_origin` must say where the weights come from, got {prior_origin!r}."
            )
        check_choices(delta, draws, betas, delta_draws=delta_draws)
        check_choice(get_args(ErrorKind), error=error)
        named_structures(structure)  # refuses what it does not know
        self.error = error
        self.prior_origin = prior_origin
        self.structure = structure
        self.betas = betas
        self.draws = draws
        self.delta = delta
        self.delta_draws = delta_draws
        self.certificate: Certificate | None = None
        self._late = False

    def _forget(self) -> None:
        super()._forget()
        self._fixed: dict[str, str] = {}  # hashes of frozen weights and buffers at the start

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        for name, layer in pl_module.named_modules():
            if layer.training and getattr(layer, "running_mean", None) is not None:
                warn(
                    f"{self.state_key} will not be valid: running statistics, like those of {name!r}, learn from the "
                    "data outside of the KL. Use GroupNorm or LayerNorm, or hold such layers still by `.eval()`."
                )
                break
        self.certificate = None
        known = self.begin(pl_module)
        if not known:  # otherwise from a checkpoint, or an earlier fit: before the data were seen
            self._late = trainer.ckpt_path is not None
            self._fixed = fixed_hashes(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._source.pool is None:
            raise ValueError(
                f"{self.state_key} needs a training set that can be read by index, each sample once, got "
                f"{type(trainer.train_dataloader).__name__} with a sampler of its own or without a length."
            )

    def _check_outputs(self, outputs: Tensor, targets: Tensor | None) -> None:
        check_scores(self.error, outputs, targets, who=self.state_key)

    def observe(self, model: nn.Module, samples: Samples) -> Certificate:
        origin = None if self._late else self.prior_origin
        trainer = samples.trainer
        return certify(
            model,
            (samples.inputs, samples.targets),  # type: ignore[arg-type]  # which were checked
            Prior(self.center, origin, fixed=self._fixed),
            structure=self.structure,
            betas=self.betas,
            delta=self.delta,
            delta_draws=self.delta_draws,
            draws=self.draws,
            error=self.error,
            batch_fn=lambda pair: pair,  # read already: labels would be shifted twice
            forward_fn=self.forward_fn,
            seed=self.seed,
            progress=trainer.is_global_zero and trainer.progress_bar_callback is not None,
        )

    def summarise(self, observed: Certificate, samples: Samples) -> dict[str, float]:
        self.certificate = observed
        return {
            "certificate_bound": observed.bound,
            "certificate_risk": observed.risk,
            "certificate_risk_upper": observed.risk_interval[1],
            "certificate_model_risk": observed.model_risk,
            "certificate_kl": observed.kl,
            "certificate_valid": float(observed.valid),
            "certificate_repeated_samples": float(observed.repeated),
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fixed": self._fixed, "late": self._late}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._fixed = dict(state_dict["fixed"])
        self._late = state_dict["late"]
