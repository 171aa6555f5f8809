r"""Variational estimates of the mutual information, all from one matrix of critic scores.

Entry ``scores[i, j]`` is the critic :math:`M(x_i, z_j)`: the diagonal holds samples of the joint
distribution, everything beside it samples of the product of the marginals. Expectations of
:math:`e^M` go through ``logsumexp``. Every estimate is in nats.

``negatives="all"`` takes the whole matrix as samples of the product, the diagonal included, as
torch-mist's losses do. A share :math:`1/B` of them is then of the joint distribution: scores are
pulled towards zero, which takes variance away and, where the information is large beside
:math:`\log B`, information too. ``"others"`` leaves the diagonal out.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

__all__ = [
    "donsker_varadhan",
    "info_nce",
    "jensen_shannon",
    "joint_and_product",
    "log_mean_exp",
    "mine",
    "nwj",
    "smile",
    "update_log_average",
]

Negatives = Literal["others", "all"]


def donsker_varadhan(scores: Tensor, *, negatives: Negatives = "others") -> Tensor:
    r"""Lower bound of Donsker and Varadhan.

    .. math:: \hat I = \mathbb{E}_{joint}[M] - \log \mathbb{E}_{prod}[e^M]

    Its gradient on a mini-batch is biased, because the logarithm is outside of the mean: see
    :func:`mine`. With all pairs as negatives it is never above :math:`\log B`.

    Args:
        scores: Critic scores, shape ``[B, B]``.
        negatives: Which pairs stand for the product: ``"others"`` or ``"all"``.

    Returns:
        The estimate, a scalar.

    Example:
        >>> donsker_varadhan(torch.eye(2))
        tensor(1.)
    """
    joint, product = joint_and_product(scores, negatives)
    return joint.mean() - log_mean_exp(product)


def mine(scores: Tensor, log_average: Tensor, *, negatives: Negatives = "others") -> Tensor:
    r"""Value of :func:`donsker_varadhan`, gradient corrected by a moving average.

    .. math:: \nabla \hat I = \mathbb{E}_{joint}[\nabla M] - \mathbb{E}_{prod}[e^M \nabla M] / \overline{e^M}

    Args:
        scores: Critic scores, shape ``[B, B]``.
        log_average: Logarithm of the moving average :math:`\overline{e^M}` over mini-batches, this
            one included (:func:`update_log_average`), a scalar; of this one alone where it is not finite.
        negatives: Which pairs stand for the product: ``"others"`` or ``"all"``.

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
    joint, product = joint_and_product(scores, negatives)
    log_mean = log_mean_exp(product)
    average = log_average if log_average.isfinite() else log_mean
    corrected = (log_mean - average.detach()).exp()  # its gradient is E[e^M ∇M] / average
    gradient = corrected - corrected.detach()  # zero, with the gradient of the corrected mean
    return joint.mean() - log_mean.detach() - gradient


def update_log_average(
    log_average: Tensor,
    scores: Tensor,
    decay: float,
    *,
    negatives: Negatives = "others",
) -> Tensor:
    r"""Move the logarithm of the average of :math:`e^M` over the product one mini-batch further.

    Args:
        log_average: The average so far; :math:`-\infty` before the first mini-batch, which is then
            taken whole.
        scores: Critic scores, shape ``[B, B]``.
        decay: Share of the old average that is kept.
        negatives: Which pairs stand for the product: ``"others"`` or ``"all"``.

    Returns:
        The new average's logarithm, a scalar without gradient.

    Example:
        >>> update_log_average(torch.tensor(-torch.inf), torch.zeros(3, 3), decay=0.99)
        tensor(0.)
    """
    current = log_mean_exp(joint_and_product(scores.detach(), negatives)[1])
    if log_average == -math.inf:
        return current
    old = log_average + math.log(decay)
    new = current + math.log1p(-decay)
    return torch.logaddexp(old, new)


