"""Before fine-tuning: how much of a target task lies outside the span of a network's frozen features?"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._tables import Tabled
from lightning_taskinfo._warn import warn
from lightning_taskinfo.functional.features import fit_power_law, transfer_onset
from lightning_taskinfo.functional.intervals import normal_quantile
from lightning_taskinfo.functional.readout import read_out
from lightning_taskinfo.transfer.features import ObservedNetwork, read_labelled

if TYPE_CHECKING:
    from lightning_taskinfo.plotting import Axes, Figure

REACH = (
    10  # times the measured numbers of labels to which a learning curve is followed without a word
)
LARGEST_SHARE = 4.0  # that of always being sure of the wrong one of two classes; more is no share
MAX_FEATURES = 1024  # of a layer, after pooling
PowerLaw = tuple[Tensor, Tensor]
"""Amplitude and exponent."""


@dataclass(frozen=True)
class Onset(Tabled):
    """Predicted numbers of target labels above which linear transfer hurts; unpacks into lower end, middle, upper end.

    Attributes:
        layers: Names of the layers.
        low: Lower ends of the intervals, shape ``[K]``.
        middle: The predictions, shape ``[K]``; infinite where linear transfer is never predicted to
            hurt.
        high: Upper ends of the intervals, shape ``[K]``.
        confidence: Probability that an interval covers.

    Example:
        >>> from torch import tensor
        >>> print(Onset(("conv",), tensor([80.0]), tensor([100.0]), tensor([130.0])).reading())
        Linear transfer helps longest from conv: above about 100 labels, training from scratch is predicted to win.
    """

    layers: tuple[str, ...]
    low: Tensor
    middle: Tensor
    high: Tensor
    confidence: float = 0.95

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.low, self.middle, self.high))

    def reading(self) -> str:
        """Return one sentence on the layer whose features help for the most labels."""
        last = int(self.middle.argmax())
        layer = self.layers[last]
        onset = self.middle[last].item()
        if math.isinf(onset):
            return f"Linear transfer from {layer} is not predicted to hurt at any number of labels."
        return (
            f"Linear transfer helps longest from {layer}: above about {_labels(onset)} labels, training from scratch "
            "is predicted to win."
        )

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for i, layer in enumerate(self.layers):
            low, middle, high = (_labels(part[i].item()) for part in self)
            rows.append([layer, middle, f"[{low}, {high}]"])
        return ["layer", "hurts above", f"{self.confidence:.0%} interval"], rows

    def plot(self, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
        """Draw the predictions with their intervals; needs matplotlib.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        from lightning_taskinfo.plotting import plot_intervals

        ends = (part.tolist() for part in self)
        what = "labels above which transfer hurts"
        figure, ax = plot_intervals(self.layers, *ends, xlabel=what, ax=ax)
        ax.set_xscale("log")
        return figure, ax


