"""Gradients pulled back through a part of an autograd graph, many at once."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Edge = GradientEdge


def shape_of(node: Node, number: int = 0) -> torch.Size:
    """Return the shape of what an operation put out."""
    return torch.Size(node._input_metadata[number].shape)


def ones_at(edge: Edge) -> Tensor:
    """Return a tensor of ones like what an operation put out."""
    like: Any = edge.node._input_metadata[edge.output_nr]
    return torch.ones(like.shape, dtype=like.dtype, device=like.device)


def vjp(output: Edge, source: Edge, gradient: Tensor) -> Tensor:
    """Pull one gradient back from ``output`` to ``source``, through whatever lies between the two."""
    if output == source:
        return gradient
    (pulled,) = torch.autograd.grad(
        [output], [source], [gradient], retain_graph=True, allow_unused=True
    )
    return gradient.new_zeros(shape_of(source.node, source.output_nr)) if pulled is None else pulled


def batched_vjp(output: Edge, source: Edge, gradients: Tensor) -> Tensor:
    """Pull gradients ``[n, ...]`` back from ``output`` to ``source``: in one pass, or one by one where vmap fails."""
    if output == source:
        return gradients
    try:
        with (
            warnings.catch_warnings()
        ):  # operations that vmap takes one by one are no slower than without it
            warnings.filterwarnings("ignore", message="There is a performance drop")
            (pulled,) = torch.autograd.grad(
                [output],
                [source],
                [gradients],
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
    except (
        Exception
    ):  # of any type, in an operation of the user's; if it is no matter of vmap, it comes again
        return torch.stack([vjp(output, source, gradient) for gradient in gradients])
    if pulled is None:
        return gradients.new_zeros(len(gradients), *shape_of(source.node, source.output_nr))
    return pulled
