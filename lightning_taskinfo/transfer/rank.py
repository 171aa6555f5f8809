"""Which pretrained network to start from: read-outs of frozen features, compared on the labels at hand."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._batches import BatchFn, Forward, joined, take
from lightning_taskinfo._progress import counted, shown
from lightning_taskinfo.functional.features import fit_power_law, transfer_onset
from lightning_taskinfo.functional.paired import normal_quantile, paired_interval, wilson_interval
from lightning_taskinfo.functional.readout import held_out_readout, stratified_folds
from lightning_taskinfo.functional.transferability import h_score, leep, logme, nce
from lightning_taskinfo.transfer._features import (
    batches,
    caller,
    collect,
    first_tensor,
    read,
    spread_layers,
)
from lightning_taskinfo.transfer.overlap import (
    MAX_FEATURES,
    as_columns,
    check_folds,
    share_error,
    squared_errors,
)
from lightning_taskinfo.transfer.ranking import LayerReadout, Start, StartRanking

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

    For each start and layer, ridge regression on pooled features predicts the labels of a fold from the others. Starts
    are ordered by the mean of two ranks, those by the held-out squared error of the last layer and by its LogME: the
    two did best, and alike, in a small pilot against fine-tuning. Which starts cannot be told apart from the first
    by these errors, in pairs over the samples, is said. H-score, LEEP and NCE stand beside it, see
    :mod:`lightning_taskinfo.functional.transferability`. Nothing is trained, unless ``fine_tune`` asks for it, and the
    networks are only observed.

    Args:
        models: The starts by name: networks, or functions that make or load one, which are called one after the other,
            so that only one is in memory.
        data: The labelled target samples: batches ``(inputs, labels)``, or one; a mapping has the labels in its field
            ``labels``, ``label``, ``targets``, ``target`` or ``y``. Classes, or real values.
        layers: Which layers to read: a number of them, spread over the depth of each network up to the last one before
            its head; names of modules; or names by start.
        scratch: Name of the start with untrained weights, which the gains of the others are measured from. Whether they
            help or hurt is said only beside ``fine_tune``: read-outs of trained and untrained features cannot tell.
        curve: Test errors of training from scratch by number of labels, two or more (of real labels: the share of their
            variance that is missed). It gives the number of labels above which scratch is predicted to win over a
            read-out of the frozen start, and whether frozen features help or hurt at the labels at hand.
        fine_tune: Also fine-tune every start on the labels, cross-validated, and order by that: seconds to minutes
            each, and the honest rival of everything else here.
        folds: Number of folds of the read-outs, with equal shares of each class.
        confidence: Probability that an interval covers.
        max_features: Most features of a layer; larger ones are pooled.
        forward_fn: How to call a network, ``forward_fn(model, inputs)``.
        batch_fn: Picks ``(inputs, labels)`` out of a batch.
        progress: Whether to draw a bar where somebody looks.

    Returns:
        The ranking, best first; it prints, draws, saves and logs itself.

    Raises:
        ValueError: If there is no start, fewer than four samples a fold or one class only; if a network cannot be
            called or has no such layer; or if ``scratch`` or ``curve`` does not fit.

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
    how = Reading(layers, folds, max_features, forward_fn, batch_fn)
    whole = joined_batches(data, batch_fn)
    labels = whole[1]
    columns = as_columns(labels)
    check_folds(columns, folds)
    fit = None if curve is None else fitted_curve(curve)
    found = []
    with shown(progress, "rank", len(models)) as tell:
        for name in counted(list(models), len(models), tell, "starts"):
            model = opened(models[name], name)
            measured = measure(name, model, whole, columns, how, confidence)
            if fine_tune is not None:
                losses = tuned_losses(model, whole, columns, fine_tune, forward_fn)
                measured = measured.with_fine_tuning(losses)
            found.append(measured)
            del model
    return compared(found, scratch, fit, confidence, labels)


@dataclass(frozen=True)
class Reading:
    """What is read of a network, and how."""

    layers: int | Sequence[str] | Mapping[str, Sequence[str]]
    folds: int
    max_features: int
    forward_fn: Forward | None
    batch_fn: BatchFn | None

    def layers_of(self, name: str, model: nn.Module, inputs: Any) -> list[str]:
        """Return the names of the layers to read."""
        if isinstance(self.layers, int):
            if self.layers < 1:
                raise ValueError(f"`layers` must be at least 1 or name modules, got {self.layers}.")
            return spread_layers(model, inputs, self.forward_fn, self.layers)
        if isinstance(self.layers, Mapping):
            if name not in self.layers:
                raise ValueError(
                    f"`layers` must name layers of every start, got none for {name!r}."
                )
            return list(self.layers[name])
        return list(self.layers)


@dataclass(frozen=True)
class Measured:
    """One start with its losses per sample, before starts are compared.

    Attributes:
        start: What is known of it alone.
        losses: Squared errors of the read-out of its last layer, over those of the mean label, shape ``[N]``.
        tuned: Of cross-validated fine-tuning, shape ``[N]``.
    """

    start: Start
    losses: Tensor
    tuned: Tensor | None = None

    def with_fine_tuning(self, losses: Tensor) -> "Measured":
        """Return it with the losses of fine-tuning."""
        start = replace(self.start, fine_tuned=losses.mean().item())
        return replace(self, start=start, tuned=losses)

    @property
    def decisive(self) -> Tensor:
        """The losses that starts are compared by."""
        return self.losses if self.tuned is None else self.tuned


def joined_batches(data: Any, batch_fn: BatchFn | None) -> tuple[Any, Tensor]:
    """Return all samples as one batch: inputs and labels."""
    parts = [read(batch, batch_fn) for batch in batches(data)]
    if not parts:
        raise ValueError("`data` must yield batches (inputs, labels), got none.")
    return joined([inputs for inputs, _ in parts]), torch.cat([labels for _, labels in parts])


def opened(model: Model, name: str) -> nn.Module:
    """Return a network, made now where it is given as a function."""
    if not isinstance(model, nn.Module):
        model = model()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"`models` must be or make torch modules, got {type(model).__name__} for {name!r}."
        )
    return model


def chunks(whole: tuple[Any, Tensor], size: int = 64) -> Iterator[tuple[Any, Tensor]]:
    """Cut samples into batches."""
    inputs, labels = whole
    for begin in range(0, len(labels), size):
        some = slice(begin, begin + size)
        yield take(inputs, itemgetter(some)), labels[some]


def measure(
    name: str,
    model: nn.Module,
    whole: tuple[Any, Tensor],
    columns: Tensor,
    how: Reading,
    confidence: float,
) -> Measured:
    """Read all layers of one start."""
    begin = time.perf_counter()
    inputs, labels = whole
    few = take(inputs, lambda x: x[:2])
    names = how.layers_of(name, model, few)
    frozen = collect(
        model, chunks(whole), names, max_features=how.max_features, forward_fn=how.forward_fn
    )
    fold = stratified_folds(labels, how.folds)
    rows, losses, squares = [], [], []
    for layer, features in frozen.features.items():
        row, loss, square = read_out(layer, features, columns, labels, fold, confidence)
        rows.append(row)
        losses.append(loss)
        squares.append(square)
    best = min(range(len(rows)), key=lambda i: (rows[i].error, rows[i].missed))
    last = frozen.features[rows[-1].name]
    classes = not labels.is_floating_point()
    probabilities = None if frozen.logits is None or not classes else frozen.logits.softmax(1)
    start = Start(
        name=name,
        layers=tuple(rows),
        best=rows[best].name,
        freeze=rows[deepest_equal(losses, best, confidence)].name,
        error=rows[best].error,
        interval=rows[best].interval,
        missed=rows[-1].missed,
        logme=logme(last, labels).item(),
        h_score=h_score(last, labels).item() if classes else None,
        leep=None if probabilities is None else leep(probabilities, labels).item(),
        nce=None if probabilities is None else nce(probabilities.argmax(1), labels).item(),
        parameters=sum(p.numel() for p in model.parameters()),
        seconds=time.perf_counter() - begin,
    )
    return Measured(start, squares[-1])


def read_out(
    layer: str, features: Tensor, columns: Tensor, labels: Tensor, fold: Tensor, confidence: float
) -> tuple[LayerReadout, Tensor, Tensor]:
    """Return what a layer's features predict of held-out labels, and the error and squared error of each sample."""
    held_out = held_out_readout(features, columns, fold)
    residual, baseline = squared_errors(held_out, columns)
    missed = (residual.sum() / baseline.sum()).item()
    square = residual / baseline.mean()
    if labels.is_floating_point():
        reach = normal_quantile(confidence) * share_error(residual, baseline).item()
        return (
            LayerReadout(layer, missed, (max(0.0, missed - reach), missed + reach), missed),
            square,
            square,
        )
    wrong = (held_out.predicted.argmax(1) != columns.argmax(1)).double()
    error = wrong.mean().item()
    return (
        LayerReadout(layer, error, wilson_interval(error, len(wrong), confidence), missed),
        wrong,
        square,
    )


