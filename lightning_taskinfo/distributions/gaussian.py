"""Gaussians over weights: isotropic, and with the curvature of the loss, each parameter in a basis of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from operator import methodcaller
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._nested import take
from lightning_taskinfo._observe import (
    HALVES,
    ParamDict,
    at_least_float32,
    full_precision,
    holding,
    parts,
    trainable_parameters,
)
from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo.fisher import KroneckerFactors
from lightning_taskinfo.functional.information import post_variance


@dataclass(frozen=True)
class CurvatureBlock:
    r"""Curvature of the **sum** of the loss by one parameter, diagonal in a basis of its own.

    The parameter is seen as a matrix :math:`W` with ``R`` rows and ``D`` columns. In the basis
    :math:`\tilde W = U_L^\top W\, U_R` the curvature is diagonal: a basis on both sides is a Kronecker product, one on
    the right a matrix that all rows share. Nothing larger than ``[R, R]`` or ``[D, D]`` is ever formed.

    Attributes:
        eigenvalues: Curvature in that basis, ``R·D`` numbers of any shape, float64.
        left: :math:`U_L`, orthogonal, shape ``[R, R]``; ``None`` is the identity.
        right: :math:`U_R`, orthogonal, shape ``[D, D]``; ``None`` is the identity.

    Example:
        >>> CurvatureBlock(torch.ones(2, 3)).left is None  # two neurons with three inputs, and a diagonal
        True
    """

    eigenvalues: Tensor
    left: Tensor | None = None
    right: Tensor | None = None


Weights: TypeAlias = Mapping[str, Tensor]
Curvature: TypeAlias = Mapping[str, CurvatureBlock]


def turned(tensor: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Return ``left @ tensor @ right.T``, the tensor seen as a matrix; ``None`` is the identity."""
    matrix = tensor
    if right is not None:
        matrix = matrix.reshape(-1, len(right)) @ right.T
    if left is not None:
        matrix = left @ matrix.reshape(len(left), -1)
    return matrix.reshape(tensor.shape)


def diagonal_curvature(diagonal: Weights) -> Curvature:
    """Wrap a diagonal of the curvature of the sum of the loss, such as ``N`` times the diagonal Fisher.

    Args:
        diagonal: The diagonal by parameter name, non-negative, shaped like the parameters.

    Example:
        >>> diagonal_curvature({"weight": torch.ones(1, 2)})["weight"].eigenvalues
        tensor([[1., 1.]], dtype=torch.float64)
    """
    return {name: CurvatureBlock(values.double()) for name, values in diagonal.items()}


def kronecker_curvature(
    factors: Mapping[str, KroneckerFactors], *, scale: float = 1.0
) -> Curvature:
    r"""Give each parameter a Kronecker product, :math:`H = s\,\mathrm{rows} \otimes \mathrm{columns}`.

    Args:
        factors: By parameter name, see :func:`~lightning_taskinfo.fisher.kronecker_factors`.
        scale: The :math:`s`; the number of samples turns factors that are means into those of the sum of the loss.

    Example:
        >>> factors = KroneckerFactors(torch.diag(torch.tensor([3.0, 5.0])), torch.tensor([1.0, 2.0]))
        >>> kronecker_curvature({"weight": factors}, scale=10.0)["weight"].eigenvalues.tolist()
        [[30.0, 60.0], [50.0, 100.0]]
    """
    blocks = {}
    for name, of_parameter in factors.items():
        eigenvalues, left, right = of_parameter.eigen()
        blocks[name] = CurvatureBlock(scale * eigenvalues, left, right)
    return blocks


