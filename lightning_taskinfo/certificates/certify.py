"""``certify(model, data, prior)``: what can be proved about a network that was simply trained.

Three proofs: the PAC-Bayes bound for the stochastic network; the bound for the network itself, by disagreement on fresh
inputs; and that of held-out labels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import BatchFn, Reader
from lightning_taskinfo._nested import IGNORED, pick, sample_count, tensors
from lightning_taskinfo._observe import observing
from lightning_taskinfo._progress import Progress, counted, shown
from lightning_taskinfo._ranges import check_counts, check_positive, check_probability, check_values
from lightning_taskinfo.certificates import prior as priors
from lightning_taskinfo.certificates.certificate import (
    Candidate,
    Certificate,
    NetworkBound,
    TestSetBound,
)
from lightning_taskinfo.certificates.prior import Prior
from lightning_taskinfo.certificates.samples import (
    Data,
    Repeats,
    Samples,
    check_fresh,
    count_repeats,
    read_inputs,
    read_labelled,
)
from lightning_taskinfo.certificates.search import (
    BETAS,
    Search,
    Structures,
    best_of,
    curvatures_to_try,
)
from lightning_taskinfo.certificates.subject import (
    ErrorKind,
    Loss,
    Subject,
    check_certifiable,
    differences,
)
from lightning_taskinfo.distributions import WeightGaussian
from lightning_taskinfo.distributions.gaussian import Curvature
from lightning_taskinfo.fisher.measure import Forward
from lightning_taskinfo.functional import tail_bounds

# Beside four standard errors: a known error may be of a few other samples.
KNOWN_ERROR_MARGIN = 0.05
DRAW_SIZE = 64  # samples per fresh network: many networks on few samples tell more than few on many
FEWEST = 100  # fresh inputs; fewer prove nothing, even where all predictions agree
TRUSTED = {
    "unlabelled": "the unlabelled inputs are independent draws from the same distribution, and served no training, "
    "penalty, prior, preprocessing or choice",
    "held_out": "the held-out samples served no training, prior or choice",
}
HELD_OUT = 5  # one label in so many would be held out


def certify(
    model: nn.Module,
    data: Data,
    prior: Prior | None = None,
    *,
    unlabelled: Any = None,
    held_out: Data | None = None,
    structure: Structures | Curvature = "auto",
    betas: Sequence[float] = BETAS,
    delta: float = 0.04,
    delta_draws: float = 0.01,
    delta_network: float = 0.01,
    draws: int = 1000,
    error: ErrorKind = "class",
    known_error: float | None = None,
    loss_fn: Loss | None = None,
    batch_fn: BatchFn | None = None,
    forward_fn: Forward | None = None,
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
    theorem holds for all :math:`Q` at once. This bound covers the **stochastic** network, whose weights are drawn
    anew for each prediction.

    **The network itself** is bounded where ``unlabelled`` inputs are given, by how often it disagrees with its
    stochastic version: :math:`R(h) \le R(Q) + \Pr[h_w(x) \ne h(x)]`. A narrower :math:`Q` disagrees less and costs
    more KL; the post-distribution that trades the two best is found on the certified samples. ``held_out`` labels
    give the test-set bound, which is often stronger: the printed certificate compares them.

    Args:
        model: The trained network; it, or ``forward_fn``, returns scores ``[N, C]`` or ``[N, T, V]``, unless
            ``loss_fn`` expects something else. It is measured in eval mode and left as it was.
        data: The samples: ``(inputs, targets)``, a dataset of such pairs, or a loader over one. Inputs are a tensor, or
            tuples, lists and dicts of tensors. The network may have been trained on them; the prior may not.
        prior: The pre-distribution; by default centred at 0, which is always valid and seldom informative.
        unlabelled: Fresh inputs, without labels, for the network's own bound: inputs, a dataset of inputs or of
            pairs, or a loader. Nothing else may have been done with them: no training, no penalty, no choice.
        held_out: Samples like ``data`` that neither training nor a choice has seen, for the test-set bound.
        structure: Curvature that shapes the post-distribution: ``"isotropic"``, ``"diagonal"`` (Fisher),
            ``"neuron"`` (a matrix of layer inputs, scaled by how sensitive the loss is to a neuron), ``"kron"``;
            several of these, to take the best; ``"auto"`` for all that the network's width allows; or a ready one of
            the sum of the loss, by parameter name.
        betas: Weights of the KL beside the sum of the loss to try; free.
        delta: Probability with which the theorem may fail.
        delta_draws: Probability with which the Monte-Carlo interval may fail.
        delta_network: Probability with which what the network's own bound needs beside the theorem may fail: one half
            for the draws of its post-distribution, the other for the disagreement.
        draws: Number of fresh networks for each of these estimates, each tested on a few random samples.
        error: What counts as an error: ``"class"`` for scores ``[N, C]``; for ``[N, T, V]`` the share of wrong
            ``"token"``\ s of each sequence, or whether a ``"sequence"`` has any. Targets of -100 do not count.
        known_error: Error of the network on these samples, as you know it from training. If it is far from the error
            found here, inputs are not prepared as they were then, and nothing is certified.
        loss_fn: Loss of each sample from outputs and targets, in ``[0, 1]``, instead of the error; it knows no
            disagreement, so it cannot go with ``unlabelled``.
        batch_fn: Picks ``(inputs, targets)`` out of a batch of ``data``, ``held_out`` or ``unlabelled``.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by default.
        seed: Seed of all draws, chosen before looking at the results.
        progress: Whether to draw a bar where standard error is a terminal or a notebook; or a function, called with the
            number of finished steps, their total and a label.

    Returns:
        The certificate, with ``valid`` and the reasons why not.

    Raises:
        ValueError: If an argument does not fit, or ``unlabelled`` or ``held_out`` inputs are among the certified ones.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> prior = Prior.of(model, origin="random initialisation")  # before training
        >>> model.bias.data += torch.tensor([1.0, -1.0])  # what training would do
        >>> data = torch.randn(100, 2), torch.zeros(100, dtype=torch.long)
        >>> found = certify(model, data, prior, unlabelled=torch.randn(200, 2), draws=10)
        >>> found.valid, found.network.bound >= found.network.stochastic_bound
        (True, True)

    References:
        Pitas, *On PAC-Bayes bounds for deep neural networks using the loss curvature*; Dziugaite, Roy, *Computing
        nonvacuous generalization bounds for deep (stochastic) neural networks*, UAI 2017.
    """
    prior = prior or Prior()
    if not isinstance(prior, Prior):
        raise TypeError(f"`prior` must be a Prior or None, got a {type(prior).__name__}.")
    check_choices(delta, draws, betas, delta_draws=delta_draws, delta_network=delta_network)
    if unlabelled is not None and loss_fn is not None:
        raise ValueError(
            "`unlabelled` must go with an `error`, got a `loss_fn`, which knows no disagreement."
        )

    # Read everything, and refuse what cannot be used, before the long work begins.
    check_certifiable(model)
    reader = Reader(batch_fn, forward_fn)
    samples = read_labelled(data, model=model, reader=reader)
    prior.center_of(model)
    others: dict[str, Any] = {}
    if unlabelled is not None:
        others["unlabelled"] = read_inputs(unlabelled, model=model, reader=reader)
    if held_out is not None:
        others["held_out"] = read_labelled(
            held_out, argument="held_out", model=model, reader=reader
        )
    notes = _check_use(prior, samples, others)
    repeats = {name: count_repeats(part) for name, part in {"data": samples, **others}.items()}
    copied, told = _about_repeats(repeats)

    with observing(model), shown(progress, "certify", len(betas)) as tell:
        subject = Subject(model, samples, seed, error, loss_fn, forward_fn)
        for argument, (inputs, _) in others.items():
            _check_inputs(subject, argument, inputs)
        tested = None
        if held_out is not None:
            tested = replace(subject, samples=others["held_out"])
        model_risk = float(subject.all_losses().mean())
        if known_error is not None:
            _check_known_error(model_risk, known_error, subject.n)
        inputs, marked = others.get("unlabelled", (None, None))
        counts = None if inputs is None else _counts(subject, marked)
        few = pick(subject.inputs, slice(4))
        reasons = copied + priors.reasons_against(model, prior, few, subject.outputs)
        search = Search(subject, prior, curvatures_to_try(subject, structure), delta)
        rows = search.rows(betas, tell)
        best, for_network = best_of(rows)

        post, risks = fresh_risks(search, best, draws, tell)
        outside = risks[(risks < 0) | (risks > 1)]
        if len(outside):
            reasons.append(f"the loss must lie in [0, 1], got {outside[0].item()}")
        risks = risks.clamp(0, 1).mean(1)
        low, high = map(float, tail_bounds.betting_interval(risks, delta_draws))
        bound = proved = min(1.0, search.bound(high, best.kl + best.price))

        network = None
        if inputs is not None:
            network = network_bound(search, for_network, inputs, counts, draws, delta_network, tell)
            proved = network.bound
        test_set = held_out_bound(subject, tested, proved, delta + delta_draws)
    return Certificate(
        bound=bound,
        valid=not reasons,
        reasons=tuple(reasons),
        assumptions=(*priors.assumptions(model, prior), *told, *notes),
        risk=float(risks.mean()),
        risk_interval=(low, high),
        model_risk=model_risk,
        kl=best.kl,
        price=best.price,
        n=subject.n,
        repeated=repeats["data"].repeated,
        delta=delta,
        delta_draws=delta_draws,
        draws=draws,
        structure=best.structure,
        beta=best.beta,
        prior_origin="0" if prior.center is None else prior.origin or "unknown",
        prior_std=best.prior_std,
        prior_grid=len(prior.stds),
        error=error if loss_fn is None else "loss",
        network=network,
        test_set=test_set,
        candidates=tuple(rows),
        post=post,
    )


