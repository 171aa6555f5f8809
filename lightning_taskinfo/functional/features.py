r"""What part of a target function lies in the span of a network's features: ReLU networks, in closed form.

A shallow network :math:`f(x) = \frac1m \sum_i c_i\, (w_i^\top x)_+` on inputs :math:`x \sim \mathcal N(0, I_d)` spans,
with its first layer frozen, the functions :math:`(w_i^\top x)_+`. Norms and projections in :math:`L^2` of the inputs
need only the mean products of two such features. Linear transfer can at best reach the out-of-span norm of its target,
so it starts to hurt where a network trained from scratch gets below that [Tahir2024, appendix C]_.

:func:`held_out_readout` is for features of any network: pooled to a bounded size, fitted by ridge regression, judged
held out.

.. [Tahir2024, appendix C] Tahir, Ganguli, Rotskoff, *Features are fate: a theory of transfer learning in
   high-dimensional regression*, ICML 2025, arXiv:2410.08194.
"""

from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import adaptive_avg_pool2d, adaptive_avg_pool3d

from lightning_taskinfo._ranges import check_counts

RIDGES = 10.0 ** torch.arange(-6, 3, dtype=torch.float64)  # relative to the mean squared feature


class FeatureKernels(NamedTuple):
    """Mean products of features, normalised by the widths.

    Attributes:
        model: ``K``, products of the model's features over ``m``, shape ``[..., m, m]``.
        cross: ``K̃``, of the model's with the target's over ``sqrt(m·m*)``, shape ``[..., m, m*]``.
        target: ``K*``, of the target's features over ``m*``, shape ``[..., m*, m*]``.
    """

    model: Tensor
    cross: Tensor
    target: Tensor


class SpanNorms(NamedTuple):
    """Squared norm of a target function and of its two parts; ``total = inside + outside``.

    Attributes:
        total: Squared norm of the function, shape ``[...]``.
        inside: Of its projection on the span of the features.
        outside: Of the rest.
    """

    total: Tensor
    inside: Tensor
    outside: Tensor


def relu_kernel(weights: Tensor, others: Tensor) -> Tensor:
    r"""Mean product of two ReLU features over Gaussian inputs, for all pairs.

    .. math::
        \big\langle (w^\top x)_+\, (v^\top x)_+ \big\rangle
            = \frac{\|w\|\,\|v\|}{2\pi} \Big[ \sqrt{1-u^2} + u\,(\pi - \arccos u) \Big],
        \qquad u = \frac{w^\top v}{\|w\|\,\|v\|}

    A zero vector gives zeros. Not differentiable by autograd where two vectors are parallel.

    Args:
        weights: First-layer weights, shape ``[..., m, d]``.
        others: More of them, shape ``[..., k, d]``.

    Returns:
        The products, shape ``[..., m, k]``.

    Raises:
        ValueError: If the inputs of the two differ in dimension.

    Example:
        >>> relu_kernel(torch.eye(2), torch.tensor([[2.0, 0.0], [-1.0, 0.0]]))
        tensor([[1.0000, 0.0000],
                [0.3183, 0.1592]])

    References:
        Cho, Saul, *Kernel methods for deep learning*, NeurIPS 2009.
    """
    if weights.shape[-1] != others.shape[-1]:
        raise ValueError(
            f"`weights` and `others` must have the same last dimension, got {weights.shape[-1]} and {others.shape[-1]}."
        )
    rows = weights.norm(dim=-1).unsqueeze(-1)  # [..., m, 1]
    columns = others.norm(dim=-1).unsqueeze(-2)  # [..., 1, k]
    norms = rows * columns
    tiny = torch.finfo(norms.dtype).tiny
    u = (weights @ others.mT / norms.clamp(min=tiny)).clamp(-1, 1)
    sine = (1 - u.square()).sqrt()
    return norms / (2 * torch.pi) * (sine + u * (torch.pi - u.arccos()))


