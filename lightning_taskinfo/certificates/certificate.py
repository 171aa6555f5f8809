"""What was proved: the certificate with all that makes it one, two other proofs beside it, and all of it in words."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any, cast

from lightning_taskinfo._tables import Tabled
from lightning_taskinfo.distributions import WeightGaussian
from lightning_taskinfo.functional.tail_bounds import binomial_upper_bound
from lightning_taskinfo.plotting import Drawn, Given, plot_bars

UNIT = {
    "class": "errs on at most {} of new inputs",
    "token": "errs on at most {} of the tokens of a new sequence on average",
    "sequence": "makes an error in at most {} of new sequences",
    "loss": "has a mean loss of at most {} on new inputs",
}
REMEDIES = {  # part of a bound -> what it is for, and what lowers it
    "complexity": "the KL of {kl:.0f} nats for {n} labels: a prior nearer to the trained weights (pretrained, or "
    "trained on other labels), frozen weights, or more labels lower it",
    "disagreement": "the network and its draws disagree: a narrower post-distribution does so less, and becomes "
    "cheaper with more labels or a prior nearer to the trained weights",
    "inputs": "so few unlabelled inputs: more of them lower it",
    "risk": "the error of the stochastic network itself: a network that fits the labels better, or whose predictions "
    "tolerate noise in the weights, has a lower one",
    "draws": "the Monte-Carlo interval: more `draws` narrow it",
}


def round_up(bound: float) -> float:
    """Round a bound to four digits without promising more than was proved.

    Example:
        >>> round_up(0.21250582), round_up(0.25)
        (0.2126, 0.25)
    """
    return min(1.0, math.ceil(bound * 10_000) / 10_000)


def percent(bound: float) -> str:
    """Return a bound in percent, rounded up.

    Example:
        >>> percent(0.1446), percent(0.03)
        ('14.5 %', '3.0 %')
    """
    return f"{math.ceil(1000 * bound - 1e-9) / 10:.1f} %"


@dataclass(frozen=True)
class Candidate:
    """One post-distribution of the search; its risk is a rough estimate, so its bound is no certificate.

    Attributes:
        structure: The curvature it was made from.
        beta: Weight of the KL beside the sum of the loss.
        risk: Estimated empirical risk of the stochastic classifier.
        kl: ``KL(Q‖P)`` in nats.
        price: Price of choosing the prior's scales, in nats.
        bound: The bound at these numbers.
        prior_std: The chosen standard deviation by layer (``""`` for all).
        disagreement: How often its draws and the network itself predict differently on the
            certified samples, roughly; infinite for a loss that knows no disagreement.
    """

    structure: str
    beta: float
    risk: float
    kl: float
    price: float
    bound: float
    prior_std: Mapping[str, float]
    disagreement: float = math.inf


@dataclass(frozen=True)
class NetworkBound:
    r"""A bound on the true error of the network itself, by how often it disagrees with its stochastic version.

    .. math:: R(h) \le R(Q) + \Pr_{x,\, w \sim Q}\big[ h_w(x) \ne h(x) \big]

    The second term needs no labels. It is bounded on fresh inputs, in blocks that share one draw of
    the weights: their means are independent, single inputs of a block are not.

    Attributes:
        bound: With probability ``confidence``, the true error of the network is at most this.
        stochastic_bound: Bound on the error of the stochastic classifier, the first term.
        disagreement: Mean disagreement on the fresh inputs.
        disagreement_upper: Its upper bound, the second term.
        inputs: Number of fresh inputs used.
        blocks: Number of blocks they were put in, one draw of the weights each.
        risk: Empirical risk of the stochastic classifier.
        risk_upper: Its upper bound, which went into the first term.
        kl: ``KL(Q‖P)`` in nats.
        price: Price of choosing the prior's scales, in nats.
        structure: The curvature that shaped this post-distribution, which need not be the
            certificate's own.
        beta: Its weight of the KL.
        delta: Probability with which either of the two upper bounds may fail; half of it is for
            each.
        confidence: Probability with which the bound holds, if the certificate is valid.
    """

    bound: float
    stochastic_bound: float
    disagreement: float
    disagreement_upper: float
    inputs: int
    blocks: int
    risk: float
    risk_upper: float
    kl: float
    price: float
    structure: str
    beta: float
    delta: float
    confidence: float


@dataclass(frozen=True)
class TestSetBound:
    """What held-out labels prove about the network itself, or would have to show in order to prove more.

    Attributes:
        n: Number of held-out labels; without any, a fifth of the certified ones, as if they had
            been held out.
        risk: The network's error on them; ``None`` without.
        bound: With probability ``confidence``, the true error of the network is at most this;
            ``None`` without.
        break_even: Up to this error on so many labels, the test-set bound is below the
            certificate's; negative if no error is small enough.
        confidence: Probability with which the bound holds: the certificate's own.
    """

    __test__ = False  # a class for users, whatever test runners think of its name

    n: int
    risk: float | None
    bound: float | None
    break_even: float
    confidence: float


@dataclass(frozen=True)
class Certificate(Tabled):
    """A bound on the true risk of a **stochastic** classifier: weights drawn afresh from ``post`` for each prediction.

    Beside it, where there was something to prove them with: ``network``, a bound for the network
    itself, and ``test_set``, what held-out labels prove. Printed, it says which proof is stronger,
    and what would tighten the other.

    Attributes:
        bound: With probability ``confidence`` over the samples and the draws, the true risk is at
            most this.
        valid: Whether that can be claimed.
        reasons: Why not.
        assumptions: The assumptions that could not be checked.
        risk: Empirical risk of the stochastic classifier, mean over the draws.
        risk_interval: Its Monte-Carlo interval; the upper end went into the bound.
        model_risk: Empirical risk of the network itself, on the certified samples.
        kl: ``KL(Q‖P)`` in nats.
        price: Price of choosing the prior's scales by the data, in nats.
        n: Number of samples.
        repeated: How many of them occur more than once, with the same label.
        delta: Probability with which the theorem may fail.
        delta_draws: Probability with which the Monte-Carlo interval may fail.
        draws: Number of stochastic networks drawn for the interval, none of them used in the
            search.
        structure: Which curvature shaped the post-distribution.
        beta: Weight of the KL beside the sum of the loss in the post-distribution; free.
        prior_origin: Where the prior's centre comes from.
        prior_std: The prior's standard deviation by layer (``""`` for all).
        prior_grid: Number of values it was chosen from.
        candidates: The search, one row a post-distribution.
        error: What is counted: ``"class"``, ``"token"`` or ``"sequence"``; ``"loss"`` for a loss of
            the user's own.
        network: The bound for the network itself; ``None`` without fresh unlabelled inputs.
        test_set: The test-set bound.
        post: The post-distribution.
    """

    bound: float
    valid: bool
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...]
    risk: float
    risk_interval: tuple[float, float]
    model_risk: float
    kl: float
    price: float
    n: int
    repeated: int
    delta: float
    delta_draws: float
    draws: int
    structure: str
    beta: float
    prior_origin: str
    prior_std: Mapping[str, float]
    prior_grid: int
    error: str
    network: NetworkBound | None
    test_set: TestSetBound
    candidates: tuple[Candidate, ...] = field(repr=False)
    post: WeightGaussian = field(repr=False, compare=False)

    @property
    def confidence(self) -> float:
        """Probability with which the bound holds, if it is valid."""
        return 1 - self.delta - self.delta_draws

    @property
    def structures(self) -> tuple[str, ...]:
        """The curvatures that were searched; the winner's risk comes from draws that no choice was made by."""
        return tuple(dict.fromkeys(row.structure for row in self.candidates))

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the distribution itself, ready for JSON."""
        values = asdict(replace(self, post=cast(Any, None)))
        del values["post"]
        values["confidence"] = self.confidence
        for row in values["candidates"]:
            if row["disagreement"] == math.inf:  # which JSON does not know
                row["disagreement"] = None
        return values

    def reading(self) -> str:
        """Return the certificate as one sentence."""
        if not self.valid:
            reasons = "; ".join(self.reasons)
            return f"Nothing can be claimed about the stochastic network: {reasons}."
        says = UNIT[self.error]
        stochastic = says.format(percent(self.bound))
        sure = f"With confidence {self.confidence:.4g} the stochastic network {stochastic}"
        network = self.network
        if network is None:
            return f"{sure}; nothing follows from that for the network itself."
        also = ""
        if network.confidence != self.confidence:
            also = f"with confidence {network.confidence:.4g} "
        return f"{sure}, and {also}the network itself {says.format(percent(network.bound))}."

    def comparison(self) -> str:
        """Return which proof is stronger."""
        whose, ours = self._proved()
        n, theirs, break_even = self.test_set.n, self.test_set.bound, self.test_set.break_even
        if theirs is None and break_even < 0:
            return f"{n} held-out labels would prove less than {whose}, whatever the network's error on them."
        if theirs is None:
            return (
                f"Holding out {n} of these labels for testing would give a better bound than {whose}, if the "
                f"error on them is at most {100 * break_even:.1f} %."
            )
        if theirs <= ours:
            return f"The test-set bound is stronger: {percent(theirs)} against {percent(ours)} by {whose}."
        return f"{whose.capitalize()} is stronger: {percent(ours)} against {percent(theirs)} on the test set."

    def _proved(self) -> tuple[str, float]:
        """The bound for the network itself, or else for its stochastic version, with its name."""
        if self.network is None:
            return "the bound for the stochastic network", self.bound
        return "the bound for the network itself", self.network.bound

    def advice(self) -> str:
        """Return what would tighten the weaker proof: held-out labels, or the largest part of the certificate."""
        test_set = self.test_set
        _, ours = self._proved()
        if test_set.bound is not None and test_set.bound > ours:
            four = 4 * test_set.n
            errors = round(four * cast(float, test_set.risk))
            better = percent(float(binomial_upper_bound(errors, four, 1 - test_set.confidence)))
            return f"More held-out labels tighten the test-set bound: {four} with the same error give {better}."

        network = self.network
        if network is None:
            bound, risk, upper, kl = self.bound, self.risk, self.risk_interval[1], self.kl
            parts = {}
        else:
            bound, risk = network.stochastic_bound, network.risk
            upper, kl = network.risk_upper, network.kl
            parts = {
                "disagreement": network.disagreement,
                "inputs": network.disagreement_upper - network.disagreement,
            }
        parts |= {"complexity": bound - upper, "risk": risk, "draws": upper - risk}
        name, size = max(parts.items(), key=itemgetter(1))
        remedy = REMEDIES[name].format(kl=kl, n=self.n)
        return f"The largest part of the certificate is {percent(size)} for {remedy}."

    def rows(self) -> dict[str, str]:
        """Return everything about a certificate, line by line."""
        low, high = self.risk_interval
        valid = "yes" if self.valid else "NO: " + "; ".join(self.reasons)
        stds = [f"{std:.4g} for {name or 'all layers'}" for name, std in self.prior_std.items()]
        network, test_set = self.network, self.test_set
        itself = "no bound by disagreement: that needs fresh inputs without labels (`unlabelled`)"
        if network is not None:
            itself = (
                f"true risk at most {round_up(network.bound):.4f}  = {round_up(network.stochastic_bound):.4f} for a "
                f"stochastic one + {round_up(network.disagreement_upper):.4f} for disagreement on {network.inputs} "
                f"unlabelled inputs (confidence {network.confidence:.4g})"
            )
        held_out = "no held-out labels were given (`held_out`)"
        if test_set.bound is not None:
            held_out = (
                f"true risk of the network itself at most {round_up(test_set.bound):.4f}  (error {test_set.risk:.4f} "
                f"on {test_set.n} held-out labels, confidence {test_set.confidence:.4g})"
            )
        return {
            "true risk at most": f"{round_up(self.bound):.4f}  (kl bound, "
            f"confidence {self.confidence:.4g})",
            "of": "the stochastic classifier: weights drawn afresh for each prediction",
            "valid": valid,
            "empirical risk": f"{self.risk:.4f}  in [{1 - round_up(1 - low):.4f}, {round_up(high):.4f}] "
            f"by {self.draws} fresh networks",
            "network itself": itself,
            "test-set bound": held_out,
            "its training risk": f"{self.model_risk:.4f}  (the network's own, on the certified samples)",
            "KL(Q‖P)": f"{self.kl:.1f} nats, + {self.price:.1f} for choosing the prior's scale "
            f"from {self.prior_grid}",
            "samples": f"{self.n}",
            "prior": f"centre: {self.prior_origin}; std: {', '.join(stds)}",
            "post-distribution": f"{self.structure} curvature, beta {self.beta:.3g}; the best of "
            f"{len(self.candidates)} tried ({', '.join(self.structures)})",
            "taken on trust": "; ".join(self.assumptions),
        }

    def plot(self, ax: Given = None) -> Drawn:
        """Draw the bounds that were proved above the errors on the certified samples; needs matplotlib.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        bars = {"bound, stochastic network": self.bound}
        if self.network is not None:
            bars["bound, network itself"] = self.network.bound
        if self.test_set.bound is not None:
            bars["test-set bound, network itself"] = self.test_set.bound
        bars["training error, stochastic network"] = self.risk
        bars["training error"] = self.model_risk
        counted = "mean loss" if self.error == "loss" else "error"
        figure, ax = plot_bars(bars, xlabel=counted, ax=ax)
        if not self.valid:
            ax.set_title("not valid")
        return figure, ax

    def __str__(self) -> str:
        lines = [f"{name:18s} {value}" for name, value in self.rows().items()]
        says = self.reading()
        if self.valid:
            says = f"{says} {self.comparison()} {self.advice()}"
        return "\n".join([*lines, "", says])