class WeightGaussian:
    """Independent Gaussians of named weights, each diagonal in a basis of its own.

    It can be drawn from, measured, and put into a module for a while. The mean of half-precision
    weights is kept, and drawn around, in float32: a narrow Gaussian rounded to bfloat16 has another
    width than its divergence is computed for.

    Args:
        mean: The mean by parameter name.
        blocks: By parameter name, blocks whose ``eigenvalues`` are the **variances**.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> before = layer.weight.clone()
        >>> variances = {"weight": CurvatureBlock(torch.ones(1, 2)), "bias": CurvatureBlock(torch.ones(1))}
        >>> with WeightGaussian(dict(layer.named_parameters()), variances).with_weights(layer):
        ...     bool((layer.weight == before).all())
        False
        >>> bool((layer.weight == before).all())
        True
    """

    def __init__(self, mean: Weights, blocks: Curvature) -> None:
        self.mean = {name: at_least_float32(w.detach()).clone() for name, w in mean.items()}
        self.blocks = blocks

    @contextmanager
    def with_weights(
        self, model: nn.Module, generator: Generator | None = None
    ) -> Iterator[nn.Module]:
        """Put one draw into ``model``, and its own weights back afterwards, also on an exception.

        The parameters stay the same objects, and what comes back are the very same tensors, bit for
        bit. Where a drawn weight is in half precision, the whole module is float32 meanwhile, and
        needs inputs in float32.

        Args:
            model: A module with parameters of these names and shapes.
            generator: Where the draw comes from.

        Yields:
            The same module.
        """
        parameters = dict(model.named_parameters())
        drawn = self.sample(generator)
        own = {name: parameters[name] for name in drawn}
        rounded = any(parameter.dtype in HALVES for parameter in own.values())
        whole = full_precision(parts(model)) if rounded else nullcontext()
        with whole, holding(own, drawn):
            yield model

    @cached_property
    def _drawing(self) -> Curvature:
        """The blocks with standard deviations, in the weights' own precision: thousands of networks are drawn."""
        drawing = {}
        for name, mean in self.mean.items():
            block = self.blocks[name]
            converted = methodcaller("to", mean.dtype)
            parts = (block.eigenvalues.sqrt(), block.left, block.right)
            drawing[name] = CurvatureBlock(*take(parts, converted))
        return drawing

    def sample(self, generator: Generator | None = None) -> ParamDict:
        """Draw weights, by parameter name."""
        drawn = {}
        for name, block in self._drawing.items():
            std = block.eigenvalues
            noise = torch.randn(std.shape, generator=generator, dtype=std.dtype, device=std.device)
            mean = self.mean[name]
            drawn[name] = mean + turned(std * noise, block.left, block.right).view_as(mean)
        return drawn

    def kl(self, pre: "IsotropicGaussian") -> Tensor:
        """Return ``KL(self‖pre)`` in nats, float64 scalar."""
        names = sorted(self.mean.keys() ^ pre.mean.keys())
        if names:
            raise ValueError(f"`pre` must have the same parameters, got a difference in {names}.")
        terms = []
        for name, mean in self.mean.items():
            shift = mean.double() - pre.mean[name].double()
            terms.append((shift / pre.std[name]).square().sum())
            rho = (self.blocks[name].eigenvalues / pre.std[name] ** 2).log()
            terms.append((rho.expm1() - rho).sum())
        return 0.5 * torch.stack(terms).sum()


class IsotropicGaussian:
    r"""Pre-distribution of the weights, :math:`P = N(w_0, \lambda^2 I)`.

    Args:
        center: :math:`w_0`: a module at its start (its trainable parameters), or tensors by
            parameter name.
        prior_std: :math:`\lambda`, a standard deviation; for all weights, or by parameter name.

    Example:
        >>> IsotropicGaussian({"w": torch.zeros(2)}, prior_std=0.5).std
        {'w': 0.5}
    """

    def __init__(
        self, center: nn.Module | Weights, *, prior_std: float | Mapping[str, float]
    ) -> None:
        self.mean = {name: w.detach().clone() for name, w in named_weights(center).items()}
        if not isinstance(prior_std, Mapping):
            prior_std = dict.fromkeys(self.mean, prior_std)
        self.std = {name: float(prior_std[name]) for name in self.mean}
        check_positive(prior_std=[*self.std.values()])


def named_weights(source: nn.Module | Weights) -> Weights:
    """Return a module's trainable parameters by name, or the mapping itself."""
    if isinstance(source, nn.Module):
        return trainable_parameters(source)
    return source


def post_distribution(
    weights: nn.Module | Weights,
    pre: IsotropicGaussian,
    curvature: Curvature,
    *,
    beta: float = 1.0,
) -> WeightGaussian:
    r"""Best Gaussian around trained weights, given the curvature of the loss there.

    .. math::
        Q = N(w^*, \Sigma^*), \qquad
        \Sigma^* = \arg\min_\Sigma\, \tfrac12\mathrm{tr}(H\Sigma) + \beta\,\mathrm{KL}(Q\|P)
        = \beta\,(H + \beta\Lambda^{-1})^{-1}

    Args:
        weights: :math:`w^*`: a trained module (its trainable parameters), or tensors by parameter
            name.
        pre: The pre-distribution :math:`P = N(w_0, \Lambda)`.
        curvature: :math:`H` of the **sum** of the loss by parameter name, from one of the
            ``*_curvature`` functions.
        beta: Weight of the KL beside the sum of the loss; 1 is the evidence lower bound.

    Returns:
        A Gaussian that can ``sample``, give its ``kl(pre)``, and be put into a module for a while.

    Example:
        >>> pre = IsotropicGaussian({"w": torch.zeros(2)}, prior_std=1.0)
        >>> curvature = diagonal_curvature({"w": torch.tensor([0.0, 3.0])})
        >>> post = post_distribution({"w": torch.ones(2)}, pre, curvature)
        >>> post.kl(pre)
        tensor(1.3181, dtype=torch.float64)
    """
    mean = named_weights(weights)
    blocks = {}
    for name in mean:
        block = curvature[name]
        variances = post_variance(block.eigenvalues, prior_std=pre.std[name], beta=beta)
        blocks[name] = replace(block, eigenvalues=variances)
    return WeightGaussian(mean, blocks)
