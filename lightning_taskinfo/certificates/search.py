"""The search for a good post-distribution: what it learns from the data is free, or paid for."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Generator, Tensor, nn

from lightning_taskinfo._batches import outputs_of, sample_count, take
from lightning_taskinfo._observe import HALVES, at_least_float32, trainable_parameters
from lightning_taskinfo._progress import Progress, counted
from lightning_taskinfo._ranges import check_positive
from lightning_taskinfo.certificates.certificate import Candidate
from lightning_taskinfo.certificates.errors import (
    IGNORED,
    ErrorKind,
    check_error,
    differences,
    predictions,
)
from lightning_taskinfo.certificates.prior import Prior
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
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.functional.pac_bayes import (
    catoni_bound,
    kl_bound,
    mcallester_bound,
    union_bound_price,
)
from lightning_taskinfo.variational import noisy_weights

Structure: TypeAlias = Literal["isotropic", "diagonal", "layer_inputs", "neuron", "kron"]
Structures: TypeAlias = Structure | Literal["auto"] | Sequence[Structure]
Theorem: TypeAlias = Literal["kl", "mcallester", "catoni"]
Curvature: TypeAlias = Sequence[CurvatureBlock] | LowRankCurvature
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
BETAS = tuple(10 ** (j / 4) for j in range(-8, 17))  # 0.01 … 10⁴
COARSE = 4  # of a long grid, every fourth value is tried first, and then those around the best
LONG = 8  # values that are more than a few
TRY_DRAWS, TRY_SIZE = 16, 256  # networks, and samples for each, to compare post-distributions by
WIDEST = 2048  # inputs of a layer up to which "auto" tries matrices of them
BOUNDS = {"kl": kl_bound, "mcallester": mcallester_bound, "catoni": catoni_bound}


@dataclass(frozen=True)
class Subject:
    """A trained network and the samples it is certified on.

    Attributes:
        model: The network, in eval mode.
        inputs: All inputs, ``N`` of them: a tensor, or tuples, lists and dicts of tensors.
        targets: Their labels.
        generator: Where all random draws come from, on the model's device.
        error: What counts as an error.
        loss_fn: Loss of each sample from outputs and targets, instead of the error.
        forward_fn: How to get the outputs; ``model(inputs)`` by default.
        own: The network's own predictions for all samples; ``None`` with a loss of the user's own.
        float32: Whether half-precision inputs become float32.
    """

    model: nn.Module
    inputs: Any
    targets: Tensor
    generator: Generator
    error: ErrorKind = "class"
    loss_fn: Loss | None = None
    forward_fn: Forward | None = None
    own: Tensor | None = field(default=None, repr=False)
    float32: bool = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        samples: tuple[Any, Tensor],
        *,
        seed: int,
        error: ErrorKind = "class",
        loss_fn: Loss | None = None,
        forward_fn: Forward | None = None,
    ) -> "Subject":
        """Seed the generator, see that outputs fit the labels, and keep the network's own predictions."""
        check_weights(model)
        inputs, targets = samples
        weights = trainable_parameters(model)
        generator = Generator(next(iter(weights.values())).device).manual_seed(seed)
        subject = cls(model, inputs, targets, generator, error, loss_fn, forward_fn)
        if loss_fn is not None:
            return subject
        with torch.no_grad():
            few = subject.outputs(subject.some(slice(2)))
        check_error(error, few, targets[:2], targets)
        own = subject.predictions(inputs)
        return cls(model, inputs, targets, generator, error, loss_fn, forward_fn, own)

    @property
    def n(self) -> int:
        """Return the number of samples."""
        return len(self.targets)

    @property
    def device(self) -> torch.device:
        """Return where the network is."""
        return self.generator.device

    def some(self, index: Tensor | slice) -> Any:
        """Return some inputs, on the model's device."""
        return pick(self.inputs, index, self.device)

    @contextmanager
    def drawn(self, post: WeightGaussian) -> Iterator["Subject"]:
        """Draw one network; inside, the subject runs that one.

        A network with trainable weights in half precision runs in float32 then: rounded draws would be those of
        another post-distribution than the one whose KL is paid for.
        """
        rounded = any(p.dtype in HALVES for p in trainable_parameters(self.model).values())
        with post.with_weights(self.model, self.generator):
            yield replace(self, float32=rounded)

    def outputs(self, inputs: Any) -> Tensor:
        """Run the network the way its user does."""
        if self.float32:
            inputs = take(inputs, at_least_float32)
        return outputs_of(self.model, inputs, self.forward_fn)

    @torch.no_grad()
    def predictions(self, inputs: Any) -> Tensor:
        """Return the predictions of the network's present weights for many inputs."""
        parts = []
        for index in torch.arange(sample_count(inputs), device="cpu").split(1024):
            parts.append(predictions(self.outputs(pick(inputs, index, self.device))))
        return torch.cat(parts)

    def mean_loss(self) -> float:
        """Return the mean loss of all samples under the network's present weights."""
        parts = [self.losses(index)[0] for index in torch.arange(self.n, device="cpu").split(1024)]
        return float(torch.cat(parts).mean())

    @torch.no_grad()
    def losses(self, index: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """Return the losses of some samples under the present weights, and their disagreement with the network."""
        targets = pick(self.targets, index, self.device)
        outputs = self.outputs(self.some(index))
        if self.loss_fn is None:
            assert self.own is not None
            predicted = predictions(outputs)
            named = self.counted(targets)
            own = pick(self.own, index, self.device)
            return (
                differences(predicted, targets, named, self.error),
                differences(predicted, own, named, self.error),
            )
        values = self.loss_fn(outputs, targets)
        if values.shape != targets.shape[:1]:
            raise ValueError(
                f"`loss_fn` must return a value for each of {len(targets)}, got shape {list(values.shape)}."
            )
        return torch.nan_to_num(
            values.double(), nan=1.0
        ), None  # an output that is no number is an error

    def counted(self, targets: Tensor) -> Tensor:
        """Return where a label counts: everywhere but in padding."""
        return (
            torch.ones_like(targets, dtype=torch.bool)
            if self.error == "class"
            else targets != IGNORED
        )

    def draw_losses(self, post: WeightGaussian, size: int) -> tuple[Tensor, Tensor | None]:
        """Draw one network; return its losses and disagreements on ``size`` random samples, or on all there are."""
        index: Tensor | slice = slice(None)
        if size < self.n:
            index = torch.randint(self.n, (size,), generator=self.generator, device=self.device)
        with self.drawn(post) as one:
            return one.losses(index)


def check_weights(model: nn.Module) -> None:
    """Raise a ``ValueError`` for a network that has no weights to put a Gaussian around, or has one already."""
    if any(noisy_weights(model)):
        raise ValueError(
            "`model` must have plain weights, got noisy ones: `remove_weight_noise` gives them back."
        )
    if not trainable_parameters(model):
        raise ValueError(
            "`model` must have trainable weights, got none: frozen ones have nothing to certify."
        )


def pick(values: Any, index: Tensor | slice, device: torch.device) -> Any:
    """Return some of many samples, on a device."""
    return take(
        values, lambda x: x[index if isinstance(index, slice) else index.to(x.device)].to(device)
    )


def curvatures_of(
    subject: Subject, structures: Sequence[Structure], samples: int
) -> dict[str, Curvature]:
    """Return curvatures of the **sum** of the loss by name, estimated from one random part of the inputs.

    Args:
        subject: The network and its samples.
        structures: Which ones; parameters that a layer-wise structure cannot represent get a diagonal.
        samples: How many inputs to look at.
    """
    model, n, g = subject.model, subject.n, subject.generator

    def forward(model: nn.Module, inputs: Any) -> Tensor:
        return outputs_of(model, inputs, subject.forward_fn)

    index = torch.randperm(n, generator=g, device=g.device)[:samples]
    inputs = subject.some(index)
    padded = (
        subject.error != "class" and subject.loss_fn is None
    )  # labels say where there is padding
    targets = pick(subject.targets, index, subject.device) if padded else None
    diagonal: dict[str, Tensor] = {}
    if {*structures} != {"kron"}:
        fisher = fisher_diagonal(
            model, inputs, targets, labels="sampled", generator=g, forward_fn=forward
        )
        diagonal = {name: n * h for name, h in fisher.items()}
    matrices: dict[str, Tensor] = {}
    if {"layer_inputs", "neuron"} & {*structures}:
        matrices = layer_input_matrices(model, inputs, forward_fn=forward)
    factors: Mapping[str, KroneckerFactors] = {}
    if {"neuron", "kron"} & {*structures}:
        factors = kronecker_factors(
            model, inputs, labels="sampled", generator=g, forward_fn=forward
        )
    found: dict[str, Curvature] = {}
    for structure in structures:
        if structure == "diagonal":
            found[structure] = diagonal_curvature(diagonal)
        elif structure == "isotropic":
            mean = torch.cat([h.flatten() for h in diagonal.values()]).mean().item()
            found[structure] = diagonal_curvature(
                {name: torch.full_like(h, mean) for name, h in diagonal.items()}
            )
        elif structure == "kron":
            found[structure] = kronecker_curvature(factors, scale=n)
        else:
            scales = None
            if structure == "neuron":
                scales = {
                    layer: _felt(factors[f"{layer}.weight".lstrip(".")], A)
                    for layer, A in matrices.items()
                }
            blocks = neuron_curvature(
                model, {layer: n * A for layer, A in matrices.items()}, scales=scales
            )
            found[structure] = with_diagonal(blocks, diagonal)
    return found


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
    prices = (
        prices if len(prior.stds) > 1 else torch.zeros_like(prices)
    )  # nothing to choose, nothing to pay
    costs: dict[str, Tensor] = {}
    members: dict[str, list[str]] = {}
    for block in blocks:
        layer = _layer(block) if prior.per_layer else ""
        members.setdefault(layer, []).extend(block.names)
        shift = sum(float(displacement[name].double().square().sum()) for name in block.names)
        gains = [float((std**2 * block.eigenvalues / beta).log1p().sum()) for std in prior.stds]
        cost = [shift / std**2 + gain for std, gain in zip(prior.stds, gains, strict=True)]
        costs[layer] = costs.get(layer, 2 * prices) + torch.tensor(
            cost, dtype=torch.float64, device="cpu"
        )
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

    def row(
        self, subject: Subject, structure: str, beta: float, theorem: Theorem, delta: float
    ) -> Candidate:
        """Try it out on a few draws: good enough to choose by, no certificate."""
        drawn = [subject.draw_losses(self.post, TRY_SIZE) for _ in range(TRY_DRAWS)]
        risk = float(torch.stack([losses.mean() for losses, _ in drawn]).mean().clamp(0, 1))
        bound = float(BOUNDS[theorem](risk, self.kl + self.price, subject.n, delta))
        candidate = Candidate(structure, beta, risk, self.kl, self.price, bound, self.prior_std)
        disagreements = [values.mean() for _, values in drawn if values is not None]
        if not disagreements:
            return candidate
        return replace(candidate, disagreement=float(torch.stack(disagreements).mean()))


def propose(subject: Subject, prior: Prior, curvature: Curvature, beta: float) -> Proposal:
    """Return the post-distribution for one ``beta``."""
    center = prior.center_of(subject.model)
    weights = {
        name: at_least_float32(p.detach())
        for name, p in trainable_parameters(subject.model).items()
    }
    displacement = {name: w - center[name] for name, w in weights.items()}
    blocks = _diagonal_of(curvature) if isinstance(curvature, LowRankCurvature) else curvature
    by_name, by_layer, price = choose_scales(blocks, displacement, prior, beta)
    pre = pre_distribution(center, prior_std=by_name)
    post = post_distribution(subject.model, pre, curvature, beta=beta)
    return Proposal(post, float(post.kl(pre)), price, by_layer)


def search(
    subject: Subject,
    prior: Prior,
    curvatures: dict[str, Curvature],
    betas: Sequence[float],
    *,
    theorem: Theorem,
    delta: float,
    network: bool,
    progress: Progress | None,
) -> list[Candidate]:
    """Return rows of curvatures and β with what a few draws promise: some of a long grid, then those near the best.

    Args:
        subject: The network and its samples.
        prior: Its pre-distribution.
        curvatures: Curvatures by name.
        betas: The grid of β.
        theorem: Which bound to rank by.
        delta: Probability with which it may fail.
        network: Whether the best one for the network itself is wanted as well.
        progress: Told how far the search is.
    """
    betas = sorted(betas)
    first = betas[::COARSE] if len(betas) > LONG else betas
    pairs = [(name, beta) for name in curvatures for beta in first]
    rows: list[Candidate] = []

    def try_out(pairs: list[tuple[str, float]], label: str) -> None:
        for name, beta in counted(pairs, len(pairs), progress, label):
            proposal = propose(subject, prior, curvatures[name], beta)
            rows.append(proposal.row(subject, name, beta, theorem, delta))

    try_out(pairs, "search")
    if len(first) < len(betas):
        winners = {(row.structure, row.beta) for row in best_of(rows, network=network)}
        near: list[tuple[str, float]] = []
        for name, beta in sorted(winners):
            place = betas.index(beta)
            around = betas[max(0, place - COARSE + 1) : place + COARSE]
            near += [(name, other) for other in around if (name, other) not in pairs + near]
        try_out(near, "search closer")
    return rows


def best_of(rows: Sequence[Candidate], *, network: bool) -> list[Candidate]:
    """Return the best row for the stochastic network, and if wanted the best for the network itself."""
    best = [min(rows, key=lambda row: row.bound)]
    if network:
        best.append(min(rows, key=lambda row: row.network_bound))
    return best


def _layer(block: CurvatureBlock) -> str:
    """Return the layer of a block; which weights share a scale is fixed by the architecture, or it would cost too."""
    layers = {name.rpartition(".")[0] for name in block.names}
    if len(layers) > 1:
        raise ValueError(
            f"`structure` must keep layers apart where `per_layer` is true, got a block of {block.names}."
        )
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

    All of them share one prior and one price, so that trying more of them costs time and nothing else. The layer-wise
    ones need a matrix as wide as a layer has inputs.
    """
    names = named_structures(structure)
    if subject.error != "class" and structure != "auto" and {"neuron", "kron"} & {*names}:
        raise ValueError(
            "`structure` must be 'auto', 'isotropic', 'diagonal' or 'layer_inputs' where `error` is "
            f"{subject.error!r}, got {structure!r}."
        )
    if structure != "auto":
        return names
    widths = [p[0].numel() for p in trainable_parameters(subject.model).values() if p.ndim > 1]
    if max(widths, default=0) > WIDEST:
        return ("isotropic", "diagonal")
    return names if subject.error == "class" else ("isotropic", "diagonal", "layer_inputs")


def check_choices(
    *,
    delta: float,
    delta_draws: float,
    draws: int,
    betas: Sequence[float],
    delta_network: float = 0.01,
) -> None:
    """Raise a ``ValueError`` if probabilities, numbers of draws or weights of the KL are out of their range."""
    shares = {"delta": delta, "delta_draws": delta_draws, "delta_network": delta_network}
    for argument, value in shares.items():
        if not 0 < value < 1:
            raise ValueError(f"`{argument}` must be in (0, 1), got {value}.")
    for argument, value in (("delta_draws", delta_draws), ("delta_network", delta_network)):
        if delta + value >= 1:
            raise ValueError(
                f"`delta` and `{argument}` must add up to less than 1, got {delta + value}."
            )
    if draws < 1:
        raise ValueError(f"`draws` must be at least 1, got {draws}.")
    check_positive(betas=betas)