def feature_kernels(model: Tensor, target: Tensor) -> FeatureKernels:
    r"""The three kernels of a model and a target network.

    .. math:: K = \frac{\langle\phi\phi^\top\rangle}{m}, \quad
        \tilde K = \frac{\langle\phi\,\phi_*^\top\rangle}{\sqrt{m\, m_*}}, \quad
        K_* = \frac{\langle\phi_*\phi_*^\top\rangle}{m_*}

    Args:
        model: First-layer weights of the model, shape ``[..., m, d]``.
        target: First-layer weights of the target, shape ``[..., m*, d]``.

    Returns:
        The kernels.

    Example:
        >>> feature_kernels(torch.eye(2)[:1], torch.eye(2)).target
        tensor([[0.2500, 0.0796],
                [0.0796, 0.2500]])
    """
    m, m_target = model.shape[-2], target.shape[-2]
    return FeatureKernels(
        relu_kernel(model, model) / m,
        relu_kernel(model, target) / (m * m_target) ** 0.5,
        relu_kernel(target, target) / m_target,
    )


def span_norms(model: Tensor, target: Tensor, coefficients: Tensor) -> SpanNorms:
    r"""Squared norms of a target network inside and outside the span of a model's features.

    .. math::
        \|f\|^2 = \tfrac{1}{m_*} c^\top K_* c, \qquad
        \|P_\parallel f\|^2 = \tfrac{1}{m_*} c^\top \tilde K^\top K^{+} \tilde K c, \qquad
        \|P_\perp f\|^2 = \|f\|^2 - \|P_\parallel f\|^2

    with the pseudo-inverse of :math:`K`, which is singular when features repeat. Use float64: in float32 the
    out-of-span norm is accurate to about :math:`10^{-6}` of the norm.

    Args:
        model: First-layer weights of the model, shape ``[..., m, d]``.
        target: First-layer weights of the target, shape ``[..., m*, d]``.
        coefficients: Last layer of the target, whose output is the **mean** of its neurons, shape ``[..., m*]``.

    Returns:
        The squared norms, each of shape ``[...]``.

    Raises:
        ValueError: If there is not one coefficient a target feature.

    Example:
        >>> features = torch.eye(3)
        >>> total, inside, outside = span_norms(features[:2], features[1:], torch.tensor([2.0, 0.0]))
        >>> total, outside < 1e-6
        (tensor(0.5000), tensor(True))
    """
    if coefficients.shape[-1] != target.shape[-2]:
        raise ValueError(
            f"`coefficients` must have one entry a target feature ({target.shape[-2]}), got {coefficients.shape[-1]}."
        )
    K, K_cross, K_target = feature_kernels(model, target)
    c = coefficients.unsqueeze(-1)  # [..., m*, 1]
    v = K_cross @ c  # [..., m, 1]
    inverse = torch.linalg.pinv(K, hermitian=True)
    width = target.shape[-2]
    total = (c.mT @ K_target @ c).squeeze((-2, -1)) / width
    inside = (v.mT @ inverse @ v).squeeze((-2, -1)) / width
    outside = (total - inside).clamp(min=0)  # rounding may leave a small negative number
    return SpanNorms(total, total - outside, outside)


def ablate(weights: Tensor, fraction: float, *, generator: Generator | None = None) -> Tensor:
    r"""Remove a fraction :math:`\mu` of the features, at random.

    The ablated set-up: the source teacher has what is left of the target's features, a model that learned the source
    has no others. Draws with equally seeded generators are nested: what :math:`\mu` removes, a larger one removes too.

    Args:
        weights: First-layer weights, shape ``[..., m, d]``.
        fraction: :math:`\mu`; ``round(fraction * m)`` features go.
        generator: Source of randomness; torch's own if not given.

    Returns:
        The remaining features in their order, shape ``[..., m - round(fraction * m), d]``.

    Raises:
        ValueError: If ``fraction`` is outside [0, 1) or leaves no feature.

    Example:
        >>> ablate(torch.eye(4), 0.5).shape
        torch.Size([2, 4])
    """
    m = weights.shape[-2]
    if not 0 <= fraction < 1 or round(fraction * m) == m:
        raise ValueError(
            f"`fraction` must be in [0, 1) and leave a feature of {m}, got {fraction}."
        )
    device = None if generator is None else generator.device
    order = torch.randperm(m, generator=generator, device=device)
    kept = order[round(fraction * m) :].sort().values
    return weights.index_select(-2, kept.to(weights.device))


