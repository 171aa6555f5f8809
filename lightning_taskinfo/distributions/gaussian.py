"""Gaussians over weights: isotropic, block-diagonal in bases of their own, and of low rank by Woodbury's identity."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._observe import (
    HALVES,
    ParamDict,
    at_least_float32,
    full_precision,
    holding,
    trainable_parameters,
)
from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo.distributions.curvature import CurvatureBlock, LowRankCurvature

Weights: TypeAlias = Mapping[str, Tensor]
Curvature: TypeAlias = Sequence[CurvatureBlock] | LowRankCurvature


class WeightGaussian(ABC):
    """A Gaussian over named weights that can be drawn from, measured, and put into a module for a while.

    The mean of half-precision weights is kept, and drawn around, in float32: a narrow Gaussian
    rounded to bfloat16 has another width than its divergence is computed for.

    Args:
        mean: The mean by parameter name.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> before = layer.weight.clone()
        >>> with pre_distribution(layer, prior_std=1.0).with_weights(layer):
        ...     bool((layer.weight == before).all())
        False
        >>> bool((layer.weight == before).all())
        True
    """

    def __init__(self, mean: Weights) -> None:
        self.mean: ParamDict = {}
        for name, value in mean.items():
            self.mean[name] = at_least_float32(value.detach()).clone()

    @abstractmethod
    def sample(self, generator: Generator | None = None) -> ParamDict:
        """Draw weights, by parameter name."""

    @abstractmethod
    def log_det(self) -> Tensor:
        """Return the log-determinant of the covariance, float64 scalar."""

    @abstractmethod
    def kl(self, pre: "IsotropicGaussian") -> Tensor:
        """Return ``KL(self‖pre)`` in nats, float64 scalar."""

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
        whole = full_precision(model) if rounded else nullcontext()
        with whole, holding(own, drawn):
            yield model

    def _squared_shift(self, pre: "IsotropicGaussian") -> Tensor:
        """``Δᵀ Λ⁻¹ Δ``, after seeing that both Gaussians are over the same weights."""
        if self.mean.keys() != pre.mean.keys():
            names = sorted(self.mean.keys() ^ pre.mean.keys())
            raise ValueError(f"`pre` must have the same parameters, got a difference in {names}.")
        squares = []
        for name, mean in self.mean.items():
            shift = mean.double() - pre.mean[name].double()
            relative = shift / pre.std[name]
            squares.append(relative.square().sum())
        return torch.stack(squares).sum()


class BlockGaussian(WeightGaussian):
    """Independent groups of weights, each diagonal in a basis of its own.

    Args:
        mean: The mean by parameter name.
        blocks: Groups whose ``eigenvalues`` are the **variances** in the group's basis, every
            parameter in one.

    Example:
        >>> variances = [CurvatureBlock(("w",), torch.tensor([[4.0, 0.25]], dtype=torch.float64))]
        >>> BlockGaussian({"w": torch.zeros(2)}, variances).log_det()  # log 4 + log 1/4
        tensor(0., dtype=torch.float64)
    """

    def __init__(self, mean: Weights, blocks: Sequence[CurvatureBlock]) -> None:
        super().__init__(mean)
        names = [name for block in blocks for name in block.names]
        check_cover(self.mean, names)
        self.blocks = list(blocks)

    @cached_property
    def _drawing(self) -> list[CurvatureBlock]:
        """The blocks with standard deviations, in the weights' own precision: thousands of networks are drawn."""
        drawing = []
        for block in self.blocks:
            dtype = self.mean[block.names[0]].dtype
            left, right = block.left, block.right
            if left is not None:
                left = left.to(dtype)
            if right is not None:
                right = right.to(dtype)
            std = block.eigenvalues.sqrt().to(dtype)
            drawing.append(CurvatureBlock(block.names, std, left, right))
        return drawing

    def sample(self, generator: Generator | None = None) -> ParamDict:  # noqa: D102
        shapes = {name: mean.shape for name, mean in self.mean.items()}
        drawn: ParamDict = {}
        for block in self._drawing:
            noise = block.eigenvalues * _randn_like(block.eigenvalues, generator)
            if block.right is not None:
                noise = noise @ block.right.T
            if block.left is not None:
                noise = block.left @ noise
            drawn |= block.unpack(noise, shapes)
        return {name: mean + drawn[name] for name, mean in self.mean.items()}

    def log_det(self) -> Tensor:  # noqa: D102
        logs = [block.eigenvalues.log().sum() for block in self.blocks]
        return torch.stack(logs).sum()

    def kl(self, pre: "IsotropicGaussian") -> Tensor:  # noqa: D102
        total = self._squared_shift(pre)
        for block in self.blocks:
            variance = block_std(block, pre) ** 2
            rho = (block.eigenvalues / variance).log()  # [R, D]
            widths = rho.expm1() - rho
            total = total + widths.sum()
        return 0.5 * total


