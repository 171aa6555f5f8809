"""Which pretrained network to start from: read-outs of frozen features, compared on the labels at hand."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._batches import Forward, take
from lightning_taskinfo._progress import counted, shown
from lightning_taskinfo.functional.paired import normal_quantile, paired_interval, wilson_interval
from lightning_taskinfo.functional.readout import stratified_folds
from lightning_taskinfo.functional.transferability import h_score, leep, logme, nce
from lightning_taskinfo.transfer.features import Network, Samples, first_tensor, read_samples
from lightning_taskinfo.transfer.overlap import (
    MAX_FEATURES,
    PowerLaw,
    ReadOut,
    crossings,
    fitted_curve,
    label_columns,
    read_out,
)
from lightning_taskinfo.transfer.ranking import LayerReadout, RankedStart, StartRanking
from lightning_taskinfo.transfer.results import verdict_of

Model: TypeAlias = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class FineTuning:
    """How starts are fine-tuned on the labels at hand, fold by fold, with a fresh head: Adam, one cycle of its rate.

    Args:
        steps: Optimizer steps.
        learning_rate: Its largest value.
        batch_size: Samples of a step.
        folds: Number of folds.
        seed: Of heads and batches.
    """

    steps: int = 100
    learning_rate: float = 1e-3
    batch_size: int = 32
    folds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("folds", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")
        if not self.learning_rate > 0:
            raise ValueError(f"`learning_rate` must be positive, got {self.learning_rate}.")


def rank_starts(
    models: Mapping[str, Model],
    data: Iterable[Any] | Mapping[str, Any],
    *,
    layers: int | Sequence[str] | Mapping[str, Sequence[str]] = 5,
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
            one after the other, so that only one is in memory.
        data: The labelled target samples: batches ``(inputs, labels)``, or one; a mapping has the
            labels in its field ``labels``, ``label``, ``targets``, ``target`` or ``y``. Classes, or
            real values.
        layers: Which layers to read: a number of them, spread over the depth of each network up to
            the last one before its head; names of modules; or names by start.
        scratch: Name of the start with untrained weights, which the gains of the others are
            measured from. Whether they help or hurt is said only beside ``fine_tune``: read-outs of
            trained and untrained features cannot tell.
        curve: Test errors of training from scratch by number of labels, two or more (of real
            labels: the share of their variance that is missed). It gives the number of labels above
            which scratch is predicted to win over a read-out of the frozen start, and whether
            frozen features help or hurt at the labels at hand.
        fine_tune: Also fine-tune every start on the labels, cross-validated, and order by that:
            seconds to minutes each, and the honest rival of everything else here.
        folds: Number of folds of the read-outs, with equal shares of each class.
        confidence: Probability that an interval covers.
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

    Example:
        >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> y = (x.sum(1) > 0).long()
        >>> good, poor = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        >>> _ = nn.init.eye_(good[0].weight), nn.init.zeros_(poor[0].weight)
        >>> ranking = rank_starts({"poor": poor, "good": good}, (x, y))
        >>> ranking.best.name, ranking.tied
        ('good', ('good',))
    """
    if not models:
        raise ValueError("`models` must hold at least one start, got none.")
    if scratch is not None and scratch not in models:
        raise ValueError(f"`scratch` must name one of the starts {list(models)}, got {scratch!r}.")
    samples = read_samples(data, batch_fn)
    columns = label_columns(samples.labels, folds)
    law = None if curve is None else fitted_curve(curve)
    how = _Reading(layers, folds, max_features, confidence)
    found = []
    with shown(progress, "rank", len(models)) as tell:
        for name in counted(list(models), len(models), tell, "starts"):
            model = _opened(models[name], name)
            measured = _measure(name, model, samples, columns, how, forward_fn)
            if fine_tune is not None:
                losses = _tuned_losses(model, samples, columns, fine_tune, forward_fn)
                start = replace(measured.start, fine_tuned=losses.mean().item())
                measured = _Measured(start, losses)
            found.append(measured)
            del model
    tuned = fine_tune is not None
    return _compared(found, scratch, law, confidence, samples.labels, tuned=tuned)


@dataclass(frozen=True)
class _Reading:
    """What is read of a network, and how."""

    layers: int | Sequence[str] | Mapping[str, Sequence[str]]
    folds: int
    max_features: int
    confidence: float

    def layers_of(self, name: str, network: Network) -> list[str]:
        if isinstance(self.layers, int):
            if self.layers < 1:
                raise ValueError(f"`layers` must be at least 1 or name modules, got {self.layers}.")
            return network.spread_layers(self.layers)
        if not isinstance(self.layers, Mapping):
            return list(self.layers)
        if name not in self.layers:
            raise ValueError(f"`layers` must name layers of every start, got none for {name!r}.")
        return list(self.layers[name])


