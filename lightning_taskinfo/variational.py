r"""Noisy weights on any module: :math:`w = \mu + \sigma \odot \varepsilon`, through ``torch.nn.utils.parametrize``.

A weight's own parameter becomes the mean; a log-variance of the same shape stands beside it, and
both are trained. Together with :func:`weight_kl` this minimises the information complexity
:math:`C_\beta = \mathbb{E}_Q[L_D] + \beta\,\mathrm{KL}(Q \| P)` of Achille et al. (2021).

Give the log-variances no weight decay, which would pull every standard deviation to 1: the prior
does that work.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrize

from lightning_taskinfo._random import seed_from
from lightning_taskinfo._ranges import check_not_negative, check_positive
from lightning_taskinfo.functional.gaussian import gaussian_kl_diag

Weights = Mapping[str, Tensor]
PriorCenter = Literal["initial", "zero"] | Weights

__all__ = [
    "NoisyWeight",
    "add_weight_noise",
    "noisy_weights",
    "plain_state_dict",
    "remove_weight_noise",
    "repeatable_noise",
    "sampling",
    "weight_kl",
]


class _Held:
    """The noise of a model that stays the same during its forward passes; copies begin without it."""

    def __init__(self) -> None:
        self.depth = 0  # forwards under way
        self.seeds: dict[nn.Module, int] = {}  # of the noise in them

    @torch.compiler.disable
    def begin(self, *_: Any) -> None:
        self.depth += 1

    @torch.compiler.disable
    def end(self, *_: Any) -> None:
        self.depth -= 1
        if not self.depth:
            self.seeds.clear()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Held, ()


class NoisyWeight(nn.Module):
    """Draws a weight from a diagonal Gaussian; :func:`lightning_taskinfo.add_weight_noise` puts it in place.

    The noise comes from a generator of its own, seeded by ``seed``, the number of the draw and the
    rank, so that it neither moves the global generator nor repeats over ranks, and a resumed run
    goes on where it stopped.

    Args:
        mean: The weight as it is.
        std: Standard deviation to begin with; 0 is the plain weight.
        prior_mean: Mean of the pre-distribution, in the weight's shape.
        prior_std: Standard deviation of the pre-distribution.
        seed: Seed of the noise.

    Example:
        >>> weight = torch.zeros(2, 3)
        >>> noise = NoisyWeight(weight, std=0.1, prior_mean=weight, prior_std=0.1, seed=0)
        >>> noise.kl(weight).item(), noise.eval()(weight).sum().item()  # post- and pre-distribution agree; the mean
        (0.0, 0.0)
    """

    prior_mean: Tensor
    prior_log_variance: Tensor

    def __init__(
        self,
        mean: Tensor,
        *,
        std: float,
        prior_mean: Tensor,
        prior_std: float,
        seed: int,
    ) -> None:
        super().__init__()
        log_variance = 2 * math.log(std) if std > 0 else -math.inf
        self.log_variance = nn.Parameter(torch.full_like(mean, log_variance))
        self.register_buffer("prior_mean", prior_mean.detach().clone().to(mean))
        self.register_buffer("prior_log_variance", mean.new_tensor(2 * math.log(prior_std)))
        self.seed = seed
        self.draws = 0
        self.sampled: bool | None = None  # None: in train mode only
        self._held = _Held()

    @torch.compiler.disable  # a generator would break the graph anyway, and each draw would compile anew
    def forward(self, mean: Tensor) -> Tensor:
        """Return a sample of the weight, or its mean in eval mode."""
        sampled = self.training if self.sampled is None else self.sampled
        if not sampled:
            return mean
        held = self._held
        seed = held.seeds.get(self)
        if seed is None:
            seed = self._next_seed()
        if held.depth:
            held.seeds[self] = seed
        generator = Generator(mean.device).manual_seed(seed)
        noise = torch.empty_like(mean).normal_(generator=generator)
        return mean + (0.5 * self.log_variance).exp() * noise

    def right_inverse(self, value: Tensor) -> Tensor:
        """Assigning to the weight assigns its mean."""
        return value

    def kl(self, mean: Tensor) -> Tensor:
        """KL divergence from the pre-distribution, in nats."""
        return gaussian_kl_diag(
            mean.flatten(),
            self.log_variance.flatten(),
            self.prior_mean.flatten(),
            self.prior_log_variance,
        )

    def _next_seed(self) -> int:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "Noisy weights were read inside a backward pass, where activation checkpointing would draw other noise "
                "than its forward pass had. Turn checkpointing off, or keep these layers' weights without noise."
            )
        rank = 0
        if torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
        seed = seed_from(self.seed, self.draws, rank)
        self.draws += 1
        return seed

    def get_extra_state(self) -> dict[str, int]:
        """Return the state of the noise, for checkpoints."""
        return {"seed": self.seed, "draws": self.draws}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take up the state of the noise from a checkpoint."""
        self.seed = state["seed"]
        self.draws = state["draws"]


