r"""One task, or the disjoint union of two: a shared trunk with a head for each, and the information in its parts.

The divergence of each part is weighted by :math:`\beta` times the number of samples that reach it,
over the number of samples of the first task: the trunk of a union of :math:`N_{12}` samples has
:math:`\beta N_{12}/N_1`, the head of task
:math:`i` has :math:`\beta N_i/N_1`. That is one :math:`\beta` for the mean of the loss that a part sees, and the
minimisers for :math:`D` and for :math:`D \sqcup D` are then the same, in any network.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from lightning_taskinfo._observe import ParamDict, weights_now
from lightning_taskinfo._random import seed_from
from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo.fisher import fisher_diagonal
from lightning_taskinfo.functional.information import information_in_weights
from lightning_taskinfo.functional.likelihood import Categorical, Likelihood
from lightning_taskinfo.tasks import training as train
from lightning_taskinfo.tasks.training import ModelFn, TaskData, Training
from lightning_taskinfo.variational import add_weight_noise, noisy_weights, prior_means

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
        padded = []
        for output in outputs:
            missing = width - output.shape[1]
            full = nn.functional.pad(output, (0, missing), value=IMPOSSIBLE)
            padded.append(full)
        by_task = torch.stack(padded, 1)  # [N, tasks, C]
        return by_task[torch.arange(len(x)), task]


@dataclass(frozen=True)
class Settings:
    """What all trainings of a matrix have in common; the arguments of ``task_distance``."""

    trunk_fn: ModelFn
    head_fn: HeadFn
    method: Method
    beta: float
    prior_center: Literal["initial", "zero"]
    prior_std: float
    likelihood: Likelihood
    training: Training

    def __post_init__(self) -> None:
        check_positive(beta=self.beta, prior_std=self.prior_std)
        methods = get_args(Method)
        if self.method not in methods:
            raise ValueError(f"`method` must be one of {', '.join(methods)}, got {self.method!r}.")
        if self.prior_center not in ("initial", "zero"):
            raise ValueError(
                f"`prior_center` must be 'initial' or 'zero', got {self.prior_center!r}."
            )


@dataclass(frozen=True)
class Union:
    """Everything another process needs to train on one task or on two; arrays, which can be pickled anywhere.

    Args:
        settings: What all trainings have in common.
        inputs: Inputs of each task.
        targets: Their targets.
        seed: Seed of everything.
    """

    settings: Settings
    inputs: tuple[np.ndarray[Any, Any], ...]
    targets: tuple[np.ndarray[Any, Any], ...]
    seed: int

    @classmethod
    def of(cls, settings: Settings, data: Sequence[tuple[Tensor, Tensor]], seed: int) -> "Union":
        """Return the union of one or two tasks; its batches have ``batch_size`` samples of the first on average."""
        sizes = [len(y) for _, y in data]
        size = round(settings.training.batch_size * sum(sizes) / sizes[0])
        settings = replace(settings, training=replace(settings.training, batch_size=size))
        inputs = tuple(x.numpy() for x, _ in data)
        targets = tuple(y.numpy() for _, y in data)
        return cls(settings, inputs, targets, seed)

    def data(self) -> TaskData:
        """All samples, each with the index of its task."""
        x = torch.from_numpy(np.concatenate(self.inputs))
        y = torch.from_numpy(np.concatenate(self.targets))
        sizes = torch.tensor([len(a) for a in self.inputs])
        task = torch.arange(len(sizes)).repeat_interleave(sizes)
        return TaskData((x, task), y, self.settings.likelihood)

    def model(self) -> MultiHead:
        """The network at its start; heads of one size start alike, whatever their task."""
        trunk = train.build(self.settings.trunk_fn, self.seed, argument="trunk_fn")
        two = torch.from_numpy(self.inputs[0][:2])
        with torch.no_grad():
            features = trunk.eval()(two).shape[1]
        heads = []
        for targets in self.targets:
            outputs = output_count(torch.from_numpy(targets), self.settings.likelihood)
            make = partial(self.settings.head_fn, features, outputs)
            head = train.build(make, seed_from(self.seed, 1), argument="head_fn")
            heads.append(head)
        return MultiHead(trunk, heads)

    def betas(self) -> dict[str, float]:
        """The weight of the divergence of each part."""
        sizes = [len(a) for a in self.inputs]
        beta = self.settings.beta
        betas = {"trunk": beta * sum(sizes) / sizes[0]}
        for index, n in enumerate(sizes):
            betas[f"heads.{index}"] = beta * n / sizes[0]
        return betas


def solve(union: Union) -> dict[str, Any]:
    r"""Train, and return the information ``kl`` of each part, the loss (a sum) with its error, and :math:`C_eta`."""
    model = union.model()
    data = union.data()
    data.check(model)
    settings = union.settings
    start = weights_now(model)
    centre = prior_means(settings.prior_center, start)
    betas = union.betas()
    weights = {name: betas[_part(name)] for name in start}
    scale = 2 * settings.prior_std**2

    def penalty(model: nn.Module) -> Tensor:
        """What weights pay for leaving the centre: their means' share of β times the divergence."""
        terms = []
        for name, p in model.named_parameters():
            shift = p - centre[name]
            terms.append(weights[name] * shift.square().sum())
        return torch.stack(terms).sum() / scale

    seed = seed_from(union.seed, 2)
    train.train_plain(model, data, penalty, training=settings.training, seed=seed)
    finish = _variational if settings.method == "variational" else _laplace
    found = finish(union, model, data, centre, weights)
    kl = dict.fromkeys(betas, 0.0)
    for name, value in found.kl.items():
        kl[_part(name)] += value
    penalties = [beta * kl[part] for part, beta in betas.items()]
    objective = found.loss + sum(penalties)
    return {"kl": kl, "loss": found.loss, "loss_error": found.error, "objective": objective}