@dataclass(frozen=True)
class _Measured:
    """One start with what it is compared by: a loss for each sample, shape ``[N]``.

    That is the squared error of the read-out of its last layer, or the error of cross-validated
    fine-tuning.
    """

    start: RankedStart
    losses: Tensor


def _opened(model: Model, name: str) -> nn.Module:
    """Return a network, made now where it is given as a function."""
    if not isinstance(model, nn.Module):
        model = model()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"`models` must be or make torch modules, got {type(model).__name__} for {name!r}."
        )
    return model


def _measure(
    name: str,
    model: nn.Module,
    samples: Samples,
    columns: Tensor,
    how: _Reading,
    forward_fn: Forward | None,
) -> _Measured:
    """Read all layers of one start."""
    begin = time.perf_counter()
    network = Network.of(model, samples.few, forward_fn)
    features, logits = network.read(samples, how.layers_of(name, network), how.max_features)
    labels, real = samples.labels, samples.labels.is_floating_point()
    fold = stratified_folds(labels, how.folds)
    found = [read_out(values, columns, fold) for values in features.values()]
    rows = [
        _row(layer, one, how.confidence, real=real)
        for layer, one in zip(features, found, strict=True)
    ]
    losses = [one.squares if real else one.wrong for one in found]
    best = min(range(len(rows)), key=lambda i: (rows[i].error, rows[i].missed))
    last = features[rows[-1].name]
    probabilities = None if logits is None or real else logits.softmax(1)
    start = RankedStart(
        name=name,
        layers=tuple(rows),
        best=rows[best].name,
        freeze=rows[_deepest_equal(losses, best, how.confidence)].name,
        error=rows[best].error,
        interval=rows[best].interval,
        missed=rows[-1].missed,
        logme=logme(last, labels).item(),
        h_score=None if real else h_score(last, labels).item(),
        leep=None if probabilities is None else leep(probabilities, labels).item(),
        nce=None if probabilities is None else nce(probabilities.argmax(1), labels).item(),
        parameters=sum(p.numel() for p in model.parameters()),
        seconds=time.perf_counter() - begin,
    )
    return _Measured(start, found[-1].squares)


def _row(layer: str, found: ReadOut, confidence: float, *, real: bool) -> LayerReadout:
    missed = found.missed.item()
    if real:
        reach = normal_quantile(confidence) * found.standard_error.item()
        return LayerReadout(layer, missed, (max(0.0, missed - reach), missed + reach), missed)
    error = found.wrong.mean().item()
    return LayerReadout(layer, error, wilson_interval(error, len(found.wrong), confidence), missed)


def _deepest_equal(losses: Sequence[Tensor], best: int, confidence: float) -> int:
    """Return the deepest layer whose read-out is not seen to be worse than the best one."""
    equal = [
        i
        for i, loss in enumerate(losses)
        if i == best or paired_interval(loss, losses[best], confidence)[0] <= 0
    ]
    return max(equal)


# Comparing starts with each other, and with scratch.


def _compared(
    found: Sequence[_Measured],
    scratch: str | None,
    law: PowerLaw | None,
    confidence: float,
    labels: Tensor,
    *,
    tuned: bool,
) -> StartRanking:
    """Order the starts, and say which of them can be told apart."""
    first, *others = sorted(found, key=_mean_loss if tuned else _mean_rank(found))
    base = next((one for one in found if one.start.name == scratch), None)
    starts = []
    for one in (first, *others):
        start = replace(one.start, behind=paired_interval(one.losses, first.losses, confidence))
        if base is not None and one is not base:
            gain = paired_interval(base.losses, one.losses, confidence)
            start = replace(start, gain=gain, call=verdict_of(gain[0], gain[2]) if tuned else None)
        if law is not None:
            start = _beside_curve(start, law, len(labels), tuned=tuned)
        starts.append(start)
    return StartRanking(
        starts=tuple(starts),
        tied=tuple(s.name for s in starts if s is starts[0] or s.behind[0] <= 0),
        samples=len(labels),
        classes=None if labels.is_floating_point() else len(labels.unique()),
        confidence=confidence,
        scratch=scratch,
        ordered_by="fine-tuning" if tuned else "read-out and LogME",
    )


