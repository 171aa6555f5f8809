"""How the use of a weight is read off the autograd node of an operation.

A node names the operation and keeps what its backward pass needs: the input of a matrix product
whose matrix has a gradient, the indices of a lookup. An operation without a reader here, or with
options that its reader does not know, is an :class:`~lightning_taskinfo.fisher.ops.Other`, which
runs the operation's own backward pass.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from lightning_taskinfo.fisher.conv import Conv
from lightning_taskinfo.fisher.graph import Edge, shape_of
from lightning_taskinfo.fisher.ops import Elementwise, Embedding, Other, Product, Rows, Use

Weights = dict[
    int, Any
]  # shape and dtype of each weight, by its place among the operation's inputs
Uses = dict[int, Use]


def read(
    node: Node, sources: dict[int, Edge], rows: Rows, *, batch_statistics: bool = False
) -> Uses:
    """Return the uses of the weights at some inputs of an operation, by their places.

    Args:
        node: The operation.
        sources: Where its weights come from in the graph, by their places among its inputs.
        rows: Which sample each row of its output belongs to.
        batch_statistics: Whether a BatchNorm may normalise with the statistics of the batch.

    Raises:
        ValueError: If one does so and may not.
    """
    batch_norm = type(node).__name__ == "NativeBatchNormBackward0" and not batch_statistics
    if batch_norm and node._saved_training and rows.axis == 0:  # type: ignore[attr-defined]
        raise ValueError(
            "BatchNorm that normalises with the statistics of the batch mixes the samples, so that none has a gradient "
            "of its own; use running statistics: `model.eval()` and `track_running_stats=True`."
        )
    weights = {place: e.node._input_metadata[e.output_nr] for place, e in sources.items()}
    uses = _known_uses(node, weights)
    for place, source in sources.items():
        if place in uses:
            uses[place].rows = rows
        if place not in uses or not uses[place].fits():
            shape = tuple(weights[place].shape)
            uses[place] = Other(shape, Edge(node, 0), source, shape_of(node), rows=rows)
    return uses


def _known_uses(node: Node, weights: Weights) -> Uses:
    reader = READERS.get(type(node).__name__)
    try:
        return {} if reader is None else reader(node, weights)
    except AttributeError:  # another version of torch keeps other things
        return {}


def _product(
    node: Any, weights: Weights, left: int, names: tuple[str, str], *, grouped: bool = False
) -> Uses:
    """Read ``left @ right`` of two matrices, or of batches of them, with the weight on either side."""
    if (left in weights) == (left + 1 in weights):
        return {}
    right = left + 1 in weights
    inputs = getattr(node, f"_saved_{names[0 if right else 1]}").detach()
    if inputs.is_complex():
        return {}
    place = left + right
    axis = int(not right) + int(grouped)
    return {place: Product(tuple(weights[place].shape), inputs, axis, right, grouped)}


def _mm(node: Any, weights: Weights) -> Uses:
    return _product(node, weights, 0, ("self", "mat2"))


def _bmm(node: Any, weights: Weights) -> Uses:
    return _product(node, weights, 0, ("self", "mat2"), grouped=True)


def _addmm(node: Any, weights: Weights) -> Uses:
    uses = _product(node, weights, 1, ("mat1", "mat2")) if node._saved_alpha == 1 else {}
    if 0 in weights:
        uses[0] = _broadcast(node, weights[0], scale=node._saved_beta)
    return uses


def _convolution(node: Any, weights: Weights) -> Uses:
    uses: Uses = {}
    if 0 in weights:
        return uses
    if 2 in weights:
        uses[2] = _broadcast(node, weights[2], behind=len(shape_of(node)) - 2)
    if 1 not in weights:
        return uses
    (inputs,) = _saved(node, "input")
    if not inputs.is_complex():
        stride, padding, dilation, output_padding = (
            list(getattr(node, f"_saved_{name}"))
            for name in ("stride", "padding", "dilation", "output_padding")
        )
        uses[1] = Conv(
            tuple(weights[1].shape),
            inputs,
            shape_of(node)[2:],
            stride,
            padding,
            dilation,
            output_padding,
            node._saved_groups,
            node._saved_transposed,
        )
    return uses


def _embedding(node: Any, weights: Weights) -> Uses:
    if node._saved_scale_grad_by_freq:
        return {}
    shape = tuple(weights[0].shape)
    padding = node._saved_padding_idx  # -1, or that as an unsigned number, is none
    known = padding if 0 <= padding < shape[0] else None
    return {0: Embedding(shape, node._saved_indices, known)}


def _index_select(node: Any, weights: Weights) -> Uses:
    shape = tuple(weights[0].shape)
    if node._saved_dim != 0 or len(shape) != 2:
        return {}
    return {0: Embedding(shape, node._saved_index)}


def _layer_norm(node: Any, weights: Weights) -> Uses:
    x, mean, scale = _saved(node, "input", "result1", "result2")
    return _scale_and_shift(node, weights, 0, lambda: (x - mean).mul_(scale))


def _rms_norm(node: Any, weights: Weights) -> Uses:
    x, scale = _saved(node, "input", "result1")
    return _scale_and_shift(node, weights, 0, lambda: x * scale)


def _group_norm(node: Any, weights: Weights) -> Uses:
    x, mean, scale = _saved(node, "input", "result1", "result2")
    groups = (x.shape[0], node._saved_group, -1)

    def normalised() -> Tensor:
        centred = x.reshape(groups) - mean.view(*groups[:2], 1)
        return centred.mul_(scale.view(*groups[:2], 1)).view(x.shape)

    return _scale_and_shift(node, weights, x.dim() - 2, normalised)


def _batch_norm(node: Any, weights: Weights) -> Uses:
    (x,) = _saved(node, "input")
    if node._saved_training:
        mean, scale = _saved(node, "result1", "result2")
    else:
        mean, variance = _saved(node, "running_mean", "running_var")
        scale = (variance + node._saved_eps).rsqrt()
    shape = (1, -1, *[1] * (x.dim() - 2))
    return _scale_and_shift(
        node, weights, x.dim() - 2, lambda: (x - mean.view(shape)).mul_(scale.view(shape))
    )


def _saved(node: Any, *names: str) -> list[Tensor]:
    return [getattr(node, f"_saved_{name}").detach() for name in names]


def _scale_and_shift(
    node: Any, weights: Weights, behind: int, normalised: Callable[[], Tensor]
) -> Uses:
    """A normalisation: what its weight scales is computed when it is asked for."""
    if 0 in weights:
        return {}
    factors = {1: normalised, 2: None}
    return {
        place: _broadcast(node, weight, factors[place], behind=behind)
        for place, weight in weights.items()
    }


def _mul(node: Any, weights: Weights) -> Uses:
    if len(weights) != 1:
        return {}
    ((place, weight),) = weights.items()
    (other,) = _saved(node, "self" if place else "other")
    return {place: _broadcast(node, weight, lambda: other)}


def _add(node: Any, weights: Weights, sign: int = 1) -> Uses:
    if len(weights) != 1:
        return {}
    ((place, weight),) = weights.items()
    return {place: _broadcast(node, weight, scale=sign * node._saved_alpha if place else 1)}


def _sub(node: Any, weights: Weights) -> Uses:
    return _add(node, weights, sign=-1)


def _expand(node: Any, weights: Weights) -> Uses:
    return {0: _broadcast(node, weights[0])}


def _broadcast(
    node: Any,
    weight: Any,
    factor: Callable[[], Tensor] | None = None,
    *,
    scale: float = 1,
    behind: int = 0,
) -> Elementwise:
    """Read an operation on each entry, with a weight that is broadcast; ``behind`` it are so many axes more."""
    shape = tuple(weight.shape)
    before = len(shape_of(node)) - len(shape) - behind
    aligned = [*[1] * before, *shape, *[1] * behind]
    return Elementwise(shape, aligned, factor, scale, weight.dtype.is_complex)


READERS: dict[str, Callable[[Any, Weights], Uses]] = {
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
