"""Before fine-tuning: how much of a target task lies outside the span of a network's frozen features?"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from lightning_taskinfo._arguments import checked_arguments
from lightning_taskinfo._batches import described, sample_count, tensors
from lightning_taskinfo._observe import observing
from lightning_taskinfo._warn import warn
from lightning_taskinfo.functional.features import fit_power_law, transfer_onset

Batches: TypeAlias = Iterable[tuple[Tensor, Tensor]]
REACH = 10  # times the measured numbers of labels to which a learning curve is followed without a word
LARGEST_SHARE = 4.0  # that of always being sure of the wrong one of two classes; a larger one is no share
RIDGES = 10.0 ** torch.arange(-6, 3, dtype=torch.float64)  # relative to the mean squared feature


@dataclass(frozen=True)
class FeatureOverlap:
    """Share of the target labels' variance that a linear read-out of frozen features misses, layer by layer.

    Held-out shares: they count what lies outside the span and what the given number of labels cannot pin down, so
    they are above the out-of-span share and fall towards it with more labels.

    Attributes:
        layers: Names of the layers.
        outside: Missed shares, shape ``[K]``; 0 is all explained, 1 nothing (more is possible on held-out labels).
        standard_error: Over samples, the folds' models taken as given, shape ``[K]``.
        samples: Number of labels used.
    """

    layers: tuple[str, ...]
    outside: Tensor
    standard_error: Tensor
    samples: int

    def interval(self, confidence: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the normal confidence intervals of ``outside``, shape ``[K]`` each, not below 0.

        Args:
            confidence: Probability that an interval covers.

        Raises:
            ValueError: If ``confidence`` is not between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"`confidence` must be between 0 and 1, got {confidence}.")
        reach = torch.special.ndtri(torch.tensor(0.5 + 0.5 * confidence).double()) * self.standard_error
        return (self.outside - reach).clamp(min=0), self.outside + reach

    def onset(
        self, n: Tensor | Sequence[int], scratch: Tensor | Sequence[float], *, confidence: float = 0.95
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Predicted number of target labels above which linear transfer hurts, per layer, with its interval.

        A power law :math:`A\,n^{-\nu}` is fitted to the learning curve of training from scratch; it falls below the
        missed share at the onset. The interval carries the uncertainty of the share, not that of the curve: a warning
        says where the law is followed to more than ten times the largest ``n``, or less than a tenth of the smallest.

        Args:
            n: Numbers of labels at which scratch training was measured, at least two, shape ``[k]``.
            scratch: Share of the labels' variance that it missed on held-out data, not in per cent, shape ``[k]``.
            confidence: Probability that an interval covers.

        Returns:
            Lower end, onset and upper end, shape ``[K]`` each.

        Raises:
            ValueError: If the curve does not fall, or does not consist of positive shares.
        """
        ends = self.crossings(n, scratch, confidence)
        measured = torch.as_tensor(n).tolist()
        onsets = dict(zip(self.layers, ends[1].tolist(), strict=True))
        if far := [f"{layer} ({onset:.2g})" for layer, onset in onsets.items() if is_far(onset, measured)]:
            warn(
                f"The onset of {', '.join(far)} is far from the numbers of labels that were measured, "
                f"{min(measured):g} to {max(measured):g}: measure `scratch` nearer to it before you rely on it."
            )
        return ends

    def crossings(
        self, n: Tensor | Sequence[int], scratch: Tensor | Sequence[float], confidence: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what :meth:`onset` returns, without a word on how far the curve was followed."""
        n, scratch = torch.as_tensor(n), torch.as_tensor(scratch)
        if n.ndim != 1 or len(n) < 2 or scratch.shape != n.shape:
            raise ValueError(
                "`n` and `scratch` must be as many numbers, at least two of each, got shapes "
                f"{tuple(n.shape)} and {tuple(scratch.shape)}."
            )
        if not ((scratch > 0) & (scratch <= LARGEST_SHARE)).all():
            worst = next(value for value in scratch.tolist() if not 0 < value <= LARGEST_SHARE)
            raise ValueError(f"`scratch` must be positive shares of the labels' variance, got {worst:g}.")
        amplitude, exponent = fit_power_law(n, scratch.double())
        if exponent <= 0:
            raise ValueError(f"`scratch` must fall with `n`, got a fitted exponent of {exponent.item():.3g}.")
        low, high = self.interval(confidence)
        lower, middle, upper = (transfer_onset(share, amplitude, exponent) for share in (high, self.outside, low))
        return lower, middle, upper


def is_far(onset: float, measured: Sequence[float]) -> bool:
    """Whether a learning curve measured at some numbers of labels is followed far to an onset; infinity is none.

    Example:
        >>> is_far(400, [50, 100]), is_far(2000, [50, 100]), is_far(4, [50, 100])
        (False, True, True)
    """
    return math.isfinite(onset) and not min(measured) / REACH <= onset <= max(measured) * REACH


@checked_arguments
def feature_overlap(
    model: nn.Module,
    data: Batches | tuple[Tensor, Tensor],
    *,
    layers: Sequence[str] | None = None,
    folds: int = 5,
) -> FeatureOverlap:
    """Measure, by cross-validation, what share of the labels' variance the features of each layer leave unexplained.

    Ridge regression on the features of one layer predicts the labels (one-hot for classes) of a fold from the others;
    its penalty is picked by the exact leave-one-out error within those, so that no held-out label takes part in it. The
    share is the squared error over that of the mean label. The model is only observed.

    Args:
        model: The pretrained network.
        data: Batches ``(inputs, labels)`` of the target task, or one, labels as class indices or as real values; their
            features are kept in memory. Shuffled: folds are taken in turns, sample by sample.
        layers: Names of modules that run once a pass and put out one tensor; if not given, all modules without children
            that run and put out a tensor.
        folds: Number of folds.

    Returns:
        The shares, with standard errors.

    Raises:
        ValueError: If a layer is unknown or not as above, there are fewer than two folds or four samples a fold, all
            labels are the same, or inputs, labels or features are not finite.

    Example:
        >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        >>> _ = nn.init.eye_(net[0].weight)
        >>> bool(feature_overlap(net, [(x, x.sum(1))], layers=["0"]).outside < 1e-6)
        True
    """
    if isinstance(data, list | tuple) and any(isinstance(part, Tensor) for part in data):
        if len(data) != 2:
            raise ValueError(f"`data` must be a batch (inputs, labels), or yield such, got {described(data)}.")
        data = cast(Batches, [data])
    features, labels = _collect(model, cast(Batches, data), layers)
    if folds < 2:
        raise ValueError(f"`folds` must be at least 2, got {folds}.")
    if len(labels) < 4 * folds:
        raise ValueError(f"`data` must have at least 4 samples a fold, got {len(labels)} for {folds} folds.")
    if not (labels != labels[0]).any():
        raise ValueError(
            f"`data` must have labels that differ (of two classes at least), got {len(labels)} equal ones."
        )
    missed, errors = [], []
    for values in features.values():
        residual, baseline = _held_out(values, labels, folds)  # [N] each
        share = residual.sum() / baseline.sum()
        missed.append(share)
        errors.append((residual - share * baseline).std() / baseline.mean() / len(labels) ** 0.5)
    return FeatureOverlap(tuple(features), torch.stack(missed), torch.stack(errors), len(labels))


def _collect(
    model: nn.Module, data: Iterable[tuple[Tensor, Tensor]], layers: Sequence[str] | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Features ``[N, D]`` by layer and labels ``[N, C]``, in float64 on the CPU."""
    modules = dict(model.named_modules())
    names = [name for name, m in modules.items() if not any(m.children())] if layers is None else list(layers)
    if unknown := [name for name in names if name not in modules]:
        raise ValueError(f"`layers` must name modules of the model, got {unknown[0]!r}; there are {list(modules)}.")
    features: dict[str, list[Tensor]] = {}
    targets = []

    def keep(name: str, output: object) -> None:
        if isinstance(output, Tensor):
            features.setdefault(name, []).append(output.detach().flatten(1).double().cpu())

    handles = [modules[n].register_forward_hook(lambda _m, _i, out, n=n: keep(n, out)) for n in names]
    try:
        with observing(model), torch.no_grad():
            for batch in data:
                inputs, labels = _checked(batch)
                model(inputs)
                targets.append(labels.detach().cpu())
    finally:
        for handle in handles:
            handle.remove()
    if not targets:
        raise ValueError("`data` must yield batches (inputs, labels), got none.")
    for name in names if layers is not None else features:
        if len(features.get(name, [])) != len(targets):
            raise ValueError(f"`layers` must have one tensor as output and run once a pass, got {name!r}.")
    if not features:
        raise ValueError("`layers` must name at least one module, got none.")
    found = {name: torch.cat(features[name]) for name in names if name in features}
    for name, values in found.items():
        if count := int((~values.isfinite()).sum()):
            raise ValueError(f"`model` must have finite features, got {count} values that are not in layer {name!r}.")
    return found, _as_columns(torch.cat(targets))


def _checked(batch: Any) -> tuple[Any, Tensor]:
    """Return the two parts of a batch, with a label for each input."""
    if not (isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[1], Tensor)):
        raise ValueError(f"`data` must yield batches (inputs, labels), got {described(batch)}.")
    inputs, labels = batch
    n = sample_count(inputs)
    if not labels.ndim or len(labels) != n or (labels.ndim > 1 and not labels.is_floating_point()):
        raise ValueError(
            f"`data` must yield batches with a class index or real values for each input, got labels of shape "
            f"{list(labels.shape)} for {n} inputs; a dataset of single samples goes into a DataLoader first."
        )
    if count := sum(int((~x.isfinite()).sum()) for x in tensors((inputs, labels))):
        raise ValueError(f"`data` must be finite, got {count} values that are not.")
    return inputs, labels