def _beside_curve(start: RankedStart, law: PowerLaw, labels: int, *, tuned: bool) -> RankedStart:
    """Compare the read-out with training from scratch: at the labels at hand, and where it falls below."""
    low, middle, high = (
        torch.tensor(share, dtype=torch.float64)
        for share in (start.interval[0], start.error, start.interval[1])
    )
    first, second, third = crossings(low, middle, high, law)
    start = replace(start, onset=(first.item(), second.item(), third.item()))
    if tuned:
        return start
    at_hand = law[0] * labels ** -law[1]
    ends = (at_hand - high).item(), (at_hand - low).item()
    return replace(start, call=verdict_of(*ends))


def _mean_loss(one: _Measured) -> tuple[float, ...]:
    return (one.losses.mean().item(),)


def _mean_rank(found: Sequence[_Measured]) -> Callable[[_Measured], tuple[float, ...]]:
    """Return a key to sort by: the mean rank by held-out squared error and by LogME; the first decides where equal."""
    by_error = [one.start.name for one in sorted(found, key=lambda one: one.start.missed)]
    by_logme = [one.start.name for one in sorted(found, key=lambda one: -one.start.logme)]

    def key(one: _Measured) -> tuple[float, ...]:
        name = one.start.name
        return (by_error.index(name) + by_logme.index(name)) / 2, one.start.missed

    return key


# The honest rival: fine-tune on the labels at hand.


def _tuned_losses(
    model: nn.Module,
    samples: Samples,
    columns: Tensor,
    how: FineTuning,
    forward_fn: Forward | None,
) -> Tensor:
    """Fine-tune copies of a start on all folds but one, and return the loss of each sample in the fold left out."""
    labels = samples.labels
    fold = stratified_folds(labels, how.folds)
    losses = torch.empty(len(columns), dtype=torch.float64)
    for k in range(how.folds):
        kept, held = (fold != k).nonzero().flatten(), (fold == k).nonzero().flatten()
        network = _fine_tuned(model, samples, columns, kept, how, forward_fn)
        with torch.no_grad():
            outputs = _outputs(network, samples.inputs, held).double().cpu()
        if labels.is_floating_point():
            baseline = (columns - columns[kept].mean(0)).square().sum(1).mean()
            losses[held] = (outputs - columns[held]).square().sum(1) / baseline
        else:
            losses[held] = (outputs.argmax(1) != columns[held].argmax(1)).double()
    return losses


def _fine_tuned(
    model: nn.Module,
    samples: Samples,
    columns: Tensor,
    kept: Tensor,
    how: FineTuning,
    forward_fn: Forward | None,
) -> Network:
    """Return a copy of a start with a fresh head, trained on some of the samples; the start itself is left alone."""
    copy = deepcopy(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(how.seed)
        network = _with_fresh_head(copy, samples.few, columns.shape[1], forward_fn)
        copy.train().requires_grad_(True)
        optimizer = torch.optim.Adam(copy.parameters(), lr=how.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, how.learning_rate, total_steps=max(how.steps, 2)
        )
        targets = columns.to(device)
        generator = Generator().manual_seed(how.seed)
        order = torch.empty(0, dtype=torch.long)
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(how.steps):
                if len(order) < min(how.batch_size, len(kept)):
                    order = kept[torch.randperm(len(kept), generator=generator)]
                picked, order = order[: how.batch_size], order[how.batch_size :]
                outputs = _outputs(network, samples.inputs, picked)
                optimizer.zero_grad()
                _loss(outputs, targets[picked.to(device)]).backward()
                optimizer.step()
                schedule.step()
    copy.eval()
    return network


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of indicators, and the squared error of anything else."""
    if bool((targets.sum(1) == 1).all()) and targets.shape[1] > 1:
        return nn.functional.cross_entropy(outputs, targets.to(outputs))
    return nn.functional.mse_loss(outputs, targets.to(outputs))


def _outputs(network: Network, inputs: Any, picked: Tensor) -> Tensor:
    outputs = first_tensor(network.run(take(inputs, lambda x: x[picked.to(x.device)])))
    if outputs is None or outputs.ndim != 2:
        raise ValueError(
            "`models` must put out one row of scores for each sample to be fine-tuned; set `forward_fn`."
        )
    return outputs


def _with_fresh_head(model: nn.Module, few: Any, width: int, forward_fn: Forward | None) -> Network:
    """Replace the linear layer that a network ends in by a fresh one.

    Raises:
        ValueError: If it does not end in one.
    """
    network = Network.of(model, few, forward_fn)
    if network.head is None:
        raise ValueError(
            "`fine_tune` needs starts that end in an nn.Linear, their head, which is made anew; got one that ends in "
            "something else."
        )
    parent, _, child = network.head.rpartition(".")
    old: Any = model.get_submodule(network.head)
    fresh = nn.Linear(old.in_features, width, device=old.weight.device, dtype=old.weight.dtype)
    setattr(model.get_submodule(parent), child, fresh)
    return network