def deepest_equal(losses: Sequence[Tensor], best: int, confidence: float) -> int:
    """Return the deepest layer whose read-out is not seen to be worse than the best one."""
    equal = [
        i
        for i, loss in enumerate(losses)
        if i == best or paired_interval(loss, losses[best], confidence)[0] <= 0
    ]
    return max(equal)


# Comparing starts with each other, and with scratch.


def compared(
    found: Sequence[Measured],
    scratch: str | None,
    curve: tuple[Tensor, Tensor] | None,
    confidence: float,
    labels: Tensor,
) -> StartRanking:
    """Order the starts, and say which of them can be told apart."""
    tuned = all(one.tuned is not None for one in found)
    ordered = sorted(
        found, key=(lambda one: one.decisive.mean().item()) if tuned else by_mean_rank(found)
    )
    first = ordered[0]
    base = next((one for one in found if one.start.name == scratch), None)
    starts = []
    for one in ordered:
        start = replace(one.start, behind=paired_interval(one.decisive, first.decisive, confidence))
        if base is not None and one is not base:
            gain = paired_interval(base.decisive, one.decisive, confidence)
            start = replace(start, gain=gain, call=called(gain[0], gain[2]) if tuned else None)
        if curve is not None:
            start = replace(start, onset=onset_of(one.start, curve))
            if not tuned:
                at_hand = (curve[0] * len(labels) ** -curve[1]).item()
                start = replace(
                    start, call=called(at_hand - start.interval[1], at_hand - start.interval[0])
                )
        starts.append(start)
    tied = tuple(start.name for start in starts if start is starts[0] or start.behind[0] <= 0)
    classes = None if labels.is_floating_point() else len(labels.unique())
    return StartRanking(
        starts=tuple(starts),
        tied=tied,
        samples=len(labels),
        classes=classes,
        confidence=confidence,
        scratch=scratch,
        ordered_by="fine-tuning" if tuned else "read-out and LogME",
    )


