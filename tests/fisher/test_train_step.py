"""What hooks read off a training step's backward pass is each sample's own gradient, by a loop over samples."""

import copy
import gc
import pickle
import warnings
import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune

from lightning_taskinfo import TaskInfoWarning, observing
from lightning_taskinfo.fisher.step_graph import StepGraph
from lightning_taskinfo.fisher.train_step import StepRecorder

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


def forward(net, x, y, recorder):
    """Do the first half of a training step, with a recorder beside it; return the loss."""
    recorder.start(len(x))
    loss = F.cross_entropy(net(x), y)
    recorder.before_backward(StepGraph(loss))
    return loss


def step(net, x, y, max_samples=N, recorder=None):
    """Do what a training does, with a recorder beside it."""
    recorder = recorder or StepRecorder(net, max_samples)
    forward(net, x, y, recorder).backward()
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
    recorder = StepRecorder(net, N)
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
    recorder, y = StepRecorder(net, N), torch.randint(3, (N,))
    for size in (6, 8, 5):
        x = torch.randn(N, 2, size, size, dtype=torch.float64)
        measured = step(net, x, y, recorder=recorder).norms
        torch.testing.assert_close(
            {key: norms * N**2 for key, norms in measured.items()}, looped(net, x, y)
        )


@pytest.mark.parametrize(("name", "layer"), [("mlp", 2), ("images", 3), ("images", -1)])
def test_inputs_of_layers_are_let_go_as_the_backward_pass_goes(name, layer):
    net, x, y = problem(name)
    recorder, inputs = StepRecorder(net, N), []
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
    recorder = StepRecorder(net, N)
    loss = forward(net, x, y, recorder)
    torch.autograd.grad(loss, [*net.parameters()], create_graph=True)
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
    step(net, x, y).stop()
    assert all(not m._forward_hooks for m in net.modules())
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(net.parameters(), twin.parameters(), strict=True)
    )


def test_a_hooked_model_is_heard_in_a_step_alone_and_can_be_copied():
    net, x, y = problem("mlp")
    recorder = step(net, x, y)
    norms, last = recorder.norms, {name: each.clone() for name, each in recorder.norms.items()}
    F.cross_entropy(net(2 * x), y).backward()
    assert recorder.problem is None
    assert recorder.norms is norms
    torch.testing.assert_close(recorder.norms, last)
    assert b"taskinfo" not in pickle.dumps(net)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        recorder.start(N)
        F.cross_entropy(twin(x), y).backward()
        assert not recorder.seen
    torch.testing.assert_close(step(net, x, y, recorder=recorder).norms, last)


def test_what_others_run_inside_observing_is_no_part_of_the_step():
    net, x, y = problem("images")
    recorder = StepRecorder(net, N)
    recorder.start(N)
    with observing(net):
        net(x[:2]).sum().backward()
    loss = F.cross_entropy(net(x), y)
    with observing(net):
        net(2 * x).sum().backward()
    recorder.before_backward(StepGraph(loss))
    loss.backward()
    torch.testing.assert_close(
        {key: norms * N**2 for key, norms in recorder.norms.items()}, looped(net, x, y)
    )


@pytest.mark.parametrize("change", ["gradient", "input"])
@pytest.mark.parametrize("kind", ["mlp", "images"])
def test_what_is_changed_after_it_was_read_was_measured_before(kind, change):
    net, x, y = problem(kind)
    expected = looped(net, x, y)
    recorder = StepRecorder(net, N)
    recorder.start(N)
    outputs = net(x)
    loss = F.cross_entropy(outputs, y)
    recorder.before_backward(StepGraph(loss))
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
    recorder = StepRecorder(net, N)
    for trained in (False, True, False):
        net[:6].requires_grad_(trained)
        measured = step(net, x, y, recorder=recorder)
        assert measured.problem is None
        expected = looped(net, x, y)
        torch.testing.assert_close(
            {key: norms * N**2 for key, norms in measured.norms.items()}, expected
        )


def test_what_is_unfrozen_and_cannot_be_read_is_no_measurement_until_it_is_frozen_again():
    net = nn.Sequential(nn.Linear(5, 4), nn.PReLU(), nn.Linear(4, 3)).double()
    _, x, y = problem("mlp")
    net[1].requires_grad_(False)
    recorder = StepRecorder(net, N)
    assert step(net, x, y, recorder=recorder).problem is None
    net[1].requires_grad_(True)
    for _ in range(2):
        assert "got '1.weight of PReLU'" in step(net, x, y, recorder=recorder).problem
        assert not recorder.norms
    net[1].requires_grad_(False)
    assert step(net, x, y, recorder=recorder).problem is None
    assert len(recorder.norms) == 4


def test_a_penalty_of_the_weights_that_begins_later_is_found():
    net, x, y = problem("mlp")
    recorder = StepRecorder(net, N)
    problems = []
    for i in range(3):
        recorder.start(N)
        loss = F.cross_entropy(net(x), y) + (net[0].weight.square().sum() if i else 0.0)
        recorder.before_backward(StepGraph(loss))
        loss.backward()
        problems.append(recorder.problem)
    assert problems == [None] + 2 * ["parameter '0.weight' was used 2 times in the training step"]


