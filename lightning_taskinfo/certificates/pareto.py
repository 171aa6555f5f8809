"""Risk against complexity of post-distributions, structure by structure, with the oracle that no prior can beat."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, cast

from torch import nn

from lightning_taskinfo._batches import Reader
from lightning_taskinfo._observe import observing, trainable_parameters
from lightning_taskinfo._progress import Progress, counted, shown
from lightning_taskinfo.certificates.certificate import Candidate
from lightning_taskinfo.certificates.curvatures import (
    Curvature,
    Structure,
    curvatures_of,
    named_structures,
)
from lightning_taskinfo.certificates.prior import Prior
from lightning_taskinfo.certificates.samples import Data, read_samples
from lightning_taskinfo.certificates.search import BETAS, Proposal, bound_of, propose
from lightning_taskinfo.certificates.subject import ErrorKind, Loss, Subject
from lightning_taskinfo.distributions import BlockGaussian, CurvatureBlock
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.functional.pac_bayes import oracle_complexity


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
    samples = read_samples(data, model=model, reader=Reader(batch_fn, forward_fn))
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
    return Proposal(BlockGaussian(weights, blocks), kl, price=0.0, prior_std={})
