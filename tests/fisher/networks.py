"""One small network for each thing that an engine could get wrong."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Functional(nn.Module):
    """``F.relu`` and a residual add."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x + F.relu(self.b(F.relu(self.a(x)))))


class Twice(nn.Module):
    """A module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(self.a(x).tanh()).tanh())


class TwiceConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.c = (
            nn.Conv2d(2, 2, 3, padding=1),
            nn.GroupNorm(1, 2),
            nn.Linear(2 * 36, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.n(self.a(self.n(self.a(x)).tanh())).flatten(1))


class Tied(nn.Module):
    """A language model whose head is its embedding, used through ``F.linear``."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=padding_idx)
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return F.linear((self.mix(h) + h.cumsum(1)).tanh(), self.embedding.weight)


class TiedModules(Tied):
    """The same, with the parameter tied between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(tokens)).tanh())


class Raw(nn.Module):
    """Raw parameters: a shift, a scale, and a matrix of no module."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(1, 5))
        self.matrix, self.c = nn.Parameter(torch.randn(5, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(((x + self.shift) * self.scale) @ self.matrix)


class Temperature(nn.Module):
    """A parameter that is one number, as CLIP's scale of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.temperature = nn.Linear(5, 3), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x) * self.temperature.exp()


class RawUsedTwice(nn.Module):
    """A raw parameter that one operation understands and another does not."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.c = nn.Parameter(torch.randn(5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(x + self.w + (self.w**2).sum())


class HalfHidden(nn.Module):
    """A layer's weight that is also read by a penalty-like term next to the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).tanh()) + self.a.weight.square().sum()


class Attention(nn.Module):
    """A class token, a position parameter and ``nn.MultiheadAttention``."""

    def __init__(self, batch_first: bool = True, cross: bool = False, **arguments: object) -> None:
        super().__init__()
        self.token, self.position = (
            nn.Parameter(torch.randn(1, 1, 4)),
            nn.Parameter(torch.randn(1, 4, 4)),
        )
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **arguments)
        self.c, self.batch_first, self.cross = nn.Linear(4, 3), batch_first, cross

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        x = x if self.batch_first else x.transpose(0, 1)
        memory = x.tanh() if self.cross else x
        values = memory.sin() if self.cross else x
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool() if self.batch_first else None
        h = self.attention(x, memory, values, attn_mask=mask, need_weights=not self.cross)[0]
        return self.c(h[:, -1] if self.batch_first else h[-1])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.c = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.rnn(x)[0][:, -1])


class InplaceResidual(nn.Module):
    """``out += x``, as residual networks do, behind in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu_()
        out = self.b(h)
        out += h
        return self.c(out.relu_())


class InplaceSequence(nn.Module):
    """A linear layer on sequences puts out a view, which is then changed in place: whole, in part, and after a use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.relu_()
        out = self.b(h)
        before = out * 2
        out += self.shift
        out[:, 0].mul_(2.0)
        return self.c(before + out).mean(1)


class Spoiled(InplaceResidual):
    """Changes the input of a layer after the layer has read it: autograd itself refuses."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh() + 1
        out = self.b(h)
        h += 1
        return self.c(out + h)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.body = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.c, self.use_reentrant = nn.Linear(5, 3), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.c(checkpoint(self.body, self.first(x), use_reentrant=self.use_reentrant))


class Sequence(nn.Module):
    """Outputs ``[N, T, C]``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class TimeFirst(Sequence):
    """Samples along axis 1, as long as the sequence: the axis cannot be guessed from its length."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.transpose(0, 1)).transpose(0, 1)


class Flattened(Sequence):
    """Samples and positions share one axis."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        if self.interleaved:
            return self.net(x.transpose(0, 1).reshape(t * n, -1)).view(t, n, -1).transpose(0, 1)
        return self.net(x.reshape(n * t, -1)).view(n, t, -1)


class OnePosition(Flattened):
    """Only one position counts: the zeros elsewhere must not be taken for those of other samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 1]


class Frames(nn.Module):
    """A video: one convolution for every frame of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.c = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        return self.c(
            self.norm(self.conv(x.flatten(0, 1))).tanh().mean((2, 3)).view(n, t, -1).sum(1)
        )


class Mixing(nn.Module):
    """Looks at the other samples of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.c(h - h.mean(0))


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).tanh())


class Pair(nn.Module):
    """Returns a tuple and takes a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        h = self.a(batch["x"])
        return h, self.c(h.tanh())


def conv(dims: int, **arguments: object) -> nn.Sequential:
    """A convolution over ``dims`` axes between two others, then a linear head."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return nn.Sequential(
        kind(4, 4, 1),
        nn.Tanh(),
        kind(4, 8, **{"kernel_size": 3, **arguments}),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def normed(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def trained_statistics(model: nn.Module) -> nn.Module:
    """Give batch norms running statistics, scales and shifts that are not those of a new layer."""
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            nn.init.normal_(module.weight)
    return model


class Fused(torch.autograd.Function):
    """``silu(a w) b``, whose backward pass writes gradients over what was saved, as fused kernels do."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, w)
        return F.silu(a * w) * b

    @staticmethod
    def backward(ctx, gradient: Tensor):
        a, b, w = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [x.detach().clone().requires_grad_() for x in (a, b, w)]
            output = F.silu(inputs[0] * inputs[2]) * inputs[1]
        found = torch.autograd.grad(output, inputs, gradient)
        a.data.copy_(found[0])
        b.data.copy_(found[1])
        gradient.zero_()
        return a, b, found[2]


class Overwriting(nn.Module):
    """Calls a fused function with a weight of its own, once or twice; its twin does the same by plain operations."""

    def __init__(self, times: int, *, fused: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)
        self.w = nn.Parameter(torch.rand(5) + 0.5)
        self.times = times
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(x)
        for _ in range(self.times):
            a = self.a(x)
            h = Fused.apply(a, h, self.w) if self.fused else F.silu(a * self.w) * h
        return self.c(h)
