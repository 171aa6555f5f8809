"""A certificate in words: what it says in one sentence, which proof is stronger, and what would tighten the other."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

from lightning_taskinfo.functional.intervals import binomial_upper_bound

if TYPE_CHECKING:
    from lightning_taskinfo.certificates.certificate import Certificate, NetworkBound

UNIT = {
    "class": "errs on at most {} of new inputs",
    "token": "errs on at most {} of the tokens of a new sequence on average",
    "sequence": "makes an error in at most {} of new sequences",
    "loss": "has a mean loss of at most {} on new inputs",
}


def round_up(bound: float, digits: int = 4) -> float:
    """Round a bound to so many digits without promising more than was proved.

    Example:
        >>> round_up(0.21250582), round_up(0.25)
        (0.2126, 0.25)
    """
    return min(1.0, math.ceil(bound * 10**digits) / 10**digits)


def percent(bound: float) -> str:
    """Return a bound in percent, rounded up.

    Example:
        >>> percent(0.1446), percent(0.03)
        ('14.5 %', '3.0 %')
    """
    return f"{math.ceil(1000 * bound - 1e-9) / 10:.1f} %"


def reading(certificate: Certificate) -> str:
    """Return the certificate as one sentence."""
    says = UNIT[certificate.error]
    stochastic = says.format(percent(certificate.bound))
    if not certificate.valid:
        return f"Nothing can be claimed about the stochastic network: {'; '.join(certificate.reasons)}."
    sure = f"With confidence {certificate.confidence:.4g} the stochastic network {stochastic}"
    network = certificate.network
    if network is None:
        return f"{sure}; nothing follows from that for the network itself."
    own = says.format(percent(network.bound))
    return f"{sure}, and with confidence {network.confidence:.4g} the network itself {own}."


def comparison(certificate: Certificate) -> str:
    """Return which proof is stronger."""
    test_set = certificate.test_set
    network = certificate.network
    ours = certificate.bound if network is None else network.bound
    whose = (
        "the bound for the stochastic network"
        if network is None
        else "the bound for the network itself"
    )
    if test_set.bound is None:
        if test_set.break_even < 0:
            return f"{test_set.n} held-out labels would prove less than {whose}, whatever the network's error on them."
        return (
            f"{test_set.n} of these labels held out of training would prove more than {whose}, if the network that "
            f"learned from the others had an error of at most {test_set.break_even:.4f} on them."
        )
    if test_set.bound <= ours:
        return f"The test-set bound is stronger: {percent(test_set.bound)} against {percent(ours)} by {whose}."
    return f"{whose.capitalize()} is stronger: {percent(ours)} against {percent(test_set.bound)} on the test set."


def advice(certificate: Certificate) -> str:
    """Return what would tighten the weaker proof."""
    test_set = certificate.test_set
    ours = certificate.bound if certificate.network is None else certificate.network.bound
    if test_set.bound is None or test_set.risk is None or test_set.bound <= ours:
        return _about_the_certificate(certificate)
    four = 4 * test_set.n
    tail = binomial_upper_bound(round(four * test_set.risk), four, 1 - test_set.confidence)
    return f"More held-out labels tighten the test-set bound: {four} with the same error give {percent(float(tail))}."


def _about_the_certificate(certificate: Certificate) -> str:
    """Name the largest part of the bound, and its remedy."""
    network = certificate.network
    if network is None:
        risk, upper = certificate.risk, certificate.risk_interval[1]
        parts = {"complexity": certificate.bound - upper}
    else:
        risk, upper = network.risk, network.risk_upper
        parts = {
            "complexity": network.stochastic_bound - upper,
            "disagreement": network.disagreement,
            "inputs": network.disagreement_upper - network.disagreement,
        }
    parts |= {"risk": risk, "draws": upper - risk}
    kl = certificate.kl if network is None else network.kl
    remedies = {
        "complexity": f"the KL of {kl:.0f} nats for {certificate.n} labels: a prior nearer to the trained weights "
        "(pretrained, or trained on half of the labels by `half_fn`), frozen weights, or more labels lower it",
        "disagreement": "the network and its draws disagree: a narrower post-distribution does so less, and becomes "
        "cheaper with more labels or a prior nearer to the trained weights",
        "inputs": "so few unlabelled inputs: more of them lower it",
        "risk": "the error of the stochastic network itself: a network that fits the labels better, or whose "
        "predictions bear noise in the weights, has a lower one",
        "draws": "the Monte-Carlo interval: more `draws` narrow it",
    }
    largest = max(parts, key=lambda name: parts[name])
    return (
        f"The largest part of the certificate is {percent(parts[largest])} for {remedies[largest]}."
    )


def rows(certificate: Certificate) -> dict[str, str]:
    """Return everything about a certificate, line by line."""
    low, high = certificate.risk_interval
    stds = certificate.prior_std.items()
    lines = {
        "true risk at most": f"{round_up(certificate.bound):.4f}  ({certificate.theorem} bound, "
        f"confidence {certificate.confidence:.4g})",
        "of": "the stochastic classifier: weights drawn afresh for each prediction",
        "valid": "yes" if certificate.valid else "NO: " + "; ".join(certificate.reasons),
        "empirical risk": f"{certificate.risk:.4f}  in [{1 - round_up(1 - low):.4f}, {round_up(high):.4f}] "
        f"by {certificate.draws} fresh networks",
        "network itself": _network(certificate.network),
        "test-set bound": _test_set(certificate),
        "its training risk": f"{certificate.model_risk:.4f}  (the network's own, on the certified samples)",
        "KL(Q‖P)": f"{certificate.kl:.1f} nats, + {certificate.price:.1f} for choosing the prior's scale "
        f"from {certificate.prior_grid}",
        "samples": f"{certificate.n}",
        "prior": f"centre: {certificate.prior_origin}; std: "
        + ", ".join(f"{std:.4g} for {layer or 'all layers'}" for layer, std in stds),
        "post": f"{certificate.structure} curvature, beta {certificate.beta:.3g}; the best of "
        f"{len(certificate.candidates)} tried ({', '.join(certificate.structures)})",
        "taken on trust": "; ".join(certificate.assumptions),
    }
    return lines


def _network(network: NetworkBound | None) -> str:
    if network is None:
        return "not certified: that needs fresh inputs without labels (`unlabelled`)"
    return (
        f"true risk at most {round_up(network.bound):.4f}  = {round_up(network.stochastic_bound):.4f} for a "
        f"stochastic one + {round_up(network.disagreement_upper):.4f} for disagreement on {network.inputs} "
        f"unlabelled inputs (confidence {network.confidence:.4g})"
    )


def _test_set(certificate: Certificate) -> str:
    test_set = certificate.test_set
    if test_set.bound is None:
        return "no held-out labels were given (`held_out`)"
    return (
        f"true risk of the network itself at most {round_up(test_set.bound):.4f}  (error {test_set.risk:.4f} on "
        f"{test_set.n} held-out labels, confidence {test_set.confidence:.4g})"
    )


def sentences(certificate: Certificate) -> list[str]:
    """Return what a certificate says, which proof is stronger, and what would tighten the weaker one."""
    return [reading(certificate), comparison(certificate), advice(certificate)]


def as_text(certificate: Certificate) -> str:
    """Return a certificate as it is printed."""
    table = "\n".join(f"{name:18s} {value}" for name, value in rows(certificate).items())
    return table + "\n\n" + " ".join(sentences(certificate))


def as_html(certificate: Certificate) -> str:
    """Return a certificate as a notebook shows it."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
        for name, value in rows(certificate).items()
    )
    first, *others = (html.escape(sentence) for sentence in sentences(certificate))
    return f"<p><b>{first}</b> {' '.join(others)}</p><table>{cells}</table>"
