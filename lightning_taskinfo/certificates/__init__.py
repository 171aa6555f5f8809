"""PAC-Bayes certificates for networks that were simply trained: ``certify(model, data, prior)``."""

from collections.abc import Sequence
from itertools import product
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from lightning_taskinfo._arguments import checked_arguments
from lightning_taskinfo._observe import observing
from lightning_taskinfo._progress import Progress, counted, shown
from lightning_taskinfo.certificates.certificate import PRIOR_STDS, Candidate, Certificate, Prior
from lightning_taskinfo.certificates.pareto import pareto_front
from lightning_taskinfo.certificates.samples import Data, zero_one_loss
from lightning_taskinfo.certificates.search import (
    BETAS,
    BOUNDS,
    Curvature,
    Loss,
    Structure,
    Task,
    Theorem,
    check_choices,
    curvature_of,
    named_structures,
    propose,
)
from lightning_taskinfo.certificates.validity import assumptions, reasons_against
from lightning_taskinfo.distributions import CurvatureBlock, LowRankCurvature, WeightGaussian
from lightning_taskinfo.fisher.per_sample import Forward
from lightning_taskinfo.functional.betting import betting_interval
from lightning_taskinfo.functional.pac_bayes import monte_carlo_interval

__all__ = ["BETAS", "PRIOR_STDS", "Candidate", "Certificate", "Prior", "certify", "pareto_front", "zero_one_loss"]

DRAW_SIZE = 64  # samples a fresh network is tested on: many networks on few samples tell more than few on many
Interval: TypeAlias = Literal["betting", "kl"]


@checked_arguments
def certify(
    model: nn.Module,
    data: Data,
    prior: Prior | None = None,
    *,
    structure: Structure | Sequence[Structure] | Curvature = "diagonal",
    betas: Sequence[float] = BETAS,
    theorem: Theorem = "kl",
    delta: float = 0.04,
    delta_draws: float = 0.01,
    draws: int = 1000,
    interval: Interval = "betting",
    loss_fn: Loss = zero_one_loss,
    forward_fn: Forward | None = None,
    curvature_samples: int = 10_000,
    seed: int = 0,
    progress: Progress | bool = True,
) -> Certificate:
    r"""Bound the true risk of a trained network turned stochastic, :math:`Q = N(w^*, \Sigma^*)`, without retraining.

    .. math::
        e(Q) \le \mathrm{kl}^{-1}\!\Big(\hat e,\ \frac{\mathrm{KL}(Q\|P) + \mathrm{price} + \log(2\sqrt N/\delta)}{N}
        \Big), \qquad \hat e \text{ the upper end of a Monte-Carlo interval at } \delta'

    For each structure and :math:`\beta`, the curvature at the trained weights gives the post-distribution and the
    scales of the pre-distribution; a few draws estimate its risk. The best one of all is then tested on fresh draws,
    so that nothing is owed for having picked it. Of these choices only the prior's scales have a price, since the
    theorem holds for all :math:`Q` at once. What was certified is the **stochastic** network, whose weights are drawn
    anew for each prediction.

    Args:
        model: The trained network; it, or ``forward_fn``, returns scores ``[N, C]``, unless ``loss_fn`` expects
            something else. It is measured in eval mode and left as it was.
        data: The samples: ``(inputs, targets)``, a dataset of such pairs, or a loader over one. Inputs are a tensor, or
            tuples, lists and dicts of tensors. The network may have been trained on them; the prior may not.
        prior: The pre-distribution; by default centred at 0, which is always valid and seldom informative.
        structure: Curvature that shapes the post-distribution: ``"isotropic"``, ``"diagonal"`` (Fisher),
            ``"layer_inputs"`` (one matrix of layer inputs a layer), ``"neuron"`` (the same, scaled by how much the loss
            feels a neuron), ``"kron"``; several of these, to take the best; or a ready one of the sum of the loss.
            ``"neuron"`` is often the tightest from a random start, and needs a matrix as wide as a layer has inputs.
        betas: Weights of the KL beside the sum of the loss to try; free.
        theorem: ``"kl"`` (Maurer–Seeger, the tightest), ``"mcallester"`` or ``"catoni"`` (with its parameter at 1);
            chosen before looking at the results.
        delta: Probability with which the theorem may fail.
        delta_draws: Probability with which the Monte-Carlo interval may fail.
        draws: Number of fresh networks for that interval, each tested on a few random samples.
        interval: ``"betting"``, or ``"kl"``, the classical one, which needs about ten times as many networks; chosen
            before looking at the results.
        loss_fn: Loss of each sample from outputs and targets, in ``[0, 1]``.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by default.
        curvature_samples: How many samples the curvature is estimated from.
        seed: Seed of all draws, chosen before looking at the results.
        progress: Whether to draw a bar where standard error is a terminal or a notebook; or a function, called with the
            number of finished steps, their total and a label.

    Returns:
        The certificate, with ``valid`` and the reasons why not.

    Example:
        >>> from copy import deepcopy
        >>> model = nn.Linear(2, 2)
        >>> start = deepcopy(model)
        >>> model.bias.data += torch.tensor([1.0, -1.0])  # what training would do
        >>> data = torch.randn(100, 2), torch.zeros(100, dtype=torch.long)
        >>> certify(model, data, Prior(start, origin="random initialisation"), draws=10).valid
        True

    References:
        Pitas, *On PAC-Bayes bounds for deep neural networks using the loss curvature*; Dziugaite, Roy, *Computing
        nonvacuous generalization bounds for deep (stochastic) neural networks*, UAI 2017.
    """
    prior = Prior() if prior is None else prior
    _check(theorem, interval, delta, delta_draws, draws, betas)
    with observing(model), shown(progress, "certify", len(betas)) as tell:
        task = Task.of(model, data, loss_fn, seed, forward_fn)
        reasons = reasons_against(model, prior, task.some(slice(4)), task.outputs)
        curvatures = _curvatures(task, structure, curvature_samples)
        candidates = _search(task, prior, curvatures, betas, theorem, delta, tell)
        best = min(candidates, key=lambda row: row.bound)
        winner = propose(task, prior, curvatures[best.structure], best.beta)
        risks, why_not = _fresh_risks(task, winner.post, draws, tell)
        model_risk, n = task.mean_loss(), task.n
    low, high = _interval(risks, interval, delta_draws)
    return Certificate(
        bound=min(1.0, float(BOUNDS[theorem](high, winner.kl + winner.price, n, delta))),
        valid=not reasons + why_not,
        reasons=tuple(reasons + why_not),
        assumptions=tuple(assumptions(model, prior)),
        risk=float(risks.mean()),
        risk_interval=(low, high),
        model_risk=model_risk,
        kl=winner.kl,
        price=winner.price,
        n=n,
        delta=delta,
        delta_draws=delta_draws,
        draws=draws,
        interval=interval,
        theorem=theorem,
        structure=best.structure,
        beta=best.beta,
        prior_origin=(prior.origin or "unknown") if prior.center is not None else "0",
        prior_std=winner.prior_std,
        prior_grid=len(prior.stds),
        candidates=tuple(candidates),
        post=winner.post,
    )


