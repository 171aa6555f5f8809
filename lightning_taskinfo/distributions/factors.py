"""Layer by layer, what a forward pass (and a backward pass to the layers' outputs) tells about the curvature."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_taskinfo._arguments import checked_arguments
from lightning_taskinfo._batches import sample_count, take
from lightning_taskinfo._observe import at_least_float32, full_precision, observing, parts
from lightning_taskinfo.fisher.per_sample import Forward


@checked_arguments
def layer_input_matrices(
    model: nn.Module, inputs: Any, *, chunk_size: int = 1024, forward_fn: Forward | None = None
) -> dict[str, Tensor]:
    r"""Mean of :math:`z_l z_l^\top` over the inputs of each linear and convolutional layer.

    .. math:: A_l = \frac1N \sum_x \sum_t z_{l,t}(x)\, z_{l,t}(x)^\top, \qquad z = (\text{layer input}, 1)

    One forward pass is enough. The sum runs over the places :math:`t` at which a layer is applied: time steps, the
    patches of a convolution, repeated calls. The 1 belongs to the bias. Layers with weights that are frozen,
    parametrized, or shared with another module are left out, as are grouped convolutions.

    Args:
        model: The network, measured in eval mode.
        inputs: A batch of ``N`` inputs: a tensor, or tuples, lists and dicts of tensors.
        chunk_size: Inputs that go through the network at a time.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by default.

    Returns:
        Float64 matrices ``[D, D]`` by layer.

    Example:
        >>> layer_input_matrices(nn.Linear(1, 3), torch.tensor([[1.0], [3.0]]))[""]
        tensor([[5., 2.],
                [2., 1.]], dtype=torch.float64)
    """
    matrices: dict[str, Tensor] = {}
    n = sample_count(inputs)
    with observing(model), full_precision(parts(model)), torch.no_grad(), _capturing(model) as captured:
        for chunk in _chunks(inputs, chunk_size):
            (forward_fn or nn.Module.__call__)(model, chunk)
            for layer, (calls, _) in captured.items():
                for z in calls:
                    matrices[layer] = matrices.get(layer, 0) + (z.T @ z).double() / n
            captured.clear()
    return matrices


@checked_arguments
def layer_kronecker_factors(
    model: nn.Module,
    inputs: Any,
    *,
    generator: Generator | None = None,
    chunk_size: int = 1024,
    forward_fn: Forward | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    r"""Kronecker factors of the Fisher information of a classifier, with labels drawn from the model.

    .. math:: F_l \approx A_l \otimes B_l, \qquad B_l = \frac{1}{NT} \sum_x \sum_t g_{l,t}(x)\, g_{l,t}(x)^\top

    with :math:`A_l` from :func:`layer_input_matrices` and :math:`g_{l,t}` the gradient of the log-likelihood of a
    sampled label with respect to the layer's output at place :math:`t`. Exact for a single linear layer whose inputs
    and output gradients are independent.

    Args:
        model: A network that returns logits ``[N, C]``, measured in eval mode.
        inputs: A batch of ``N`` inputs: a tensor, or tuples, lists and dicts of tensors.
        generator: Where the labels come from.
        chunk_size: Inputs that go through the network at a time.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by default.

    Returns:
        Float64 ``(A, B)`` by layer, ``[D, D]`` and ``[R, R]``.

    Example:
        >>> factors = layer_kronecker_factors(nn.Linear(4, 3), torch.randn(8, 4))
        >>> [tuple(factor.shape) for factor in factors[""]]  # the bias is one more input
        [(5, 5), (3, 3)]

    References:
        Martens, Grosse, *Optimizing neural networks with Kronecker-factored approximate curvature*, ICML 2015.
    """
    A: dict[str, Tensor] = {}
    B: dict[str, Tensor] = {}
    places: Counter[str] = Counter()
    n = sample_count(inputs)
    with observing(model), full_precision(parts(model)), _capturing(model) as captured:
        for chunk in _chunks(inputs, chunk_size):
            log_p = (forward_fn or nn.Module.__call__)(model, chunk).log_softmax(-1)
            label = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
            edges = [edge for _, edges in captured.values() for edge in edges]
            gradients = iter(torch.autograd.grad(log_p.gather(1, label).sum(), edges, allow_unused=True))
            for layer, (calls, edges) in captured.items():
                for z, _ in zip(calls, edges, strict=True):
                    gradient, module = next(gradients), model.get_submodule(layer)
                    unused = z.new_zeros(len(z), len(module.get_parameter("weight")))  # by the output
                    g = unused if gradient is None else _rows(module, gradient)
                    A[layer] = A.get(layer, 0) + (z.T @ z).double() / n
                    B[layer] = B.get(layer, 0) + (g.T @ g).double()
                    places[layer] += len(g)
            captured.clear()
    return {layer: (A[layer], B[layer] / places[layer]) for layer in A}


def _chunks(inputs: Any, size: int) -> Iterator[Any]:
    inputs = take(inputs, at_least_float32)
    for start in range(0, sample_count(inputs), size):
        yield take(inputs, itemgetter(slice(start, start + size)))


Calls = dict[str, tuple[list[Tensor], list[GradientEdge]]]


@contextmanager
def _capturing(model: nn.Module) -> Iterator[Calls]:
    """Collect by layer, call by call, the inputs as rows ``[N·T, D]`` and the gradient edges of the outputs."""
    captured: Calls = defaultdict(lambda: ([], []))
    handles = []
    for layer, module in _layers(model).items():

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor, layer: str = layer) -> Tensor:
            calls, edges = captured[layer]
            calls.append(_columns(module, args[0].detach()))
            if output.requires_grad:
                output = output.clone() if output._is_view() else output  # changing a view in place cuts its edge off
                edges.append(get_gradient_edge(output))  # an edge, unlike the tensor, survives in-place changes
            return output

        handles.append(module.register_forward_hook(hook))
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
            z = nn.functional.pad(z, top, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
            padding: tuple[int, ...] = (0, 0)
        else:
            padding = module.padding
        z = nn.functional.unfold(z, module.kernel_size, module.dilation, padding, module.stride).transpose(1, 2)
    z = z.flatten(0, -2)
    return z if module.bias is None else torch.cat([z, z.new_ones(len(z), 1)], dim=1)


def _rows(module: nn.Module, g: Tensor) -> Tensor:
    return g.flatten(2).transpose(1, 2).flatten(0, 1) if isinstance(module, nn.Conv2d) else g.flatten(0, -2)
