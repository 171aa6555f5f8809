"""A fresh critic on held-out samples, where the answer is known."""

import math

import pytest
import torch
from torch import nn

from lightning_taskinfo.functional.discrepancy import smile
from lightning_taskinfo.regularizers import estimate_mutual_information
from lightning_taskinfo.regularizers.critics import SeparableCritic, _read


def gaussians(nats: float, N: int, d: int, seed: int = 0):
    rho = math.sqrt(1 - math.exp(-2 * nats / d))
    g = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(N, d, generator=g), torch.randn(N, d, generator=g)
    return x, rho * x + math.sqrt(1 - rho**2) * noise


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_independent_variables_share_nothing(seed):
    x, z = gaussians(0.0, N=1000, d=5, seed=seed)
    assert abs(estimate_mutual_information(x, z, steps=200, seed=seed).nats) < 0.1


def log_ratio(x, z, nats: float):
    """``log p(x, z) / (p(x) p(z))`` of all pairs of correlated Gaussians: the best critic there is."""
    rho_squared = 1 - math.exp(-2 * nats / x.shape[1])
    squares = (math.sqrt(rho_squared) * x[:, None] - z[None]).square().sum(-1) / (1 - rho_squared)
    return 0.5 * (z.square().sum(-1)[None] - squares) + nats


class Exact(nn.Module):
    """The best critic for inputs that were standardised on the way: it undoes that."""

    def __init__(self, x, z, nats: float) -> None:
        super().__init__()
        self.moments = [(v.mean(0), v.std(0)) for v in (x, z)]
        self.nats, self.scale = nats, nn.Parameter(torch.ones(()))

    def forward(self, x, z):
        x, z = (v * std + mean for v, (mean, std) in zip((x, z), self.moments, strict=True))
        return self.scale * log_ratio(x, z, self.nats)


def split(x, z, seed: int = 0):
    """The parts that a critic is trained on and read on."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, _, test = order.tensor_split([int(0.6 * len(x)), int(0.8 * len(x))])
    return [(x[rows], z[rows]) for rows in (train, test)]


@pytest.mark.parametrize("nats", [0.5, 2.0])
def test_the_optimal_critic_is_read_as_the_density_ratio_says(nats):
    """Its reading, without training, is SMILE of the known log-ratio on the same test samples."""
    x, z = gaussians(nats, N=2000, d=4)
    train, test = split(x, z)
    estimate = estimate_mutual_information(
        x, z, critic=Exact(*train, nats), steps=1, learning_rate=1e-12
    )
    assert estimate.nats == pytest.approx(smile(log_ratio(*test, nats)).item(), abs=1e-4)
    assert estimate.samples == 400
    assert abs(estimate.nats - nats) < 4 * estimate.standard_error
    pointwise = log_ratio(*test, nats).diagonal()  # the reading is its mean, nearly
    assert estimate.standard_error == pytest.approx(pointwise.std().item() / 20, rel=0.6)


@pytest.mark.parametrize("slope", [0.5, 1.0])  # of a critic that reads too little, and of the best
def test_the_standard_error_is_the_spread_over_test_sets(slope):
    nats, count = 2.0, 200
    sets = [gaussians(nats, N=100, d=4, seed=seed) for seed in range(count)]
    found = [_read(slope * log_ratio(*pair, nats)) for pair in sets]
    spread = torch.tensor([estimate.nats for estimate in found]).std()
    told = torch.tensor([estimate.standard_error for estimate in found]).square().mean().sqrt()
    assert abs(told / spread - 1) < 4 / math.sqrt(2 * count)


class Quadratic(nn.Module):
    """A critic that holds the log-ratio of correlated Gaussians, begun at zero: training has no excuse."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.product = nn.Parameter(torch.zeros(d, d))
        self.squares = nn.ParameterList([torch.zeros(d), torch.zeros(d)])
        self.constant = nn.Parameter(torch.zeros(()))

    def forward(self, x, z):
        rows, columns = (
            v.square() @ weights for v, weights in zip((x, z), self.squares, strict=True)
        )
        return x @ self.product @ z.T + rows[:, None] + columns[None] + self.constant


