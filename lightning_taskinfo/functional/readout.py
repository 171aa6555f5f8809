"""What a linear read-out of features predicts: pooled to a bounded size, fitted by ridge, judged held out."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lightning_taskinfo._ranges import check_counts

RIDGES = 10.0 ** torch.arange(-6, 3, dtype=torch.float64)  # relative to the mean squared feature
SHARPNESS = torch.cat(
    [torch.zeros(1), 2.0 ** torch.arange(-4, 8.25, 0.25)]
).double()  # of scores with deviation 1


class HeldOut(NamedTuple):
    """What was predicted of held-out labels, and what is missed of them.

    Attributes:
        predicted: Predicted columns of the labels, shape ``[N, K]``.
        missed: Share of the labels' variance that is missed.
        standard_error: Of the share, over samples, to first order.
        squares: Squared error of each sample, over that of the mean label, shape ``[N]``.
        wrong: Whether the largest column is another than the label's, shape ``[N]``.
    """

    predicted: Tensor
    missed: Tensor
    standard_error: Tensor
    squares: Tensor
    wrong: Tensor


def pooled(
    features: Tensor,
    max_features: int = 1024,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the features of a layer as one row for each sample, with at most ``max_features`` entries.

    Features that fit are only flattened. Larger ones are averaged: images ``[N, C, H, W]`` (or with
    the channels last, where the image is square) over the cells of the finest grid that fits,
    sequences ``[N, T, D]`` over positions and, side by side, over features, as either may be the
    channels; with a mask over the positions that count. What is still too large is folded by a
    fixed random sketch that keeps inner products on average: each entry is added, with a random
    sign, to one of ``max_features`` sums.

    Args:
        features: Output of a layer, shape ``[N, ...]``.
        max_features: Most entries of a row.
        mask: Which of the positions of a sequence count, shape ``[N, T]``.

    Returns:
        Shape ``[N, D]``, in the features' precision.

    Raises:
        ValueError: If ``max_features`` is not positive.

    Example:
        >>> pooled(torch.ones(2, 3, 8, 8), 100).shape, pooled(torch.ones(2, 7), 100).shape
        (torch.Size([2, 75]), torch.Size([2, 7]))
    """
    check_counts(max_features=max_features)
    if mask is not None and features.ndim == 3 and features.shape[:2] == mask.shape:
        weights = mask.to(features).unsqueeze(-1)  # [N, T, 1]
        features = (features * weights).sum(1) / weights.sum(1).clamp(min=1)
    elif features.numel() > len(features) * max_features:
        if features.ndim == 3:
            features = torch.cat([features.mean(1), features.mean(2)], 1)
        elif features.ndim == 4:
            features = _averaged_over_cells(features, max_features)
    rows = features.reshape(len(features), -1)
    N, D = rows.shape
    if max_features >= D:
        return rows
    # The same sums and signs for all rows of a length.
    generator = Generator().manual_seed(D)
    place = torch.randint(max_features, (D,), generator=generator).to(rows.device)
    sign = (2 * torch.randint(2, (D,), generator=generator) - 1).to(rows)
    return rows.new_zeros(N, max_features).index_add_(1, place, rows * sign)


def _averaged_over_cells(
    features: Tensor,
    max_features: int,
) -> Tensor:
    """Average over the cells of the finest grid whose entries fit."""
    _, *sizes, last = features.shape
    if sizes[0] == sizes[1] != last:  # square, with the channels last
        features = features.movedim(-1, 1)
    _, channels, height, width = features.shape
    for cells in range(max(height, width), 0, -1):
        grid = min(cells, height), min(cells, width)
        if channels * grid[0] * grid[1] <= max_features:
            break
    return adaptive_avg_pool2d(features, grid).flatten(1)


