"""Which pretrained network to start from: read-outs of frozen features, compared on the labels at hand."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._batches import Forward, take
from lightning_taskinfo._progress import counted, shown
from lightning_taskinfo._random import own_randomness, seed_from
from lightning_taskinfo._ranges import check_counts, check_positive
from lightning_taskinfo.functional.intervals import (
    normal_quantile,
    paired_interval,
    verdict_of,
    wilson_interval,
)
from lightning_taskinfo.functional.readout import (
    ReadOut,
    read_out,
    sharpened_brier,
    stratified_folds,
)
from lightning_taskinfo.functional.transferability import h_score, leep, logme, nce
from lightning_taskinfo.transfer.features import (
    Labelled,
    ObservedNetwork,
    first_tensor,
    read_labelled,
)
from lightning_taskinfo.transfer.overlap import (
    MAX_FEATURES,
    PowerLaw,
    crossings,
    fitted_curve,
    label_columns,
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
    data: Iterable[Any] | Mapping[str, Any],
    *,
    layers: Layers = 5,
    scratch: str | None = None,
    curve: Mapping[int, float] | None = None,
    fine_tune: FineTuning | None = None,
    folds: int = 5,
    confidence: float = 0.95,
    max_features: int = MAX_FEATURES,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    batch_fn: Callable[[Any], tuple[Any, Tensor]] | None = None,
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
            network cannot be called or has no such layer; or if ``scratch`` or ``curve`` does not
            fit.
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
    _check_models(models)
    if scratch is not None and scratch not in models:
        raise ValueError(f"`scratch` must name one of the starts {list(models)}, got {scratch!r}.")
    if fine_tune is not None and fine_tune.scratch_only and scratch is None:
        raise ValueError("`scratch` must name a start beside `scratch_only`, got None.")
    if not 0.5 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0.5 and 1, got {confidence}.")
    samples = read_labelled(data, batch_fn)
    columns = label_columns(samples.labels, folds)
    law = None if curve is None else fitted_curve(curve)
    ruler = _Ruler(samples, columns, layers, folds, max_features, confidence, forward_fn, fine_tune)
    found: dict[str, Measured] = {}
    with shown(progress, "rank", len(models)) as tell:
        for name in counted(list(models), len(models), tell, "starts"):
            found[name] = ruler.measure(name, models[name], scratch)
    return ruler.compared(found, scratch, law)


def _check_models(models: Any) -> None:
    """Raise an error for what holds no networks and no functions by name."""
    if not isinstance(models, Mapping):
        raise TypeError(f"{MODELS}, got {type(models).__name__}.")
    if not models:
        raise ValueError("`models` must hold at least one start, got none.")
    for name, model in models.items():
        if not callable(model):  # as networks are, too
            raise TypeError(f"{MODELS}, got {type(model).__name__} for {name!r}.")


def _opened(model: Model, name: str) -> nn.Module:
    """Return a network, made now where it is given as a function."""
    if not isinstance(model, nn.Module):
        model = model()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{MODELS}, got a function that returns {type(model).__name__} for {name!r}."
        )
    return model


@dataclass(frozen=True)
class _Ruler:
    """What all starts are measured with: samples ``[N]``, their labels as columns ``[N, C]``, and how to read them."""

    samples: Labelled
    columns: Tensor
    layers: Layers
    folds: int
    max_features: int
    confidence: float
    forward_fn: Forward | None
    fine_tune: FineTuning | None

    @property
    def real(self) -> bool:
        """Whether labels are real numbers, and not classes."""
        return self.samples.labels.is_floating_point()

    def layers_of(self, name: str, network: ObservedNetwork) -> list[str]:
        """Return which layers of a start are read."""
        if isinstance(self.layers, int):
            if self.layers < 1:
                raise ValueError(f"`layers` must be at least 1 or name modules, got {self.layers}.")
            return network.spread_layers(self.layers)
        if not isinstance(self.layers, Mapping):
            return list(self.layers)
        if name not in self.layers:
            raise ValueError(f"`layers` must name layers of every start, got none for {name!r}.")
        return list(self.layers[name])

    def measure(self, name: str, given: Model, scratch: str | None) -> Measured:
        """Read all layers of one start, and fine-tune it where that is asked for."""
        model = _opened(given, name)
        begin = time.perf_counter()
        network = ObservedNetwork.of(model, self.samples.few, self.forward_fn)
        names = self.layers_of(name, network)
        features, logits = network.read(self.samples, names, self.max_features)
        fold = stratified_folds(self.samples.labels, self.folds)
        found = [read_out(values, self.columns, fold) for values in features.values()]
        rows = [self._row(layer, one) for layer, one in zip(features, found, strict=True)]
        best = min(range(len(rows)), key=lambda i: (rows[i].error, rows[i].missed))
        errors = [one.squares if self.real else one.wrong for one in found]
        behind = [paired_interval(error, errors[best], self.confidence)[0] for error in errors]
        # The deepest layer whose read-out is not seen to be worse than the best one.
        deepest = max(i for i, low in enumerate(behind) if i == best or low <= 0)
        start = RankedStart(
            name=name,
            layers=tuple(rows),
            best=rows[best].name,
            freeze=rows[deepest].name,
            error=rows[best].error,
            interval=rows[best].interval,
            missed=rows[-1].missed,
            **self._scores(features[rows[-1].name], logits),
            parameters=sum(p.numel() for p in model.parameters()),
            seconds=time.perf_counter() - begin,
        )
        frozen = Losses(found[-1].squares, errors[-1], errors[-1])
        if not self.real:
            frozen = frozen._replace(sharpened=sharpened_brier(found[-1].predicted, self.columns))
        if self.fine_tune is None or (self.fine_tune.scratch_only and name != scratch):
            return Measured(start, frozen, None)
        tuned = self._tuned_losses(model, self.fine_tune, fold)
        if name == scratch:
            others = self._repeated_losses(given, name, self.fine_tune)
            tuned = Losses(
                *(torch.stack(same).mean(0) for same in zip(tuned, *others, strict=True))
            )
        start = replace(start, fine_tuned=tuned.errors.mean().item())
        return Measured(start, frozen, tuned)

    def _scores(self, features: Tensor, logits: Tensor | None) -> dict[str, Any]:
        """What others rank by: the features of the last layer ``[N, D]``, and the source head's say ``[N, Z]``."""
        labels = self.samples.labels
        found: dict[str, Any] = {"logme": logme(features, labels).item()}
        found |= dict.fromkeys(("h_score", "leep", "nce"))
        if not self.real:
            found["h_score"] = h_score(features, labels).item()
        if logits is not None and not self.real:
            source = logits.softmax(1)
            found["leep"] = leep(source, labels).item()
            found["nce"] = nce(source.argmax(1), labels).item()
        return found

    def _row(self, layer: str, found: ReadOut) -> LayerReadout:
        missed = found.missed.item()
        if self.real:
            reach = normal_quantile(self.confidence) * found.standard_error.item()
            return LayerReadout(layer, missed, (max(0.0, missed - reach), missed + reach), missed)
        error = found.wrong.mean().item()
        interval = wilson_interval(error, len(found.wrong), self.confidence)
        return LayerReadout(layer, error, interval, missed)

    def compared(
        self,
        found: Mapping[str, Measured],
        scratch: str | None,
        law: PowerLaw | None,
    ) -> StartRanking:
        """Order the starts, and say which of them can be told apart, and whether they win over scratch."""
        starts = [one.start for one in found.values()]
        by_error = sorted(starts, key=lambda start: start.missed)
        by_logme = sorted(starts, key=lambda start: -start.logme)
        ordered = sorted(by_error, key=lambda s: by_error.index(s) + by_logme.index(s))
        losses = {name: one.frozen.squares for name, one in found.items()}
        tuned = {name: one.tuned.squares for name, one in found.items() if one.tuned is not None}
        if len(tuned) == len(found):
            losses = tuned
            ordered = sorted(starts, key=lambda start: losses[start.name].mean().item())
        compared = []
        for start in ordered:
            mine, first = losses[start.name], losses[ordered[0].name]
            start = replace(start, behind=paired_interval(mine, first, self.confidence))
            if law is not None:
                start = self._beside_curve(start, law)
            if scratch is not None and start.name != scratch:
                gain = paired_interval(losses[scratch], mine, self.confidence)
                start = self._called(replace(start, gain=gain), found[start.name], found[scratch])
            compared.append(start)
        return StartRanking(
            starts=tuple(compared),
            tied=tuple(s.name for s in compared if s is compared[0] or s.behind[0] <= 0),
            samples=len(self.columns),
            classes=None if self.real else len(self.samples.labels.unique()),
            confidence=self.confidence,
            scratch=scratch,
            ordered_by="fine-tuning" if losses is tuned else "read-out and LogME",
        )

    def _called(self, start: RankedStart, mine: Measured, scratch: Measured) -> RankedStart:
        """Say whether a start helps over training from scratch, fine-tuned and frozen, where scratch was trained.

        Brier scores are compared, which vary less beside their difference than errors do. Columns
        of a read-out are no probabilities: it and scratch are compared at the best temperature of each.
        """
        if scratch.tuned is None:
            return start
        frozen = self._call(scratch.tuned.sharpened, mine.frozen.sharpened)
        call = None
        if mine.tuned is not None:
            call = self._call(scratch.tuned.squares, mine.tuned.squares)
        return replace(start, call=call, frozen_call=frozen)

    def _call(self, scratch: Tensor, start: Tensor) -> str:
        """Whether a one-sided bound on the mean difference of losses is above 0, or below."""
        low, _, high = paired_interval(scratch, start, 2 * self.confidence - 1)
        return verdict_of(low, high)

    def _beside_curve(self, start: RankedStart, law: PowerLaw) -> RankedStart:
        """Compare the read-out with training from scratch: at the labels at hand, and where it falls below."""
        shares = start.interval[0], start.error, start.interval[1]
        low, middle, high = (torch.tensor(share, dtype=torch.float64) for share in shares)
        first, second, third = (end.item() for end in crossings(low, middle, high, law))
        at_hand = law[0] * len(self.columns) ** -law[1]
        call = verdict_of((at_hand - high).item(), (at_hand - low).item())
        return replace(start, onset=(first, second, third), frozen_call=call)

    # The honest rival: fine-tune on the labels at hand.

    def _repeated_losses(self, given: Model, name: str, how: FineTuning) -> Iterator[Losses]:
        """Cross-validate again, with another seed of folds, heads, batches and, of a function, weights."""
        for repeat in range(1, how.scratch_repeats):
            seed = seed_from(how.seed, repeat)
            with own_randomness(seed):
                model = _opened(given, name)
            generator = Generator().manual_seed(seed)
            fold = stratified_folds(self.samples.labels, self.folds, generator)
            yield self._tuned_losses(model, replace(how, seed=seed), fold)

    def _tuned_losses(self, model: nn.Module, how: FineTuning, fold: Tensor) -> Losses:
        """Fine-tune on all folds but one, and return the losses on that one, for each."""
        columns = self.columns
        scores = torch.empty_like(columns)
        baseline = torch.empty(len(columns), dtype=torch.float64)
        for k in fold.unique():
            held, kept = (same.nonzero().flatten() for same in (fold == k, fold != k))
            network = self._fine_tuned(model, kept, how)
            with torch.no_grad():
                scores[held] = self._outputs(network, held).double().cpu()
            baseline[held] = (columns - columns[kept].mean(0)).square().sum(1).mean()
        if self.real:
            squares = (scores - columns).square().sum(1) / baseline
            return Losses(squares, squares, squares)
        errors = (scores.argmax(1) != columns.argmax(1)).double()
        squares = (scores.softmax(1) - columns).square().sum(1)
        return Losses(squares, errors, sharpened_brier(scores, columns))

    def _fine_tuned(self, model: nn.Module, kept: Tensor, how: FineTuning) -> ObservedNetwork:
        """Return a copy of a start with a fresh head, trained on some samples; the start itself is left alone."""
        copy = deepcopy(model)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        targets = self.columns.to(device)
        generator = Generator().manual_seed(how.seed)
        order = torch.empty(0, dtype=torch.long)
        with own_randomness(how.seed, device), torch.inference_mode(False), torch.enable_grad():
            network = self._with_fresh_head(copy)
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
                outputs = self._outputs(network, picked)
                optimizer.zero_grad()
                self._loss(outputs, targets[picked.to(device)].to(outputs)).backward()
                optimizer.step()
                schedule.step()
        copy.eval()
        return network

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of indicators, and the squared error of real labels."""
        loss = nn.functional.mse_loss if self.real else nn.functional.cross_entropy
        return loss(outputs, targets)

    def _outputs(self, network: ObservedNetwork, picked: Tensor) -> Tensor:
        inputs = take(self.samples.inputs, lambda x: x[picked.to(x.device)])
        outputs = first_tensor(network.run(inputs))
        if outputs is None or outputs.ndim != 2:
            raise ValueError(
                "`models` must put out one row of scores for each sample to be fine-tuned; set `forward_fn`."
            )
        return outputs

    def _with_fresh_head(self, model: nn.Module) -> ObservedNetwork:
        """Replace the linear layer that a network ends in by a fresh one.

        Raises:
            ValueError: If it does not end in one.
        """
        network = ObservedNetwork.of(model, self.samples.few, self.forward_fn)
        if network.head is None:
            raise ValueError(
                "`fine_tune` needs starts that end in an nn.Linear, their head, which is made anew; got one that ends "
                "in something else."
            )
        parent, _, child = network.head.rpartition(".")
        weight: Any = model.get_submodule(network.head).weight
        like = {"device": weight.device, "dtype": weight.dtype}
        fresh = nn.Linear(weight.shape[1], self.columns.shape[1], **like)
        setattr(model.get_submodule(parent), child, fresh)
        return network
