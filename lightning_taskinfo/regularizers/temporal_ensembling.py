"""Temporal Ensembling: agree with an average of one's own earlier predictions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_counts
from lightning_taskinfo.functional.discrepancy import ensemble_targets
from lightning_taskinfo.regularizers._base import Regularizer, WeightSchedule, check_rows
from lightning_taskinfo.regularizers._ranks import gather_rows


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
        dtype: What the averages are kept in: ``"float32"``, ``"bfloat16"`` or ``"float16"``; memory
            is ``num_samples * num_outputs`` of it.

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
        weight: float | WeightSchedule | None = None,
        ramp_epochs: int = 80,
        decay: float = 0.6,
        dtype: str = "float32",
    ) -> None:
        check_counts(num_samples=num_samples, num_outputs=num_outputs)
        if num_labeled is not None and not 0 <= num_labeled <= num_samples:
            raise ValueError(
                f"`num_labeled` must be from 0 to `num_samples`, {num_samples}, got {num_labeled}."
            )
        check_counts(ramp_epochs=ramp_epochs)
        if weight is None:
            if num_labeled is None:
                raise ValueError(
                    "`num_labeled` or `weight` must be given: the default weight depends on the former."
                )
            weight = WeightSchedule(30 * num_labeled / num_samples, "sigmoid", length=ramp_epochs)
        super().__init__(weight)
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` must be in [0, 1), got {decay}.")
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if dtype not in dtypes:
            raise ValueError(f"`dtype` must be one of {tuple(dtypes)}, got {dtype!r}.")
        self.num_outputs = num_outputs
        self.decay = decay
        self.register_buffer("average", torch.zeros(num_samples, num_outputs, dtype=dtypes[dtype]))
        self.register_buffer("count", torch.zeros(num_samples, dtype=torch.int32))
        self.register_buffer("last_epoch", torch.full((num_samples,), -1, dtype=torch.int32))

    def forward(
        self,
        outputs: Tensor,
        index: Tensor | Sequence[int],
        *,
        epoch: int | None = None,
    ) -> Tensor:
        """Return the penalty, and in train mode move the averages of these samples.

        Args:
            outputs: Logits, shape ``[B, C]``.
            index: Which samples these are, whole numbers below ``num_samples``, shape ``[B]``.
            epoch: Current epoch, counted from 0. It has to be given: averages move once an epoch,
                and in epoch 0 the penalty is 0.

        Returns:
            ``weight`` times the mean squared difference, a scalar; :attr:`value` is that
            difference.

        Raises:
            TypeError: If ``index`` is not of whole numbers, or ``epoch`` is missing.
            ValueError: If shapes are wrong, or an index is out of range.
        """
        if epoch is None:
            raise TypeError(
                "`epoch` must be given, counted from 0: the averages move once an epoch, got None."
            )
        check_rows("outputs", outputs, (self.num_outputs,), minimum=1)
        index = _checked_index(index, len(outputs)).to(self.average.device)
        self._first_look(outputs)
        low = int(index.min())
        high = int(index.max())
        if low < 0 or high >= len(self.average):
            raise ValueError(
                f"`index` must be in [0, {len(self.average)}), got {low} to {high}: is "
                "`num_samples` the number of all samples that carry an index?"
            )
        with torch.autocast(outputs.device.type, enabled=False):
            predictions = outputs.float().softmax(-1)  # [B, C]
            count = self.count[index]
            targets = ensemble_targets(self.average[index].float(), count, self.decay)
            squares = (predictions - targets).square().mean(-1)  # [B]
            squares = squares * (count > 0)
        if self.training:
            self._move(gather_rows(index), gather_rows(predictions), epoch)
        weight = self.schedule(epoch) if epoch > 0 else 0.0
        return self.penalty(squares.mean(), weight)

    def _move(self, index: Tensor, predictions: Tensor, epoch: int) -> None:
        """Move the averages of samples that this epoch has not seen yet; of a repeated one, by its first row."""
        unique, inverse = index.unique(return_inverse=True)
        rows = torch.arange(len(index), device=index.device)
        first = torch.full_like(unique, len(index)).scatter_reduce(
            0, inverse, rows.to(unique), "amin"
        )
        new = self.last_epoch[unique] != epoch
        index = unique[new]
        predictions = predictions[first[new].long()]
        if not predictions.isfinite().all():
            return  # diverged: the loss says so, and the averages stay usable
        kept = self.decay * self.average[index].float()
        moved = kept + (1 - self.decay) * predictions
        self.average[index] = moved.to(self.average.dtype)
        self.count[index] += 1
        self.last_epoch[index] = epoch


def _checked_index(index: object, rows: int) -> Tensor:
    """Return the numbers of the samples as a tensor of 64-bit integers: torch reads bytes as a mask."""
    rule = f"`index` must be whole numbers, one for each sample, shape [{rows}]"
    try:
        tensor = index if isinstance(index, Tensor) else torch.tensor(index, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{rule}, got {type(index).__name__}.") from None
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{rule}, got {tensor.dtype}.")
    if tensor.shape != (rows,):
        raise ValueError(f"{rule}, got shape {tuple(tensor.shape)}.")
    return tensor.long()
