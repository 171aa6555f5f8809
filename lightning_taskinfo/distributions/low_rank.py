"""The post-distribution of a curvature that is a diagonal plus a few directions, by Woodbury's identity."""

from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo.distributions.curvature import LowRankCurvature
from lightning_taskinfo.distributions.gaussian import (
    IsotropicGaussian,
    WeightGaussian,
    named_weights,
)


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
        mean: Mapping[str, Tensor],
        pre: IsotropicGaussian,
        curvature: LowRankCurvature,
        beta: float,
    ) -> None:
        super().__init__(mean)
        for part in (curvature.diagonal, curvature.factor):
            if part.keys() != self.mean.keys():
                wrong = sorted(part.keys() ^ self.mean.keys())
                raise ValueError(
                    f"`curvature` must cover every parameter once, got none or several for {wrong}."
                )
        # [k]
        self._prior_std = self._flat(
            {name: torch.full_like(m, pre.std[name]) for name, m in self.mean.items()}
        )
        self._stretch = 1 + self._prior_std**2 * self._flat(curvature.diagonal) / beta  # E, [k]
        # [k, r]
        U = torch.cat([curvature.factor[name].double().flatten(1) for name in self.mean], dim=1).T
        V = (
            (self._prior_std / self._stretch.sqrt())[:, None]
            * U
            * (curvature.scales.double() / beta).sqrt()
        )
        squares, R = torch.linalg.eigh(V.T @ V)
        used = squares > 1e-14 * squares.max().clamp_min(torch.finfo(torch.float64).tiny)
        self._squares = squares[used]  # σ², [r]
        self._directions = V @ R[:, used] / self._squares.sqrt()  # Q, [k, r]

    def sample(self, generator: Generator | None = None) -> ParamDict:  # noqa: D102
        z = torch.cat([self._noise(name, generator).flatten() for name in self.mean]).double()
        shrink = 1 - (1 + self._squares).rsqrt()
        z = z - self._directions @ (shrink * (self._directions.T @ z))  # (I + VVᵀ)^{-1/2} z
        noise = (self._prior_std * self._stretch.rsqrt() * z).split(
            [mean.numel() for mean in self.mean.values()]
        )
        return {
            n: m + part.view_as(m).to(m.dtype)
            for (n, m), part in zip(self.mean.items(), noise, strict=True)
        }

    def log_det(self) -> Tensor:  # noqa: D102
        return (
            2 * self._prior_std.log().sum()
            - self._stretch.log().sum()
            - self._squares.log1p().sum()
        )

    def kl(self, pre: IsotropicGaussian) -> Tensor:  # noqa: D102
        shift = self._squared_shift(pre)
        std = self._flat(
            {name: torch.full_like(mean, pre.std[name]) for name, mean in self.mean.items()}
        )
        plain = (self._prior_std / std) ** 2 / self._stretch  # diag(E⁻¹), in units of `pre`
        shrink = self._squares / (1 + self._squares)
        trace = plain.sum() - (shrink * (plain[:, None] * self._directions**2).sum(0)).sum()
        return 0.5 * (shift + trace - len(std) + 2 * std.log().sum() - self.log_det())

    def _flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].detach().double().flatten() for name in self.mean])


def low_rank_post_distribution(
    weights: nn.Module | Mapping[str, Tensor],
    pre: IsotropicGaussian,
    curvature: LowRankCurvature,
    beta: float,
) -> LowRankGaussian:
    """Return the post-distribution of a low-rank curvature; see ``post_distribution``."""
    return LowRankGaussian(named_weights(weights), pre, curvature, beta)
