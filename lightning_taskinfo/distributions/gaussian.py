"""Gaussians over the weights of a network: before training, and after."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._observe import (
    HALVES,
    ParamDict,
    at_least_float32,
    full_precision,
    parts,
    trainable_parameters,
)
from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo.distributions.curvature import CurvatureBlock


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

    def __init__(self, mean: Mapping[str, Tensor]) -> None:
        self.mean: ParamDict = {
            name: at_least_float32(value.detach()).clone() for name, value in mean.items()
        }

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
        rounded = any(parameters[name].dtype in HALVES for name in drawn)
        with full_precision(parts(model)) if rounded else nullcontext():
            kept = {name: parameters[name].data for name in drawn}
            try:
                for name, value in drawn.items():
                    parameters[name].data = value
                yield model
            finally:
                for name, value in kept.items():
                    parameters[name].data = value

    def _noise(self, name: str, generator: Generator | None) -> Tensor:
        mean = self.mean[name]
        return torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)

    def _squared_shift(self, pre: "IsotropicGaussian") -> Tensor:
        """``Δᵀ Λ⁻¹ Δ``, after seeing that both Gaussians are over the same weights."""
        if self.mean.keys() != pre.mean.keys():
            names = sorted(self.mean.keys() ^ pre.mean.keys())
            raise ValueError(f"`pre` must have the same parameters, got a difference in {names}.")
        parts = [
            ((self.mean[n].double() - pre.mean[n].double()) / pre.std[n]).square().sum()
            for n in self.mean
        ]
        return torch.stack(parts).sum()


class IsotropicGaussian(WeightGaussian):
    """Independent weights, one standard deviation a parameter tensor; see :func:`pre_distribution`.

    Args:
        mean: The mean by parameter name.
        std: The standard deviation by parameter name, positive.

    Example:
        >>> wide, narrow = (IsotropicGaussian({"w": torch.zeros(2)}, {"w": std}) for std in (2.0, 1.0))
        >>> wide.kl(narrow)  # 2 * (4 - 1 - log 4) / 2
        tensor(1.6137, dtype=torch.float64)
    """

    def __init__(self, mean: Mapping[str, Tensor], std: Mapping[str, float]) -> None:
        super().__init__(mean)
        for name in self.mean:
            check_positive(prior_std=std[name])
        self.std = {name: float(std[name]) for name in self.mean}

    def sample(self, generator: Generator | None = None) -> ParamDict:  # noqa: D102
        return {
            name: mean + self.std[name] * self._noise(name, generator)
            for name, mean in self.mean.items()
        }

    def log_det(self) -> Tensor:  # noqa: D102
        log_std = _on_cpu([self.std[name] for name in self.mean]).log()
        return 2 * (log_std * self._counts()).sum()

    def kl(self, pre: "IsotropicGaussian") -> Tensor:  # noqa: D102
        shift = self._squared_shift(pre)
        ratio = 2 * _on_cpu([self.std[name] / pre.std[name] for name in self.mean]).log()
        return 0.5 * (shift.cpu() + (self._counts() * (ratio.expm1() - ratio)).sum())

    def _counts(self) -> Tensor:
        return _on_cpu([mean.numel() for mean in self.mean.values()])


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

    def __init__(self, mean: Mapping[str, Tensor], blocks: Sequence[CurvatureBlock]) -> None:
        super().__init__(mean)
        check_cover(self.mean, blocks)
        self.blocks = list(blocks)
        self._shapes = {name: value.shape for name, value in self.mean.items()}
        dtypes = [self.mean[block.names[0]].dtype for block in self.blocks]
        self._drawing = [  # in the weights' own precision, once: thousands of networks are drawn
            tuple(
                None if part is None else part.to(dtype)
                for part in (b.eigenvalues.sqrt(), b.left, b.right)
            )
            for b, dtype in zip(self.blocks, dtypes, strict=True)
        ]

    def sample(self, generator: Generator | None = None) -> ParamDict:  # noqa: D102
        drawn: ParamDict = {}
        for block, (std, left, right) in zip(self.blocks, self._drawing, strict=True):
            assert std is not None  # the other two may be
            noise = std * torch.randn(
                std.shape, generator=generator, dtype=std.dtype, device=std.device
            )
            noise = noise if right is None else noise @ right.T
            noise = noise if left is None else left @ noise
            drawn |= block.unpack(noise, self._shapes)
        return {name: mean + drawn[name] for name, mean in self.mean.items()}

    def log_det(self) -> Tensor:  # noqa: D102
        return torch.stack([block.eigenvalues.log().sum() for block in self.blocks]).sum()

    def kl(self, pre: IsotropicGaussian) -> Tensor:  # noqa: D102
        total = self._squared_shift(pre)
        for block in self.blocks:
            ratio = (block.eigenvalues / block_std(block, pre) ** 2).log()  # [R, D]
            total = total + (ratio.expm1() - ratio).sum()
        return 0.5 * total


def pre_distribution(
    center: nn.Module | Mapping[str, Tensor], *, prior_std: float | Mapping[str, float]
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
    std = prior_std if isinstance(prior_std, Mapping) else dict.fromkeys(mean, prior_std)
    return IsotropicGaussian(mean, std)


def block_post_distribution(
    weights: nn.Module | Mapping[str, Tensor],
    pre: IsotropicGaussian,
    curvature: Sequence[CurvatureBlock],
    beta: float,
) -> BlockGaussian:
    """Return the post-distribution of a block-diagonal curvature; see ``post_distribution``."""
    blocks = []
    for block in curvature:
        variance = block_std(block, pre) ** 2
        blocks.append(
            replace(block, eigenvalues=variance / (1 + variance * block.eigenvalues / beta))
        )
    return BlockGaussian(named_weights(weights), blocks)


def block_std(block: CurvatureBlock, pre: IsotropicGaussian) -> float:
    """Return the one standard deviation ``pre`` has in a block: a rotated basis needs it to be one."""
    stds = {pre.std[name] for name in block.names}
    if len(stds) > 1:
        raise ValueError(
            f"`prior_std` must be the same for {block.names}, which share a block, got {sorted(stds)}."
        )
    return stds.pop()


def check_cover(mean: Mapping[str, Tensor], blocks: Sequence[CurvatureBlock]) -> None:
    """Refuse blocks that miss a parameter, or hold one twice."""
    names = [name for block in blocks for name in block.names]
    if sorted(names) != sorted(mean):
        wrong = sorted(set(names) ^ set(mean)) or sorted(
            {name for name in names if names.count(name) > 1}
        )
        raise ValueError(
            f"`curvature` must cover every parameter once, got none or several for {wrong}."
        )


def _on_cpu(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def named_weights(source: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a module's trainable parameters by name, or the mapping itself."""
    return trainable_parameters(source) if isinstance(source, nn.Module) else source
