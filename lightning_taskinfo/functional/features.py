r"""What part of a target function lies in the span of a network's features: ReLU networks, in closed form.

A shallow network :math:`f(x) = \frac1m \sum_i c_i\, (w_i^\top x)_+` on inputs :math:`x \sim \mathcal N(0, I_d)` spans,
with its first layer frozen, the functions :math:`(w_i^\top x)_+`. Norms and projections in :math:`L^2` of the inputs
need only the mean products of two such features. Linear transfer can at best reach the out-of-span norm of its target,
so it starts to hurt where a network trained from scratch gets below that [Tahir2024, appendix C]_.

.. [Tahir2024, appendix C] Tahir, Ganguli, Rotskoff, *Features are fate: a theory of transfer learning in
   high-dimensional regression*, ICML 2025, arXiv:2410.08194.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lightning_taskinfo._ranges import check_values, checked_tensors


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


def relu_kernel(
    weights: Tensor,
    others: Tensor,
) -> Tensor:
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

    Example:
        >>> relu_kernel(torch.eye(2), torch.tensor([[2.0, 0.0], [-1.0, 0.0]]))
        tensor([[1.0000, 0.0000],
                [0.3183, 0.1592]])

    References:
        Cho, Saul, *Kernel methods for deep learning*, NeurIPS 2009.
    """
    rows = weights.norm(dim=-1).unsqueeze(-1)  # [..., m, 1]
    columns = others.norm(dim=-1).unsqueeze(-2)  # [..., 1, k]
    norms = rows * columns
    tiny = torch.finfo(norms.dtype).tiny
    u = (weights @ others.mT / norms.clamp(min=tiny)).clamp(-1, 1)
    bracket = (1 - u.square()).sqrt() + u * (torch.pi - u.arccos())
    return norms / (2 * torch.pi) * bracket


def span_norms(
    model: Tensor,
    target: Tensor,
    coefficients: Tensor,
) -> SpanNorms:
    r"""Squared norms of a target network inside and outside the span of a model's features.

    .. math::
        \|f\|^2 = \tfrac{1}{m_*} c^\top K_* c, \qquad
        \|P_\parallel f\|^2 = \tfrac{1}{m_*} c^\top \tilde K^\top K^{+} \tilde K c, \qquad
        \|P_\perp f\|^2 = \|f\|^2 - \|P_\parallel f\|^2

    .. math:: K = \frac{\langle\phi\phi^\top\rangle}{m}, \quad
        \tilde K = \frac{\langle\phi\,\phi_*^\top\rangle}{\sqrt{m\, m_*}}, \quad
        K_* = \frac{\langle\phi_*\phi_*^\top\rangle}{m_*}

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
    m, width = model.shape[-2], target.shape[-2]
    K = relu_kernel(model, model) / m  # [..., m, m]
    K_cross = relu_kernel(model, target) / (m * width) ** 0.5  # [..., m, m*]
    K_target = relu_kernel(target, target) / width  # [..., m*, m*]
    c = coefficients.unsqueeze(-1)  # [..., m*, 1]
    v = K_cross @ c  # [..., m, 1]
    inverse = torch.linalg.pinv(K, hermitian=True)
    total = (c.mT @ K_target @ c).squeeze((-2, -1)) / width
    inside = (v.mT @ inverse @ v).squeeze((-2, -1)) / width
    outside = (total - inside).clamp(min=0)  # rounding may leave a small negative number
    return SpanNorms(total, total - outside, outside)


def ablate(
    weights: Tensor,
    fraction: float,
    *,
    generator: Generator | None = None,
) -> Tensor:
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
    gone = round(fraction * m)
    if not 0 <= fraction < 1 or gone == m:
        raise ValueError(
            f"`fraction` must be in [0, 1) and leave a feature of {m}, got {fraction}."
        )
    device = None if generator is None else generator.device
    order = torch.randperm(m, generator=generator, device=device)
    kept = order[gone:].sort().values
    return weights.index_select(-2, kept.to(weights.device))


def fit_power_law(
    n: Tensor,
    risk: Tensor,
) -> tuple[Tensor, Tensor]:
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
    check_values("positive", n=n, risk=risk)
    if n.unique().numel() < 2:
        raise ValueError(f"`n` must have at least two different values, got {n.tolist()}.")
    x = n.to(risk.dtype).log()
    y = risk.log()
    centred = x - x.mean()
    slope = (centred * y).sum(-1) / centred.square().sum()
    intercept = y.mean(-1) - slope * x.mean()
    return intercept.exp(), -slope


def transfer_onset(
    outside: Tensor,
    amplitude: Tensor | float,
    exponent: Tensor | float,
) -> Tensor:
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
    law = {"amplitude": amplitude, "exponent": exponent}
    amplitude, exponent = checked_tensors(dict.fromkeys(law, "positive"), outside.dtype, **law)
    return (amplitude / outside).pow(1 / exponent)
