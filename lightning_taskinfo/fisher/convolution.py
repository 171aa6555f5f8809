r"""Per-sample gradients of convolutions.

A sample's weight gradient is :math:`\nabla W = B\,U^\top` with the output gradients :math:`B` (channels by positions)
and the unfolded input :math:`U` (patch entries by positions). Unfolding it in full is rarely the quickest way on a
CPU; which one is depends on the sizes:

- *grouped*: samples become groups of one weight-gradient convolution; best on large maps;
- *rows*: the input is unfolded along its width only, and each row of the kernel is one batched product with a slice;
  best on small maps; patches of a single channel may be put together for one product;
- *ghost*: only the norm is wanted, and :math:`\|BU^\top\|^2 = \langle U^\top U, B^\top B\rangle`, where
  :math:`U^\top U` is a sum of shifted copies of the input's own Gram matrix; best on small maps with many channels.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_taskinfo.fisher.layers import BLOCK, Factor, Product, Use, squared_norms, total

SMALL_MAP = 100  # output positions up to which unfolded rows beat grouped convolutions
WIDE_MAP, WIDE = 256, 2048  # the same for at least so many pairs of channels, with a stride of 1


class Conv(Use):
    """``conv1d``, ``conv2d`` and ``conv3d`` with stride, padding, dilation and groups."""

    def fits(self) -> bool:
        return self.layout.axis == 0

    def grads(self, slot: str, b: Tensor) -> Tensor:
        return self._fold(torch.cat([self._join(parts) for _, parts in self._blocks(slot, [b])]))

    def norms(self, slot: str, scores: list[Tensor]) -> Tensor:
        if self.layout.repeat > 1:  # a sample's rows add up before they are squared
            return super().norms(slot, scores)
        if slot == "weight" and self._ghost_is_cheaper():
            return total(self._ghost_norms(b) for b in scores)
        norms = scores[0].new_zeros(self.shape[0])
        for samples, parts in self._blocks(slot, scores):
            norms[samples] += total(squared_norms(part) for part in parts)
        return norms

    def diagonal(self, slot: str, scores: list[Tensor]) -> Tensor:
        if self.layout.repeat > 1:
            return super().diagonal(slot, scores)
        squares = ([part.square_().sum(0, keepdim=True) for part in parts] for _, parts in self._blocks(slot, scores))
        first = next(squares)
        for following in squares:
            for into, part in zip(first, following, strict=True):
                into.add_(part)
        return self._join(first)[0]

    def features(self, slot: str, b: Tensor) -> Iterator[list[tuple[Factor, ...]]]:
        if self.layout.repeat > 1:
            yield from super().features(slot, b)
        else:
            for _, parts in self._unformed(slot, [b]):
                yield [(part if isinstance(part, Product) else part.flatten(1),) for part in parts]

    def _fold(self, per_row: Tensor) -> Tensor:
        return self.layout.samples_first(per_row).sum(1) if self.layout.repeat > 1 else per_row

    def _blocks(self, slot: str, scores: list[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield the gradients of a few samples at a time, for each score whole or in a part for each kernel row."""
        for samples, parts in self._unformed(slot, scores):
            yield samples, [part.left @ part.right if isinstance(part, Product) else part for part in parts]

    def _unformed(self, slot: str, scores: list[Tensor]) -> Iterator[tuple[slice, list[Factor]]]:
        if slot == "bias":
            for b in scores:
                yield slice(None), [b.flatten(2).sum(2)]
            return
        inputs, weight = self.saved[0][0], self.slots["weight"].shape
        by_rows, size, step = self._rows_are_quicker(), math.prod(weight), 32
        if by_rows:  # as much as stays in the cache
            size = max(size, weight[1] * weight[3] * inputs.shape[2] * self.shape[3])
            step = min(128, max(16, BLOCK // 4 // size))
        step = min(step, max(1, 4 * BLOCK // size))
        for i in range(0, len(inputs), step):
            samples = slice(i, i + step)
            a = inputs[samples]
            rows = self._unfolded(a) if by_rows else None
            for b in scores:
                some = b[samples]
                if rows is None:
                    yield samples, [self._grouped_grads(a, some)]
                else:
                    yield samples, [Product(some.flatten(2), row) for row in rows]

    def _join(self, parts: list[Tensor]) -> Tensor:
        """Put the rows of the kernel together again: ``[N, O, C, *kernel]``."""
        out, channels, *kernel = self.slots["weight"].shape
        if parts[0].dim() != 3:  # whole already
            return parts[0]
        if channels == 1 and len(parts) == 1:
            return parts[0].unflatten(2, (1, *kernel))
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
            False,
            [0] * (a.dim() - 2),
            n * self.config["groups"],
            [False, True, False],
        )[1]
        return grouped.view(n, *shape)

    def _rows_are_quicker(self) -> bool:
        plain = len(self.shape) == 4 and self.config["groups"] == 1 and set(self.config["dilation"]) == {1}
        out, channels = self.slots["weight"].shape[:2]
        wide = out * channels >= WIDE and self.config["stride"] == [1, 1]
        return plain and (channels == 1 or math.prod(self.shape[2:]) <= (WIDE_MAP if wide else SMALL_MAP))

    def _unfolded(self, a: Tensor) -> list[Tensor]:
        """Return ``[N, positions, width·C]`` for each row of the kernel, or whole patches of a single channel."""
        (out, channels, rows, width), (down, right) = self.slots["weight"].shape, self.config["stride"]
        height, across = self.shape[2:]
        columns = [slice(j, j + right * (across - 1) + 1, right) for j in range(width)]
        lines = [slice(i, i + down * (height - 1) + 1, down) for i in range(rows)]
        a = self._padded(a)
        unfolded = torch.cat([a[..., column] for column in columns], 1)  # [N, width·C, H, W']
        pieces = [unfolded[:, :, line] for line in lines]
        if channels == 1 and out >= 16:  # so narrow that one product is quicker than many
            pieces = [torch.cat(pieces, 1)]
        return [piece.flatten(2).transpose(1, 2) for piece in pieces]

    def _padded(self, a: Tensor) -> Tensor:
        down, right = self.config["padding"]
        return F.pad(a, (right, right, down, down)) if down or right else a

    def _ghost_is_cheaper(self) -> bool:
        if not self._rows_are_quicker() or self.config["stride"] != [1, 1]:
            return False
        out, channels, *kernel = self.slots["weight"].shape
        positions = math.prod(self.shape[2:])
        padded = math.prod(size + k - 1 for size, k in zip(self.shape[2:], kernel, strict=True))
        ghost = padded**2 * channels + positions**2 * (out + 8 * math.prod(kernel))
        return ghost < 0.35 * positions * channels * math.prod(kernel) * out

    def _ghost_norms(self, b: Tensor) -> Tensor:
        (rows, width), (height, across) = self.slots["weight"].shape[2:], b.shape[2:]
        a, norms = self._padded(self.saved[0][0]), []
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
