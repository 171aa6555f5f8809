r"""Scores of a pretrained network for a target task, from its frozen features or its own classes, without training.

All are computed from ``N`` labelled target samples, and larger is better. LogME and the H-score
read features
:math:`F \in \mathbb R^{N \times D}`; LEEP and NCE read what the network says with the head of its source task.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lightning_taskinfo._ranges import check_finite

# Of the two precisions, relative to the features.
RATIOS = 10.0 ** torch.linspace(-10, 10, 201, dtype=torch.float64)
ROUNDS = 6  # of refinement, each ten times finer: beyond what the flat top of the evidence can tell


def logme(
    features: Tensor,
    labels: Tensor,
) -> Tensor:
    r"""Logarithm of the maximum evidence of a linear model from features to labels, per sample.

    Each column :math:`y` of the labels (one indicator per class) is modelled as
    :math:`y = F w + \varepsilon` with
    :math:`w \sim N(0, \alpha^{-1} I)` and :math:`\varepsilon \sim N(0, \beta^{-1} I)`. With singular values
    :math:`\sigma_i` and left singular vectors :math:`u_i` of :math:`F` and :math:`t = \alpha / \beta`,

    .. math::
        \log p(y | F) = \frac N2 \log\frac{\beta}{2\pi} - \frac12 \sum_i \log\Big(1 + \frac{\sigma_i^2}{t}\Big)
            - \frac\beta2 Q(t), \qquad
        Q(t) = \|y\|^2 - \sum_i \frac{\sigma_i^2}{\sigma_i^2 + t} (u_i^\top y)^2 .

    :math:`\beta = N / Q(t)` is the best one for each :math:`t`, which leaves a search along one line. It is done on a
    grid from :math:`10^{-10}` to :math:`10^{10}` times the mean squared singular value and refined
    around the best
    point: the evidence may have two maxima, and the usual fixed-point iteration may end in the
    lower one. Where features fit labels exactly and ``N > D`` the evidence has no bound, and the
    end of the grid is taken.

    Args:
        features: Frozen features :math:`F`, shape ``[N, D]``.
        labels: Classes, shape ``[N]``, or real values, shape ``[N]`` or ``[N, K]``.

    Returns:
        The mean over the classes that occur, or over the columns with different values, divided by
        ``N``, in float64.

    Raises:
        ValueError: If shapes do not fit, values are not finite, or all labels are equal.

    Example:
        >>> y = torch.tensor([0, 0, 1, 1])
        >>> good, poor = torch.eye(2)[y], torch.ones(4, 2)
        >>> bool(logme(good, y) > logme(poor, y))
        True

    References:
        You, Liu, Wang, Long, *LogME: Practical assessment of pre-trained models for transfer
        learning*, ICML 2021.
    """
    F = _checked_features(features, labels)
    Y = labels.double().reshape(len(labels), -1)  # [N, K]
    if not labels.is_floating_point():
        Y = one_hot(_checked_classes(labels)).double()
    elif not Y.isfinite().all() or (Y[0] == Y).all():
        raise ValueError(
            f"`labels` must be finite and differ, got {len(labels)} values without that."
        )
    Y = Y[:, (Y[0] != Y).any(0)]  # a column of equal labels would be no noise, infinitely sure
    U, s, _ = torch.linalg.svd(F, full_matrices=False)
    spectrum = s.square()  # [R]
    projected = (U.T @ Y).square()  # [R, K]
    outside = (Y.square().sum(0) - projected.sum(0)).clamp(min=0)  # [K]
    found = [
        _best_evidence(spectrum, inside, rest, len(F))
        for inside, rest in zip(projected.T, outside, strict=True)
    ]
    return torch.stack(found).mean() / len(F)


def _best_evidence(
    spectrum: Tensor,
    projected: Tensor,
    outside: Tensor,
    N: int,
) -> Tensor:
    """Log evidence of one column of the labels at its best precisions."""
    tiny = torch.finfo(spectrum.dtype).tiny

    def evidence(ratios: Tensor) -> Tensor:
        """Log evidence at ratios ``[T]``, with the noise at its best."""
        kept = ratios[:, None] / (spectrum + ratios[:, None])  # [T, R]
        Q = (kept * projected).sum(-1) + outside
        noise = torch.log(2 * torch.pi * Q.clamp(min=tiny) / N) + 1
        return 0.5 * kept.log().sum(-1) - 0.5 * N * noise

    scale = spectrum.sum() / N
    if scale == 0:  # no features: only the noise is left to fit
        scale = torch.ones_like(scale)
    ratios = RATIOS.to(scale.device) * scale
    step = 10**0.1  # from one ratio to the next
    steps = torch.arange(-5, 6, dtype=torch.float64, device=scale.device)
    for _ in range(ROUNDS):
        step = step**0.2
        ratios = ratios[evidence(ratios).argmax()] * step**steps  # [11]
    return evidence(ratios).max()


def h_score(
    features: Tensor,
    labels: Tensor,
) -> Tensor:
    r"""Share of the features' variance that lies between classes, summed over directions.

    .. math:: H = \operatorname{tr}\big( \operatorname{cov}(F)^{-1} \operatorname{cov}(\mathbb E[F | y]) \big)

    With no more samples than features the covariance has no inverse. It is then shrunk,
    :math:`(1 - \delta) S + \delta \tfrac{\operatorname{tr} S}{D} I`, with the :math:`\delta` of Ledoit and Wolf. An
    unshrunk one that is singular is inverted on its range.

    Args:
        features: Frozen features :math:`F`, shape ``[N, D]``.
        labels: Classes, shape ``[N]``.

    Returns:
        The score in float64: at least 0, and unshrunk at most one less than the number of classes.

    Raises:
        ValueError: If shapes do not fit, values are not finite, or there is one class only.

    Example:
        >>> y = torch.tensor([0, 0, 1, 1])
        >>> h_score(torch.tensor([[-1.0], [-1.0], [1.0], [1.0]]), y)
        tensor(1., dtype=torch.float64)
        >>> h_score(torch.tensor([[-1.0], [1.0], [-1.0], [1.0]]), y)
        tensor(0., dtype=torch.float64)

    References:
        Bao et al., *An information-theoretic approach to transferability in task transfer
        learning*, ICIP 2019; Ibrahim, Ponomareva, Mazumder, *Newer is not always better*, ECML 2022
        (the shrunk one).
    """
    F = _checked_features(features, labels)
    classes = _checked_classes(labels)
    N, D = F.shape
    U, s, _ = torch.linalg.svd(F - F.mean(0), full_matrices=False)
    spectrum = s.square() / N  # eigenvalues of the covariance, [R]
    indicators = one_hot(classes).to(F)  # [N, C]
    counts = indicators.sum(0).unsqueeze(-1)
    # Deviations of class means in the basis of right singular vectors: s times the mean rows of U.
    means = s * (indicators.T @ U) / counts  # [C, R]
    between = (counts / N * means.square()).sum(0)  # [R]
    if N <= D:
        delta = ledoit_wolf_shrinkage(features)
        spectrum = (1 - delta) * spectrum + delta * spectrum.sum() / D
    rank = spectrum > spectrum.max() * max(N, D) * torch.finfo(F.dtype).eps
    return (between[rank] / spectrum[rank]).sum()


def ledoit_wolf_shrinkage(features: Tensor) -> Tensor:
    r"""Weight of the identity in the covariance estimate of Ledoit and Wolf.

    .. math:: \delta = \min\Big(1, \frac{\frac{1}{N^2} \sum_n \|x_n x_n^\top - S\|_F^2}{\|S - \mu I\|_F^2}\Big),
        \qquad S = \frac1N \sum_n x_n x_n^\top, \quad \mu = \frac{\operatorname{tr} S}{D}

    for centred samples :math:`x_n`. No matrix of ``D²`` entries is formed where ``N < D``.

    Args:
        features: Samples, shape ``[N, D]``.

    Returns:
        :math:`\delta` between 0 and 1, in float64; 0 where the samples do not vary.

    Example:
        >>> ledoit_wolf_shrinkage(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]))
        tensor(1., dtype=torch.float64)

    References:
        Ledoit, Wolf, *A well-conditioned estimator for large-dimensional covariance matrices*, J.
        Multivar. Anal. 2004.
    """
    x = features.double()
    x = x - x.mean(0)
    N, D = x.shape
    gram = x @ x.T if N < D else x.T @ x  # the two have the same squared norm
    norm = gram.square().sum() / N**2  # of S
    trace = x.square().sum() / N
    spread = (x.square().sum(1).square().sum() / N - norm) / N
    distance = norm - trace.square() / D
    if distance <= torch.finfo(x.dtype).eps * norm:
        return trace.sign()
    return (spread / distance).clamp(0, 1)


def leep(
    probabilities: Tensor,
    labels: Tensor,
) -> Tensor:
    r"""Mean log-likelihood of target labels under the source head and the best table from source to target classes.

    .. math:: \frac1N \sum_n \log \sum_z \hat P(y_n | z)\, \theta(x_n)_z, \qquad
        \hat P(y | z) = \frac{\sum_{n: y_n = y} \theta(x_n)_z}{\sum_n \theta(x_n)_z}

    Args:
        probabilities: :math:`\theta`, the source head's for target samples, shape ``[N, Z]``; rows
            add up to 1.
        labels: Target classes, shape ``[N]``.

    Returns:
        The mean in nats, in float64: at most 0, and at least minus the entropy of the labels.

    Raises:
        ValueError: If shapes do not fit, rows are no probabilities, or there is one class only.

    Example:
        >>> y = torch.tensor([0, 1, 1, 0])
        >>> leep(torch.eye(2)[1 - y], y), leep(torch.full((4, 2), 0.5), y)
        (tensor(0., dtype=torch.float64), tensor(-0.6931, dtype=torch.float64))

    References:
        Nguyen, Hassner, Seeger, Archambeau, *LEEP: A new measure to evaluate transferability of
        learned representations*, ICML 2020.
    """
    theta = _checked_features(probabilities, labels, name="probabilities")
    classes = _checked_classes(labels)
    off = (theta.sum(1) - 1).abs().max().item()
    if theta.min() < 0 or off > 1e-3:
        raise ValueError(
            f"`probabilities` must be at least 0 and add up to 1 in each row, got a smallest of "
            f"{theta.min().item():g} and a sum that is off by {off:g}."
        )
    joint = one_hot(classes).to(theta).T @ theta  # [C, Z]
    given = joint / joint.sum(0).clamp(min=torch.finfo(theta.dtype).tiny)  # P(y|z)
    return (theta * given[classes]).sum(1).log().mean()


def nce(
    source: Tensor,
    labels: Tensor,
) -> Tensor:
    r"""Negative conditional entropy :math:`-H(y | z)` of target labels, given what the source head calls each sample.

    It is LEEP of a head that is sure of each.

    Args:
        source: Source classes :math:`z`, the most probable one of each target sample, shape
            ``[N]``.
        labels: Target classes :math:`y`, shape ``[N]``.

    Returns:
        The entropy in nats with its sign changed, in float64: at most 0, and at least minus the
        entropy of the labels.

    Raises:
        ValueError: If shapes do not fit, or there is one target class only.

    Example:
        >>> y = torch.tensor([0, 1, 1, 0])
        >>> nce(1 - y, y), nce(torch.zeros(4).long(), y)
        (tensor(0., dtype=torch.float64), tensor(-0.6931, dtype=torch.float64))

    References:
        Tran, Nguyen, Hassner, *Transferability and hardness of supervised classification tasks*,
        ICCV 2019.
    """
    if source.ndim != 1 or source.is_floating_point() or source.shape != labels.shape:
        raise ValueError(
            f"`source` must hold one class for each of {len(labels)} labels, got {source.dtype} of shape "
            f"{list(source.shape)}."
        )
    _, z = source.unique(return_inverse=True)
    return leep(one_hot(z), labels)


def _checked_features(
    features: Tensor,
    labels: Tensor,
    name: str = "features",
) -> Tensor:
    """Return features in float64."""
    if features.ndim != 2 or not features.numel() or features.shape[:1] != labels.shape[:1]:
        raise ValueError(
            f"`{name}` must have the shape [N, D] with a row for each of the labels, got {list(features.shape)} for "
            f"labels of shape {list(labels.shape)}."
        )
    check_finite(name, features)
    return features.double()


def _checked_classes(labels: Tensor) -> Tensor:
    """Return classes numbered from 0, none of them empty."""
    if labels.ndim != 1 or labels.is_floating_point():
        raise ValueError(
            f"`labels` must be one class per sample, got {labels.dtype} of shape {list(labels.shape)}."
        )
    found, classes = labels.unique(return_inverse=True)
    if len(found) < 2:
        raise ValueError(
            f"`labels` must be of at least two classes, got {len(labels)} of class {found.tolist()}."
        )
    return classes