class Found(NamedTuple):
    """The information in each weight, and the expected loss with its standard error."""

    kl: dict[str, float]
    loss: float
    error: float


def _part(name: str) -> str:
    """``"trunk"`` or ``"heads.0"``, of a parameter's name."""
    first, second, *_ = name.split(".")
    return first if first == "trunk" else f"{first}.{second}"


def _variational(
    union: Union,
    model: nn.Module,
    data: TaskData,
    centre: ParamDict,
    weights: dict[str, float],
) -> Found:
    """Noisy weights, trained from where the plain ones are."""
    prior_std = union.settings.prior_std
    training = union.settings.training
    std = train.START * prior_std
    seed = seed_from(union.seed, 3)
    add_weight_noise(model, std=std, prior_center=centre, prior_std=prior_std, seed=seed)

    def penalty(model: nn.Module) -> Tensor:
        terms = []
        for name, mean, noise in noisy_weights(model):
            terms.append(weights[name] * noise.kl(mean))
        return torch.stack(terms).sum()

    seed = seed_from(union.seed, 4)
    train.train_noisy(model, data, penalty, training=training, seed=seed)
    loss, error = train.expected_loss(model, data, training=training)
    kl = {}
    for name, mean, noise in noisy_weights(model):
        kl[name] = noise.kl(mean).item()
    return Found(kl, loss, error)


def _laplace(
    union: Union,
    model: nn.Module,
    data: TaskData,
    centre: ParamDict,
    weights: dict[str, float],
) -> Found:
    """The closed form around the trained weights, with the diagonal of the Fisher information as curvature."""
    settings = union.settings
    model.eval()
    F = fisher_diagonal(
        model,
        data.inputs,
        labels="exact",
        likelihood=settings.likelihood,
        chunk_size=settings.training.chunk_size,
    )
    kl = {}
    loss = train.loss_sum(model, data, training=settings.training)
    for name, weight in weights_now(model).items():
        h = len(data) * F[name]
        shift = weight - centre[name]
        found = information_in_weights(h, shift, prior_std=settings.prior_std, beta=weights[name])
        kl[name] = found.kl.item()
        loss += found.curvature_penalty.item()
    return Found(kl, loss, 0.0)


def output_count(targets: Tensor, likelihood: Likelihood) -> int:
    """Return how many outputs a head needs: the number of classes, or of values."""
    if isinstance(likelihood, Categorical):
        return max(2, int(targets.max()) + 1)
    return targets[0].numel()
