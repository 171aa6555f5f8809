"""Before fine-tuning: how much of a target task lies outside the span of a network's frozen features?"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._warn import warn
from lightning_taskinfo.functional.features import fit_power_law, transfer_onset
from lightning_taskinfo.functional.readout import HeldOut, held_out_readout
from lightning_taskinfo.transfer._features import collect

REACH = (
    10  # times the measured numbers of labels to which a learning curve is followed without a word
)
LARGEST_SHARE = (
    4.0  # that of always being sure of the wrong one of two classes; a larger one is no share
)
MAX_FEATURES = 1024  # of a layer, after pooling


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
        reach = (
            torch.special.ndtri(torch.tensor(0.5 + 0.5 * confidence).double()) * self.standard_error
        )
        return (self.outside - reach).clamp(min=0), self.outside + reach

    def onset(
        self,
        n: Tensor | Sequence[int],
        scratch: Tensor | Sequence[float],
        *,
        confidence: float = 0.95,
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
        if far := [
            f"{layer} ({onset:.2g})" for layer, onset in onsets.items() if is_far(onset, measured)
        ]:
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
            raise ValueError(
                f"`scratch` must be positive shares of the labels' variance, got {worst:g}."
            )
        amplitude, exponent = fit_power_law(n, scratch.double())
        if exponent <= 0:
            raise ValueError(
                f"`scratch` must fall with `n`, got a fitted exponent of {exponent.item():.3g}."
            )
        low, high = self.interval(confidence)
        lower, middle, upper = (
            transfer_onset(share, amplitude, exponent) for share in (high, self.outside, low)
        )
        return lower, middle, upper


def is_far(onset: float, measured: Sequence[float]) -> bool:
    """Whether a learning curve measured at some numbers of labels is followed far to an onset; infinity is none.

    Example:
        >>> is_far(400, [50, 100]), is_far(2000, [50, 100]), is_far(4, [50, 100])
        (False, True, True)
    """
    return math.isfinite(onset) and not min(measured) / REACH <= onset <= max(measured) * REACH


def feature_overlap(
    model: nn.Module,
    data: Iterable[Any] | Mapping[str, Any],
    *,
    layers: Sequence[str] | None = None,
    folds: int = 5,
    max_features: int | None = MAX_FEATURES,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    batch_fn: Callable[[Any], tuple[Any, Tensor]] | None = None,
) -> FeatureOverlap:
    """Measure, by cross-validation, what share of the labels' variance the features of each layer leave unexplained.

    Ridge regression on the features of one layer predicts the labels (one-hot for classes) of a fold from the others;
    its penalty is picked by the exact leave-one-out error within those, so that no held-out label takes part in it. The
    share is the squared error over that of the mean label. The model is only observed. What is kept of a sample is at
    most ``4 * max_features`` bytes for each layer.

    Args:
        model: The pretrained network.
        data: Batches ``(inputs, labels)`` of the target task, or one, labels as class indices or as real values; a
            mapping has them in its field ``labels``, ``label``, ``targets``, ``target`` or ``y``. Shuffled: folds are
            taken in turns, sample by sample.
        layers: Names of modules that run once a pass and put out one tensor; if not given, all modules without children
            that run and put out a tensor.
        folds: Number of folds.
        max_features: Most features of a layer: larger ones are averaged over neighbouring pixels or over tokens, see
            :func:`~lightning_taskinfo.functional.readout.pooled`. ``None`` keeps all of them.
        forward_fn: How to call the model, ``forward_fn(model, inputs)``; otherwise on the inputs, those of a mapping by
            name.
        batch_fn: Picks ``(inputs, labels)`` out of a batch.

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
    frozen = collect(
        model, data, layers, max_features=max_features, forward_fn=forward_fn, batch_fn=batch_fn
    )
    columns = as_columns(frozen.labels)
    check_folds(columns, folds)
    fold = torch.arange(len(columns)) % folds
    missed, errors = [], []
    for values in frozen.features.values():
        residual, baseline = squared_errors(
            held_out_readout(values, columns, fold), columns
        )  # [N] each
        share = residual.sum() / baseline.sum()
        missed.append(share)
        errors.append(share_error(residual, baseline))
    return FeatureOverlap(
        tuple(frozen.features), torch.stack(missed), torch.stack(errors), len(columns)
    )


def check_folds(columns: Tensor, folds: int) -> None:
    """Raise a ``ValueError`` where labels cannot be predicted fold by fold."""
    if folds < 2:
        raise ValueError(f"`folds` must be at least 2, got {folds}.")
    if len(columns) < 4 * folds:
        raise ValueError(
            f"`data` must have at least 4 samples a fold, got {len(columns)} for {folds} folds."
        )
    if not (columns != columns[0]).any():
        raise ValueError(
            f"`data` must have labels that differ (of two classes at least), got {len(columns)} equal ones."
        )


def as_columns(labels: Tensor) -> Tensor:
    """Return real labels as columns, classes as indicators of those that occur."""
    if labels.is_floating_point():
        return labels.double().reshape(len(labels), -1)
    return nn.functional.one_hot(labels.flatten().unique(return_inverse=True)[1]).double()


def squared_errors(held_out: HeldOut, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return squared held-out errors of the read-out and of the mean label, shape ``[N]`` each."""
    residual = (columns - held_out.predicted).square().sum(-1)
    baseline = (columns - held_out.baseline).square().sum(-1)
    return residual, baseline


def share_error(residual: Tensor, baseline: Tensor) -> Tensor:
    """Return the standard error of a ratio of sums over samples, to first order."""
    share = residual.sum() / baseline.sum()
    return (residual - share * baseline).std() / baseline.mean() / len(baseline) ** 0.5
