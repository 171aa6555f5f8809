"""What was proved: the certificate with all that makes it one, and the other two proofs beside it."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from lightning_taskinfo.certificates.reading import as_html, as_text, reading
from lightning_taskinfo.distributions import WeightGaussian

if TYPE_CHECKING:
    from lightning_taskinfo.plotting import Axes, Figure


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

    @property
    def network_bound(self) -> float:
        """What the same numbers promise for the network itself."""
        return self.bound + self.disagreement


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
class Certificate:
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
        delta: Probability with which the theorem may fail.
        delta_draws: Probability with which the Monte-Carlo interval may fail.
        draws: Number of stochastic networks drawn for the interval, none of them used in the
            search.
        interval: Which Monte-Carlo interval: ``"betting"`` or ``"kl"``.
        theorem: ``"kl"`` (Maurer–Seeger), ``"mcallester"`` or ``"catoni"``.
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
    delta: float
    delta_draws: float
    draws: int
    interval: str
    theorem: str
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
        values = {
            part.name: getattr(self, part.name) for part in fields(self) if part.name != "post"
        }
        values["confidence"] = self.confidence
        values["candidates"] = [_row(row) for row in self.candidates]
        values["network"] = None if self.network is None else asdict(self.network)
        values["test_set"] = asdict(self.test_set)
        return values

    def to_json(self, **options: Any) -> str:
        """Return the certificate as JSON; ``options`` go to ``json.dumps``."""
        return json.dumps(self.to_dict(), **options)

    def reading(self) -> str:
        """Return the certificate as one sentence."""
        return reading(self)

    def plot(self, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
        """Draw the bounds that were proved above the errors on the certified samples; needs matplotlib.

        Args:
            ax: Draw here instead of in a new figure.

        Returns:
            The figure and its axes.
        """
        from lightning_taskinfo.plotting import plot_bars

        bars = {"bound, stochastic network": self.bound}
        if self.network is not None:
            bars["bound, network itself"] = self.network.bound
        if self.test_set.bound is not None:
            bars["test-set bound, network itself"] = self.test_set.bound
        bars |= {"training error, stochastic network": self.risk, "training error": self.model_risk}
        figure, ax = plot_bars(bars, xlabel="mean loss" if self.error == "loss" else "error", ax=ax)
        if not self.valid:
            ax.set_title("not valid")
        return figure, ax

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)


def _row(row: Candidate) -> dict[str, Any]:
    """Return a row of the search for JSON, which knows no infinity."""
    return {name: None if value == math.inf else value for name, value in vars(row).items()}
