"""How the use of a weight is read off the autograd node of an operation.

A node names the operation and keeps what its backward pass needs: the input of a matrix product whose matrix has a
gradient, the indices of a lookup. An operation without a reader here, or with options that its reader does not know,
is an :class:`~lightning_taskinfo.fisher.ops.Other`, which runs the operation's own backward pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_taskinfo.fisher.conv import Conv
from lightning_taskinfo.fisher.ops import (
    BatchNorm,
    Elementwise,
    Embedding,
    Grouped,
    Linear,
    Other,
    Rows,
    Slot,
    Use,
)
from lightning_taskinfo.fisher.vjp import Edge, shape_of

Inputs = dict[
    int, torch.Size
]  # shapes of the weights, by their places among the operation's inputs
Reading = tuple[type[Use], dict[str, int], tuple[Tensor, ...], dict[str, Any]]


def read(
    node: Node, sources: dict[int, Edge], rows: Rows, *, batch_statistics: bool = False
) -> list[Use]:
    """Return the uses of the weights at some inputs of an operation.

    Args:
        node: The operation.
        sources: Where its weights come from in the graph, by their places among its inputs.
        rows: Which sample each row of its output belongs to.
        batch_statistics: Whether a BatchNorm may normalise with the statistics of the batch.

    Raises:
        ValueError: If one does so and may not.
    """
    shape = shape_of(node)
    batch_norm = type(node).__name__ == "NativeBatchNormBackward0" and not batch_statistics
    if batch_norm and node._saved_training and rows.axis == 0:  # type: ignore[attr-defined]
        raise ValueError(
            "BatchNorm that normalises with the statistics of the batch mixes the samples, so that none has a gradient "
            "of its own; use running statistics: `model.eval()` and `track_running_stats=True`."
        )
    inputs = {place: shape_of(edge.node, edge.output_nr) for place, edge in sources.items()}
    uses: list[Use] = []
    left = dict(inputs)
    for kind, places, saved, config in _readings(node, inputs):
        slots = {key: Slot(str(place), tuple(inputs[place])) for key, place in places.items()}
        config["complex"] = any(_is_complex(sources[place]) for place in places.values())
        use = kind(slots, shape, saved, config, rows)
        if use.fits():
            uses.append(use)
            for place in places.values():
                left.pop(place)
    if left:
        slots = {str(place): Slot(str(place), tuple(size)) for place, size in left.items()}
        config = {"output": Edge(node, 0), "inputs": {str(place): sources[place] for place in left}}
        uses.append(Other(slots, shape, (), config, rows))
    return uses


def _is_complex(edge: Edge) -> bool:
    return edge.node._input_metadata[edge.output_nr].dtype.is_complex


def _readings(node: Node, inputs: Inputs) -> list[Reading]:
    reader = READERS.get(type(node).__name__)
    if reader is None:
        return []
    try:
        return [reading for reading in reader(node, inputs) if reading[1]]
    except AttributeError:  # another version of torch keeps other things
        return []


def _present(inputs: Inputs, **places: int) -> dict[str, int]:
    return {key: place for key, place in places.items() if place in inputs}


def _real(*tensors: Tensor) -> bool:
    return not any(x.is_complex() for x in tensors)


def _product(node: Any, inputs: Inputs, left: int, right: int) -> list[Reading]:
    """Read ``left @ right`` of two matrices, with the weight on either side."""
    readings: list[Reading] = []
    names = {left: ("mat1", "self"), right: ("mat2", "mat2")}
    if right in inputs and left not in inputs:
        a = _saved(node, *names[left])
        if _real(a):
            readings.append((Linear, {"weight": right}, (a,), {"axis": 0, "transposed": True}))
    if left in inputs and right not in inputs:
        a = _saved(node, *names[right])
        if _real(a):
            readings.append((Linear, {"weight": left}, (a,), {"axis": 1}))
    return readings


def _saved(node: Any, *names: str) -> Tensor:
    for name in names:
        saved = getattr(
            node, f"_saved_{name}", None
        )  # once: where it is computed again, that is once
        if saved is not None:
            return saved.detach()
    raise AttributeError(names[0])


def _mm(node: Any, inputs: Inputs) -> list[Reading]:
    return _product(node, inputs, 0, 1)


def _addmm(node: Any, inputs: Inputs) -> list[Reading]:
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return []
    readings = _product(node, inputs, 1, 2)
    if 0 not in inputs:
        return readings
    columns = shape_of(node)[1]
    if inputs[0].numel() != columns or inputs[0][-1:] != (columns,):
        return readings
    if readings and readings[0][3].get("transposed"):
        kind, places, saved, config = readings[0]
        return [(kind, places | {"bias": 0}, saved, config)]
    return [*readings, (Linear, {"bias": 0}, (), {"axis": 0})]


def _bmm(node: Any, inputs: Inputs) -> list[Reading]:
    if len(inputs) != 1:
        return []
    if 1 in inputs:
        a = node._saved_self.detach()
        reading = (Grouped, {"weight": 1}, (a,), {"axis": 1, "transposed": True})
    else:
        a = node._saved_mat2.detach()
        reading = (Grouped, {"weight": 0}, (a,), {"axis": 2})
    return [reading] if _real(a) else []


def _convolution(node: Any, inputs: Inputs) -> list[Reading]:
    places = _present(inputs, weight=1, bias=2)
    if 0 in inputs:
        return []
    options = ("stride", "padding", "dilation", "output_padding")
    config: dict[str, Any] = {name: list(getattr(node, f"_saved_{name}")) for name in options}
    config["groups"] = node._saved_groups
    config["transposed"] = node._saved_transposed
    saved = (node._saved_input.detach(),) if 1 in inputs else ()
    if saved and not _real(*saved):
        return []
    return [(Conv, places, saved, config)]


def _embedding(node: Any, inputs: Inputs) -> list[Reading]:
    if node._saved_scale_grad_by_freq:
        return []
    padding = node._saved_padding_idx
    known = 0 <= padding < inputs[0][0]  # -1, or that as an unsigned number, is none
    config = {"padding_idx": padding if known else None}
    return [(Embedding, {"weight": 0}, (node._saved_indices,), config)]


def _index_select(node: Any, inputs: Inputs) -> list[Reading]:
    if node._saved_dim != 0 or len(inputs[0]) != 2:
        return []
    return [(Embedding, {"weight": 0}, (node._saved_index,), {"padding_idx": None})]


def _layer_norm(node: Any, inputs: Inputs) -> list[Reading]:
    x, mean, scale = (
        node._saved_input.detach(),
        node._saved_result1.detach(),
        node._saved_result2.detach(),
    )
    size = list(node._saved_normalized_shape)
    aligned = [1] * (x.dim() - len(size)) + size
    return _scale_and_shift(inputs, aligned, lambda: (x - mean).mul_(scale))


def _rms_norm(node: Any, inputs: Inputs) -> list[Reading]:
    x, scale = node._saved_input.detach(), node._saved_result1.detach()
    aligned = [1] * (x.dim() - len(inputs[1])) + list(inputs[1])
    return _scale_and_shift(inputs, aligned, lambda: x * scale)


def _group_norm(node: Any, inputs: Inputs) -> list[Reading]:
    x, mean, scale = (
        node._saved_input.detach(),
        node._saved_result1.detach(),
        node._saved_result2.detach(),
    )
    groups = (x.shape[0], node._saved_group, -1)

    def normalised() -> Tensor:
        return (
            (x.reshape(groups) - mean.view(*groups[:2], 1))
            .mul_(scale.view(*groups[:2], 1))
            .view(x.shape)
        )

    return _scale_and_shift(inputs, _channels(x), normalised)


def _batch_norm(node: Any, inputs: Inputs) -> list[Reading]:
    x = node._saved_input.detach()
    aligned = _channels(x)
    shape = (1, -1, *[1] * (x.dim() - 2))
    if node._saved_training:
        mean, scale = node._saved_result1.detach(), node._saved_result2.detach()
        return _scale_and_shift(
            inputs, aligned, lambda: (x - mean.view(shape)).mul_(scale.view(shape))
        )
    mean, variance, eps = (
        node._saved_running_mean.detach(),
        node._saved_running_var.detach(),
        node._saved_eps,
    )

    def normalised() -> Tensor:
        return (x - mean.view(shape)).mul_((variance + eps).rsqrt().view(shape))

    ((_, places, _, config),) = _scale_and_shift(inputs, aligned, normalised)
    return [(BatchNorm, places, (x,), {**config, "statistics": (mean, variance, eps)})]


def _scale_and_shift(
    inputs: Inputs, aligned: list[int], normalised: Callable[[], Tensor]
) -> list[Reading]:
    """A normalisation: what its weight scales is computed when it is asked for."""
    if 0 in inputs:
        return []
    places = _present(inputs, weight=1, bias=2)
    config = {"aligned": dict.fromkeys(places, aligned), "factor": {"weight": normalised}}
    return [(Elementwise, places, (), config)]


def _channels(x: Tensor) -> list[int]:
    return [1, x.shape[1], *[1] * (x.dim() - 2)]


def _mul(node: Any, inputs: Inputs) -> list[Reading]:
    if len(inputs) != 1:
        return []
    (place,) = inputs
    other = (node._saved_other if place == 0 else node._saved_self).detach()
    return [_broadcast(node, inputs, place, factor=lambda: other)]


def _add(node: Any, inputs: Inputs, sign: int = 1) -> list[Reading]:
    if len(inputs) != 1:
        return []
    (place,) = inputs
    return [_broadcast(node, inputs, place, scale=sign * node._saved_alpha if place else 1)]


def _sub(node: Any, inputs: Inputs) -> list[Reading]:
    return _add(node, inputs, sign=-1)


def _expand(node: Any, inputs: Inputs) -> list[Reading]:
    return [_broadcast(node, inputs, 0)]


def _broadcast(
    node: Any,
    inputs: Inputs,
    place: int,
    factor: Callable[[], Tensor] | None = None,
    scale: float = 1,
) -> Reading:
    """Read an operation on each entry, with a weight that is broadcast."""
    size, key = inputs[place], str(place)
    dims = len(shape_of(node))
    config: dict[str, Any] = {
        "aligned": {key: [1] * (dims - len(size)) + list(size)},
        "factor": {} if factor is None else {key: factor},
        "scale": {key: scale},
    }
    return Elementwise, {key: place}, (), config


READERS: dict[str, Callable[[Any, Inputs], list[Reading]]] = {
    "MmBackward0": _mm,
    "AddmmBackward0": _addmm,
    "BmmBackward0": _bmm,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
    "IndexSelectBackward0": _index_select,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeGroupNormBackward0": _group_norm,
    "NativeBatchNormBackward0": _batch_norm,
    "FusedRmsNormBackward0": _rms_norm,
    "MulBackward0": _mul,
    "AddBackward0": _add,
    "SubBackward0": _sub,
    "ExpandBackward0": _expand,
}