def stratified_folds(
    labels: Tensor,
    folds: int,
    generator: Generator | None = None,
) -> Tensor:
    """Return the fold of each sample: those of a class, in the order in which they come, go to the folds in turns.

    There are at most as many folds as the median class has samples, and two at least. With more, a
    held-out sample would mostly be of a class that the other folds have least of, and its error
    would be far too large: 0.94 in place of 0.6 with two samples of each of ten classes.

    Args:
        labels: Classes, shape ``[N]``; real values are one class.
        folds: Largest number of folds.
        generator: Draws another order.

    Returns:
        Folds from 0 on, of equal size up to 1, shape ``[N]``.

    Example:
        >>> stratified_folds(torch.tensor([0, 0, 1, 1, 0, 0]), 2)
        tensor([0, 1, 0, 1, 0, 1])
        >>> stratified_folds(torch.tensor([0, 1, 0, 1]), 4)
        tensor([0, 0, 1, 1])
    """
    N = len(labels)
    order = torch.arange(N)
    if generator is not None:
        order = torch.randperm(N, generator=generator)
    if labels.ndim == 1 and not labels.is_floating_point():
        order = order[labels.cpu()[order].argsort(stable=True)]
        sizes = labels.unique(return_counts=True)[1]
        folds = min(folds, max(2, int(sizes.median())))
    return (torch.arange(N) % folds)[order.argsort()]


def cross_validated(
    columns: Tensor,
    fold: Tensor,
    predict: Callable[[Tensor, Tensor], Tensor],
) -> HeldOut:
    """Predict the labels of each fold from the others, and say what is missed.

    Args:
        columns: Labels as real columns, classes as indicators, shape ``[N, K]``.
        fold: Fold of each sample, from 0 on, shape ``[N]``.
        predict: Given which samples to learn from and which to predict, returns the columns of the latter.

    Returns:
        Predictions and their errors, in float64.

    Example:
        >>> columns = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> means = cross_validated(columns, torch.arange(4) % 2, lambda known, new: columns[known].mean(0))
        >>> means.predicted.flatten().tolist(), means.missed.item()
        ([2.0, 1.0, 2.0, 1.0], 1.0)
    """
    columns = columns.double()
    predicted = torch.empty_like(columns)
    baseline = torch.empty_like(columns)
    for k in fold.unique():
        held = (fold == k).nonzero().flatten()
        known = (fold != k).nonzero().flatten()
        predicted[held] = predict(known, held).to(columns)
        baseline[held] = columns[known].mean(0)
    residual = (columns - predicted).square().sum(-1)  # [N]
    variance = (columns - baseline).square().sum(-1)  # [N]
    scale = variance.mean()
    missed = residual.sum() / variance.sum()
    return HeldOut(
        predicted,
        missed,
        standard_error=(residual - missed * variance).std() / scale / len(residual) ** 0.5,
        squares=residual / scale,
        wrong=(predicted.argmax(1) != columns.argmax(1)).double(),
    )


def held_out_readout(
    features: Tensor,
    columns: Tensor,
    fold: Tensor,
) -> HeldOut:
    r"""Predict the labels of each fold by ridge regression on the features of the others.

    .. math:: \hat y(x) = \bar y + (x - \bar x)^\top \big(X^\top X + \lambda I\big)^{-1} X^\top (Y - \bar y)

    with the means of the other folds. The penalty is picked among nine by the exact leave-one-out
    error within them, so that no held-out label takes part in it.

    Args:
        features: Shape ``[N, D]``.
        columns: Labels as real columns, classes as indicators, shape ``[N, K]``.
        fold: Fold of each sample, from 0 on, shape ``[N]``.

    Returns:
        Predictions and their errors, in float64.

    Example:
        >>> x = torch.arange(6.0).unsqueeze(1)
        >>> held_out_readout(x, 2 * x + 1, torch.arange(6) % 2).predicted.flatten().round(decimals=3)
        tensor([ 1.,  3.,  5.,  7.,  9., 11.], dtype=torch.float64)
    """
    features = features.double()

    def predict(known: Tensor, held: Tensor) -> Tensor:
        x = features[known]
        y = columns[known].double()
        x_mean, y_mean = x.mean(0), y.mean(0)
        return y_mean + ridge(x - x_mean, y - y_mean, features[held] - x_mean)

    return cross_validated(columns, fold, predict)


