"""The curvatures that may shape a post-distribution: which there are, and how they are estimated."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from lightning_taskinfo._batches import outputs_of
from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo.certificates.subject import Subject, pick
from lightning_taskinfo.distributions import (
    CurvatureBlock,
    LowRankCurvature,
    diagonal_curvature,
    kronecker_curvature,
    layer_input_matrices,
    neuron_curvature,
    with_diagonal,
)
from lightning_taskinfo.fisher import KroneckerFactors, fisher_diagonal, kronecker_factors

Structure: TypeAlias = Literal["isotropic", "diagonal", "layer_inputs", "neuron", "kron"]
Structures: TypeAlias = Structure | Literal["auto"] | Sequence[Structure]
Curvature: TypeAlias = Sequence[CurvatureBlock] | LowRankCurvature
WIDEST = 2048  # inputs of a layer up to which "auto" tries matrices of them


def curvatures_to_try(
    subject: Subject,
    structure: Structures | Curvature,
    samples: int,
) -> dict[str, Curvature]:
    """Return the curvatures to search by name: those of the named structures, or the given one.

    Args:
        subject: The network and its samples.
        structure: Names, or a curvature that is ready.
        samples: How many inputs to estimate it from.
    """
    if isinstance(structure, LowRankCurvature) or any(
        isinstance(part, CurvatureBlock) for part in structure
    ):
        return {"given": cast(Curvature, structure)}
    names = affordable_structures(subject, cast(Structures, structure))
    return curvatures_of(subject, names, samples)


def named_structures(structure: str | Iterable[str]) -> tuple[Structure, ...]:
    """Return the structures of one name or several; raise a ``ValueError`` if there is none, or one is none.

    Example:
        >>> named_structures("kron"), named_structures(["isotropic", "neuron"])
        (('kron',), ('isotropic', 'neuron'))
    """
    if isinstance(structure, str):
        structure = [structure]
    names = tuple(structure)
    if not names:
        raise ValueError("`structure` must name at least one structure, got none.")
    if names == ("auto",):
        return get_args(Structure)
    for name in names:
        if name not in get_args(Structure):
            raise ValueError(
                f"`structure` must be 'auto' or one of {get_args(Structure)}, got {name!r}."
            )
    return cast(tuple[Structure, ...], names)


def affordable_structures(subject: Subject, structure: Structures) -> tuple[Structure, ...]:
    """Return the named structures; of ``"auto"`` those that this network can afford.

    All of them share one prior and one price, so that trying more of them costs time and nothing
    else. The layer-wise ones need a matrix as wide as a layer has inputs.
    """
    names = named_structures(structure)
    only_of_classes = {"neuron", "kron"} & {*names}
    if subject.error != "class" and structure != "auto" and only_of_classes:
        raise ValueError(
            "`structure` must be 'auto', 'isotropic', 'diagonal' or 'layer_inputs' where `error` is "
            f"{subject.error!r}, got {structure!r}."
        )
    if structure != "auto":
        return names
    weights = trainable_parameters(subject.model).values()
    widths = [p[0].numel() for p in weights if p.ndim > 1]
    if max(widths, default=0) > WIDEST:
        return ("isotropic", "diagonal")
    return names if subject.error == "class" else ("isotropic", "diagonal", "layer_inputs")


def curvatures_of(
    subject: Subject,
    structures: Sequence[Structure],
    samples: int,
) -> dict[str, Curvature]:
    """Return curvatures of the **sum** of the loss by name, estimated from one random part of the inputs.

    Args:
        subject: The network and its samples.
        structures: Which ones; parameters that a layer-wise structure cannot represent get a
            diagonal.
        samples: How many inputs to look at.
    """
    model = subject.model
    n = subject.n
    g = subject.generator
    forward = partial(outputs_of, forward_fn=subject.forward_fn)
    order = torch.randperm(n, generator=g, device=g.device)
    index = order[:samples]
    inputs = subject.some(index)
    # Labels say where there is padding.
    padded = subject.error != "class" and subject.loss_fn is None
    targets = None
    if padded:
        targets = pick(subject.targets, index, subject.device)
    diagonal: dict[str, Tensor] = {}
    if {*structures} != {"kron"}:
        fisher = fisher_diagonal(
            model,
            inputs,
            targets,
            labels="sampled",
            generator=g,
            forward_fn=forward,
        )
        diagonal = {name: n * h for name, h in fisher.items()}
    matrices: dict[str, Tensor] = {}
    if {"layer_inputs", "neuron"} & {*structures}:
        matrices = layer_input_matrices(model, inputs, forward_fn=forward)
    factors: Mapping[str, KroneckerFactors] = {}
    if {"neuron", "kron"} & {*structures}:
        factors = kronecker_factors(
            model,
            inputs,
            labels="sampled",
            generator=g,
            forward_fn=forward,
        )
    found: dict[str, Curvature] = {}
    for structure in structures:
        if structure == "diagonal":
            found[structure] = diagonal_curvature(diagonal)
        elif structure == "isotropic":
            everything = [h.flatten() for h in diagonal.values()]
            mean = torch.cat(everything).mean().item()
            same = {}
            for name, h in diagonal.items():
                same[name] = torch.full_like(h, mean)
            found[structure] = diagonal_curvature(same)
        elif structure == "kron":
            found[structure] = kronecker_curvature(factors, scale=n)
        else:
            scales = None
            if structure == "neuron":
                scales = {
                    layer: _felt(factors[f"{layer}.weight".lstrip(".")], A)
                    for layer, A in matrices.items()
                }
            sums = {layer: n * A for layer, A in matrices.items()}
            blocks = neuron_curvature(model, sums, scales=scales)
            found[structure] = with_diagonal(blocks, diagonal)
    return found


def _felt(weight: KroneckerFactors, A: Tensor) -> Tensor:
    """Return how strongly the loss feels each neuron: with it, ``A`` has the trace of the neuron's own block."""
    of_neurons, of_inputs = weight.diagonals()
    same = A.diagonal()[: len(of_inputs)].sum()  # without the bias
    return of_neurons * (of_inputs.sum() / same)


def diagonal_of(curvature: LowRankCurvature) -> list[CurvatureBlock]:
    """Return the diagonal of a curvature of low rank."""
    scales = curvature.scales.double()
    diagonal = {}
    for name, h in curvature.diagonal.items():
        squares = curvature.factor[name].double() ** 2
        along = torch.tensordot(scales, squares, dims=1)
        diagonal[name] = h.double() + along
    return diagonal_curvature(diagonal)
