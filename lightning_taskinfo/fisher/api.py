"""Trace, diagonal, layer traces and Gram matrix: what is made of the squared gradients."""

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._nested import sample_count
from lightning_taskinfo._observe import ParamDict, trainable_parameters
from lightning_taskinfo._random import keep_random_states
from lightning_taskinfo.fisher.accumulators import Gram, TraceSums
from lightning_taskinfo.fisher.measure import (
    Forward,
    Request,
    measure,
    squared_gradients_by_name,
    squared_norms_by_name,
)
from lightning_taskinfo.functional.likelihood import Labels, Likelihood


def fisher_trace(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    *,
    labels: Labels = "sampled",
    likelihood: str | Likelihood = "categorical",
    mc_samples: int = 1,
    generator: Generator | None = None,
    chunk_size: int | None = None,
    forward_fn: Forward | None = None,
) -> Tensor:
    r"""Trace of the Fisher information of the trainable weights, a mean over samples.

    .. math:: \operatorname{tr} F(w) = \frac1N \sum_n \mathbb{E}_{y \sim p_w(\cdot|x_n)} \|\nabla_w \log p_w(y|x_n)\|^2

    The model is measured in eval mode, in float32 or better, and comes back as it was: modes,
    buffers, gradients and random states. Where it draws random numbers in eval mode, too, each
    sample has a draw of its own. Hooks on parameters do not run, with a warning.

    Args:
        model: Any module; its parameters with ``requires_grad=True`` are measured.
        inputs: A batch of ``N`` inputs: a tensor ``[N, ...]``, or tuples, lists and dicts of them;
            or a batch of Hugging Face with its ``labels``, which are then the targets, shifted as
            the model's own loss does it.
        targets: The dataset's labels, ``[N, ...]``. Needed for ``labels="empirical"``; otherwise
            they only say, by ``ignore_index``, which outputs do not count.
        labels: Whose labels: ``"sampled"`` from the model (unbiased), ``"exact"`` expectation over
            them, or the dataset's (``"empirical"``, which is not the Fisher).
        likelihood: What the outputs mean: ``"categorical"`` logits ``[N, C]`` or ``[N, T, C]``,
            ``"bernoulli"`` logits or ``"gaussian"`` means; or a
            :class:`~lightning_taskinfo.functional.likelihood.Likelihood`, such as
            ``Gaussian(std=0.1)``.
        mc_samples: Number of labels drawn for each sample, for ``labels="sampled"``.
        generator: Source of the draws, on the device of the outputs. By default torch's own state
            decides them and is left as it is, so that two calls draw the same labels.
        chunk_size: Samples of one forward pass; memory grows with it, not with ``N``.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs) -> outputs``; found out by
            default: inputs are handed over as they are, or by name, and outputs may be a tensor or
            have ``logits``.

    Returns:
        The trace, a scalar.

    Raises:
        ValueError: If an argument is out of its range, outputs and targets do not fit the
            likelihood, nothing is trainable, or a BatchNorm is in train mode.

    Example:
        >>> from torch import nn, ones
        >>> net = nn.Linear(3, 2, bias=False)
        >>> _ = nn.init.zeros_(net.weight)
        >>> fisher_trace(net, ones(1, 3), labels="exact")  # ‖x‖²(1 - ‖p‖²) = 3 · ½
        tensor(1.5000)
    """
    request = Request(labels, likelihood, mc_samples, generator, chunk_size, forward_fn)
    norms = squared_norms_by_name(model, inputs, targets, request)
    return _scalar(TraceSums.of(norms).compute().trace, norms)


def per_sample_squared_norms(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    **options: Any,
) -> Tensor:
    r"""Squared gradient norm of each sample, :math:`\mathbb{E}_y \|\nabla_w \log p_w(y|x_n)\|^2`, shape ``[N]``.

    Their mean is :func:`fisher_trace`, which explains the arguments; their spread gives its
    standard error.

    Args:
        model: Any module.
        inputs: A batch of ``N`` inputs.
        targets: The dataset's labels.
        **options: The other arguments of :func:`fisher_trace`.

    Example:
        >>> from torch import nn, tensor
        >>> net = nn.Linear(1, 1, bias=False)
        >>> per_sample_squared_norms(net, tensor([[1.0], [2.0]]), labels="exact", likelihood="gaussian")  # x²
        tensor([1., 4.])
    """
    norms = squared_norms_by_name(model, inputs, targets, Request(**options))
    return torch.stack([*norms.values()]).sum(0)


