"""Layer by layer, what a forward pass alone tells about the curvature."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import sample_count, take
from lightning_taskinfo._observe import at_least_float32, full_precision, observing, parts
from lightning_taskinfo.fisher.fallback import Forward


def layer_input_matrices(
    model: nn.Module, inputs: Any, *, chunk_size: int = 1024, forward_fn: Forward | None = None
) -> dict[str, Tensor]:
    r"""Mean of :math:`z_l z_l^\top` over the inputs of each linear and convolutional layer.

    .. math:: A_l = \frac1N \sum_x \sum_t z_{l,t}(x)\, z_{l,t}(x)^\top, \qquad z = (\text{layer input}, 1)

    One forward pass is enough. The sum runs over the places :math:`t` at which a layer is applied:
    time steps, the patches of a convolution, repeated calls. The 1 belongs to the bias. Layers with
    weights that are frozen, parametrized, or shared with another module are left out, as are
    grouped convolutions.

    Args:
        model: The network, measured in eval mode.
        inputs: A batch of ``N`` inputs: a tensor, or tuples, lists and dicts of tensors.
        chunk_size: Inputs that go through the network at a time.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by
            default.

    Returns:
        Float64 matrices ``[D, D]`` by layer.

    Example:
        >>> layer_input_matrices(nn.Linear(1, 3), torch.tensor([[1.0], [3.0]]))[""]
        tensor([[5., 2.],
                [2., 1.]], dtype=torch.float64)
    """
    matrices: dict[str, Tensor] = {}
    n = sample_count(inputs)
    with (
        observing(model),
        full_precision(parts(model)),
        torch.no_grad(),
        _capturing(model) as captured,
    ):
        for chunk in _chunks(inputs, chunk_size):
            (forward_fn or nn.Module.__call__)(model, chunk)
            for layer, calls in captured.items():
                for z in calls:
                    matrices[layer] = matrices.get(layer, 0) + (z.T @ z).double() / n
            captured.clear()
    return matrices


def _chunks(inputs: Any, size: int) -> Iterator[Any]:
    inputs = take(inputs, at_least_float32)
    for start in range(0, sample_count(inputs), size):
        yield take(inputs, itemgetter(slice(start, start + size)))


@contextmanager
def _capturing(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect by layer, call by call, the inputs as rows ``[N·T, D]``."""
    captured: dict[str, list[Tensor]] = defaultdict(list)
    handles = []
    for layer, module in _layers(model).items():

        def hook(module: nn.Module, args: tuple[Tensor, ...], layer: str = layer) -> None:
            captured[layer].append(_columns(module, args[0].detach()))

        handles.append(module.register_forward_pre_hook(hook))
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1))
        and "weight" in module._parameters  # a parametrized weight is made of others
        and all(p.requires_grad and owners[id(p)] == 1 for p in module.parameters(recurse=False))
    }


def _columns(module: nn.Module, z: Tensor) -> Tensor:
    if isinstance(module, nn.Conv2d):
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            top = module._reversed_padding_repeated_twice
            z = nn.functional.pad(
                z, top, mode="constant" if module.padding_mode == "zeros" else module.padding_mode
            )
            padding: tuple[int, ...] = (0, 0)
        else:
            padding = module.padding
        z = nn.functional.unfold(
            z, module.kernel_size, module.dilation, padding, module.stride
        ).transpose(1, 2)
    z = z.flatten(0, -2)
    return z if module.bias is None else torch.cat([z, z.new_ones(len(z), 1)], dim=1)
