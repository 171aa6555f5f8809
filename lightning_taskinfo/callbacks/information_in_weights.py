"""Follow how much the weights know about the data they are trained on."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_taskinfo._files import read_checkpoint
from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._observe import (
    ParamDict,
    at_least_float32,
    observing,
    trainable_parameters,
)
from lightning_taskinfo._ranges import (
    check_choice,
    check_counts,
    check_finite_tensors,
    check_positive,
)
from lightning_taskinfo._warn import warn
from lightning_taskinfo.callbacks.probe import Probe
from lightning_taskinfo.callbacks.source import (
    LossOnTheWay,
    Samples,
    labeled_loader,
    on_every_process,
    readable,
)
from lightning_taskinfo.distributions import CurvatureBlock, kronecker_curvature
from lightning_taskinfo.distributions.post_family import Noises, PostFamily, losses_with_noise
from lightning_taskinfo.fisher.kron import KroneckerSums, as_factors, kronecker_sums
from lightning_taskinfo.fisher.measure import squared_gradients_by_name
from lightning_taskinfo.functional.information import InformationTerms, added, label_entropy
from lightning_taskinfo.functional.likelihood import Categorical

Parts = dict[str, InformationTerms]  # by name of the weight
AUTO_STDS = tuple(10 ** (j / 4) for j in range(-12, 5))  # 0.001 to 10
PARTS = 2  # of the samples, one for each noise in turn
NAMED = 5  # weights that a message names
TRUSTED = (0.5, 2.0)  # measured over quadratic expected loss


class CenteredProbe(Probe):
    """A probe that keeps each weight as it was when it first became trainable, and nothing of those that never do.

    A frozen base of billions of weights costs neither memory nor a place in checkpoints.

    Attributes:
        prior_center: ``"initial"``; ``"zero"``, which keeps nothing; or a state dict, or the path of a
            checkpoint, whose weights are taken where it has them.
        center: The weights by name.
    """

    prior_center: str | Mapping[str, Tensor] = "initial"
    needs_plain_weights = True

    def _forget(self) -> None:
        self.center: ParamDict = {}
        self._frozen: list[nn.Parameter] = []

    def begin(self, model: nn.Module) -> bool:
        """Keep what is trainable now and not kept yet; return whether anything was kept before.

        What was kept in an earlier fit, or came from a checkpoint, stays, unless it has another
        shape.

        Raises:
            ValueError: If a checkpoint of the user's cannot be read, or has no weight of the model.
        """
        shapes = {name: p.shape for name, p in model.named_parameters()}
        kept = self.center.items()
        self.center = {name: w for name, w in kept if shapes.get(name) == w.shape}
        known = bool(self.center)
        self._keep(model)
        return known

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: Any,
    ) -> None:
        # At every step, so only the objects that were frozen.
        if any(p.requires_grad for p in self._frozen):
            self._keep(pl_module)

    def _keep(self, model: nn.Module) -> ParamDict:
        """Keep what has become trainable, before an optimizer moves it; return all that is."""
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        weights = {name: p.detach() for name, p in trainable_parameters(model).items()}
        new = {name: w for name, w in weights.items() if name not in self.center}
        if self.prior_center != "zero" and new:
            stored = {} if self.prior_center == "initial" else self._stored(new)
            for name, w in new.items():
                self.center[name] = stored.get(name, w).to(w, copy=True)
        return weights

    def _stored(self, weights: ParamDict) -> ParamDict:
        """Return the checkpoint's weights; those that it does not have, e.g. of a new head, count from the start."""
        stored: Any = self.prior_center
        if isinstance(stored, str):
            stored = read_checkpoint("prior_center", stored).state
        found = {
            name: stored[name]
            for name, w in weights.items()
            if name in stored and stored[name].shape == w.shape
        }
        check_finite_tensors("prior_center", found)
        if not found and not self.center:
            raise ValueError(
                f"`prior_center` must hold trainable weights of the module, got none of {_some(weights)}; it has "
                f"{_some(stored)}. Give a state dict with the names of `module.state_dict()`."
            )
        if left := [name for name in weights if name not in found]:
            warn(
                f"{self.state_key} did not find {_some(left)} in `prior_center` and measures them from the start of "
                "their training; a state dict with the names of `module.state_dict()` would hold them."
            )
        return found

    def displacement(self, model: nn.Module) -> ParamDict:
        """Return how far each trainable weight is from the centre, in float32 or better."""
        moved = {}
        for name, weight in self._keep(model).items():
            w = at_least_float32(weight)
            moved[name] = w - (0 if self.prior_center == "zero" else self.center[name].to(w.device))
        return moved

    def state_dict(self) -> dict[str, Any]:
        center = {name: w.cpu() for name, w in self.center.items()}
        return {**super().state_dict(), "prior_center": center}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.center = dict(state_dict["prior_center"])


