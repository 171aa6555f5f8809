"""One weight that is drawn from a Gaussian, and the hooks that hold its noise still during a forward pass."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrize

from lightning_taskinfo._random import seed_from
from lightning_taskinfo.functional.gaussian import gaussian_kl_diag


class _Held:
    """The noise that stays the same during a forward pass. It is nobody's state: copies begin without it."""

    def __init__(self) -> None:
        self.depth = 0  # forwards under way
        self.seed: int | None = None  # of the noise in them

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
        if not (self.training if self.sampled is None else self.sampled):
            return mean
        held = self._held
        seed = self._next_seed() if held.seed is None else held.seed
        if held.depth:
            held.seed = seed
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
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
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


def attach_hooks(module: nn.Module) -> None:
    """Let a forward of ``module`` see one noise throughout, and plain state dicts load into it."""
    module.register_forward_pre_hook(_keep_noise)
    module.register_forward_hook(_release_noise, always_call=True)
    module.register_load_state_dict_pre_hook(_accept_plain)


def detach_hooks(module: nn.Module) -> None:
    """Remove by function: handles would point to the original after a ``deepcopy``."""
    for hooks in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._load_state_dict_pre_hooks,
    ):
        for key, hook in list(hooks.items()):
            if getattr(hook, "hook", hook) in (_keep_noise, _release_noise, _accept_plain):
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def _noises(module: nn.Module) -> list[NoisyWeight]:
    """Find the noise below a module, in a fraction of the time of ``named_modules``: this runs in every forward."""
    found, waiting = [], [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if isinstance(child, NoisyWeight):
                found.append(child)
            elif child is not None:
                waiting.append(child)
    return found


@torch.compiler.disable
def _keep_noise(module: nn.Module, args: Any) -> None:
    """Begin a forward: every read of a weight inside of it sees the same noise."""
    for noise in _noises(module):
        noise._held.depth += 1


@torch.compiler.disable
def _release_noise(module: nn.Module, args: Any, output: Any) -> None:
    for noise in _noises(module):
        noise._held.depth -= 1
        if not noise._held.depth:
            noise._held.seed = None


def _accept_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Read a plain weight as the mean, and keep what a plain checkpoint does not know."""
    for attribute in getattr(module, "parametrizations", {}):
        if prefix + attribute not in state_dict:
            continue
        inner = f"parametrizations.{attribute}."
        own = module.state_dict()
        state_dict.update(
            {prefix + key: value for key, value in own.items() if key.startswith(inner)}
        )
        state_dict[f"{prefix}{inner}original"] = state_dict.pop(prefix + attribute)
