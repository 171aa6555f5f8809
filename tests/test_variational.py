"""Noisy weights: the right divergence, the known posterior, and a plain module before and after."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from lightning_taskinfo.variational import (
    add_weight_noise,
    noisy_weights,
    plain_state_dict,
    remove_weight_noise,
    sampling,
    weight_kl,
)


class Everything(nn.Module):
    """One layer of each kind that a weight can live in; the attention reads its weights several times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 4, 3)
        self.batch_norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        h = self.embedding(tokens)  # [B, T, 8]
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        h = self.batch_norm(self.conv(h.mT)) * self.scale  # [B, 4, T - 2]
        return self.head(h.mean(-1))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Everything()


@pytest.fixture
def tokens():
    return torch.randint(5, (6, 7), generator=torch.Generator().manual_seed(1))


def test_every_kind_of_layer_is_noisy_and_gets_a_gradient(net, tokens):
    names = [name for name, _ in net.named_parameters()]
    add_weight_noise(net, std=0.1)
    assert sorted(name for name, *_ in noisy_weights(net)) == sorted(names)
    net(tokens).logsumexp(-1).sum().backward()
    for name, mean, noise in noisy_weights(net):
        assert mean.grad is not None, name
        assert noise.log_variance.grad.abs().sum() > 0, name


def test_kl_equals_torch_distributions(net):
    add_weight_noise(net, std=0.02, prior_std=0.3, prior_center="zero")
    expected = 0.0
    for _, mean, noise in noisy_weights(net):
        with torch.no_grad():
            noise.log_variance.add_(
                torch.randn(mean.shape, generator=torch.Generator().manual_seed(2))
            )
        Q = Normal(mean.double(), (0.5 * noise.log_variance.double()).exp())
        expected += kl_divergence(Q, Normal(torch.zeros_like(mean).double(), 0.3)).sum()
    torch.testing.assert_close(weight_kl(net).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("prior", ["initial", "zero", "checkpoint"])
def test_the_prior_is_centred_where_it_was_asked_to_be(net, prior):
    pretrained = {name: p.detach() + 1 for name, p in net.named_parameters()}
    k = sum(p.numel() for p in net.parameters())
    squares = {
        "initial": 0.0,
        "zero": sum(p.square().sum().item() for p in net.parameters()),
        "checkpoint": k,
    }
    add_weight_noise(
        net, std=0.5, prior_std=0.5, prior_center=pretrained if prior == "checkpoint" else prior
    )
    assert weight_kl(net).item() == pytest.approx(squares[prior] / (2 * 0.25), rel=1e-5)


def test_one_draw_a_forward_and_another_in_the_next(net, tokens):
    add_weight_noise(net, std=0.5)
    seen = []
    net.attention.register_forward_pre_hook(
        lambda m, args: seen.append((m.in_proj_weight, m.in_proj_weight))
    )
    for _ in range(2):
        net(tokens)
    (first, again), (second, _) = seen
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(
        net.head(torch.ones(1, 4)), net.head(torch.ones(1, 4))
    )  # a layer called by itself


def test_the_noise_is_released_when_a_forward_fails(net):
    add_weight_noise(net)
    with pytest.raises(IndexError):
        net(torch.tensor([[99]]))
    assert all(noise._held.depth == 0 and not noise._held.seeds for *_, noise in noisy_weights(net))


def test_samples_have_the_mean_and_the_deviation_they_should():
    layer = add_weight_noise(nn.Linear(1, 1, bias=False), std=0.5)
    with torch.no_grad():
        draws = torch.stack([layer.weight for _ in range(2000)]).flatten()
    mean = layer.parametrizations.weight.original.item()
    assert abs(draws.mean() - mean) < 4 * 0.5 / math.sqrt(2000)
    assert abs(draws.std() - 0.5) < 4 * 0.5 / math.sqrt(2 * 2000)


def test_two_forwards_may_wait_for_one_backward():
    layer, x = add_weight_noise(nn.Linear(2, 1, bias=False), std=0.5), torch.ones(1, 2)
    first, second = layer(x), layer(x)
    (first + second).sum().backward()
    ((_, mean, noise),) = noisy_weights(layer)
    shifts = (
        first.item() + second.item() - 2 * mean.sum().item()
    )  # of both draws, over both weights
    assert first.item() != second.item()
    assert noise.log_variance.grad.sum().item() == pytest.approx(0.5 * shifts, abs=1e-6)


class Reference(nn.Module):
    """A noisy linear layer without bias by the plain formulas, with the noise of a layer made noisy."""

    def __init__(self, layer):
        super().__init__()
        ((_, mean, noise),) = noisy_weights(layer)
        self.mean, self.log_variance = (
            nn.Parameter(p.detach().clone()) for p in (mean, noise.log_variance)
        )
        self.prior, self.noise = mean.detach().clone(), copy.deepcopy(noise)

    def forward(self, x):
        self.noise.log_variance.data.zero_()
        epsilon = self.noise.train()(torch.zeros_like(self.mean)).detach()
        return x @ (self.mean + (0.5 * self.log_variance).exp() * epsilon).T

    def kl(self):
        Q = Normal(self.mean, (0.5 * self.log_variance).exp())
        return kl_divergence(Q, Normal(self.prior, 0.1)).sum()


def test_training_is_that_of_the_plain_formulas():
    """Two forwards for each loss, and two backward passes into one gradient."""
    torch.manual_seed(0)
    layer = add_weight_noise(nn.Linear(256, 128, bias=False), std=0.02)
    reference = Reference(layer)
    ((_, mean, noise),) = noisy_weights(layer)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (layer, reference)]
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, other in torch.randn(2, 2, 8, 256):  # accumulated
            losses = layer(x).square().mean() + layer(other).sin().mean()
            (losses + 1e-4 * weight_kl(layer)).backward()
            losses = reference(x).square().mean() + reference(other).sin().mean()
            (losses + 1e-4 * reference.kl()).backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, plain in ((mean, reference.mean), (noise.log_variance, reference.log_variance)):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_a_read_without_gradients_and_the_divergence_see_the_same_draw():
    layer = add_weight_noise(nn.Linear(3, 2, bias=False), std=0.5)
    seen = []

    def look(module, args):
        with torch.no_grad():
            seen.append(module.weight)
        seen.append(module.weight)

    layer.register_forward_pre_hook(look)
    layer(torch.ones(1, 3)).sum().backward()
    assert torch.equal(seen[0], seen[1])
    assert not seen[0].requires_grad
    assert seen[1].requires_grad


