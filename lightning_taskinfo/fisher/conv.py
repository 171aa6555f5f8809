r"""Per-sample gradients of convolutions.

A sample's gradient is :math:`\nabla W = B\,U^\top` with the output gradients :math:`B` (channels by
positions) and the unfolded input :math:`U` (patch entries by positions). Where patches are few,
small or do not overlap, they are copied out of the input, and the kernel is a matrix that patches
are multiplied by. Elsewhere, and for options that patches do not know, samples become groups of one
large convolution, whose weight gradient has all of theirs.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_taskinfo._observe import at_least_float32
from lightning_taskinfo.fisher.graph import shape_of
from lightning_taskinfo.fisher.ops import BLOCK, Use, elementwise, product_norms, saved, total

SMALL_MAP = 100  # output positions up to which patches beat grouped convolutions
WIDE_MAP, WIDE = 256, 2048  # the same for at least so many pairs of channels
FEW_ENTRIES, FEW_CHANNELS = 48, 8  # a patch with so few entries, and at least so many outputs of it


@dataclass
class Conv(Use):
    """The kernel of ``conv1d``, ``conv2d``, ``conv3d`` and their transposes, with their options."""

    inputs: Tensor
    positions: torch.Size  # of the output
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output_padding: list[int] = field(default_factory=list)
    groups: int = 1
    transposed: bool = False
    _kept: tuple[slice, Tensor] | None = field(default=None, init=False)

    def fits(self) -> bool:
        return self.rows.axis == 0 and self.rows.merged == 1

    @cached_property
    def a(self) -> Tensor:
        """The inputs with the samples first, ``[N, repeat, C, ...]``."""
        return self.rows.samples_first(at_least_float32(self.inputs))

    def gradients(self, b: Tensor, samples: slice) -> Tensor:
        b = b[samples]
        if self.by_patches:
            gradients = _by_row(b).mT @ self._patches(samples)
            return gradients.reshape(-1, *self.shape)
        a = self.a[samples].flatten(0, 1)
        by_row = self._grouped(a, b.flatten(0, 1))
        of_samples = by_row.view(*b.shape[:2], *self.shape)
        return of_samples.sum(1)

    def norms(self, scores: list[Tensor]) -> Tensor:
        if not self.by_patches:
            return super().norms(scores)
        norms = []
        for some in self.blocks(len(self.a)):
            patches = self._patches(some)
            of_scores = (product_norms(_by_row(b[some]), patches) for b in scores)
            norms.append(total(of_scores))
        return torch.cat(norms)

    @property
    def elements(self) -> int:
        size = math.prod(self.shape)
        if not self.by_patches:
            return max(size, BLOCK // 32)  # groups of more samples are slower
        entries = math.prod(self.shape[1:])
        places = self.positions.numel() * self.a.shape[1]
        return 2 * max(size, entries * places)

    @cached_property
    def plain(self) -> bool:
        """Whether the kernel is a matrix that patches are multiplied by."""
        return self.groups == 1 and not self.transposed

    @cached_property
    def by_patches(self) -> bool:
        """Whether patches are quicker than a grouped convolution."""
        out, channels, *kernel = self.shape
        entries = channels * math.prod(kernel)
        positions = self.positions.numel()
        apart = kernel == self.stride
        few = entries <= FEW_ENTRIES and out >= FEW_CHANNELS
        small = entries * positions * len(self.inputs) <= BLOCK // 4
        largest_map = WIDE_MAP if out * channels >= WIDE else SMALL_MAP
        small_map = positions <= largest_map
        return self.plain and (apart or few or small or small_map)

    def _patches(self, samples: slice) -> Tensor:
        """Return the patches of some samples, ``[n, places, entries]``; those of the last ones are kept."""
        if self._kept is None or self._kept[0] != samples:
            a = self.a[samples]
            of_rows = self.patches(a.flatten(0, 1))
            patches = of_rows.unflatten(0, a.shape[:2])
            self._kept = samples, _by_row(patches)
        return self._kept[1]

    def patches(self, a: Tensor) -> Tensor:
        """Return what the kernel meets at each position, ``[rows, entries, positions]``."""
        if any(self.padding):
            sides = [size for size in reversed(self.padding) for _ in ("before", "after")]
            a = F.pad(a, sides)
        rows, channels, *strides = a.stride()
        within = []  # a patch
        between = []  # patches
        for axis, stride in enumerate(strides):
            within.append(self.dilation[axis] * stride)
            between.append(self.stride[axis] * stride)
        kernel = self.shape[2:]
        sizes = (*a.shape[:2], *kernel, *self.positions)
        patches = a.as_strided(sizes, (rows, channels, *within, *between))
        entries = math.prod(self.shape[1:])
        return patches.reshape(len(a), entries, self.positions.numel())

    def _grouped(self, a: Tensor, b: Tensor) -> Tensor:
        n = len(a)
        shape = self.shape
        _, grouped, _ = torch.ops.aten.convolution_backward(
            b.reshape(1, -1, *b.shape[2:]),
            a.reshape(1, -1, *a.shape[2:]),
            b.new_empty(1).expand(n * shape[0], *shape[1:]),
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding or [0] * len(self.positions),
            n * self.groups,
            [False, True, False],  # the gradient of the kernel alone
        )
        return grouped.view(n, *shape)


def read_convolution(node: Any, place: int, weight: Any) -> Use | None:
    """Read the kernel (place 1) or the bias (place 2) of a convolution."""
    if place == 0:
        return None
    if place == 2:
        return elementwise(node, weight, behind=len(shape_of(node)) - 2)
    (inputs,) = saved(node, "input")
    if inputs.is_complex():
        return None
    return Conv(
        tuple(weight.shape),
        inputs,
        shape_of(node)[2:],
        list(node._saved_stride),
        list(node._saved_padding),
        list(node._saved_dilation),
        list(node._saved_output_padding),
        node._saved_groups,
        node._saved_transposed,
    )


def _by_row(x: Tensor) -> Tensor:
    """Return ``[N, repeat, D, *positions]`` as ``[N, places, D]``."""
    by_channel = x.flatten(3).transpose(1, 2)  # [N, D, repeat, positions]
    return by_channel.flatten(2).mT