def by_mean_rank(found: Sequence[Measured]) -> Callable[[Measured], tuple[float, float]]:
    """Return a key to sort by: the mean rank by held-out squared error and by LogME; the first decides where equal."""
    by_error = sorted(found, key=lambda one: one.start.missed)
    by_logme = sorted(found, key=lambda one: -one.start.logme)

    def key(one: Measured) -> tuple[float, float]:
        ranks = [
            next(i for i, other in enumerate(order) if other is one)
            for order in (by_error, by_logme)
        ]
        return sum(ranks) / 2, one.start.missed

    return key


def called(low: float, high: float) -> str:
    """Say what an interval of a gain says."""
    if low > 0:
        return "helps"
    return "hurts" if high < 0 else "cannot tell"


def fitted_curve(curve: Mapping[int, float]) -> tuple[Tensor, Tensor]:
    """Fit a falling power law to errors of training from scratch."""
    if len(curve) < 2 or not all(n > 0 and error > 0 for n, error in curve.items()):
        raise ValueError(
            f"`curve` must hold positive errors at two or more numbers of labels, got {dict(curve)}."
        )
    n, errors = (
        torch.tensor(list(values), dtype=torch.float64) for values in (curve.keys(), curve.values())
    )
    amplitude, exponent = fit_power_law(n, errors)
    if exponent <= 0:
        raise ValueError(f"`curve` must fall with the number of labels, got {dict(curve)}.")
    return amplitude, exponent


def onset_of(start: Start, curve: tuple[Tensor, Tensor]) -> tuple[float, float, float]:
    """Return the number of labels at which the curve of scratch falls below a start's read-out, with its interval."""
    low, high = start.interval
    lower, middle, upper = transfer_onset(
        torch.tensor([high, start.error, low], dtype=torch.float64), *curve
    ).tolist()
    return lower, middle, upper


