"""The search for a good post-distribution: what it learns from the data is free, or paid for.

Each is made from a curvature of the loss: which there are, how they are estimated, and the best of them.
:func:`pareto_front` shows risk against complexity, with the oracle that no prior can beat.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import Reader
from lightning_taskinfo._calls import outputs_of
from lightning_taskinfo._observe import at_least_float32, observing, trainable_parameters
from lightning_taskinfo._progress import Progress, counted, shown
from lightning_taskinfo.certificates.certificate import Candidate
from lightning_taskinfo.certificates.prior import Prior
from lightning_taskinfo.certificates.samples import Data, read_labelled
from lightning_taskinfo.certificates.subject import ErrorKind, Loss, Subject, pick
from lightning_taskinfo.distributions import (
    CurvatureBlock,
    WeightGaussian,
    kronecker_curvature,
    layer_input_matrices,
    neuron_curvature,
    post_distribution,
    pre_distribution,
    with_diagonal,
)
from lightning_taskinfo.distributions.gaussian import Curvature
from lightning_taskinfo.fisher import KroneckerFactors, fisher_diagonal, kronecker_factors
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.functional import pac_bayes

Structure: TypeAlias = Literal["isotropic", "diagonal", "layer_inputs", "neuron", "kron"]
Structures: TypeAlias = Structure | Literal["auto"] | Sequence[Structure]
Theorem: TypeAlias = Literal["kl", "mcallester", "catoni"]
BOUNDS = {
    "kl": pac_bayes.kl_bound,
    "mcallester": pac_bayes.mcallester_bound,
    "catoni": pac_bayes.catoni_bound,
}
WIDEST = 2048  # inputs of a layer up to which "auto" tries matrices of them
BETAS = tuple(10 ** (j / 4) for j in range(-8, 17))  # 0.01 … 10⁴
COARSE = 4  # of a long grid, every fourth value is tried first, and then those around the best
LONG = 8  # values that are more than a few
TRY_DRAWS, TRY_SIZE = 16, 256  # networks, and samples for each, to compare post-distributions by


def named_structures(structure: str | Iterable[str], error: ErrorKind = "class") -> tuple[str, ...]:
    """Return the structures of one name or several, those of ``"auto"`` for a network of any width.

    Args:
        structure: The name or names.
        error: What counts as an error; the last two structures are for one class per sample only.

    Raises:
        ValueError: If there is none, or one is none.

    Example:
        >>> named_structures("kron"), named_structures(["isotropic", "neuron"])
        (('kron',), ('isotropic', 'neuron'))
    """
    possible = get_args(Structure)
    if error != "class":
        possible = possible[:3]
    names = (structure,) if isinstance(structure, str) else tuple(structure)
    if not names:
        raise ValueError("`structure` must name at least one structure, got none.")
    if names == ("auto",):
        return possible
    for name in names:
        if name not in possible:
            raise ValueError(
                f"`structure` must be 'auto' or one of {possible} where `error` is {error!r}, got {name!r}."
            )
    return names


def curvatures_to_try(
    subject: Subject, structure: Structures | Curvature, samples: int
) -> dict[str, Curvature]:
    """Return the curvatures to search by name: the given one, or those of the named structures.

    ``"auto"`` is all that this network can afford. All of them share one prior and one price, so
    that trying more of them costs time and nothing else. The layer-wise ones need a matrix as wide
    as a layer has inputs.

    Args:
        subject: The network and its samples.
        structure: Names, or a curvature that is ready.
        samples: How many inputs to estimate it from.
    """
    if any(isinstance(part, CurvatureBlock) for part in structure):
        return {"given": cast(Curvature, structure)}
    names = named_structures(cast(Structures, structure), subject.error)
    weights = trainable_parameters(subject.model).values()
    if structure == "auto" and any(p.ndim > 1 and p[0].numel() > WIDEST for p in weights):
        names = names[:2]  # the cheap ones
    return curvatures_of(subject, names, samples)


def curvatures_of(
    subject: Subject, structures: Sequence[str], samples: int
) -> dict[str, Curvature]:
    """Return curvatures of the **sum** of the loss by name, estimated from one random part of the inputs.

    Args:
        subject: The network and its samples.
        structures: Which ones; parameters that a layer-wise structure cannot represent get a
            diagonal.
        samples: How many inputs to look at.
    """
    model, n, g = subject.model, subject.n, subject.generator
    forward = partial(outputs_of, forward_fn=subject.forward_fn)
    index = torch.randperm(n, generator=g, device=g.device)[:samples]
    inputs, targets = pick((subject.inputs, subject.targets), index, subject.device)
    if subject.error == "class" or subject.loss_fn is not None:
        targets = None  # those of sequences say where there is padding
    sampled: dict[str, Any] = {"labels": "sampled", "generator": g, "forward_fn": forward}
    diagonal: dict[str, Tensor] = {}
    if {*structures} != {"kron"}:
        fisher = fisher_diagonal(model, inputs, targets, **sampled)
        diagonal = {name: n * h for name, h in fisher.items()}
    matrices: dict[str, Tensor] = {}
    if {"layer_inputs", "neuron"} & {*structures}:
        matrices = layer_input_matrices(model, inputs, forward_fn=forward)
    factors: Mapping[str, KroneckerFactors] = {}
    if {"neuron", "kron"} & {*structures}:
        factors = kronecker_factors(model, inputs, targets, **sampled)

    found: dict[str, Curvature] = {}
    for structure in structures:
        if structure == "kron":
            found[structure] = kronecker_curvature(factors, scale=n)
            continue
        blocks: list[CurvatureBlock] = []
        others = diagonal
        if structure == "isotropic":
            mean = torch.cat([h.flatten() for h in diagonal.values()]).mean().item()
            others = {name: torch.full_like(h, mean) for name, h in diagonal.items()}
        elif structure != "diagonal":
            scales = None
            if structure == "neuron":
                scales = {layer: _felt(factors, layer, A) for layer, A in matrices.items()}
            sums = {layer: n * A for layer, A in matrices.items()}
            blocks = neuron_curvature(model, sums, scales=scales)
        found[structure] = with_diagonal(blocks, others)
    return found


def _felt(factors: Mapping[str, KroneckerFactors], layer: str, A: Tensor) -> Tensor:
    """Return how strongly the loss feels each neuron: with it, ``A`` has the trace of the neuron's own block."""
    weight = factors[f"{layer}.weight".lstrip(".")]
    of_neurons, of_inputs = weight.diagonals()
    same = A.diagonal()[: len(of_inputs)].sum()  # without the bias
    return of_neurons * (of_inputs.sum() / same)


