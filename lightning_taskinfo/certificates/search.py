"""The search for a good post-distribution: what it learns from the data is free, or paid for."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._batches import take
from lightning_taskinfo._observe import HALVES, at_least_float32, trainable_parameters
from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo.certificates.certificate import Candidate, Prior
from lightning_taskinfo.certificates.samples import Data, check_labels, read_samples, zero_one_loss
from lightning_taskinfo.distributions import (
    CurvatureBlock,
    LowRankCurvature,
    WeightGaussian,
    diagonal_curvature,
    kronecker_curvature,
    layer_input_matrices,
    neuron_curvature,
    post_distribution,
    pre_distribution,
    with_diagonal,
)
from lightning_taskinfo.fisher import KroneckerFactors, fisher_diagonal, kronecker_factors
from lightning_taskinfo.fisher.per_sample import Forward
from lightning_taskinfo.functional.pac_bayes import catoni_bound, kl_bound, mcallester_bound, union_bound_price
from lightning_taskinfo.variational import noisy_weights

Structure: TypeAlias = Literal["isotropic", "diagonal", "layer_inputs", "neuron", "kron"]
Theorem: TypeAlias = Literal["kl", "mcallester", "catoni"]
Curvature: TypeAlias = Sequence[CurvatureBlock] | LowRankCurvature
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
BETAS = tuple(10 ** (j / 4) for j in range(-8, 17))  # 0.01 … 10⁴
TRY_DRAWS, TRY_SIZE = 16, 256  # networks, and samples for each, to compare post-distributions by
BOUNDS = {"kl": kl_bound, "mcallester": mcallester_bound, "catoni": catoni_bound}


@dataclass(frozen=True)
class Task:
    """A trained network and the samples it is certified on.

    Attributes:
        model: The network, in eval mode.
        inputs: All inputs, ``N`` of them: a tensor, or tuples, lists and dicts of tensors.
        targets: Their labels.
        loss: Loss of each sample from outputs and targets.
        generator: Where all random draws come from, on the model's device.
        forward_fn: How to get the outputs; ``model(inputs)`` by default.
    """

    model: nn.Module
    inputs: Any
    targets: Tensor
    loss: Loss
    generator: Generator
    forward_fn: Forward | None = None

    @classmethod
    def of(cls, model: nn.Module, data: Data, loss: Loss, seed: int, forward_fn: Forward | None = None) -> "Task":
        """Read the samples and seed the generator."""
        inputs, targets = read_samples(data)
        if any(noisy_weights(model)):
            raise ValueError("`model` must have plain weights, got noisy ones: `remove_weight_noise` gives them back.")
        device = next(iter(trainable_parameters(model).values())).device
        task = cls(model, inputs, targets, loss, Generator(device).manual_seed(seed), forward_fn)
        if loss is zero_one_loss:  # which would refuse some of it too, after the curvature was measured
            task._check_classes()
        return task

    @torch.no_grad()
    def _check_classes(self) -> None:
        check_labels("targets of `data`", self.targets)
        scores = self.outputs(self.some(slice(2)))
        if scores.ndim != 2 or scores.shape[1] < 2:
            raise ValueError(f"`model` must return scores [N, C] of at least 2 classes, got {list(scores.shape)}.")
        low, high, C = int(self.targets.min()), int(self.targets.max()), scores.shape[1]
        if low < 0 or high >= C:
            wanted = f"from 0 to {C - 1}, as `model` returns {C} scores"
            raise ValueError(f"targets of `data` must be classes {wanted}, got {low if low < 0 else high}.")

    @property
    def n(self) -> int:
        """Return the number of samples."""
        return len(self.targets)

    def some(self, index: Tensor | slice) -> Any:
        """Return some inputs, on the model's device."""
        device = self.generator.device
        return take(self.inputs, lambda x: x[index if isinstance(index, slice) else index.to(x.device)].to(device))

    def outputs(self, inputs: Any) -> Tensor:
        """Run the network the way its user does."""
        outputs = self.forward_fn(self.model, inputs) if self.forward_fn else self.model(inputs)
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"`model` must return a tensor of outputs, got {type(outputs).__name__}; "
                "set `forward_fn` to a function of (model, inputs) that picks it."
            )
        return outputs

    def mean_loss(self) -> float:
        """Return the mean loss of all samples under the network's present weights."""
        return float(torch.cat([self.losses(index) for index in torch.arange(self.n, device="cpu").split(4096)]).mean())

    @torch.no_grad()
    def losses(self, index: Tensor | slice, *, float32: bool = False) -> Tensor:
        """Return the losses of some samples under the network's present weights.

        Args:
            index: Which samples.
            float32: Whether half-precision inputs become float32.
        """
        inputs = self.some(index)
        if float32:
            inputs = take(inputs, at_least_float32)
        own = index if isinstance(index, slice) else index.to(self.targets.device)
        targets = self.targets[own].to(self.generator.device)
        values = self.loss(self.outputs(inputs), targets)
        if values.shape != targets.shape[:1]:
            raise ValueError(
                f"`loss_fn` must return a value for each of {len(targets)}, got shape {list(values.shape)}."
            )
        return torch.nan_to_num(values.double(), nan=1.0)  # an output that is no number is an error

    def draw_losses(self, post: WeightGaussian, size: int) -> Tensor:
        """Draw one network, and return its losses on ``size`` random samples (on all, if there are no more).

        A network with trainable weights in half precision runs in float32: rounded draws would be those of another
        post-distribution than the one whose KL is paid for.
        """
        index: Tensor | slice = slice(None)
        if size < self.n:
            index = torch.randint(self.n, (size,), generator=self.generator, device=self.generator.device)
        rounded = any(p.dtype in HALVES for p in trainable_parameters(self.model).values())
        with post.with_weights(self.model, self.generator):
            return self.losses(index, float32=rounded)


