"""Estimates from a score matrix against their formulas as loops, and against Gaussians with a known answer."""

import math

import pytest
import torch
from torch import Tensor

from lightning_taskinfo.functional import discrepancy as mi

ESTIMATES = [mi.donsker_varadhan, mi.smile, mi.nwj, mi.info_nce, mi.jensen_shannon]


def random_scores(B: int = 6, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(
        B, B, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def loop(name: str, scores: Tensor) -> float:
    """The formulas, entry by entry."""
    M, B = scores.tolist(), len(scores)
    joint = [M[i][i] for i in range(B)]
    product = [M[i][j] for i in range(B) for j in range(B) if i != j]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    clipped = [min(max(math.exp(m), math.exp(-5)), math.exp(5)) for m in product]
    return {
        "donsker_varadhan": mean(joint) - math.log(mean([math.exp(m) for m in product])),
        "smile": mean(joint) - math.log(mean(clipped)),
        "nwj": mean(joint) - mean([math.exp(m) for m in product]) / math.e,
        "info_nce": mean([M[i][i] - math.log(mean([math.exp(m) for m in M[i]])) for i in range(B)]),
        "jensen_shannon": mean([-math.log1p(math.exp(-m)) for m in joint])
        - mean([math.log1p(math.exp(m)) for m in product]),
    }[name]


@pytest.mark.parametrize("scale", [1.0, 10.0])  # at 10 many scores are beyond the clip
@pytest.mark.parametrize("estimate", ESTIMATES, ids=lambda f: f.__name__)
def test_equals_the_formula(estimate, scale):
    scores = random_scores(scale=scale)
    assert estimate(scores).item() == pytest.approx(loop(estimate.__name__, scores), rel=1e-12)


def optimal_scores(information: float, B: int, d: int = 20) -> Tensor:
    """Log density ratios of ``B`` samples of correlated Gaussians that share ``information`` nats."""
    rho = math.sqrt(1 - math.exp(-2 * information / d))
    g = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(B, d, generator=g, dtype=torch.float64) for _ in range(2))
    z = rho * x + math.sqrt(1 - rho**2) * noise
    squares = (rho * x[:, None] - z[None]).square().sum(-1) / (1 - rho**2)
    return 0.5 * (z.square().sum(-1)[None] - squares) - 0.5 * d * math.log(1 - rho**2)


@pytest.mark.parametrize(
    ("estimate", "shift"), [(mi.donsker_varadhan, 0), (mi.nwj, 1), (mi.smile, 0)]
)
def test_recovers_two_nats_with_the_optimal_critic(estimate, shift):
    scores = optimal_scores(2.0, B=800) + shift
    standard_error = scores.diagonal().std() / math.sqrt(len(scores))
    # The mean of e^M over pairs has an error as well; at two nats it is of the size of the joint term's.
    assert abs(estimate(scores) - 2.0) < 4 * standard_error


def test_smile_is_biased_upwards_at_ten_nats_even_with_the_optimal_critic():
    """The joint term alone is unbiased; the clipped product term, which should be log 1, takes nats away."""
    scores = optimal_scores(10.0, B=1000)
    assert mi.smile(scores) - scores.diagonal().mean() > 1.5
    assert (
        abs(mi.smile(optimal_scores(2.0, B=1000)) - optimal_scores(2.0, B=1000).diagonal().mean())
        < 0.1
    )


@pytest.mark.parametrize("B", [2, 16])
def test_info_nce_is_at_most_log_batch(B):
    assert mi.info_nce(random_scores(B, scale=1e3)) <= math.log(B)
    assert mi.info_nce(1e4 * torch.eye(B)).item() == pytest.approx(math.log(B))


@pytest.mark.parametrize("estimate", ESTIMATES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("scale", [1e-8, 1e4])
def test_never_nan(estimate, scale):
    assert not estimate(random_scores(scale=scale).float()).isnan()


@pytest.mark.parametrize("estimate", ESTIMATES, ids=lambda f: f.__name__)
def test_gradients(estimate):
    assert torch.autograd.gradcheck(estimate, (random_scores().requires_grad_(),))


def test_mine_has_the_value_of_donsker_varadhan_and_the_corrected_gradient():
    scores = random_scores().requires_grad_()
    log_average = torch.tensor(0.7, dtype=torch.float64)
    value = mi.mine(scores, log_average)
    (gradient,) = torch.autograd.grad(value, scores)
    B = len(scores)
    expected = -scores.detach().exp() / math.exp(0.7) / (B * (B - 1))
    expected.fill_diagonal_(1 / B)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(value, mi.donsker_varadhan(scores))


def test_the_log_average_is_the_logarithm_of_a_moving_average():
    log_average, average = torch.tensor(-torch.inf, dtype=torch.float64), None
    for scale in (1.0, 2.0, 3.0):
        scores = random_scores(scale=scale)
        current = mi.joint_and_product(scores)[1].exp().mean()
        average = current if average is None else 0.9 * average + 0.1 * current
        log_average = mi.update_log_average(log_average, scores, decay=0.9)
    torch.testing.assert_close(log_average, average.log())


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (3,)])
def test_refuses_what_is_no_score_matrix(shape):
    with pytest.raises(
        ValueError, match=r"`scores` must have shape \[B, B\] with B of at least 2, got \("
    ):
        mi.donsker_varadhan(torch.zeros(shape))


def test_refuses_a_clip_that_is_not_positive():
    with pytest.raises(ValueError, match=r"`clip` must be positive, got 0\.0\."):
        mi.smile(torch.zeros(2, 2), clip=0.0)
