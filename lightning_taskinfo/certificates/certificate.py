"""The pre-distribution that goes into a certificate, and the certificate with all that makes it one."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from lightning_taskinfo._arguments import ArgumentsByName
from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo._ranges import check_finite_tensors, check_positive
from lightning_taskinfo.distributions import WeightGaussian

PRIOR_STDS = tuple(0.5 * 2 ** (-j / 2) for j in range(24))  # 0.5 … 1.7e-4, whatever the data


def round_up(bound: float, digits: int = 4) -> float:
    """Round a bound to so many digits without promising more than was proved.

    Example:
        >>> round_up(0.21250582), round_up(0.25)
        (0.2126, 0.25)
    """
    return min(1.0, math.ceil(bound * 10**digits) / 10**digits)


@dataclass(frozen=True)
class Prior(metaclass=ArgumentsByName):
    """The pre-distribution of a certificate: fixed before the certified data are looked at.

    Args:
        center: Weights and buffers at the centre: a copy of the module at its start, or of its ``state_dict``; 0 by
            default.
        origin: Where the centre comes from, in words, **if it does not depend on the certified data**: ``"random
            initialisation"``, ``"trained on the other half"``. The certificate repeats it; without it, it is not valid.
        stds: Standard deviations to choose from, in the order in which they are to be cheap; a single one is free.
        per_layer: Whether each layer chooses its own, and pays for it.
    """

    center: nn.Module | Mapping[str, Tensor] | None = None
    origin: str | None = None
    stds: Sequence[float] = PRIOR_STDS
    per_layer: bool = True

    def __post_init__(self) -> None:
        check_positive(stds=self.stds)
        check_finite_tensors("center", self.values())

    def values(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the centre by name; empty for a centre at 0."""
        if self.center is None:
            return {}
        if isinstance(self.center, nn.Module):
            return {**dict(self.center.named_parameters()), **dict(self.center.named_buffers())}
        return dict(self.center)

    def center_of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the centre of each trainable parameter, on the model's device."""
        weights = trainable_parameters(model)
        if self.center is None:
            return {name: torch.zeros_like(p) for name, p in weights.items()}
        values = self.values()
        missing = sorted(weights.keys() - values.keys())
        if missing:
            raise ValueError(f"`center` must hold every trainable parameter of the model, got none for {missing}.")
        for name, p in weights.items():
            if values[name].shape != p.shape:
                raise ValueError(
                    f"`center` must have the shapes of the model's parameters, got {tuple(values[name].shape)} for "
                    f"{name} of shape {tuple(p.shape)}."
                )
        return {name: values[name].detach().to(p) for name, p in weights.items()}


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
    """

    structure: str
    beta: float
    risk: float
    kl: float
    price: float
    bound: float
    prior_std: Mapping[str, float]


@dataclass(frozen=True)
class Certificate:
    """A bound on the true risk of a **stochastic** classifier: weights drawn afresh from ``post`` for each prediction.

    Attributes:
        bound: With probability ``confidence`` over the samples and the draws, the true risk is at most this.
        valid: Whether that can be claimed.
        reasons: Why not.
        assumptions: What was taken on the user's word.
        risk: Empirical risk of the stochastic classifier, mean over the draws.
        risk_interval: Its Monte-Carlo interval; the upper end went into the bound.
        model_risk: Empirical risk of the network itself, about which nothing is certified.
        kl: ``KL(Q‖P)`` in nats.
        price: Price of choosing the prior's scales by the data, in nats.
        n: Number of samples.
        delta: Probability with which the theorem may fail.
        delta_draws: Probability with which the Monte-Carlo interval may fail.
        draws: Number of stochastic networks drawn for the interval, none of them used in the search.
        interval: Which Monte-Carlo interval: ``"betting"`` or ``"kl"``.
        theorem: ``"kl"`` (Maurer–Seeger), ``"mcallester"`` or ``"catoni"``.
        structure: Which curvature shaped the post-distribution.
        beta: Weight of the KL beside the sum of the loss in the post-distribution; free.
        prior_origin: Where the prior's centre comes from.
        prior_std: The prior's standard deviation by layer (``""`` for all).
        prior_grid: Number of values it was chosen from.
        candidates: The search, one row a post-distribution.
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
        values = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "post"}
        return {**values, "confidence": self.confidence, "candidates": [vars(row) for row in self.candidates]}

    def to_json(self, **options: Any) -> str:
        """Return the certificate as JSON; ``options`` go to ``json.dumps``."""
        return json.dumps(self.to_dict(), **options)

    def __str__(self) -> str:
        low, high = self.risk_interval
        stds = ", ".join(f"{std:.4g} for {layer or 'all layers'}" for layer, std in self.prior_std.items())
        rows = {
            "true risk at most": f"{round_up(self.bound):.4f}  ({self.theorem} bound, "
            f"confidence {self.confidence:.4g})",
            "of": "the stochastic classifier: weights drawn afresh for each prediction",
            "valid": "yes" if self.valid else "NO: " + "; ".join(self.reasons),
            "empirical risk": f"{self.risk:.4f}  in [{1 - round_up(1 - low):.4f}, {round_up(high):.4f}] "
            f"by {self.draws} fresh networks",
            "network itself": f"{self.model_risk:.4f}  (empirical, not certified)",
            "KL(Q‖P)": f"{self.kl:.1f} nats, + {self.price:.1f} for choosing the prior's scale from {self.prior_grid}",
            "samples": f"{self.n}",
            "prior": f"centre: {self.prior_origin}; std: {stds}",
            "post": f"{self.structure} curvature, beta {self.beta:.3g}; the best of {len(self.candidates)} tried "
            f"({', '.join(self.structures)})",
            "taken on trust": "; ".join(self.assumptions),
        }
        return "\n".join(f"{name:18s} {value}" for name, value in rows.items())
