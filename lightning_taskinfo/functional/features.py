"""The number of samples from which training from scratch beats frozen features: a power law, and where it crosses.

Linear transfer can at best reach the part of its target that is outside of the span of the frozen
features, so it starts to hurt where a network trained from scratch gets below that
[Tahir2024, appendix C]_.

.. [Tahir2024, appendix C] Tahir, Ganguli, Rotskoff, *Features are fate: a theory of transfer learning in
   high-dimensional regression*, ICML 2025, arXiv:2410.08194.
"""

from torch import Tensor

from lightning_taskinfo._ranges import check_values


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
        >>> from torch import tensor
        >>> fit_power_law(tensor([1.0, 4.0, 16.0]), tensor([8.0, 4.0, 2.0]))
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
        >>> from torch import tensor
        >>> transfer_onset(tensor([0.0, 0.5]), 8.0, 0.5)
        tensor([ inf, 256.])
    """
    check_values("positive", amplitude=amplitude, exponent=exponent)
    return (amplitude / outside).pow(1 / exponent)