# The honest rival: fine-tune on the labels at hand.


def tuned_losses(
    model: nn.Module,
    whole: tuple[Any, Tensor],
    columns: Tensor,
    how: FineTuning,
    forward_fn: Forward | None,
) -> Tensor:
    """Fine-tune copies of a start on all folds but one, and return the loss of each sample in the fold left out."""
    inputs, labels = whole
    fold = stratified_folds(labels, how.folds)
    losses = torch.empty(len(columns), dtype=torch.float64)
    for k in range(how.folds):
        kept, held = (fold != k).nonzero().flatten(), (fold == k).nonzero().flatten()
        tuned = fine_tuned(model, inputs, columns, kept, how, forward_fn)
        with torch.no_grad():
            outputs = _outputs(caller(tuned, inputs, forward_fn), inputs, held).double().cpu()
        if labels.is_floating_point():
            baseline = (columns - columns[kept].mean(0)).square().sum(1).mean()
            losses[held] = (outputs - columns[held]).square().sum(1) / baseline
        else:
            losses[held] = (outputs.argmax(1) != columns[held].argmax(1)).double()
    return losses


def fine_tuned(
    model: nn.Module,
    inputs: Any,
    columns: Tensor,
    kept: Tensor,
    how: FineTuning,
    forward_fn: Forward | None,
) -> nn.Module:
    """Return a copy of a start with a fresh head, trained on some of the samples; the start itself is left alone."""
    copy = deepcopy(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    few = take(inputs, lambda x: x[:2])
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(how.seed)
        renew_head(copy, few, columns.shape[1], forward_fn)
        generator = Generator().manual_seed(how.seed)
        run = caller(copy, few, forward_fn)
        copy.train()
        for parameter in copy.parameters():
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(copy.parameters(), lr=how.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, how.learning_rate, total_steps=max(how.steps, 2)
        )
        targets = columns.to(device)
        order = torch.empty(0, dtype=torch.long)
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(how.steps):
                if len(order) < min(how.batch_size, len(kept)):
                    order = kept[torch.randperm(len(kept), generator=generator)]
                picked, order = order[: how.batch_size], order[how.batch_size :]
                outputs = _outputs(run, inputs, picked)
                optimizer.zero_grad()
                _loss(outputs, targets[picked.to(device)]).backward()
                optimizer.step()
                schedule.step()
    return copy.eval()


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of indicators, and the squared error of anything else."""
    if bool((targets.sum(1) == 1).all()) and targets.shape[1] > 1:
        return nn.functional.cross_entropy(outputs, targets.to(outputs))
    return nn.functional.mse_loss(outputs, targets.to(outputs))


def _outputs(run: Callable[[Any], Any], inputs: Any, picked: Tensor) -> Tensor:
    outputs = first_tensor(run(take(inputs, lambda x: x[picked.to(x.device)])))
    if outputs is None or outputs.ndim != 2:
        raise ValueError(
            "`models` must put out one row of scores for each sample to be fine-tuned; set `forward_fn`."
        )
    return outputs


def renew_head(model: nn.Module, few: Any, width: int, forward_fn: Forward | None) -> None:
    """Replace the linear layer that a network ends in by a fresh one.

    Raises:
        ValueError: If it does not end in one.
    """
    ends: dict[str, Any] = {}
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    run = caller(model, few, forward_fn)
    handles = [
        module.register_forward_hook(lambda _m, _i, out, name=name: ends.update({name: out}))
        for name, module in linear.items()
    ]
    try:
        model.eval()
        with torch.no_grad():
            outputs = first_tensor(run(few))
    finally:
        for handle in handles:
            handle.remove()
    heads = [name for name, end in ends.items() if end is outputs]
    if not heads:
        raise ValueError(
            "`fine_tune` needs starts that end in an nn.Linear, their head, which is made anew; got one that ends in "
            "something else."
        )
    old = linear[heads[0]]
    parent, _, child = heads[0].rpartition(".")
    fresh = nn.Linear(old.in_features, width, device=old.weight.device, dtype=old.weight.dtype)
    setattr(model.get_submodule(parent), child, fresh)
