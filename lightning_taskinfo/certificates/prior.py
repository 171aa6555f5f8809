"""The pre-distribution that goes into a certificate: where it is centred, and how wide it may be."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import take
from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo._random import own_randomness
from lightning_taskinfo._ranges import check_finite_tensors, check_positive

PRIOR_STDS = tuple(0.5 * 2 ** (-j / 2) for j in range(24))  # 0.5 … 1.7e-4, whatever the data
NAMED = 3  # missing parameters that a message names


@dataclass(frozen=True)
class Prior:
    """The pre-distribution of a certificate: fixed before the certified data are looked at.

    Args:
        center: Weights and buffers at the centre: a copy of the module at its start, or of its
            ``state_dict``, or the file of a checkpoint; 0 by default. :meth:`of` keeps what is
            needed of a module that is about to be trained.
        origin: Where the centre comes from, in words, **if it does not depend on the certified
            data**: ``"random initialisation"``, ``"trained on the other half"``. The certificate
            repeats it; without it, it is not valid.
        stds: Standard deviations to choose from, ordered by union-bound cost, cheapest first; a
            single one is free.
        per_layer: Whether each layer chooses its own, and pays for it.
        fresh: Beginnings of the names of parameters that the centre is not to give, like
            ``"head."`` of a new head: their centre is 0.
        seen: Inputs that the centre was trained on, if they are at hand: a certificate on any of
            them is refused.
        fixed: Hashes of frozen parameters and buffers by name, as :meth:`of` takes them.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> prior = Prior.of(model, origin="random initialisation")  # before training
        >>> sorted(prior.center)
        ['bias', 'weight']
    """

    center: nn.Module | Mapping[str, Tensor] | str | PathLike[str] | None = None
    origin: str | None = None
    stds: Sequence[float] = PRIOR_STDS
    per_layer: bool = True
    fresh: Sequence[str] = ()
    seen: Any = field(default=None, repr=False, compare=False)
    fixed: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_positive(stds=self.stds)
        if isinstance(self.fresh, str):
            raise ValueError(
                f"`fresh` must be a sequence of beginnings of names, got {self.fresh!r}."
            )
        if isinstance(self.center, str | PathLike):
            object.__setattr__(self, "center", read_checkpoint(self.center))
        check_finite_tensors("center", self.values())

    @classmethod
    def of(cls, model: nn.Module, origin: str | None = None, **others: Any) -> "Prior":
        """Return the prior centred at a module's present weights, which it copies: to be taken before training.

        Trainable weights are copied. Of frozen parameters and buffers only a hash is kept, to see
        later that they are still the same: a frozen base of any size costs nothing.

        Args:
            model: The module as training will start from it: random, or pretrained with a fresh
                head.
            origin: Where its weights come from, in words.
            **others: Further arguments of :class:`Prior`.
        """
        center = {name: p.detach().clone() for name, p in trainable_parameters(model).items()}
        return cls(center, origin, fixed=hashes(fixed_tensors(model)), **others)

    def values(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the centre by name; empty for a centre at 0."""
        if self.center is None:
            return {}
        if isinstance(self.center, nn.Module):
            return {**dict(self.center.named_parameters()), **dict(self.center.named_buffers())}
        assert isinstance(self.center, Mapping)  # a file was read
        return dict(self.center)

    def center_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the centre of each trainable parameter, on the model's device."""
        weights = trainable_parameters(model)
        if self.center is None:
            return {name: torch.zeros_like(p) for name, p in weights.items()}
        values = self.values()
        center = {}
        for name, p in weights.items():
            if name.startswith(tuple(self.fresh)):
                center[name] = torch.zeros_like(p)
            elif name in values and values[name].shape == p.shape:
                center[name] = values[name].detach().to(p)
        if len(center) < len(weights):
            raise ValueError(self._misfit(weights, values, center))
        return center

    def _misfit(
        self,
        weights: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        center: Mapping[str, Tensor],
    ) -> str:
        """Say of which parameters the centre knows nothing; of another network's centre that is most of them."""
        wrong = [name for name in weights if name not in center]
        missing = [name for name in wrong if name not in values]
        if not missing:
            (name, *_) = wrong
            return (
                f"`center` must have the shapes of the model's parameters, got {tuple(values[name].shape)} for "
                f"{name} of shape {tuple(weights[name].shape)}; `fresh` names a head that is new."
            )
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        return (
            "`center` must hold every trainable parameter of the model, got none for "
            f"{missing[:NAMED]}{more}; `fresh` names a head that is new."
        )


def half_prior(
    prior: Prior,
    model: nn.Module,
    data: tuple[Any, Tensor],
    half_fn: Callable[..., Any],
    seed: int,
) -> tuple[Prior, tuple[Any, Tensor]]:
    """Train the centre on a random half of the samples; return the new prior, and the other half.

    Args:
        prior: The prior to begin with; its centre is where that training starts.
        model: A network of the same kind, copied and left as it is.
        data: All inputs and targets.
        half_fn: Trains a network: ``half_fn(network, (inputs, targets))``, in place or by returning
            another one.
        seed: Seed of the split, and of torch's generator while ``half_fn`` runs.
    """
    if prior.center is None:
        raise ValueError(
            "`half_fn` needs a `prior` with a `center` to train from, got a centre at 0."
        )
    inputs, targets = data
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(targets), generator=generator, device="cpu")
    half, rest = (_part(inputs, targets, index) for index in order.tensor_split(2))
    network = deepcopy(model)
    start = {**prior.values(), **prior.center_of(model)}
    network.load_state_dict({**network.state_dict(), **start})
    device = next(network.parameters()).device
    with own_randomness(seed, device):
        returned = half_fn(network, half)
    trained = trainable_parameters(returned if isinstance(returned, nn.Module) else network)
    # Frozen weights and buffers are still compared with the start: those of `model` may have
    # learned from the rest.
    center = prior.values()
    center |= {name: p.detach().clone() for name, p in trained.items()}
    origin = prior.origin
    if origin:
        origin += ", then trained on a random half of the samples, which is not certified"
    return replace(prior, center=center, origin=origin, fresh=(), seen=half[0]), rest


def _part(inputs: Any, targets: Tensor, index: Tensor) -> tuple[Any, Tensor]:
    def picked(x: Tensor) -> Tensor:
        return x[index.to(x.device)]

    return take(inputs, picked), picked(targets)


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what training is not to change by gradients: frozen parameters, and buffers."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {**frozen, **dict(model.named_buffers())}


def hashes(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return a hash of each tensor's values and shape."""
    found = {}
    for name, tensor in tensors.items():
        values = tensor.detach().cpu().contiguous()
        hashed = hashlib.blake2b(str(tuple(values.shape)).encode(), digest_size=16)
        if values.numel():
            hashed.update(values.reshape(-1).view(torch.uint8).numpy().data)
        found[name] = hashed.digest()
    return found


def read_checkpoint(path: str | PathLike[str]) -> dict[str, Tensor]:
    """Return the weights of a Lightning checkpoint, or of a state dict that was saved by ``torch.save``."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(
            f"`center` must be a file of weights, got {path}, which does not exist."
        ) from None
    except Exception as error:
        raise ValueError(
            f"`center` must be a file of weights, got {path}, which cannot be read."
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(
        isinstance(value, Tensor) for value in content.values()
    ):
        raise ValueError(
            f"`center` must be a file of weights by name, got {path} with something else."
        )
    return dict(content)
