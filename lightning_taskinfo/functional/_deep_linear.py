"""What the closed forms for deep linear networks share: domains of arguments, and three small expectations."""

import math

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_counts

_RULES = {  # argument -> (is it right?, the rule in words)
    "theta": (lambda t: (t >= 0) & (t <= math.pi + 1e-6), "in [0, pi]"),
    "gamma": (lambda t: (t > 0) & t.isfinite(), "positive and finite"),
    "sigma": (lambda t: (t >= 0) & t.isfinite(), "non-negative and finite"),
    "n": (lambda t: t > 2, "greater than 2"),
    "ridge": (lambda t: (t >= 0) & t.isfinite(), "non-negative and finite"),
}


def checked(**values: Tensor | float) -> list[Tensor]:
    """Return the arguments as tensors of one dtype, broadcast against each other, or say which one is wrong."""
    floats = [
        value
        for value in values.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    dtype = torch.get_default_dtype()
    # Numbers take the tensors' dtype, and are never rounded to a smaller one.
    for number, value in enumerate(floats):
        dtype = value.dtype if number == 0 else torch.promote_types(dtype, value.dtype)
    device = next((value.device for value in values.values() if isinstance(value, Tensor)), None)
    tensors = {
        name: torch.as_tensor(value, dtype=dtype, device=device) for name, value in values.items()
    }
    for name, tensor in tensors.items():
        is_right, rule = _RULES[name]
        if not (right := is_right(tensor)).all():
            raise ValueError(f"`{name}` must be {rule}, got {tensor[~right].flatten()[0].item()}.")
    return list(torch.broadcast_tensors(*tensors.values()))


def noise_risk(gamma: Tensor, sigma: Tensor, dimension: int | None = None) -> Tensor:
    """Squared norm that label noise adds to the minimum-norm solution: ``sigma²`` times the mean of ``tr (XᵀX)⁺``."""
    check_counts(dimension=dimension)
    sample = 0.0 if dimension is None else 1 / dimension
    gap = (1 - gamma).abs() - sample
    # gamma·d is whole but for rounding.
    gain = torch.where(gap > 1e-3 * sample, gamma.clamp(max=1) / gap, torch.inf)
    return torch.where(sigma == 0, 0.0, sigma.square() * gain)


def layer_product(gamma: Tensor, sigma: Tensor, depth: int, dimension: int | None = None) -> Tensor:
    """Product ``b^(L-1)`` of the norms of all layers but one after fine-tuning, for ``gamma < 1``.

    ``x = b²`` is the only positive root of ``x^L - u·x^(L-1) - s``, with ``u`` the unseen part of
    the pretrained first layer and ``s`` the squared norm of the scratch solution. Newton's method
    from above falls to it.
    """
    check_counts(depth=depth)
    u = (1 - gamma).clamp(min=0)
    s = gamma.clamp(max=1) + noise_risk(gamma, sigma, dimension)
    x = u + s.pow(1 / depth)
    # Quadratic near the root; far from it a step shrinks the error by at least (L-1)/L.
    for _ in range(60):
        value = x.pow(depth - 1) * (x - u) - s
        slope = depth * x.pow(depth - 1) - (depth - 1) * u * x.pow(depth - 2)
        x = torch.where(s.isfinite(), x - value / slope, torch.inf)
    return x.pow((depth - 1) / 2)


def ridge_moments(n: Tensor, ridge: Tensor) -> tuple[Tensor, Tensor]:
    """Means of ``(n·λ/(q + n·λ))²`` and of ``q/(q + n·λ)²`` for ``q`` chi-squared with ``n`` degrees of freedom.

    The trapezoidal rule in ``log q`` is accurate to rounding: the integrand is smooth and vanishes
    at both ends.
    """
    finite = n.isfinite()
    m, penalty = torch.where(finite, n, 3.0).double(), ridge.double()
    unit = torch.linspace(0, 1, 1001, dtype=torch.float64, device=n.device).reshape(
        -1, *[1] * n.dim()
    )
    # The density of log q falls off like exp(n t / 2) on the left, and faster than a Gaussian on
    # the right.
    right = 12 * (2 / m).sqrt()
    t = right - unit * (80 / m + 2 * right)  # log(q / n), [points, ...]
    weight = (0.5 * m * (t - t.exp())).softmax(0)
    q = t.exp()
    shrunk = (weight * (penalty / (q + penalty)).square()).sum(0)
    gain = (weight * q / (q + penalty).square()).sum(0) / m
    gain = torch.where(penalty == 0, 1 / (m - 2), gain)
    limit = (penalty / (1 + penalty)).square()
    return torch.where(finite, shrunk, limit).to(n.dtype), torch.where(finite, gain, 0.0).to(
        n.dtype
    )
