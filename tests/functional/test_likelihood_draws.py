"""Draws by number: the right distribution, and the same labels whoever measures a sample."""

import math

import pytest
import torch

from lightning_taskinfo.fisher import fisher_trace, per_sample_squared_norms
from lightning_taskinfo.functional.likelihood import Bernoulli, Categorical, Gaussian, NumberedDraws

N = 20_000


@pytest.fixture
def outputs():
    return torch.tensor([2.0, 0.0, -1.0]).expand(N, 3)


def test_classes_come_with_their_probabilities(outputs):
    drawn = NumberedDraws(Categorical(), seed=0, total=N).sample(outputs)
    p = outputs[0].softmax(-1)
    error = (p * (1 - p) / N).sqrt()
    assert ((drawn.bincount(minlength=3) / N - p).abs() < 4 * error).all()


def test_each_token_draws_for_itself():
    drawn = NumberedDraws(Categorical(), seed=0, total=N).sample(torch.zeros(N, 2, 2))
    assert drawn.shape == (N, 2)
    assert (drawn[:, 0] == drawn[:, 1]).float().mean().item() == pytest.approx(
        0.5, abs=4 * 0.5 / math.sqrt(N)
    )


def test_bits_come_with_their_probabilities(outputs):
    drawn = NumberedDraws(Bernoulli(), seed=0, total=N).sample(outputs)
    p = outputs[0].sigmoid()
    assert ((drawn.mean(0) - p).abs() < 4 * (p * (1 - p) / N).sqrt()).all()


def test_noise_has_its_variance(outputs):
    noise = NumberedDraws(Gaussian(std=2.0), seed=0, total=N).sample(outputs) - outputs
    assert noise.isfinite().all()
    assert (noise.mean(0).abs() < 4 * 2 / math.sqrt(N)).all()
    assert ((noise.var(0) - 4).abs() < 4 * 4 * math.sqrt(2 / N)).all()


class Own(Categorical):
    """A likelihood that only knows how to draw from a generator."""

    __class__ = property(lambda self: object)


@pytest.mark.parametrize(
    "likelihood", [Categorical(), Bernoulli(), Gaussian()], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("mc_samples", [1, 3])
def test_parts_and_chunks_draw_as_the_whole_does(likelihood, mc_samples):
    net, x = torch.nn.Linear(4, 3).double(), torch.randn(10, 4, dtype=torch.float64)

    def norms(samples, first, chunk_size=None):
        draws = NumberedDraws(likelihood, seed=3, first=first, total=10, mc_samples=mc_samples)
        return per_sample_squared_norms(
            net, samples, likelihood=draws, mc_samples=mc_samples, chunk_size=chunk_size
        )

    whole = norms(x, 0)
    torch.testing.assert_close(torch.cat([norms(x[:7], 0, chunk_size=2), norms(x[7:], 7)]), whole)


def test_another_seed_draws_others():
    first, second = (
        NumberedDraws(Categorical(), seed=s, total=50).sample(torch.zeros(50, 9)) for s in (0, 1)
    )
    assert not torch.equal(first, second)


def test_a_likelihood_of_another_kind_draws_by_itself():
    drawn = NumberedDraws(Own(), seed=0, total=N).sample(
        torch.tensor([0.0, math.log(3)]).expand(N, 2)
    )
    assert drawn.double().mean().item() == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / N))


def test_unbiased_for_the_exact_trace():
    net, x = torch.nn.Linear(4, 3), torch.randn(4, 4)
    runs = torch.stack(
        [
            fisher_trace(net, x, likelihood=NumberedDraws(Categorical(), seed=s, total=4))
            for s in range(300)
        ]
    )
    error = runs.std() / math.sqrt(len(runs))
    assert (runs.mean() - fisher_trace(net, x, labels="exact")).abs() < 4 * error
