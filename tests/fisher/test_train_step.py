"""What is read off a training step is each sample's own gradient, by a loop over samples."""

import copy
import gc
import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_taskinfo import observing
from lightning_taskinfo.fisher import terms
from lightning_taskinfo.fisher.train_step import StepLosses, StepNorms
from tests.fisher.networks import Overwriting

N = 6


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.mix = (
            nn.Embedding(7, 4, padding_idx=0),
            nn.LayerNorm(4),
            nn.Linear(4, 4),
        )
        self.scale, self.head = nn.RMSNorm(4), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.scale(self.mix(self.norm(self.table(tokens))).relu()).sum(1))


def image_net():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2, padding="same"),
        nn.InstanceNorm2d(4, affine=True),
        nn.BatchNorm2d(4).eval(),
        nn.Flatten(),
        nn.Linear(4 * 9, 3),
    )


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)), (N, 5)),
    "images": (image_net, (N, 2, 6, 6)),
    "sequence, in place": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2), nn.Flatten(), nn.Linear(6, 3)
        ),
        (N, 3, 4),
    ),
    "series": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
        (N, 2, 5),
    ),
    "words": (Words, None),
}


def problem(name):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    net = make().double()
    x = torch.randint(7, (N, 5)) if shape is None else torch.randn(shape, dtype=torch.float64)
    return net, x, torch.randint(3, (N,))


def listen(recorder, loss, y, first=0):
    """Do what is done between the forward and the backward pass."""
    recorder.read(loss, StepLosses(loss, len(y), y).root, len(y), first)


def forward(net, x, y, recorder, first=0):
    """Do the first half of a training step, with a recorder beside it; return the loss."""
    loss = F.cross_entropy(net(x), y)
    listen(recorder, loss, y, first)
    return loss


def step(net, x, y, max_samples=N, recorder=None, first=0):
    """Do what a training does, with a recorder beside it."""
    recorder = recorder or StepNorms(net, max_samples)
    forward(net, x, y, recorder, first).backward()
    return recorder


def looped(net, x, y):
    norms = {
        name: torch.zeros(len(x), dtype=torch.float64)
        for name, p in net.named_parameters()
        if p.requires_grad
    }
    for n in range(len(x)):
        net.zero_grad()
        F.cross_entropy(net(x[n : n + 1]), y[n : n + 1]).backward()
        for name in norms:
            norms[name][n] = net.get_parameter(name).grad.square().sum()
    return norms


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("max_samples", [N, 4])
def test_equals_a_loop_over_samples(name, max_samples):
    net, x, y = problem(name)
    recorder = step(net, x, y, max_samples)
    assert recorder.problem is None
    expected = {key: norms[:max_samples] for key, norms in looped(net, x, y).items()}
    measured = {key: recorder.norms[key] * N**2 for key in expected}  # the loss is a mean
    torch.testing.assert_close(measured, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_step_has_its_own_norms(name):
    """What a recorder keeps from step to step must not be what changes: values, sizes, and what is trained."""
    net, x, y = problem(name)
    recorder = StepNorms(net, N)
    for i, count in enumerate((N, N, N - 2)):
        x, y = x.flip(0), y.roll(1)
        if i == 1:
            next(
                m.bias for m in net.modules() if getattr(m, "bias", None) is not None
            ).requires_grad_(False)
        measured = step(net, x[:count], y[:count], recorder=recorder).norms
        expected = looped(net, x[:count], y[:count])
        torch.testing.assert_close(
            {key: norms * count**2 for key, norms in measured.items()}, expected
        )


def test_images_may_change_their_size():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).double()
    recorder, y = StepNorms(net, N), torch.randint(3, (N,))
    for size in (6, 8, 5):
        x = torch.randn(N, 2, size, size, dtype=torch.float64)
        measured = step(net, x, y, recorder=recorder).norms
        torch.testing.assert_close(
            {key: norms * N**2 for key, norms in measured.items()}, looped(net, x, y)
        )


