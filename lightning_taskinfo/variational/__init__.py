r"""Noisy weights on any module: :math:`w = \mu + \sigma \odot \varepsilon`, through ``torch.nn.utils.parametrize``.

A weight's own parameter becomes the mean; a log-variance of the same shape stands beside it, and
both are trained. Together with :func:`weight_kl` this minimises the information complexity
:math:`C_\beta = \mathbb{E}_Q[L_D] + \beta\,\mathrm{KL}(Q \| P)` of Achille et al. (2021).

Give the log-variances no weight decay, which would pull every standard deviation to 1: the prior
does that work.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_taskinfo._random import seed_from
from lightning_taskinfo._ranges import check_not_negative, check_positive
from lightning_taskinfo.variational.noisy_weight import (
    NoisyWeight,
    attach_hooks,
    detach_hooks,
    noisy_weights,
)

PriorCenter: TypeAlias = Literal["initial", "zero"] | Mapping[str, Tensor]

__all__ = [
    "NoisyWeight",
    "add_weight_noise",
    "noisy_weights",
    "plain_state_dict",
    "prior_means",
    "remove_weight_noise",
    "repeatable_noise",
    "sampling",
    "weight_kl",
]


def add_weight_noise(
    model: nn.Module,
    *,
    std: float = 0.01,
    prior_center: PriorCenter = "initial",
    prior_std: float = 0.1,
    parameters: Callable[[str, nn.Parameter], bool] | None = None,
    seed: int = 0,
) -> nn.Module:
    r"""Turn the weights of ``model`` into diagonal Gaussians :math:`Q = \mathcal{N}(\mu, \sigma^2)`, in place.

    In train mode every forward draws one sample of the weights; in eval mode the means are used,
    see :func:`sampling`. A plain ``state_dict`` loads into the noisy model as its means, and
    :func:`plain_state_dict` gives one back. Make the model noisy before the optimizer, and where
    processes are spawned inside of them: torch does not pickle parametrized modules.

    Args:
        model: Any module. Tied weights, recurrent layers and weights that are already parametrized
            are refused.
        std: Standard deviation of every weight to begin with.
        prior_center: Mean of the pre-distribution: the weights as they are now, zero, or a plain
            state dict, e.g. of a pretrained model.
        prior_std: Standard deviation of the pre-distribution.
        parameters: Picks the weights that become noisy, from name and parameter; all trainable ones
            by default.
        seed: Seed of the noise.

    Returns:
        The same model.

    Raises:
        ValueError: If an argument is out of range, a weight cannot be made noisy, or none was
            picked.

    Example:
        >>> net = add_weight_noise(nn.Linear(2, 1))
        >>> bool((net.weight == net.weight).all()), bool((net.eval().weight == net.weight).all())
        (False, True)
    """
    check_not_negative(std=std)
    check_positive(prior_std=prior_std)
    picked = _pick(model, parameters)
    centres = prior_means(prior_center, picked)
    owners: dict[nn.Module, None] = {model: None}
    for index, (name, mean) in enumerate(picked.items()):
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        noise = NoisyWeight(
            mean,
            std=std,
            prior_mean=centres[name],
            prior_std=prior_std,
            seed=seed_from(seed, index),
        )
        parametrize.register_parametrization(owner, attribute, noise)
        owners[owner] = None
    for owner in owners:  # the model, and each layer for when it is called by itself
        attach_hooks(owner)
    return model


def _pick(
    model: nn.Module, parameters: Callable[[str, nn.Parameter], bool] | None
) -> dict[str, nn.Parameter]:
    named = [
        (name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    ]
    picked = {name: p for name, p in named if parameters is None or parameters(name, p)}
    if not picked:
        raise ValueError(
            "`parameters` must pick at least one trainable parameter of `model`, got none."
        )
    for name, p in picked.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        inner = owner[0] if isinstance(owner, parametrize.ParametrizationList) else owner
        if isinstance(inner, NoisyWeight):
            raise ValueError(
                "`model` must have plain weights, got noisy ones; call `remove_weight_noise(model)` first, or let "
                "`parameters` pick the plain ones."
            )
        tied = [other for other, q in named if q is p and other != name]
        problem = (
            f"tied to `{tied[0]}`, and would get other noise there" if tied
            else "already parametrized" if isinstance(owner, parametrize.ParametrizationList)
            else "in a recurrent layer, which keeps references to it" if isinstance(owner, nn.RNNBase)
            else None
        )  # fmt: skip
        if problem:
            raise ValueError(f"`parameters` must not pick `{name}`: it is {problem}.")
    return picked


def prior_means(center: PriorCenter, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean of the pre-distribution of each weight.

    Args:
        center: The weights as they are now, zero, or a plain state dict.
        weights: The weights by name.

    Raises:
        ValueError: If ``center`` is another word, or lacks a weight in its shape.

    Example:
        >>> prior_means("zero", {"weight": torch.ones(2)})
        {'weight': tensor([0., 0.])}
    """
    if center == "initial":
        return dict(weights)
    if center == "zero":
        return {name: torch.zeros_like(p) for name, p in weights.items()}
    if isinstance(center, str):
        raise ValueError(
            f"`prior_center` must be 'initial', 'zero' or a state dict, got {center!r}."
        )
    for name, p in weights.items():
        if name not in center or center[name].shape != p.shape:
            found = tuple(center[name].shape) if name in center else "nothing"
            raise ValueError(
                f"`prior_center` must hold `{name}` with shape {tuple(p.shape)}, got {found}."
            )
    return dict(center)