class Search:
    """Post-distributions around one network, and what a few draws promise of them.

    Args:
        subject: The network and its samples.
        prior: Its pre-distribution.
        curvatures: Curvatures by name.
        delta: Probability with which the bound may fail.
        theorem: The bound to rank by.
    """

    def __init__(
        self,
        subject: Subject,
        prior: Prior,
        curvatures: Mapping[str, Curvature],
        delta: float,
        theorem: Theorem = "kl",
    ) -> None:
        self.subject = subject
        self.prior = prior
        self.curvatures = curvatures
        self.delta = delta
        self.theorem = theorem
        self.center = prior.center_of(subject.model)
        self.weights = trainable_parameters(subject.model)
        self.displacement = {
            name: at_least_float32(p.detach()) - self.center[name]
            for name, p in self.weights.items()
        }

    def bound(self, risk: float, complexity: float) -> float:
        """Return the theorem's bound for a risk and a complexity (KL and price, in nats)."""
        return float(BOUNDS[self.theorem](risk, complexity, self.subject.n, self.delta))

    def rows(self, betas: Sequence[float], *, network: bool, progress: Progress) -> list[Candidate]:
        """Try all curvatures with some of a long grid, then the values near the best.

        Args:
            betas: The grid of β.
            network: Whether the best one for the network itself is wanted as well.
            progress: Told how far the search is.
        """
        betas = sorted(betas)
        first = betas[::COARSE] if len(betas) > LONG else betas
        pairs = [*product(self.curvatures, first)]
        rows = self.try_out(pairs, progress, "search")
        near: list[tuple[str, float]] = []
        winners = {(row.structure, row.beta) for row in best_of(rows, network=network)}
        for structure, beta in sorted(winners):
            place = betas.index(beta)
            near += product([structure], betas[max(0, place - COARSE + 1) : place + COARSE])
        others = [pair for pair in dict.fromkeys(near) if pair not in pairs]
        return rows + self.try_out(others, progress, "search closer")

    def try_out(
        self, pairs: Sequence[tuple[str, float]], progress: Progress, label: str
    ) -> list[Candidate]:
        """Try each structure and β on a few draws: good enough to choose by, no certificate."""
        rows = []
        for structure, beta in counted(pairs, len(pairs), progress, label):
            post, kl, price, prior_std = self.propose(structure, beta)
            draws = [self.subject.draw_losses(post, TRY_SIZE) for _ in range(TRY_DRAWS)]
            loss, disagreement = torch.stack(draws).mean((0, 2)).tolist()
            risk = min(max(loss, 0.0), 1.0)
            bound = self.bound(risk, kl + price)
            rows.append(Candidate(structure, beta, risk, kl, price, bound, prior_std, disagreement))
        return rows

    def propose(
        self, structure: str, beta: float
    ) -> tuple[WeightGaussian, float, float, dict[str, float]]:
        """Return the post-distribution of one curvature and β, its KL, the price of the scales, and the scales."""
        if structure == "oracle":
            return self._oracle(beta)
        blocks = self.curvatures[structure]
        by_layer, price = choose_scales(blocks, self.displacement, self.prior, beta)
        stds = {name: by_layer[self.prior.layer_of(name)] for name in self.center}
        pre = pre_distribution(self.center, prior_std=stds)
        post = post_distribution(self.weights, pre, blocks, beta=beta)
        return post, float(post.kl(pre)), price, by_layer

    def _oracle(self, beta: float) -> tuple[WeightGaussian, float, float, dict[str, float]]:
        """Return the same for the best diagonal prior around the centre, of the diagonal curvature."""
        blocks = []
        kl = 0.0
        for block in self.curvatures["diagonal"]:
            shift = block.pack(self.displacement)
            oracle = pac_bayes.oracle_complexity(block.eigenvalues, shift, beta=beta)
            # A weight that the loss does not feel is left alone.
            variances = oracle.post_variance.nan_to_num(posinf=0.0)
            blocks.append(CurvatureBlock(block.names, variances))
            kl += float(oracle.kl)
        return WeightGaussian(self.weights, blocks), kl, 0.0, {}