def curvature_of(task: Task, structure: Structure, samples: int) -> list[CurvatureBlock]:
    """Return the curvature of the **sum** of the loss, estimated from a random part of the inputs.

    Args:
        task: The network and its samples.
        structure: Which one; parameters that a layer-wise structure cannot represent get a diagonal.
        samples: How many inputs to look at.
    """
    model, n, g, how = task.model, task.n, task.generator, task.forward_fn
    inputs = task.some(torch.randperm(n, generator=g, device=g.device)[:samples])
    if structure == "kron":
        factors = kronecker_factors(model, inputs, labels="sampled", generator=g, forward_fn=how)
        return kronecker_curvature(factors, scale=n)
    fisher = fisher_diagonal(model, inputs, labels="sampled", generator=g, forward_fn=how)
    diagonal = {name: n * h for name, h in fisher.items()}
    if structure == "diagonal":
        return diagonal_curvature(diagonal)
    if structure == "isotropic":
        mean = torch.cat([h.flatten() for h in diagonal.values()]).mean().item()
        return diagonal_curvature({name: torch.full_like(h, mean) for name, h in diagonal.items()})
    matrices = layer_input_matrices(model, inputs, forward_fn=how)
    scales = None
    if structure == "neuron":
        factors = kronecker_factors(model, inputs, labels="sampled", generator=g, forward_fn=how)
        scales = {layer: _felt(factors[f"{layer}.weight".lstrip(".")], A) for layer, A in matrices.items()}
    blocks = neuron_curvature(model, {layer: n * A for layer, A in matrices.items()}, scales=scales)
    return with_diagonal(blocks, diagonal)


def _felt(weight: KroneckerFactors, A: Tensor) -> Tensor:
    """Return how strongly the loss feels each neuron: with it, ``A`` has the trace of the neuron's own block."""
    of_neurons, of_inputs = weight.diagonals()
    same = A.diagonal()[: len(of_inputs)].sum()  # without the bias
    return of_neurons * (of_inputs.sum() / same)


def choose_scales(
    blocks: Sequence[CurvatureBlock], displacement: dict[str, Tensor], prior: Prior, beta: float
) -> tuple[dict[str, float], dict[str, float], float]:
    r"""Choose the prior's standard deviations by the closed form of the objective, price included.

    .. math:: \min_\lambda\; \|\Delta_l\|^2/\lambda^2 + \log|I + \lambda^2 H_l/\beta| + 2\,\mathrm{price}(\lambda)

    Returns:
        The standard deviations by parameter name, the same by layer, and the price in nats.
    """
    prices = union_bound_price(torch.arange(1, len(prior.stds) + 1, device="cpu"))  # [G]
    prices = prices if len(prior.stds) > 1 else torch.zeros_like(prices)  # nothing to choose, nothing to pay
    costs: dict[str, Tensor] = {}
    members: dict[str, list[str]] = {}
    for block in blocks:
        layer = _layer(block) if prior.per_layer else ""
        members.setdefault(layer, []).extend(block.names)
        shift = sum(float(displacement[name].double().square().sum()) for name in block.names)
        gains = [float((std**2 * block.eigenvalues / beta).log1p().sum()) for std in prior.stds]
        cost = [shift / std**2 + gain for std, gain in zip(prior.stds, gains, strict=True)]
        costs[layer] = costs.get(layer, 2 * prices) + torch.tensor(cost, dtype=torch.float64, device="cpu")
    chosen = {layer: int(cost.argmin()) for layer, cost in costs.items()}
    by_layer = {layer: prior.stds[j] for layer, j in chosen.items()}
    by_name = {name: by_layer[layer] for layer, names in members.items() for name in names}
    return by_name, by_layer, float(prices[list(chosen.values())].sum())