def weight_kl(model: nn.Module) -> Tensor:
    r"""KL divergence :math:`\mathrm{KL}(Q \| P)` of all noisy weights of ``model``: their information, in nats.

    Args:
        model: A module with noisy weights.

    Raises:
        TypeError: If ``model`` is no module.
        ValueError: If ``model`` has no noisy weights.

    Example:
        >>> net = add_weight_noise(nn.Linear(1, 1, bias=False), std=0.1, prior_std=0.1)
        >>> weight_kl(net).item()
        0.0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a Module, got {type(model).__name__}.")
    terms = [noise.kl(mean) for _, mean, noise in noisy_weights(model)]
    if not terms:
        raise ValueError("`model` has no noisy weights: call `add_weight_noise(model)` first.")
    return torch.stack(terms).sum()


@contextmanager
def sampling(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Draw weights also in eval mode (or, with ``enabled=False``, use the means also in train mode), for a while.

    Args:
        model: A module with noisy weights.
        enabled: Whether to draw, in either mode.

    Example:
        >>> net = add_weight_noise(nn.Linear(2, 1)).eval()
        >>> with sampling(net):
        ...     bool((net.weight == net.weight).all())
        False
    """
    noises = [noise for *_, noise in noisy_weights(model)]
    before = [noise.sampled for noise in noises]
    try:
        for noise in noises:
            noise.sampled = enabled
        yield
    finally:
        for noise, sampled in zip(noises, before, strict=True):
            noise.sampled = sampled


@contextmanager
def repeatable_noise(model: nn.Module) -> Iterator[None]:
    """Put the noise back afterwards, so that the next draws repeat those made inside.

    Args:
        model: A module, some of whose weights are noisy.

    Example:
        >>> net, x = add_weight_noise(nn.Linear(3, 2)), torch.ones(1, 3)
        >>> with repeatable_noise(net):
        ...     first = net(x)
        >>> torch.equal(first, net(x))
        True
    """
    before = [(noise, noise.draws) for *_, noise in noisy_weights(model)]
    try:
        yield
    finally:
        for noise, draws in before:
            noise.draws = draws


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that the model without noise would have, with the means as weights.

    Args:
        model: A module, some of whose weights are noisy.

    Example:
        >>> list(plain_state_dict(add_weight_noise(nn.Linear(2, 1))))
        ['bias', 'weight']
    """
    noisy = {name: mean.detach() for name, mean, _ in noisy_weights(model)}
    plain = {
        name: value for name, value in model.state_dict().items() if "parametrizations." not in name
    }
    return dict(sorted({**plain, **noisy}.items()))


def remove_weight_noise(model: nn.Module, *, sample: bool = False) -> nn.Module:
    """Give the plain module back, in place: with the means as weights, or with one sample of them.

    Optimizers keep working: the means are the parameters that they know.

    Args:
        model: A module with noisy weights.
        sample: Whether to keep a sample of the weights rather than their means.

    Example:
        >>> type(remove_weight_noise(add_weight_noise(nn.Linear(2, 1)))).__name__
        'Linear'
    """
    for name, mean, noise in list(noisy_weights(model)):
        path, _, attribute = name.rpartition(".")
        if sample:
            with torch.no_grad(), sampling(model):
                mean.copy_(noise(mean))
        parametrize.remove_parametrizations(
            model.get_submodule(path), attribute, leave_parametrized=False
        )
    for module in model.modules():
        detach_hooks(module)
    return model
