"""The critic is trained beside the network, seen by nobody else, and the network's features tell less."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo.functional.discrepancy import jensen_shannon, smile
from lightning_taskinfo.regularizers import MutualInformation
from lightning_taskinfo.regularizers.critics import SeparableCritic, tower

D, F = 4, 3
OBJECTIVES = ["jensen_shannon", "donsker_varadhan", "mine", "nwj", "info_nce"]


def pairs(B: int = 64, seed: int = 0, rho: float = 0.9) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(B, D, generator=g), torch.randn(B, F, generator=g)
    return x, rho * x[:, :F] + math.sqrt(1 - rho**2) * noise


def small_critic(seed: int = 0) -> nn.Module:
    return SeparableCritic((D,), F, hidden=32, embedding=8, seed=seed)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_critic_climbs_whatever_it_follows(objective):
    regularizer = MutualInformation(
        (D,),
        F,
        critic=small_critic(),
        objective=objective,
        learning_rate=3e-3,
        critic_steps=1,
    )
    readings = []
    for step in range(100):
        regularizer(*pairs(B=32, seed=step))
        readings.append(regularizer.value.item())
    assert all(math.isfinite(value) for value in readings)
    assert sum(readings[-10:]) / 10 > sum(readings[:10]) / 10 + 0.5


def test_one_critic_step_is_one_adam_step_on_the_objective():
    regularizer = MutualInformation((D,), F, learning_rate=1e-3, critic_steps=1)
    critic = copy.deepcopy(regularizer.critic).requires_grad_()
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for step in range(3):
        x, z = pairs(seed=step)
        optimizer.zero_grad()
        (-jensen_shannon(critic(x, z))).backward()
        optimizer.step()
        penalty = regularizer(x, z)
        expected = critic(x, z)
        torch.testing.assert_close(regularizer.value, smile(expected).detach())
        objective = jensen_shannon(expected)
        assert penalty.item() == pytest.approx(0.1 * objective.item(), rel=1e-5)
    for p, q in zip(regularizer.critic.parameters(), critic.parameters(), strict=True):
        torch.testing.assert_close(p, q.detach())


def test_nobody_else_sees_the_critic():
    net = nn.ModuleList([nn.Linear(D, F), MutualInformation((D,), F)])
    x, _ = pairs()
    net[1](x, net[0](x)).backward()
    assert not any(p.requires_grad or p.grad is not None for p in net[1].parameters())
    assert net[0].weight.grad.abs().sum() > 0


def test_the_gradient_pushes_the_estimate_down():
    x, z = pairs()
    regularizer = MutualInformation(
        (D,), F, weight=1.0, critic=small_critic(), critic_steps=2, learning_rate=3e-3
    )
    for step in range(100):
        regularizer(*pairs(seed=step))
    regularizer.eval()
    z.requires_grad_()
    regularizer(x, z).backward()
    before = regularizer.value
    regularizer(x, z.detach() - 5.0 * z.grad)
    assert regularizer.value < before


def test_a_hundred_steps_lower_the_information():
    """Read by a critic of its own, trained for long on the network that results."""

    def information_after(penalty: MutualInformation | None) -> float:
        torch.manual_seed(0)
        net, head = nn.Linear(D, F), nn.Linear(F, 2)
        optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=0.02)
        noise = torch.Generator().manual_seed(1)
        noisy = lambda x: net(x) + 0.3 * torch.randn(len(x), F, generator=noise)  # noqa: E731
        for step in range(100):
            x, _ = pairs(seed=step)
            z = noisy(x)
            loss = nn.functional.cross_entropy(head(z), (x[:, 0] > 0).long())
            if penalty is not None:
                loss = loss + penalty(x, z, epoch=step // 10)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reader = MutualInformation(
            (D,), F, critic=small_critic(seed=7), critic_steps=4, learning_rate=5e-3
        )
        values = []
        for step in range(80):
            x, _ = pairs(seed=1000 + step)
            reader(x, noisy(x).detach())
            values.append(reader.value.item())
        return sum(values[-20:]) / 20

    penalty = MutualInformation(
        (D,),
        F,
        weight=3.0,
        critic=small_critic(),
        critic_steps=10,
        learning_rate=3e-3,
    )
    assert information_after(penalty) < information_after(None) - 0.5


def test_two_penalties_may_wait_for_one_backward():
    """The critic's second step must not spoil the graph of the first penalty."""
    regularizer = MutualInformation((D,), F)
    x, z = pairs()
    z.requires_grad_()
    (regularizer(x, z) + regularizer(x, z)).backward()
    assert z.grad.isfinite().all()


