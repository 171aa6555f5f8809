"""Information in the weights of a trained network, from a diagonal curvature."""

from typing import NamedTuple

from torch import Tensor


class WeightInformation(NamedTuple):
    r"""What :func:`information_in_weights` returns; float64 scalars.

    Attributes:
        kl: Information in the weights, :math:`\mathrm{KL}(Q\,\|\,P)`, in nats.
        effective_parameters: How many weights the data, rather than the pre-distribution, determine.
        curvature_penalty: :math:`\tfrac12\mathrm{tr}(H\Sigma^*)`, by how much noise in the weights raises the loss.
        beta: Weight of the KL beside the sum of the loss.
    """

    kl: Tensor
    effective_parameters: Tensor
    curvature_penalty: Tensor
    beta: float

    def objective(self, loss: float | Tensor = 0.0) -> Tensor:
        r"""Return :math:`C_\beta \approx L_D(w^*) + \tfrac12\mathrm{tr}(H\Sigma^*) + \beta\,\mathrm{KL}`.

        Args:
            loss: :math:`L_D(w^*)`, the **sum** of the loss over the dataset.
        """
        return loss + self.curvature_penalty + self.beta * self.kl


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
    return prior_std**2 / (1 + _gain(curvature, prior_std, beta))


def information_in_weights(
    curvature: Tensor, displacement: Tensor, *, prior_std: float, beta: float = 1.0
) -> WeightInformation:
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
        KL, effective number of parameters and curvature penalty, each summed over all weights. Parts of a network
        that share ``beta`` add up.

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
    gain = _gain(curvature, prior_std, beta)
    shift = (displacement.double() / prior_std).square()
    determined = gain / (1 + gain)  # 1 − v
    return WeightInformation(
        kl=0.5 * (shift + (gain.log1p() - determined).clamp_min(0)).sum(),
        effective_parameters=determined.sum(),
        curvature_penalty=0.5 * beta * determined.sum(),
        beta=beta,
    )


def _gain(curvature: Tensor, prior_std: float, beta: float) -> Tensor:
    for argument, value in {"prior_std": prior_std, "beta": beta}.items():
        if not value > 0:
            raise ValueError(f"`{argument}` must be positive, got {value}.")
    h = curvature.double()
    if bool((h < 0).any()):
        raise ValueError(f"`curvature` must be non-negative, got {h.min().item()}.")
    return prior_std**2 * h / beta
