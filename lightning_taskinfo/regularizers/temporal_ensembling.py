"""Temporal Ensembling: agree with an average of one's own earlier predictions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_counts, check_values
from lightning_taskinfo.functional.discrepancy import ensemble_targets
from lightning_taskinfo.regularizers._base import (
    Regularizer,
    Weight,
    WeightSchedule,
    check_rows,
    gather_rows,
)


class TemporalEnsembling(Regularizer):
    r"""Penalty :math:`w(t)\,\frac{1}{BC} \sum_i \|\mathrm{softmax}(f(x_i)) - \tilde z_i\|^2` of Laine and Aila.

    :math:`\tilde z_i` is a moving average of sample :math:`i`'s predictions over the epochs, corrected for its start
    at zero. It is kept for every sample, labelled or not, and moved at the sample's first visit in
    an epoch: loaders that cycle do not count a sample twice. A sample seen for the first time has
    no target yet and adds nothing. The averages are buffers, equal on all ranks, so that
    checkpoints keep them.

    Args:
        num_samples: Number of samples that carry an index, labelled and unlabelled.
        num_outputs: Number of logits :math:`C`, one for each class.
        num_labeled: Number of labelled samples among them; the default weight rises to
            ``30 * num_labeled / num_samples``.
        weight: Factor of the penalty, or a :class:`WeightSchedule`, instead of that default. It is
            0 in epoch 0.
        ramp_epochs: Epochs of the default weight's sigmoid ramp.
        decay: Decay of the moving average.

    Raises:
        ValueError: If an argument is out of range, or neither ``weight`` nor ``num_labeled`` is
            given.

    Example:
        >>> regularizer = TemporalEnsembling(num_samples=10, num_outputs=2, weight=1.0)
        >>> index = torch.tensor([3, 7])
        >>> regularizer(torch.tensor([[9.0, -9.0], [9.0, -9.0]]), index, epoch=0)
        tensor(0.)
        >>> regularizer(torch.tensor([[-9.0, 9.0], [9.0, -9.0]]), index, epoch=1)  # the first changed its mind
        tensor(0.5000)
    """

    average: Tensor
    count: Tensor
    last_epoch: Tensor

    def __init__(
        self,
        num_samples: int,
        num_outputs: int,
        *,
        num_labeled: int | None = None,
        weight: Weight | None = None,
        ramp_epochs: int = 80,
        decay: float = 0.6,
    ) -> None:
        check_counts(num_samples=num_samples, num_outputs=num_outputs, ramp_epochs=ramp_epochs)
        check_values("in [0, 1)", decay=decay)
        if weight is None:
            if num_labeled is None or not 0 <= num_labeled <= num_samples:
                raise ValueError(
                    f"`num_labeled` or `weight` must be given, the former from 0 to `num_samples`, {num_samples}, "
                    f"got {num_labeled}."
                )
            weight = WeightSchedule(30 * num_labeled / num_samples, "sigmoid", length=ramp_epochs)
        super().__init__(weight)
        self.num_outputs = num_outputs
        self.decay = decay
        self.register_buffer("average", torch.zeros(num_samples, num_outputs))
        self.register_buffer("count", torch.zeros(num_samples, dtype=torch.int32))
        self.register_buffer("last_epoch", torch.full((num_samples,), -1, dtype=torch.int32))

    def forward(self, outputs: Tensor, index: Tensor | Sequence[int], *, epoch: int) -> Tensor:
        """Return the penalty, and in train mode move the averages of these samples.

        Args:
            outputs: Logits, shape ``[B, C]``.
            index: Which samples these are, whole numbers below ``num_samples``, shape ``[B]``.
            epoch: Current epoch, counted from 0: averages move once an epoch, and in epoch 0 the
                penalty is 0.

        Returns:
            ``weight`` times the mean squared difference, a scalar; :attr:`value` is that
            difference.

        Raises:
            ValueError: If shapes are wrong, or ``index`` is not of whole numbers or out of range.
        """
        check_rows("outputs", outputs, [self.num_outputs], minimum=1)
        self.first_look(outputs)
        index = torch.as_tensor(index, device=self.average.device)
        whole = not index.is_floating_point() and index.dtype != torch.bool
        if not whole or index.shape != outputs.shape[:1]:
            raise ValueError(
                f"`index` must be whole numbers, one for each sample, shape [{len(outputs)}], got {index.dtype} of "
                f"shape {tuple(index.shape)}."
            )
        index = index.long()  # torch reads bytes as a mask
        low, high = index.aminmax()
        if low < 0 or high >= len(self.average):
            raise ValueError(
                f"`index` must be in [0, {len(self.average)}), got {low} to {high}: is `num_samples` the number of all "
                "samples that carry an index?"
            )
        with torch.autocast(outputs.device.type, enabled=False):
            predictions = outputs.float().softmax(-1)  # [B, C]
            count = self.count[index]
            targets = ensemble_targets(self.average[index], count, self.decay)
            squares = (predictions - targets).square().mean(-1)  # [B]
            squares = squares * (count > 0)
        if self.training:
            self._move(gather_rows(index), gather_rows(predictions), epoch)
        weight = self.schedule(epoch) if epoch > 0 else 0.0
        return self.penalty(squares.mean(), weight)

    def _move(self, index: Tensor, predictions: Tensor, epoch: int) -> None:
        """Move the averages of samples that this epoch has not seen yet; of a repeated one, by its first row."""
        first: dict[int, int] = {}
        for row, sample in enumerate(index.tolist()):
            first.setdefault(sample, row)
        rows = index.new_tensor([*first.values()])
        rows = rows[self.last_epoch[index[rows]] != epoch]
        index = index[rows]
        predictions = predictions[rows]
        if not predictions.isfinite().all():
            return  # diverged: the loss says so, and the averages stay usable
        self.average[index] = self.average[index].lerp(predictions, 1 - self.decay)
        self.count[index] += 1
        self.last_epoch[index] = epoch
