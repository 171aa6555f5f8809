"""Which calls use parameters in a way that is understood, and what they saw."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_taskinfo.fisher.conv import Conv
from lightning_taskinfo.fisher.ops import BatchNorm, Elementwise, Embedding, Linear, Use


@dataclass
class Call:
    """A call that was understood: its kind, the tensors whose values it used, its parameters by slot."""

    kind: type[Use]
    saved: tuple[Tensor, ...]
    parameters: dict[str, Tensor | None]
    config: dict[str, Any] = field(default_factory=dict)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    """Read ``F.linear``."""
    return Call(Linear, (input,), {"weight": weight, "bias": bias}, {"axis": 0})


def conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Call | None:
    """Read ``F.conv1d``, ``F.conv2d`` and ``F.conv3d``; an unbatched call is left alone."""
    dims = weight.dim() - 2
    if input.dim() != weight.dim():
        return None
    stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(t % 2 for t in total):  # torch pads such inputs by one more on the right
            return None
        padding = [t // 2 for t in total]
    padding = _tuple(0 if padding == "valid" else padding, dims)
    config = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return Call(Conv, (input,), {"weight": weight, "bias": bias}, config)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Call:
    """Read ``F.batch_norm`` on running statistics; on those of the batch, samples have no gradients of their own."""
    if training or running_mean is None or running_var is None:
        raise ValueError(
            "BatchNorm that normalises with the statistics of the batch mixes the samples, so that none has a gradient "
            "of its own; use running statistics: `model.eval()` and `track_running_stats=True`."
        )
    call = _scale_and_shift(
        input,
        weight,
        bias,
        lambda x: F.batch_norm(x, running_mean, running_var, None, None, False, momentum, eps),
    )
    statistics = (running_mean.detach(), running_var.detach(), eps)
    return replace(call, kind=BatchNorm, config={**call.config, "statistics": statistics})


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Call:
    """Read ``F.group_norm``."""
    return _scale_and_shift(
        input, weight, bias, lambda x: F.group_norm(x, num_groups, None, None, eps)
    )


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Call:
    """Read ``F.instance_norm``."""

    def normalised(x: Tensor) -> Tensor:
        if use_input_stats:
            return F.instance_norm(x, eps=eps)
        return F.batch_norm(x, running_mean, running_var, None, None, False, momentum, eps)

    return _scale_and_shift(input, weight, bias, normalised)


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Call:
    """Read ``F.layer_norm``."""
    shape = list(normalized_shape)
    return _scale_and_shift(
        input,
        weight,
        bias,
        lambda x: F.layer_norm(x, shape, None, None, eps),
        [1] * (input.dim() - len(shape)) + shape,
    )


def rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Call:
    """Read ``F.rms_norm``."""
    shape = list(normalized_shape)
    return _scale_and_shift(
        input,
        weight,
        None,
        lambda x: F.rms_norm(x, shape, None, eps),
        [1] * (input.dim() - len(shape)) + shape,
    )


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Call | None:
    """Read ``F.embedding``; renormalised tables and gradients scaled by frequency are left alone."""
    if max_norm is not None or scale_grad_by_freq:
        return None
    if padding_idx is not None:
        padding_idx %= len(weight)
    return Call(Embedding, (input,), {"weight": weight}, {"padding_idx": padding_idx})


def _scale_and_shift(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalised: Callable[[Tensor], Tensor],
    aligned: list[int] | None = None,
) -> Call:
    """A normalisation: what ``weight`` scales is recomputed from the input when it is asked for."""
    if aligned is None:
        aligned = [1, input.shape[1], *[1] * (input.dim() - 2)]
    x = input.detach()
    config = {
        "aligned": {"weight": aligned, "bias": aligned},
        "factor": {"weight": lambda: normalised(x)},
    }
    return Call(Elementwise, (input,), {"weight": weight, "bias": bias}, config)


def _tuple(value: Any, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values