@pytest.mark.parametrize(("name", "layer"), [("mlp", 2), ("images", 3), ("images", -1)])
def test_inputs_of_layers_are_let_go_by_the_backward_pass(name, layer):
    net, x, y = problem(name)
    recorder, inputs = StepNorms(net, N), []
    handle = net[layer].register_forward_pre_hook(
        lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    loss = forward(net, x, y, recorder)
    handle.remove()
    assert not inputs[0].expired()
    loss.backward()
    assert loss.grad_fn is not None
    assert inputs[0].expired()
    assert recorder.norms


def test_norms_have_no_graph():
    net, x, y = problem("images")
    recorder = StepNorms(net, N)
    forward(net, x, y, recorder)
    assert recorder.norms
    assert not any(norms.requires_grad for norms in recorder.norms.values())


def test_frozen_layers_are_left_out():
    net, x, y = problem("mlp")
    net[0].requires_grad_(False)
    assert step(net, x, y).norms.keys() == {"2.weight"}


def test_batch_norm_in_train_mode_gives_the_contributions_to_the_batch_gradient():
    """The reference gives every sample a copy of the weights of its own."""
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    nn.init.normal_(net[1].weight)
    x, y = torch.randn(N, 5, dtype=torch.float64), torch.randint(3, (N,))
    own = {
        k: p.detach().expand(N, *p.shape).clone().requires_grad_()
        for k, p in net.named_parameters()
    }
    h = torch.einsum("noi,ni->no", own["0.weight"], x) + own["0.bias"]
    h = F.batch_norm(h, None, None, training=True) * own["1.weight"] + own["1.bias"]
    out = torch.einsum("noi,ni->no", own["3.weight"], h.relu()) + own["3.bias"]
    F.cross_entropy(out, y).backward()
    expected = {name: w.grad.flatten(1).square().sum(1) for name, w in own.items()}
    torch.testing.assert_close(
        step(net, x, y, max_samples=4).norms, {k: v[:4] for k, v in expected.items()}
    )


def test_gradients_are_the_same_and_no_hook_stays():
    net, x, y = problem("images")
    twin = copy.deepcopy(net)
    F.cross_entropy(twin(x), y).backward()
    step(net, x, y)
    assert all(not m._forward_hooks and not m._backward_hooks for m in net.modules())
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(net.parameters(), twin.parameters(), strict=True)
    )


def test_functions_that_overwrite_what_they_have_saved():
    """The training finds everything as it was."""
    torch.manual_seed(0)
    net = Overwriting(1).double()
    twin, plain = copy.deepcopy(net), copy.deepcopy(net)
    plain.fused = False
    net.w.requires_grad_(False)  # as a weight of such a function it could not be read
    x, y = torch.randn(N, 4, dtype=torch.float64), torch.arange(N) % 3
    F.cross_entropy(twin(x), y).backward()
    recorder = step(net, x, y)
    assert recorder.problem is None
    expected = looped(plain, x, y)
    for name, norms in recorder.norms.items():
        torch.testing.assert_close(norms * N**2, expected[name])
        assert torch.equal(net.get_parameter(name).grad, twin.get_parameter(name).grad)


def test_gradients_that_are_there_are_added_to():
    """As with gradient accumulation; the passes of the recorder's own must not count."""
    net, x, y = problem("mlp")
    recorder = StepNorms(net, N)
    for batch in (x, 2 * x):
        step(net, batch, y, recorder=recorder)
    total = [p.grad for p in net.parameters()]
    expected = torch.autograd.grad(
        F.cross_entropy(net(x), y) + F.cross_entropy(net(2 * x), y), [*net.parameters()]
    )
    torch.testing.assert_close(total, [*expected])


def test_what_others_run_is_no_part_of_the_step():
    net, x, y = problem("images")
    recorder = StepNorms(net, N)
    loss = F.cross_entropy(net(x), y)
    listen(recorder, loss, y)
    with observing(net):
        net(2 * x).sum().backward()
    F.cross_entropy(net(3 * x), y).backward()
    loss.backward()
    torch.testing.assert_close(
        {key: norms * N**2 for key, norms in recorder.norms.items()}, looped(net, x, y)
    )


