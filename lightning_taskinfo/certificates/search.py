"""The search for a good post-distribution: what it learns from the data is free, or paid for.

:func:`pareto_front` shows risk against complexity, with the oracle that no prior can beat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import Reader
from lightning_taskinfo._observe import at_least_float32, observing, trainable_parameters
from lightning_taskinfo._progress import Progress, counted, shown
from lightning_taskinfo.certificates.certificate import Candidate
from lightning_taskinfo.certificates.curvatures import (
    Curvature,
    Structure,
    curvatures_of,
    diagonal_of,
    named_structures,
)
from lightning_taskinfo.certificates.prior import Prior
from lightning_taskinfo.certificates.samples import Data, read_labelled
from lightning_taskinfo.certificates.subject import ErrorKind, Loss, Subject
from lightning_taskinfo.distributions import (
    BlockGaussian,
    CurvatureBlock,
    LowRankCurvature,
    WeightGaussian,
    post_distribution,
    pre_distribution,
)
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.functional.pac_bayes import (
    catoni_bound,
    kl_bound,
    mcallester_bound,
    oracle_complexity,
    union_bound_price,
)

Theorem: TypeAlias = Literal["kl", "mcallester", "catoni"]
Bound: TypeAlias = Callable[[float, float], float]
BETAS = tuple(10 ** (j / 4) for j in range(-8, 17))  # 0.01 … 10⁴
COARSE = 4  # of a long grid, every fourth value is tried first, and then those around the best
LONG = 8  # values that are more than a few
TRY_DRAWS, TRY_SIZE = 16, 256  # networks, and samples for each, to compare post-distributions by
BOUNDS = {"kl": kl_bound, "mcallester": mcallester_bound, "catoni": catoni_bound}


def bound_of(theorem: Theorem, n: int, delta: float) -> Bound:
    """Return the bound of a theorem for ``n`` samples: a function of risk and complexity (KL and price), in nats."""

    def bound(risk: float, complexity: float) -> float:
        return float(BOUNDS[theorem](risk, complexity, n, delta))

    return bound


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

    def row(self, subject: Subject, structure: str, beta: float, bound: Bound) -> Candidate:
        """Try it out on a few draws: good enough to choose by, no certificate."""
        risks = []
        disagreements = []
        for _ in range(TRY_DRAWS):
            losses, differences = subject.draw_losses(self.post, TRY_SIZE)
            risks.append(losses.mean())
            if differences is not None:
                disagreements.append(differences.mean())
        mean = torch.stack(risks).mean()
        risk = float(mean.clamp(0, 1))
        found = bound(risk, self.kl + self.price)
        candidate = Candidate(structure, beta, risk, self.kl, self.price, found, self.prior_std)
        if not disagreements:
            return candidate
        disagreement = torch.stack(disagreements).mean()
        return replace(candidate, disagreement=float(disagreement))


def search(
    subject: Subject,
    prior: Prior,
    curvatures: dict[str, Curvature],
    betas: Sequence[float],
    *,
    bound: Bound,
    network: bool,
    progress: Progress,
) -> list[Candidate]:
    """Return rows of curvatures and β with what a few draws promise: some of a long grid, then those near the best.

    Args:
        subject: The network and its samples.
        prior: Its pre-distribution.
        curvatures: Curvatures by name.
        betas: The grid of β.
        bound: The bound to rank by.
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
            rows.append(proposal.row(subject, name, beta, bound))

    try_out(pairs, "search")
    if len(first) < len(betas):
        best = best_of(rows, network=network)
        winners = {(row.structure, row.beta) for row in best}
        near: list[tuple[str, float]] = []
        for name, beta in sorted(winners):
            place = betas.index(beta)
            around = betas[max(0, place - COARSE + 1) : place + COARSE]
            for other in around:
                if (name, other) not in pairs + near:
                    near.append((name, other))
        try_out(near, "search closer")
    return rows


def best_of(rows: Sequence[Candidate], *, network: bool) -> list[Candidate]:
    """Return the best row for the stochastic network, and if wanted the best for the network itself."""
    best = [min(rows, key=lambda row: row.bound)]
    if network:
        best.append(min(rows, key=lambda row: row.network_bound))
    return best


