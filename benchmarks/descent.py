"""Deep linear networks trained by full-batch gradient descent, many repetitions at once.

Small rates follow the gradient flow that theory speaks of. Pretraining starts from :func:`small_layers`; where it ends
is known, :func:`pretrained_layers`, and fine-tuning can start from there.
"""

import math
from itertools import pairwise

import torch
from torch import Generator, Tensor

from lightning_taskinfo._ranges import check_positive


def pretrained_layers(
    source: Tensor, depth: int = 2, *, width: int = 8, generator: Generator | None = None
) -> list[Tensor]:
    """Where pretraining from a vanishing initialisation ends: layers of rank one and equal norm.

    Args:
        source: Source teachers, shape ``[R, d]``.
        depth: Number of layers.
        width: Number of hidden units.
        generator: Draws the hidden directions, which gradient flow leaves to the initialisation.

    Returns:
        Layers of shapes ``[R, width, d]``, ``[R, width, width]`` …, ``[R, 1, width]``, whose product is ``source``.

    Example:
        >>> first, last = pretrained_layers(torch.tensor([[3.0, 4.0]]))
        >>> torch.allclose(last @ first, torch.tensor([[3.0, 4.0]]))
        True
    """
    norm = source.norm(dim=-1)[:, None, None]
    repetitions = source.shape[0]
    hidden = torch.randn(
        depth - 1,
        repetitions,
        width,
        1,
        generator=generator,
        dtype=source.dtype,
        device=source.device,
    )
    hidden = hidden / hidden.norm(dim=2, keepdim=True)
    ends = [
        source.unsqueeze(-1) / norm,
        *hidden,
        torch.ones_like(norm),
    ]  # each layer maps one end to the next
    return [norm.pow(1 / depth) * left @ right.mT for right, left in pairwise(ends)]


def small_layers(
    repetitions: int,
    dimension: int,
    depth: int = 2,
    *,
    width: int = 8,
    scale: float = 1e-3,
    generator: Generator | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Gaussian layers with entries of standard deviation ``scale / sqrt(fan-in)``, shaped as in `pretrained_layers`.

    Example:
        >>> [tuple(layer.shape) for layer in small_layers(2, 5, 3)]
        [(2, 8, 5), (2, 8, 8), (2, 1, 8)]
    """
    sizes = [dimension, *[width] * (depth - 1), 1]
    return [
        scale
        / math.sqrt(fan_in)
        * torch.randn(repetitions, fan_out, fan_in, generator=generator, dtype=dtype)
        for fan_in, fan_out in pairwise(sizes)
    ]


def descend(
    layers: list[Tensor],
    cross: Tensor,
    covariance: Tensor | None = None,
    *,
    learning_rate: float = 0.01,
    max_steps: int = 20_000,
    tolerance: float = 1e-10,
) -> list[Tensor]:
    r"""Full-batch gradient descent of a deep linear network on a squared loss, batched over repetitions.

    .. math:: \tfrac12 \beta^\top C \beta - \beta^\top c, \qquad \beta^\top = W_L \cdots W_1

    is the loss up to a constant, with :math:`C = X^\top X/n`, :math:`c = X^\top y/n` for samples and :math:`C = I`,
    :math:`c = \beta` for the population loss of a teacher. Small rates follow gradient flow.

    Args:
        layers: Starting layers, first to last, shapes ``[R, out, in]``.
        cross: :math:`c`, shape ``[R, d]``.
        covariance: :math:`C`, shape ``[R, d, d]``; the identity if not given.
        learning_rate: Step size.
        max_steps: Number of steps at most.
        tolerance: Stop when the gradient in :math:`\beta` has no larger entry.

    Returns:
        The trained layers; the given ones are left as they are.

    Raises:
        ValueError: If ``learning_rate`` is not positive.
        RuntimeError: If the descent diverges.

    Example:
        >>> teacher = torch.tensor([[0.6, 0.8]])
        >>> start = small_layers(1, 2, scale=0.1, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(product(descend(start, teacher, learning_rate=0.1, tolerance=1e-6)), teacher)
        True
    """
    check_positive(learning_rate=learning_rate)
    layers = [layer.clone() for layer in layers]
    for step in range(max_steps):
        beta = product(layers).unsqueeze(-1)  # [R, d, 1]
        gradient = (beta if covariance is None else torch.bmm(covariance, beta)) - cross.unsqueeze(
            -1
        )
        if step % 100 == 0:
            size = gradient.abs().max().item()
            if not math.isfinite(size):
                raise RuntimeError(
                    f"Gradient descent diverged; `learning_rate` must be below {learning_rate} here."
                )
            if size <= tolerance:
                break
        for layer, change in zip(layers, _layer_gradients(layers, gradient), strict=True):
            layer.sub_(change, alpha=learning_rate)
    return layers


def product(layers: list[Tensor]) -> Tensor:
    """Return the linear functions ``[R, d]`` that stacks of layers compute."""
    row = layers[-1]
    for layer in reversed(layers[:-1]):
        row = torch.bmm(row, layer)
    return row.squeeze(1)


def _layer_gradients(layers: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Chain rule: layer ``l`` gets ``(W_L … W_{l+1})ᵀ gᵀ (W_{l-1} … W_1)ᵀ``, an outer product of two vectors."""
    below = [gradient]  # W_{l-1} … W_1 g, [R, in, 1]
    for layer in layers[:-1]:
        below.append(torch.bmm(layer, below[-1]))
    above = [torch.ones_like(gradient[:, :1])]  # W_L … W_{l+1}, [R, 1, out]
    for layer in reversed(layers[1:]):
        above.append(torch.bmm(above[-1], layer))
    return [up.mT @ down.mT for up, down in zip(reversed(above), below, strict=True)]
