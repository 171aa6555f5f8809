r"""Samples and divergence of noisy weights, with gradients written by hand.

A noisy weight costs a few passes over memory a step beside a network's own work, and in a small network these are most
of the step. What autograd would derive from :math:`\mu + e^{\rho/2}\varepsilon` and from
:func:`.gaussian.gaussian_kl_diag` takes several times as many, and to map fresh memory costs more than to compute on
it: here the sample and the divergence share one backward pass, and ``empty_like`` says where new tensors come from.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Generator, Tensor

__all__ = ["NoisyGaussian", "isotropic_kl", "noisy_weight"]

Allocate = Callable[[Tensor], Tensor]
_LOG2_E = 1 / math.log(2)
_BLOCK = 2**17  # entries that the processor's cache holds while they are worked on


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
    if transformed():
        return mean + (0.5 * log_variance).exp() * noise
    return NoisyGaussian(mean, log_variance).sample(noise)


def isotropic_kl(
    mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_log_variance: Tensor
) -> Tensor:
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
    if transformed():
        rho = log_variance - prior_log_variance
        return (
            0.5
            * (rho.expm1() - rho + (mean - prior_mean).square() * (-prior_log_variance).exp()).sum()
        )
    return NoisyGaussian(mean, log_variance).kl(prior_mean, prior_log_variance)


def transformed() -> bool:
    """Whether a compiler or a transform of ``torch.func`` takes the formulas apart: they get the plain ones."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


class NoisyGaussian:
    """A diagonal Gaussian whose sample and whose divergence send their gradients through one backward pass.

    Each may be asked for alone, or neither be differentiated; the loss and the divergence may also run backward one
    after the other.

    Args:
        mean: The mean.
        log_variance: The log-variance, in the same shape.
        empty_like: Makes new tensors, e.g. in memory that is used again.

    Example:
        >>> mean, log_variance = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
        >>> weight = NoisyGaussian(mean, log_variance)
        >>> sample = weight.sample(torch.tensor([1.0, -1.0]))
        >>> (sample.sum() + weight.kl(torch.zeros(2), torch.tensor(0.0))).backward()
        >>> mean.grad, log_variance.grad
        (tensor([2., 2.]), tensor([ 0.5000, -0.5000]))
    """

    def __init__(
        self, mean: Tensor, log_variance: Tensor, empty_like: Allocate = torch.empty_like
    ) -> None:
        self._inputs = mean, log_variance
        self._state = torch.is_grad_enabled(), *_versions(mean, log_variance)
        self._prior: dict[str, Tensor] = {}  # what the backward pass needs of the divergence
        self._empty_like = empty_like
        self._token: Tensor | None = None

    def sample(self, noise: Tensor | Generator) -> Tensor:
        """Return the mean plus deviation times noise; once at most, and before the divergence."""
        weight: Tensor
        weight, self._token = _Joint.apply(*self._inputs, noise, self._prior, self._empty_like)
        return weight

    def kl(self, prior_mean: Tensor, prior_log_variance: Tensor) -> Tensor:
        """Return the divergence from a Gaussian with a single variance, summed; always from the same one."""
        if self._token is None:
            _, self._token = _Joint.apply(*self._inputs, None, self._prior, self._empty_like)
        with torch.no_grad():
            value, growth = _kl_and_growth(
                *self._inputs, prior_mean, prior_log_variance, self._empty_like
            )
        if self._token.requires_grad:
            self._prior.update(mean=prior_mean, log_variance=prior_log_variance, growth=growth)
        return value + self._token  # a zero, whose gradient is the divergence's

    def serves(self, mean: Tensor, log_variance: Tensor) -> bool:
        """Whether this is the Gaussian of these tensors as they are now, and as differentiable as one made now."""
        same = self._inputs[0] is mean and self._inputs[1] is log_variance
        return same and self._state == (torch.is_grad_enabled(), *_versions(mean, log_variance))


def standard_normal_(out: Tensor, generator: Generator) -> Tensor:
    """Fill ``out`` with what :meth:`NoisyGaussian.sample` draws from an equal generator."""
    for (block,) in _blocks(out):
        block.normal_(generator=generator)
    return out