@pytest.mark.parametrize("change", ["gradient", "input"])
@pytest.mark.parametrize("kind", ["mlp", "images"])
def test_what_is_changed_after_it_was_read_was_measured_before(kind, change):
    net, x, y = problem(kind)
    expected = looped(net, x, y)
    recorder = StepNorms(net, N)
    outputs = net(x)
    loss = F.cross_entropy(outputs, y)
    listen(recorder, loss, y)
    if change == "gradient":
        outputs.grad_fn.register_prehook(lambda gradients: gradients[0].zero_().tolist() and None)
    loss.backward()
    if change == "input":
        x.zero_()
    names = [name for name in expected if change == "input" or name.startswith(f"{len(net) - 1}.")]
    for name in names:  # the layers below follow the changed gradient, as the training does
        torch.testing.assert_close(recorder.norms[name] * N**2, expected[name])


def test_layers_that_are_unfrozen_or_frozen_later_are_followed():
    net, x, y = problem("images")
    net[:6].requires_grad_(False)
    recorder = StepNorms(net, N)
    for trained in (False, True, False):
        net[:6].requires_grad_(trained)
        measured = step(net, x, y, recorder=recorder)
        assert measured.problem is None
        expected = looped(net, x, y)
        torch.testing.assert_close(
            {key: norms * N**2 for key, norms in measured.norms.items()}, expected
        )


def test_what_is_unfrozen_and_cannot_be_read_is_no_measurement_until_it_is_frozen_again():
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    _, x, y = problem("mlp")
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
    net.register_parameter("extra", extra)
    recorder = StepNorms(net, N)
    assert step(net, x, y, recorder=recorder).problem is None
    extra.requires_grad_(True)
    for _ in range(2):
        found = step(net, x, y, recorder=recorder).problem
        assert found == "'extra' was not used with gradients in the training step"
        assert not recorder.norms
    extra.requires_grad_(False)
    assert step(net, x, y, recorder=recorder).problem is None
    assert len(recorder.norms) == 6


def penalised(net, x, y):
    return F.cross_entropy(net(x), y) + net[0].weight.square().sum()


def of_a_transposed_weight(net, x, y):
    return F.cross_entropy(net(x), y) + net[0].weight.t().abs().mean()


def on_other_samples(net, x, y):
    return F.cross_entropy(net(x), y) + net(x[:3].flip(0)).square().mean()


@pytest.mark.parametrize("loss", [penalised, of_a_transposed_weight, on_other_samples])
def test_a_use_elsewhere_that_begins_later_is_found(loss):
    net, x, y = problem("mlp")
    recorder = StepNorms(net, N)
    problems = []
    for make in (lambda net, x, y: F.cross_entropy(net(x), y), loss, loss):
        value = make(net, x, y)
        listen(recorder, value, y)
        value.backward()
        problems.append(recorder.problem)
    assert problems[0] is None
    assert all("is no part of their outputs" in found for found in problems[1:])


def test_a_penalty_of_features_is_part_of_the_gradient():
    net, x, y = problem("mlp")
    recorder = StepNorms(net, N)
    z = net[:2](x)
    loss = F.cross_entropy(net[2](z), y) + z.square().mean()
    listen(recorder, loss, y)
    loss.backward()
    norms = {name: torch.zeros(N, dtype=torch.float64) for name, _ in net.named_parameters()}
    for n in range(N):
        z = net[:2](x[n : n + 1])
        one = F.cross_entropy(net[2](z), y[n : n + 1]) + z.square().mean()
        for name, g in zip(norms, torch.autograd.grad(one, [*net.parameters()]), strict=True):
            norms[name][n] = g.square().sum()
    measured = {name: N**2 * recorder.norms[name] for name in norms}
    torch.testing.assert_close(measured, norms)


def test_what_fails_while_it_is_read_does_not_end_the_training(monkeypatch):
    def fail(*_):
        raise MemoryError("no more")

    net, x, y = problem("images")
    twin = copy.deepcopy(net)
    F.cross_entropy(twin(x), y).backward()
    monkeypatch.setattr(terms.OfUses, "norms", fail)
    recorder = step(net, x, y)
    assert recorder.problem == "it could not be read (MemoryError: no more)"
    assert not recorder.norms
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(net.parameters(), twin.parameters(), strict=True)
    )