class IsotropicGaussian(BlockGaussian):
    """Independent weights, one standard deviation a parameter tensor; see :func:`pre_distribution`.

    Args:
        mean: The mean by parameter name.
        std: The standard deviation by parameter name, positive.

    Example:
        >>> wide, narrow = (IsotropicGaussian({"w": torch.zeros(2)}, {"w": std}) for std in (2.0, 1.0))
        >>> wide.kl(narrow)  # 2 * (4 - 1 - log 4) / 2
        tensor(1.6137, dtype=torch.float64)
    """

    def __init__(self, mean: Weights, std: Mapping[str, float]) -> None:
        self.std: dict[str, float] = {}
        blocks = []
        for name, value in mean.items():
            check_positive(prior_std=std[name])
            self.std[name] = float(std[name])
            variance = torch.tensor(
                self.std[name] ** 2,
                dtype=torch.float64,
                device=value.device,
            )
            variances = variance.expand(1, value.numel())  # one number in memory
            blocks.append(CurvatureBlock((name,), variances))
        super().__init__(mean, blocks)


def pre_distribution(
    center: nn.Module | Weights, *, prior_std: float | Mapping[str, float]
) -> IsotropicGaussian:
    r"""Pre-distribution of the weights, :math:`P = N(w_0, \lambda^2 I)`.

    Args:
        center: :math:`w_0`: a module at its start (its trainable parameters), or tensors by
            parameter name.
        prior_std: :math:`\lambda`, a standard deviation; for all weights, or by parameter name.

    Example:
        >>> pre_distribution({"weight": torch.zeros(2)}, prior_std=0.5).log_det()  # 2 log 0.25
        tensor(-2.7726, dtype=torch.float64)
    """
    mean = named_weights(center)
    if not isinstance(prior_std, Mapping):
        prior_std = dict.fromkeys(mean, prior_std)
    return IsotropicGaussian(mean, prior_std)


def block_std(block: CurvatureBlock, pre: IsotropicGaussian) -> float:
    """Return the one standard deviation ``pre`` has in a block: a rotated basis needs it to be one."""
    stds = {pre.std[name] for name in block.names}
    if len(stds) > 1:
        raise ValueError(
            f"`prior_std` must be the same for {block.names}, which share a block, got {sorted(stds)}."
        )
    return stds.pop()


def check_cover(mean: Weights, names: Iterable[str]) -> None:
    """Refuse a curvature that misses a parameter, or holds one twice."""
    missing = Counter([*mean])
    missing.subtract([*names])
    wrong = sorted(name for name, count in missing.items() if count)
    if wrong:
        raise ValueError(
            f"`curvature` must cover every parameter once, got none or several for {wrong}."
        )


def _randn_like(like: Tensor, generator: Generator | None) -> Tensor:
    return torch.randn(
        like.shape,
        generator=generator,
        dtype=like.dtype,
        device=like.device,
    )


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers of some tensors in a row, float64."""
    rows = []
    for tensor in tensors:
        rows.append(tensor.detach().double().flatten())
    return torch.cat(rows)


def named_weights(source: nn.Module | Weights) -> Weights:
    """Return a module's trainable parameters by name, or the mapping itself."""
    if isinstance(source, nn.Module):
        return trainable_parameters(source)
    return source