@torch.no_grad()
def _check_inputs(subject: Subject, argument: str, inputs: Any) -> None:
    """Refuse inputs that the network cannot be called on, such as those of another width."""
    try:
        subject.outputs(inputs, slice(2))
    except RuntimeError as error:
        wanted, found = ([list(x.shape) for x in tensors(y)] for y in (subject.inputs, inputs))
        raise ValueError(
            f"`{argument}` must hold inputs like those of `data`, of shape {wanted}, got {found}: {error}"
        ) from error


def _check_known_error(found: float, known: float, n: int) -> None:
    """Refuse an error that is far from the one that the user knows: other inputs, or other preprocessing."""
    check_values("in [0, 1]", known_error=known)
    standard_error = math.sqrt(found * (1 - found) / n)
    if abs(found - known) > KNOWN_ERROR_MARGIN + 4 * standard_error:
        raise ValueError(
            f"`known_error` must be near the network's error on these samples, {found:.4f}, got {known}: are inputs "
            "prepared as for training, and are these the samples?"
        )


def _check_use(prior: Prior, certified: Samples, others: Mapping[str, Any]) -> list[str]:
    """Refuse samples that were used where they may not have been; return what could not be checked."""
    notes = [TRUSTED[argument] for argument in others]
    if "unlabelled" in others:
        count = sample_count(others["unlabelled"])
        if count < FEWEST:
            raise ValueError(f"`unlabelled` must hold at least {FEWEST} inputs, got {count}.")
    for argument, (inputs, _) in others.items():
        notes += check_fresh(argument, inputs, certified[0], "the certified samples")
    if prior.seen is not None:
        what = "those that the prior's centre was trained on"
        for argument, (inputs, _) in {"data": certified, **others}.items():
            notes += check_fresh(argument, inputs, prior.seen, what)
    return notes


