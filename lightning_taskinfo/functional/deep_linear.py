r"""When transfer helps a deep linear network: risks in closed form.

The setting of [Tahir2024]_: inputs :math:`x \sim \mathcal N(0, I_d)`, labels
:math:`y = \beta_t^\top x + \sigma\epsilon`, unit teachers :math:`\beta_s, \beta_t` at an angle :math:`\theta`,
:math:`n = \gamma d` target samples. A network of :math:`L` layers learns :math:`\beta_s` from a small initialisation on
the population loss; then it is trained on the target samples as a whole (*fine-tuning*) or in its last layer only
(*linear transfer*). A network that never saw the source learns the minimum-norm solution (*scratch*). Risks leave the
irreducible :math:`\sigma^2` out.

A risk in :math:`\gamma` is the limit :math:`n, d \to \infty` at fixed :math:`\gamma`, unless ``dimension`` is given.

.. [Tahir2024] Tahir, Ganguli, Rotskoff, *Features are fate: a theory of transfer learning in high-dimensional
   regression*, ICML 2025, arXiv:2410.08194.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_counts, checked_tensors

Number = Tensor | float
RULES = {
    "theta": "in [0, pi]",
    "gamma": "positive",
    "sigma": "non-negative and finite",
    "n": "greater than 2",
}
checked = partial(checked_tensors, RULES, None)
"""Arguments as tensors of one dtype and shape, each inside its range."""


class NegativeTransfer(NamedTuple):
    """Where linear transfer hurts: for gamma in ``(lower, upper)``, and for gamma above ``onset``.

    Attributes:
        lower: Lower end of the interval below gamma = 1; NaN where there is none.
        upper: Its upper end; NaN where there is none.
        onset: Where the second region starts; at least 1, infinite for parallel tasks.
    """

    lower: Tensor
    upper: Tensor
    onset: Tensor


def scratch_risk(
    gamma: Number,
    sigma: Number,
    *,
    dimension: int | None = None,
) -> Tensor:
    r"""Risk of the minimum-norm solution, which is what a deep linear network learns from scratch.

    .. math:: R_{sc} = (1-\gamma)_+ + \sigma^2\, \frac{\min(\gamma, 1)}{|1-\gamma|}

    With ``dimension`` it is the exact mean over datasets of :math:`n = \gamma d` samples, in which
    :math:`|1-\gamma| - 1/d` stands below the fraction bar.

    Args:
        gamma: Samples per dimension :math:`n/d`, any shape.
        sigma: Standard deviation of the label noise, broadcastable with ``gamma``.
        dimension: :math:`d`; the limit :math:`d \to \infty` when not given.

    Returns:
        The risk, in the broadcast shape; infinite at the interpolation threshold where there is noise.

    Raises:
        ValueError: If ``gamma`` is not positive, ``sigma`` negative or ``dimension`` below 1.

    Example:
        >>> scratch_risk(torch.tensor([0.5, 1.0, 2.0]), 1.0)
        tensor([1.5000,    inf, 1.0000])
    """
    gamma, sigma = checked(gamma=gamma, sigma=sigma)
    return (1 - gamma).clamp(min=0) + _noise_risk(gamma, sigma, dimension)


def linear_transfer_risk(
    theta: Number,
    sigma: Number,
    n: Number,
) -> Tensor:
    r"""Mean risk after the last layer was fitted to ``n`` target samples, on the pretrained feature.

    Pretraining leaves one feature, :math:`z = \beta_s^\top x`, whose squares over the samples have a
    :math:`\chi^2_n` distribution, and the mean of its inverse is :math:`1/(n-2)`.

    .. math:: R_{lt} = \sin^2\theta + \frac{\sigma^2 + \sin^2\theta}{n-2}

    Args:
        theta: Angle between source and target, any shape.
        sigma: Standard deviation of the label noise, broadcastable with ``theta``.
        n: Number of target samples, ``inf`` allowed, broadcastable with ``theta``.

    Returns:
        The risk, in the broadcast shape.

    Raises:
        ValueError: If ``theta`` is outside [0, pi], ``sigma`` negative, or ``n`` at most 2.

    Example:
        >>> linear_transfer_risk(torch.pi / 2, 1.0, torch.tensor([4.0, float("inf")]))
        tensor([2., 1.])
    """
    theta, sigma, n = checked(theta=theta, sigma=sigma, n=n)
    outside = theta.sin().square()
    noise = sigma.square() + outside
    return outside + noise / (n - 2)


def fine_tuning_risk(
    theta: Number,
    gamma: Number,
    sigma: Number,
    *,
    depth: int = 2,
    dimension: int | None = None,
) -> Tensor:
    r"""Risk at the end of the gradient flow that starts from the pretrained network and moves all layers.

    Only the part of the first layer that the samples see can move; balance between layers then fixes their common
    norm :math:`b`. For :math:`\gamma < 1`

    .. math::
        R_{ft} = R_{sc} + (1-\gamma)\,\big(b^{2(L-1)} - 2\, b^{L-1} \cos\theta\big), \qquad
        b^{2L} = (1-\gamma)\, b^{2(L-1)} + \gamma + \frac{\gamma\sigma^2}{1-\gamma},

    and :math:`R_{ft} = R_{sc}` for :math:`\gamma \ge 1`. Without noise :math:`b = 1` at any depth. A linear model
    (``depth=1``) started at :math:`\beta_s` has no :math:`b`; then this is the formula that [Tahir2024]_ print for all
    depths, :math:`R_{sc} + (1-\gamma)_+ (1 - 2\cos\theta)`, which is right for deep ones at :math:`\sigma = 0` only.

    Args:
        theta: Angle between source and target, any shape.
        gamma: Samples per dimension, broadcastable with ``theta``.
        sigma: Standard deviation of the label noise, broadcastable with ``theta``.
        depth: Number of layers :math:`L`.
        dimension: :math:`d`, to take the means of :math:`R_{sc}` and of the squared norm of the scratch solution
            (the last two terms of :math:`b^{2L}`) exactly; what is left is the spread of :math:`b`, of order
            :math:`1/d`. The limit :math:`d \to \infty` when not given.

    Returns:
        The risk, in the broadcast shape.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        >>> fine_tuning_risk(0.0, torch.tensor([0.25, 2.0]), 0.0)
        tensor([0., 0.])
    """
    theta, gamma, sigma = checked(theta=theta, gamma=gamma, sigma=sigma)
    gain = fine_tuning_transferability(theta, gamma, sigma, depth=depth, dimension=dimension)
    return scratch_risk(gamma, sigma, dimension=dimension) - gain


def linear_transferability(
    theta: Number,
    gamma: Number,
    sigma: Number,
) -> Tensor:
    r"""What linear transfer gains over scratch, :math:`T = R_{sc} - R_{lt}`, as :math:`n \to \infty` at fixed gamma.

    .. math:: T_{lt} = (1-\gamma)_+ + \sigma^2\,\frac{\min(\gamma, 1)}{|1-\gamma|} - \sin^2\theta

    Negative values are negative transfer; :func:`negative_transfer_interval` has the boundaries.

    Args:
        theta: Angle between source and target, any shape.
        gamma: Samples per dimension, broadcastable with ``theta``.
        sigma: Standard deviation of the label noise, broadcastable with ``theta``.

    Returns:
        The gain, in the broadcast shape.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        >>> linear_transferability(torch.pi / 2, torch.tensor([0.5, 2.0]), 0.0)
        tensor([-0.5000, -1.0000])
    """
    theta, gamma, sigma = checked(theta=theta, gamma=gamma, sigma=sigma)
    return scratch_risk(gamma, sigma) - theta.sin().square()


def fine_tuning_transferability(
    theta: Number,
    gamma: Number,
    sigma: Number,
    *,
    depth: int = 2,
    dimension: int | None = None,
) -> Tensor:
    r"""What fine-tuning gains over scratch, :math:`T = R_{sc} - R_{ft}`.

    .. math:: T_{ft} = (1-\gamma)_+\, b^{L-1} \big(2\cos\theta - b^{L-1}\big)

    It is positive iff :math:`\cos\theta > b^{L-1}/2`, that is :math:`\theta < \pi/3` without noise. The arguments
    are those of :func:`fine_tuning_risk`.

    Args:
        theta: Angle between source and target, any shape.
        gamma: Samples per dimension, broadcastable with ``theta``.
        sigma: Standard deviation of the label noise, broadcastable with ``theta``.
        depth: Number of layers :math:`L`.
        dimension: See :func:`fine_tuning_risk`.

    Returns:
        The gain, in the broadcast shape; 0 for gamma of at least 1.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        >>> fine_tuning_transferability(torch.tensor([0.0, torch.pi / 2]), 0.5, 0.0)
        tensor([ 0.5000, -0.5000])
    """
    theta, gamma, sigma = checked(theta=theta, gamma=gamma, sigma=sigma)
    product = _layer_product(gamma, sigma, depth, dimension)  # b^(L-1)
    gain = (1 - gamma) * product * (2 * theta.cos() - product)
    moves = (gamma < 1) & product.isfinite()
    return torch.where(moves, gain, 0.0)


def fine_tuning_boundary(
    gamma: Number,
    sigma: Number,
    *,
    depth: int = 2,
) -> Tensor:
    r"""Angle below which fine-tuning helps, :math:`\arccos(b^{L-1}/2)`.

    Args:
        gamma: Samples per dimension, any shape.
        sigma: Standard deviation of the label noise, broadcastable with ``gamma``.
        depth: Number of layers :math:`L`.

    Returns:
        The angle in the broadcast shape; 0 where even the same task is better learned from scratch, NaN for gamma
        of at least 1, where fine-tuning and scratch are the same.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        >>> fine_tuning_boundary(torch.tensor([0.5, 2.0]), 0.0)  # pi / 3
        tensor([1.0472,    nan])
    """
    gamma, sigma = checked(gamma=gamma, sigma=sigma)
    cosine = 0.5 * _layer_product(gamma, sigma, depth)
    return torch.where(gamma < 1, cosine.clamp(max=1).arccos(), torch.nan)


def negative_transfer_interval(
    theta: Number,
    sigma: Number,
) -> NegativeTransfer:
    r"""Numbers of samples per dimension at which linear transfer hurts, as :math:`n \to \infty`.

    .. math::
        \gamma_\pm = \tfrac12\Big[ 1 + \cos^2\theta - \sigma^2
            \pm \sqrt{(1 + \cos^2\theta - \sigma^2)^2 - 4\cos^2\theta} \Big], \qquad
        \gamma_{on} = 1 + \frac{\sigma^2}{\sin^2\theta}.

    The interval exists iff :math:`\sigma < 1 - |\cos\theta|`. Between :math:`\gamma_+` and :math:`\gamma_{on}` lies a
    band in which transfer helps only because scratch training suffers at its interpolation threshold.

    Args:
        theta: Angle between source and target, any shape.
        sigma: Standard deviation of the label noise, broadcastable with ``theta``.

    Returns:
        Lower and upper end of the interval (NaN where there is none) and the onset of the second region.

    Raises:
        ValueError: If an argument is outside its domain.

    Example:
        >>> lower, upper, onset = negative_transfer_interval(torch.pi / 2, 0.5)
        >>> upper, onset
        (tensor(0.7500), tensor(1.2500))
    """
    theta, sigma = checked(theta=theta, sigma=sigma)
    cos = theta.cos().abs()
    sin = theta.sin().abs()
    noise = sigma.square()
    total = 1 + cos.square() - noise  # sum of the two roots; their product is cos²
    # (total - 2cos)(total + 2cos), factored so that it is exactly positive up to the interval's vanishing
    product = ((1 - cos).square() - noise) * ((1 + cos).square() - noise)
    upper = 0.5 * (total + product.clamp(min=0).sqrt())
    lower = cos.square() / upper  # without the cancellation of total - root
    onset = torch.where(sigma == 0, 1.0, 1 + noise / sin.square())
    onset = torch.where(sin < 1e-7, torch.inf, onset)
    lower, upper = (torch.where(sigma < 1 - cos, end, torch.nan) for end in (lower, upper))
    return NegativeTransfer(lower, upper, onset)


def _noise_risk(
    gamma: Tensor,
    sigma: Tensor,
    dimension: int | None = None,
) -> Tensor:
    """Squared norm that label noise adds to the minimum-norm solution: ``sigma²`` times the mean of ``tr (XᵀX)⁺``."""
    check_counts(dimension=dimension)
    sample = 0.0 if dimension is None else 1 / dimension
    gap = (1 - gamma).abs() - sample
    is_gap = gap > 1e-3 * sample  # gamma·d is whole but for rounding
    gain = torch.where(is_gap, gamma.clamp(max=1) / gap, torch.inf)
    return torch.where(sigma == 0, 0.0, sigma.square() * gain)


def _layer_product(
    gamma: Tensor,
    sigma: Tensor,
    depth: int,
    dimension: int | None = None,
) -> Tensor:
    """The :func:`layer_product` after fine-tuning, for ``gamma < 1``."""
    unseen = (1 - gamma).clamp(min=0)
    scratch = gamma.clamp(max=1) + _noise_risk(gamma, sigma, dimension)
    return layer_product(scratch, unseen, depth)


def layer_product(
    scratch: Tensor,
    unseen: Tensor,
    depth: int,
) -> Tensor:
    r"""Product :math:`b^{L-1}` of the norms of all layers but one at the end of fine-tuning.

    :math:`x = b^2` is the only positive root of :math:`x^L - u\,x^{L-1} - s`. Newton's method from above falls to it.

    Args:
        scratch: Squared norm :math:`s` of the scratch solution, any shape.
        unseen: Squared norm :math:`u` of the part of the pretrained first layer that no sample sees, broadcastable
            with ``scratch``.
        depth: Number of layers :math:`L`.

    Returns:
        The product, in the broadcast shape.

    Raises:
        ValueError: If ``depth`` is below 1.

    Example:
        >>> layer_product(torch.tensor([0.5, 4.0]), torch.tensor([0.5, 0.0]), 2)
        tensor([1.0000, 1.4142])
    """
    check_counts(depth=depth)
    u, s = unseen, scratch
    x = u + s.pow(1 / depth)
    # Quadratic near the root; far from it a step shrinks the error by at least (L-1)/L.
    for _ in range(60):
        power = x.pow(depth - 1)
        value = power * (x - u) - s
        slope = depth * power - (depth - 1) * u * x.pow(depth - 2)
        # At the root itself, which may be 0 or infinite, the quotient need not exist.
        x = x - torch.where(value > 0, value / slope, 0.0)
    return x.pow((depth - 1) / 2)
