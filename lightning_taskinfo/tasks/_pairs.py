r"""One task, or the disjoint union of two: a shared trunk with a head for each, and the information in its parts.

The divergence of each part is weighted by :math:`\beta` times the number of samples that reach it, over the number of
samples of the first task: the trunk of a union of :math:`N_{12}` samples has :math:`\beta N_{12}/N_1`, the head of task
:math:`i` has :math:`\beta N_i/N_1`. That is one :math:`\beta` for the mean of the loss that a part sees, and the
minimisers for :math:`D` and for :math:`D \sqcup D` are then the same, in any network.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from lightning_taskinfo._observe import ParamDict
from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.functional.information import information_in_weights
from lightning_taskinfo.functional.likelihood import Categorical, Likelihood
from lightning_taskinfo.tasks._sweep import START, center_of, stage_seed
from lightning_taskinfo.tasks.training import (
    ModelFn,
    Samples,
    Training,
    build,
    expected_loss,
    initial_weights,
    loss_sum,
    train_noisy,
    train_plain,
)
from lightning_taskinfo.variational import add_weight_noise, noisy_weights

HeadFn: TypeAlias = Callable[[int, int], nn.Module]
Method: TypeAlias = Literal["variational", "laplace"]
IMPOSSIBLE = -1e4  # the logit of a class that a task does not have: its probability is exactly 0


class MultiHead(nn.Module):
    """A trunk for all tasks and a head for each; the input carries the index of its task.

    Args:
        trunk: Makes features ``[N, F]`` of inputs.
        heads: One head a task, from features to outputs ``[N, C]``.
    """

    def __init__(self, trunk: nn.Module, heads: list[nn.Module]) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(heads)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Return the outputs of each sample's own head, filled up to the widest, shape ``[N, C]``."""
        x, task = inputs
        features = self.trunk(x)
        outputs = [head(features) for head in self.heads]
        width = max(output.shape[1] for output in outputs)
        padded = [nn.functional.pad(o, (0, width - o.shape[1]), value=IMPOSSIBLE) for o in outputs]
        return torch.stack(padded, 1)[torch.arange(len(x)), task]


@dataclass(frozen=True)
class Plan:
    """What all trainings of a matrix have in common; the arguments of ``task_distance``."""

    trunk_fn: ModelFn
    head_fn: HeadFn
    method: Method
    beta: float
    prior_center: Literal["initial", "zero"]
    prior_std: float
    likelihood: Likelihood
    training: Training


@dataclass(frozen=True)
class Cell:
    """Everything another process needs to train on one task or on two; arrays, since tensors travel badly.

    Args:
        plan: What all cells have in common.
        inputs: Inputs of each task.
        targets: Their targets.
        outputs: Number of outputs of each task.
        seed: Seed of everything.
    """

    plan: Plan
    inputs: tuple[np.ndarray[Any, Any], ...]
    targets: tuple[np.ndarray[Any, Any], ...]
    outputs: tuple[int, ...]
    seed: int

    @classmethod
    def of(cls, plan: Plan, data: Sequence[tuple[Tensor, Tensor]], seed: int) -> "Cell":
        """Return the cell of one or two tasks; its batches have ``batch_size`` samples of the first on average."""
        size = round(plan.training.batch_size * sum(len(y) for _, y in data) / len(data[0][1]))
        plan = replace(plan, training=replace(plan.training, batch_size=size))
        inputs, targets = zip(*((x.numpy(), y.numpy()) for x, y in data), strict=True)
        return cls(
            plan, inputs, targets, tuple(output_count(y, plan.likelihood) for _, y in data), seed
        )

    def samples(self) -> Samples:
        """All samples, each with the index of its task."""
        x, y = (
            torch.cat([torch.from_numpy(a) for a in arrays])
            for arrays in (self.inputs, self.targets)
        )
        task = torch.cat([torch.full((len(a),), index) for index, a in enumerate(self.inputs)])
        return Samples((x, task), y, self.plan.likelihood)

    def model(self) -> MultiHead:
        """The network at its start; heads of one size start alike, whatever their task."""
        trunk = build(self.plan.trunk_fn, self.seed, argument="trunk_fn")
        with torch.no_grad():
            features = trunk.eval()(torch.from_numpy(self.inputs[0][:2])).shape[1]
        heads = [
            build(
                partial(self.plan.head_fn, features, outputs),
                stage_seed(self.seed, 1),
                argument="head_fn",
            )
            for outputs in self.outputs
        ]
        return MultiHead(trunk, heads)

    def betas(self) -> dict[str, float]:
        """The weight of the divergence of each part."""
        sizes = [len(a) for a in self.inputs]
        parts = {"trunk": sum(sizes), **{f"heads.{index}": n for index, n in enumerate(sizes)}}
        return {part: self.plan.beta * n / sizes[0] for part, n in parts.items()}