def _curvatures(
    task: Task, structure: Structure | Sequence[Structure] | Curvature, samples: int
) -> dict[str, Curvature]:
    """Return the curvatures to search by name: those of the named structures, or the given one."""
    if isinstance(structure, LowRankCurvature) or any(isinstance(part, CurvatureBlock) for part in structure):
        return {"given": cast(Curvature, structure)}
    names = named_structures(cast(Structure | Sequence[Structure], structure))
    return {name: curvature_of(task, name, samples) for name in names}


def _search(
    task: Task,
    prior: Prior,
    curvatures: dict[str, Curvature],
    betas: Sequence[float],
    theorem: Theorem,
    delta: float,
    progress: Progress | None,
) -> list[Candidate]:
    """Return a row for each curvature and β, with the bound that a few draws promise."""
    turns = counted(product(curvatures, betas), len(curvatures) * len(betas), progress, "search")
    return [propose(task, prior, curvatures[name], beta).row(task, name, beta, theorem, delta) for name, beta in turns]


def _fresh_risks(task: Task, post: WeightGaussian, draws: int, progress: Progress | None) -> tuple[Tensor, list[str]]:
    """Return the mean loss of each of some networks that nothing was chosen by, and what is wrong with the losses."""
    turns = counted(range(draws), draws, progress, "draws")
    losses = torch.stack([task.draw_losses(post, DRAW_SIZE) for _ in turns])  # [draws, samples]
    worst = _outside(losses)
    return losses.clamp(0, 1).mean(1), [] if worst is None else [f"the loss must lie in [0, 1], got {worst}"]


def _interval(risks: Tensor, interval: Interval, delta: float) -> tuple[float, float]:
    if interval == "kl":
        low, high = monte_carlo_interval(risks.mean(), len(risks), delta)
    else:
        low, high = betting_interval(risks, delta)
    return float(low), float(high)


def _outside(losses: Tensor) -> float | None:
    outside = losses[(losses < 0) | (losses > 1)]
    return outside[0].item() if len(outside) else None


def _check(theorem: str, interval: str, delta: float, delta_draws: float, draws: int, betas: Sequence[float]) -> None:
    if theorem not in get_args(Theorem):
        raise ValueError(f"`theorem` must be one of {get_args(Theorem)}, got {theorem!r}.")
    if interval not in get_args(Interval):
        raise ValueError(f"`interval` must be one of {get_args(Interval)}, got {interval!r}.")
    check_choices(delta=delta, delta_draws=delta_draws, draws=draws, betas=betas)
