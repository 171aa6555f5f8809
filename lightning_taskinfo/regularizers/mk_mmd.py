"""Align source and target features by a kernel discrepancy."""

import torch
from torch import Tensor

from lightning_taskinfo._ranges import check_finite
from lightning_taskinfo.functional.discrepancy import mk_mmd
from lightning_taskinfo.regularizers._base import Regularizer, Weight


class MultiKernelMMD(Regularizer):
    r"""Penalty :math:`\lambda\,\widehat{\mathrm{MMD}}^2` between features of source and unlabelled target inputs.

    The unbiased estimate under a mean of Gaussian kernels, see
    :func:`.functional.discrepancy.mk_mmd`; the two batches may have different sizes.

    Args:
        weight: The :math:`\lambda`, or a :class:`WeightSchedule`.

    Raises:
        ValueError: If the weight is negative.

    Example:
        >>> regularizer = MultiKernelMMD(weight=0.5)
        >>> zero = torch.zeros(3, 2)
        >>> regularizer(zero, zero + 1) == regularizer(zero, zero + 100)  # a common scale does not matter
        tensor(True)
    """

    def __init__(self, *, weight: Weight = 1.0) -> None:
        super().__init__(weight)

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
            value = mk_mmd(source.float(), target.float())
        return self.penalty(value, self.schedule(epoch))
