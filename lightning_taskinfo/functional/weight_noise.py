r"""Samples and divergence of noisy weights, with gradients written by hand.

A noisy weight costs a few passes over memory a step beside a network's own work, and in a small network these are most
of the step. What autograd would derive from :math:`\mu + e^{\rho/2}\varepsilon` and from
:func:`.gaussian.gaussian_kl_diag` takes about twice as many.
"""

from typing import Any

import torch
from torch import Tensor


def noisy_weight(mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
    r"""Return :math:`w = \mu + \sigma \odot \varepsilon` with :math:`\sigma^2 = e^{\rho}`.

    Args:
        mean: The :math:`\mu`.
        log_variance: The :math:`\rho`, in the shape of ``mean``; :math:`-\infty` is no noise.
        noise: The :math:`\varepsilon`, standard normal, in the same shape; no gradient flows into it.

    Example:
        >>> noisy_weight(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.5]))
        tensor([1.5000])
    """
    result: Tensor = _NoisyWeight.apply(mean, log_variance, noise)[0]
    return result


def isotropic_kl(mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_log_variance: Tensor) -> Tensor:
    r"""KL divergence of a diagonal Gaussian from one with a single variance, in nats, summed over all entries.

    .. math::
        \mathrm{KL}(Q \,\|\, P) = \tfrac12 \sum_i \Big[ e^{\rho_i} - 1 - \rho_i
            + \frac{(\mu_i - \mu^p_i)^2}{\sigma_p^2} \Big],
        \qquad \rho_i = \log \frac{\sigma_i^2}{\sigma_p^2}

    Args:
        mean: The :math:`\mu`.
        log_variance: The :math:`\log \sigma^2`, in the shape of ``mean``.
        prior_mean: The :math:`\mu^p`, in the same shape.
        prior_log_variance: The :math:`\log \sigma_p^2`, a scalar; no gradient flows into the prior.

    Example:
        >>> one, zero = torch.ones(2), torch.zeros(2)
        >>> isotropic_kl(one, zero, zero, torch.tensor(0.0))
        tensor(1.)
    """
    result: Tensor = _IsotropicKL.apply(mean, log_variance, prior_mean, prior_log_variance)[0]
    return result


# Both keep what the first derivative needs, and make as few new tensors as they can: to map fresh memory costs more
# than to compute on it. Where a second derivative is asked for, which is when backward runs with gradients on, what was
# kept is tied to the inputs again, so that autograd can go on through it.


class _NoisyWeight(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, log_variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        shift = (0.5 * log_variance).exp_().mul_(noise)
        return mean + shift, shift

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for the second output
        ctx.save_for_backward(inputs[1], output[1])  # not the noise: its memory may be drawn into again

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None]:
        if gradient is None:
            return None, None, None
        log_variance, shift = ctx.saved_tensors
        if torch.is_grad_enabled():
            shift = shift * (0.5 * (log_variance - log_variance.detach())).exp()
        return gradient, (gradient * shift).mul_(0.5), None


class _IsotropicKL(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_log_variance: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rho = log_variance - prior_log_variance
        growth = rho.expm1()  # stays accurate where Q comes close to P
        distance, precision = mean - prior_mean, (-prior_log_variance).exp()
        value = 0.5 * (rho.neg_().add_(growth).sum() + precision * distance.square().sum())
        return value, growth, distance.mul_(precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, Tensor | None, None, None]:
        if gradient is None:
            return None, None, None, None
        mean, log_variance, prior_mean, prior_log_variance, growth, slope = ctx.saved_tensors
        if torch.is_grad_enabled():
            growth = (log_variance - prior_log_variance).expm1()
            slope = (mean - prior_mean) * (-prior_log_variance).exp()
        return gradient * slope, (0.5 * gradient) * growth, None, None
