"""Information in the weights of a trained network, from a diagonal curvature."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_taskinfo._ranges import check_positive

# Gains in float64 at once: intermediates stay in the cache, and their memory is used again.
BLOCK = 1 << 16
LARGE = 1e19  # gains up to which the product of sixteen is finite


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

    def objective(self, loss: float | Tensor = 0.0) -> Tensor:
        r"""Return the quadratic :math:`C_\beta \approx L_D(w^*) + \tfrac12\mathrm{tr}(H\Sigma^*) + \beta\,\mathrm{KL}`.

        It says nothing about :math:`Q` where the loss is not quadratic over the width of :math:`Q`; see
        :meth:`code_length`.

        Args:
            loss: :math:`L_D(w^*)`, the **sum** of the loss over the dataset.
        """
        return loss + self.curvature_penalty + self.beta * self.kl

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
    parts = list(parts)

    def total(term: str) -> Tensor:
        values = [getattr(part, term) for part in parts]
        return torch.stack(values).sum()

    return InformationTerms(
        displacement=total("displacement"),
        curvature=total("curvature"),
        effective_parameters=total("effective_parameters"),
        curvature_penalty=total("curvature_penalty"),
        beta=parts[0].beta,
    )


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
    gain = prior_std**2 / beta
    return prior_std**2 / (1 + _non_negative(curvature) * gain)


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
    (terms,) = information_sweep(curvature, displacement, prior_stds=[prior_std], beta=beta)
    return terms


def information_sweep(
    curvature: Tensor,
    displacement: Tensor,
    *,
    prior_stds: Sequence[float],
    beta: float = 1.0,
) -> list[InformationTerms]:
    r"""Information in the weights for several widths of the pre-distribution, from one pass over the weights.

    The curvature may be the eigenvalues of a matrix, the displacement then being in its basis, or in any other of the
    same group of weights: the pre-distribution is isotropic, so that only the length of the displacement counts.

    Args:
        curvature: As for :func:`information_in_weights`.
        displacement: As for :func:`information_in_weights`.
        prior_stds: Values of :math:`\lambda`.
        beta: Weight of the KL beside the sum of the loss.

    Returns:
        What :func:`information_in_weights` returns, for each of ``prior_stds``.

    Example:
        >>> from torch import tensor
        >>> [r.kl for r in information_sweep(tensor([1.0]), tensor([0.0]), prior_stds=[1.0, 2.0])]
        [tensor(0.0966, dtype=torch.float64), tensor(0.4047, dtype=torch.float64)]
    """
    if curvature.shape != displacement.shape:
        shapes = f"{list(displacement.shape)} for {list(curvature.shape)}"
        raise ValueError(f"`displacement` must have the shape of `curvature`, got {shapes}.")
    moved = displacement.double().flatten()
    by_group = terms_by_group(
        {"": curvature}, {"": moved.dot(moved).item()}, prior_stds=prior_stds, beta=beta
    )
    return [terms[""] for terms in by_group]


def terms_by_group(
    curvatures: Mapping[str, Tensor],
    squared_distances: Mapping[str, float],
    *,
    prior_stds: Sequence[float],
    beta: float,
) -> list[dict[str, InformationTerms]]:
    r"""As :func:`information_sweep`, of several groups of weights, from the lengths of their displacements alone.

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
    check_positive(beta=beta)
    for std in prior_stds:
        check_positive(prior_std=std)
    variances = torch.tensor(
        [std**2 for std in prior_stds], dtype=torch.float64, device="cpu"
    )  # [widths]
    scales = variances / beta
    largest = scales.max().item()
    rows = [_sums_of(curvatures[name], scales, largest) for name in squared_distances]
    sums = torch.stack(rows) if rows else variances.new_zeros(0, 2, len(variances))
    determined, logarithms = sums.unbind(1)  # [groups, widths]
    distances = variances.new_tensor([*squared_distances.values()]).unsqueeze(1)
    displacements = 0.5 * distances / variances
    narrowing = 0.5 * (logarithms - determined).clamp_min(0)
    penalties = 0.5 * beta * determined
    columns = torch.stack((displacements, narrowing, determined, penalties))  # [4, groups, widths]
    found: list[dict[str, InformationTerms]] = [{} for _ in prior_stds]
    for group, name in enumerate(squared_distances):
        for width, terms in enumerate(found):
            displacement, curvature, effective, penalty = columns[:, group, width].unbind()
            terms[name] = InformationTerms(displacement, curvature, effective, penalty, beta)
    return found