def layer_traces(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Trace of the Fisher information by the module that owns the parameters; they add up to :func:`fisher_trace`.

    Takes the arguments of :func:`fisher_trace`. A tied parameter counts for the module that is
    named first, and all parts of an adapter for the layer that it adapts.

    Args:
        model: Any module.
        inputs: A batch of ``N`` inputs.
        targets: The dataset's labels.
        **options: The other arguments of :func:`fisher_trace`.

    Example:
        >>> from torch import nn, ones
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> list(layer_traces(net, ones(1, 1), labels="exact", likelihood="gaussian"))
        ['0', '1']
    """
    norms = squared_norms_by_name(model, inputs, targets, Request(**options))
    layers = TraceSums.of(norms).compute().layers
    return {layer: _scalar(part, norms) for layer, part in layers.items()}


def fisher_diagonal(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    **options: Any,
) -> ParamDict:
    r"""Diagonal of the Fisher information by parameter name, a mean over samples, shaped like the parameters.

    .. math:: F_{ii} = \frac1N \sum_n \mathbb{E}_{y \sim p_w(\cdot|x_n)} (\partial_i \log p_w(y|x_n))^2

    Each sample's gradient is squared, never the mean gradient of a batch. Takes the arguments of
    :func:`fisher_trace`.

    Args:
        model: Any module.
        inputs: A batch of ``N`` inputs.
        targets: The dataset's labels.
        **options: The other arguments of :func:`fisher_trace`.

    Example:
        >>> from torch import nn, tensor
        >>> net = nn.Linear(2, 1)
        >>> fisher_diagonal(net, tensor([[1.0, 2.0]]), labels="exact", likelihood="gaussian")
        {'weight': tensor([[1., 4.]]), 'bias': tensor([1.])}
    """
    n = sample_count(inputs)
    sums = squared_gradients_by_name(model, inputs, targets, Request(**options))
    return {name: part.div_(n) for name, part in sums.items()}


def gradient_gram(
    model: nn.Module,
    inputs: Any,
    targets: Tensor | None = None,
    **options: Any,
) -> Tensor:
    r"""Gram matrix :math:`\xi = J J^\top` of the samples' gradients, shape ``[N, N]``, in float64 and not divided.

    .. math:: \xi_{nm} = \langle \nabla_w \log p_w(y_n|x_n), \nabla_w \log p_w(y_m|x_m) \rangle

    Gradients are multiplied in the precision of the weights, a thousand entries at a time, and
    these products are summed in float64. Takes the arguments of :func:`fisher_trace`; labels are
    the dataset's by default, or one draw from the model.

    Args:
        model: Any module.
        inputs: A batch of ``N`` inputs.
        targets: The dataset's labels.
        **options: The other arguments of :func:`fisher_trace`.

    Raises:
        ValueError: As for :func:`fisher_trace`, and for ``labels="exact"`` or several
            ``mc_samples``, which have several gradients per sample.

    Example:
        >>> from torch import nn, tensor
        >>> net = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(net.weight)
        >>> gradient_gram(net, tensor([[1.0], [2.0]]), tensor([[1.0], [1.0]]), likelihood="gaussian")
        tensor([[1., 2.],
                [2., 4.]], dtype=torch.float64)
    """
    options.setdefault("labels", "empirical")
    request = Request(**options)
    if request.labels == "exact" or request.mc_samples > 1:
        raise ValueError(
            "`labels` must be 'empirical' or 'sampled', and `mc_samples` must be 1 for a Gram matrix of gradients, "
            f"got {request.labels!r} and {request.mc_samples}."
        )
    n = sample_count(inputs)
    device = next(model.parameters()).device
    gram = torch.zeros(n, n, dtype=torch.float64, device=device)
    states = [(source, source.get_state()) for source in [request.generator] if source]
    restore = keep_random_states({gram.device, torch.device("cpu")})
    wanted = {*trainable_parameters(model)}
    while wanted:  # with the same labels in every pass
        for source, state in states:
            source.set_state(state)
        products = Gram(gram, wanted)
        # A likelihood may draw labels, too: a copy starts from the same place.
        again = replace(request, likelihood=copy(request.likelihood))
        measure(model, inputs, targets, again, products)
        restore()
        products.close()
        wanted = products.postponed
    return gram


def _scalar(
    value: float,
    norms: ParamDict,
) -> Tensor:
    """Return a number as a tensor of the type and on the device of the norms it was made of."""
    return next(iter(norms.values())).new_tensor(value)