def test_how_often_a_step_is_differentiated_is_no_matter():
    net, x, y = problem("mlp")
    recorder = StepNorms(net, N)
    loss = forward(net, x, y, recorder)
    once = {name: norms.clone() for name, norms in recorder.norms.items()}
    loss.backward(retain_graph=True)
    loss.backward()
    assert once
    torch.testing.assert_close(recorder.norms, once, rtol=0, atol=0)


class Watched(torch.autograd.Function):
    """Passes its input on, and leaves a weak reference to its place in the graph."""

    nodes: ClassVar[list[weakref.ref]] = []

    @staticmethod
    def forward(ctx, x):
        Watched.nodes.append(weakref.ref(ctx))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("backward", [True, False])
def test_the_graph_of_a_step_goes_with_the_step(backward):
    net, x, y = problem("mlp")
    recorder = StepNorms(net, N)
    Watched.nodes.clear()
    gc.disable()  # which finds a graph that holds itself sooner or later, and with it the memory of many steps
    try:
        loss = F.cross_entropy(net[2](net[1](Watched.apply(net[0](x)))), y)
        listen(recorder, loss, y)
        assert Watched.nodes[0]() is not None
        if backward:
            loss.backward()
        del loss
        assert Watched.nodes[0]() is None
    finally:
        gc.enable()


def test_autocast_is_close_and_in_full_precision():
    net, x, y = problem("mlp")
    net, x = net.float(), x.float()
    recorder = StepNorms(net, N)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(net(x), y)
    listen(recorder, loss, y)
    loss.backward()
    assert recorder.problem is None
    expected = looped(net, x, y)
    for name, norms in recorder.norms.items():
        assert norms.dtype == torch.float32
        torch.testing.assert_close(norms * N**2, expected[name].float(), rtol=0.05, atol=1e-3)


# Weights that are used twice, shared, or computed from others


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.c(self.a(self.a(x).tanh()))


class Functional(Twice):
    """A weight that is also used outside its layer."""

    def forward(self, x):
        return self.c(F.linear(self.a(x).tanh(), self.a.weight))


class Flat(Twice):
    def forward(self, x):
        return self.c(self.a(x.repeat(2, 1)).view(2, -1, 5).tanh().sum(0))


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, 3 * self.weight.exp(), self.bias)


class ByKeyword(nn.Linear):
    def __call__(self, x):
        return super().__call__(input=x)


class Both(nn.Module):
    """A weight that is used as it is in one place, and computed from in another one."""

    def __init__(self):
        super().__init__()
        self.weight, self.gate = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(()))

    def forward(self, x):
        h = (x @ (self.weight * self.gate)).tanh()
        return h @ self.weight.exp() + (h * self.gate) @ self.weight


def tied():
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
    net[2].weight = net[0].weight
    return net


def pruned():
    layer = prune.random_unstructured(nn.Linear(5, 5), "weight", 0.5)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))


def normed(layer):
    return nn.utils.parametrizations.weight_norm(layer)


class Last(nn.Module):
    def forward(self, outputs):
        return outputs[0][:, -1]