def evidence_prior_std(curvature: Tensor, displacement: Tensor, *, beta: float = 1.0) -> float:
    r"""Width of the pre-distribution with the smallest quadratic :math:`C_\beta`.

    .. math:: \lambda^2\,k_{eff}(\lambda) = \|\Delta\|^2,
        \qquad k_{eff}(\lambda) = \sum_i \frac{\lambda^2 h_i}{\lambda^2 h_i + \beta}

    The left side grows with :math:`\lambda`, so that there is one root; it is found by bisection in
    :math:`\log\lambda`. **A diagnostic**: the Gaussian that belongs to it may destroy the network that it stands for,
    see :meth:`InformationTerms.code_length`.

    Args:
        curvature: Diagonal :math:`h_i` of the curvature of the **sum** of the loss, non-negative.
        displacement: :math:`\Delta = w^* - w_0`, the same shape.
        beta: Weight of the KL beside the sum of the loss.

    Returns:
        :math:`\lambda`; 0 where nothing has moved, and NaN (not estimable) where there is no curvature.

    Example:
        >>> from torch import tensor
        >>> round(evidence_prior_std(tensor([2.0]), tensor([1.0])), 4)  # λ⁴h = (λ²h + 1)Δ²
        1.1688
    """
    check_positive(beta=beta)
    h = _non_negative(curvature).flatten()
    h = h[h > 0]
    distance = displacement.double().square().sum().item()
    if not distance:
        return 0.0
    if not len(h):
        return math.nan

    def excess(log_std: float) -> float:
        """Logarithm of the left side over the right."""
        gain = h * (math.exp(2 * log_std) / beta)
        effective = (gain / (gain + 1)).sum().item()
        if not effective:
            return -math.inf
        return 2 * log_std + math.log(effective / distance)

    low = 0.5 * math.log(distance / len(h))  # k_eff is at most the number of weights
    high = low
    step = 1.0
    while excess(high) < 0:
        high += step
        step *= 2
    while high - low > 1e-12 * max(1.0, abs(high)):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if excess(middle) > 0:
            high = middle
        else:
            low = middle
    return math.exp(0.5 * (low + high))


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


def _sums_of(curvature: Tensor, scales: Tensor, largest_scale: float) -> Tensor:
    """Return both sums of :func:`_sums` over all weights, ``[2, widths]``, on the CPU."""
    products = _largest(curvature) * largest_scale < LARGE
    scales = scales.to(curvature.device)
    found = []
    for h in curvature.reshape(-1).split(BLOCK // len(scales)):
        found.append(_sums(h.double(), scales, products=products))
    sums = found[0] if len(found) == 1 else torch.stack(found).sum(0)
    return sums.cpu()


def _sums(h: Tensor, scales: Tensor, *, products: bool) -> Tensor:
    r"""Return :math:`\sum 1-v = \sum r/(1+r)` and :math:`-\sum\log v = \sum\log(1+r)` for each scale of the gains.

    Logarithms cost more than all else, and sixteen gains can share one: :math:`(1+a)(1+b) = 1 + (a+b+ab)`, all terms of
    which are positive, so that small gains lose nothing. A pair shares a division in the same way. ``products`` says
    whether gains are small enough for that.
    """
    missing = -len(h) % 16 if products else 0
    padded = pad(h, (0, missing)) if missing else h
    gain = padded * scales.unsqueeze(1)  # [widths, weights]
    if not products:
        known = gain / (gain + 1)
        return torch.stack((known.sum(1), gain.log1p().sum(1)))
    a, b = gain.chunk(2, 1)
    product = a * b
    gain = (a + b).add_(product)
    known = product.add_(gain).div_(gain + 1).sum(1)
    for _ in range(3):
        a, b = gain.chunk(2, 1)
        gain = torch.addcmul(b, a, b).add_(a)
    return torch.stack((known, gain.log1p_().sum(1)))


def _non_negative(curvature: Tensor) -> Tensor:
    _largest(curvature)
    return curvature.double()


def _largest(curvature: Tensor) -> float:
    """Return the largest curvature, NaN if there is one, 0 of none; none may be below 0."""
    if not curvature.numel():
        return 0.0
    smallest, largest = curvature.aminmax()
    if bool(smallest < 0):
        raise ValueError(f"`curvature` must be non-negative, got {smallest.item()}.")
    return largest.item()