def test_the_divergence_may_be_asked_for_at_any_time(net, tokens):
    """Before a forward, after it, twice, after the weights moved, and with its own backward pass."""
    add_weight_noise(net, std=0.3, prior_center="zero")
    parameters = [p for _, mean, noise in noisy_weights(net) for p in (mean, noise.log_variance)]
    expected = torch.autograd.grad(weight_kl(net), parameters)
    net(tokens).sum().backward()
    for _ in range(2):
        for found, plain in zip(
            torch.autograd.grad(weight_kl(net), parameters), expected, strict=True
        ):
            torch.testing.assert_close(found, plain)
    with torch.no_grad():
        assert not weight_kl(net).requires_grad
    output = net(tokens)
    with torch.no_grad():
        for p in parameters:
            p.add_(0.1)
    moved = torch.autograd.grad(weight_kl(net), parameters)
    torch.testing.assert_close(weight_kl(net), weight_kl(copy.deepcopy(net)))
    assert not any(torch.allclose(a, b) for a, b in zip(moved, expected, strict=True))
    output.sum().backward()  # needs no more than was kept


def test_a_function_transform_sees_the_same_draw():
    layer, x = add_weight_noise(nn.Linear(3, 2), std=0.5), torch.ones(1, 3)
    twin = copy.deepcopy(layer)
    layer(x).sum().backward()
    gradients = torch.func.grad(lambda p: torch.func.functional_call(twin, p, x).sum())(
        dict(twin.named_parameters())
    )
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_a_draw_in_inference_mode_may_come_first():
    layer, x = add_weight_noise(nn.Linear(2, 1)).double(), torch.ones(1, 2).double()
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert all(noise.log_variance.grad is not None for *_, noise in noisy_weights(layer))


