"""The pre-distribution of a certificate: its centre, its widths, and what may make the certificate invalid."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_taskinfo._files import StrPath, digest, read_checkpoint
from lightning_taskinfo._nested import split
from lightning_taskinfo._observe import trainable_parameters, weights_now
from lightning_taskinfo._ranges import check_finite_tensors, check_positive
from lightning_taskinfo.variational import check_shapes

Tensors = Mapping[str, Tensor]
UNMOVED = 1e-3  # distance from the centre, relative to the weights, below which nothing was learned
PRIOR_STDS = tuple(0.5 * 2 ** (-j / 2) for j in range(24))  # 0.5 … 1.7e-4, whatever the data


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

    center: nn.Module | Tensors | StrPath | None = field(default=None, repr=False)
    origin: str | None = None
    stds: Sequence[float] = PRIOR_STDS
    per_layer: bool = True
    fresh: Sequence[str] = ()
    seen: Any = field(default=None, repr=False, compare=False)
    fixed: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_positive(stds=self.stds)
        if isinstance(self.fresh, str):
            raise ValueError(
                f"`fresh` must be a sequence of beginnings of names, got {self.fresh!r}."
            )
        center = self.center
        if isinstance(center, str | PathLike):
            center = read_checkpoint("center", center).state
        elif isinstance(center, nn.Module):
            center = all_tensors(center)
        object.__setattr__(self, "center", center)
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
        return cls(weights_now(model), origin, fixed=fixed_hashes(model), **others)

    def values(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the centre by name; empty for a centre at 0."""
        return dict(cast(Tensors, self.center or {}))

    def layer_of(self, name: str) -> str:
        """Return the layer with which a parameter shares its standard deviation; ``""`` where all do."""
        return name.rpartition(".")[0] if self.per_layer else ""

    def center_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the centre of each trainable parameter, on the model's device.

        Raises:
            ValueError: If it is the centre of another network.
        """
        weights = trainable_parameters(model)
        values = self.values()
        for name, p in weights.items():
            if self.center is None or name.startswith(tuple(self.fresh)):
                values[name] = torch.zeros_like(p)
        check_shapes("center", values, weights, "; `fresh` names a head that is new")
        return {name: values[name].detach().to(p) for name, p in weights.items()}


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what training is not to change by gradients: frozen parameters, and buffers."""
    trainable = trainable_parameters(model).keys()
    return {name: x for name, x in all_tensors(model).items() if name not in trainable}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a network by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def fixed_hashes(model: nn.Module) -> dict[str, str]:
    """Return a hash of each of them."""
    return {name: hash_of(tensor) for name, tensor in fixed_tensors(model).items()}


def hash_of(tensor: Tensor) -> str:
    """Return a hash of a tensor's values, type and shape."""
    return digest([("", tensor)])


def reasons_against(
    model: nn.Module,
    prior: Prior,
    inputs: Any,
    forward: Callable[[Any], Tensor],
) -> list[str]:
    """Return what makes a certificate for ``model`` invalid; nothing if all is well.

    Args:
        model: The trained network, in eval mode.
        prior: Its pre-distribution.
        inputs: Four inputs, to see whether samples influence each other.
        forward: Outputs from inputs.
    """
    return [
        *_about_the_center(model, prior),
        *_about_fixed_tensors(model, prior),
        *_about_the_batch(forward, inputs),
    ]


def assumptions(model: nn.Module, prior: Prior) -> list[str]:
    """Return the assumptions that cannot be checked."""
    trusted = []
    if prior.center is not None:
        if prior.origin:
            trusted.append(f"the prior's centre does not depend on the samples: {prior.origin}")
        if _is_center(model, prior) and not _said_to_be_initial(prior):
            trusted.append(
                "the network is the prior's centre itself, or as near as a rounded copy: it has learned nothing from "
                "these samples"
            )
    return [
        *trusted,
        f"architecture, preprocessing and the {len(prior.stds)} prior scales were fixed before the samples were seen",
        "the samples are independent draws from the distribution the bound speaks of",
    ]


def _about_the_center(model: nn.Module, prior: Prior) -> Iterator[str]:
    if prior.center is not None and not prior.origin:
        yield "the prior's centre is not known to be independent of the data: `origin` must say where it is from"
    values = prior.values()
    frozen_at_first = prior.fixed.keys() & values.keys() & trainable_parameters(model).keys()
    changed = [name for name in frozen_at_first if hash_of(values[name]) != prior.fixed[name]]
    if changed:
        yield f"the centre of `{min(changed)}`, which was frozen at first, is not the weight that training began with"
    own = all_tensors(model)
    known = [name for name, x in own.items() if name in values and x.numel()]
    shared = [name for name in known if own[name].data_ptr() == values[name].data_ptr()]
    if shared:
        yield (
            f"the centre of `{shared[0]}` shares memory with the network, so it was trained with it: copy it before "
            "training"
        )
    elif _said_to_be_initial(prior) and _is_center(model, prior):
        yield (
            f"the prior's centre, {prior.origin!r}, equals the trained weights, or nearly: it was copied after "
            "training, or nothing was learned"
        )


def _is_center(model: nn.Module, prior: Prior) -> bool:
    """Whether the network is the centre, or as near to it as a rounded copy is."""
    weights = trainable_parameters(model)
    moved = length = 0.0
    for name, center in prior.center_of(model).items():
        weight = weights[name].detach().double()
        distance = float((weight - center).square().sum())
        if distance:  # one that did not learn at all has no part in it
            moved += distance
            length += float(weight.square().sum())
    return moved <= UNMOVED**2 * length


def _said_to_be_initial(prior: Prior) -> bool:
    return "init" in (prior.origin or "").lower()


def _about_fixed_tensors(model: nn.Module, prior: Prior) -> Iterator[str]:
    """Frozen parameters and buffers are outside the KL: valid only if they are still what they were."""
    center = prior.values()
    found = defaultdict(list)
    for name, value in fixed_tensors(model).items():
        known = prior.fixed.get(name)
        if known is None and name in center:
            known = hash_of(center[name].to(value))
        if known is None:
            wrong = "is outside the KL and not part of the prior's centre to compare with"
        elif known != hash_of(value):
            wrong = "is outside the KL and differs from the prior's centre"
        else:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        kind = "buffer"
        if isinstance(value, nn.Parameter):
            kind = "frozen parameter"
        elif isinstance(owner, _BatchNorm):
            kind = "BatchNorm statistic"
        found[kind, wrong].append(name)
    for (kind, wrong), (first, *others) in found.items():
        more = f", like {len(others)} more," if others else ""
        yield f"{kind} `{first}`{more} {wrong}"


@torch.no_grad()
def _about_the_batch(forward: Callable[[Any], Tensor], inputs: Any) -> Iterator[str]:
    together = forward(inputs)
    apart = torch.cat([forward(half) for half in split(inputs, 2)])
    atol = 1e-4 * float(together.abs().nan_to_num(0.0, 0.0).max())
    if not torch.allclose(together, apart, rtol=1e-3, atol=atol, equal_nan=True):
        yield "the output for a sample depends on the other samples of its batch, so their losses are not independent"
