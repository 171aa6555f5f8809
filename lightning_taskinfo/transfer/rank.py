"""Which pretrained network to start from: read-outs of frozen features, compared on the labels at hand."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
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
from lightning_taskinfo.functional.features import transfer_onset
from lightning_taskinfo.functional.intervals import (
    normal_quantile,
    paired_interval,
    verdict_of,
    wilson_interval,
)
from lightning_taskinfo.functional.readout import (
    ReadOut,
    held_out_readout,
    sharpened_brier,
    stratified_folds,
)
from lightning_taskinfo.functional.transferability import (
    h_score,
    leep,
    logme,
    nce,
)
from lightning_taskinfo.transfer.overlap import (
    MAX_FEATURES,
    Data,
    Labelled,
    ObservedNetwork,
    device_of,
    fitted_curve,
    read_labelled,
)
from lightning_taskinfo.transfer.ranking import LayerReadout, RankedStart, StartRanking

Model: TypeAlias = nn.Module | Callable[[], nn.Module]
Layers: TypeAlias = int | Sequence[str] | Mapping[str, Sequence[str]]
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
        scratch_only: Whether only the untrained start is trained, and frozen features of the others
            are compared with it.
        scratch_repeats: How often the untrained start is cross-validated, with other folds, heads
            and batches, and with other weights where it is given as a function that draws them. Its
            losses are averaged: it has a part in every comparison.
        seed: Of heads and batches.
    """

    steps: int = 100
    learning_rate: float = 1e-3
    batch_size: int = 32
    scratch_only: bool = False
    scratch_repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(
            steps=self.steps,
            batch_size=self.batch_size,
            scratch_repeats=self.scratch_repeats,
        )
        check_positive(learning_rate=self.learning_rate)


class Losses(NamedTuple):
    """What one way of predicting held-out labels gets wrong.

    Attributes:
        squares: Squared errors of the samples, shape ``[N]``: of real labels over that of the mean
            label; of fine-tuned classes, Brier scores.
        errors: Whether the class is another, shape ``[N]``; of real labels, the squared errors.
        sharpened: Brier scores at the temperature that suits the scores of the classes best, shape
            ``[N]``; of real labels, the squared errors.
    """

    squares: Tensor
    errors: Tensor
    sharpened: Tensor


class Measured(NamedTuple):
    """One start with its losses: of the read-out of its last layer, and of fine-tuning where it was fine-tuned."""

    start: RankedStart
    frozen: Losses
    tuned: Losses | None