def noisy_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, NoisyWeight]]:
    """Yield the plain name, the mean and the parametrization of every noisy weight of ``model``.

    Args:
        model: A module, some of whose weights are noisy.

    Example:
        >>> from lightning_taskinfo.variational import add_weight_noise
        >>> [name for name, *_ in noisy_weights(add_weight_noise(nn.Linear(3, 2)))]
        ['weight', 'bias']
    """
    for path, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList) and isinstance(
            module[0], NoisyWeight
        ):
            owner, _, attribute = path.rpartition("parametrizations.")
            yield owner + attribute, module.original, module[0]


def _accept_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Read a plain weight as the mean, and keep what a plain checkpoint does not know."""
    for attribute in getattr(module, "parametrizations", {}):
        if prefix + attribute not in state_dict:
            continue
        inner = f"parametrizations.{attribute}."
        for key, value in module.state_dict().items():
            if key.startswith(inner):
                state_dict[prefix + key] = value
        state_dict[f"{prefix}{inner}original"] = state_dict.pop(prefix + attribute)


def add_weight_noise(
    model: nn.Module,
    *,
    std: float = 0.01,
    prior_center: PriorCenter = "initial",
    prior_std: float = 0.1,
    seed: int = 0,
) -> nn.Module:
    r"""Turn the weights of ``model`` into diagonal Gaussians :math:`Q = \mathcal{N}(\mu, \sigma^2)`, in place.

    In train mode every forward draws one sample of the weights; in eval mode the means are used,
    see :func:`sampling`. A plain ``state_dict`` loads into the noisy model as its means, and
    :func:`plain_state_dict` gives one back. Make the model noisy before the optimizer, and where
    processes are spawned inside of them: torch does not pickle parametrized modules.

    Args:
        model: Any module, whose trainable weights become noisy; or a part of one. Tied weights,
            recurrent layers and weights that are already parametrized are refused.
        std: Standard deviation of every weight to begin with.
        prior_center: Mean of the pre-distribution: the weights as they are now, zero, or a plain
            state dict, e.g. of a pretrained model.
        prior_std: Standard deviation of the pre-distribution.
        seed: Seed of the noise.

    Returns:
        The same model.

    Raises:
        ValueError: If an argument is out of range, a weight cannot be made noisy, or none is
            trainable.

    Example:
        >>> net = add_weight_noise(nn.Linear(2, 1))
        >>> bool((net.weight == net.weight).all()), bool((net.eval().weight == net.weight).all())
        (False, True)
    """
    check_not_negative(std=std)
    check_positive(prior_std=prior_std)
    picked = _pick(model)
    centres: Weights = picked
    if prior_center == "zero":
        centres = {name: torch.zeros_like(p) for name, p in picked.items()}
    elif isinstance(prior_center, Mapping):
        centres = prior_center
        check_shapes("prior_center", centres, picked)
    elif prior_center != "initial":
        raise ValueError(
            f"`prior_center` must be 'initial', 'zero' or a state dict, got {prior_center!r}."
        )
    held = _Held()
    owners = {model}
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
        noise._held = held
        parametrize.register_parametrization(owner, attribute, noise)
        owners.add(owner)
    for owner in owners:  # the model, and each layer for when it is called by itself
        owner.register_forward_pre_hook(held.begin)
        owner.register_forward_hook(held.end, always_call=True)
        owner.register_load_state_dict_pre_hook(_accept_plain)
    return model


def _pick(model: nn.Module) -> dict[str, nn.Parameter]:
    every = model.named_parameters(remove_duplicate=False)
    picked = {name: p for name, p in every if p.requires_grad}
    if not picked:
        raise ValueError("`model` must have at least one trainable parameter, got none.")
    for name, p in picked.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        tied = [other for other, q in picked.items() if q is p and other != name]
        problem = ""
        if tied:
            problem = f"tied to `{tied[0]}`, and would get other noise there"
        elif isinstance(owner, parametrize.ParametrizationList | NoisyWeight):
            problem = "already parametrized, as noisy weights are: `remove_weight_noise` frees them"
        elif isinstance(owner, nn.RNNBase):
            problem = "in a recurrent layer, which keeps references to it"
        if problem:
            raise ValueError(f"`model` must not have a trainable `{name}`: it is {problem}.")
    return picked


def check_shapes(argument: str, given: Weights, weights: Weights, hint: str = "") -> None:
    """Raise a ``ValueError`` if a weight is not among the given tensors, or has another shape there."""
    for name, p in weights.items():
        wanted = tuple(p.shape)
        found = tuple(given[name].shape) if name in given else "nothing"
        if found != wanted:
            raise ValueError(
                f"`{argument}` must hold `{name}` with shape {wanted}, got {found}{hint}."
            )


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
    with _put_back(model, "sampled") as noises:
        for noise in noises:
            noise.sampled = enabled
        yield


def repeatable_noise(model: nn.Module) -> AbstractContextManager[Any]:
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
    return _put_back(model, "draws")


@contextmanager
def _put_back(model: nn.Module, attribute: str) -> Iterator[list[NoisyWeight]]:
    """Yield the noise of all weights, and give each its own value of an attribute back afterwards."""
    noises = [noise for *_, noise in noisy_weights(model)]
    before = [getattr(noise, attribute) for noise in noises]
    try:
        yield noises
    finally:
        for noise, value in zip(noises, before, strict=True):
            setattr(noise, attribute, value)


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that the model without noise would have, with the means as weights.

    Args:
        model: A module, some of whose weights are noisy.

    Example:
        >>> list(plain_state_dict(add_weight_noise(nn.Linear(2, 1))))
        ['bias', 'weight']
    """
    state = model.state_dict()
    plain = {name: value for name, value in state.items() if "parametrizations." not in name}
    plain |= {name: mean.detach() for name, mean, _ in noisy_weights(model)}
    return dict(sorted(plain.items()))


def remove_weight_noise(model: nn.Module) -> nn.Module:
    """Give the plain module back, in place, with the means as weights.

    Optimizers keep working: the means are the parameters that they know.

    Args:
        model: A module with noisy weights.

    Example:
        >>> type(remove_weight_noise(add_weight_noise(nn.Linear(2, 1)))).__name__
        'Linear'
    """
    for name, *_ in list(noisy_weights(model)):
        path, _, attribute = name.rpartition(".")
        parametrize.remove_parametrizations(
            model.get_submodule(path), attribute, leave_parametrized=False
        )
    for module in model.modules():
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._load_state_dict_pre_hooks,
        ):
            for key, hook in list(hooks.items()):
                if _is_ours(hook):
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)
    return model


def _is_ours(hook: Any) -> bool:
    """Tell by the function: handles would point to the original after a ``deepcopy``."""
    function = getattr(hook, "hook", hook)
    return function is _accept_plain or isinstance(getattr(function, "__self__", None), _Held)
