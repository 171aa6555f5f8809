"""The pre-distribution of a certificate: its centre, its widths, and what may make the certificate invalid."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import itemgetter
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_taskinfo._batches import take
from lightning_taskinfo._files import read_checkpoint
from lightning_taskinfo._observe import trainable_parameters, weights_now
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

    center: nn.Module | Mapping[str, Tensor] | str | PathLike[str] | None = field(
        default=None, repr=False
    )
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
            object.__setattr__(self, "center", read_checkpoint("center", self.center).state)
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
        return cls(weights_now(model), origin, fixed=hashes(fixed_tensors(model)), **others)

    def values(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the centre by name; empty for a centre at 0."""
        if self.center is None:
            return {}
        if isinstance(self.center, nn.Module):
            values: dict[str, Tensor] = dict(self.center.named_parameters())
            return values | dict(self.center.named_buffers())
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
    first, second = order.tensor_split(2)
    half = _part(inputs, targets, first)
    rest = _part(inputs, targets, second)
    network = deepcopy(model)
    start = {**prior.values(), **prior.center_of(model)}
    network.load_state_dict({**network.state_dict(), **start})
    device = next(network.parameters()).device
    with own_randomness(seed, device):
        returned = half_fn(network, half)
    trained = returned if isinstance(returned, nn.Module) else network
    # Frozen weights and buffers are still compared with the start: those of `model` may have
    # learned from the rest.
    center = prior.values() | weights_now(trained)
    origin = prior.origin
    if origin:
        origin += ", then trained on a random half of the samples, which is not certified"
    seen, _ = half
    informed = replace(prior, center=center, origin=origin, fresh=(), seen=seen)
    return informed, rest


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
        shape = str(tuple(values.shape))
        hashed = hashlib.blake2b(shape.encode(), digest_size=16)
        if values.numel():
            raw = values.reshape(-1).view(torch.uint8)
            hashed.update(raw.numpy().data)
        found[name] = hashed.digest()
    return found


def reasons_against(
    model: nn.Module,
    prior: Prior,
    inputs: Any,
    forward: Callable[[Any], Tensor] | None = None,
) -> list[str]:
    """Return what makes a certificate for ``model`` invalid; nothing if all is well.

    Args:
        model: The trained network, in eval mode.
        prior: Its pre-distribution.
        inputs: Four inputs, to see whether samples influence each other.
        forward: Outputs from inputs; the model itself by default.
    """
    prior.center_of(model)  # refuses the weights of another network
    center = prior.values()
    return [
        *_about_the_center(model, prior, center),
        *_about_fixed_tensors(model, prior, center),
        *_about_the_batch(forward or model, inputs),
    ]


def assumptions(model: nn.Module, prior: Prior) -> list[str]:
    """Return the assumptions that cannot be checked."""
    scales = f"{len(prior.stds)} prior scales"
    trusted = [
        f"architecture, preprocessing and the {scales} were fixed before the samples were seen",
        "the samples are independent draws from the distribution the bound speaks of",
    ]
    if prior.center is None:
        return trusted
    same = _equals(trainable_parameters(model), prior.center_of(model))
    if same and not _said_to_be_initial(prior):
        itself = (
            "the network is the prior's centre itself: it has learned nothing from these samples"
        )
        trusted.insert(0, itself)
    if prior.origin:
        centre = f"the prior's centre does not depend on the samples: {prior.origin}"
        trusted.insert(0, centre)
    return trusted


def _about_the_center(model: nn.Module, prior: Prior, center: Mapping[str, Tensor]) -> list[str]:
    reasons = []
    if prior.center is not None and not prior.origin:
        reasons.append(
            "the prior's centre is not known to be independent of the data: `origin` must say where it is from"
        )
    weights = trainable_parameters(model)
    shared = []
    later = {}  # weights of the centre that were frozen at first
    for name, parameter in weights.items():
        if name not in center:
            continue
        if _share_memory(center[name], parameter):
            shared.append(name)
        if name in prior.fixed:
            later[name] = center[name]
    now = hashes(later)
    changed = [name for name in now if now[name] != prior.fixed[name]]
    if changed:
        reasons.append(
            f"the centre of `{changed[0]}`, which was frozen at first, is not the weight that training began with"
        )
    if shared:
        reasons.append(
            f"the prior's centre shares memory with the trained weights ({shared[0]}), so it was trained with them: "
            "copy it before training"
        )
    elif _said_to_be_initial(prior) and _equals(weights, prior.center_of(model)):
        reasons.append(
            f"the prior's centre, {prior.origin!r}, equals the trained weights: it was copied after training, or "
            "nothing was learned"
        )
    return reasons


def _share_memory(first: Tensor, second: Tensor) -> bool:
    return second.numel() > 0 and first.data_ptr() == second.data_ptr()


def _equals(weights: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(weights[name], center[name]) for name in weights)


def _said_to_be_initial(prior: Prior) -> bool:
    return "init" in (prior.origin or "").lower()


def _about_fixed_tensors(model: nn.Module, prior: Prior, center: Mapping[str, Tensor]) -> list[str]:
    """Frozen parameters and buffers are outside the KL: valid only if they are still what they were."""
    norms = set()
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            norms.add(name)
    fixed = fixed_tensors(model)
    buffers = dict(model.named_buffers())
    known = [name for name in prior.fixed if name in fixed]
    now = hashes({name: fixed[name] for name in known})
    kept = {name: now[name] == prior.fixed[name] for name in known}
    found: dict[tuple[str, str], list[str]] = {}
    for name, value in fixed.items():
        kind = "frozen parameter"
        if name in buffers:
            kind = "BatchNorm statistic" if name.rpartition(".")[0] in norms else "buffer"
        if name in kept:
            if kept[name]:
                continue
            wrong = "is outside the KL and differs from the prior's centre"
        elif name not in center:
            wrong = "is outside the KL and not part of the prior's centre to compare with"
        elif not torch.equal(center[name].to(value), value):
            wrong = "is outside the KL and differs from the prior's centre"
        elif _share_memory(center[name], value):
            wrong = "shares memory with the prior's centre: copy it before training"
        else:
            continue
        found.setdefault((kind, wrong), []).append(name)
    reasons = []
    for (kind, wrong), names in found.items():
        more = f", like {len(names) - 1} more," if len(names) > 1 else ""
        reasons.append(f"{kind} `{names[0]}`{more} {wrong}")
    return reasons


@torch.no_grad()
def _about_the_batch(forward: Callable[[Any], Tensor], inputs: Any) -> list[str]:
    halves = (slice(0, 2), slice(2, 4))
    together = forward(inputs)
    of_halves = [forward(take(inputs, itemgetter(half))) for half in halves]
    apart = torch.cat(of_halves)
    sizes = together.abs().nan_to_num(0.0, 0.0)
    scale = float(sizes.max())
    if torch.allclose(together, apart, rtol=1e-3, atol=1e-4 * scale, equal_nan=True):
        return []
    return [
        "the output for a sample depends on the other samples of its batch, so their losses are not independent"
    ]