class LowRankGaussian(WeightGaussian):
    r"""Post-distribution for :math:`H = \mathrm{diag}(d) + U\,\mathrm{diag}(s)\,U^\top`.

    Measured in units of the pre-distribution, :math:`\Sigma = \Lambda^{1/2} M^{-1} \Lambda^{1/2}`
    with

    .. math::
        M = I + \Lambda^{1/2} H \Lambda^{1/2} / \beta = E^{1/2} (I + V V^\top) E^{1/2}, \qquad
        V = Q\, \mathrm{diag}(\sigma)\, R^\top \in \mathbb{R}^{k \times r},

    :math:`E` diagonal. Woodbury's identity and the matrix determinant lemma then need the :math:`r \times r`
    eigenproblem of :math:`V^\top V` only, never a :math:`k \times k` matrix.

    Args:
        mean: The mean by parameter name.
        pre: The pre-distribution it was made for.
        curvature: The curvature of the sum of the loss.
        beta: Weight of the KL beside the sum of the loss.

    Example:
        >>> zero, one = {"w": torch.zeros(2)}, torch.tensor([1.0])
        >>> pre = IsotropicGaussian(zero, {"w": 1.0})
        >>> curvature = LowRankCurvature(zero, {"w": torch.tensor([[1.0, 0.0]])}, one)  # felt in one direction
        >>> LowRankGaussian(zero, pre, curvature, beta=1.0).log_det()  # log 1/2, and log 1
        tensor(-0.6931, dtype=torch.float64)
    """

    def __init__(
        self,
        mean: Weights,
        pre: IsotropicGaussian,
        curvature: LowRankCurvature,
        beta: float,
    ) -> None:
        super().__init__(mean)
        check_cover(self.mean, curvature.diagonal)
        check_cover(self.mean, curvature.factor)
        self._prior_std = self._flat_std(pre)  # [k]
        diagonal = _flat(curvature.diagonal[name] for name in self.mean)
        self._stretch = 1 + self._prior_std**2 * diagonal / beta  # E, [k]
        factors = []
        for name in self.mean:
            factor = curvature.factor[name].double()
            factors.append(factor.flatten(1))
        U = torch.cat(factors, dim=1).T  # [k, r]
        scales = (curvature.scales.double() / beta).sqrt()
        units = self._prior_std / self._stretch.sqrt()
        V = units[:, None] * U * scales
        squares, R = torch.linalg.eigh(V.T @ V)
        tiny = torch.finfo(torch.float64).tiny
        largest = squares.max().clamp_min(tiny)
        used = squares > 1e-14 * largest
        self._squares = squares[used]  # σ², [r]
        self._directions = V @ R[:, used] / self._squares.sqrt()  # Q, [k, r]

    def sample(self, generator: Generator | None = None) -> ParamDict:  # noqa: D102
        means = self.mean.values()
        noises = [_randn_like(mean, generator) for mean in means]
        z = _flat(noises)
        shrink = 1 - (1 + self._squares).rsqrt()
        along = self._directions.T @ z
        z = z - self._directions @ (shrink * along)  # (I + VVᵀ)^{-1/2} z
        noise = self._prior_std * self._stretch.rsqrt() * z
        sizes = [mean.numel() for mean in means]
        parts = noise.split(sizes)
        drawn = {}
        for (name, mean), part in zip(self.mean.items(), parts, strict=True):
            shift = part.view_as(mean)
            drawn[name] = mean + shift.to(mean.dtype)
        return drawn

    def log_det(self) -> Tensor:  # noqa: D102
        prior = 2 * self._prior_std.log().sum()
        unshrunk = prior - self._stretch.log().sum()
        return unshrunk - self._squares.log1p().sum()

    def kl(self, pre: IsotropicGaussian) -> Tensor:  # noqa: D102
        shift = self._squared_shift(pre)
        std = self._flat_std(pre)
        plain = (self._prior_std / std) ** 2 / self._stretch  # diag(E⁻¹), in units of `pre`
        shrink = self._squares / (1 + self._squares)
        by_weight = plain[:, None] * self._directions**2  # [k, r]
        along = by_weight.sum(0)
        trace = plain.sum() - (shrink * along).sum()
        log_ratio = 2 * std.log().sum() - self.log_det()
        return 0.5 * (shift + trace - len(std) + log_ratio)

    def _flat_std(self, pre: IsotropicGaussian) -> Tensor:
        stds = []
        for name, mean in self.mean.items():
            stds.append(torch.full_like(mean, pre.std[name]))
        return _flat(stds)


def post_distribution(
    weights: nn.Module | Weights,
    pre: IsotropicGaussian,
    curvature: Curvature,
    *,
    beta: float = 1.0,
) -> BlockGaussian | LowRankGaussian:
    r"""Best Gaussian around trained weights, given the curvature of the loss there.

    .. math::
        Q = N(w^*, \Sigma^*), \qquad
        \Sigma^* = \arg\min_\Sigma\, \tfrac12\mathrm{tr}(H\Sigma) + \beta\,\mathrm{KL}(Q\|P)
        = \beta\,(H + \beta\Lambda^{-1})^{-1}

    Args:
        weights: :math:`w^*`: a trained module (its trainable parameters), or tensors by parameter
            name.
        pre: The pre-distribution :math:`P = N(w_0, \Lambda)`.
        curvature: :math:`H` of the **sum** of the loss, from one of the ``*_curvature`` functions.
        beta: Weight of the KL beside the sum of the loss; 1 is the evidence lower bound.

    Returns:
        A Gaussian that can ``sample``, give its ``kl(pre)`` and ``log_det()``, and be put into a
        module for a while.

    Example:
        >>> pre = pre_distribution({"w": torch.zeros(2)}, prior_std=1.0)
        >>> curvature = [CurvatureBlock(("w",), torch.tensor([[0.0, 3.0]]).double())]
        >>> post = post_distribution({"w": torch.ones(2)}, pre, curvature)
        >>> post.log_det(), post.kl(pre)
        (tensor(-1.3863, dtype=torch.float64), tensor(1.3181, dtype=torch.float64))
    """
    check_positive(beta=beta)
    mean = named_weights(weights)
    if isinstance(curvature, LowRankCurvature):
        return LowRankGaussian(mean, pre, curvature, beta)
    blocks = []
    for block in curvature:
        variance = block_std(block, pre) ** 2
        shrunk = variance / (1 + variance * block.eigenvalues / beta)
        blocks.append(replace(block, eigenvalues=shrunk))
    return BlockGaussian(mean, blocks)