def fit_power_law(n: Tensor, risk: Tensor) -> tuple[Tensor, Tensor]:
    r"""Fit a learning curve :math:`A\, n^{-\nu}` by least squares between logarithms.

    Args:
        n: Numbers of samples, shape ``[k]``, at least two different ones.
        risk: Risks at these numbers, positive, shape ``[..., k]``.

    Returns:
        Amplitude :math:`A` and exponent :math:`\nu`, each of shape ``[...]``.

    Raises:
        ValueError: If ``n`` or ``risk`` is not positive, or ``n`` has fewer than two different values.

    Example:
        >>> fit_power_law(torch.tensor([1.0, 4.0, 16.0]), torch.tensor([8.0, 4.0, 2.0]))
        (tensor(8.), tensor(0.5000))
    """
    for name, values in (("n", n), ("risk", risk)):
        if not (values > 0).all():
            raise ValueError(f"`{name}` must be positive, got {values.min().item()}.")
    if n.unique().numel() < 2:
        raise ValueError(f"`n` must have at least two different values, got {n.tolist()}.")
    x = n.to(risk.dtype).log()
    y = risk.log()
    centred = x - x.mean()
    slope = (centred * y).sum(-1) / centred.square().sum()
    intercept = y.mean(-1) - slope * x.mean()
    return intercept.exp(), -slope


def transfer_onset(outside: Tensor, amplitude: Tensor | float, exponent: Tensor | float) -> Tensor:
    r"""Number of samples above which linear transfer is predicted to hurt, :math:`(A / \|P_\perp f\|^2)^{1/\nu}`.

    There the learning curve :math:`A\,n^{-\nu}` of training from scratch crosses the out-of-span norm.

    Args:
        outside: Squared out-of-span norm, any shape.
        amplitude: :math:`A`, positive, broadcastable with ``outside``.
        exponent: :math:`\nu`, positive, broadcastable with ``outside``.

    Returns:
        The number, in the broadcast shape; infinite where nothing is out of span.

    Raises:
        ValueError: If ``amplitude`` or ``exponent`` is not positive.

    Example:
        >>> transfer_onset(torch.tensor([0.0, 0.5]), 8.0, 0.5)
        tensor([ inf, 256.])
    """
    amplitude = torch.as_tensor(amplitude, dtype=outside.dtype, device=outside.device)
    exponent = torch.as_tensor(exponent, dtype=outside.dtype, device=outside.device)
    for name, values in (("amplitude", amplitude), ("exponent", exponent)):
        if not (values > 0).all():
            raise ValueError(f"`{name}` must be positive, got {values.min().item()}.")
    return (amplitude / outside).pow(1 / exponent)


class HeldOut(NamedTuple):
    """What a read-out says about samples that it was not fitted to.

    Attributes:
        predicted: Predicted columns of the labels, shape ``[N, K]``.
        baseline: Mean label of the samples that it was fitted to, shape ``[N, K]``.
    """

    predicted: Tensor
    baseline: Tensor


class ReadOut(NamedTuple):
    """What a linear read-out of one layer's features predicts of held-out labels.

    Attributes:
        missed: Share of the labels' variance that it misses.
        standard_error: Of the share, over samples, to first order.
        squares: Squared error of each sample, over that of the mean label, shape ``[N]``.
        wrong: Whether the largest column is another than the label's, shape ``[N]``.
    """

    missed: Tensor
    standard_error: Tensor
    squares: Tensor
    wrong: Tensor


