"""What a training has shown of each of its samples, and which of them it had to learn by heart."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_taskinfo.plotting import Axes, Figure

Score: TypeAlias = Literal["loss", "squared_norm"]
LARGEST = 10**9  # numbers of samples: memory grows with them
BATCHES = 32  # added up at once


@dataclass(frozen=True)
class SampleScores:
    """The mean loss and squared gradient norm of each sample over the steps of a training.

    A sample with a large score was hard to learn: its label may be wrong, or it is unlike the
    others.

    Args:
        loss: Mean training loss, ``[N]``; NaN where it was not read.
        squared_norm: Mean squared gradient norm, ``[N]``; NaN where it was not read.
        seen: How often each sample was trained on, ``[N]``.
        rank_by: What ranks the samples.

    Example:
        >>> loss, norm = torch.tensor([0.1, 2.0, 0.5]), torch.tensor([1.0, 9.0, float("nan")])
        >>> scores = SampleScores(loss, norm, torch.tensor([3, 3, 3]), "loss")
        >>> print(scores)
         rank  index     loss  squared norm  seen
            1      1        2             9     3
            2      2      0.5           nan     3
            3      0      0.1             1     3
    """

    loss: Tensor
    squared_norm: Tensor
    seen: Tensor
    rank_by: Score

    @property
    def scores(self) -> Tensor:
        """What ranks the samples, ``[N]``; NaN for samples that were not seen."""
        return self.loss if self.rank_by == "loss" else self.squared_norm

    def ranking(self) -> Tensor:
        """Return the numbers of all samples that have a score, the most suspicious one first."""
        known = self.scores.isfinite().nonzero().flatten()
        return known[self.scores[known].argsort(descending=True, stable=True)]

    def top(self, k: int) -> list[dict[str, float]]:
        """Return the ``k`` most suspicious samples, a row each.

        Args:
            k: How many.
        """
        columns = {"loss": self.loss, "squared_norm": self.squared_norm, "seen": self.seen}
        return [
            {
                "rank": rank,
                "index": index,
                **{name: values[index].item() for name, values in columns.items()},
            }
            for rank, index in enumerate(self.ranking()[:k].tolist(), start=1)
        ]

    def __str__(self) -> str:
        lines = [f"{'rank':>5}{'index':>7}{'loss':>9}{'squared norm':>14}{'seen':>6}"]
        lines += [
            f"{row['rank']:>5}{row['index']:>7}{row['loss']:>9.4g}{row['squared_norm']:>14.4g}{row['seen']:>6}"
            for row in self.top(10)
        ]
        return "\n".join(lines)

    def plot(self, *, k: int = 50, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
        """Draw all scores, the largest first; needs matplotlib.

        Args:
            k: How many of the first are marked.
            ax: Draw here instead of in a new figure.
        """
        from lightning_taskinfo.plotting import plot_ranking

        names = {"loss": "mean training loss (nats)", "squared_norm": "mean squared gradient norm"}
        return plot_ranking(
            self.scores[self.ranking()].tolist(), k=k, ylabel=names[self.rank_by], ax=ax
        )


class SampleSums:
    """Adds up losses and squared norms by the number of the sample, in memory that grows with the largest number.

    Args:
        table: Sums so far, as :attr:`table` has them.
    """

    def __init__(self, table: Tensor | None = None) -> None:
        self._table = torch.zeros(5, 0, device="cpu") if table is None else table
        self._losses: list[tuple[Tensor, Tensor | None]] = []  # batches that are to be added
        self._norms: list[tuple[Tensor, Tensor]] = []

    def add(
        self, index: Tensor, losses: Tensor | None, norms: Tensor | None, first: int = 0
    ) -> None:
        """Add what a batch has shown.

        Args:
            index: Numbers of its samples, ``[N]``.
            losses: Of all its samples, ``[N]``; what is not finite does not count.
            norms: Squared, of some of its samples one after another, ``[n]``.
            first: Which of the batch is the first of those.

        Raises:
            ValueError: If a number is too large to be one of a sample.
        """
        if not len(index):
            return
        largest = int(index.max())
        if largest >= LARGEST:
            raise ValueError(f"numbers of samples must be less than {LARGEST}, got {largest}")
        self._losses.append((index, None if losses is None else losses.detach()))
        if norms is not None:
            self._norms.append((index[first : first + len(norms)], norms.detach()))
        if len(self._losses) == BATCHES:
            self._add_all()

    @property
    def table(self) -> Tensor:
        """By row: sum of losses, their number, sum of squared norms, their number, and how often a sample was seen."""
        if self._losses:
            self._add_all()
        return self._table

    def _add_all(self) -> None:
        """Add the batches that wait: a few at once take little longer than one."""
        seen = torch.cat([index for index, _ in self._losses])
        self._grow_to(int(seen.max()) + 1)
        seen = seen.to(self._table.device)
        self._table[4].index_add_(0, seen, torch.ones_like(seen, dtype=self._table.dtype))
        self._add(0, [(index, losses) for index, losses in self._losses if losses is not None])
        self._add(2, self._norms)
        self._losses = []
        self._norms = []

    def _add(self, row: int, batches: list[tuple[Tensor, Tensor]]) -> None:
        if not batches:
            return
        index = torch.cat([numbers for numbers, _ in batches]).to(self._table.device)
        values = torch.cat([part for _, part in batches]).to(self._table)
        finite = values.isfinite()
        self._table[row].index_add_(0, index, torch.where(finite, values, 0))
        self._table[row + 1].index_add_(0, index, finite.to(self._table))

    def _grow_to(self, size: int) -> None:
        missing = size - self._table.shape[1]
        if missing > 0:
            more = max(missing, self._table.shape[1] // 2)
            self._table = torch.nn.functional.pad(self._table, (0, more))

    def scores(self, rank_by: Score) -> SampleScores:
        """Return the means over steps."""
        losses, read, norms, measured, seen = self.table.cpu()
        known = int(seen.nonzero().amax()) + 1 if seen.any() else 0  # the memory may be larger
        return SampleScores(
            (losses / read)[:known], (norms / measured)[:known], seen[:known].long(), rank_by
        )