def rank_starts(
    models: Mapping[str, Model],
    data: Data,
    *,
    layers: Layers = 5,
    scratch: str | None = None,
    curve: Mapping[int, float] | None = None,
    fine_tune: FineTuning | None = None,
    folds: int = 5,
    confidence: float = 0.95,
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
            the last one before its head; names of modules; or names by start.
        scratch: Name of the start with untrained weights, which the gains of the others are
            measured from. Whether they help or hurt is said only beside ``fine_tune`` or ``curve``:
            read-outs of trained and untrained features cannot tell.
        curve: Test errors of training from scratch by number of labels, two or more (of real
            labels: the share of their variance that is missed). It gives the number of labels above
            which scratch is predicted to win over a read-out of the frozen start, and whether
            frozen features help or hurt at the labels at hand.
        fine_tune: Also fine-tune every start on the labels, cross-validated, and order by that:
            seconds to minutes each, and the honest rival of everything else here. Beside
            ``scratch``, fine-tuning from each start and its frozen features are said to help or to
            hurt.
        folds: Number of folds of read-outs and fine-tuning, with equal shares of each class; at
            most as many as the median class has samples.
        confidence: Probability that an interval covers. A start is said to help, or to hurt, if a
            one-sided bound of this confidence is on that side of 0.
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
    if fine_tune is not None and fine_tune.scratch_only and scratch is None:
        raise ValueError("`scratch` must name a start beside `scratch_only`, got None.")
    if not 0.5 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0.5 and 1, got {confidence}.")
    samples = read_labelled(data, batch_fn, folds)
    law = None if curve is None else fitted_curve(curve)
    ruler = _Ruler(
        samples,
        layers,
        scratch,
        fine_tune,
        folds,
        confidence,
        max_features,
        forward_fn,
    )
    with shown(progress, "rank", len(models)) as tell:
        names = counted(models, len(models), tell, "starts")
        found = {name: ruler.measure(name, models[name]) for name in names}
    return ruler.compared(found, law)


def _opened(model: Model, name: str) -> nn.Module:
    """Return a network, made now where it is given as a function."""
    if not isinstance(model, nn.Module):
        model = model()
    if not isinstance(model, nn.Module):
        got = f"a function that returns {type(model).__name__} for {name!r}"
        raise ValueError(f"{MODELS}, got {got}.")
    return model


def call_of(scratch: Tensor, start: Tensor, confidence: float) -> str:
    """Say whether a start helps over scratch: whether a one-sided bound on the mean difference of losses is above 0."""
    low, _, high = paired_interval(scratch, start, 2 * confidence - 1)
    return verdict_of(low, high)


@dataclass(frozen=True)
class _Ruler:
    """What all starts are measured with."""

    samples: Labelled
    layers: Layers
    scratch: str | None
    fine_tune: FineTuning | None
    folds: int
    confidence: float
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
        samples = self.samples
        network = ObservedNetwork(model, samples.inputs, self.forward_fn)
        layers = self._layers_of(name, network)
        features, logits = network.read(samples, layers, self.max_features)
        fold = stratified_folds(samples.labels, self.folds)
        rows = []
        errors = {}
        for layer, values in features.items():
            found = held_out_readout(values, samples.columns, fold)
            rows.append(self._row(layer, found))
            errors[layer] = found.squares if self.real else found.wrong
        best = min(rows, key=lambda row: (row.error, row.missed))
        as_good = []  # layers whose read-out is not seen to be worse than the best one
        for layer, error in errors.items():
            behind = paired_interval(error, errors[best.name], self.confidence)
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
            parameters=sum(p.numel() for p in model.parameters()),
            seconds=time.perf_counter() - begin,
        )
        frozen = self._losses(found.predicted, found.squares)
        how = self.fine_tune
        if how is None or (how.scratch_only and name != self.scratch):
            return Measured(start, frozen, None)
        if logits is None:
            raise ValueError(
                "`fine_tune` needs starts that end in an nn.Linear, their head, which is made anew, with one row of "
                "scores for each sample; got one that ends in something else."
            )
        every = [self._tuned_losses(network, model, how, fold)]
        repeats = how.scratch_repeats if name == self.scratch else 1
        # Again with other folds, heads, batches and, of a function, weights.
        for repeat in range(1, repeats):
            again = replace(how, seed=seed_from(how.seed, repeat))
            with own_randomness(again.seed):
                model = _opened(given, name)
            generator = Generator().manual_seed(again.seed)
            fold = stratified_folds(samples.labels, self.folds, generator)
            every.append(self._tuned_losses(network, model, again, fold))
        tuned = Losses(*(torch.stack(same).mean(0) for same in zip(*every, strict=True)))
        start = replace(start, fine_tuned=tuned.errors.mean().item())
        return Measured(start, frozen, tuned)

    def _layers_of(self, name: str, network: ObservedNetwork) -> Sequence[str]:
        layers = self.layers
        if isinstance(layers, int):
            check_counts(layers=layers)
            return network.spread_layers(layers)
        if not isinstance(layers, Mapping):
            return layers
        if name not in layers:
            raise ValueError(f"`layers` must name layers of every start, got none for {name!r}.")
        return layers[name]

    def _row(self, layer: str, found: ReadOut) -> LayerReadout:
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

    def _losses(self, predicted: Tensor, squares: Tensor) -> Losses:
        if self.real:
            return Losses(squares, squares, squares)
        columns = self.samples.columns
        wrong = predicted.argmax(1) != columns.argmax(1)
        return Losses(squares, wrong.double(), sharpened_brier(predicted, columns))

    def compared(
        self,
        found: Mapping[str, Measured],
        law: tuple[Tensor, Tensor] | None,
    ) -> StartRanking:
        """Order the starts, and say which of them can be told apart, and whether they win over scratch.

        Brier scores of fine-tuning are compared, which vary less beside their difference than errors
        do. Columns of a read-out are no probabilities: it and scratch are compared at the best
        temperature of each.
        """
        scratch, confidence = self.scratch, self.confidence
        starts = [one.start for one in found.values()]
        by_error = sorted(starts, key=lambda start: start.missed)
        by_logme = sorted(starts, key=lambda start: (math.isnan(start.logme), -start.logme))
        ordered = sorted(by_error, key=lambda s: by_error.index(s) + by_logme.index(s))
        losses = {name: one.frozen.squares for name, one in found.items()}
        tuned = {name: one.tuned.squares for name, one in found.items() if one.tuned is not None}
        if len(tuned) == len(found):
            losses = tuned
            ordered = sorted(starts, key=lambda start: losses[start.name].mean().item())
        n = len(self.samples.labels)
        first = losses[ordered[0].name]
        compared = []
        for start in ordered:
            mine = losses[start.name]
            known: dict[str, Any] = {"behind": paired_interval(mine, first, confidence)}
            if law is not None:
                low, high = start.interval
                shares = torch.tensor([high, start.error, low], dtype=torch.float64)
                known["onset"] = tuple(transfer_onset(shares, *law).tolist())
                least, _, most = (law[0] * n ** -law[1] - shares).tolist()
                known["frozen_call"] = verdict_of(least, most)
            if scratch is not None and start.name != scratch:
                known["gain"] = paired_interval(losses[scratch], mine, confidence)
                _, frozen, own = found[start.name]
                rival = found[scratch].tuned
                if rival is not None:
                    known["frozen_call"] = call_of(rival.sharpened, frozen.sharpened, confidence)
                if rival is not None and own is not None:
                    known["call"] = call_of(rival.squares, own.squares, confidence)
            compared.append(replace(start, **known))
        return StartRanking(
            starts=tuple(compared),
            tied=tuple(s.name for s in compared if s is compared[0] or s.behind[0] <= 0),
            samples=n,
            classes=None if self.real else self.samples.columns.shape[1],
            confidence=confidence,
            scratch=scratch,
            ordered_by="fine-tuning" if losses is tuned else "read-out and LogME",
        )

    # The honest rival: fine-tune on the labels at hand.

    def _tuned_losses(
        self,
        network: ObservedNetwork,
        model: nn.Module,
        how: FineTuning,
        fold: Tensor,
    ) -> Losses:
        """Fine-tune a model of a network's kind on all folds but one, and return the losses on that one, for each."""
        columns = self.samples.columns
        predicted = torch.empty_like(columns)
        baseline = columns.new_empty(len(columns))
        for k in fold.unique():
            held, kept = (same.nonzero().flatten() for same in (fold == k, fold != k))
            predicted[held] = self._predicted(network, model, how, kept, held)
            baseline[held] = (columns - columns[kept].mean(0)).square().sum(1).mean()
        if self.real:
            squares = (predicted - columns).square().sum(1) / baseline
        else:
            squares = (predicted.softmax(1) - columns).square().sum(1)
        return self._losses(predicted, squares)

    def _predicted(
        self,
        network: ObservedNetwork,
        model: nn.Module,
        how: FineTuning,
        kept: Tensor,
        held: Tensor,
    ) -> Tensor:
        """Train a copy with a fresh head on some samples, and return what it says of others."""
        copy = deepcopy(model)
        name = str(network.head)
        weight: Any = copy.get_submodule(name).weight
        columns = self.samples.columns
        loss_of = nn.functional.mse_loss if self.real else nn.functional.cross_entropy
        generator = Generator().manual_seed(how.seed)
        order = kept[:0]

        def outputs(picked: Tensor) -> Any:
            return network.run(copy, take(self.samples.inputs, itemgetter(picked)))

        device = device_of(model)
        with own_randomness(how.seed, device), torch.inference_mode(False), torch.enable_grad():
            head = nn.Linear(weight.shape[1], columns.shape[1]).to(weight)
            copy.set_submodule(name, head)
            copy.train().requires_grad_(True)
            optimizer = torch.optim.Adam(copy.parameters(), lr=how.learning_rate)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                how.learning_rate,
                total_steps=max(how.steps, 2),
            )
            for _ in range(how.steps):
                if len(order) < min(how.batch_size, len(kept)):
                    order = kept[torch.randperm(len(kept), generator=generator)]
                picked, order = order[: how.batch_size], order[how.batch_size :]
                said = outputs(picked)
                optimizer.zero_grad()
                loss_of(said, columns[picked].to(said)).backward()
                optimizer.step()
                schedule.step()
        copy.eval()
        with torch.no_grad():
            return outputs(held).double().cpu()
