"""Networks put together at random, from steps that move, mask, route, share and repeat what layers see."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POSITIONS, WIDTH, CLASSES = 3, 4, 3
Layer = Callable[[Tensor], Tensor]


class RandomNet(nn.Module):
    """Applies ``steps`` to ``[N, positions, width]``, one after the other; each is a method and the layer it uses.

    Args:
        steps: Names of methods, each with the name of a layer.
        seed: Of the weights.
        pooled: Whether the outputs are ``[N, classes]``, or have one row for each position.
    """

    def __init__(self, steps: list[tuple[str, str]], seed: int, pooled: bool) -> None:
        super().__init__()
        self.steps = steps
        self.pooled = pooled
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = nn.Linear(WIDTH, WIDTH, bias=False)
            self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.norm = nn.LayerNorm(WIDTH)
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
            self.table = nn.Embedding(POSITIONS, WIDTH)
            self.scale = nn.Parameter(torch.randn(WIDTH))
            self.gate = nn.Parameter(torch.randn(()))
            self.spectrum = nn.Parameter(torch.randn(WIDTH // 2 + 1))
            self.head = nn.Linear(WIDTH, CLASSES)
            nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for step, layer in self.steps:
            h = h + getattr(self, step)(x, h, getattr(self, f"use_{layer}")).tanh()
        outputs = self.head(h)
        return outputs.mean(1) if self.pooled else outputs

    # What is done with rows of any number, [..., width].

    def use_linear(self, h: Tensor) -> Tensor:
        return self.a(h)

    def use_no_bias(self, h: Tensor) -> Tensor:
        return self.b(h)

    def use_twice(self, h: Tensor) -> Tensor:
        return self.a(self.b(h).tanh() + self.a(h))

    def use_matrix(self, h: Tensor) -> Tensor:
        return h @ self.matrix

    def use_addmm(self, h: Tensor) -> Tensor:
        flat = torch.addmm(self.scale, h.reshape(-1, WIDTH), self.matrix)
        return flat.view(h.shape)

    def use_transposed(self, h: Tensor) -> Tensor:
        return F.linear(h, self.matrix.t() * self.gate.exp())

    def use_norm(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def use_scale(self, h: Tensor) -> Tensor:
        return (h + self.scale) * self.scale

    def use_gate(self, h: Tensor) -> Tensor:
        return h * self.gate

    def use_spectrum(self, h: Tensor) -> Tensor:
        if h.numel() == 0:  # which MKL refuses
            return h
        return torch.fft.irfft(torch.fft.rfft(h) * self.spectrum, n=WIDTH)

    # How rows come to a layer, and back to their places.

    def plain(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        return layer(h)

    def sort(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        order = x[:, 0, 0].argsort()
        return layer(h[order])[order.argsort()]

    def sort_and_plain(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        return self.sort(x, h, layer) + layer(h.sin())

    def sort_positions(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        return layer(h.sort(1).values)

    def flip(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        return layer(h.flip(0)).flip(0)

    def time_first(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        return layer(h.transpose(0, 1)).transpose(0, 1)

    def flattened(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        return layer(h.flatten(0, 1)).view_as(h)

    def interleaved(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        rows = h.transpose(0, 1).reshape(-1, WIDTH)
        return layer(rows).view(h.shape[1], h.shape[0], WIDTH).transpose(0, 1)

    def mask(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        out = torch.zeros_like(h)
        chosen = x[:, 0, 0] > 0
        out[chosen] = layer(h[chosen])
        return out

    def mask_positions(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        chosen = x[..., 0] > 0
        return torch.zeros_like(h).masked_scatter(chosen.unsqueeze(-1), layer(h[chosen]))

    def mask_with_zeros(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        return torch.where(x[..., :1] > 0, layer(h), h.new_zeros(()))

    def route(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        flat, key = h.flatten(0, 1), x[..., 0].flatten()
        out = torch.zeros_like(flat)
        for expert, rows in (
            (layer, (key > 0).nonzero()[:, 0]),
            (self.use_no_bias, (key <= 0).nonzero()[:, 0]),
        ):
            out.index_add_(0, rows, expert(flat[rows]) * key[rows, None])
        return out.view_as(h)

    def gather(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        order = x[:, :1, :1].argsort(0).expand_as(h)
        return torch.zeros_like(h).scatter_add(0, order, layer(h.gather(0, order)))

    def product(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        """Sent to slots and back by products with a matrix of zeros and ones."""
        onehot = torch.eye(len(x), dtype=h.dtype)[x[:, 0, 0].argsort()]
        slots = layer(torch.einsum("sn,npd->spd", onehot, h))
        return torch.einsum("sn,spd->npd", onehot, slots)

    def selected(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        order = x[:, 0, 0].argsort()
        rows = layer(torch.stack([h[i] for i in order.tolist()]))
        return torch.stack([rows[i] for i in order.argsort().tolist()])

    def rolled(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        shift = int(x[:, 0, 0].argmax())
        return layer(h.roll(shift, 0)).roll(-shift, 0)

    def packed(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        """All positions of all samples in one long row of a batch of one."""
        return layer(h.reshape(1, -1, WIDTH)).view_as(h)

    def convolved(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        return self.conv(layer(h).mT).mT

    def convolved_sorted(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        order = x[:, 0, 0].argsort()
        return self.conv(layer(h)[order].mT).mT[order.argsort()]

    def positioned(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        return layer(h + self.table(torch.arange(POSITIONS)))

    def looked_up(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        return layer(h + self.table(x[..., 1].abs().long() % POSITIONS))

    def token(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        token = self.scale.expand(len(h), 1, -1)
        return layer(torch.cat([token, h], 1))[:, 1:]

    def mixed(self, x: Tensor, h: Tensor, layer: Layer) -> Tensor:
        """Samples that depend on each other are measured alone."""
        return layer(h - h.mean(0))


LAYERS = [name.removeprefix("use_") for name in vars(RandomNet) if name.startswith("use_")]
MOVES = [
    name
    for name in vars(RandomNet)
    if not name.startswith(("_", "use_")) and name not in ("forward", "mixed")
]