@dataclass(frozen=True)
class FeatureOverlap(Tabled):
    """Share of the target labels' variance that a linear read-out of frozen features misses, layer by layer.

    Held-out shares: they count what lies outside the span and what the given number of labels
    cannot pin down, so they are above the out-of-span share and fall towards it with more labels.

    Attributes:
        layers: Names of the layers.
        outside: Missed shares, shape ``[K]``; 0 is all explained, 1 nothing (more is possible on
            held-out labels).
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
        reach = normal_quantile(confidence) * self.standard_error
        low = (self.outside - reach).clamp(min=0)
        return low, self.outside + reach

    def reading(self) -> str:
        """Return one sentence on the layer that misses least."""
        best = int(self.outside.argmin())
        low, high = (end[best].item() for end in self.interval())
        return (
            f"The features of {self.layers[best]} miss the least: {100 * self.outside[best].item():.1f} % "
            f"[{100 * low:.1f}, {100 * high:.1f}] of the labels' variance, from {self.samples} labels."
        )

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for i, layer in enumerate(self.layers):
            share = self.outside[i].item()
            error = self.standard_error[i].item()
            rows.append([layer, f"{share:.3f}", f"{error:.3f}"])
        return ["layer", "missed share", "standard error"], rows

    def plot(self, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
        """Draw the missed share of each layer with its 95 % interval; needs matplotlib.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        from lightning_taskinfo.plotting import plot_intervals

        low, high = self.interval()
        ends = (part.tolist() for part in (low, self.outside, high))
        what = "share of the labels' variance missed"
        return plot_intervals(self.layers, *ends, xlabel=what, ax=ax)

    def onset(self, curve: Mapping[int, float], *, confidence: float = 0.95) -> Onset:
        r"""Predicted number of target labels above which linear transfer hurts, per layer, with its interval.

        A power law :math:`A\,n^{-\nu}` is fitted to the learning curve of training from scratch; it
        falls below the missed share at the onset. The interval carries the uncertainty of the
        share, not that of the curve: a warning says where the law is followed to more than ten
        times the largest number of labels, or less than a tenth of the smallest.

        Args:
            curve: Share of the labels' variance that scratch missed on held-out data, not in per
                cent, by number of labels, two or more.
            confidence: Probability that an interval covers.

        Returns:
            The onsets, which print, draw and unpack into lower end, onset and upper end, shape
            ``[K]`` each.

        Raises:
            ValueError: If the curve does not fall, or does not consist of positive shares.
        """
        low, high = self.interval(confidence)
        ends = crossings(low, self.outside, high, fitted_curve(curve))
        _, middle, _ = ends
        far = []
        for layer, onset in zip(self.layers, middle.tolist(), strict=True):
            if is_far(onset, [*curve]):
                far.append(f"{layer} ({onset:.2g})")
        if far:
            warn(
                f"The onset of {', '.join(far)} is far from the numbers of labels that were measured, "
                f"{min(curve):g} to {max(curve):g}: measure `curve` nearer to it before you rely on it."
            )
        return Onset(self.layers, *ends, confidence)


def _labels(number: float) -> str:
    """Return a number of labels with two digits, or in words."""
    return "never" if math.isinf(number) else f"{float(f'{number:.2g}'):,.0f}"


def fitted_curve(curve: Mapping[int, float]) -> PowerLaw:
    """Fit a falling power law to errors of training from scratch by number of labels.

    Raises:
        ValueError: If there are fewer than two, one is no positive share, or they do not fall.
    """
    shares = all(0 < error <= LARGEST_SHARE for error in curve.values())
    if len(curve) < 2 or min(curve) <= 0 or not shares:
        raise ValueError(
            "`curve` must hold positive shares, not in per cent, at two or more numbers of labels, got "
            f"{dict(curve)}."
        )
    points = torch.tensor([*curve.items()], dtype=torch.float64)
    n, errors = points.T
    amplitude, exponent = fit_power_law(n, errors)
    if exponent <= 0:
        raise ValueError(f"`curve` must fall with the number of labels, got {dict(curve)}.")
    return amplitude, exponent