class Two(nn.Module):
    """Convolutions with one weight, whose gradients have to be formed."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Conv1d(1, 1, 3, padding=1), nn.Linear(5, 3)

    def forward(self, x):
        return self.c(self.a(self.a(x.unsqueeze(1)).tanh()).flatten(1))


USED = {
    "twice": Twice,
    "in a function, too": Functional,
    "on repeated rows": Flat,
    "scaled": lambda: nn.Sequential(Scaled(5, 4), nn.Tanh(), Scaled(4, 3)),
    "by keyword": lambda: nn.Sequential(ByKeyword(5, 3)),
    "as it is and computed from": Both,
    "tied": tied,
    "pruned": pruned,
    "weight norm": lambda: nn.Sequential(normed(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)),
    "prelu": lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(4), nn.Linear(4, 3)),
    "conv twice": Two,
    "lstm": lambda: nn.Sequential(nn.Unflatten(1, (5, 1)), nn.LSTM(1, 3, batch_first=True), Last()),
}


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", USED)
def test_every_use_of_every_weight_counts(name, first):
    torch.manual_seed(0)
    net = USED[name]().double()
    x, y = torch.randn(N, 5, dtype=torch.float64), torch.randint(3, (N,))
    recorder = StepNorms(net, 3)
    for _ in range(2):  # shown, and known
        step(net, x, y, recorder=recorder, first=first)
        assert recorder.problem is None
        measured = {key: norms * N**2 for key, norms in recorder.norms.items()}
        expected = {key: norms[first : first + 3] for key, norms in looped(net, x, y).items()}
        torch.testing.assert_close(measured, expected, rtol=1e-9, atol=1e-12)


def test_a_lookup_that_is_divided_by_the_count_of_the_batch_is_no_measurement():
    net = nn.Sequential(nn.Embedding(7, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(6, 3))
    recorder = step(net, torch.randint(7, (N, 2)), torch.zeros(N, dtype=torch.long))
    assert "'0.weight'" in recorder.problem
    assert "EmbeddingBackward0" in recorder.problem


def test_a_weight_that_the_step_does_not_use_is_no_measurement():
    net, x, y = problem("mlp")
    net.add_module("other", nn.Linear(2, 2))
    net.forward = lambda x: net[2](net[1](net[0](x)))
    recorder = step(net, x, y)
    assert recorder.problem == "'other.weight' was not used with gradients in the training step"


# Which row belongs to which sample

T, C = 4, 5


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


MOVED = {
    "nothing": lambda h: h,
    "numbers that keep the order": lambda h: h[torch.arange(N)],
    "there and back": lambda h: h.flip(0).flip(0),
    "reshaped": lambda h: h.view(-1).view(N, C),
    "transposed twice": lambda h: h.T.contiguous().T,
    "mostly dead": lambda h: torch.where(torch.arange(N)[:, None] == 2, h, 0 * h),
    "flipped": lambda h: h.flip(0),
    "in two pieces": lambda h: torch.cat([h[3:], h[:3]]),
    "numbers": lambda h: h[torch.tensor([1, 0, 2, 3, 4, 5])],
}
MIXED = {
    "numbers twice": lambda h: h[torch.tensor([1, 1, 2, 3, 4, 4])],
    "reshaped wrongly": lambda h: h.T.reshape(N, C),
    "attention to others": attends_to_others,
    "the mean taken off": lambda h: h - h.mean(0),
}


def net_and_batch(between, generator):
    torch.manual_seed(0)
    return Net(between), torch.randn(N, 3, generator=generator), torch.arange(N) % C


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def in_the_batch(net, x, y):
    """Return what the loss of each sample of a batch depends on: norms by parameter."""
    norms = {name: torch.zeros(len(x)) for name, _ in net.named_parameters()}
    for n in range(len(x)):
        loss = F.cross_entropy(net(x), y, reduction="none")[n]
        for name, g in zip(norms, torch.autograd.grad(loss, [*net.parameters()]), strict=True):
            norms[name][n] = g.square().sum()
    return norms


@pytest.mark.parametrize("between", MOVED)
def test_rows_that_are_moved_are_found_again(between, generator):
    net, x, y = net_and_batch(MOVED[between], generator)
    recorder = step(net, x, y)
    assert recorder.problem is None
    measured = {name: norms * N**2 for name, norms in recorder.norms.items()}
    torch.testing.assert_close(measured, in_the_batch(net, x, y), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("between", MIXED)
def test_samples_that_are_mixed_are_refused(between, generator):
    net, x, y = net_and_batch(MIXED[between], generator)
    assert "mixes the samples" in step(net, x, y).problem
    assert all(p.grad is not None for p in net.parameters())


def test_numbers_are_looked_at_in_every_step(generator):
    order = torch.arange(N)
    net, x, y = net_and_batch(lambda h: h[order], generator)
    recorder = StepNorms(net, N)
    for _ in range(2):
        step(net, x, y, recorder=recorder)
        measured = {name: norms * N**2 for name, norms in recorder.norms.items()}
        torch.testing.assert_close(measured, in_the_batch(net, x, y), rtol=1e-4, atol=1e-6)
        order = order.flip(0)


def test_a_graph_that_is_known_is_not_looked_at_again(generator, monkeypatch):
    net, x, y = net_and_batch(MOVED["reshaped"], generator)
    recorder, passes = StepNorms(net, N), []
    plain = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: passes.append(a) or plain(*a, **k))
    counts = []
    for _ in range(4):
        assert step(net, x, y, recorder=recorder).problem is None
        counts.append(len(passes))
    once = counts[0]  # shown for two batches; after that there is a single pass
    assert once > 1
    assert counts == [once, 2 * once, 2 * once + 1, 2 * once + 2]
    net.between = MOVED["there and back"]
    step(net, x, y, recorder=recorder)
    assert len(passes) > 2 * once


def test_batch_norm_hides_no_mixing(generator):
    """What BatchNorm mixes is taken for granted, what others mix is not."""
    net, x, y = net_and_batch(nn.BatchNorm1d(C), generator)
    assert step(net, x, y).problem is None
    net.between = nn.Sequential(nn.BatchNorm1d(C), Centred())
    assert "mixes the samples" in step(net, x, y).problem


class Centred(nn.Module):
    def forward(self, h):
        return h - h.mean(0)


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
    recorder = step(net, tokens, y, max_samples=3, first=first)
    assert recorder.problem is None
    measured = {name: norms * N**2 for name, norms in recorder.norms.items()}
    expected = {
        name: norms[first : first + 3] for name, norms in in_the_batch(net, tokens, y).items()
    }
    torch.testing.assert_close(measured, expected, rtol=1e-4, atol=1e-7)


# Checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, generator):
    class Checkpointed(Net):
        def forward(self, x):
            hidden = self.a(x)
            return checkpoint(lambda h: self.c(h.tanh()), hidden, use_reentrant=reentrant)

    net, x, y = Checkpointed(None), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    recorder = StepNorms(net, N)
    for _ in range(2):
        step(net, x, y, recorder=recorder)
        if reentrant:
            assert recorder.problem == "'c.weight' was not used with gradients in the training step"
        else:
            assert "as by checkpointing" in recorder.problem
        assert not recorder.norms


def selective(function, *args):
    keep = [torch.ops.aten.addmm.default]
    contexts = lambda: create_selective_checkpoint_contexts(keep)  # noqa: E731
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("late", [False, True])
def test_selective_checkpointing_is_left_alone(late, generator):
    class Selective(Net):
        on = not late

        def forward(self, x):
            return selective(super().forward, x) if self.on else super().forward(x)

    net, x, y = Selective(lambda h: h), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    recorder = StepNorms(net, N)
    if late:
        assert step(net, x, y, recorder=recorder).problem is None
        net.on = True
    net.zero_grad()
    assert "as by checkpointing" in step(net, x, y, recorder=recorder).problem
    assert net.a.weight.grad is not None


def test_a_pass_that_cannot_be_run_does_not_end_the_training(generator):
    class Frozen(Net):
        """Reentrant checkpointing of what has no weights to train."""

        def forward(self, x):
            return self.c(checkpoint(torch.tanh, self.a(x), use_reentrant=True))

    net, x, y = Frozen(None), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    assert "RuntimeError" in step(net, x, y).problem
    assert net.a.weight.grad is not None


class Hidden(torch.autograd.Function):
    """Runs a backward pass of its own, whose gradients go past autograd."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(gradient)
        return x.grad, None


def test_a_backward_pass_inside_of_an_operation_leaves_gradients_alone(generator):
    class Reversible(Net):
        def forward(self, x):
            return self.c(Hidden.apply(self.c(self.a(x)), self.c))

    net, x, y = Reversible(None), torch.randn(N, 3, generator=generator), torch.arange(N) % C
    F.cross_entropy(net(x), y).backward()
    expected = [2 * p.grad for p in net.parameters()]
    assert step(net, x, y).problem == "an operation runs a backward pass of its own"
    torch.testing.assert_close([p.grad for p in net.parameters()], expected)
