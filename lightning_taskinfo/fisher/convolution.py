"""Per-sample gradients of convolutions."""

import torch
from torch import Tensor

from lightning_taskinfo.fisher.layers import Use


class Conv(Use):
    """``conv1d``, ``conv2d`` and ``conv3d`` with stride, dilation and groups, on inputs that carry their padding."""

    def fits(self) -> bool:
        return self.layout.axis == 0

    def _fold(self, per_row: Tensor) -> Tensor:
        return self.layout.samples_first(per_row).sum(1) if self.layout.repeat > 1 else per_row

    def grads(self, slot: str, b: Tensor) -> Tensor:
        if slot == "bias":
            return self._fold(b.flatten(2).sum(2))
        return self._fold(self._weight_grads(self.saved[0][0], b))

    def _weight_grads(self, a: Tensor, b: Tensor) -> Tensor:
        """Samples become groups of one convolution's weight gradient."""
        n, shape = len(a), self.slots["weight"].shape
        grouped = torch.ops.aten.convolution_backward(
            b.reshape(1, -1, *b.shape[2:]),
            a.reshape(1, -1, *a.shape[2:]),
            b.new_empty(1).expand(n * shape[0], *shape[1:]),
            None,
            self.config["stride"],
            self.config["padding"],
            self.config["dilation"],
            False,
            [0] * (a.dim() - 2),
            n * self.config["groups"],
            [False, True, False],
        )[1]
        return grouped.view(n, *shape)
