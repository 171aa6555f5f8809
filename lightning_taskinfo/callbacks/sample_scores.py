"""What a training has shown of each of its samples, and which of them it had to learn by heart."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_taskinfo.callbacks._indices import as_index
from lightning_taskinfo.fisher.train_step import SampleLosses, losses_of

if TYPE_CHECKING:
    from lightning_taskinfo.plotting import Axes, Figure

Score: TypeAlias = Literal["loss", "squared_norm"]
STEPS = 128  # that are added up at once,
HELD = 1 << 21  # unless they hold so many numbers: 8 MB in float32, and losses of pixels are many


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
        rows = []
        first = self.ranking()[:k].tolist()
        for rank, index in enumerate(first, start=1):
            row = {"rank": rank, "index": index}
            for name, values in columns.items():
                row[name] = values[index].item()
            rows.append(row)
        return rows

    def __str__(self) -> str:
        lines = [f"{'rank':>5}{'index':>7}{'loss':>9}{'squared norm':>14}{'seen':>6}"]
        form = "{rank:>5}{index:>7}{loss:>9.4g}{squared_norm:>14.4g}{seen:>6}"
        for row in self.top(10):
            lines.append(form.format(**row))
        return "\n".join(lines)

    def plot(self, *, k: int = 50, ax: "Axes | None" = None) -> tuple["Figure", "Axes"]:
        """Draw all scores, the largest first; needs matplotlib.

        Args:
            k: How many of the first are marked.
            ax: Draw here instead of in a new figure.
        """
        from lightning_taskinfo.plotting import plot_ranking

        names = {"loss": "mean training loss (nats)", "squared_norm": "mean squared gradient norm"}
        ranked = self.scores[self.ranking()]
        return plot_ranking(ranked.tolist(), k=k, ylabel=names[self.rank_by], ax=ax)


class StepSamples(NamedTuple):
    """What one training step has shown of its samples.

    Attributes:
        numbers: Numbers of the samples, as :class:`BatchIndices` gives them.
        samples: How many samples there are.
        losses: Of all of them; what is not finite does not count.
        norms: Squared, of some of them one after another.
        first: Which sample of the batch is the first of those.
    """

    numbers: Any
    samples: int
    losses: SampleLosses | None
    norms: Tensor | None = None
    first: int = 0


class SampleSums:
    """Adds up losses and squared norms by the number of the sample, in memory that grows with the largest number.

    Args:
        table: Sums so far, as :attr:`table` has them.
    """

    def __init__(self, table: Tensor | None = None) -> None:
        if table is None:
            self._table = torch.zeros(5, 0, device="cpu")
        else:
            self._table = table
        self._waiting: list[StepSamples] = []
        self._held = 0  # numbers in the losses that wait

    def add(self, step: StepSamples) -> None:
        """Add what a step has shown: several at once, since they take little longer than one."""
        self._waiting.append(step)
        if step.losses is not None:
            self._held += step.losses.outputs.numel()
        if len(self._waiting) == STEPS or self._held > HELD:
            self._add_all()

    @property
    def table(self) -> Tensor:
        """By row: sum of losses, their number, sum of squared norms, their number, and how often a sample was seen."""
        self._add_all()
        return self._table

    def _add_all(self) -> None:
        """Add the steps that wait; one whose numbers are none of samples is left out."""
        steps, indices = _numbered([step for step in self._waiting if step.samples])
        self._waiting = []
        self._held = 0
        if not steps:
            return
        index = torch.cat(indices)
        self._grow_to(int(index.max()) + 1)
        once = self._table.new_ones(len(index))
        self._table[4].index_add_(0, index.to(self._table.device), once)
        of_losses = []
        losses = []
        for i, step in zip(indices, steps, strict=True):
            if step.losses:
                of_losses.append(i)
                losses.append(step.losses)
        if losses:
            self._add(0, torch.cat(of_losses), losses_of(losses))
        for i, step in zip(indices, steps, strict=True):
            if step.norms is not None:
                behind = step.first + len(step.norms)
                self._add(2, i[step.first : behind], step.norms)

    def _add(self, row: int, index: Tensor, values: Tensor) -> None:
        """Add values, and their number, to the samples that they belong to."""
        index = index.to(self._table.device)
        values = values.to(self._table)
        finite = values.isfinite()
        counted = torch.where(finite, values, 0)
        self._table[row].index_add_(0, index, counted)
        self._table[row + 1].index_add_(0, index, finite.to(self._table))

    def _grow_to(self, size: int) -> None:
        missing = size - self._table.shape[1]
        if missing > 0:
            more = max(missing, self._table.shape[1] // 2)
            self._table = torch.nn.functional.pad(self._table, (0, more))

    def scores(self, rank_by: Score) -> SampleScores:
        """Return the means over steps."""
        losses, read, norms, measured, seen = self.table.cpu()
        known = 0  # the memory may be larger
        if seen.any():
            known = int(seen.nonzero().amax()) + 1
        loss = losses / read
        squared_norm = norms / measured
        return SampleScores(loss[:known], squared_norm[:known], seen[:known].long(), rank_by)


def _numbered(steps: list[StepSamples]) -> tuple[list[StepSamples], list[Tensor]]:
    """Return the steps whose samples are known, with their numbers."""
    if all(isinstance(step.numbers, list) and len(step.numbers) == step.samples for step in steps):
        try:  # all of them at once
            numbers = [number for step in steps for number in step.numbers]
            index = as_index(numbers, len(numbers))
            return steps, [*index.split([step.samples for step in steps])]
        except ValueError:
            pass
    known: list[StepSamples] = []
    indices: list[Tensor] = []
    for step in steps:
        try:
            indices.append(as_index(step.numbers, step.samples))
            known.append(step)
        except ValueError:  # the first step of a training is checked, which is where this shows
            continue
    return known, indices
