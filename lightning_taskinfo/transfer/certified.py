"""What can be proved about an adapted network, with its start as the centre of the prior."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.certificates.network import FEWEST
from lightning_taskinfo.certificates.samples import check_fresh, read_inputs
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

    @property
    def unlabelled(self) -> DataLoader[Any] | None:
        """Those inputs, where there are enough of them."""
        enough = len(self.fresh) >= FEWEST
        return self.target.plain_loader(self.fresh) if enough else None

    def check(self, model: nn.Module) -> None:
        """Raise a ``ValueError`` where inputs occur twice, so that they cannot serve nothing else."""
        target = self.target
        used, _ = read_inputs(target.plain_loader(self.rows[: self.labels]), model=model)
        for loader in (target.test_loader(), self.unlabelled):
            if loader is None:
                continue
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
        found = certify(
            model,
            self.target.plain_loader(self.rows[: self.labels]),
            prior,
            unlabelled=self.unlabelled,
            held_out=self.target.test_loader(),
            seed=seed,
            progress=False,
        )
        network = found.network
        bounds: dict[str, Any] = {
            "stochastic": found.bound,
            "network": network and network.bound,
            "test_set": found.test_set.bound,
            "confidence": min(found.confidence, network.confidence if network else 1.0),
            "valid": found.valid,
            "reasons": list(found.reasons),
            "assumptions": list(found.assumptions),
            "kl": found.kl,
            "risk": found.risk,
            "disagreement": network and network.disagreement,
        }
        if network is None:
            missing = f"no bound for the network itself, which needs {FEWEST} inputs without labels"
            bounds["assumptions"].append(missing)
        return bounds


def start_prior(model: nn.Module, start: str, *, scratch: bool) -> Prior:
    """Return the prior centred at a module that is about to be trained; what is frozen in it costs nothing."""
    origin = "random initialisation"
    if not scratch:
        origin = (
            f"the start {start!r}, said to be pretrained on other samples than the certified ones"
        )
    return Prior.of(model, origin=origin)