def test_two_weights_of_one_model_have_different_noise():
    net = add_weight_noise(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), std=1.0)
    noise = [(layer.weight - layer.parametrizations.weight.original).detach() for layer in net]
    assert not torch.allclose(*noise)


def test_the_global_generator_is_left_alone(net, tokens):
    add_weight_noise(net)
    before = torch.get_rng_state()
    net(tokens)
    assert torch.equal(torch.get_rng_state(), before)


def test_eval_uses_the_means_and_samples_on_request(net, tokens):
    plain = copy.deepcopy(net).eval()(tokens)
    add_weight_noise(net, std=0.5).eval()
    assert torch.equal(net(tokens), plain)
    with sampling(net):
        assert not torch.equal(net(tokens), plain)
    assert torch.equal(net(tokens), plain)
    with sampling(net.train(), enabled=False):
        assert torch.equal(net(tokens), copy.deepcopy(net)(tokens))


def test_zero_deviation_is_the_plain_model(net, tokens):
    plain = copy.deepcopy(net)
    add_weight_noise(net, std=0.0)
    assert torch.equal(net(tokens), plain(tokens))
    net(tokens).sum().backward()
    plain(tokens).sum().backward()
    means = {name: mean for name, mean, _ in noisy_weights(net)}
    for name, p in plain.named_parameters():
        torch.testing.assert_close(means[name].grad, p.grad, msg=name)


def test_plain_checkpoints_go_in_and_come_out(net, tokens):
    other = Everything()
    noisy = add_weight_noise(Everything(), std=0.3)
    noisy.load_state_dict(other.state_dict())
    assert torch.equal(noisy.eval()(tokens), other.eval()(tokens))
    assert all(
        noise.log_variance.allclose(torch.tensor(2 * math.log(0.3)))
        for *_, noise in noisy_weights(noisy)
    )
    net.load_state_dict(plain_state_dict(noisy))
    assert torch.equal(net.eval()(tokens), other(tokens))


def test_a_noisy_checkpoint_goes_on_with_the_same_noise(net, tokens):
    add_weight_noise(net, std=0.3, prior_center="zero")
    net(tokens)
    reloaded = add_weight_noise(Everything(), std=0.1, seed=5)
    reloaded.load_state_dict(net.state_dict())
    assert torch.equal(net(tokens), reloaded(tokens))
    assert torch.equal(weight_kl(net), weight_kl(reloaded))


def test_a_deep_copy_is_independent(net, tokens):
    add_weight_noise(net, std=0.3)
    twin = copy.deepcopy(net)
    assert torch.equal(net(tokens), twin(tokens))
    with torch.no_grad():
        twin.head.weight = torch.zeros(3, 4)
    assert not torch.equal(net(tokens), twin(tokens))
    plain = remove_weight_noise(twin)
    assert type(plain.head) is nn.Linear
    assert type(net.head) is not nn.Linear


def test_undoing_gives_a_plain_module_back(net, tokens):
    plain = copy.deepcopy(net)
    add_weight_noise(net, std=0.3)
    remove_weight_noise(net)
    assert net.state_dict().keys() == plain.state_dict().keys()
    assert all(type(a) is type(b) for a, b in zip(net.modules(), plain.modules(), strict=True))
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or m._load_state_dict_pre_hooks
        for m in net.modules()
    )
    assert not any(m._forward_hooks_always_called for m in net.modules())
    assert torch.equal(net.eval()(tokens), plain.eval()(tokens))


