"""The search for a good post-distribution: what it learns from the data is free, or paid for.

Each is made from a curvature of the loss: which there are, how they are estimated, and the best of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_taskinfo._calls import outputs_of
from lightning_taskinfo._nested import pick
from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo._progress import Progress, counted
from lightning_taskinfo._ranges import check_choice
from lightning_taskinfo.certificates.certificate import Candidate
from lightning_taskinfo.certificates.prior import Prior
from lightning_taskinfo.certificates.subject import Subject
from lightning_taskinfo.distributions import (
    IsotropicGaussian,
    WeightGaussian,
    diagonal_curvature,
    kronecker_curvature,
    post_distribution,
)
from lightning_taskinfo.distributions.gaussian import Curvature
from lightning_taskinfo.fisher import fisher_diagonal, kronecker_factors
from lightning_taskinfo.functional import pac_bayes
from lightning_taskinfo.functional.information import terms_by_group

Structure = Literal["isotropic", "diagonal", "neuron", "kron"]
Structures = Structure | Literal["auto"] | Sequence[Structure]
WIDEST = 2048  # inputs of a layer up to which "auto" tries matrices of them
BETAS = tuple(10 ** (j / 2) for j in range(-4, 9))  # 0.01 … 10⁴
CURVATURE_SAMPLES = 10_000  # that the curvature is estimated from
TRY_DRAWS, TRY_SIZE = 16, 256  # networks, and samples for each, to compare post-distributions by


def named_structures(structure: str | Iterable[str]) -> tuple[str, ...]:
    """Return the structures of one name or several, those of ``"auto"`` for a network of any width.

    Args:
        structure: The name or names.

    Raises:
        ValueError: If there is none, or one is none.

    Example:
        >>> named_structures("kron"), named_structures(["isotropic", "neuron"])
        (('kron',), ('isotropic', 'neuron'))
    """
    possible = get_args(Structure)
    names = (structure,) if isinstance(structure, str) else tuple(structure)
    if not names:
        raise ValueError("`structure` must name at least one structure, got none.")
    if names == ("auto",):
        return possible
    for name in names:
        check_choice(possible, structure=name)
    return names


def curvatures_to_try(subject: Subject, structure: Structures | Curvature) -> dict[str, Curvature]:
    """Return the curvatures to search by name: the given one, or those of the named structures.

    ``"auto"`` is all that this network can afford. All of them share one prior and one price, so
    that trying more of them costs time and nothing else. Kronecker factors need a matrix as wide as
    a layer has inputs.

    Args:
        subject: The network and its samples.
        structure: Names, or a curvature that is ready.
    """
    weights = trainable_parameters(subject.model)
    if isinstance(structure, Mapping):
        wrong = sorted(structure.keys() ^ weights.keys())
        if wrong:
            raise ValueError(
                f"`structure` must hold a block for each trainable weight, got a difference in {wrong}."
            )
        return {"given": structure}
    names = named_structures(structure)
    wide = any(p.ndim > 1 and p[0].numel() > WIDEST for p in weights.values())
    if structure == "auto" and wide:
        names = names[:2]  # the cheap ones
    return curvatures_of(subject, names)


def curvatures_of(
    subject: Subject, structures: Sequence[str], samples: int = CURVATURE_SAMPLES
) -> dict[str, Curvature]:
    """Return curvatures of the **sum** of the loss by name, estimated from one random part of the inputs.

    Args:
        subject: The network and its samples.
        structures: Which ones.
        samples: How many inputs to look at.
    """
    model, n, g = subject.model, subject.n, subject.generator
    index = torch.randperm(n, generator=g, device=g.device)[:samples]
    inputs, targets = pick((subject.inputs, subject.targets), index, subject.device)
    if subject.error == "class" or subject.loss_fn is not None:
        targets = None  # those of sequences say where there is padding
    sampled = {
        "labels": "sampled",
        "generator": g,
        "forward_fn": partial(outputs_of, forward_fn=subject.forward_fn),
    }
    found = {}
    if {"isotropic", "diagonal"} & {*structures}:
        fisher = fisher_diagonal(model, inputs, targets, **sampled)
        diagonal = {name: n * h for name, h in fisher.items()}
        mean = torch.cat([h.flatten() for h in diagonal.values()]).mean().item()
        same = {name: torch.full_like(h, mean) for name, h in diagonal.items()}
        found["diagonal"] = diagonal_curvature(diagonal)
        found["isotropic"] = diagonal_curvature(same)
    if {"neuron", "kron"} & {*structures}:
        factors = kronecker_factors(model, inputs, targets, **sampled)
        by_neuron = {name: replace(f, rows=f.diagonals()[0]) for name, f in factors.items()}
        by_name = {"neuron": by_neuron, "kron": factors}
        for name in by_name.keys() & {*structures}:
            found[name] = kronecker_curvature(by_name[name], scale=n)
    return {name: found[name] for name in structures}


@dataclass
class Search:
    """Post-distributions around one network, and what a few draws promise of them.

    Args:
        subject: The network and its samples.
        prior: Its pre-distribution.
        curvatures: Curvatures by name.
        delta: Probability with which the bound may fail.
    """

    subject: Subject
    prior: Prior
    curvatures: Mapping[str, Curvature]
    delta: float

    def __post_init__(self) -> None:
        self.weights = trainable_parameters(self.subject.model)
        self.center = self.prior.center_of(self.subject.model)
        self.distances = {}
        for name, weight in self.weights.items():
            moved = weight.detach().double() - self.center[name]
            self.distances[name] = float(moved.square().sum())

    def bound(self, risk: float, complexity: float) -> float:
        """Return the bound for a risk and a complexity (KL and price, in nats)."""
        return float(pac_bayes.kl_bound(risk, complexity, self.subject.n, self.delta))

    def rows(self, betas: Sequence[float], progress: Progress) -> list[Candidate]:
        """Try each curvature and β on a few draws: good enough to choose by, no certificate."""
        rows = []
        pairs = [*product(self.curvatures, betas)]
        for structure, beta in counted(pairs, len(pairs), progress, "search"):
            post, kl, price, prior_std = self.propose(structure, beta)
            draws = [self.subject.draw_losses(post, TRY_SIZE) for _ in range(TRY_DRAWS)]
            loss, disagreement = torch.stack(draws).mean((0, 2)).tolist()
            risk = min(max(loss, 0.0), 1.0)
            rows.append(Candidate(structure, beta, risk, kl, price, 1.0, prior_std, disagreement))
        # The bounds of all by one bisection.
        numbers = [(row.risk, row.kl + row.price) for row in rows]
        risks, complexities = torch.tensor(numbers, dtype=torch.float64, device="cpu").T
        bounds = pac_bayes.kl_bound(risks, complexities, self.subject.n, self.delta).tolist()
        return [replace(row, bound=bound) for row, bound in zip(rows, bounds, strict=True)]

    def propose(
        self, structure: str, beta: float
    ) -> tuple[WeightGaussian, float, float, dict[str, float]]:
        """Return the post-distribution of one curvature and β, its KL, the price of the scales, and the scales."""
        blocks = self.curvatures[structure]
        by_layer, price = choose_scales(blocks, self.distances, self.prior, beta)
        stds = {name: by_layer[self.prior.layer_of(name)] for name in self.center}
        pre = IsotropicGaussian(self.center, prior_std=stds)
        post = post_distribution(self.weights, pre, blocks, beta=beta)
        return post, float(post.kl(pre)), price, by_layer


def best_of(rows: Sequence[Candidate]) -> tuple[Candidate, Candidate]:
    """Return the best row for the stochastic network, and the best for the network itself."""
    stochastic = min(rows, key=lambda row: row.bound)
    return stochastic, min(rows, key=lambda row: row.bound + row.disagreement)


def choose_scales(
    curvature: Curvature,
    distances: Mapping[str, float],
    prior: Prior,
    beta: float,
) -> tuple[dict[str, float], float]:
    r"""Choose the prior's standard deviations by the closed form of the objective, price included.

    .. math:: \min_\lambda\; \tfrac12\mathrm{tr}(H_l\Sigma^*) + \beta\,(\mathrm{KL} + \mathrm{price}(\lambda))

    Args:
        curvature: Curvature by parameter name.
        distances: :math:`\|\Delta\|^2` of each parameter.
        prior: The pre-distribution; which weights share a scale is fixed by the architecture, or it would cost too.
        beta: Weight of the KL.

    Returns:
        The standard deviations by layer, and the price in nats.
    """
    places = torch.arange(1, len(prior.stds) + 1, device="cpu")
    prices = pac_bayes.union_bound_price(places)  # [G]
    if len(prior.stds) == 1:
        prices = torch.zeros_like(prices)  # nothing to choose, nothing to pay
    eigenvalues = {name: curvature[name].eigenvalues for name in distances}
    found = terms_by_group(eigenvalues, distances, prior_stds=prior.stds, beta=beta)
    costs: dict[str, Tensor] = {}
    for name in distances:
        added = torch.stack([terms[name].objective() for terms in found])  # [G]
        layer = prior.layer_of(name)
        costs[layer] = costs.get(layer, beta * prices) + added
    chosen = {layer: int(cost.argmin()) for layer, cost in costs.items()}
    by_layer = {layer: prior.stds[j] for layer, j in chosen.items()}
    return by_layer, float(prices[[*chosen.values()]].sum())