def pooled(
    features: Tensor,
    max_features: int | None = 1024,
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
        max_features: Most entries of a row; ``None`` flattens.
        mask: Which of the positions of a sequence count, shape ``[N, T]``.

    Returns:
        Shape ``[N, D]``, in the features' precision.

    Raises:
        ValueError: If ``max_features`` is not positive.

    Example:
        >>> pooled(torch.ones(2, 3, 8, 8), 100).shape, pooled(torch.ones(2, 7), 100).shape
        (torch.Size([2, 75]), torch.Size([2, 7]))
    """
    if max_features is None:
        return features.flatten(1)
    check_counts(max_features=max_features)
    if mask is not None and features.ndim == 3 and features.shape[:2] == mask.shape:
        weights = mask.to(features).unsqueeze(-1)  # [N, T, 1]
        counts = weights.sum(1).clamp(min=1)
        rows = (features * weights).sum(1) / counts
    elif features.ndim < 2 or features[0].numel() <= max_features:
        rows = features.reshape(len(features), -1)
    elif features.ndim == 3:
        rows = torch.cat([features.mean(1), features.mean(2)], 1)
    elif features.ndim in (4, 5):
        rows = _averaged_over_cells(features, max_features)
    else:
        rows = features.flatten(1)
    return rows if rows.shape[1] <= max_features else _sketched(rows, max_features)


def _averaged_over_cells(features: Tensor, max_features: int) -> Tensor:
    """Average over the cells of the finest grid whose entries fit."""
    sizes = features.shape[1:]
    if sizes[0] == sizes[1] != sizes[-1]:  # square, with the channels last
        features = features.movedim(-1, 1)
    channels, *space = features.shape[1:]
    grid = [1 for _ in space]
    for cells in range(2, max(space) + 1):
        finer = [min(cells, size) for size in space]
        if channels * torch.Size(finer).numel() > max_features:
            break
        grid = finer
    pool: Any = adaptive_avg_pool2d if len(space) == 2 else adaptive_avg_pool3d
    return pool(features, grid).flatten(1)


def _sketched(rows: Tensor, size: int) -> Tensor:
    """Add each column, with a random sign, to one of ``size`` sums: the same ones for rows of the same length."""
    N, D = rows.shape
    generator = Generator().manual_seed(D)
    place = torch.randint(size, (D,), generator=generator).to(rows.device)
    coin = torch.randint(2, (D,), generator=generator)
    sign = (2 * coin - 1).to(rows)
    return rows.new_zeros(N, size).index_add_(1, place, rows * sign)


def stratified_folds(labels: Tensor, folds: int) -> Tensor:
    """Return the fold of each sample: those of a class, in the order in which they come, go to the folds in turns.

    Args:
        labels: Classes, shape ``[N]``; real values are one class.
        folds: Number of folds.

    Returns:
        Folds from 0 on, of equal size up to 1, shape ``[N]``.

    Example:
        >>> stratified_folds(torch.tensor([0, 0, 1, 1, 0, 0]), 2)
        tensor([0, 1, 0, 1, 0, 1])
    """
    order = torch.arange(len(labels))
    if labels.ndim == 1 and not labels.is_floating_point():
        order = labels.cpu().argsort(stable=True)
    fold = torch.empty(len(labels), dtype=torch.long)
    fold[order] = torch.arange(len(labels)) % folds
    return fold


def held_out_readout(features: Tensor, columns: Tensor, fold: Tensor) -> HeldOut:
    r"""Predict the labels of each fold by ridge regression on the features of the others.

    .. math:: \hat y(x) = \bar y + (x - \bar x)^\top \big(X^\top X + \lambda I\big)^{-1} X^\top (Y - \bar y)

    with the means of the other folds. The penalty is picked among nine by the exact leave-one-out
    error within them, so that no held-out label takes part in it.

    Args:
        features: Shape ``[N, D]``.
        columns: Labels as real columns, classes as indicators, shape ``[N, K]``.
        fold: Fold of each sample, from 0 on, shape ``[N]``.

    Returns:
        Predictions and the mean labels that they are compared with, in float64.

    Example:
        >>> x = torch.arange(6.0).unsqueeze(1)
        >>> held_out_readout(x, 2 * x + 1, torch.arange(6) % 2).predicted.flatten().round(decimals=3)
        tensor([ 1.,  3.,  5.,  7.,  9., 11.], dtype=torch.float64)
    """
    features, columns = features.double(), columns.double()
    predicted, baseline = torch.empty_like(columns), torch.empty_like(columns)
    for k in fold.unique():
        train, test = fold != k, fold == k
        mean_x, mean_y = features[train].mean(0), columns[train].mean(0)
        x, y = features[train] - mean_x, columns[train] - mean_y
        predicted[test] = mean_y + ridge(x, y, features[test] - mean_x)
        baseline[test] = mean_y
    return HeldOut(predicted, baseline)


def read_out(features: Tensor, columns: Tensor, fold: Tensor) -> ReadOut:
    """Predict the columns of each fold from the features of the others, and say how much of them is missed.

    Args:
        features: Shape ``[N, D]``.
        columns: Labels as real columns, classes as indicators, shape ``[N, K]``.
        fold: Fold of each sample, from 0 on, shape ``[N]``.

    Returns:
        Shares and errors, in float64.

    Example:
        >>> x = torch.arange(6.0).unsqueeze(1)
        >>> bool(read_out(x, 2 * x + 1, torch.arange(6) % 2).missed < 1e-6)
        True
    """
    predicted, mean = held_out_readout(features, columns, fold)
    residual = (columns - predicted).square().sum(-1)
    baseline = (columns - mean).square().sum(-1)
    missed = residual.sum() / baseline.sum()
    error = (residual - missed * baseline).std() / baseline.mean() / len(baseline) ** 0.5
    wrong = (predicted.argmax(1) != columns.argmax(1)).double()
    return ReadOut(missed, error, residual / baseline.mean(), wrong)


def ridge(x: Tensor, y: Tensor, new: Tensor) -> Tensor:
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
    tiny, eps = torch.finfo(x.dtype).tiny, torch.finfo(x.dtype).eps
    if n <= D:
        spectrum, U = torch.linalg.eigh(x @ x.T)  # [n], [n, n]
        to_new = new @ x.T @ U  # [m, n], divided by the singular values once too little
    else:
        spectrum, V = torch.linalg.eigh(x.T @ x)  # [D], [D, D]
        U = x @ V / spectrum.clamp(min=tiny).sqrt()
        to_new = new @ V * spectrum.clamp(min=0).sqrt()
    known = spectrum > spectrum.max() * max(n, D) * eps  # the rest is rounding
    spectrum = spectrum[known]
    U = U[:, known]
    to_new = to_new[:, known]
    # n times the mean squared feature, times each ridge.
    penalties = RIDGES.to(x) * x.square().sum() / D
    shrink = spectrum / (spectrum + penalties.unsqueeze(-1)).clamp(min=tiny)  # [P, R]
    projected = U.T @ y  # [R, K]
    fitted = torch.einsum("nr,pr,rk->pnk", U, shrink, projected)
    leverage = torch.einsum("nr,pr->pn", U.square(), shrink) + 1 / n
    left = (1 - leverage).clamp(min=1e-9).unsqueeze(-1)
    errors = ((y - fitted) / left).square().sum((1, 2))
    best = errors.argmin()
    scale = (shrink[best] / spectrum).unsqueeze(-1)
    return to_new @ (scale * projected)
