"""The proofs about the network itself: by disagreement on fresh inputs, and by errors on held-out labels."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_taskinfo._batches import sample_count
from lightning_taskinfo._progress import Progress, counted, silent
from lightning_taskinfo.certificates.certificate import Candidate, NetworkBound, TestSetBound
from lightning_taskinfo.certificates.search import Bound, Proposal
from lightning_taskinfo.certificates.subject import Subject, differences, pick
from lightning_taskinfo.distributions import WeightGaussian
from lightning_taskinfo.functional.tail_bounds import (
    betting_upper_bound,
    binomial_upper_bound,
    most_errors_below,
)

FEWEST = 100  # fresh inputs; fewer prove nothing, even where all predictions agree
HELD_OUT = 5  # one label in so many would be held out


class Disagreements(NamedTuple):
    """How often draws of the weights disagree with the network, in blocks of fresh inputs.

    Attributes:
        means: Mean disagreement of each block, shape ``[blocks]``.
        block_size: Fresh inputs in a block.
    """

    means: Tensor
    block_size: int


def block_disagreements(
    subject: Subject,
    post: WeightGaussian,
    inputs: Any,
    counts: Tensor | None,
    draws: int,
    progress: Progress = silent,
) -> Disagreements:
    """Return the mean disagreement of each block of fresh inputs with one draw of the weights.

    Inputs that share a draw are not independent of each other, but the means of blocks are: each
    has inputs and a draw of its own. Blocks are equal in size, as small as ``draws`` allows; the
    inputs are put into them at random.

    Args:
        subject: The network; the samples it was certified on are not used here.
        post: The post-distribution.
        inputs: The fresh inputs.
        counts: Where a prediction counts, shape ``[N, T]``; everywhere if ``None``.
        draws: At most this many blocks.
        progress: Told how many blocks are done.
    """
    m = sample_count(inputs)
    size = math.ceil(m / draws)
    blocks = m // size
    g = subject.generator
    order = torch.randperm(m, generator=g, device=g.device)
    order = order[: blocks * size]
    own = subject.predictions(inputs)
    if counts is None:
        counts = torch.ones_like(own, dtype=torch.bool)
    means = []
    for index in counted(order.split(size), blocks, progress, "disagreement"):
        with subject.drawn(post) as one:
            drawn = one.predictions(pick(inputs, index, subject.device))
        of_network = pick(own, index, subject.device)
        where = pick(counts, index, subject.device)
        different = differences(drawn, of_network, where, subject.error)
        means.append(different.mean())
    return Disagreements(torch.stack(means), size)


def network_bound(
    winner: Candidate,
    proposal: Proposal,
    risks: Tensor,
    disagreements: Disagreements,
    *,
    bound: Bound,
    delta: float,
    delta_network: float,
) -> NetworkBound:
    """Add the bound on the stochastic classifier's error to that on its disagreement with the network.

    Args:
        winner: The row of the search.
        proposal: Its post-distribution.
        risks: Mean losses of fresh draws on the certified samples, shape ``[draws]``.
        disagreements: Of the blocks of fresh inputs.
        bound: The bound on the stochastic classifier's error.
        delta: Probability with which it may fail.
        delta_network: Probability with which one of the two estimates may fail, half for each.
    """
    risk_upper = float(betting_upper_bound(risks, delta_network / 2))
    disagreement_upper = float(betting_upper_bound(disagreements.means, delta_network / 2))
    stochastic = min(1.0, bound(risk_upper, proposal.kl + proposal.price))
    return NetworkBound(
        bound=min(1.0, stochastic + disagreement_upper),
        stochastic_bound=stochastic,
        disagreement=float(disagreements.means.mean()),
        disagreement_upper=disagreement_upper,
        inputs=disagreements.block_size * len(disagreements.means),
        blocks=len(disagreements.means),
        risk=float(risks.mean()),
        risk_upper=risk_upper,
        kl=proposal.kl,
        price=proposal.price,
        structure=winner.structure,
        beta=winner.beta,
        delta=delta_network,
        confidence=1 - delta - delta_network,
    )


def held_out_bound(
    subject: Subject,
    held_out: tuple[Any, Tensor] | None,
    best: float,
    delta: float,
) -> TestSetBound:
    """Bound the network's error by held-out labels, or say what they would have to show.

    Args:
        subject: The network and the samples it is certified on.
        held_out: Inputs and labels that neither training nor a choice has seen.
        best: The bound to compare with.
        delta: Probability with which the test-set bound may fail.
    """
    if held_out is None:
        n = max(1, subject.n // HELD_OUT)
        errors = most_errors_below(best, n, delta)
        return TestSetBound(n, None, None, errors / n, 1 - delta)
    other = Subject.of(
        subject.model,
        held_out,
        seed=0,
        error=subject.error,
        loss_fn=subject.loss_fn,
        forward_fn=subject.forward_fn,
    )
    losses = other.all_losses()
    if subject.loss_fn is None and subject.error != "token":
        bound = binomial_upper_bound(int(losses.sum()), other.n, delta)
    else:  # a mean of losses between 0 and 1 is not binomial
        bound = betting_upper_bound(losses.clamp(0, 1), delta)
    errors = most_errors_below(best, other.n, delta)
    risk = float(losses.mean())
    return TestSetBound(other.n, risk, float(bound), errors / other.n, 1 - delta)
