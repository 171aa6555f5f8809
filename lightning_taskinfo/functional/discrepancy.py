r"""Discrepancies between distributions, estimated from samples: mutual information, kernels, earlier predictions.

**Mutual information** is that between the joint distribution and the product of its marginals. All variational
estimates of it come from one matrix of critic scores. Entry ``scores[i, j]`` is the critic
:math:`M(x_i, z_j)`: the diagonal holds samples of the joint distribution, everything beside it
samples of the product. Expectations of :math:`e^M` go through ``logsumexp``. Every estimate is in nats.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightning_taskinfo._ranges import check_positive


def donsker_varadhan(scores: Tensor) -> Tensor:
    r"""Lower bound of Donsker and Varadhan.

    .. math:: \hat I = \mathbb{E}_{joint}[M] - \log \mathbb{E}_{prod}[e^M]

    Its gradient on a mini-batch is biased, because the logarithm is outside of the mean: see
    :func:`mine`.

    Args:
        scores: Critic scores, shape ``[B, B]``.

    Returns:
        The estimate, a scalar.

    Example:
        >>> donsker_varadhan(torch.eye(2))
        tensor(1.)
    """
    joint, product = joint_and_product(scores)
    return joint.mean() - log_mean_exp(product)


def mine(
    scores: Tensor,
    log_average: Tensor,
) -> Tensor:
    r"""Value of :func:`donsker_varadhan`, gradient corrected by a moving average.

    .. math:: \nabla \hat I = \mathbb{E}_{joint}[\nabla M] - \mathbb{E}_{prod}[e^M \nabla M] / \overline{e^M}

    Args:
        scores: Critic scores, shape ``[B, B]``.
        log_average: Logarithm of the moving average :math:`\overline{e^M}` over mini-batches, this
            one included (:func:`update_log_average`), a scalar; of this one alone where it is not finite.

    Returns:
        The estimate, a scalar.

    Example:
        >>> scores = torch.eye(2, requires_grad=True)
        >>> mine(scores, torch.tensor(0.0)).backward()  # the average is 1 = e^0, as in this batch
        >>> scores.grad
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]])

    References:
        Belghazi et al., *Mutual Information Neural Estimation*, ICML 2018.
    """
    joint, product = joint_and_product(scores)
    log_mean = log_mean_exp(product)
    average = log_average if log_average.isfinite() else log_mean
    corrected = (log_mean - average.detach()).exp()  # its gradient is E[e^M ∇M] / average
    gradient = corrected - corrected.detach()  # zero, with the gradient of the corrected mean
    return joint.mean() - log_mean.detach() - gradient


def update_log_average(
    log_average: Tensor,
    scores: Tensor,
    decay: float,
) -> Tensor:
    r"""Move the logarithm of the average of :math:`e^M` over the product one mini-batch further.

    Args:
        log_average: The average so far; :math:`-\infty` before the first mini-batch, which is then
            taken whole.
        scores: Critic scores, shape ``[B, B]``.
        decay: Share of the old average that is kept.

    Returns:
        The new average's logarithm, a scalar without gradient.

    Example:
        >>> update_log_average(torch.tensor(-torch.inf), torch.zeros(3, 3), decay=0.99)
        tensor(0.)
    """
    _, product = joint_and_product(scores.detach())
    current = log_mean_exp(product)
    if log_average == -math.inf:
        return current
    old = log_average + math.log(decay)
    new = current + math.log1p(-decay)
    return torch.logaddexp(old, new)


def smile(
    scores: Tensor,
    clip: float = 5.0,
) -> Tensor:
    r"""Donsker–Varadhan with the density ratio clipped: less variance for some bias.

    .. math:: \hat I = \mathbb{E}_{joint}[M] - \log \mathbb{E}_{prod}[\mathrm{clip}(e^M, e^{-\tau}, e^{\tau})]

    A **read-out, not an objective**: where the product scores are clipped nothing holds the joint
    scores back, and a critic that ascends it runs away. Train with :func:`jensen_shannon` and read
    this. It is no lower bound: with the optimal critic and :math:`\tau = 5` it reads about 6.7 at 6
    nats and 12 at 10.

    Args:
        scores: Critic scores, shape ``[B, B]``.
        clip: The :math:`\tau` above.

    Returns:
        The estimate, a scalar.

    Raises:
        ValueError: If ``clip`` is not positive.

    Example:
        >>> smile(100 * torch.eye(2) - 100, clip=5.0)  # the product scores, -100, count as -5
        tensor(5.)

    References:
        Song, Ermon, *Understanding the Limitations of Variational Mutual Information Estimators*,
        ICLR 2020.
    """
    check_positive(clip=clip)
    joint, product = joint_and_product(scores)
    return joint.mean() - log_mean_exp(product.clamp(-clip, clip))


def nwj(scores: Tensor) -> Tensor:
    r"""Lower bound of Nguyen, Wainwright and Jordan, also known as f-GAN KL and MINE-f.

    .. math:: \hat I = \mathbb{E}_{joint}[M] - e^{-1}\, \mathbb{E}_{prod}[e^M]

    Unbiased on mini-batches, with a variance that grows as :math:`e^I`.

    Args:
        scores: Critic scores, shape ``[B, B]``; the optimal critic is
            :math:`1 + \log p(x,z)/(p(x)p(z))`.

    Returns:
        The estimate, a scalar.

    Example:
        >>> nwj(torch.ones(3, 3))
        tensor(0.)
    """
    joint, product = joint_and_product(scores)
    return joint.mean() - (log_mean_exp(product) - 1).exp()


def info_nce(scores: Tensor) -> Tensor:
    r"""Contrastive lower bound, never above :math:`\log B`. The joint pair is always among its negatives.

    .. math:: \hat I = \frac1B \sum_i \Big[ M(x_i, z_i) - \log \frac1B \sum_j e^{M(x_i, z_j)} \Big]

    Args:
        scores: Critic scores, shape ``[B, B]``.

    Returns:
        The estimate, a scalar.

    Example:
        >>> info_nce(1000 * torch.eye(4))  # log 4
        tensor(1.3863)
    """
    joint, _ = joint_and_product(scores)
    log_ratios = joint - torch.logsumexp(scores, dim=1)
    return log_ratios.mean() + math.log(len(scores))


def jensen_shannon(scores: Tensor) -> Tensor:
    r"""The Jensen–Shannon objective: what a critic should ascend. Not an estimate of the mutual information.

    .. math:: \mathbb{E}_{joint}[-\mathrm{softplus}(-M)] - \mathbb{E}_{prod}[\mathrm{softplus}(M)]

    This is logistic regression of joint against product samples: bounded above by 0, with
    :math:`M = \log p(x,z)/(p(x)p(z))` as its optimum, which is the critic that :func:`smile` wants to read.

    Args:
        scores: Critic scores, shape ``[B, B]``.

    Returns:
        The objective, a scalar.

    Example:
        >>> jensen_shannon(torch.zeros(2, 2))  # -2 log 2
        tensor(-1.3863)
    """
    joint, product = joint_and_product(scores)
    return logsigmoid(joint).mean() + logsigmoid(-product).mean()


def joint_and_product(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the diagonal of a score matrix, shape ``[B]``, and the rest, ``[B * (B - 1)]``.

    Args:
        scores: Score of each input (row) with each feature (column), shape ``[B, B]``.

    Raises:
        ValueError: If ``scores`` is not a square matrix of at least two samples.

    Example:
        >>> joint_and_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        (tensor([1., 4.]), tensor([2., 3.]))
    """
    B = len(scores)
    if B < 2 or scores.shape != (B, B):
        raise ValueError(
            f"`scores` must have shape [B, B] with B of at least 2, got {tuple(scores.shape)}."
        )
    # Without its first entry, the matrix read in rows of B + 1 has the diagonal as its last column.
    product = scores.flatten()[1:].view(B - 1, B + 1)[:, :-1]
    return scores.diagonal(), product.flatten()


