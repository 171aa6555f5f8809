"""Follow how much the weights know about the data they are trained on."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_taskinfo._lightning import LightningModule, Trainer
from lightning_taskinfo._observe import ParamDict, observing
from lightning_taskinfo._ranges import check_counts, check_positive
from lightning_taskinfo._warn import warn
from lightning_taskinfo.callbacks.center import Center, checked_center
from lightning_taskinfo.callbacks.checks import check_plain
from lightning_taskinfo.callbacks.probe import Probe
from lightning_taskinfo.callbacks.source import (
    LossOnTheWay,
    Samples,
    labeled_loader,
    on_every_process,
    readable,
)
from lightning_taskinfo.distributions.post_family import (
    Noises,
    PostFamily,
    losses_with_noise,
)
from lightning_taskinfo.fisher.kron import KroneckerSums, as_factors, kronecker_sums
from lightning_taskinfo.fisher.measure import squared_gradients_by_name
from lightning_taskinfo.functional.information import InformationTerms, added, label_entropy
from lightning_taskinfo.functional.likelihood import Categorical

STRUCTURES = ("diagonal", "kron")
AUTO_STDS = tuple(10 ** (j / 4) for j in range(-12, 5))  # 0.001 to 10
PARTS = 2  # of the samples, one for each noise in turn
TRUSTED = (0.5, 2.0)  # measured over quadratic expected loss


class _Observed(NamedTuple):
    """What one process has measured."""

    model: nn.Module
    fisher: ParamDict | KroneckerSums  # of this process
    losses: Tensor  # of its samples, NaN where they are not known
    displacement: ParamDict
    squares: dict[str, float]  # squared lengths of the displacement

    @property
    def moved(self) -> ParamDict:
        """The displacement of those weights that have one."""
        return {name: part for name, part in self.displacement.items() if self.squares[name]}


class _Gaussian(NamedTuple):
    """One Gaussian, the information in each weight, and its expected loss with a standard error."""

    prior_std: float
    parts: dict[str, InformationTerms]
    expected_loss: float
    error: float

    def code_length(self) -> float:
        """Return what to compare Gaussians by; one that could not be measured is the worst."""
        terms = added(self.parts.values())
        length = terms.code_length(self.expected_loss).item()
        return math.inf if math.isnan(length) else length


class InformationInWeights(Probe):
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
            choice. From one measurement to the next one neighbour is tried, above and below in turn, by the first half
            of the draws; all of them are spent on the better one.
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
        if structure not in STRUCTURES:
            raise ValueError(
                f"`structure` must be one of {', '.join(STRUCTURES)}, got {structure!r}."
            )
        self.prior_std = prior_std
        self.beta = beta
        self.prior_center = checked_center(prior_center)
        self.structure = structure
        self.draws = draws
        self.num_samples = num_samples
        self.headline = ("squared_displacement",)
        self._center = Center(self.state_key, self.prior_center)
        self._chosen: int | None = None  # of AUTO_STDS, at the last measurement
        self._direction = 1  # to the neighbour that is tried next
        self._noises = Noises(self.seed)
        self._distrusted = False
        self._training_set = 0  # samples

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_plain(self.state_key, pl_module)
        super().on_fit_start(trainer, pl_module)

    def _forget(self) -> None:
        self._center.kept = {}
        self._chosen = None
        self._direction = 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        with observing(pl_module):
            self._training_set = self.num_samples or _length(trainer.train_dataloader)
        known = self._center.begin(pl_module)
        if self.prior_center == "initial" and not known and trainer.ckpt_path is not None:
            warn(
                f"{self.state_key} found no prior centre in the checkpoint and measures from the resumed weights.",
            )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        self._center.before_a_step(pl_module)

    def observe(self, model: nn.Module, samples: Samples) -> _Observed:
        """Measure this process's part of the Fisher information and of the loss."""
        moved = self._center.displacement(model)
        squares = {}
        for name, part in moved.items():
            length = torch.linalg.vector_norm(part, dtype=torch.float64)
            squares[name] = length.item() ** 2
        if not any(squares.values()):  # as at the start: there is no Gaussian
            return _Observed(model, {}, samples.losses(model), moved, squares)
        if self.structure == "kron":
            sums = KroneckerSums(model)
            if samples.counted:
                request = samples.request()
                sums = kronecker_sums(model, samples.inputs, samples.targets, request)
            return _Observed(model, sums, samples.losses(model), moved, squares)
        draws = samples.draws(LossOnTheWay)
        request = samples.request(draws)
        fisher = squared_gradients_by_name(model, samples.inputs, samples.targets, request)
        return _Observed(model, fisher, draws.losses(), moved, squares)

    def summarise(self, observed: _Observed, samples: Samples) -> dict[str, float]:
        """Put the parts of all processes together, and measure the loss under the Gaussian that they give."""
        mine = observed.losses.sum()
        loss = self._of_training_set(samples, mine).item()
        moved = observed.moved
        if moved:
            family = self._family(observed, moved, samples)
            gaussian = self._best_gaussian(observed, family, samples, loss)
        else:
            gaussian = self._no_gaussian(loss)
        terms = added(gaussian.parts.values())
        expected = gaussian.expected_loss
        choices = len(AUTO_STDS) if moved and self.prior_std == "auto" else 1
        c_beta = terms.code_length(expected, choices=choices).item()
        quadratic = loss + terms.curvature_penalty.item()
        values = {
            "information_nats": terms.kl.item(),
            "displacement_nats": terms.displacement.item(),
            "curvature_nats": terms.curvature.item(),
            "squared_displacement": math.fsum(observed.squares.values()),
            "prior_std": gaussian.prior_std,
            "loss_nats": loss,
            "expected_loss_nats": expected,
            "expected_loss_nats_standard_error": gaussian.error,
            "quadratic_loss_nats": quadratic,
            "gaussian_misfit": _ratio(expected, quadratic),
            "c_beta": c_beta,
            "c_beta_per_label_nat": _ratio(c_beta, self._label_nats(samples)),
            "effective_parameters": terms.effective_parameters.item(),
        }
        self._warn_of_misfit(values)
        if self.per_layer:
            values |= self._by_group(observed.displacement, gaussian.parts)
        return values

    def _by_group(
        self, weights: ParamDict, parts: Mapping[str, InformationTerms]
    ) -> dict[str, float]:
        """Return the nats of each layer, or other group of weights; one that has not moved has none."""
        values: dict[str, float] = {}
        for name in weights:
            key = f"information_nats/{self.group_fn(name) or 'module'}"
            nats = parts[name].kl.item() if name in parts else 0.0
            values[key] = values.get(key, 0.0) + nats
        return values

    def _of_training_set(self, samples: Samples, losses: Tensor) -> Tensor:
        """Return losses of the whole training set, from sums over this process's samples."""
        mine = losses.double() if samples.counted else torch.zeros_like(losses)
        scale = self._training_set / samples.total
        return samples.summed(mine).cpu() * scale

    def _family(self, observed: _Observed, moved: ParamDict, samples: Samples) -> PostFamily:
        """Return the Gaussians around the network, from the Fisher information of all processes' samples."""
        fisher = observed.fisher
        distances = {name: observed.squares[name] for name in moved}
        if isinstance(fisher, KroneckerSums):
            factors = as_factors(fisher.summed(samples.summed), samples.total)
            values = {}
            bases = {}
            for name, part in moved.items():
                eigenvalues, left, right = factors[name].eigen()
                values[name] = self._training_set * eigenvalues.view_as(part)
                bases[name] = (left, right)
            return PostFamily(values, distances, self.beta, bases)
        scale = self._training_set / samples.total
        diagonal = {}
        for name, part in moved.items():
            squares = fisher[name]
            if samples.trainer.world_size > 1:
                squares = samples.summed(squares)
            diagonal[name] = squares.view_as(part) * scale
        return PostFamily(diagonal, distances, self.beta)

    def _no_gaussian(self, loss: float) -> _Gaussian:
        """Without a distance from the centre there is nothing to know: no noise, no nats, the network itself."""
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        nothing = InformationTerms(zero, zero, zero, zero, self.beta)
        std = math.nan if isinstance(self.prior_std, str) else self.prior_std
        return _Gaussian(std, {"": nothing}, loss, 0.0)

    def _best_gaussian(
        self, observed: _Observed, family: PostFamily, samples: Samples, loss: float
    ) -> _Gaussian:
        """Measure the loss under the Gaussian of ``prior_std``, or under the best of the grid."""
        trials = _Trials(self, observed, family, samples, loss)
        if not isinstance(self.prior_std, str):
            (given,) = trials.measured([self.prior_std])
            return given
        if self._chosen is None:
            self._chosen, best = trials.best_of_grid()
            return best
        ends = (0, len(AUTO_STDS) - 1)
        if self._chosen == ends[self._direction > 0]:
            self._direction = -self._direction
        neighbour = self._chosen + self._direction
        best = trials.better(AUTO_STDS[self._chosen], AUTO_STDS[neighbour])
        if best.prior_std == AUTO_STDS[neighbour]:
            self._chosen = neighbour  # and on in this direction
        else:
            self._direction = -self._direction
        return best

    def _label_nats(self, samples: Samples) -> float:
        """Return what a code for the labels of the training set needs without a network; NaN if not class labels."""
        if not isinstance(samples.likelihood, Categorical):
            return math.nan
        targets = samples.targets
        mine = torch.zeros(0, dtype=torch.long, device="cpu")
        if targets is not None and not targets.is_floating_point():
            mine = targets[targets >= 0].cpu()  # below 0: labels that do not count
        largest = int(mine.max()) if len(mine) else -1
        classes = max(on_every_process(samples.trainer, largest + 1))
        counts = samples.summed(mine.bincount(minlength=classes)).cpu()
        scale = self._training_set / samples.total
        return label_entropy(counts) * counts.sum().item() * scale

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
        return {
            **super().state_dict(),
            "prior_center": {name: w.cpu() for name, w in self._center.kept.items()},
            "chosen": self._chosen,
            "direction": self._direction,
            "prior_std": self.prior_std,
            "beta": self.beta,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._center.kept = dict(state_dict["prior_center"])
        self._chosen = state_dict.get("chosen")
        self._direction = state_dict.get("direction", 1)
        before = (state_dict.get("prior_std"), state_dict.get("beta"))
        now = (self.prior_std, self.beta)
        if before != now and before != (None, None):
            warn(
                f"{self.state_key} goes on with `prior_std` and `beta` {now}, and its history was measured with "
                f"{before}: the two parts do not compare.",
            )


class _Trials:
    """Measures losses under Gaussians of several widths, all with the same noises (common random numbers).

    An even number of noises are tried on every second sample each, and what it adds to their loss stands for all
    samples: losses under one noise rise together, so that more noises say more than more samples. A noise is as large
    as the network: one is held at a time, beside those that are small enough to be kept.
    """

    def __init__(
        self,
        callback: InformationInWeights,
        observed: _Observed,
        family: PostFamily,
        samples: Samples,
        loss: float,
    ) -> None:
        self.callback = callback
        self.observed = observed
        self.family = family
        self.samples = samples
        self.loss = loss  # of the training set, without noise
        self.noises = callback.draws // 2
        even = self.noises % PARTS == 0 and samples.total >= PARTS
        self.parts = PARTS if even else 1  # or some samples would count more than others

    def measured(self, stds: Sequence[float]) -> list[_Gaussian]:
        """Return the Gaussians of some widths, each measured with all noises."""
        rows = [self._losses(number, stds) for number in range(self.noises)]
        columns = zip(*rows, strict=True)
        return list(map(_gaussian, stds, self.family.terms(stds), columns))

    def best_of_grid(self) -> tuple[int, _Gaussian]:
        """Return the best Gaussian of the grid, which is looked at from coarse to fine, and its place there."""
        tried: dict[int, _Gaussian] = {}

        def best_of(places: Iterable[int]) -> int:
            new = [place for place in places if 0 <= place < len(AUTO_STDS)]
            found = self.measured([AUTO_STDS[place] for place in new])
            tried.update(zip(new, found, strict=True))
            return min(tried, key=lambda place: tried[place].code_length())

        best = best_of(range(0, len(AUTO_STDS), 4))
        for step in (2, 1):
            best = best_of((best - step, best + step))
        return best, tried[best]

    def better(self, *stds: float) -> _Gaussian:
        """Return the Gaussian that is best by the first noise, the first of equal ones, measured with all noises."""
        first = self._losses(0, stds)
        by_width = self.family.terms(stds)
        found = [
            _gaussian(std, terms, [loss])
            for std, terms, loss in zip(stds, by_width, first, strict=True)
        ]
        best = min(found, key=_Gaussian.code_length)
        losses = [best.expected_loss]
        for number in range(1, self.noises):
            losses += self._losses(number, [best.prior_std])
        return _gaussian(best.prior_std, best.parts, losses)

    def _losses(self, number: int, stds: Sequence[float]) -> list[float]:
        """Return the loss of the training set under one noise of both signs, for each width.

        Every process gets to the sum over processes, also one that fails.
        """
        samples = self.samples
        part = number % self.parts
        first = (part - samples.first) % self.parts
        some = slice(first, None, self.parts)
        share = len(range(part, samples.total, self.parts)) / samples.total
        try:
            added = self._added(number, stds, some)
        except Exception:  # e.g. out of memory: then NaN, on all processes
            added = [math.nan] * len(stds)
        mine = torch.tensor(added, dtype=torch.float64, device="cpu") / share
        everywhere = self.callback._of_training_set(samples, mine)
        return (self.loss + everywhere).tolist()

    def _added(self, number: int, stds: Sequence[float], some: slice) -> list[float]:
        """Return what a noise of both signs adds to the loss of some samples in the mean, for each width."""
        observed = self.observed

        def loss() -> float:
            return self.samples.losses(observed.model, some).sum().item()

        without = observed.losses[some].sum().item()
        added = []
        for std in stds:
            noise = self.callback._noises.noise(number, observed.moved)
            losses = losses_with_noise(observed.model, loss, self.family.shaped(std), noise)
            added.append(fmean(losses) - without)
        return added


def _gaussian(std: float, parts: dict[str, InformationTerms], losses: Sequence[float]) -> _Gaussian:
    """Return a Gaussian whose expected loss is the mean over noises."""
    error = math.nan
    if len(losses) > 1 and all(map(math.isfinite, losses)):
        error = stdev(losses) / math.sqrt(len(losses))
    return _Gaussian(std, parts, fmean(losses), error)


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