class _Joint(torch.autograd.Function):
    """Returns the sample, and a zero that stands for the divergence; keeps what their first derivatives need.

    What is kept is no saved tensor, so that the two outputs may run backward one after the other. Where a second
    derivative is asked for, which is when backward runs with gradients on, it is tied to the inputs again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mean: Tensor,
        log_variance: Tensor,
        noise: Tensor | Generator | None,
        prior: dict[str, Tensor],
        empty_like: Allocate,
    ) -> tuple[Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.inputs, ctx.versions = (mean, log_variance), _versions(mean, log_variance)
        ctx.prior, ctx.empty_like, ctx.shift = prior, empty_like, None
        token = mean.new_zeros(())
        if noise is None:
            return None, token
        ctx.shift, weight = empty_like(log_variance), empty_like(mean)
        given, generator = ([noise], None) if isinstance(noise, Tensor) else ([], noise)
        for mu, rho, shift, w, *epsilon in _blocks(mean, log_variance, ctx.shift, weight, *given):
            deviation = _deviation(rho, out=w)
            torch.mul(
                epsilon[0] if epsilon else shift.normal_(generator=generator), deviation, out=shift
            )
            torch.add(mu, shift, out=w)
        return weight, token

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, kl_gradient: Tensor | None) -> tuple[Any, ...]:
        mean, log_variance = ctx.inputs
        prior = ctx.prior if kl_gradient is not None else None
        reads_inputs = prior is not None or torch.is_grad_enabled()
        if reads_inputs and ctx.versions != _versions(mean, log_variance):
            raise RuntimeError(
                "A noisy weight was changed in place between its divergence and the backward pass."
            )
        if torch.is_grad_enabled():
            gradients = _plain_gradients(
                mean, log_variance, ctx.shift, gradient, kl_gradient, prior
            )
        elif prior is None:
            scaled = (
                None
                if gradient is None
                else torch.mul(gradient, ctx.shift, out=ctx.empty_like(log_variance))
            )
            gradients = gradient, None if scaled is None else scaled.mul_(0.5)
        else:
            gradients = _gradients(mean, ctx.shift, gradient, kl_gradient, prior, ctx.empty_like)
        return *gradients, None, None, None


def _plain_gradients(
    mean: Tensor,
    log_variance: Tensor,
    shift: Tensor | None,
    gradient: Tensor | None,
    kl_gradient: Tensor | None,
    prior: dict[str, Tensor] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients as formulas that can be differentiated."""
    of_mean, of_log_variance = gradient, None
    if gradient is not None and shift is not None:
        of_log_variance = (
            0.5 * gradient * shift * (0.5 * (log_variance - log_variance.detach())).exp()
        )
    if kl_gradient is not None and prior is not None:
        slope = kl_gradient * (-prior["log_variance"]).exp() * (mean - prior["mean"])
        growth = 0.5 * kl_gradient * (log_variance - prior["log_variance"]).expm1()
        of_mean = slope if of_mean is None else of_mean + slope
        of_log_variance = growth if of_log_variance is None else of_log_variance + growth
    return of_mean, of_log_variance


def _gradients(
    mean: Tensor,
    shift: Tensor | None,
    gradient: Tensor | None,
    kl_gradient: Any,
    prior: dict[str, Tensor],
    empty_like: Allocate,
) -> tuple[Tensor, Tensor]:
    """The same in as few passes as can be."""
    of_mean, of_log_variance = empty_like(mean), empty_like(mean)
    factor = _number(kl_gradient)
    slope, growth_slope = factor * math.e ** -_number(prior["log_variance"]), 0.5 * factor
    tensors = [mean, prior["mean"], prior["growth"], of_mean, of_log_variance]
    sampled = [] if gradient is None or shift is None else [gradient, shift]
    for mu, mu_p, growth, mu_gradient, rho_gradient, *sample in _blocks(*tensors, *sampled):
        torch.sub(mu, mu_p, out=mu_gradient).mul_(slope)
        torch.mul(growth, growth_slope, out=rho_gradient)
        if sample:
            mu_gradient.add_(sample[0])
            rho_gradient.addcmul_(*sample, value=0.5)
    return of_mean, of_log_variance


def _kl_and_growth(
    mean: Tensor,
    log_variance: Tensor,
    prior_mean: Tensor,
    prior_log_variance: Tensor,
    empty_like: Allocate,
) -> tuple[Any, Tensor]:
    """Return the divergence, and ``expm1`` of the log-ratio of the variances."""
    growth, scratch, terms, squares, prior = (
        empty_like(mean),
        empty_like(mean),
        0.0,
        0.0,
        _number(prior_log_variance),
    )
    place = next(_blocks(scratch))[0]  # one block, used again and again
    for mu, rho, mu_p, grown in _blocks(mean, log_variance, prior_mean, growth):
        out = place if place.shape == rho.shape else place[: len(rho)]
        rho = torch.sub(rho, prior, out=out)
        _expm1(rho, out=grown)
        terms += _number(torch.sub(grown, rho, out=out).sum())
        distance = torch.sub(mu, mu_p, out=out)
        squares += _number(distance.mul_(distance).sum())
    return 0.5 * (terms + math.e**-prior * squares), growth


def _number(scalar: Tensor) -> Any:
    """Read a scalar where that costs nothing: elsewhere it would wait for the device."""
    return scalar.item() if scalar.device.type == "cpu" else scalar


def _deviation(log_variance: Tensor, out: Tensor) -> Tensor:
    """Write the standard deviation into ``out``."""
    if (
        torch.finfo(log_variance.dtype).bits < 32
    ):  # the exponent of two would be rounded too coarsely
        return torch.mul(log_variance, 0.5, out=out).exp_()
    return torch.mul(log_variance, 0.5 * _LOG2_E, out=out).exp2_()  # twice as quick as `exp_`


def _expm1(rho: Tensor, out: Tensor) -> Tensor:
    """Write ``expm1(rho)`` into ``out``."""
    worth_it = rho.numel() > 1000 and rho.device.type == "cpu" and torch.finfo(rho.dtype).bits >= 32
    if (
        worth_it and rho.amax() < -0.5
    ):  # nothing cancels here, and a power of two is three times as quick
        return torch.mul(rho, _LOG2_E, out=out).exp2_().sub_(1)
    return torch.expm1(rho, out=out)  # accurate also where Q comes close to P


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield equal parts of all tensors, small enough for the processor's cache."""
    if (
        tensors[0].numel() <= _BLOCK
        or tensors[0].device.type != "cpu"
        or not all(t.is_contiguous() for t in tensors)
    ):
        return iter([tensors])
    return zip(*(t.view(-1).split(_BLOCK) for t in tensors), strict=True)


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(-1 if t.is_inference() else t._version for t in tensors)
