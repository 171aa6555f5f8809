"""Information in the weights of a trained network, from a diagonal curvature."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_positive

BLOCK = 1 << 16  # gains in float64 at once: intermediates stay in the cache


class InformationTerms(NamedTuple):
    r"""What :func:`information_in_weights` returns; float64 scalars.

    Attributes:
        displacement: :math:`\tfrac12\|\Delta\|^2/\lambda^2`, what the distance from the centre adds to the KL, in nats.
        curvature: The rest of the KL, in nats: what it costs that :math:`Q` is narrower than :math:`P`.
        effective_parameters: How many weights the data, rather than the pre-distribution, determine.
        curvature_penalty: :math:`\tfrac12\mathrm{tr}(H\Sigma^*)`, by how much noise in the weights raises the loss,
            to second order.
        beta: Weight of the KL beside the sum of the loss.
    """

    displacement: Tensor
    curvature: Tensor
    effective_parameters: Tensor
    curvature_penalty: Tensor
    beta: float

    @property
    def kl(self) -> Tensor:
        r"""Information in the weights, :math:`\mathrm{KL}(Q\,\|\,P)`, in nats."""
        return self.displacement + self.curvature

    def objective(self) -> Tensor:
        r"""Return :math:`\tfrac12\mathrm{tr}(H\Sigma^*) + \beta\,\mathrm{KL}`.

        This is what the quadratic :math:`C_\beta` adds to the **sum** of the loss over the dataset. It says nothing
        about :math:`Q` where the loss is not quadratic over the width of :math:`Q`; see :meth:`code_length`.
        """
        return self.curvature_penalty + self.beta * self.kl

    def code_length(self, expected_loss: float | Tensor, *, choices: int = 1) -> Tensor:
        r"""Return :math:`C_\beta = \mathbb{E}_Q[L_D] + \beta\,(\mathrm{KL} + \log J)`.

        With an expected loss that was **measured** on draws of :math:`Q`, and at :math:`\beta = 1`, this is the length
        of a code for the labels.

        Args:
            expected_loss: :math:`\mathbb{E}_Q[L_D]`, a sum over the dataset.
            choices: :math:`J`, from how many widths of the pre-distribution this one was chosen.
        """
        return expected_loss + self.beta * (self.kl + math.log(choices))


def added(parts: Iterable[InformationTerms]) -> InformationTerms:
    """Return the information of several groups of weights together; they share ``beta``.

    Args:
        parts: At least one group's.

    Example:
        >>> from torch import tensor
        >>> part = InformationTerms(tensor(1.0), tensor(2.0), tensor(3.0), tensor(4.0), beta=0.5)
        >>> added([part, part]).kl
        tensor(6.)
    """
    *terms, betas = zip(*parts, strict=True)
    displacement, curvature, effective, penalty = (torch.stack(part).sum() for part in terms)
    return InformationTerms(displacement, curvature, effective, penalty, betas[0])


def post_variance(curvature: Tensor, *, prior_std: float, beta: float = 1.0) -> Tensor:
    r"""Variance of each weight under the best Gaussian post-distribution.

    .. math::
        \Sigma^* = \arg\min_\Sigma \tfrac12\mathrm{tr}(H\Sigma) + \beta\,\mathrm{KL}(Q\|P)
        = \beta\,\big(H + (\beta/\lambda^2) I\big)^{-1}

    Args:
        curvature: Diagonal :math:`h_i = N F_{ii}` of the curvature of the **sum** of the loss, non-negative.
        prior_std: :math:`\lambda`, the standard deviation of the pre-distribution.
        beta: Weight of the KL beside the sum of the loss; 1 is the evidence lower bound.

    Returns:
        The variances, float64, shaped like ``curvature``.

    Example:
        >>> from torch import tensor
        >>> post_variance(tensor([0.0, 1.0, 3.0]), prior_std=1.0)
        tensor([1.0000, 0.5000, 0.2500], dtype=torch.float64)
    """
    check_positive(prior_std=prior_std, beta=beta)
    _check_not_negative(curvature)
    gain = prior_std**2 / beta
    return prior_std**2 / (1 + curvature.double() * gain)


def information_in_weights(
    curvature: Tensor,
    displacement: Tensor,
    *,
    prior_std: float,
    beta: float = 1.0,
) -> InformationTerms:
    r"""Information that the weights hold about the data they were trained on.

    .. math::
        \mathrm{KL}(Q\,\|\,P) = \tfrac12 \sum_i \Big[ \frac{\Delta_i^2}{\lambda^2} + v_i - 1 - \log v_i \Big],
        \qquad v_i = \frac{1}{1 + \lambda^2 h_i/\beta}

    for :math:`P = N(w_0, \lambda^2 I)` before and :math:`Q = N(w^*, \Sigma^*)` after training, with the
    :math:`\Sigma^*` of :func:`post_variance`. For a wide pre-distribution it tends to
    :math:`\tfrac12\log|F| + \tfrac k2\log\lambda^2 + \tfrac k2\log(N/\beta) - \tfrac k2`. The two parts of the
    objective have a closed form together, independent of how it is split:
    :math:`\tfrac12\mathrm{tr}(H\Sigma^*) + \beta\,\mathrm{KL} = \tfrac\beta2\sum_i[\Delta_i^2/\lambda^2 +
    \log(1 + \lambda^2h_i/\beta)]`.

    Everything is written in the gain :math:`r = \lambda^2h/\beta`, with ``log1p``, in float64: a network has many
    weights with a gain of almost 0, and they must add up to almost nothing.

    Args:
        curvature: Diagonal :math:`h_i = N F_{ii}` of the curvature of the **sum** of the loss, non-negative, shape
            ``[...]``.
        displacement: :math:`\Delta = w^* - w_0`, the same shape.
        prior_std: :math:`\lambda`, the standard deviation of the pre-distribution.
        beta: Weight of the KL beside the sum of the loss; 1 is the evidence lower bound.

    Returns:
        Both parts of the KL, effective number of parameters and curvature penalty, each summed over all weights. Parts
        of a network that share ``beta`` add up.

    Example:
        >>> from torch import tensor
        >>> information_in_weights(tensor([0.0, 1.0]), tensor([1.0, 0.0]), prior_std=1.0).kl
        tensor(0.5966, dtype=torch.float64)

    References:
        Achille, Paolini, Mbeng, Soatto, *The information complexity of learning tasks, their structure and their
        distance*, Theorem 5.4.
    """
    if curvature.shape != displacement.shape:
        shapes = f"{list(displacement.shape)} for {list(curvature.shape)}"
        raise ValueError(f"`displacement` must have the shape of `curvature`, got {shapes}.")
    moved = displacement.double().flatten()
    distances = {"": moved.dot(moved).item()}
    (terms,) = terms_by_group({"": curvature}, distances, prior_stds=[prior_std], beta=beta)
    return terms[""]


def terms_by_group(
    curvatures: Mapping[str, Tensor],
    squared_distances: Mapping[str, float],
    *,
    prior_stds: Sequence[float],
    beta: float,
) -> list[dict[str, InformationTerms]]:
    r"""As :func:`information_in_weights`, of several groups of weights, for several widths of the pre-distribution.

    The curvature may be the eigenvalues of a matrix: the pre-distribution is isotropic, so that only the length of the
    displacement counts, in whatever basis.

    Args:
        curvatures: That of each group, as for :func:`information_in_weights`.
        squared_distances: :math:`\|\Delta\|^2` of each group that counts.
        prior_stds: Values of :math:`\lambda`.
        beta: Weight of the KL beside the sum of the loss.

    Returns:
        What :func:`information_in_weights` returns, by group, for each of ``prior_stds``.

    Example:
        >>> from torch import tensor
        >>> (terms,) = terms_by_group({"w": tensor([0.0, 1.0])}, {"w": 1.0}, prior_stds=[1.0], beta=1.0)
        >>> terms["w"].kl
        tensor(0.5966, dtype=torch.float64)
    """
    check_positive(beta=beta, prior_std=prior_stds)
    variances = torch.tensor(prior_stds, dtype=torch.float64, device="cpu").square()  # [widths]
    found: list[dict[str, InformationTerms]] = [{} for _ in prior_stds]
    for name, squared_distance in squared_distances.items():
        determined, logarithms = _sums(curvatures[name], variances / beta)  # [widths]
        displacements = 0.5 * squared_distance / variances
        narrowing = 0.5 * (logarithms - determined).clamp_min(0)
        penalties = 0.5 * beta * determined
        for width, terms in enumerate(found):
            terms[name] = InformationTerms(
                displacements[width], narrowing[width], determined[width], penalties[width], beta
            )
    return found


def label_entropy(counts: Tensor) -> float:
    r"""Entropy of class labels in nats, from how often each occurs among few.

    .. math:: \hat H = \log n - \frac1n\sum_c n_c\log n_c + \frac{m - 1}{2n}

    for :math:`m` classes that occur among :math:`n` labels. The last term is Miller and Madow's: observed frequencies
    are less even than the true ones. Times the number of labels this is what a code for them needs without a model.

    Args:
        counts: How often each class occurs, shape ``[C]``.

    Returns:
        Nats per label; NaN without labels.

    Example:
        >>> from torch import tensor
        >>> round(label_entropy(tensor([50_000, 50_000])), 4)  # log 2
        0.6932
    """
    counts = counts[counts > 0].double()
    if not len(counts):
        return math.nan
    n = counts.sum()
    weighted = (counts * counts.log()).sum()
    plain = n.log() - weighted / n
    missing = (len(counts) - 1) / (2 * n)
    return (plain + missing).item()


def _sums(curvature: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\sum 1-v = \sum r/(1+r)` and :math:`-\sum\log v = \sum\log(1+r)` for each scale of the gains."""
    _check_not_negative(curvature)
    scales = scales.to(curvature.device)
    determined = torch.zeros_like(scales)
    logarithms = torch.zeros_like(scales)
    for h in curvature.flatten().split(BLOCK // len(scales)):
        gain = h.double() * scales.unsqueeze(1)  # [widths, weights]
        determined += (gain / (gain + 1)).sum(1)
        logarithms += gain.log1p_().sum(1)
    return determined.cpu(), logarithms.cpu()


def _check_not_negative(curvature: Tensor) -> None:
    """NaN is let through: what is not estimable gives NaN."""
    if (curvature < 0).any():
        raise ValueError(f"`curvature` must be non-negative, got {curvature.min().item()}.")
