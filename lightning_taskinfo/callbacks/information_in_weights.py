"""Follow how much the weights know about the data they are trained on."""

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import size
from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._observe import ParamDict, trainable_parameters
from lightning_taskinfo._ranges import check_finite_tensors, check_positive
from lightning_taskinfo._warn import warn
from lightning_taskinfo.callbacks._center import Center
from lightning_taskinfo.callbacks._checks import check_plain
from lightning_taskinfo.callbacks._loss import LossOnTheWay, mean_loss
from lightning_taskinfo.callbacks._pool import labeled_loader, readable
from lightning_taskinfo.callbacks._probe import Probe
from lightning_taskinfo.callbacks._processes import summed
from lightning_taskinfo.callbacks._samples import Samples
from lightning_taskinfo.fisher.engine import Request, measure
from lightning_taskinfo.fisher.kron_metric import KroneckerFisher
from lightning_taskinfo.fisher.sinks import Diagonal
from lightning_taskinfo.functional.information import added, information_sweep

OTHER_STDS = (0.1, 10.0, 100.0)  # times `prior_std`: the same curvature gives their KL too
STRUCTURES = ("diagonal", "kron")


class _Observed(NamedTuple):
    fisher: ParamDict | KroneckerFisher  # the former summed over samples
    samples: int
    loss: float  # summed over samples, NaN where it is not known
    displacement: ParamDict


