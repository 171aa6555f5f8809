"""``observing`` looks at a model and leaves no trace, whatever the model or the body does."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo import observing
from lightning_taskinfo._observe import observing_once, parts, trainable_parameters


class Frozen(nn.BatchNorm1d):
    """A batch norm that stays in eval mode whatever its parents are told."""

    def train(self, mode: bool = True):
        return super().train(False)


class Stubborn(nn.Dropout):
    """Refuses ``eval()``: an observer that asks for it would measure with dropout on."""

    def train(self, mode: bool = True):
        return super().train(True)


class Restless(nn.Module):
    """Buffers that every forward changes, in each of the ways there are."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("in_place", "through_data", "reassigned", "dropped"):
            self.register_buffer(name, torch.tensor([1.0]))
        self.register_buffer("lazy", None)

    def forward(self, x: Tensor) -> Tensor:
        self.in_place.add_(1)
        self.through_data.data.add_(1)
        self.reassigned = self.reassigned + 1
        self.dropped = None
        self.lazy = torch.tensor([2.0])
        return x


@pytest.fixture
def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
        ).train()


def trace(model: nn.Module) -> dict[str, object]:
    """Everything an observer could leave behind, in a form that ``==`` compares."""
    return {
        "modes": [module.training for module in model.modules()],
        "buffers": [(name, id(buffer), buffer.tolist()) for name, buffer in model.named_buffers()],
        "grads": [
            p.grad if p.grad is None else (id(p.grad), p.grad.tolist()) for p in model.parameters()
        ],
        "torch": torch.get_rng_state().tolist(),
        "numpy": [
            part.tolist() if isinstance(part, np.ndarray) else part
            for part in np.random.get_state()  # noqa: NPY002
        ],
        "python": random.getstate(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    }


def disturb(model: nn.Module) -> None:
    """Do everything that an observer's body might."""
    model.train()
    model(torch.randn(16, 4)).sum().backward()
    random.random()
    np.random.rand()  # noqa: NPY002


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("outer", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("autocast", [False, True])
def test_leaves_no_trace(net, outer, autocast, raises):
    net(torch.randn(8, 4)).sum().backward()
    net[1].eval()
    with outer(), torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        before = trace(net)
        with pytest.raises(ZeroDivisionError) if raises else nullcontext(), observing(net):
            disturb(net)
            if raises:
                1 / 0  # noqa: B018
        assert trace(net) == before


def test_modes_come_back_one_by_one():
    net = nn.Sequential(
        nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)), Frozen(2), Stubborn(), Stubborn()
    ).train()
    net[0][1].eval()  # frozen by its owner
    net[3].training = False  # `train` cannot say this
    before = [module.training for module in net.modules()]
    assert before == [True, True, True, False, False, True, False]
    with observing(net):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net.modules()] == before


def test_gives_the_model_itself_in_eval_mode(net):
    x = torch.randn(8, 4)
    with observing(net) as seen:
        assert seen is net
        torch.testing.assert_close(net(x), net(x), rtol=0, atol=0)  # no dropout
        torch.testing.assert_close(net(x)[:3], net(x[:3]))  # no batch statistics


def test_buffers_come_back_however_they_were_changed():
    net = Restless().eval()
    buffers = dict(net._buffers)
    with observing(net):
        for _ in range(2):
            net(torch.ones(1))
            net.dropped = torch.tensor([0.0])
        assert [net.in_place.item(), net.through_data.item(), net.reassigned.item()] == [
            3.0,
            3.0,
            3.0,
        ]
    assert all(net._buffers[name] is buffer for name, buffer in buffers.items())
    assert [b if b is None else b.item() for b in net._buffers.values()] == [
        1.0,
        1.0,
        1.0,
        1.0,
        None,
    ]
    assert list(net.state_dict()) == ["in_place", "through_data", "reassigned", "dropped"]


@pytest.mark.parametrize("how", ["stretched", "resized", "registered"])
def test_buffers_of_unusual_kinds_are_left_as_they_were(how):
    class Unusual(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.rand(1, 5).expand(5, 5))
            if how == "resized":
                self.kept = torch.arange(5.0)

        def forward(self, x):
            if how == "resized":
                self.kept.resize_(len(x)).zero_()
            if how == "registered":
                self.register_buffer("cached", x.mean(0))
            return x

    model = Unusual()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with observing(model):
        model(torch.randn(2, 5))
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert torch.equal(after["kept"], before["kept"])


def test_buffers_made_by_a_validation_come_back():
    """A module that reassigns a buffer under ``validate`` keeps an inference tensor, which refuses ``copy_``."""
    net = Restless()
    with torch.inference_mode():
        net(torch.ones(1))
    assert net.reassigned.is_inference()
    with observing(net):
        net.reassigned = net.reassigned + 1
    assert net.reassigned.item() == 2.0