def smile(scores: Tensor, clip: float = 5.0, *, negatives: Negatives = "others") -> Tensor:
    r"""Donsker–Varadhan with the density ratio clipped: less variance for some bias.

    .. math:: \hat I = \mathbb{E}_{joint}[M] - \log \mathbb{E}_{prod}[\mathrm{clip}(e^M, e^{-\tau}, e^{\tau})]

    A **read-out, not an objective**: where the product scores are clipped nothing holds the joint
    scores back, and a critic that ascends it runs away. Train with :func:`jensen_shannon` and read
    this. It is no lower bound: with the optimal critic and :math:`\tau = 5` it reads about 6.7 at 6
    nats and 12 at 10.

    Args:
        scores: Critic scores, shape ``[B, B]``.
        clip: The :math:`\tau` above.
        negatives: Which pairs stand for the product: ``"others"`` or ``"all"``.

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
    check_choices(negatives, clip)
    joint, product = joint_and_product(scores, negatives)
    return joint.mean() - log_mean_exp(product.clamp(-clip, clip))


def nwj(scores: Tensor, *, negatives: Negatives = "others") -> Tensor:
    r"""Lower bound of Nguyen, Wainwright and Jordan, also known as f-GAN KL and MINE-f.

    .. math:: \hat I = \mathbb{E}_{joint}[M] - e^{-1}\, \mathbb{E}_{prod}[e^M]

    Unbiased on mini-batches, with a variance that grows as :math:`e^I`.

    Args:
        scores: Critic scores, shape ``[B, B]``; the optimal critic is
            :math:`1 + \log p(x,z)/(p(x)p(z))`.
        negatives: Which pairs stand for the product: ``"others"`` or ``"all"``.

    Returns:
        The estimate, a scalar.

    Example:
        >>> nwj(torch.ones(3, 3))
        tensor(0.)
    """
    joint, product = joint_and_product(scores, negatives)
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


def jensen_shannon(scores: Tensor, *, negatives: Negatives = "others") -> Tensor:
    r"""The Jensen–Shannon objective: what a critic should ascend. Not an estimate of the mutual information.

    .. math:: \mathbb{E}_{joint}[-\mathrm{softplus}(-M)] - \mathbb{E}_{prod}[\mathrm{softplus}(M)]

    This is logistic regression of joint against product samples: bounded above by 0, with
    :math:`M = \log p(x,z)/(p(x)p(z))` as its optimum, which is the critic that :func:`smile` wants to read. With all
    pairs as negatives the optimum is lower: with :math:`r = p(x,z)/(p(x)p(z))` it is
    :math:`\log r - \log(1 + (r - 1)/B)`, which stays below :math:`\log B`.

    Args:
        scores: Critic scores, shape ``[B, B]``.
        negatives: Which pairs stand for the product: ``"others"`` or ``"all"``.

    Returns:
        The objective, a scalar.

    Example:
        >>> jensen_shannon(torch.zeros(2, 2))  # -2 log 2
        tensor(-1.3863)
    """
    joint, product = joint_and_product(scores, negatives)
    return logsigmoid(joint).mean() + logsigmoid(-product).mean()


def joint_and_product(scores: Tensor, negatives: Negatives = "others") -> tuple[Tensor, Tensor]:
    """Return the diagonal of a score matrix, shape ``[B]``, and the rest, ``[B * (B - 1)]``, or all, ``[B * B]``.

    Args:
        scores: Score of each input (row) with each feature (column), shape ``[B, B]``.
        negatives: Whether the ``"others"`` alone or ``"all"`` pairs stand for the product
            distribution.

    Raises:
        ValueError: If ``scores`` is not a square matrix of at least two samples, or ``negatives``
            unknown.

    Example:
        >>> joint_and_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        (tensor([1., 4.]), tensor([2., 3.]))
    """
    check_choices(negatives)
    shape = tuple(scores.shape)
    square = len(shape) == 2 and shape[0] == shape[1]
    if not square or len(scores) < 2:
        raise ValueError(f"`scores` must have shape [B, B] with B of at least 2, got {shape}.")
    if negatives == "all":
        return scores.diagonal(), scores.flatten()
    B = len(scores)
    # Without its first entry, the matrix read in rows of B + 1 has the diagonal as its last column.
    behind_first = scores.flatten()[1:]
    product = behind_first.view(B - 1, B + 1)[:, :-1]
    return scores.diagonal(), product.flatten()


def check_choices(negatives: str, clip: float = math.inf) -> None:
    """Raise ``ValueError`` unless ``negatives`` is a kind that is known, and ``clip`` positive."""
    if negatives not in get_args(Negatives):
        raise ValueError(f"`negatives` must be 'others' or 'all', got {negatives!r}.")
    if not clip > 0:
        raise ValueError(f"`clip` must be positive, got {clip}.")


def log_mean_exp(values: Tensor) -> Tensor:
    """Return the logarithm of the mean of ``values.exp()``, without overflow.

    Args:
        values: Shape ``[N, ...]``; the mean is over the first axis.

    Example:
        >>> log_mean_exp(torch.full((3,), 1000.0))
        tensor(1000.)
    """
    return torch.logsumexp(values, dim=0) - math.log(len(values))