def _some(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    every = list(names)
    more = len(every) - NAMED
    first = ", ".join(every[:NAMED])
    return f"{first} and {more} more" if more > 0 else first


class _Observed(NamedTuple):
    """What one process has measured."""

    fisher: ParamDict | KroneckerSums  # of this process
    losses: Tensor  # of its samples, NaN where they are not known
    distances: dict[str, float]  # squared length of each weight's displacement
    moved: ParamDict  # the displacement of those weights that have one


@dataclass
class _Widths:
    """Which widths of the pre-distribution to compare: the whole grid at first, then the last best and a neighbour.

    Attributes:
        chosen: The number of the last best one, of :data:`AUTO_STDS`.
        direction: To the neighbour that is tried next.
        tries: Whether one was tried at the last measurement: it is every second time.
    """

    chosen: int | None = None
    direction: int = 1
    tries: bool = True

    def next(self) -> list[float]:
        """Return the widths to compare now."""
        if self.chosen is None:
            return [*AUTO_STDS]
        numbers = [self.chosen]
        self.tries = not self.tries
        if self.tries:
            if not 0 <= self.chosen + self.direction < len(AUTO_STDS):
                self.direction *= -1
            numbers.append(self.chosen + self.direction)
        return [AUTO_STDS[number] for number in numbers]

    def choose(self, std: float) -> None:
        """Note the best one; it goes on in the same direction only from a neighbour that was better."""
        best = AUTO_STDS.index(std)
        if self.tries and best == self.chosen:
            self.direction *= -1
        self.chosen = best


class InformationInWeights(CenteredProbe):
    r"""Log ``information_nats``, how much the weights know about the data, and what that is worth.

    .. math::
        \mathrm{KL}(Q\,\|\,P) = \underbrace{\frac{\|w - w_0\|^2}{2\lambda^2}}_{\text{displacement}}
        + \underbrace{\tfrac12 \sum_i \big[ v_i - 1 - \log v_i \big]}_{\text{curvature}},
        \qquad v_i = \frac{1}{1 + \lambda^2 N F_{ii}/\beta}

    for the pre-distribution :math:`P = N(w_0, \lambda^2 I)` and the Gaussian post-distribution :math:`Q` around the
    weights :math:`w` that minimises the quadratic :math:`C_\beta`, with a diagonal curvature :math:`N F_{ii}` of the
    **sum** :math:`L_D` of the loss over all :math:`N` training samples. Weights that have not moved have learned
    nothing: they count 0 nats and get no noise, so that an untrained network has 0 nats.

    Logged beside it:

    - ``displacement_nats`` and ``curvature_nats``, its two parts at ``prior_std``, and ``squared_displacement``,
      :math:`\|w - w_0\|^2`, which depends on no setting.
    - ``loss_nats``, :math:`L_D(w)`; ``expected_loss_nats``, :math:`\mathbb{E}_Q[L_D]` **measured** on draws of
      :math:`Q`, with its standard error; and ``quadratic_loss_nats``, what the curvature says it should be.
    - ``gaussian_misfit``, the measured over the quadratic one: 1 where :math:`Q` describes the network, and far above 1
      where it destroys the network, so that the other numbers say little about it. That is warned about once.
    - ``c_beta``, :math:`\mathbb{E}_Q[L_D] + \beta\,\mathrm{KL}` with the measured loss, a code length at
      :math:`\beta = 1`; ``c_beta_per_label_nat``, the same over :math:`N\,H(y)`, what the labels need without a
      network: above 1 nothing was compressed.
    - ``effective_parameters``, and ``information_nats/<layer>``.

    The figure and the summary show ``squared_displacement``: of these numbers it alone was found to rise with the share
    of random labels, and to change little with the length of training (``benchmarks/memorised_information.py``).

    Before training and after every epoch unless told otherwise. All are estimates from ``max_samples`` of the samples,
    multiplied by :math:`N`.

    Args:
        prior_std: :math:`\lambda`, the standard deviation of the pre-distribution; or ``"auto"`` for the one of 17
            between 0.001 and 10 with the smallest measured ``c_beta``, which then pays :math:`\log 17` nats for the
            choice. All are tried once, by the first half of the draws, and at every second measurement a neighbour,
            above and below in turn; all draws are spent on the best one.
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
        draws: Networks drawn from :math:`Q` for the measured loss, an even number: noise is used with both signs.
            Each is tried on half of the samples if ``draws`` is a multiple of 4.
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

    default_every_n_epochs = 1
    ylabel = "squared distance of the weights from their start"
    headline = ("squared_displacement",)
    needs_whole_weights = "keeps a centre and a curvature of all weights on every process"

    def __init__(
        self,
        *,
        prior_std: float | Literal["auto"] = 0.1,
        beta: float = 1.0,
        prior_center: str | os.PathLike[str] | Mapping[str, Tensor] = "initial",
        structure: Literal["diagonal", "kron"] = "diagonal",
        draws: int = 4,
        num_samples: int | None = None,
        max_samples: int = 96,
        data: Literal["train_batch", "train", "val"] = "train",
        **probe: Any,
    ) -> None:
        super().__init__(max_samples=max_samples, data=data, **probe)
        check_positive(beta=beta)
        if not isinstance(prior_std, str):
            check_positive(prior_std=prior_std)
        elif prior_std != "auto":
            raise ValueError(f"`prior_std` must be a positive number or 'auto', got {prior_std!r}.")
        if draws < 2 or draws % 2:
            raise ValueError(f"`draws` must be an even number, at least 2, got {draws}.")
        check_counts(num_samples=num_samples)
        check_choice(["diagonal", "kron"], structure=structure)
        self.prior_std = prior_std
        self.beta = beta
        center: Any = prior_center
        if isinstance(center, Mapping):
            center = center.get("state_dict", center)  # of a checkpoint's dict
            check_finite_tensors("prior_center", center)
        else:
            center = os.fspath(center)
            if center not in ("initial", "zero") and not os.path.isfile(center):
                raise ValueError(
                    "`prior_center` must be 'initial', 'zero', a state dict or the path of a checkpoint, "
                    f"got {center!r}."
                )
        self.prior_center = center
        self.structure = structure
        self.draws = draws
        self.num_samples = num_samples
        self._noises = Noises(self.seed)
        self._distrusted = False

    def _forget(self) -> None:
        super()._forget()
        self._widths = _Widths()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        with observing(pl_module):
            self._training_set = self.num_samples or _length(trainer.train_dataloader)
        known = self.begin(pl_module)
        if self.prior_center == "initial" and not known and trainer.ckpt_path:
            warn(
                f"{self.state_key} found no prior centre in the checkpoint and measures from the resumed weights.",
            )

    def observe(self, model: nn.Module, samples: Samples) -> _Observed:
        """Measure this process's part of the Fisher information and of the loss."""
        displacement = self.displacement(model)
        distances = {
            name: torch.linalg.vector_norm(part, dtype=torch.float64).item() ** 2
            for name, part in displacement.items()
        }
        moved = {name: part for name, part in displacement.items() if distances[name]}
        batch = (model, samples.inputs, samples.targets)
        fisher: Any = {}
        if moved and self.structure == "diagonal":
            request: Any = samples.request(LossOnTheWay)
            fisher = squared_gradients_by_name(*batch, request)
            return _Observed(fisher, torch.cat(request.likelihood.losses), distances, moved)
        if moved:  # otherwise, as at the start, there is no Gaussian
            fisher = KroneckerSums(model)
            if samples.counted:
                fisher = kronecker_sums(*batch, samples.request())
        return _Observed(fisher, samples.losses(model), distances, moved)

    def summarise(self, observed: _Observed, samples: Samples) -> dict[str, float]:
        """Put the parts of all processes together, and measure the loss under the Gaussian that they give."""
        scale = self._training_set / samples.total
        loss = samples.summed([observed.losses.sum().item()]).item() * scale
        std, widths = self.prior_std, None
        if isinstance(std, str):
            std, widths = math.nan, self._widths
        choices = 1
        if observed.moved:
            family = self._family(observed, samples, scale)
            trials = _Trials(observed, family, samples, self._noises, self.draws // 2, loss, scale)
            std, parts, losses = trials.best(widths.next() if widths else [std])
            expected, error = fmean(losses), math.nan
            if len(losses) > 1 and all(map(math.isfinite, losses)):  # over noises
                error = stdev(losses) / math.sqrt(len(losses))
            if widths:
                choices = len(AUTO_STDS)
                widths.choose(std)
        else:  # without a distance from the centre there is nothing to know: no noise, no nats
            zero = torch.zeros((), dtype=torch.float64, device="cpu")
            parts = {"": InformationTerms(zero, zero, zero, zero, self.beta)}
            expected, error = loss, 0.0
        terms = added(parts.values())
        c_beta = terms.code_length(expected, choices=choices).item()
        quadratic = loss + terms.curvature_penalty.item()
        values = {
            "information_nats": terms.kl.item(),
            "displacement_nats": terms.displacement.item(),
            "curvature_nats": terms.curvature.item(),
            "squared_displacement": math.fsum(observed.distances.values()),
            "prior_std": std,
            "loss_nats": loss,
            "expected_loss_nats": expected,
            "expected_loss_nats_standard_error": error,
            "quadratic_loss_nats": quadratic,
            "gaussian_misfit": _ratio(expected, quadratic),
            "c_beta": c_beta,
            "c_beta_per_label_nat": _ratio(c_beta, self._label_nats(samples) * scale),
            "effective_parameters": terms.effective_parameters.item(),
        }
        self._warn_of_misfit(values)
        if self.per_layer:
            for name in observed.distances:  # one that has not moved has no nats
                key = f"information_nats/{self.group_fn(name) or 'module'}"
                nats = parts[name].kl.item() if name in parts else 0.0
                values[key] = values.get(key, 0.0) + nats
        return values

    def _family(self, observed: _Observed, samples: Samples, scale: float) -> PostFamily:
        """Return the Gaussians around the network, from the Fisher information of all processes' samples."""
        fisher = observed.fisher
        distances = {name: observed.distances[name] for name in observed.moved}
        if isinstance(fisher, KroneckerSums):
            every = as_factors(fisher.summed(samples.summed), samples.total)
            factors = {name: every[name] for name in distances}
            curvature = kronecker_curvature(factors, scale=self._training_set)
            return PostFamily(curvature, distances, self.beta)
        blocks = {}
        for name in distances:
            squares = fisher[name]
            if samples.trainer.world_size > 1:
                squares = samples.summed(squares)
            blocks[name] = CurvatureBlock(squares * scale)
        return PostFamily(blocks, distances, self.beta)

    def _label_nats(self, samples: Samples) -> float:
        """Return what a code for the labels needs without a network; NaN if not class labels."""
        if not isinstance(samples.likelihood, Categorical):
            return math.nan
        mine = torch.zeros(0, dtype=torch.long, device="cpu")
        if samples.targets is not None:
            mine = samples.targets.cpu()
            mine = mine[mine >= 0]  # below 0: labels that do not count
        classes = max(on_every_process(samples.trainer, len(mine.bincount())))
        counts = samples.summed(mine.bincount(minlength=classes)).cpu()
        return label_entropy(counts) * counts.sum().item()

    def _warn_of_misfit(self, values: dict[str, float]) -> None:
        low, high = TRUSTED
        misfit = values["gaussian_misfit"]
        if self._distrusted or math.isnan(misfit) or low <= misfit <= high:
            return
        self._distrusted = True
        warn(
            f"{self.state_key}: networks drawn from the Gaussian at `prior_std` {values['prior_std']:.3g} have a loss "
            f"of {values['expected_loss_nats']:.4g} nats where the curvature says {values['quadratic_loss_nats']:.4g} "
            f"(gaussian_misfit {misfit:.3g}). curvature_nats and effective_parameters describe that Gaussian, not "
            "this network; c_beta is measured."
        )

    def state_dict(self) -> dict[str, Any]:
        prior = (self.prior_std, self.beta)
        return {**super().state_dict(), **vars(self._widths), "prior": prior}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._widths = _Widths(state_dict["chosen"], state_dict["direction"], state_dict["tries"])
        before = tuple(state_dict["prior"])
        now = (self.prior_std, self.beta)
        if before != now:
            warn(
                f"{self.state_key} goes on with `prior_std` and `beta` {now}, and its history was measured with "
                f"{before}: the two parts do not compare."
            )


@dataclass
class _Trials:
    """Measures losses under Gaussians of several widths, all with the same noises (common random numbers).

    An even number of noises are tried on every second sample each, and what it adds to their loss stands for all
    samples: losses under one noise rise together, so that more noises say more than more samples. A noise is as large
    as the network: one is held at a time, beside those that are small enough to be kept.

    Attributes:
        loss: Of the training set, without noise.
        scale: Samples of the training set for each that is measured.
    """

    observed: _Observed
    family: PostFamily
    samples: Samples
    kept: Noises
    noises: int
    loss: float
    scale: float

    def best(self, stds: Sequence[float]) -> tuple[float, Parts, list[float]]:
        """Return the width with the shortest code under the first noise, its information and its losses under all.

        The first of equal ones; what could not be measured is the worst.
        """
        terms = self.family.terms(stds)
        first = self._losses(0, stds)

        def length(width: int) -> float:
            nats = added(terms[width].values()).code_length(first[width]).item()
            return math.inf if math.isnan(nats) else nats

        best = min(range(len(stds)), key=length)
        losses = [first[best]]
        for number in range(1, self.noises):
            losses += self._losses(number, [stds[best]])
        return stds[best], terms[best], losses

    def _losses(self, number: int, stds: Sequence[float]) -> list[float]:
        """Return the loss of the training set under one noise of both signs, for each width.

        Every process gets to the sum over processes, also one that fails.
        """
        samples = self.samples
        even = self.noises % PARTS == 0 and samples.total >= PARTS
        parts = PARTS if even else 1  # or some samples would count more than others
        part = number % parts
        some = slice((part - samples.first) % parts, None, parts)
        share = len(range(part, samples.total, parts)) / samples.total
        before = self.observed.losses[some].sum().item()
        model = samples.trainer.lightning_module
        more = []
        try:
            for std in stds:
                losses = losses_with_noise(
                    model,
                    lambda: samples.losses(model, some).sum().item(),
                    self.family.draw(std),
                    self.kept.noise(number, self.observed.moved),
                )
                more.append((fmean(losses) - before) / share)
        except Exception:  # e.g. out of memory: then NaN, on all processes
            more = [math.nan] * len(stds)
        return (self.loss + samples.summed(more).cpu() * self.scale).tolist()


def _ratio(value: float, whole: float) -> float:
    return value / whole if whole else math.nan


def _length(loaders: Any) -> int:
    """Return the samples of the labelled training set; call it inside ``observing``."""
    _, loader = labeled_loader(loaders)
    if not readable(loader):
        raise ValueError(
            "`num_samples` must be given where the training loader does not say how many samples there are, "
            f"got {type(loader).__name__}."
        )
    return len(loader.dataset)
