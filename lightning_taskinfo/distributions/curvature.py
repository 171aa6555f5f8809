"""Curvature of the loss in the shapes a Gaussian over weights can take, block by block.

:func:`layer_input_matrices` is what a forward pass alone tells about it, layer by layer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, unfold

from lightning_taskinfo._nested import sample_count, split, take
from lightning_taskinfo._observe import (
    ParamDict,
    at_least_float32,
    full_precision,
    observing,
    parts,
    trainable_parameters,
)
from lightning_taskinfo.fisher import KroneckerFactors
from lightning_taskinfo.fisher.fallback import Forward


@dataclass(frozen=True)
class CurvatureBlock:
    r"""Curvature of a group of parameters, diagonal in a basis of its own.

    The parameters are laid side by side as a matrix :math:`W` with ``R`` rows: each one reshaped to ``[R, -1]``, a
    layer's bias being its last column. In the basis :math:`\tilde W = U_L^\top W\, U_R` the curvature is diagonal.
    One row is a block with a matrix of its own; a row per neuron shares one matrix among neurons; a basis on both sides
    is a Kronecker product. Nothing larger than ``[R, R]`` or ``[D, D]`` is ever formed.

    Attributes:
        names: The parameters, as in ``model.named_parameters()``.
        eigenvalues: Curvature of the **sum** of the loss in that basis, shape ``[R, D]``, float64.
        left: :math:`U_L`, orthogonal, shape ``[R, R]``; ``None`` is the identity.
        right: :math:`U_R`, orthogonal, shape ``[D, D]``; ``None`` is the identity.

    Example:
        >>> block = CurvatureBlock(("weight", "bias"), torch.ones(2, 4))  # two neurons, three inputs and the bias
        >>> block.pack({"weight": torch.zeros(2, 3), "bias": torch.ones(2)})
        tensor([[0., 0., 0., 1.],
                [0., 0., 0., 1.]])
    """

    names: tuple[str, ...]
    eigenvalues: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the group's tensors as one matrix ``[R, D]``."""
        rows = len(self.eigenvalues)
        return torch.cat([tensors[name].reshape(rows, -1) for name in self.names], dim=1)

    def unpack(self, matrix: Tensor, like: Mapping[str, Tensor]) -> ParamDict:
        """Cut a matrix ``[R, D]`` into tensors that have the shapes of the given ones."""
        widths = [like[name].numel() // len(matrix) for name in self.names]
        parts = dict(zip(self.names, matrix.split(widths, dim=1), strict=True))
        return {name: part.reshape(like[name].shape) for name, part in parts.items()}


def turned(tensor: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Return ``left @ tensor @ right.T``, the tensor seen as a matrix; ``None`` is the identity."""
    matrix = tensor
    if right is not None:
        matrix = matrix.reshape(-1, len(right)) @ right.T
    if left is not None:
        matrix = left @ matrix.reshape(len(left), -1)
    return matrix.reshape(tensor.shape)


def diagonal_curvature(diagonal: Mapping[str, Tensor]) -> list[CurvatureBlock]:
    """Wrap a diagonal of the curvature of the sum of the loss, such as ``N`` times the diagonal Fisher.

    Args:
        diagonal: The diagonal by parameter name, non-negative, shaped like the parameters.

    Example:
        >>> [block.eigenvalues.shape for block in diagonal_curvature({"weight": torch.ones(3, 2)})]
        [torch.Size([1, 6])]
    """
    rows = {name: _non_negative(name, values).reshape(1, -1) for name, values in diagonal.items()}
    return [CurvatureBlock((name,), row) for name, row in rows.items()]


def layer_curvature(model: nn.Module, matrices: Mapping[str, Tensor]) -> list[CurvatureBlock]:
    """Give each layer one matrix over all its weights, in the order of its parameters; for small layers only.

    Args:
        model: The network.
        matrices: By layer, the curvature of the sum of the loss, shape ``[k, k]`` for a layer of ``k`` weights.

    Example:
        >>> (block,) = layer_curvature(nn.Linear(2, 1), {"": torch.diag(torch.tensor([1.0, 2.0, 3.0]))})
        >>> block.names, block.eigenvalues.tolist()
        (('weight', 'bias'), [[1.0, 2.0, 3.0]])
    """
    one_row = {layer: matrix.new_ones(1) for layer, matrix in matrices.items()}
    return neuron_curvature(model, matrices, scales=one_row)


def neuron_curvature(
    model: nn.Module,
    matrices: Mapping[str, Tensor],
    *,
    scales: Mapping[str, Tensor] | None = None,
) -> list[CurvatureBlock]:
    r"""Give every neuron of a layer the same matrix over its incoming weights.

    .. math:: H_{lj} = b_{lj} \sum_x z_l z_l^\top

    Args:
        model: The network.
        matrices: By layer, shape ``[D, D]``; the last row and column belong to the bias, if there is one. See
            :func:`~lightning_taskinfo.distributions.layer_input_matrices`, times the number of samples.
        scales: By layer, how strongly the loss feels each neuron, :math:`b_{lj}`, shape ``[R]``; 1 by default.

    Example:
        >>> matrices, scales = {"": torch.eye(2)}, {"": torch.tensor([1.0, 5.0])}
        >>> (block,) = neuron_curvature(nn.Linear(2, 2, bias=False), matrices, scales=scales)
        >>> block.eigenvalues.tolist()
        [[1.0, 1.0], [5.0, 5.0]]

    References:
        Pitas, *On PAC-Bayes bounds for deep neural networks using the loss curvature*, section 5.2.
    """
    names_of = {p: name for name, p in trainable_parameters(model).items()}  # a tied one has one
    blocks = []
    for layer, matrix in matrices.items():
        values, basis = _eigen(layer, matrix)
        own = model.get_submodule(layer).parameters(recurse=False)
        names = tuple(names_of[p] for p in own if p.requires_grad)
        if scales is None:
            scale = values.new_ones(len(model.get_parameter(names[0])))
        else:
            scale = _non_negative(layer, scales[layer])
        blocks.append(CurvatureBlock(names, scale[:, None] * values, right=basis))
    return blocks


def kronecker_curvature(
    factors: Mapping[str, KroneckerFactors], *, scale: float = 1.0
) -> list[CurvatureBlock]:
    r"""Give each parameter a Kronecker product, :math:`H = s\,\mathrm{rows} \otimes \mathrm{columns}`.

    Args:
        factors: By parameter name, see :func:`~lightning_taskinfo.fisher.kronecker_factors`.
        scale: The :math:`s`; the number of samples turns factors that are means into those of the sum of the loss.

    Example:
        >>> factors = KroneckerFactors(torch.diag(torch.tensor([3.0, 5.0])), torch.tensor([1.0, 2.0]))
        >>> (block,) = kronecker_curvature({"weight": factors}, scale=10.0)
        >>> block.eigenvalues.tolist()
        [[30.0, 60.0], [50.0, 100.0]]
    """
    blocks = []
    for name, block in factors.items():
        columns = block.rows.new_ones(1) if block.columns is None else block.columns
        of_rows, left = _eigen(name, block.rows)
        of_columns, right = _eigen(name, columns)
        eigenvalues = scale * of_rows[:, None] * of_columns
        blocks.append(CurvatureBlock((name,), eigenvalues, left, right))
    return blocks


def with_diagonal(
    blocks: Iterable[CurvatureBlock], diagonal: Mapping[str, Tensor]
) -> list[CurvatureBlock]:
    """Add diagonal blocks for the parameters that ``blocks`` leave out.

    Args:
        blocks: The blocks that there are.
        diagonal: A diagonal of the curvature of the sum of the loss, by parameter name; of all parameters, or of those.

    Example:
        >>> diagonal = {"weight": torch.ones(2), "bias": torch.ones(1)}
        >>> first = diagonal_curvature({"weight": torch.zeros(2)})
        >>> [(block.names, block.eigenvalues.tolist()) for block in with_diagonal(first, diagonal)]
        [(('weight',), [[0.0, 0.0]]), (('bias',), [[1.0]])]
    """
    found = [*blocks]
    known = {name for block in found for name in block.names}
    others = {name: values for name, values in diagonal.items() if name not in known}
    return found + diagonal_curvature(others)


def _non_negative(name: str, values: Tensor) -> Tensor:
    values = values.detach().double()
    if not bool((values >= 0).all()):
        raise ValueError(
            f"The curvature of `{name}` must be non-negative, got {values.min().item()}."
        )
    return values


def _eigen(name: str, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return eigenvalues and basis of a matrix; no basis for one that is kept as its diagonal."""
    if matrix.dim() == 1:
        return _non_negative(name, matrix), None
    values, basis = torch.linalg.eigh(matrix.detach().double())
    if values[0] < -1e-5 * values[-1].abs():
        raise ValueError(
            f"The curvature of `{name}` must be positive semi-definite, got eigenvalue {values[0]}."
        )
    return values.clamp_min(0), basis


def layer_input_matrices(
    model: nn.Module,
    inputs: Any,
    *,
    chunk_size: int = 1024,
    forward_fn: Forward | None = None,
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
    names = _layers(model)
    n = sample_count(inputs)

    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        z = _columns(module, args[0].detach())  # [N·T, D]
        products = (z.T @ z).double()
        layer = names[module]
        matrices[layer] = matrices.get(layer, 0) + products / n

    with ExitStack() as stack:
        stack.enter_context(observing(model))
        stack.enter_context(full_precision(parts(model)))
        stack.enter_context(torch.no_grad())
        for module in names:
            stack.enter_context(module.register_forward_pre_hook(add))
        for chunk in split(take(inputs, at_least_float32), chunk_size):
            if forward_fn is None:
                model(chunk)
            else:
                forward_fn(model, chunk)
    return matrices


def _layers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers that a matrix of inputs describes whole, with their names."""
    owners = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    found = {}
    for name, module in model.named_modules():
        plain_conv = isinstance(module, nn.Conv2d) and module.groups == 1
        if not plain_conv and not isinstance(module, nn.Linear):
            continue
        if "weight" not in module._parameters:  # a parametrized weight is made of others
            continue
        own = module.parameters(recurse=False)
        if all(p.requires_grad and owners[p] == 1 for p in own):
            found[module] = name
    return found


def _columns(module: nn.Module, z: Tensor) -> Tensor:
    """Return what a layer multiplies its weights by, a row for each place, ``[N·T, D]``."""
    if isinstance(module, nn.Conv2d):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        z = pad(z, module._reversed_padding_repeated_twice, mode=mode)
        patches = unfold(z, module.kernel_size, module.dilation, stride=module.stride)
        z = patches.transpose(1, 2)
    z = z.flatten(0, -2)
    if module.bias is None:
        return z
    ones = z.new_ones(len(z), 1)
    return torch.cat([z, ones], dim=1)