def log_mean_exp(values: Tensor) -> Tensor:
    """Return the logarithm of the mean of ``values.exp()``, without overflow.

    Args:
        values: Shape ``[N, ...]``; the mean is over the first axis.

    Example:
        >>> log_mean_exp(torch.full((3,), 1000.0))
        tensor(1000.)
    """
    return torch.logsumexp(values, dim=0) - math.log(len(values))


WIDTH_FACTORS = tuple(2.0**k for k in range(-9, 10))
"""Nineteen widths, from 1/512 to 512 times the median distance."""


def gaussian_kernel(
    a: Tensor,
    b: Tensor,
    widths: Tensor,
) -> Tensor:
    r"""Mean of Gaussian kernels of several widths, between all pairs.

    .. math:: k(a, b) = \frac1m \sum_{s} \exp\Big( -\frac{\|a - b\|^2}{2 s^2} \Big)

    Args:
        a: Samples, shape ``[N, D]``.
        b: Samples, shape ``[M, D]``.
        widths: The :math:`s`, positive, shape ``[m]``.

    Returns:
        The kernel matrix, shape ``[N, M]``.

    Example:
        >>> gaussian_kernel(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([1.0, 2.0]))
        tensor([[1., 1., 1.]])
    """
    # Kernels depend on differences alone. What all samples have in common is removed before
    # squaring: in float32 its square would leave few digits for the differences. It is a constant,
    # so that gradients stay as they are.
    center = torch.cat([a, b]).detach().mean(0)
    a = a - center
    b = b - center
    rows = a.square().sum(1)[:, None]
    columns = b.square().sum(1)[None]
    squares = (rows + columns - 2 * a @ b.T).clamp_min(0)  # [N, M]
    exponents = squares[..., None] * (-0.5 / widths.square())  # [N, M, m]
    return exponents.exp().mean(-1)


