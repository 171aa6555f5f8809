r"""Per-sample gradients of convolutions.

A sample's weight gradient is :math:`\nabla W = B\,U^\top` with the output gradients :math:`B` (channels by positions)
and the unfolded input :math:`U` (patch entries by positions). Which way is the quickest on a CPU depends on the sizes:

- *grouped*: samples become groups of one weight-gradient convolution; best on large maps;
- *patches*: the input is unfolded in full, for one batched product; best where patches have few entries, do not
  overlap, or are few;
- *rows*: the input is unfolded along its width only, and each row of the kernel is one batched product with a slice;
  best on small maps;
- *ghost*: only the norm is wanted, and :math:`\|BU^\top\|^2 = \langle U^\top U, B^\top B\rangle`, where
  :math:`U^\top U` is a sum of shifted copies of the input's own Gram matrix; best on small maps with many channels.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_taskinfo.fisher.ops import BLOCK, Factor, Product, Use, squared_norms, total

SMALL_MAP = 100  # output positions up to which unfolded rows beat grouped convolutions
WIDE_MAP, WIDE = 256, 2048  # the same for at least so many pairs of channels, with a stride of 1
FEW_ENTRIES, FEW_CHANNELS = (
    48,
    8,
)  # entries of a patch up to which, and outputs from which on, patches beat all else


class Conv(Use):
    """``conv1d``, ``conv2d`` and ``conv3d`` with stride, padding, dilation and groups."""

    def fits(self) -> bool:
        return self.rows.axis == 0 and self.rows.merged == 1

    def grads(self, slot: str, b: Tensor) -> Tensor:
        if slot == "bias":
            return self._fold(b.flatten(2).sum(2))
        return self._fold(torch.cat([self._join(parts) for _, parts in self._blocks(slot, [b])]))

    def norms(self, slot: str, scores: list[Tensor]) -> Tensor:
        if not self.rows.in_order:  # a sample's rows add up before they are squared
            return super().norms(slot, scores)
        if slot == "bias":
            return total(squared_norms(b.flatten(2).sum(2)) for b in scores)
        if self._ghost_is_cheaper:
            return total(self._ghost_norms(b) for b in scores)
        blocks: dict[int, list[Tensor]] = {}
        for samples, parts in self._blocks(slot, scores):
            blocks.setdefault(samples.start, []).extend(squared_norms(part) for part in parts)
        norms = [total(parts) for parts in blocks.values()]
        return norms[0] if len(norms) == 1 else torch.cat(norms)

    def diagonal(self, slot: str, scores: list[Tensor]) -> Tensor:
        if not self.rows.in_order or slot == "bias":
            return super().diagonal(slot, scores)
        squares = (
            [part.square_().sum(0, keepdim=True) for part in parts]
            for _, parts in self._blocks(slot, scores)
        )
        first = next(squares)
        for following in squares:
            for into, part in zip(first, following, strict=True):
                into.add_(part)
        return self._join(first)[0]

    def features(self, slot: str, b: Tensor) -> Iterator[list[tuple[Factor, ...]]]:
        if not self.rows.in_order:
            yield from super().features(slot, b)
        else:
            for _, parts in self._unformed(slot, [b]):
                yield [(part if isinstance(part, Product) else part.flatten(1),) for part in parts]

    def _fold(self, per_row: Tensor) -> Tensor:
        return self.rows.samples_first(per_row).sum(1) if not self.rows.in_order else per_row

    def _blocks(self, slot: str, scores: list[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield the gradients of a few samples at a time, for each score whole or in a part for each kernel row."""
        for samples, parts in self._unformed(slot, scores):
            yield (
                samples,
                [part.left @ part.right if isinstance(part, Product) else part for part in parts],
            )

    def _unformed(self, slot: str, scores: list[Tensor]) -> Iterator[tuple[slice, list[Factor]]]:
        if slot == "bias":
            for b in scores:
                yield slice(None), [b.flatten(2).sum(2)]
            return
        inputs, n, step = self.saved[0], self.shape[0], self._samples_at_once
        for i in range(0, n, step):
            samples = slice(i, i + step)
            a = inputs[samples] if step < n else inputs
            pieces = None if self._way == "grouped" else self._unfolded(a)
            for b in scores:
                some = b[samples] if step < n else b
                if pieces is None:
                    yield samples, [self._grouped_grads(a, some)]
                else:
                    yield samples, [Product(some.flatten(2), piece) for piece in pieces]

    @cached_property
    def _samples_at_once(self) -> int:
        """Return how many samples to unfold at once: as many as stay in the cache."""
        weight = self.slots["weight"].shape
        step, size = 32, math.prod(weight)
        if self._way == "patches":
            size = max(size, math.prod(weight[1:]) * math.prod(self.shape[2:]))
            step = max(16, BLOCK // 2 // size)
        elif self._way == "rows":
            size = max(size, weight[1] * weight[3] * self.saved[0].shape[2] * self.shape[3])
            step = min(128, max(16, BLOCK // 4 // size))
        return min(step, max(1, 4 * BLOCK // size))

    def _join(self, parts: list[Tensor]) -> Tensor:
        """Put the rows of the kernel together again: ``[N, O, C, *kernel]``."""
        out, channels, *kernel = self.slots["weight"].shape
        if parts[0].dim() != 3:  # whole already
            return parts[0]
        if self._way == "patches" and self._channels_last:
            return parts[0].unflatten(2, (*kernel, channels)).movedim(-1, 2)
        if self._way == "patches":
            return parts[0].unflatten(2, (channels, *kernel))
        stacked = torch.stack(parts, 3)  # rows of the kernel behind the unfolded width
        return stacked.view(-1, out, kernel[1], channels, len(parts)).permute(0, 1, 3, 4, 2)

    def _grouped_grads(self, a: Tensor, b: Tensor) -> Tensor:
        n, shape = len(a), self.slots["weight"].shape
        grouped = torch.ops.aten.convolution_backward(
            b.reshape(1, -1, *b.shape[2:]),
            a.reshape(1, -1, *a.shape[2:]),
            b.new_empty(1).expand(n * shape[0], *shape[1:]),
            None,
            self.config["stride"],
            self.config["padding"],
            self.config["dilation"],
            self.config.get("transposed", False),
            self.config.get("output_padding", [0] * (a.dim() - 2)),
            n * self.config["groups"],
            [False, True, False],
        )[1]
        return grouped.view(n, *shape)

    @cached_property
    def _way(self) -> Literal["patches", "rows", "grouped"]:
        if not self._plain():
            return "grouped"
        out, *patch = self.slots["weight"].shape
        entries, positions = math.prod(patch), math.prod(self.shape[2:])
        apart = patch[1:] == self.config["stride"]
        few = entries <= FEW_ENTRIES and out >= FEW_CHANNELS
        if apart or few or entries * positions * self.shape[0] <= BLOCK // 4:
            return "patches"
        wide = out * patch[0] >= WIDE and self.config["stride"] == [1, 1]
        return (
            "rows" if patch[0] == 1 or positions <= (WIDE_MAP if wide else SMALL_MAP) else "grouped"
        )

    def _plain(self) -> bool:
        simple = self.config["groups"] == 1 and set(self.config["dilation"]) == {1}
        return len(self.shape) == 4 and simple and not self.config.get("transposed", False)

    @cached_property
    def _channels_last(self) -> bool:
        """Whether patches are quicker to copy with channels last: in longer pieces, at the price of another copy."""
        _, channels, *kernel = self.slots["weight"].shape
        return channels >= FEW_CHANNELS and math.prod(kernel) > 1

    def _unfolded(self, a: Tensor) -> list[Tensor]:
        """Return ``[N, positions, entries]``: whole patches, or a part ``width·C`` of them for each kernel row."""
        (rows, width), (down, right) = self.slots["weight"].shape[2:], self.config["stride"]
        height, across = self.shape[2:]
        if self._way == "patches":
            return [self._patches(a)]
        a = self._padded(a)
        columns = [slice(j, j + right * (across - 1) + 1, right) for j in range(width)]
        lines = [slice(i, i + down * (height - 1) + 1, down) for i in range(rows)]
        unfolded = torch.cat([a[..., column] for column in columns], 1)  # [N, width·C, H, W']
        return [unfolded[:, :, line].flatten(2).transpose(1, 2) for line in lines]

    def _patches(self, a: Tensor) -> Tensor:
        """Return ``[N, positions, C·kernel]``, or ``kernel·C`` with channels last."""
        (rows, width), (down, right) = self.slots["weight"].shape[2:], self.config["stride"]
        (n, channels, high, wide), (height, across) = a.shape, self.shape[2:]
        if not self._channels_last:
            a = self._padded(a)
            strides = (*a.stride(), a.stride(2) * down, a.stride(3) * right)
            patches = a.as_strided((n, channels, rows, width, height, across), strides)
            return patches.reshape(n, -1, height * across).transpose(1, 2)
        above, left = self.config["padding"]
        padded = a.new_zeros(n, high + 2 * above, wide + 2 * left, channels)
        padded[:, above : above + high, left : left + wide] = a.permute(0, 2, 3, 1)
        sample, line, pixel, _ = padded.stride()
        strides = (sample, line * down, pixel * right, line, 1)
        return padded.as_strided((n, height, across, rows, width * channels), strides).reshape(
            n, height * across, -1
        )

    def _padded(self, a: Tensor) -> Tensor:
        down, right = self.config["padding"]
        return F.pad(a, (right, right, down, down)) if down or right else a

    @cached_property
    def _ghost_is_cheaper(self) -> bool:
        out, channels, *kernel = self.slots["weight"].shape
        positions = math.prod(self.shape[2:])
        if positions > WIDE_MAP or not self._plain() or self.config["stride"] != [1, 1]:
            return False
        padded = math.prod(size + k - 1 for size, k in zip(self.shape[2:], kernel, strict=True))
        ghost = padded**2 * channels + positions**2 * (out + 8 * math.prod(kernel))
        return ghost < 0.35 * positions * channels * math.prod(kernel) * out

    def _ghost_norms(self, b: Tensor) -> Tensor:
        (rows, width), (height, across) = self.slots["weight"].shape[2:], b.shape[2:]
        a, norms = self._padded(self.saved[0]), []
        for i in range(0, len(a), 32):
            x, y = a[i : i + 32].flatten(2), b[i : i + 32].flatten(2)
            gram_a = (x.transpose(1, 2) @ x).view(len(x), *a.shape[2:], *a.shape[2:])
            gram_b = (y.transpose(1, 2) @ y).view(len(y), height, across, height, across)
            shifted = torch.zeros_like(gram_b)
            for r in range(rows):
                for c in range(width):
                    h, w = slice(r, r + height), slice(c, c + across)
                    shifted += gram_a[:, h, w, h, w]
            norms.append((shifted * gram_b).flatten(1).sum(1))
        return torch.cat(norms)