@pytest.mark.parametrize("nats", [2.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_trained_critic_reads_what_the_optimal_one_reads_on_the_same_samples(nats):
    x, z = gaussians(nats, N=10000, d=5)
    _, test = split(x, z)
    estimate = estimate_mutual_information(x, z, critic=Quadratic(5), steps=600, learning_rate=0.02)
    assert estimate.samples == 2000
    assert abs(estimate.nats - smile(log_ratio(*test, nats)).item()) < 2 * estimate.standard_error
    assert abs(estimate.nats - nats) < 4 * estimate.standard_error


@pytest.mark.slow
def test_a_general_critic_reads_no_more_than_the_optimal_one_and_more_with_more_steps():
    """It does not hold the log-ratio, so it reads too little; by how much is a matter of steps."""
    x, z = gaussians(2.0, N=20000, d=20)
    _, (x_test, z_test) = split(x, z)
    best = smile(log_ratio(x_test[:2048], z_test[:2048], 2.0)).item()
    short, long = (estimate_mutual_information(x, z, steps=steps) for steps in (100, 2000))
    assert long.samples == 2048
    assert short.nats + 4 * short.standard_error < long.nats < best + 4 * long.standard_error


def test_scale_and_shift_do_not_matter():
    x, z = gaussians(1.0, N=1000, d=2)
    plain = estimate_mutual_information(x, z, steps=100)
    mapped = estimate_mutual_information(1000 * x + 7, 1e-3 * z - 1, steps=100)
    assert mapped.nats == pytest.approx(plain.nats, abs=1e-2)
    assert plain.nats > 0.3


def test_constant_features_share_nothing():
    x, _ = gaussians(0.0, N=200, d=2)
    assert estimate_mutual_information(x, torch.ones(200, 3), steps=50).nats == pytest.approx(
        0.0, abs=0.05
    )


def test_the_same_seed_gives_the_same_number_and_leaves_generator_and_critic_alone():
    x, z = gaussians(1.0, N=300, d=2)
    critic = SeparableCritic((2,), 2)
    before, state = critic.state_dict(), torch.get_rng_state()
    kept = {name: value.clone() for name, value in before.items()}
    first, second = (estimate_mutual_information(x, z, critic=critic, steps=40) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(kept[name], value) for name, value in critic.state_dict().items())


@pytest.mark.parametrize(
    ("x", "z", "match"),
    [
        (
            torch.zeros(39, 2),
            torch.zeros(39, 2),
            r"`inputs` and `features` must hold equally many samples, at least 40, got 39 and 39",
        ),
        (
            torch.zeros(50, 2),
            torch.zeros(49, 2),
            r"must hold equally many samples, at least 40, got 50 and 49",
        ),
        (
            torch.zeros(50, 2),
            torch.full((50, 2), torch.nan),
            "`features` must be finite, got 100 values",
        ),
    ],
)
def test_refuses(x, z, match):
    with pytest.raises(ValueError, match=match):
        estimate_mutual_information(x, z)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"steps": 0}, "`steps` must be at least 1, got 0"),
        ({"batch_size": 1}, "`batch_size` must be at least 2, got 1"),
        ({"learning_rate": 0.0}, "`learning_rate` must be positive, got 0.0"),
    ],
)
def test_refuses_numbers_out_of_range(arguments, match):
    with pytest.raises(ValueError, match=match):
        estimate_mutual_information(torch.zeros(50, 2), torch.zeros(50, 2), **arguments)


def test_one_number_a_sample_is_a_column():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, generator=g)
    z = x + 0.1 * torch.randn(400, generator=g)
    estimate = estimate_mutual_information(x, z, steps=40)
    assert estimate == estimate_mutual_information(x[:, None], z[:, None], steps=40)
    assert estimate.nats > 0


def test_a_critic_of_ones_own_may_read_features_of_any_shape():
    x = torch.randn(60, 2, 2, generator=torch.Generator().manual_seed(0))
    critic = SeparableCritic((2, 2), 4)
    critic.feature_tower = torch.nn.Sequential(torch.nn.Flatten(), critic.feature_tower)
    assert estimate_mutual_information(x, x, critic=critic, steps=1).samples == 12
