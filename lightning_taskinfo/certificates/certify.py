"""``certify(model, data, prior)``: what can be proved about a network that was simply trained."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from lightning_taskinfo._batches import IGNORED, Reader, sample_count
from lightning_taskinfo._observe import observing
from lightning_taskinfo._progress import Progress, counted, shown
from lightning_taskinfo._ranges import check_counts, check_positive, check_probability
from lightning_taskinfo.certificates.certificate import Certificate
from lightning_taskinfo.certificates.curvatures import Curvature, Structures, curvatures_to_try
from lightning_taskinfo.certificates.network import (
    FEWEST,
    block_disagreements,
    held_out_bound,
    network_bound,
)
from lightning_taskinfo.certificates.prior import Prior, assumptions, half_prior, reasons_against
from lightning_taskinfo.certificates.samples import Data, check_fresh, read_inputs, read_labelled
from lightning_taskinfo.certificates.search import (
    BETAS,
    Theorem,
    best_of,
    bound_of,
    propose,
    search,
)
from lightning_taskinfo.certificates.subject import ErrorKind, Loss, Subject, check_certifiable
from lightning_taskinfo.distributions import WeightGaussian
from lightning_taskinfo.fisher.fallback import Forward
from lightning_taskinfo.functional.pac_bayes import monte_carlo_interval
from lightning_taskinfo.functional.tail_bounds import betting_interval

# Beside four standard errors: a known error may be of a few other samples.
KNOWN_ERROR_MARGIN = 0.05
DRAW_SIZE = 64  # samples per fresh network: many networks on few samples tell more than few on many
Interval: TypeAlias = Literal["betting", "kl"]


def certify(
    model: nn.Module,
    data: Data,
    prior: Prior | None = None,
    *,
    unlabelled: Any = None,
    held_out: Data | None = None,
    half_fn: Callable[..., Any] | None = None,
    structure: Structures | Curvature = "auto",
    betas: Sequence[float] = BETAS,
    theorem: Theorem = "kl",
    delta: float = 0.04,
    delta_draws: float = 0.01,
    delta_network: float = 0.01,
    draws: int = 1000,
    interval: Interval = "betting",
    error: ErrorKind = "class",
    known_error: float | None = None,
    loss_fn: Loss | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
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
        half_fn: How to train, ``half_fn(network, (inputs, targets))``: if given, a copy of the prior's centre is
            trained on a random half of the samples and becomes the centre, and the other half is certified on.
        structure: Curvature that shapes the post-distribution: ``"isotropic"``, ``"diagonal"`` (Fisher),
            ``"layer_inputs"`` (one matrix of layer inputs per layer), ``"neuron"`` (the same, scaled by how sensitive
            the loss is to a neuron), ``"kron"``; several of these, to take the best; ``"auto"`` for all that the
            network's width allows; or a ready one of the sum of the loss.
        betas: Weights of the KL beside the sum of the loss to try; free.
        theorem: ``"kl"`` (Maurer–Seeger, the tightest), ``"mcallester"`` or ``"catoni"`` (with its parameter at 1);
            chosen before looking at the results.
        delta: Probability with which the theorem may fail.
        delta_draws: Probability with which the Monte-Carlo interval may fail.
        delta_network: Probability with which what the network's own bound needs beside the theorem may fail: one half
            for the draws of its post-distribution, the other for the disagreement.
        draws: Number of fresh networks for each of these estimates, each tested on a few random samples.
        interval: ``"betting"``, or ``"kl"``, the classical one, which needs about ten times as many networks; chosen
            before looking at the results.
        error: What counts as an error: ``"class"`` for scores ``[N, C]``; for ``[N, T, V]`` the share of wrong
            ``"token"``\ s of each sequence, or whether a ``"sequence"`` has any. Targets of -100 do not count.
        known_error: Error of the network on these samples, as you know it from training. If it is far from the error
            found here, inputs are not prepared as they were then, and nothing is certified.
        loss_fn: Loss of each sample from outputs and targets, in ``[0, 1]``, instead of the error; it knows no
            disagreement, so it cannot go with ``unlabelled``.
        batch_fn: Picks ``(inputs, targets)`` out of a batch of ``data``, ``held_out`` or ``unlabelled``.
        forward_fn: How to get the outputs, ``forward_fn(model, inputs)``; ``model(inputs)`` by default.
        curvature_samples: How many samples the curvature is estimated from.
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
    prior = Prior() if prior is None else prior
    if not isinstance(prior, Prior):
        raise TypeError(f"`prior` must be a Prior or None, got a {type(prior).__name__}.")
    _check_words(theorem, interval)
    check_choices(
        delta=delta,
        delta_draws=delta_draws,
        draws=draws,
        betas=betas,
        delta_network=delta_network,
    )
    if unlabelled is not None and loss_fn is not None:
        raise ValueError(
            "`unlabelled` must go with an `error`, got a `loss_fn`, which knows no disagreement."
        )

    # Read everything, and refuse what cannot be used, before the long work begins.
    check_certifiable(model)
    reader = Reader(batch_fn, forward_fn)
    samples = read_labelled(data, model=model, reader=reader)
    prior.center_of(model)
    if half_fn is not None:
        prior, samples = half_prior(prior, model, samples, half_fn, seed)
    fresh = None
    if unlabelled is not None:
        fresh = read_inputs(unlabelled, model=model, reader=reader)
    labelled = None
    if held_out is not None:
        labelled = read_labelled(held_out, argument="held_out", model=model, reader=reader)
    notes = _check_use(samples, prior, fresh, labelled)

    with observing(model), shown(progress, "certify", len(betas)) as tell:
        subject = Subject.of(
            model,
            samples,
            seed=seed,
            error=error,
            loss_fn=loss_fn,
            forward_fn=forward_fn,
        )
        model_risk = float(subject.all_losses().mean())
        if known_error is not None:
            _check_known_error(model_risk, known_error, subject.n)
        counts = None if fresh is None else _counts(subject, *fresh)
        few = subject.some(slice(4))
        reasons = reasons_against(model, prior, few, subject.outputs)
        curvatures = curvatures_to_try(subject, structure, curvature_samples)
        bound_by = bound_of(theorem, subject.n, delta)
        rows = search(
            subject,
            prior,
            curvatures,
            betas,
            bound=bound_by,
            network=fresh is not None,
            progress=tell,
        )
        best, *others = best_of(rows, network=fresh is not None)
        winner = propose(subject, prior, curvatures[best.structure], best.beta)
        risks, why_not = _fresh_risks(subject, winner.post, draws, tell)
        low, high = _interval(risks, interval, delta_draws)
        bound = min(1.0, bound_by(high, winner.kl + winner.price))

        network = None
        for other in others:  # the best one for the network itself, with draws of its own
            assert fresh is not None
            # Its post-distribution is fixed before the fresh inputs are touched.
            proposal = propose(subject, prior, curvatures[other.structure], other.beta)
            own_risks, _ = _fresh_risks(subject, proposal.post, draws, tell)
            disagreements = block_disagreements(
                subject, proposal.post, fresh[0], counts, draws, tell
            )
            network = network_bound(
                other,
                proposal,
                own_risks,
                disagreements,
                bound=bound_by,
                delta=delta,
                delta_network=delta_network,
            )
        proved = bound if network is None else network.bound
        test_set = held_out_bound(subject, labelled, proved, delta + delta_draws)
    return Certificate(
        bound=bound,
        valid=not reasons + why_not,
        reasons=tuple(reasons + why_not),
        assumptions=(*assumptions(model, prior), *notes),
        risk=float(risks.mean()),
        risk_interval=(low, high),
        model_risk=model_risk,
        kl=winner.kl,
        price=winner.price,
        n=subject.n,
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
        error=error if loss_fn is None else "loss",
        network=network,
        test_set=test_set,
        candidates=tuple(rows),
        post=winner.post,
    )


def _check_known_error(found: float, known: float, n: int) -> None:
    """Refuse an error that is far from the one that the user knows: other inputs, or other preprocessing."""
    if not 0 <= known <= 1:
        raise ValueError(f"`known_error` must be between 0 and 1, got {known}.")
    standard_error = math.sqrt(found * (1 - found) / n)
    reach = KNOWN_ERROR_MARGIN + 4 * standard_error
    if abs(found - known) > reach:
        raise ValueError(
            f"`known_error` must be near the network's error on these samples, {found:.4f}, got {known}: are inputs "
            "prepared as for training, and are these the samples?"
        )


def _check_use(
    samples: tuple[Any, Tensor],
    prior: Prior,
    fresh: tuple[Any, Any] | None,
    labelled: tuple[Any, Tensor] | None,
) -> list[str]:
    """Refuse samples that were used where they may not have been; return what could not be checked."""
    notes: list[str | None] = []
    certified = "the certified samples"
    centre = "those that the prior's centre was trained on"
    if prior.seen is not None:
        notes.append(check_fresh("data", samples[0], prior.seen, centre))
    if fresh is not None:
        count = sample_count(fresh[0])
        if count < FEWEST:
            raise ValueError(f"`unlabelled` must hold at least {FEWEST} inputs, got {count}.")
        notes.append(
            "the unlabelled inputs are independent draws from the same distribution, and served no training, penalty, "
            "prior, preprocessing or choice"
        )
    if labelled is not None:
        notes.append("the held-out samples served no training, prior or choice")
    for argument, others in (("unlabelled", fresh), ("held_out", labelled)):
        if others is not None:
            notes.append(check_fresh(argument, others[0], samples[0], certified))
            if prior.seen is not None:
                notes.append(check_fresh(argument, others[0], prior.seen, centre))
    return [note for note in notes if note is not None]


def _counts(subject: Subject, inputs: Any, targets: Any) -> Tensor | None:
    """Return where predictions on fresh inputs count: where there is no padding, as far as that is known."""
    if subject.error == "class":
        return None
    if isinstance(targets, Tensor):
        return targets != IGNORED
    ignored = subject.targets == IGNORED
    if subject.error == "token" and bool(ignored.any()):
        raise ValueError(
            "`unlabelled` must come with targets that are -100 in padding and anything else elsewhere, as `data` has "
            "padding and `error` is 'token', got inputs alone."
        )
    return None  # a sequence that agrees everywhere agrees where labels would be


def _fresh_risks(
    subject: Subject,
    post: WeightGaussian,
    draws: int,
    progress: Progress,
) -> tuple[Tensor, list[str]]:
    """Return the mean loss of each of some networks that nothing was chosen by, and what is wrong with the losses."""
    turns = counted(range(draws), draws, progress, "draws")
    drawn = [subject.draw_losses(post, DRAW_SIZE)[0] for _ in turns]
    losses = torch.stack(drawn)  # [draws, samples]
    outside = losses[(losses < 0) | (losses > 1)]
    wrong = [f"the loss must lie in [0, 1], got {outside[0].item()}"] if len(outside) else []
    return losses.clamp(0, 1).mean(1), wrong


def _interval(risks: Tensor, interval: Interval, delta: float) -> tuple[float, float]:
    if interval == "kl":
        low, high = monte_carlo_interval(risks.mean(), len(risks), delta)
    else:
        low, high = betting_interval(risks, delta)
    return float(low), float(high)


def _check_words(theorem: str, interval: str) -> None:
    if theorem not in get_args(Theorem):
        raise ValueError(f"`theorem` must be one of {get_args(Theorem)}, got {theorem!r}.")
    if interval not in get_args(Interval):
        raise ValueError(f"`interval` must be one of {get_args(Interval)}, got {interval!r}.")


def check_choices(
    *,
    delta: float,
    delta_draws: float,
    draws: int,
    betas: Sequence[float],
    delta_network: float = 0.01,
) -> None:
    """Raise a ``ValueError`` if probabilities, numbers of draws or weights of the KL are out of their range."""
    others = {"delta_draws": delta_draws, "delta_network": delta_network}
    check_probability(delta=delta, **others)
    for argument, value in others.items():
        if delta + value >= 1:
            raise ValueError(
                f"`delta` and `{argument}` must add up to less than 1, got {delta + value}."
            )
    check_counts(draws=draws)
    check_positive(betas=betas)
