"""What can be proved about an adapted network, with its start as the centre of the prior."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.certificates.fresh import check_fresh
from lightning_taskinfo.certificates.network import FEWEST
from lightning_taskinfo.certificates.samples import read_inputs
from lightning_taskinfo.transfer.sampling import Rows, reseed
from lightning_taskinfo.transfer.target import Target

MOST_FRESH = 5000  # inputs to compare predictions on
STREAM = 6  # of random numbers


@dataclass(frozen=True)
class Certified:
    """The samples that a certificate needs, all of them independent draws.

    Attributes:
        target: The target data; its test set gives the test-set bound.
        rows: Rows of training samples in random order.
        labels: The first so many are trained on, and certified; the inputs of others serve nothing
            else.
    """

    target: Target
    rows: Rows
    labels: int

    @property
    def fresh(self) -> Rows:
        """Rows of the inputs that serve nothing else."""
        return self.rows[self.labels :][:MOST_FRESH]

    def check(self, model: nn.Module) -> None:
        """Raise a ``ValueError`` where inputs occur twice, so that they cannot serve nothing else."""
        target = self.target
        used, _ = read_inputs(target.plain_loader(self.rows[: self.labels]), model=model)
        others = [target.test_loader()]
        if len(self.fresh) >= FEWEST:
            others.append(target.plain_loader(self.fresh))
        for loader in others:
            inputs, _ = read_inputs(loader, argument="data", model=model)
            check_fresh("data", inputs, used, "the labelled samples, where `certify` is asked for")

    def bounds(self, model: nn.Module, prior: Prior, seed: int) -> dict[str, Any]:
        """Return the three bounds on the true error, as plain values.

        Args:
            model: The trained network.
            prior: The prior, taken before training.
            seed: Of all draws.
        """
        reseed(seed, STREAM)
        enough = len(self.fresh) >= FEWEST
        found = certify(
            model,
            self.target.plain_loader(self.rows[: self.labels]),
            prior,
            unlabelled=self.target.plain_loader(self.fresh) if enough else None,
            held_out=self.target.test_loader(),
            seed=seed,
            progress=False,
        )
        missing = f"no bound for the network itself, which needs {FEWEST} inputs without labels"
        network, test = found.network, found.test_set
        return {
            "stochastic": found.bound,
            "network": None if network is None else network.bound,
            "test_set": test.bound,
            "confidence": min(found.confidence, network.confidence if network else 1.0),
            "valid": found.valid,
            "reasons": list(found.reasons),
            "assumptions": [*found.assumptions, *([] if enough else [missing])],
            "kl": found.kl,
            "risk": found.risk,
            "disagreement": None if network is None else network.disagreement,
        }


def start_prior(model: nn.Module, start: str, *, scratch: bool) -> Prior:
    """Return the prior centred at a module that is about to be trained; what is frozen in it costs nothing."""
    if scratch:
        return Prior.of(model, origin="random initialisation")
    return Prior.of(
        model,
        origin=f"the start {start!r}, said to be pretrained on other samples than the certified ones",
    )


def check_classes(labels: Tensor | None) -> None:
    """Raise a ``ValueError`` where errors cannot be counted."""
    if labels is None or labels.is_floating_point():
        raise ValueError(
            "`certify` must go with one class for each sample, got targets that are none."
        )