def test_a_graph_recorded_before_can_be_differentiated_after(net):
    loss = net.eval()(
        torch.randn(8, 4)
    ).sum()  # in eval mode the graph holds the buffers themselves
    with observing(net):
        net(torch.randn(8, 4)).sum().backward()
    loss.backward()


def test_gradients_are_the_same_objects_with_the_same_values(net):
    net[4].weight.grad = torch.ones_like(net[4].weight)
    held = net[4].weight.grad
    with observing(net):
        assert all(p.grad is None for p in net.parameters())
        net(torch.randn(8, 4)).sum().backward()
        assert net[4].weight.grad is not held
    assert net[4].weight.grad is held
    assert torch.equal(held, torch.ones_like(held))
    assert net[0].weight.grad is None


def test_random_states_come_back(net):
    torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
    expected = torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
    with observing(net):
        torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected  # noqa: NPY002


def test_autocast_is_off_inside_and_as_before_outside(net):
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        with observing(net):
            assert net(x).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")
        assert net.eval()(x).dtype == torch.float16
    with observing(net):
        pass
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode])
def test_gradients_are_possible_inside(net, outer):
    x = torch.randn(8, 4)
    with observing(net):
        expected = torch.autograd.grad(net(x).square().sum(), net[0].weight)[0]
    with outer():
        x_inside = x.clone()
        with observing(net):
            found = torch.autograd.grad(net(x_inside.clone()).square().sum(), net[0].weight)[0]
        assert not net(x).requires_grad
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_module_runs_eagerly(net, in_place):
    """Compiled code need not call a hook that was added after it was compiled; eager code always does."""
    compiled = net if in_place else torch.compile(net, backend="eager")
    if in_place:
        net.compile(backend="eager")
    x, calls = torch.randn(8, 4), []
    compiled.eval()(x)
    handle = net[0].register_forward_hook(lambda *_: calls.append(torch.compiler.is_compiling()))
    compiled(x)
    assert False not in calls
    with observing(compiled):
        calls.clear()
        compiled(x)
        assert calls == [False]
    compiled(x)  # compiled again
    assert calls.count(False) == 1
    handle.remove()
    torch.compiler.reset()


def test_a_stance_of_the_user_comes_back(net):
    compiled = torch.compile(net.eval(), backend="eager")
    with torch.compiler.set_stance("fail_on_recompile"):
        with observing(net):
            compiled(torch.randn(8, 4))
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            compiled(torch.randn(8, 4))
    torch.compiler.reset()


def test_nests(net):
    net[1].eval()
    before = trace(net)
    with observing(net):
        inside = trace(net)
        with observing(net):
            disturb(net)
        assert trace(net) == inside
        assert net(torch.randn(2, 4)).requires_grad
    assert trace(net) == before


def test_trainable_parameters_are_the_ones_that_move(net):
    net[0].weight.requires_grad_(False)
    net.append(nn.Linear(8, 3))
    net[5].weight = net[4].weight  # tied
    found = trainable_parameters(net)
    assert list(found) == ["0.bias", "1.weight", "1.bias", "4.weight", "4.bias", "5.bias"]
    assert found["4.weight"] is net[4].weight


def test_what_is_observed_needs_not_be_observed_again(net):
    with observing(net):
        state = torch.get_rng_state()
        with observing_once(parts(net)):
            torch.rand(1)
        assert not torch.equal(torch.get_rng_state(), state), "the one outside puts it back"


@pytest.mark.parametrize("change", ["training", "grad", "no_grad", "autocast", "another"])
def test_what_has_changed_inside_is_observed_again(net, change):
    outer = {"no_grad": torch.no_grad, "autocast": lambda: torch.autocast("cpu", torch.bfloat16)}
    other = nn.Linear(2, 2)
    with observing(other if change == "another" else net):
        if change == "training":
            net.train()
        if change == "grad":
            next(net.parameters()).grad = torch.zeros_like(next(net.parameters()))
        with outer.get(change, nullcontext)():
            state = torch.get_rng_state()
            with observing_once(parts(net)):
                torch.rand(1)
                assert not net.training
                assert torch.is_grad_enabled()
                assert not torch.is_autocast_enabled("cpu")
                assert next(net.parameters()).grad is None
            assert torch.equal(torch.get_rng_state(), state)


def test_a_table_that_is_shortened_when_it_is_used_comes_back():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1), nn.Flatten(), nn.Linear(6, 2))
    before = net[0].weight.detach().clone()
    with observing(net):
        net(torch.tensor([[1, 2]]))
        assert not torch.equal(net[0].weight, before)
    assert torch.equal(net[0].weight, before)


def test_a_number_of_the_same_name_is_no_table():
    net = nn.Linear(3, 2)
    net.max_norm = 1.0  # as for clipping
    outer = nn.Sequential(net)
    outer.max_norm = 1.0
    with observing(outer):
        outer(torch.randn(2, 3))
