"""R_α against its definition by brute force, and its gradient against the closed form."""

import copy

import pytest
import torch
from torch import nn

from lightning_taskinfo.regularizers import LocalMinimumRegularizer, WeightSchedule
from lightning_taskinfo.regularizers.local_minimum import split_batch
from lightning_taskinfo.variational import add_weight_noise

ALPHA = 1e-3


def problem(dtype=torch.float64, extra=()):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), *extra, nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    batch = (torch.randn(12, 4, dtype=dtype), torch.randint(3, (12,)))
    return net, batch, lambda part: nn.functional.cross_entropy(net(part[0]), part[1])


def gradients(net, loss_fn, part):
    return torch.autograd.grad(loss_fn(part), list(net.parameters()))


def brute_force(net, loss_fn, batch, parts):
    """The definition, with the weights really moved."""
    value, gradient = 0.0, [torch.zeros_like(p) for p in net.parameters()]
    for part in split_batch(batch, parts):
        loss, g = loss_fn(part).item(), gradients(net, loss_fn, part)
        kept = copy.deepcopy(net.state_dict())
        with torch.no_grad():
            for p, step in zip(net.parameters(), g, strict=True):
                p -= ALPHA * step
        moved, g_moved = loss_fn(part).item(), gradients(net, loss_fn, part)
        net.load_state_dict(kept)
        value += (loss - moved) / parts
        gradient = [
            total + (a - b) / parts for total, a, b in zip(gradient, g, g_moved, strict=True)
        ]
    return value, gradient


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_value_and_gradient_equal_the_definition(parts):
    net, batch, loss_fn = problem()
    value, gradient = brute_force(net, loss_fn, batch, parts)
    regularizer = LocalMinimumRegularizer(weight=2.0, step_size=ALPHA, parts=parts)
    regularizer(net, loss_fn, batch).backward()
    assert regularizer.value.item() == pytest.approx(value, rel=1e-8)
    for p, expected in zip(net.parameters(), gradient, strict=True):
        torch.testing.assert_close(p.grad, 2 * expected, rtol=1e-6, atol=1e-12)


def test_over_alpha_it_tends_to_the_mean_squared_gradient_norm():
    net, batch, loss_fn = problem()
    expected = sum(
        sum(g.square().sum() for g in gradients(net, loss_fn, part)) / 3
        for part in split_batch(batch, 3)
    ).item()
    errors = []
    for alpha in (1e-2, 1e-3, 1e-4):
        regularizer = LocalMinimumRegularizer(step_size=alpha, parts=3)
        regularizer(net, loss_fn, batch)
        errors.append(abs(regularizer.value.item() / alpha - expected))
    assert errors[2] < 1e-3 * expected
    assert errors[0] > 5 * errors[1] > 25 * errors[2]  # the error falls with alpha


