"""What a training step's graph shows: losses beside torch's own, and rows that are samples or are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_taskinfo.fisher.step_graph import StepGraph
from lightning_taskinfo.fisher.train_step import StepRecorder

N, T, C = 6, 4, 5


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def outputs(*shape, generator):
    return torch.randn(shape, generator=generator, requires_grad=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"weight": torch.arange(1.0, C + 1)}, {"ignore_index": 2}],
    ids=str,
)
def test_cross_entropy(options, reduction, generator):
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    loss = F.cross_entropy(3 * out, y, reduction=reduction, **options)
    found = StepGraph(loss / 4).sample_losses(N, y)
    expected = F.cross_entropy(3 * out, y, reduction="none")
    if "ignore_index" in options:
        expected = torch.where(y == 2, torch.nan, expected)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert not found.requires_grad


def test_tokens_are_averaged_over_those_that_count(generator):
    out, y = outputs(N, T, C, generator=generator), torch.randint(C, (N, T), generator=generator)
    y[0, 1:] = -100
    y[1] = -100
    rows = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(N, T)
    expected = rows.sum(1) / (y != -100).sum(1)
    for loss in (
        F.cross_entropy(out.flatten(0, 1), y.flatten()),
        F.cross_entropy(out.transpose(1, 2), y),
    ):
        torch.testing.assert_close(StepGraph(loss).sample_losses(N, y), expected, equal_nan=True)


@pytest.mark.parametrize("padded", [True, False])
def test_labels_of_a_language_model_may_be_shifted(padded, generator):
    out, y = outputs(N, T, C, generator=generator), torch.randint(C, (N, T), generator=generator)
    shifted = F.pad(y, (0, 1), value=-100)[:, 1:] if padded else y[:, 1:]
    logits = out if padded else out[:, :-1]
    loss = F.cross_entropy(logits.reshape(-1, C), shifted.reshape(-1))
    rows = F.cross_entropy(out[:, :-1].reshape(-1, C), y[:, 1:].reshape(-1), reduction="none").view(
        N, T - 1
    )
    torch.testing.assert_close(StepGraph(loss).sample_losses(N, y), rows.mean(1))


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.binary_cross_entropy_with_logits,
        lambda x, y, **k: F.binary_cross_entropy(x.sigmoid(), y, **k),
    ],
)
def test_other_losses_are_means_over_outputs(loss, generator):
    out, y = outputs(N, 3, generator=generator), torch.rand(N, 3, generator=generator)
    found = StepGraph(loss(out, y)).sample_losses(N, y)
    torch.testing.assert_close(found, loss(out, y, reduction="none").mean(1))


def test_half_precision_is_read_in_single_precision(generator):
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    found = StepGraph(F.cross_entropy(out.bfloat16(), y)).sample_losses(N, y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found, F.cross_entropy(out, y, reduction="none"), rtol=0.02, atol=0.02
    )


def permuted(out, y):
    return F.cross_entropy(out.flip(0), y.flip(0))


def two(out, y):
    return F.cross_entropy(out, y) + F.cross_entropy(2 * out, y)


def soft(out, y):
    return F.cross_entropy(out, F.one_hot(y, C).float())


def repeated(out, y):
    return F.cross_entropy(out[:4], y[:4])


@pytest.mark.parametrize(
    ("loss", "message"),
    [(permuted, "targets"), (two, "got 2"), (soft, "got 0"), (repeated, r"got \[4\]")],
)
def test_losses_that_are_not_those_of_the_batch_are_refused(loss, message, generator):
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    with pytest.raises(ValueError, match=message):
        StepGraph(loss(out, y)).sample_losses(N, y)


def test_unknown_targets_are_not_compared(generator):
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    found = StepGraph(permuted(out, y)).sample_losses(N, None)
    torch.testing.assert_close(found, F.cross_entropy(out, y, reduction="none").flip(0))


def test_a_checkpointed_loss_is_read_and_the_backward_pass_goes_on(generator):
    out, y = outputs(N, C, generator=generator), torch.arange(N) % C
    loss = checkpoint(F.cross_entropy, 2 * out, y, use_reentrant=False)
    torch.testing.assert_close(
        StepGraph(loss).sample_losses(N, y), F.cross_entropy(2 * out, y, reduction="none")
    )
    (expected,) = torch.autograd.grad(F.cross_entropy(2 * out, y), out)
    loss.backward()
    torch.testing.assert_close(out.grad, expected)


# Which row belongs to which sample


class Net(nn.Module):
    """Two layers and what happens in between."""

    def __init__(self, between):
        super().__init__()
        self.a, self.c = nn.Linear(3, C), nn.Linear(C, C)
        self.between = between

    def forward(self, x):
        return self.c(self.between(self.a(x).tanh()))


def attends_to_others(h):
    return (h @ h.T).softmax(1) @ h


KEPT = {
    "nothing": lambda h: h,
    "numbers that keep the order": lambda h: h[torch.arange(N)],
    "there and back": lambda h: h.flip(0).flip(0),
    "reshaped": lambda h: h.view(-1).view(N, C),
    "transposed twice": lambda h: h.T.contiguous().T,
    "mostly dead": lambda h: torch.where(torch.arange(N)[:, None] == 2, h, 0 * h),
}
CHANGED = {
    "flipped": lambda h: h.flip(0),
    "in two pieces": lambda h: torch.cat([h[3:], h[:3]]),
    "numbers": lambda h: h[torch.tensor([1, 0, 2, 3, 4, 5])],
    "reshaped wrongly": lambda h: h.T.reshape(N, C),
    "attention to others": attends_to_others,
    "the mean taken off": lambda h: h - h.mean(0),
}


def problem(net, x, y, recorder=None):
    recorder = recorder or StepRecorder(net, N)
    recorder.start(N)
    loss = F.cross_entropy(net(x), y)
    recorder.before_backward(StepGraph(loss))
    loss.backward()
    return recorder


@pytest.mark.parametrize("between", KEPT)
def test_rows_that_are_samples_are_measured(between, generator):
    net, x, y = Net(KEPT[between]), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    recorder = problem(net, x, y)
    assert recorder.problem is None
    norms = {name: torch.zeros(N) for name, _ in net.named_parameters()}
    for n in range(N):
        loss = F.cross_entropy(net(x), y, reduction="none")[n]
        for name, g in zip(norms, torch.autograd.grad(loss, [*net.parameters()]), strict=True):
            norms[name][n] = g.square().sum()
    for name in norms:
        torch.testing.assert_close(recorder.norms[name] * N**2, norms[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("between", CHANGED)
def test_rows_that_are_not_samples_are_refused(between, generator):
    net, x, y = Net(CHANGED[between]), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    assert "order" in problem(net, x, y).problem
    assert all(p.grad is not None for p in net.parameters())


def test_numbers_are_looked_at_in_every_step(generator):
    order = torch.arange(N)
    net, x, y = Net(lambda h: h[order]), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    recorder = problem(net, x, y)
    assert recorder.problem is None
    order = order.flip(0)
    assert "order" in problem(net, x, y, recorder).problem


def test_a_graph_that_is_known_is_not_looked_at_again(generator, monkeypatch):
    net, x, y = Net(KEPT["reshaped"]), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    recorder, passes = StepRecorder(net, N), []
    plain = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: passes.append(a) or plain(*a, **k))
    for _ in range(3):
        assert problem(net, x, y, recorder).problem is None
    assert len(passes) == 2
    net.between = KEPT["there and back"]
    problem(net, x, y, recorder)
    assert len(passes) == 4


class Shares(nn.Module):
    """Weights that all samples share: positions, and parameters of no layer."""

    def __init__(self, positions=lambda t: torch.arange(t)[None]):
        super().__init__()
        self.words, self.places = nn.Embedding(9, 3), nn.Embedding(T + 2, 3)
        self.start, self.shift, self.head = (
            nn.Parameter(torch.randn(1, 1, 3)),
            nn.Parameter(torch.randn(3)),
            nn.Linear(3, C),
        )
        self.positions = positions

    def forward(self, tokens):
        h = torch.cat([self.start.expand(len(tokens), -1, -1), self.words(tokens)], 1)
        h = torch.add(h, self.places(self.positions(h.shape[1])), alpha=2).tanh()
        return self.head((h - self.shift).tanh().sum(1))


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(
    "positions",
    [lambda t: torch.arange(t)[None], torch.arange, lambda t: torch.tensor([[0, 1, 1, 2, 0]])],
)
def test_weights_that_all_samples_share(positions, first, generator):
    torch.manual_seed(0)
    net, tokens = Shares(positions), torch.randint(9, (N, T), generator=generator)
    y = torch.arange(N) % C
    recorder = StepRecorder(net, 3)
    recorder.start(N, first)
    loss = F.cross_entropy(net(tokens), y)
    recorder.before_backward(StepGraph(loss))
    loss.backward()
    assert recorder.problem is None
    assert recorder.norms.keys() == {name for name, _ in net.named_parameters()}
    for i, n in enumerate(range(first, first + 3)):
        loss = F.cross_entropy(net(tokens), y, reduction="none")[n]
        for (name, _), g in zip(
            net.named_parameters(), torch.autograd.grad(loss, [*net.parameters()]), strict=True
        ):
            assert recorder.norms[name][i] * N**2 == pytest.approx(
                g.square().sum().item(), rel=1e-4
            ), name


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(3)), nn.Linear(3, C)

    def forward(self, x):
        return self.head(x * self.scale)


def test_a_parameter_that_meets_the_samples_in_another_way_is_named(generator):
    found = problem(Scales(), torch.randn(N, 3, generator=generator), torch.arange(N) % C).problem
    assert "'scale'" in found
    assert "MulBackward0" in found


def test_selective_checkpointing_is_left_alone(generator):
    """Its regions can be gone through once only."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    class Selective(Net):
        def forward(self, x):
            keep = [torch.ops.aten.addmm.default]
            contexts = lambda: create_selective_checkpoint_contexts(keep)  # noqa: E731
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

    net, x, y = Selective(lambda h: h), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    assert problem(net, x, y).problem is not None
    assert net.a.weight.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, generator):
    class Checkpointed(Net):
        def forward(self, x):
            hidden = self.a(x)
            return checkpoint(lambda h: self.c(h.tanh()), hidden, use_reentrant=reentrant)

    net, x, y = Checkpointed(None), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    recorder = problem(net, x, y)
    if reentrant:
        assert "layer 'c' was not called with gradients" in recorder.problem
        return
    plain = Net(lambda h: h)
    plain.load_state_dict(net.state_dict())
    torch.testing.assert_close(recorder.norms, problem(plain, x, y).norms)


def test_a_pass_that_cannot_be_run_does_not_end_the_training(generator):
    class Frozen(Net):
        """Reentrant checkpointing of what has no weights to train."""

        def forward(self, x):
            return self.c(checkpoint(torch.tanh, self.a(x), use_reentrant=True))

    net, x, y = Frozen(None), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    assert "RuntimeError" in problem(net, x, y).problem
    assert net.a.weight.grad is not None