def _about_repeats(repeats: Mapping[str, Repeats]) -> tuple[list[str], list[str]]:
    """Return where samples are mostly copies, which prove nothing, and what a reader should know about a few."""
    reasons = []
    notes = []
    for argument, (total, repeated, distinct) in repeats.items():
        if repeated:
            notes.append(
                f"{repeated} of {total} samples of `{argument}` occur more than once: they count as drawn independently"
            )
        if 2 * distinct <= total:
            reasons.append(
                f"only {distinct} of {total} samples of `{argument}` differ from each other, and copies are no "
                "independent draws"
            )
    return reasons, notes


def _counts(subject: Subject, targets: Tensor | None) -> Tensor | None:
    """Return where predictions on fresh inputs count: where there is no padding, as far as that is known."""
    if subject.error == "class":
        return None
    if targets is not None:
        return targets != IGNORED
    if subject.error == "token" and bool((subject.targets == IGNORED).any()):
        raise ValueError(
            "`unlabelled` must come with targets that are -100 in padding and anything else elsewhere, as `data` has "
            "padding and `error` is 'token', got inputs alone."
        )
    return None  # a sequence that agrees everywhere agrees where labels would be


def fresh_risks(
    search: Search, row: Candidate, draws: int, progress: Progress
) -> tuple[WeightGaussian, Tensor]:
    """Return a row's post-distribution, and losses of networks that nothing was chosen by, ``[draws, samples]``."""
    post, *_ = search.propose(row.structure, row.beta)
    turns = counted(range(draws), draws, progress, "draws")
    return post, torch.stack([search.subject.draw_losses(post, DRAW_SIZE)[0] for _ in turns])