@pytest.mark.parametrize("beta", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_reaches_the_posterior_of_bayesian_linear_regression(beta):
    """Orthogonal inputs, unit noise, prior N(0, 1): the posterior of C_beta is diagonal, with a closed form."""
    g = torch.Generator().manual_seed(0)
    N, D, scales = 40, 3, torch.tensor([1.0, 2.0, 0.5])
    X = torch.linalg.qr(torch.randn(N, D, generator=g))[0] * math.sqrt(N) * scales
    y = X @ torch.tensor([1.0, -0.5, 2.0]) + torch.randn(N, generator=g)
    variance = beta / (N * scales.square() + beta)
    mean = variance / beta * (X.T @ y)
    model = add_weight_noise(
        nn.Linear(D, 1, bias=False), std=0.05, prior_center="zero", prior_std=1.0
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    iterates = []
    for _ in range(1000):
        loss = 0.5 * (model(X).squeeze(1) - y).square().mean() + beta / N * weight_kl(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        iterates += [
            (m.detach()[0].clone(), noise.log_variance.detach()[0].exp())
            for _, m, noise in noisy_weights(model)
        ]
    learned_mean, learned_variance = (
        torch.stack(values[-700:]).mean(0) for values in zip(*iterates, strict=True)
    )
    assert ((learned_mean - mean).abs() / variance.sqrt()).max() < 0.05
    torch.testing.assert_close(learned_variance.sqrt(), variance.sqrt(), rtol=0.05, atol=0)


def test_a_compiled_model_draws_anew_without_compiling_anew(net, tokens):
    torch._dynamo.reset()
    add_weight_noise(net, std=0.3)
    eager = copy.deepcopy(net)
    compiled = torch.compile(net, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            torch.testing.assert_close(compiled(tokens), eager(tokens))


def test_frozen_weights_stay_plain(net):
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    add_weight_noise(net)
    assert [name for name, *_ in noisy_weights(net)] == ["head.weight", "head.bias"]


def test_activation_checkpointing_is_refused():
    layer = add_weight_noise(nn.Linear(2, 2))
    output = checkpoint(layer, torch.ones(1, 2, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="inside a backward pass"):
        output.sum().backward()


def tied():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    return nn.Sequential(a, b)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (tied, "must not have a trainable `0.weight`: it is tied to `1.weight`"),
        (
            lambda: nn.LSTM(2, 2),
            "must not have a trainable `weight_ih_l0`: it is in a recurrent layer",
        ),
        (
            lambda: spectral_norm(nn.Linear(2, 2, bias=False)),
            "original`: it is already parametrized",
        ),
        (
            lambda: add_weight_noise(nn.Linear(2, 2)),
            "it is already parametrized, as noisy weights are: `remove_weight_noise` frees them",
        ),
        (lambda: nn.ReLU(), "`model` must have at least one trainable parameter, got none"),
    ],
)
def test_refuses_models(make, match):
    with pytest.raises(ValueError, match=match):
        add_weight_noise(make())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"std": -0.1}, r"`std` must be non-negative and finite, got -0\.1\."),
        ({"prior_std": 0.0}, r"`prior_std` must be positive, got 0\.0\."),
        (
            {"prior_center": "one"},
            "`prior_center` must be 'initial', 'zero' or a state dict, got 'one'",
        ),
        (
            {"prior_center": {"weight": torch.zeros(2, 2)}},
            r"`prior_center` must hold `bias` with shape \(2,\), got n",
        ),
        (
            {"prior_center": {"weight": torch.zeros(3), "bias": torch.zeros(2)}},
            r"`weight` with shape \(2, 2\), got \(3,",
        ),
    ],
)
def test_refuses_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        add_weight_noise(nn.Linear(2, 2), **arguments)


def test_refuses_the_kl_of_a_plain_model():
    with pytest.raises(ValueError, match="`model` has no noisy weights"):
        weight_kl(nn.Linear(2, 2))


@pytest.mark.parametrize("model", [None, {}])
def test_refuses_the_kl_of_no_model(model):
    with pytest.raises(TypeError, match=f"`model` must be a Module, got {type(model).__name__}"):
        weight_kl(model)


def test_parts_of_a_model_may_become_noisy_one_by_one():
    net = nn.Sequential(add_weight_noise(nn.Linear(2, 2)), nn.Linear(2, 2))
    add_weight_noise(net[1])
    assert len([*noisy_weights(net)]) == 4
    with pytest.raises(ValueError, match=r"weight.original`: it is already parametrized, as noisy"):
        add_weight_noise(net)
