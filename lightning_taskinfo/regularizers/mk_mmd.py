"""Align source and target features by a kernel discrepancy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_finite, check_positive
from lightning_taskinfo.functional.discrepancy import mk_mmd
from lightning_taskinfo.regularizers._base import Regularizer, Weight


class MultiKernelMMD(Regularizer):
    r"""Penalty :math:`\lambda\,\widehat{\mathrm{MMD}}^2` between features of source and unlabelled target inputs.

    The unbiased estimate under a mean of Gaussian kernels, see
    :func:`.functional.discrepancy.mk_mmd`; the two batches may have different sizes.

    Args:
        weight: The :math:`\lambda`, or a :class:`WeightSchedule`.
        widths: Kernel widths; by default nineteen, from 1/512 to 512 times the median distance in
            the batch.

    Raises:
        ValueError: If the weight is negative or a width not positive.

    Example:
        >>> regularizer = MultiKernelMMD(weight=0.5, widths=[1.0])
        >>> zero = torch.zeros(3, 2)
        >>> regularizer(zero, zero + 100)
        tensor(1.)
    """

    def __init__(
        self,
        *,
        weight: Weight = 1.0,
        widths: Sequence[float] | None = None,
    ) -> None:
        super().__init__(weight)
        check_positive(widths=widths)
        self.widths = widths

    def forward(self, source: Tensor, target: Tensor, *, epoch: int = 0) -> Tensor:
        """Return the penalty.

        Args:
            source: Features of source inputs, shape ``[N, F]``.
            target: Features of unlabelled target inputs, shape ``[M, F]``.
            epoch: Current epoch, for the weight.

        Returns:
            ``weight * MMD²``, a scalar; :attr:`value` is the squared discrepancy.

        Raises:
            ValueError: If a batch has fewer than two samples, the widths differ, or features are
                not finite.
        """
        check_finite("source", source)
        check_finite("target", target)
        with torch.autocast(source.device.type, enabled=False):
            value = mk_mmd(source.float(), target.float(), widths=self.widths)
        return self.penalty(value, self.schedule(epoch))