class InformationInWeights(Probe):
    r"""Log ``information_nats``, how much the weights know about the data they are trained on.

    .. math::
        \mathrm{KL}(Q\,\|\,P) = \tfrac12 \sum_i \Big[ \frac{(w_i - w_{0,i})^2}{\lambda^2} + v_i - 1 - \log v_i \Big],
        \qquad v_i = \frac{1}{1 + \lambda^2 N F_{ii}/\beta}

    for the pre-distribution :math:`P = N(w_0, \lambda^2 I)` and the Gaussian post-distribution :math:`Q` around the
    weights :math:`w` that minimises :math:`C_\beta = \mathbb{E}_Q[L_D] + \beta\,\mathrm{KL}(Q\|P)`, with :math:`L_D`
    the **sum** of the loss over all :math:`N` training samples and a diagonal curvature :math:`N F_{ii}`. Beside it go
    the terms of :math:`C_\beta` (``expected_loss``, the loss :math:`L_D(w)` in nats; ``curvature_penalty``, what the
    noise of :math:`Q` adds to it; and ``c_beta`` itself), ``effective_parameters``,
    ``information_nats_per_parameter``, ``information_nats/<layer>``, and the KL for three other ``prior_std``. After
    every epoch unless told otherwise.

    The Fisher information and the loss are estimates from ``max_samples`` of the samples, multiplied by :math:`N`.

    Args:
        prior_std: :math:`\lambda`, the standard deviation of the pre-distribution.
        beta: :math:`\beta` beside the **sum** of the loss; 1 is the evidence lower bound. For a weight of the KL beside
            the mean loss, give that times :math:`N`.
        prior_center: Centre :math:`w_0` of the pre-distribution: ``"initial"`` for each weight as it was when it first
            became trainable, which is kept in checkpoints, so that a resumed run measures from the same ones;
            ``"zero"``; or the path of a checkpoint, or a state dict, for the information that fine-tuning adds. Of
            weights that stay frozen nothing is kept.
        structure: ``"diagonal"``, or ``"kron"`` for Kronecker factors of each parameter, whose correlations then
            count: :math:`N F_{ii}` becomes the eigenvalues of :math:`N B \otimes A`; see
            :func:`~lightning_taskinfo.fisher.kronecker_factors`. It needs memory for a matrix as wide as a layer has
            inputs, and one as wide as it has outputs.
        num_samples: :math:`N`; the length of the training set unless given.
        max_samples: At most this many samples are measured.
        data: As for every probe; a fixed subset of the training set by default.
        **probe: When and at what to look, see :class:`~lightning_taskinfo.callbacks.Probe`.

    Raises:
        ValueError: If an argument is out of its range.

    Example::

        trainer = Trainer(callbacks=[InformationInWeights(prior_std=0.1)])

    References:
        Achille, Paolini, Mbeng, Soatto, *The information complexity of learning tasks, their structure and their
        distance*, Theorem 5.4.
    """

    default_every_n_epochs: ClassVar[int | None] = 1
    ylabel: ClassVar[str] = "information in the weights (nats)"
    needs_whole_weights: ClassVar[str] = "keeps a centre and a curvature of all weights on every process"

    def __init__(
        self,
        *,
        prior_std: float = 0.1,
        beta: float = 1.0,
        prior_center: str | os.PathLike[str] | Mapping[str, Tensor] = "initial",
        structure: Literal["diagonal", "kron"] = "diagonal",
        num_samples: int | None = None,
        max_samples: int = 128,
        data: Literal["train_batch", "train", "val"] = "train",
        **probe: Any,
    ) -> None:
        super().__init__(max_samples=max_samples, data=data, **probe)
        check_positive(prior_std=prior_std, beta=beta)
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"`num_samples` must be at least 1, got {num_samples}.")
        if isinstance(prior_center, Mapping):
            nested: Any = prior_center.get("state_dict", prior_center)
            prior_center = dict(nested)
            check_finite_tensors("prior_center", prior_center)
        else:
            prior_center = os.fspath(prior_center)
            if prior_center not in ("initial", "zero") and not Path(prior_center).is_file():
                raise ValueError(
                    "`prior_center` must be 'initial', 'zero', a state dict or the path of a checkpoint, "
                    f"got {prior_center!r}."
                )
        if structure not in STRUCTURES:
            raise ValueError(f"`structure` must be one of {', '.join(STRUCTURES)}, got {structure!r}.")
        self.prior_std, self.beta, self.prior_center, self.num_samples = prior_std, beta, prior_center, num_samples
        self.structure = structure
        self.headline = ("information_nats",)
        self._center = Center(self.state_key, prior_center)
        self._samples = 0
        self._sum: Callable[[Any], Tensor] = torch.as_tensor  # over processes

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_plain(self.state_key, pl_module)
        super().on_fit_start(trainer, pl_module)

    def _forget(self) -> None:
        self._center.kept = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._samples, self._sum = (
            self.num_samples or _length(labeled_loader(pl_module, trainer.train_dataloader)[1]),
            partial(summed, trainer),
        )
        known = self._center.begin(pl_module)
        if self.prior_center == "initial" and not known and trainer.ckpt_path is not None:
            warn(
                f"{self.state_key} found no prior centre in the checkpoint and measures from the resumed weights.",
            )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._center.before_a_step(pl_module)

    def observe(self, model: nn.Module, samples: Samples) -> _Observed:
        n, moved = size(samples.inputs), self._center.displacement(model)
        if self.structure == "kron":
            kron = KroneckerFisher(
                labels=self.labels,
                likelihood=samples.draws(self.likelihood, self.mc_samples),
                mc_samples=self.mc_samples,
                forward_fn=self.forward_fn,
            ).to(next(model.parameters()).device)
            kron.update(model, samples.inputs, samples.targets)
            loss = mean_loss(model, samples.inputs, samples.targets, self.likelihood, self.forward_fn)
            return _Observed(kron, n, n * loss, moved)
        draws, parameters = samples.draws(self.likelihood, self.mc_samples, LossOnTheWay), trainable_parameters(model)
        sink = Diagonal(parameters)
        if n:
            request = Request(self.labels, draws, self.mc_samples, forward_fn=self.forward_fn)
            measure(model, samples.inputs, samples.targets, request, sink)
        diagonal = {name: sink.total(name, p).detach() for name, p in parameters.items()}
        return _Observed(diagonal, n, draws.loss if n else math.nan, moved)

    def summarise(self, observed: _Observed) -> dict[str, float]:
        stds = [self.prior_std, *(self.prior_std * factor for factor in OTHER_STDS)]
        loss, curvature = self._over_processes(observed)
        parts = {
            name: information_sweep(curvature[name], moved, prior_stds=stds, beta=self.beta)
            for name, moved in observed.displacement.items()
        }
        whole, *others = (added(part[i] for part in parts.values()) for i in range(len(stds)))
        values = {
            "information_nats": whole.kl.item(),
            "expected_loss": loss,
            "curvature_penalty": whole.curvature_penalty.item(),
            "c_beta": whole.objective(loss).item(),
            "effective_parameters": whole.effective_parameters.item(),
            "information_nats_per_parameter": whole.kl.item() / sum(p.numel() for p in observed.displacement.values()),
        }
        for std, other in zip(stds[1:], others, strict=True):
            values[f"information_nats_at_prior_std/{std:g}"] = other.kl.item()
        for name, part in parts.items() if self.per_layer else ():
            key = f"information_nats/{self.group_fn(name) or 'module'}"
            values[key] = values.get(key, 0.0) + part[0].kl.item()
        return values

    def _over_processes(self, observed: _Observed) -> tuple[float, ParamDict]:
        """Return loss and curvature of the whole training set, as all processes' samples have them."""
        known = not math.isnan(observed.loss)  # on no process: NaN
        sums = self._sum([observed.samples, observed.loss if known else 0.0, observed.samples if known else 0])
        samples, loss, counted = sums.tolist()
        loss = self._samples * loss / counted if counted else math.nan
        if isinstance(observed.fisher, KroneckerFisher):
            means = observed.fisher.compute()
            return loss, {name: self._samples * means[name].view_as(w) for name, w in observed.displacement.items()}
        return loss, {name: self._sum(part) * (self._samples / samples) for name, part in observed.fisher.items()}

    def state_dict(self) -> dict[str, Any]:
        center = {name: w.cpu() for name, w in self._center.kept.items()}
        return {**super().state_dict(), "prior_center": center, "prior_std": self.prior_std, "beta": self.beta}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._center.kept = dict(state_dict["prior_center"])
        before, now = ((get("prior_std"), get("beta")) for get in (state_dict.get, vars(self).get))
        if before != now and before != (None, None):
            warn(
                f"{self.state_key} goes on with `prior_std` and `beta` {now}, and its history was measured with "
                f"{before}: the two parts do not compare.",
            )


def _length(loader: Any) -> int:
    if not readable(loader):
        raise ValueError(
            "`num_samples` must be given where the training loader does not say how many samples there are, "
            f"got {type(loader).__name__}."
        )
    return len(loader.dataset)