def mk_mmd(
    source: Tensor,
    target: Tensor,
    *,
    widths: Sequence[float] | Tensor | None = None,
) -> Tensor:
    r"""Unbiased estimate of the squared maximum mean discrepancy under a mean of Gaussian kernels.

    .. math::
        \widehat{\mathrm{MMD}}^2 = \frac{1}{N(N-1)} \sum_{i \ne j} k(s_i, s_j)
            + \frac{1}{M(M-1)} \sum_{i \ne j} k(t_i, t_j) - \frac{2}{NM} \sum_{i,j} k(s_i, t_j)

    Zero in expectation where both come from one distribution, so a single value may be negative.

    Args:
        source: Samples of the first distribution, shape ``[N, D]``.
        target: Samples of the second, shape ``[M, D]``; ``M`` need not be ``N``.
        widths: Kernel widths. By default nineteen, from 1/512 to 512 times the median distance of
            these samples (held fixed in the gradient), so that a common scale of the features does
            not matter.

    Returns:
        The estimate, a scalar.

    Raises:
        ValueError: If a sample has fewer than two rows, the dimensions differ, or a width is not
            positive.

    Example:
        >>> a = torch.tensor([[0.0], [0.0]])
        >>> mk_mmd(a, a + 100.0, widths=[1.0])
        tensor(2.)

    References:
        Gretton et al., *A Kernel Two-Sample Test*, JMLR 2012.
    """
    shapes = [tuple(source.shape), tuple(target.shape)]
    few = min(len(source), len(target)) < 2
    if few or source.ndim != 2 or source.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"`source` and `target` must have shapes [N, D] and [M, D] with N and M of at least 2, got {shapes}."
        )
    if widths is None:
        median = torch.pdist(torch.cat([source, target]).detach()).median()
        unit = torch.where(
            median > 0, median, 1.0
        )  # 0 where more than half of the samples coincide
        widths = unit * source.new_tensor(WIDTH_FACTORS)
    else:
        check_positive(widths=widths)
    widths = torch.as_tensor(widths, dtype=source.dtype, device=source.device)
    _, sources = joint_and_product(gaussian_kernel(source, source, widths))  # without i = j
    _, targets = joint_and_product(gaussian_kernel(target, target, widths))
    between = gaussian_kernel(source, target, widths)
    return sources.mean() + targets.mean() - 2 * between.mean()


def ensemble_targets(
    average: Tensor,
    count: Tensor,
    decay: float,
) -> Tensor:
    r"""Bias-corrected ensemble predictions of Temporal Ensembling.

    .. math:: \tilde z = Z / (1 - \alpha^t)

    Args:
        average: Moving averages that began at zero, shape ``[B, C]``.
        count: How many times each was updated, :math:`t`, shape ``[B]``.
        decay: The :math:`\alpha` of the moving average.

    Returns:
        The targets, shape ``[B, C]``; zero for a sample that was never updated.

    Example:
        >>> ensemble_targets(torch.tensor([[0.25, 0.25]]), torch.tensor([1]), decay=0.5)
        tensor([[0.5000, 0.5000]])

    References:
        Laine, Aila, *Temporal Ensembling for Semi-Supervised Learning*, ICLR 2017.
    """
    correction = 1 - decay ** count.clamp_min(1).to(average.dtype)
    return average / correction[:, None]
