"""Why a certificate may not be claimed: everything data-dependent that the KL does not pay for."""

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_taskinfo._batches import take
from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo.certificates.prior import Prior, fixed_tensors, hashes


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
    shared = [
        name
        for name, parameter in weights.items()
        if name in center and parameter.numel() and center[name].data_ptr() == parameter.data_ptr()
    ]
    later = {name: center[name] for name in prior.fixed if name in weights and name in center}
    changed = [name for name, digest in hashes(later).items() if digest != prior.fixed[name]]
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


def _equals(weights: Mapping[str, Tensor], center: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(weights[name], center[name]) for name in weights)


def _said_to_be_initial(prior: Prior) -> bool:
    return "init" in (prior.origin or "").lower()


def _about_fixed_tensors(model: nn.Module, prior: Prior, center: Mapping[str, Tensor]) -> list[str]:
    """Frozen parameters and buffers are outside the KL: valid only if they are still what they were."""
    norms = {name for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    fixed = fixed_tensors(model)
    buffers = dict(model.named_buffers())
    kept = {
        name: hashes({name: fixed[name]})[name] == kept
        for name, kept in prior.fixed.items()
        if name in fixed
    }
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
        elif value.numel() and center[name].data_ptr() == value.data_ptr():
            wrong = "shares memory with the prior's centre: copy it before training"
        else:
            continue
        found.setdefault((kind, wrong), []).append(name)
    return [
        f"{kind} `{names[0]}`{f', like {len(names) - 1} more,' if len(names) > 1 else ''} {wrong}"
        for (kind, wrong), names in found.items()
    ]


@torch.no_grad()
def _about_the_batch(forward: Callable[[Any], Tensor], inputs: Any) -> list[str]:
    halves = (slice(0, 2), slice(2, 4))
    together = forward(inputs)
    apart = torch.cat([forward(take(inputs, itemgetter(half))) for half in halves])
    scale = float(together.abs().nan_to_num(0.0, 0.0).max())
    if torch.allclose(together, apart, rtol=1e-3, atol=1e-4 * scale, equal_nan=True):
        return []
    return [
        "the output for a sample depends on the other samples of its batch, so their losses are not independent"
    ]