def test_a_reloaded_critic_goes_on_exactly():
    whole, resumed = (MutualInformation((D,), F, objective="mine", seed=seed) for seed in (0, 1))
    for step in range(3):
        whole(*pairs(seed=step))
    resumed.load_state_dict(whole.state_dict())
    for step in range(3, 6):
        assert torch.equal(whole(*pairs(seed=step)), resumed(*pairs(seed=step)))


def test_a_checkpoint_of_it_is_read_safely(tmp_path):
    regularizer = MutualInformation((D,), F)
    regularizer(*pairs())
    torch.save(regularizer.state_dict(), tmp_path / "critic.pt")
    MutualInformation((D,), F).load_state_dict(
        torch.load(tmp_path / "critic.pt", weights_only=True)
    )


def test_a_deep_copy_has_a_critic_and_an_optimizer_of_its_own():
    regularizer = MutualInformation((D,), F)
    regularizer(*pairs())
    twin = copy.deepcopy(regularizer)
    assert torch.equal(regularizer(*pairs(seed=1)), twin(*pairs(seed=1)))
    twin(*pairs(seed=2))
    assert not torch.equal(regularizer.eval()(*pairs(seed=3)), twin.eval()(*pairs(seed=3)))


def test_eval_mode_does_not_train_the_critic():
    regularizer = MutualInformation((D,), F).eval()
    with torch.inference_mode():
        first = regularizer(*pairs())
        assert torch.equal(first, regularizer(*pairs()))


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    MutualInformation((D,), F)(*pairs())
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_does_not_reach_it():
    inside, outside = MutualInformation((D,), F), MutualInformation((D,), F)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = inside(*pairs())
    assert torch.equal(value, outside(*pairs()))


def test_features_that_overflow_once_do_not_spoil_the_critic():
    regularizer, clean = (
        MutualInformation((D,), F, objective="mine"),
        MutualInformation((D,), F, objective="mine"),
    )
    x, z = pairs()
    regularizer(x, z), clean(x, z)
    assert not regularizer(x, torch.full_like(z, torch.inf)).isfinite()
    assert torch.equal(regularizer(x, z), clean(x, z))


def test_images_get_a_convolutional_tower_and_odd_sizes_work():
    assert any(isinstance(layer, nn.Conv2d) for layer in tower((1, 28, 28), 8, 4))
    critic = SeparableCritic((3, 7, 5), F)
    assert critic(torch.zeros(2, 3, 7, 5), torch.zeros(2, F)).shape == (2, 2)


def test_a_critic_of_ones_own():
    class Dot(nn.Module):
        def __init__(self):
            super().__init__()
            self.A = nn.Parameter(torch.zeros(D, F))

        def forward(self, x, z):
            return x @ self.A @ z.T

    regularizer = MutualInformation((D,), F, critic=Dot())
    regularizer(*pairs())
    assert regularizer.critic.A.abs().sum() > 0


class OneTower(nn.Module):
    """Holds one module under two names, whose weight is computed anew in each forward pass."""

    def __init__(self):
        super().__init__()
        self.f = nn.utils.spectral_norm(nn.Linear(F, 2))
        self.g = self.f

    def forward(self, x, z):
        return self.f(x[:, :F]) @ self.g(z).T


def test_a_critic_may_compute_its_weights_and_hold_a_module_twice():
    regularizer = MutualInformation((D,), F, critic=OneTower())
    weight = regularizer.critic.f.weight_orig
    x, z = pairs()
    z.requires_grad_()
    (regularizer(x, z) + regularizer(x, z)).backward()
    assert z.grad.isfinite().all()
    assert regularizer.critic.f.weight_orig is weight
    assert not weight.requires_grad


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"objective": "smile"}, "`objective` must be one of .* got 'smile'"),
        ({"objective": "js"}, "`objective` must be one of .* got 'js'"),
        ({"learning_rate": -1.0}, r"`learning_rate` must be positive, got -1\.0"),
        ({"critic_steps": 0}, "`critic_steps` must be at least 1, got 0"),
        ({"feature_dim": 0}, "`feature_dim` must be at least 1, got 0"),
    ],
)
def test_refuses_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        MutualInformation((D,), **{"feature_dim": F, **arguments})


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (lambda x, z: (x[:1], z[:1]), "`inputs` must hold at least 2 samples, got 1"),
        (
            lambda x, z: (None, z),
            "`inputs` must be a tensor, got NoneType: does the batch hold unlabeled inputs",
        ),
        (lambda x, z: (x, z[:, 1:]), r"`features` must have shape \[64, 3\], got \(64, 2\)"),
        (lambda x, z: (x * torch.nan, z), "`inputs` must be finite, got 256 values"),
    ],
)
def test_refuses_batches(batch, match):
    with pytest.raises(ValueError, match=match):
        MutualInformation((D,), F)(*batch(*pairs()))
