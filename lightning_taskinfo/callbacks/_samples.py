"""What one process measures."""

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from lightning_taskinfo.fisher.draws import NumberedDraws
from lightning_taskinfo.functional.likelihood import Likelihood, as_likelihood

Draws = TypeVar("Draws", bound=NumberedDraws)


@dataclass(frozen=True)
class Samples:
    """What one process measures.

    Attributes:
        inputs: The inputs, ``[N, ...]``; ``N`` may be 0 where processes share few samples.
        targets: The dataset's labels, ``[N, ...]``.
        first: Number of the first of them among the samples of all processes.
        total: Samples of all processes together.
        seed: Seed of this measurement's draws, the same on all processes.
        counted: How many of the inputs count. More are there only where processes with sharded weights have to run
            passes of one size; they repeat others.
    """

    inputs: Any
    targets: Tensor | None
    first: int
    total: int
    seed: int
    counted: int

    def draws(
        self,
        likelihood: str | Likelihood,
        mc_samples: int,
        kind: type[Draws] = NumberedDraws,  # type: ignore[assignment]
    ) -> Draws:
        """Return the likelihood, with labels that do not depend on how processes share the samples."""
        inner = as_likelihood(likelihood)
        return kind(
            inner, seed=self.seed, first=self.first, total=self.total, mc_samples=mc_samples
        )