def test_a_hundred_steps_lower_it():
    def train(weight: float) -> float:
        net, batch, loss_fn = problem(torch.float32)
        regularizer = LocalMinimumRegularizer(weight=weight, parts=3)
        reader = LocalMinimumRegularizer(weight=1.0, parts=3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(100):
            optimizer.zero_grad()
            (loss_fn(batch) + regularizer(net, loss_fn, batch)).backward()
            optimizer.step()
        reader(net, loss_fn, batch)
        return reader.value.item()

    assert train(weight=3000.0) < 0.9 * train(weight=0.0)


def test_batch_norm_generators_and_grads_are_left_alone():
    net, batch, loss_fn = problem(torch.float32, extra=(nn.BatchNorm1d(6), nn.Dropout(0.5)))
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    LocalMinimumRegularizer(parts=3)(net, loss_fn, batch)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_both_losses_see_the_same_dropout_masks():
    """With different masks the difference of the losses would be noise of order one, not of order alpha."""
    net, batch, loss_fn = problem(extra=(nn.Dropout(0.5),))
    regularizer = LocalMinimumRegularizer(step_size=1e-6, parts=3)
    regularizer(net, loss_fn, batch)
    assert 0 < regularizer.value.item() < 1e-4


def test_both_losses_see_the_same_weight_noise_and_leave_it_alone():
    net, batch, loss_fn = problem()
    twin = copy.deepcopy(add_weight_noise(net, std=0.5))
    regularizer = LocalMinimumRegularizer(step_size=1e-6, parts=3)
    regularizer(net, loss_fn, batch)
    assert 0 < regularizer.value.item() < 1e-4
    assert torch.equal(net(batch[0]), twin(batch[0]))


def test_bf16_autocast_does_not_turn_the_sign():
    net, batch, loss_fn = problem(torch.float32)
    inside, outside = (LocalMinimumRegularizer(parts=3) for _ in range(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside(net, loss_fn, batch)
    outside(net, loss_fn, batch)
    assert torch.equal(inside.value, outside.value)
    assert inside.value > 0


def test_a_submodule_under_two_names_and_a_tied_weight_are_moved_and_put_back():
    inner, batch, _ = problem()
    net = nn.ModuleDict({"inner": inner, "again": inner[0], "tied": nn.Linear(4, 6).double()})
    net["tied"].weight = inner[0].weight

    def loss_fn(part):
        return nn.functional.cross_entropy(inner(part[0]) + net["tied"](part[0])[:, :3], part[1])

    held = [inner[0].weight, inner[0].bias, inner[2].weight]
    value, gradient = brute_force(net, loss_fn, batch, 3)
    regularizer = LocalMinimumRegularizer(weight=1.0, step_size=ALPHA, parts=3)
    regularizer(net, loss_fn, batch).backward()
    assert regularizer.value.item() == pytest.approx(value, rel=1e-8)
    assert all(
        a is b
        for a, b in zip(held, (net["tied"].weight, net["again"].bias, inner[2].weight), strict=True)
    )
    for p, expected in zip(net.parameters(), gradient, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-6, atol=1e-12)


def test_it_works_without_gradients_around_it():
    net, batch, loss_fn = problem()
    regularizer = LocalMinimumRegularizer(parts=3)
    with torch.no_grad():
        regularizer(net, loss_fn, batch)
    assert regularizer.value > 0


def test_starts_at_its_epoch():
    net, batch, loss_fn = problem()
    regularizer = LocalMinimumRegularizer(weight=WeightSchedule(10.0, start=2), parts=3)
    assert [regularizer(net, loss_fn, batch, epoch=epoch).item() > 0 for epoch in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_it_may_use_a_compiled_model():
    torch._dynamo.reset()
    net, batch, loss_fn = problem()
    compiled = torch.compile(net, backend="aot_eager")
    regularizer, plain = (LocalMinimumRegularizer(parts=3) for _ in range(2))
    compiled(batch[0])
    regularizer(net, lambda part: nn.functional.cross_entropy(compiled(part[0]), part[1]), batch)
    plain(net, loss_fn, batch)
    torch.testing.assert_close(regularizer.value, plain.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_refuses_half_precision_weights(dtype):
    net, batch, loss_fn = problem(dtype)
    with pytest.raises(
        ValueError, match=f"must keep its weights in float32 or float64, got {dtype} for `0.weight`"
    ):
        LocalMinimumRegularizer()(net, loss_fn, batch)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"step_size": 0.0}, r"`step_size` must be positive, got 0\.0"),
        ({"parts": 0}, "`parts` must be at least 1, got 0"),
    ],
)
def test_refuses_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        LocalMinimumRegularizer(**arguments)


def test_refuses_a_model_without_trainable_parameters():
    with pytest.raises(ValueError, match="`model` must have trainable parameters, got none"):
        LocalMinimumRegularizer()(nn.ReLU(), torch.sum, torch.zeros(8))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (torch.zeros(3, 2), "`batch` must hold at least `parts` = 4 samples, got 3"),
        (
            (torch.zeros(8), torch.zeros(9)),
            r"`batch` must hold tensors with the same, positive number of samples along axis 0, got \[8, 9\]",
        ),
        (
            {"name": "x"},
            "`batch` must be a tensor, or a tuple, list or dict of tensors, got dict without",
        ),
    ],
)
def test_refuses_batches(batch, match):
    with pytest.raises(ValueError, match=match):
        split_batch(batch, 4)


def test_parts_are_equal_and_keep_the_structure():
    parts = split_batch({"x": torch.arange(11), "pair": [torch.arange(11), "name"]}, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all(
        part["pair"][1] == "name" and torch.equal(part["pair"][0], part["x"]) for part in parts
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda loss: loss.expand(4), r"torch.Size\(\[4\]\)"),
        (lambda loss: loss.view(1), r"torch.Size\(\[1\]\)"),
        (lambda loss: loss.item(), "float"),
        (lambda loss: {"loss": loss}, "dict"),
    ],
)
def test_refuses_a_function_whose_loss_is_no_scalar(change, found):
    net, batch, loss_fn = problem()
    with pytest.raises(
        ValueError, match=rf"`loss_fn\(part\)` must be a scalar tensor, got {found}"
    ):
        LocalMinimumRegularizer(parts=3)(net, lambda part: change(loss_fn(part)), batch)


@pytest.mark.parametrize("start", [0, 5])  # also where the penalty is not due yet
def test_refuses_a_loss_in_place_of_its_function(start):
    net, batch, loss_fn = problem()
    with pytest.raises(TypeError, match="`loss_fn` must be a function of a batch, got Tensor"):
        LocalMinimumRegularizer(weight=WeightSchedule(1.0, start=start))(net, loss_fn(batch), batch)


def test_a_batch_that_is_too_small_is_refused_before_the_start():
    """And not hours later, in the last batch of the first epoch with a weight."""
    net, batch = nn.Linear(3, 2), (torch.randn(2, 3), torch.tensor([0, 1]))
    regularizer = LocalMinimumRegularizer(weight=WeightSchedule(1.0, start=5), parts=3)

    def loss_fn(part):
        return nn.functional.cross_entropy(net(part[0]), part[1])

    with pytest.raises(
        ValueError, match=r"at least `parts` = 3 samples, got 2; .*`drop_last=True`"
    ):
        regularizer(net, loss_fn, batch)
