"""What a classifier knows: information in its weights, Fisher trace, and what its features miss, as plain values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.functional.information import information_in_weights
from lightning_taskinfo.transfer.overlap import feature_overlap

MAX_EXACT_CLASSES = 20  # their cost grows with the classes: beyond, labels are sampled
PRIOR_STD = 0.1
FEWEST = 20  # labels for five folds
ByLayer = dict[str, Any]
"""``{"total": value, "layers": {name: value}}``."""


def fisher_of(
    model: nn.Module, inputs: Tensor, num_classes: int, *, seed: int = 0
) -> dict[str, Tensor]:
    """Return the diagonal Fisher information of a classifier in evaluation, a mean over ``inputs``."""
    exact = num_classes <= MAX_EXACT_CLASSES
    generator = torch.Generator(inputs.device).manual_seed(seed)
    return fisher_diagonal(
        model.eval(), inputs, labels="exact" if exact else "sampled", generator=generator
    )


def trace_by_layer(fisher: Mapping[str, Tensor]) -> ByLayer:
    """Return the trace of the Fisher information, whole and by layer.

    Example:
        >>> trace_by_layer({"head.weight": torch.ones(2, 2), "head.bias": torch.ones(2)})
        {'total': 6.0, 'layers': {'head': 6.0}}
    """
    return _by_layer({name: float(f.double().sum()) for name, f in fisher.items()})


def information_by_layer(
    fisher: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    center: Mapping[str, Tensor],
    num_samples: int,
) -> ByLayer:
    r"""Return the information in the weights in nats, whole and by layer.

    :math:`\mathrm{KL}(Q \| P)` for :math:`P = N(w_0, 0.1^2 I)`, with :math:`\beta = 1`; see
    :func:`~lightning_taskinfo.functional.information.information_in_weights`.

    Args:
        fisher: Diagonal Fisher information, a mean over samples, by parameter.
        weights: The weights.
        center: Centre :math:`w_0` of the pre-distribution.
        num_samples: Number of training samples :math:`N`.
    """
    nats = {}
    for name, f in fisher.items():
        moved = weights[name] - center[name]
        found = information_in_weights(num_samples * f, moved, prior_std=PRIOR_STD, beta=1.0)
        nats[name] = float(found.kl)
    return _by_layer(nats)


def overlap_of(
    backbone: nn.Module, inputs: Tensor, labels: Tensor, *, seed: int
) -> dict[str, Any] | None:
    """Return the overlap of a backbone's features with target labels.

    Args:
        backbone: The pretrained network, without its head.
        inputs: Labelled target inputs.
        labels: Their classes.
        seed: Of the order in which folds are taken.

    Returns:
        ``None`` with fewer than 20 labels, which are too few for five folds.
    """
    if len(labels) < FEWEST:
        return None
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    found = feature_overlap(backbone, [(inputs[order], labels[order])])
    return {
        "layers": list(found.layers),
        "outside": found.outside.tolist(),
        "standard_error": found.standard_error.tolist(),
    }


def _by_layer(values: Mapping[str, float]) -> ByLayer:
    layers: dict[str, float] = {}
    for name, value in values.items():
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers.get(layer, 0.0) + value
    return {"total": sum(layers.values()), "layers": layers}