def best_of(rows: Sequence[Candidate], *, network: bool) -> list[Candidate]:
    """Return the best row for the stochastic network, and if wanted the best for the network itself."""
    best = [min(rows, key=lambda row: row.bound)]
    if network:
        best.append(min(rows, key=lambda row: row.bound + row.disagreement))
    return best


def choose_scales(
    blocks: Sequence[CurvatureBlock],
    displacement: Mapping[str, Tensor],
    prior: Prior,
    beta: float,
) -> tuple[dict[str, float], float]:
    r"""Choose the prior's standard deviations by the closed form of the objective, price included.

    .. math:: \min_\lambda\; \|\Delta_l\|^2/\lambda^2 + \log|I + \lambda^2 H_l/\beta| + 2\,\mathrm{price}(\lambda)

    Returns:
        The standard deviations by layer, and the price in nats.
    """
    places = torch.arange(1, len(prior.stds) + 1, device="cpu")
    prices = pac_bayes.union_bound_price(places)  # [G]
    if len(prior.stds) == 1:
        prices = torch.zeros_like(prices)  # nothing to choose, nothing to pay
    costs: dict[str, Tensor] = {}
    for block in blocks:
        # Which weights share a scale is fixed by the architecture, or it would cost too.
        layer, *others = {prior.layer_of(name) for name in block.names}
        if others:
            raise ValueError(
                f"`structure` must keep layers apart where `per_layer` is true, got a block of {block.names}."
            )
        shift = float(block.pack(displacement).double().square().sum())
        added = []
        for std in prior.stds:
            gain = (std**2 * block.eigenvalues / beta).log1p().sum()
            added.append(shift / std**2 + float(gain))
        costs[layer] = costs.get(layer, 2 * prices) + prices.new_tensor(added)
    chosen = {layer: int(cost.argmin()) for layer, cost in costs.items()}
    by_layer = {layer: prior.stds[j] for layer, j in chosen.items()}
    return by_layer, float(prices[[*chosen.values()]].sum())


def pareto_front(
    model: nn.Module,
    data: Data,
    prior: Prior | None = None,
    *,
    structure: Structure | Sequence[Structure] = ("isotropic", "diagonal", "neuron"),
    betas: Sequence[float] = BETAS,
    delta: float = 0.04,
    error: ErrorKind = "class",
    loss_fn: Loss | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    forward_fn: Forward | None = None,
    curvature_samples: int = 10_000,
    seed: int = 0,
    progress: Progress | bool = True,
) -> list[Candidate]:
    """Trade risk against complexity for several structures of the curvature, and for the oracle prior.

    Each row is a post-distribution; ``risk`` is a rough estimate from a few networks, so the rows
    are a picture and not certificates. Rows named ``"oracle"`` have the best diagonal prior around
    the same centre, chosen with the data at no price: no diagonal prior does better in the
    second-order model of the loss. Real networks may still lie above it, since far from the trained
    weights that model no longer holds.

    Args:
        model: The trained network.
        data: The samples, as for :func:`~lightning_taskinfo.certificates.certify`.
        prior: The pre-distribution.
        structure: Which curvatures to compare, one or several.
        betas: Weights of the KL, one row each.
        delta: Probability in the bound's log term.
        error: What counts as an error, as for :func:`~lightning_taskinfo.certificates.certify`.
        loss_fn: Loss of each sample, in ``[0, 1]``, instead of the error.
        batch_fn: Picks ``(inputs, targets)`` out of a batch of ``data``.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by
            default.
        curvature_samples: How many samples the curvature is estimated from.
        seed: Seed of all draws.
        progress: Whether to draw a bar where standard error is a terminal or a notebook; or a
            function, called with the number of finished rows, their total and a label.

    Returns:
        The rows, structure by structure.
    """
    names = named_structures(structure)
    pairs = [*product((*names, "oracle"), betas)]
    samples = read_labelled(data, model=model, reader=Reader(batch_fn, forward_fn))
    with observing(model), shown(progress, "pareto_front", len(pairs)) as tell:
        subject = Subject(model, samples, seed, error, loss_fn, forward_fn)
        wanted = [*dict.fromkeys((*names, "diagonal"))]  # the oracle needs the diagonal
        curvatures = curvatures_of(subject, wanted, curvature_samples)
        return Search(subject, prior or Prior(), curvatures, delta).try_out(pairs, tell, "picture")