@dataclass(frozen=True)
class Proposal:
    """A post-distribution and what it costs.

    Attributes:
        post: The post-distribution.
        kl: Its KL from the pre-distribution, in nats.
        price: Price of choosing the prior's scales, in nats.
        prior_std: Those scales, by layer.
    """

    post: WeightGaussian
    kl: float
    price: float
    prior_std: dict[str, float]

    def row(self, task: Task, structure: str, beta: float, theorem: Theorem, delta: float) -> Candidate:
        """Try it out on a few draws: good enough to choose by, no certificate."""
        losses = torch.stack([task.draw_losses(self.post, TRY_SIZE).mean() for _ in range(TRY_DRAWS)])
        risk = float(losses.mean().clamp(0, 1))
        bound = float(BOUNDS[theorem](risk, self.kl + self.price, task.n, delta))
        return Candidate(structure, beta, risk, self.kl, self.price, bound, self.prior_std)


def propose(task: Task, prior: Prior, curvature: Curvature, beta: float) -> Proposal:
    """Return the post-distribution for one ``beta``."""
    center = prior.center_of(task.model)
    weights = {name: at_least_float32(p.detach()) for name, p in trainable_parameters(task.model).items()}
    displacement = {name: w - center[name] for name, w in weights.items()}
    blocks = _diagonal_of(curvature) if isinstance(curvature, LowRankCurvature) else curvature
    by_name, by_layer, price = choose_scales(blocks, displacement, prior, beta)
    pre = pre_distribution(center, prior_std=by_name)
    post = post_distribution(task.model, pre, curvature, beta=beta)
    return Proposal(post, float(post.kl(pre)), price, by_layer)


def _layer(block: CurvatureBlock) -> str:
    """Return the layer of a block; which weights share a scale is fixed by the architecture, or it would cost too."""
    layers = {name.rpartition(".")[0] for name in block.names}
    if len(layers) > 1:
        raise ValueError(f"`structure` must keep layers apart where `per_layer` is true, got a block of {block.names}.")
    return layers.pop()


def _diagonal_of(curvature: LowRankCurvature) -> list[CurvatureBlock]:
    scales = curvature.scales.double()
    return diagonal_curvature(
        {
            name: h.double() + torch.tensordot(scales, curvature.factor[name].double() ** 2, dims=1)
            for name, h in curvature.diagonal.items()
        }
    )


def named_structures(structure: str | Iterable[str]) -> tuple[Structure, ...]:
    """Return the structures of one name or several; raise a ``ValueError`` if there is none, or one is none.

    Example:
        >>> named_structures("kron"), named_structures(["isotropic", "neuron"])
        (('kron',), ('isotropic', 'neuron'))
    """
    names = (structure,) if isinstance(structure, str) else tuple(structure)
    if not names:
        raise ValueError("`structure` must name at least one structure, got none.")
    for name in names:
        if name not in get_args(Structure):
            raise ValueError(f"`structure` must be one of {get_args(Structure)}, got {name!r}.")
    return cast(tuple[Structure, ...], names)


def check_choices(*, delta: float, delta_draws: float, draws: int, betas: Sequence[float]) -> None:
    """Raise a ``ValueError`` if probabilities, numbers of draws or weights of the KL are out of their range."""
    for argument, value in {"delta": delta, "delta_draws": delta_draws}.items():
        if not 0 < value < 1:
            raise ValueError(f"`{argument}` must be in (0, 1), got {value}.")
    if delta + delta_draws >= 1:
        raise ValueError(f"`delta` and `delta_draws` must add up to less than 1, got {delta + delta_draws}.")
    if draws < 1:
        raise ValueError(f"`draws` must be at least 1, got {draws}.")
    check_positive(betas=betas)