def _as_columns(labels: Tensor) -> Tensor:
    """Real labels as columns, classes as indicators."""
    if labels.is_floating_point():
        return labels.double().reshape(len(labels), -1)
    return nn.functional.one_hot(labels.flatten()).double()


def _held_out(features: Tensor, labels: Tensor, folds: int) -> tuple[Tensor, Tensor]:
    """Squared held-out errors of the read-out and of the mean label, ``[N]`` each."""
    residual, baseline = torch.empty(len(labels)).double(), torch.empty(len(labels)).double()
    fold = torch.arange(len(labels)) % folds
    for k in range(folds):
        train, test = fold != k, fold == k
        mean_x, mean_y = features[train].mean(0), labels[train].mean(0)
        x, y = features[train] - mean_x, labels[train] - mean_y
        predicted = mean_y + _ridge(x, y, features[test] - mean_x)
        residual[test] = (labels[test] - predicted).square().sum(-1)
        baseline[test] = (labels[test] - mean_y).square().sum(-1)
    return residual, baseline


def _ridge(x: Tensor, y: Tensor, new: Tensor) -> Tensor:
    """Predict at ``new`` by ridge regression without intercept, its penalty picked by leave-one-out errors.

    One singular value decomposition serves all penalties; centring costs the ``1/n`` in the leverages.
    """
    U, s, Vh = torch.linalg.svd(x, full_matrices=False)
    penalties = RIDGES * x.square().sum() / x.shape[1]  # n times the mean squared feature, times each ridge
    shrink = s.square() / (s.square() + penalties.clamp(min=torch.finfo(s.dtype).tiny)[:, None])  # [P, rank]
    projected = U.T @ y  # [rank, C]
    fitted = torch.einsum("nr,pr,rc->pnc", U, shrink, projected)
    leverage = torch.einsum("nr,pr->pn", U.square(), shrink) + 1 / len(x)
    errors = ((y - fitted) / (1 - leverage).clamp(min=1e-9).unsqueeze(-1)).square().sum((1, 2))
    best = errors.argmin()
    weights = torch.where(s > 0, shrink[best] / s.clamp(min=torch.finfo(s.dtype).tiny), 0.0)
    return new @ Vh.T @ (weights[:, None] * projected)