def crossings(
    low: Tensor,
    middle: Tensor,
    high: Tensor,
    curve: PowerLaw,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where a learning curve falls below the ends and the middle of a share's interval, in rising order."""
    first = transfer_onset(high, *curve)
    second = transfer_onset(middle, *curve)
    third = transfer_onset(low, *curve)
    return first, second, third


def is_far(onset: float, measured: Sequence[float]) -> bool:
    """Whether a learning curve measured at some numbers of labels is followed far to an onset; infinity is none.

    Example:
        >>> is_far(400, [50, 100]), is_far(2000, [50, 100]), is_far(4, [50, 100])
        (False, True, True)
    """
    least = min(measured) / REACH
    most = max(measured) * REACH
    return math.isfinite(onset) and not least <= onset <= most


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

    Ridge regression on the features of one layer predicts the labels (one-hot for classes) of a
    fold from the others; its penalty is picked by the exact leave-one-out error within those, so
    that no held-out label takes part in it. The share is the squared error over that of the mean
    label. The model is only observed. Beside the inputs, what is kept of a sample is at most
    ``4 * max_features`` bytes for each layer.

    Args:
        model: The pretrained network.
        data: Batches ``(inputs, labels)`` of the target task, or one, labels as class indices or as
            real values; a mapping has them in its field ``labels``, ``label``, ``targets``,
            ``target`` or ``y``. Shuffled: folds are taken in turns, sample by sample.
        layers: Names of modules that run once a pass and put out one tensor; if not given, all
            modules without children that run and put out a tensor.
        folds: Number of folds.
        max_features: Most features of a layer: larger ones are averaged over neighbouring pixels or
            over tokens, see :func:`~lightning_taskinfo.functional.readout.pooled`. ``None`` keeps
            all of them.
        forward_fn: How to call the model, ``forward_fn(model, inputs)``; otherwise on the inputs,
            those of a mapping by name.
        batch_fn: Picks ``(inputs, labels)`` out of a batch.

    Returns:
        The shares, with standard errors.

    Raises:
        ValueError: If a layer is unknown or not as above, there are fewer than two folds or four
            samples per fold, all labels are the same, or inputs, labels or features are not finite.

    Example:
        >>> x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
        >>> net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        >>> _ = nn.init.eye_(net[0].weight)
        >>> bool(feature_overlap(net, [(x, x.sum(1))], layers=["0"]).outside < 1e-6)
        True
    """
    samples = read_labelled(data, batch_fn)
    columns = label_columns(samples.labels, folds)
    network = ObservedNetwork.of(model, samples.few, forward_fn)
    frozen = network.read(samples, layers, max_features)
    fold = torch.arange(len(columns)) % folds
    missed = []
    errors = []
    for values in frozen.features.values():
        found = read_out(values, columns, fold)
        missed.append(found.missed)
        errors.append(found.standard_error)
    layers = tuple(frozen.features)
    return FeatureOverlap(layers, torch.stack(missed), torch.stack(errors), len(columns))


def label_columns(labels: Tensor, folds: int) -> Tensor:
    """Return real labels as columns, classes as indicators of those that occur.

    Raises:
        ValueError: If they cannot be predicted fold by fold.
    """
    if labels.is_floating_point():
        columns = labels.double().reshape(len(labels), -1)
        whole = columns == columns.round()
        if columns.shape[1] == 1 and bool(whole.all()):
            warn(
                "The labels of `data` are whole numbers of a floating type, and are taken as real values; convert "
                "them with .long() if they are classes."
            )
    else:
        _, classes = labels.flatten().unique(return_inverse=True)
        columns = nn.functional.one_hot(classes).double()
    if folds < 2:
        raise ValueError(f"`folds` must be at least 2, got {folds}.")
    if len(columns) < 4 * folds:
        raise ValueError(
            f"`data` must have at least {4 * folds} samples, 4 for each of {folds} folds, got {len(columns)}."
        )
    if not (columns != columns[0]).any():
        raise ValueError(
            f"`data` must have labels that differ (of two classes at least), got {len(columns)} equal ones."
        )
    return columns


def onset_of(overlap: Mapping[str, Any], curve: Mapping[int, float]) -> list[float] | None:
    """Return the onset of the last layer with its interval, from an overlap in JSON-like values.

    Args:
        overlap: Names of ``layers``, and for each a share ``outside`` and its ``standard_error``.
        curve: By number of labels, the share of the labels' variance that training from scratch
            missed.

    Returns:
        ``None`` where scratch was measured at fewer than two numbers of labels, or its error does
        not fall.
    """
    try:
        law = fitted_curve(curve)
    except ValueError:
        return None
    last = [overlap[key][-1] for key in ("outside", "standard_error")]
    share, error = torch.tensor(last, dtype=torch.float64)
    found = FeatureOverlap((), share, error, samples=0)
    low, high = found.interval()
    ends = crossings(low, found.outside, high, law)
    return [end.item() for end in ends]