@pytest.mark.parametrize(("time", "warned"), [(N, True), (N - 1, False)])
def test_samples_that_may_be_on_either_axis_are_warned_about_once(time, warned):
    net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(5 * time, 3))
    x, y, recorder = torch.randn(N, time, 4), torch.randint(3, (N,)), StepRecorder(net, N)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(net, x, y, recorder=recorder)
        step(net, x, y, recorder=recorder)
    told = f"Layer '0' has outputs [{N}, {N}, 5], with the samples on axis 0 or 1; axis 0 is taken."
    assert [str(w.message) for w in caught if w.category is TaskInfoWarning] == [told] * warned


class ByKeyword(nn.Linear):
    def __call__(self, x):
        return super().__call__(input=x)


def test_a_layer_that_got_its_input_by_keyword_is_no_measurement():
    net = nn.Sequential(ByKeyword(5, 3)).double()
    recorder = step(net, *problem("mlp")[1:])
    assert recorder.problem == "layer '0' was given its input by keyword"
    assert net[0].weight.grad is not None


def test_what_fails_while_it_is_read_does_not_end_the_training(monkeypatch):
    def fail(*_):
        raise MemoryError("no more")

    net, x, y = problem("images")
    twin = copy.deepcopy(net)
    F.cross_entropy(twin(x), y).backward()
    monkeypatch.setattr(StepRecorder, "_use", fail)
    assert step(net, x, y).problem == "layer '0' could not be read (MemoryError: no more)"
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(net.parameters(), twin.parameters(), strict=True)
    )


def test_a_second_backward_pass_is_no_measurement():
    net, x, y = problem("mlp")
    recorder = StepRecorder(net, N)
    loss = forward(net, x, y, recorder)
    loss.backward(retain_graph=True)
    loss.backward()
    assert recorder.problem == "the backward pass came by layer '2' more than once"


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
    recorder = StepRecorder(net, N)
    Watched.nodes.clear()
    gc.disable()  # which finds a graph that holds itself sooner or later, and with it the memory of many steps
    try:
        recorder.start(N)
        loss = F.cross_entropy(net[2](net[1](Watched.apply(net[0](x)))), y)
        recorder.before_backward(StepGraph(loss))
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
    with torch.autocast("cpu", torch.bfloat16):
        recorder = StepRecorder(net, N)
        recorder.start(N)
        loss = F.cross_entropy(net(x), y)
    recorder.before_backward(StepGraph(loss))
    loss.backward()
    assert recorder.problem is None
    expected = looped(net, x, y)
    for name, norms in recorder.norms.items():
        assert norms.dtype == torch.float32
        torch.testing.assert_close(norms * N**2, expected[name].float(), rtol=0.05, atol=1e-3)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.c(self.a(self.a(x).tanh()))


class Functional(nn.Module):
    """A weight that is also used outside its layer."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.c(F.linear(self.a(x).tanh(), self.a.weight))


class Unused(Twice):
    def forward(self, x):
        return F.linear(x, self.c.weight) + self.c(x)


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.c(self.a(x.repeat(2, 1)).view(2, -1, 5).sum(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Twice, "layer 'a' was called more than once in the training step"),
        (Functional, "parameter 'a.weight' was used 2 times in the training step"),
        (Unused, "layer 'a' was not called with gradients in the training step"),
        (Flat, "layer 'a' had 12 rows of outputs for 6 samples"),
    ],
)
def test_says_what_is_in_the_way(make, message):
    net, x = make(), torch.randn(N, 5)
    assert step(net, x, torch.zeros(N, dtype=torch.long)).problem == message


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, 3 * self.weight, self.bias)


class ScaledConvolution(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, 3 * weight, bias)


def patched():
    layer = nn.Linear(2, 2, bias=False)
    layer.forward = lambda x: F.linear(x, 3 * layer.weight)
    return layer


def pruned():
    return prune.random_unstructured(nn.Linear(2, 2, bias=False), "weight", 0.5)


def compiled():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].compile()
    return net


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.LSTM(2, 2)), "got '0.weight_ih_l0 of LSTM'"),
        (lambda: nn.Sequential(nn.ConvTranspose1d(2, 2, 1)), "got '0.weight of ConvTranspose1d'"),
        (
            lambda: nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"),
            "of Conv1d' with padding_mode='circular'",
        ),
        (
            lambda: nn.Sequential(Scaled(2, 2)),
            "got '0.weight of Scaled' with a `forward` of its own",
        ),
        (
            lambda: nn.Sequential(ScaledConvolution(2, 2, 1)),
            "got '0.weight of ScaledConvolution' with a `forward`",
        ),
        (patched, "got 'weight of Linear' with a `forward` of its own"),
        (pruned, "got 'weight_orig of Linear', from which another weight is computed"),
        (tied, "got '0' and '1' tied"),
        (compiled, "compiled.*got '1'"),
    ],
)
def test_refuses_what_it_cannot_read_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        StepRecorder(make(), N)


def test_embedding_options_that_cannot_be_read():
    net = nn.Sequential(nn.Embedding(7, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(6, 3))
    recorder = step(net, torch.randint(7, (N, 2)), torch.zeros(N, dtype=torch.long))
    assert recorder.problem == "layer '0' (Embedding) has options that cannot be read from hooks"