def solve(cell: Cell) -> dict[str, Any]:
    r"""Train, and return the information ``kl`` of each part, the loss (a sum) with its error, and :math:`C_\beta`."""
    model, samples = cell.model(), cell.samples()
    samples.check(model)
    start = initial_weights(model)
    centre = center_of(start, cell.plan.prior_center)
    weights = {
        name: beta
        for name in start
        for part, beta in cell.betas().items()
        if name.startswith(f"{part}.")
    }
    pull = partial(_map_penalty, centre=centre, weights=weights, prior_std=cell.plan.prior_std)
    train_plain(model, samples, pull, training=cell.plan.training, seed=stage_seed(cell.seed, 2))
    finish = _variational if cell.plan.method == "variational" else _laplace
    kl, loss, error, penalty = finish(cell, model, samples, centre, weights)
    parts = {
        part: sum(v for name, v in kl.items() if name.startswith(f"{part}."))
        for part in cell.betas()
    }
    objective = loss + penalty + sum(beta * parts[part] for part, beta in cell.betas().items())
    return {"kl": parts, "loss": loss + penalty, "loss_error": error, "objective": objective}


Found: TypeAlias = tuple[dict[str, float], float, float, float]


def _variational(
    cell: Cell, model: nn.Module, samples: Samples, centre: ParamDict, weights: dict[str, float]
) -> Found:
    """Noisy weights, trained from where the plain ones are."""
    noise = stage_seed(cell.seed, 3)
    add_weight_noise(
        model,
        std=START * cell.plan.prior_std,
        prior_center=centre,
        prior_std=cell.plan.prior_std,
        seed=noise,
    )
    terms = [(weights[name], mean, noise) for name, mean, noise in noisy_weights(model)]

    def penalty(_: nn.Module) -> Tensor:
        return torch.stack([beta * noise.kl(mean) for beta, mean, noise in terms]).sum()

    train_noisy(model, samples, penalty, training=cell.plan.training, seed=stage_seed(cell.seed, 4))
    loss, error = expected_loss(model, samples, training=cell.plan.training)
    return (
        {name: noise.kl(mean).item() for name, mean, noise in noisy_weights(model)},
        loss,
        error,
        0.0,
    )


def _laplace(
    cell: Cell, model: nn.Module, samples: Samples, centre: ParamDict, weights: dict[str, float]
) -> Found:
    """The closed form around the trained weights, with the diagonal of the Fisher information as curvature."""
    model.eval()
    chunk = cell.plan.training.chunk_size
    F = fisher_diagonal(
        model, samples.inputs, labels="exact", likelihood=cell.plan.likelihood, chunk_size=chunk
    )
    kl, penalty = {}, 0.0
    for name, weight in initial_weights(model).items():
        h, shift = len(samples) * F[name], weight - centre[name]
        found = information_in_weights(h, shift, prior_std=cell.plan.prior_std, beta=weights[name])
        kl[name] = found.kl.item()
        penalty += found.curvature_penalty.item()
    return kl, loss_sum(model, samples, training=cell.plan.training), 0.0, penalty


def _map_penalty(
    model: nn.Module, *, centre: ParamDict, weights: dict[str, float], prior_std: float
) -> Tensor:
    """What weights pay for leaving the centre of the pre-distribution: their means' share of β times the divergence."""
    terms = [
        weights[name] * (p - centre[name]).square().sum() for name, p in model.named_parameters()
    ]
    return torch.stack(terms).sum() / (2 * prior_std**2)


def output_count(targets: Tensor, likelihood: Likelihood) -> int:
    """Return how many outputs a head needs: the number of classes, or of values."""
    if isinstance(likelihood, Categorical):
        return max(2, int(targets.max()) + 1)
    return targets[0].numel()