def block_disagreements(
    subject: Subject,
    post: WeightGaussian,
    inputs: Any,
    counts: Tensor | None,
    draws: int,
    progress: Progress,
) -> tuple[Tensor, int]:
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

    Returns:
        The means, shape ``[blocks]``, and the number of inputs in a block.
    """
    m = sample_count(inputs)
    size = math.ceil(m / draws)
    blocks = m // size
    g = subject.generator
    order = torch.randperm(m, generator=g, device=g.device)[: blocks * size]
    own = subject.predictions(inputs)
    if counts is None:
        counts = torch.ones_like(own, dtype=torch.bool)
    means = []
    for index in counted(order.split(size), blocks, progress, "disagreement"):
        some, of_network, where = pick((inputs, own, counts), index, subject.device)
        with post.with_weights(subject.model, g):
            drawn = subject.predictions(some)
        means.append(differences(drawn, of_network, where, subject.error).mean())
    return torch.stack(means), size


def network_bound(
    search: Search,
    row: Candidate,
    inputs: Any,
    counts: Tensor | None,
    draws: int,
    delta_network: float,
    progress: Progress,
) -> NetworkBound:
    """Add the bound on the stochastic classifier's error to that on its disagreement with the network.

    Args:
        search: The search that has found the post-distribution.
        row: The best row for the network itself: fixed before the fresh inputs are touched.
        inputs: The fresh inputs.
        counts: Where a prediction on them counts.
        draws: Number of networks to draw for each of the two estimates.
        delta_network: Probability with which one of the two estimates may fail, half for each.
        progress: Told how many draws are done.
    """
    post, losses = fresh_risks(search, row, draws, progress)
    risks = losses.mean(1)
    means, size = block_disagreements(search.subject, post, inputs, counts, draws, progress)
    risk_upper = float(tail_bounds.betting_upper_bound(risks, delta_network / 2))
    disagreement_upper = float(tail_bounds.betting_upper_bound(means, delta_network / 2))
    stochastic = min(1.0, search.bound(risk_upper, row.kl + row.price))
    return NetworkBound(
        bound=min(1.0, stochastic + disagreement_upper),
        stochastic_bound=stochastic,
        disagreement=float(means.mean()),
        disagreement_upper=disagreement_upper,
        inputs=size * len(means),
        blocks=len(means),
        risk=float(risks.mean()),
        risk_upper=risk_upper,
        kl=row.kl,
        price=row.price,
        structure=row.structure,
        beta=row.beta,
        delta=delta_network,
        confidence=1 - search.delta - delta_network,
    )


def held_out_bound(
    subject: Subject, held_out: Subject | None, best: float, delta: float
) -> TestSetBound:
    """Bound the network's error by held-out labels, or say what they would have to show.

    Args:
        subject: The network and the samples it is certified on.
        held_out: The network and samples that neither training nor a choice has seen.
        best: The bound to compare with.
        delta: Probability with which the test-set bound may fail.
    """
    risk = bound = None
    n = max(1, subject.n // HELD_OUT)
    if held_out is not None:
        n = held_out.n
        losses = held_out.all_losses()
        risk = float(losses.mean())
        if subject.loss_fn is None and subject.error != "token":
            bound = float(tail_bounds.binomial_upper_bound(int(losses.sum()), n, delta))
        else:  # a mean of losses between 0 and 1 is not binomial
            bound = float(tail_bounds.betting_upper_bound(losses.clamp(0, 1), delta))
    errors = tail_bounds.most_errors_below(best, n, delta)
    return TestSetBound(n, risk, bound, errors / n, 1 - delta)


def check_choices(delta: float, draws: int, betas: Sequence[float], **others: float) -> None:
    """Raise a ``ValueError`` if probabilities, numbers of draws or weights of the KL are out of their range."""
    check_probability(delta=delta, **others)
    for argument, value in others.items():
        if delta + value >= 1:
            raise ValueError(
                f"`delta` and `{argument}` must add up to less than 1, got {delta + value}."
            )
    check_counts(draws=draws)
    check_positive(betas=betas)
