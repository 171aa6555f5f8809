"""Risk against complexity of post-distributions, structure by structure, with the oracle that no prior can beat."""

from collections.abc import Sequence
from itertools import product
from typing import Literal

from torch import nn

from lightning_taskinfo._arguments import checked_arguments
from lightning_taskinfo._observe import observing, trainable_parameters
from lightning_taskinfo._progress import Progress, counted, shown
from lightning_taskinfo.certificates.certificate import Candidate, Prior
from lightning_taskinfo.certificates.samples import Data, zero_one_loss
from lightning_taskinfo.certificates.search import (
    BETAS,
    Loss,
    Proposal,
    Structure,
    Task,
    curvature_of,
    named_structures,
    propose,
)
from lightning_taskinfo.distributions import BlockGaussian, CurvatureBlock
from lightning_taskinfo.fisher.per_sample import Forward
from lightning_taskinfo.functional.pac_bayes_diagnostics import oracle_complexity


@checked_arguments
def pareto_front(
    model: nn.Module,
    data: Data,
    prior: Prior | None = None,
    *,
    structure: Structure | Sequence[Structure] = ("isotropic", "diagonal", "neuron"),
    betas: Sequence[float] = BETAS,
    delta: float = 0.04,
    loss_fn: Loss = zero_one_loss,
    forward_fn: Forward | None = None,
    curvature_samples: int = 10_000,
    seed: int = 0,
    progress: Progress | bool = True,
) -> list[Candidate]:
    """Trade risk against complexity for several structures of the curvature, and for the oracle prior.

    Each row is a post-distribution; ``risk`` is a rough estimate from a few networks, so the rows are a picture and
    not certificates. Rows named ``"oracle"`` have the best diagonal prior around the same centre, chosen with the
    data at no price: no diagonal prior does better in the second-order model of the loss. Real networks may still
    lie above it, since far from the trained weights that model no longer holds.

    Args:
        model: The trained network.
        data: The samples, as for :func:`~lightning_taskinfo.certificates.certify`.
        prior: The pre-distribution.
        structure: Which curvatures to compare, one or several.
        betas: Weights of the KL, one row each.
        delta: Probability in the bound's log term.
        loss_fn: Loss of each sample, in ``[0, 1]``.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by default.
        curvature_samples: How many samples the curvature is estimated from.
        seed: Seed of all draws.
        progress: Whether to draw a bar where standard error is a terminal or a notebook; or a function, called with the
            number of finished rows, their total and a label.

    Returns:
        The rows, structure by structure.
    """
    prior, structures = prior or Prior(), named_structures(structure)
    names: tuple[Structure | Literal["oracle"], ...] = (*structures, "oracle")
    total = len(names) * len(betas)
    with observing(model), shown(progress, "pareto_front", total) as tell:
        task = Task.of(model, data, loss_fn, seed, forward_fn)
        curvatures = {name: curvature_of(task, name, curvature_samples) for name in structures}
        diagonal = curvatures.get("diagonal") or curvature_of(task, "diagonal", curvature_samples)
        rows = []
        for name, beta in counted(product(names, betas), total, tell, "picture"):
            if name == "oracle":
                proposal = _oracle(task, prior, diagonal, beta)
            else:
                proposal = propose(task, prior, curvatures[name], beta)
            rows.append(proposal.row(task, name, beta, "kl", delta))
    return rows


def _oracle(task: Task, prior: Prior, diagonal: Sequence[CurvatureBlock], beta: float) -> Proposal:
    weights, center = trainable_parameters(task.model), prior.center_of(task.model)
    blocks, kl = [], 0.0
    for block in diagonal:
        displacement = block.pack(weights).detach() - block.pack(center)
        oracle = oracle_complexity(block.eigenvalues, displacement, beta=beta)
        blocks.append(CurvatureBlock(block.names, oracle.post_variance.nan_to_num(posinf=0.0)))  # unfelt: left alone
        kl += float(oracle.kl)
    return Proposal(BlockGaussian(weights, blocks), kl, price=0.0, prior_std={})