def propose(subject: Subject, prior: Prior, curvature: Curvature, beta: float) -> Proposal:
    """Return the post-distribution for one ``beta``."""
    center = prior.center_of(subject.model)
    displacement = {}
    for name, p in trainable_parameters(subject.model).items():
        displacement[name] = at_least_float32(p.detach()) - center[name]
    blocks = diagonal_of(curvature) if isinstance(curvature, LowRankCurvature) else curvature
    by_name, by_layer, price = choose_scales(blocks, displacement, prior, beta)
    pre = pre_distribution(center, prior_std=by_name)
    post = post_distribution(subject.model, pre, curvature, beta=beta)
    return Proposal(post, float(post.kl(pre)), price, by_layer)


def choose_scales(
    blocks: Sequence[CurvatureBlock],
    displacement: dict[str, Tensor],
    prior: Prior,
    beta: float,
) -> tuple[dict[str, float], dict[str, float], float]:
    r"""Choose the prior's standard deviations by the closed form of the objective, price included.

    .. math:: \min_\lambda\; \|\Delta_l\|^2/\lambda^2 + \log|I + \lambda^2 H_l/\beta| + 2\,\mathrm{price}(\lambda)

    Returns:
        The standard deviations by parameter name, the same by layer, and the price in nats.
    """
    places = torch.arange(1, len(prior.stds) + 1, device="cpu")
    prices = union_bound_price(places)  # [G]
    if len(prior.stds) == 1:
        prices = torch.zeros_like(prices)  # nothing to choose, nothing to pay
    costs: dict[str, Tensor] = {}
    members: dict[str, list[str]] = {}
    for block in blocks:
        layer = _layer(block) if prior.per_layer else ""
        members.setdefault(layer, []).extend(block.names)
        shift = 0.0
        for name in block.names:
            moved = displacement[name].double()
            shift += float(moved.square().sum())
        block_costs = []
        for std in prior.stds:
            ratio = std**2 * block.eigenvalues / beta
            gain = ratio.log1p().sum()
            block_costs.append(shift / std**2 + float(gain))
        added = torch.tensor(block_costs, dtype=torch.float64, device="cpu")
        costs[layer] = costs.get(layer, 2 * prices) + added
    by_layer: dict[str, float] = {}
    by_name: dict[str, float] = {}
    chosen = []
    for layer, cost in costs.items():
        j = int(cost.argmin())
        chosen.append(j)
        by_layer[layer] = prior.stds[j]
        for name in members[layer]:
            by_name[name] = prior.stds[j]
    return by_name, by_layer, float(prices[chosen].sum())


def _layer(block: CurvatureBlock) -> str:
    """Return the layer of a block; which weights share a scale is fixed by the architecture, or it would cost too."""
    layers = {name.rpartition(".")[0] for name in block.names}
    if len(layers) > 1:
        raise ValueError(
            f"`structure` must keep layers apart where `per_layer` is true, got a block of {block.names}."
        )
    return layers.pop()


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
    prior = prior or Prior()
    structures = named_structures(structure)
    names = (*structures, "oracle")
    total = len(names) * len(betas)
    samples = read_labelled(data, model=model, reader=Reader(batch_fn, forward_fn))
    rows = []
    with observing(model), shown(progress, "pareto_front", total) as tell:
        subject = Subject.of(
            model,
            samples,
            seed=seed,
            error=error,
            loss_fn=loss_fn,
            forward_fn=forward_fn,
        )
        wanted = dict.fromkeys((*structures, "diagonal"))  # the oracle needs the diagonal
        curvatures = curvatures_of(
            subject, cast(tuple[Structure, ...], tuple(wanted)), curvature_samples
        )
        bound = bound_of("kl", subject.n, delta)
        for name, beta in counted(product(names, betas), total, tell, "picture"):
            if name == "oracle":
                proposal = _oracle(subject, prior, curvatures["diagonal"], beta)
            else:
                proposal = propose(subject, prior, curvatures[name], beta)
            rows.append(proposal.row(subject, name, beta, bound))
    return rows


def _oracle(subject: Subject, prior: Prior, diagonal: Curvature, beta: float) -> Proposal:
    weights = trainable_parameters(subject.model)
    center = prior.center_of(subject.model)
    blocks = []
    kl = 0.0
    for block in cast(Sequence[CurvatureBlock], diagonal):
        displacement = block.pack(weights).detach() - block.pack(center)
        oracle = oracle_complexity(block.eigenvalues, displacement, beta=beta)
        variances = oracle.post_variance.nan_to_num(posinf=0.0)  # not felt by the loss: left alone
        blocks.append(CurvatureBlock(block.names, variances))
        kl += float(oracle.kl)
    post = BlockGaussian(weights, blocks)
    return Proposal(post, kl, price=0.0, prior_std={})
