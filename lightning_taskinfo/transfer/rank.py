"""Which pretrained network to start from: read-outs of frozen features, compared on the labels at hand."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._batches import BatchFn
from lightning_taskinfo._calls import Forward
from lightning_taskinfo._nested import take
from lightning_taskinfo._progress import counted, shown
from lightning_taskinfo._random import own_randomness, seed_from
from lightning_taskinfo._ranges import check_counts, check_positive
from lightning_taskinfo._warn import warn
from lightning_taskinfo.functional.features import transfer_onset
from lightning_taskinfo.functional.intervals import (
    normal_quantile,
    paired_interval,
    student_quantile,
    verdict_of,
    wilson_interval,
)
from lightning_taskinfo.functional.readout import (
    HeldOut,
    cross_validated,
    held_out_readout,
    sharpened_brier,
    stratified_folds,
)
from lightning_taskinfo.functional.transferability import h_score, leep, logme, nce
from lightning_taskinfo.transfer.overlap import (
    MAX_FEATURES,
    Data,
    Labelled,
    ObservedNetwork,
    device_of,
    fitted_curve,
    is_far,
    read_labelled,
)
from lightning_taskinfo.transfer.ranking import LayerReadout, RankedStart, StartRanking
from lightning_taskinfo.transfer.sampling import seeded

Model: TypeAlias = nn.Module | Callable[[], nn.Module]
# The share of 1,640 comparisons with scratch, on nine image tasks, in which a start helped; on six others it was 0.67.
HELPS_BEFORE = 0.87
MODELS = (  # the rule of `models`
    "`models` must be a dict of names to networks, or to functions that make or load one, such as "
    '{"mine": lambda: Net.load_from_checkpoint(path)}'
)


@dataclass(frozen=True)
class FineTuning:
    """How starts are fine-tuned on the labels at hand, fold by fold, with a fresh head: Adam, one cycle of its rate.

    Args:
        steps: Optimizer steps.
        learning_rate: Its largest value.
        batch_size: Samples of a step.
        scratch_repeats: How often the untrained start is cross-validated, with other folds, heads
            and batches, and with other weights where it is given as a function that draws them. Its
            losses are averaged, as it has a part in every comparison, and their variance is that of
            luck, which calls take into account; with 1 they know of none.
        seed: Of heads and batches.
    """

    steps: int = 100
    learning_rate: float = 1e-3
    batch_size: int = 32
    scratch_repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(
            steps=self.steps,
            batch_size=self.batch_size,
            scratch_repeats=self.scratch_repeats,
        )
        check_positive(learning_rate=self.learning_rate)


class Measured(NamedTuple):
    """One start with its held-out losses.

    Attributes:
        start: What is told of it.
        losses: That order and are compared, shape ``[N]``: Brier scores of fine-tuning at the best
            temperature, or squared errors of real labels; where nothing is fine-tuned, squared
            errors of the read-out of the last layer.
        frozen: Of that read-out, what is compared with fine-tuning.
        luck: Variance of the mean loss of fine-tuning between repetitions; 0 if it was not repeated.
    """

    start: RankedStart
    losses: Tensor
    frozen: Tensor
    luck: float = 0.0


def rank_starts(
    models: Mapping[str, Model],
    data: Data,
    *,
    layers: int | Sequence[str] = 5,
    scratch: str | None = None,
    curve: Mapping[int, float] | None = None,
    fine_tune: FineTuning | None = None,
    folds: int = 5,
    confidence: float = 0.95,
    helps_before: float = HELPS_BEFORE,
    max_features: int = MAX_FEATURES,
    forward_fn: Forward | None = None,
    batch_fn: BatchFn | None = None,
    progress: bool = True,
) -> StartRanking:
    r"""Rank pretrained networks for a target task by what a linear read-out of their frozen features gets right.

    For each start and layer, ridge regression on pooled features predicts the labels of a fold from
    the others. Starts are ordered by the mean of two ranks, those by the held-out squared error of
    the last layer and by its LogME: the two did best, and alike, in a small pilot against
    fine-tuning. Which starts cannot be told apart from the first by these errors, in pairs over the
    samples, is said. H-score, LEEP and NCE stand beside it, see
    :mod:`lightning_taskinfo.functional.transferability`. Nothing is trained, unless ``fine_tune``
    asks for it, and the networks are only observed.

    Args:
        models: The starts by name: networks, or functions that make or load one, which are called
            one after the other, so that only one is in memory; two while scratch is cross-validated
            again.
        data: The labelled target samples: batches ``(inputs, labels)``, or one; a mapping has the
            labels in its field ``labels``, ``label``, ``targets``, ``target`` or ``y``. Classes, or
            real values.
        layers: Which layers to read: a number of them, spread over the depth of each network up to
            the last one before its head; or names of modules.
        scratch: Name of the start with untrained weights. Whether the others help or hurt is said
            only beside ``fine_tune``: read-outs of trained and untrained features cannot tell.
        curve: Test errors of training from scratch by number of labels, two or more (of real
            labels: the share of their variance that is missed). It gives the number of labels above
            which scratch is predicted to win over a read-out of the frozen start.
        fine_tune: Also fine-tune every start on the labels, cross-validated, and order by that:
            seconds to minutes each, and the honest rival of everything else here. Beside
            ``scratch``, fine-tuning from each start and its frozen features are said to help or to
            hurt.
        folds: Number of folds of read-outs and fine-tuning, with equal shares of each class; at
            most as many as the median class has samples.
        confidence: Probability that an interval covers. A start is said to help, or to hurt, if that
            is at least as probable.
        helps_before: Probability that fine-tuning a start beats scratch, before the labels are
            looked at, from 0.5 up to less than ``confidence``. The labels at hand are few, and a
            pretrained start seldom hurts: the larger it is, the less they need to show for "helps",
            and the more for "hurts". With 0.5 they decide alone, as they do for frozen features.
        max_features: Most features of a layer; larger ones are pooled.
        forward_fn: How to call a network, ``forward_fn(model, inputs)``.
        batch_fn: Picks ``(inputs, labels)`` out of a batch.
        progress: Whether to draw a bar where somebody looks.

    Returns:
        The ranking, best first; it prints, draws, saves and logs itself.

    Raises:
        ValueError: If there is no start, fewer than four samples per fold or one class only; if a
            network has no such layer; or if ``scratch`` or ``curve`` does not fit.
        TypeError: If ``models`` is no dict, or holds something else, such as a path.

    Example:
        >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> y = (x.sum(1) > 0).long()
        >>> good, poor = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        >>> _ = nn.init.eye_(good[0].weight), nn.init.zeros_(poor[0].weight)
        >>> ranking = rank_starts({"poor": poor, "good": good}, (x, y))
        >>> ranking.best.name, ranking.tied
        ('good', ('good',))
    """
    if not isinstance(models, Mapping):
        raise TypeError(f"{MODELS}, got {type(models).__name__}.")
    if not models:
        raise ValueError("`models` must hold at least one start, got none.")
    for name, model in models.items():
        if not callable(model):  # as networks are, too
            raise TypeError(f"{MODELS}, got {type(model).__name__} for {name!r}.")
    if scratch is not None and scratch not in models:
        raise ValueError(f"`scratch` must name one of the starts {list(models)}, got {scratch!r}.")
    if not 0.5 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0.5 and 1, got {confidence}.")
    if not 0.5 <= helps_before < confidence:
        raise ValueError(
            "`helps_before` must be at least 0.5 and less than `confidence`, "
            f"got {helps_before} and {confidence}."
        )
    ruler = _Ruler(
        read_labelled(data, batch_fn, folds),
        layers,
        scratch,
        None if curve is None else fitted_curve(curve),
        fine_tune,
        folds,
        confidence,
        helps_before,
        max_features,
        forward_fn,
    )
    with shown(progress, "rank", len(models)) as tell:
        names = counted(models, len(models), tell, "starts")
        found = {name: ruler.measure(name, models[name]) for name in names}
    ranking = ruler.compared(found)
    onset = ranking.best.onset
    if curve and onset and is_far(onset[1], [*curve]):
        warn(
            f"`curve` was measured at {min(curve):g} to {max(curve):g} labels, far from {onset[1]:.2g}, where it is "
            "predicted to cross: measure it nearer to that before you rely on it."
        )
    return ranking


def _opened(model: Model, name: str, seed: int = 0) -> nn.Module:
    """Return a network, made now where it is given as a function, with the same weights each time for one seed."""
    if not isinstance(model, nn.Module):
        with seeded(seed):
            model = model()
    if not isinstance(model, nn.Module):
        got = f"a function that returns {type(model).__name__} for {name!r}"
        raise ValueError(f"{MODELS}, got {got}.")
    return model


def call_of(gain: Tensor, luck: float, confidence: float, helps_before: float = 0.5) -> str:
    """Say whether a start helps over scratch, with at least a probability of ``confidence``.

    By the samples, the probability that it helps is Student's. Its odds are multiplied by those
    that it helped before they were looked at.

    Args:
        gain: How much smaller its losses are on the same samples, ``[N]``.
        luck: Variance of the mean gain that comes with weights, heads, folds and batches.
        confidence: The probability.
        helps_before: Probability that it helps, before.
    """
    mean = gain.mean().item()
    error = math.sqrt(gain.var().item() / len(gain) + luck)
    odds = confidence / (1 - confidence)
    before = helps_before / (1 - helps_before)

    def reach(odds: float) -> float:
        """How far a one-sided bound that holds with these odds is from the mean."""
        return student_quantile(1 - 2 / (1 + odds), len(gain) - 1) * error

    return verdict_of(mean - reach(odds / before), mean + reach(odds * before))


@dataclass(frozen=True)
class _Ruler:
    """What all starts are measured with."""

    samples: Labelled
    layers: int | Sequence[str]
    scratch: str | None
    law: tuple[Tensor, Tensor] | None
    fine_tune: FineTuning | None
    folds: int
    confidence: float
    helps_before: float
    max_features: int
    forward_fn: Forward | None

    @property
    def real(self) -> bool:
        """Whether labels are real numbers, and not classes."""
        return self.samples.labels.is_floating_point()

    def measure(self, name: str, given: Model) -> Measured:
        """Read all layers of one start, and fine-tune it where that is asked for."""
        model = _opened(given, name)
        begin = time.perf_counter()
        network = ObservedNetwork(model, self.samples.inputs, self.forward_fn)
        layers = self.layers
        if isinstance(layers, int):
            check_counts(layers=layers)
            layers = network.spread_layers(layers)
        features, logits = network.read(self.samples, layers, self.max_features)
        fold = stratified_folds(self.samples.labels, self.folds)
        found = {}
        for layer, values in features.items():
            found[layer] = held_out_readout(values, self.samples.columns, fold)
        rows = [self._row(layer, one) for layer, one in found.items()]
        best = min(rows, key=lambda row: (row.error, row.missed))
        as_good = []  # layers whose read-out is not seen to miss more than the best one
        for layer, one in found.items():
            behind = paired_interval(one.squares, found[best.name].squares, self.confidence)
            if behind[0] <= 0:
                as_good.append(layer)
        last = rows[-1]
        start = RankedStart(
            name=name,
            layers=tuple(rows),
            best=best.name,
            freeze=as_good[-1],
            error=best.error,
            interval=best.interval,
            missed=last.missed,
            **self._scores(features[last.name], logits),
            seconds=time.perf_counter() - begin,
        )
        readout = found[last.name]
        if self.fine_tune is None:
            return Measured(start, readout.squares, readout.squares)
        if logits is None:
            raise ValueError(
                "`fine_tune` needs starts that end in an nn.Linear, their head, which is made anew, with one row of "
                "scores for each sample; got one that ends in something else."
            )
        repeats = self._tuned(self.fine_tune, network, name, given)
        losses, errors = repeats.mean(0)
        luck = repeats[:, 0].mean(1).var().item() if len(repeats) > 1 else 0.0
        start = replace(start, fine_tuned=errors.mean().item())
        return Measured(start, losses, self._compared(readout), luck)

    def _row(self, layer: str, found: HeldOut) -> LayerReadout:
        error = missed = found.missed.item()
        reach = normal_quantile(self.confidence) * found.standard_error.item()
        interval = max(0.0, missed - reach), missed + reach
        if not self.real:
            error = found.wrong.mean().item()
            interval = wilson_interval(error, len(found.wrong), self.confidence)
        return LayerReadout(layer, error, interval, missed)

    def _scores(self, features: Tensor, logits: Tensor | None) -> dict[str, Any]:
        """What others rank by: the features of the last layer ``[N, D]``, and the source head's say ``[N, Z]``."""
        labels = self.samples.labels
        found = {"logme": logme(features, labels)}
        if not self.real:
            found["h_score"] = h_score(features, labels)
            if logits is not None:
                source = logits.softmax(1)
                found["leep"] = leep(source, labels)
                found["nce"] = nce(source.argmax(1), labels)
        return {name: score.item() for name, score in found.items()}

    def _compared(self, found: HeldOut) -> Tensor:
        """Return the losses by which fine-tuned starts and read-outs are compared.

        At the best temperature: how sure a network is of itself says little about its errors, and
        columns of a read-out are no probabilities.
        """
        if self.real:
            return found.squares
        return sharpened_brier(found.predicted, self.samples.columns)

    def compared(self, found: Mapping[str, Measured]) -> StartRanking:
        """Order the starts, and say which of them can be told apart, and whether they win over scratch."""
        confidence = self.confidence
        starts = [one.start for one in found.values()]
        by_error = sorted(starts, key=lambda start: start.missed)
        by_logme = sorted(starts, key=lambda start: -start.logme)
        ordered = sorted(by_error, key=lambda s: by_error.index(s) + by_logme.index(s))
        if self.fine_tune is not None:
            ordered = sorted(starts, key=lambda start: found[start.name].losses.mean().item())
        first = found[ordered[0].name].losses
        scratch = found[self.scratch] if self.scratch is not None else None
        compared = []
        for start in ordered:
            _, losses, frozen, _ = found[start.name]
            known: dict[str, Any] = {"behind": paired_interval(losses, first, confidence)}
            if self.law is not None:
                low, high = start.interval
                shares = torch.tensor([high, start.error, low], dtype=torch.float64)
                known["onset"] = tuple(transfer_onset(shares, *self.law).tolist())
            if scratch and self.fine_tune and start.name != self.scratch:
                # The start is as lucky as scratch is once; features that are frozen are not.
                of_mean = scratch.luck / self.fine_tune.scratch_repeats
                gain, of_gain = scratch.losses - losses, of_mean + scratch.luck
                known["call"] = call_of(gain, of_gain, confidence, self.helps_before)
                known["frozen_call"] = call_of(scratch.losses - frozen, of_mean, confidence)
            compared.append(replace(start, **known))
        return StartRanking(
            starts=tuple(compared),
            tied=tuple(s.name for s in compared if s is compared[0] or s.behind[0] <= 0),
            samples=len(first),
            classes=None if self.real else self.samples.columns.shape[1],
            confidence=confidence,
            scratch=self.scratch,
        )

    # The honest rival: fine-tune on the labels at hand.

    def _tuned(
        self,
        how: FineTuning,
        network: ObservedNetwork,
        name: str,
        given: Model,
    ) -> Tensor:
        """Cross-validate fine-tuning: losses and errors of each repetition, ``[R, 2, N]``."""
        samples = self.samples
        every = []
        model = network.model
        for repeat in range(how.scratch_repeats if name == self.scratch else 1):
            if repeat:  # other folds, heads, batches and, of a function, weights
                how = replace(how, seed=seed_from(how.seed, repeat))
                model = _opened(given, name, how.seed)
            generator = Generator().manual_seed(how.seed)
            fold = stratified_folds(samples.labels, self.folds, generator)
            predict = partial(self._predicted, network, model, how)
            found = cross_validated(samples.columns, fold, predict)
            errors = found.squares if self.real else found.wrong
            every.append(torch.stack([self._compared(found), errors]))
        return torch.stack(every)

    def _predicted(
        self,
        network: ObservedNetwork,
        model: nn.Module,
        how: FineTuning,
        known: Tensor,
        held: Tensor,
    ) -> Tensor:
        """Train a copy with a fresh head on some samples, and return what it says of others."""
        copy = deepcopy(model)
        head = str(network.head)
        weight: Any = copy.get_submodule(head).weight
        columns = self.samples.columns
        loss_of = nn.functional.mse_loss if self.real else nn.functional.cross_entropy
        generator = Generator().manual_seed(how.seed)
        order = known[:0]

        def outputs(picked: Tensor) -> Any:
            return network.run(copy, take(self.samples.inputs, itemgetter(picked)))

        device = device_of(model)
        with own_randomness(how.seed, device), torch.inference_mode(False), torch.enable_grad():
            copy.set_submodule(head, nn.Linear(weight.shape[1], columns.shape[1]).to(weight))
            copy.train().requires_grad_(True)
            optimizer = torch.optim.Adam(copy.parameters(), lr=how.learning_rate)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                how.learning_rate,
                total_steps=max(how.steps, 2),
            )
            for _ in range(how.steps):
                if len(order) < min(how.batch_size, len(known)):
                    order = known[torch.randperm(len(known), generator=generator)]
                picked, order = order[: how.batch_size], order[how.batch_size :]
                said = outputs(picked)
                optimizer.zero_grad()
                loss_of(said, columns[picked].to(said)).backward()
                optimizer.step()
                schedule.step()
        copy.eval()
        with torch.no_grad():
            return outputs(held)