def sharpened_brier(
    scores: Tensor,
    columns: Tensor,
) -> Tensor:
    r"""Brier scores of a softmax at the temperature that suits it best.

    .. math:: b_n = \| \mathrm{softmax}(s^* z_n) - y_n \|^2, \qquad
        s^* = \arg\min_s \sum_n \| \mathrm{softmax}(s z_n) - y_n \|^2

    One number, the same for all samples, is fitted: 0, or one of 49 between 1/16 and 256 for scores
    with deviation 1. What is left to compare is how well scores tell the classes apart, and not how
    sure of themselves they are: a read-out, whose columns are no probabilities, can be compared
    with a network.

    Args:
        scores: Logits, or other scores of the classes, :math:`z`, shape ``[N, C]``.
        columns: Classes as indicators, :math:`y`, shape ``[N, C]``.

    Returns:
        Shape ``[N]``, in float64.

    Example:
        >>> columns = torch.eye(2)
        >>> sharpened_brier(0.01 * columns, columns).round(decimals=3)
        tensor([0., 0.], dtype=torch.float64)

    References:
        Guo, Pleiss, Sun, Weinberger, *On calibration of modern neural networks*, ICML 2017.
    """
    z = scores.double()
    z = z - z.mean(1, keepdim=True)
    z = z / z.square().mean().sqrt().clamp(min=torch.finfo(z.dtype).tiny)
    probabilities = (SHARPNESS.view(-1, 1, 1).to(z) * z).softmax(-1)  # [S, N, C]
    found = (probabilities - columns).square().sum(-1)  # [S, N]
    return found[found.mean(1).argmin()]


def ridge(
    x: Tensor,
    y: Tensor,
    new: Tensor,
) -> Tensor:
    """Predict at ``new`` by ridge regression without intercept, its penalty picked by leave-one-out errors.

    One decomposition, of the smaller of the two products of ``x`` with itself, serves all
    penalties. The data are taken as centred: that costs the ``1/n`` in the leverages.

    Args:
        x: Centred features, shape ``[n, D]``.
        y: Centred labels, shape ``[n, K]``.
        new: Features to predict at, shape ``[m, D]``.

    Returns:
        Shape ``[m, K]``.

    Example:
        >>> x = torch.tensor([[-1.0], [0.0], [1.0]]).double()
        >>> ridge(x, 3 * x, torch.tensor([[2.0]]).double()).round(decimals=3)
        tensor([[6.]], dtype=torch.float64)
    """
    n, D = x.shape
    tiny = torch.finfo(x.dtype).tiny
    # Of x = U S Vᵀ the squares S², U, and new V S; only those that are more than rounding.
    if n <= D:
        spectrum, U = torch.linalg.eigh(x @ x.T)  # [n], [n, n]
        to_new = new @ x.T @ U  # [m, n]
    else:
        spectrum, V = torch.linalg.eigh(x.T @ x)  # [D], [D, D]
        U = x @ V / spectrum.clamp(min=tiny).sqrt()
        to_new = new @ V * spectrum.clamp(min=0).sqrt()
    known = spectrum > spectrum.max() * max(n, D) * torch.finfo(x.dtype).eps
    spectrum = spectrum[known]
    U = U[:, known]
    # n times the mean squared feature, times each ridge.
    penalties = RIDGES.to(x) * x.square().sum() / D  # [P]
    shrink = spectrum / (spectrum + penalties.unsqueeze(-1)).clamp(min=tiny)  # [P, R]
    projected = U.T @ y  # [R, K]
    fitted = torch.einsum("nr,pr,rk->pnk", U, shrink, projected)
    leverage = torch.einsum("nr,pr->pn", U.square(), shrink) + 1 / n
    # Error at each sample of the fit without it, [P, n, K].
    left_out = (y - fitted) / (1 - leverage).clamp(min=1e-9).unsqueeze(-1)
    best = left_out.square().sum((1, 2)).argmin()
    return to_new[:, known] @ ((shrink[best] / spectrum).unsqueeze(-1) * projected)
