"""The kernel discrepancy against a loop over pairs, and the properties of an unbiased estimate."""

import math

import pytest
import torch
from torch import Tensor

from lightning_taskinfo.functional.discrepancy import (
    WIDTH_FACTORS,
    ensemble_targets,
    gaussian_kernel,
    mk_mmd,
)


def samples(N: int, D: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loop(source: Tensor, target: Tensor, widths: list[float]) -> float:
    def kernel(a: Tensor, b: Tensor) -> float:
        return sum(math.exp(-(a - b).square().sum() / (2 * s**2)) for s in widths) / len(widths)

    N, M = len(source), len(target)
    ss = sum(kernel(source[i], source[j]) for i in range(N) for j in range(N) if i != j) / (
        N * (N - 1)
    )
    tt = sum(kernel(target[i], target[j]) for i in range(M) for j in range(M) if i != j) / (
        M * (M - 1)
    )
    st = sum(kernel(a, b) for a in source for b in target) / (N * M)
    return ss + tt - 2 * st


@pytest.mark.parametrize(("N", "M"), [(5, 5), (4, 7), (7, 2)])
def test_equals_the_sum_over_pairs(N, M):
    source, target, widths = samples(N), samples(M, seed=1) + 0.5, [0.3, 1.0, 5.0]
    assert mk_mmd(source, target, widths=widths).item() == pytest.approx(
        loop(source, target, widths), rel=1e-10
    )


def test_is_zero_on_average_where_both_are_the_same_distribution():
    estimates = torch.stack(
        [mk_mmd(samples(8, seed=2 * i), samples(12, seed=2 * i + 1)) for i in range(400)]
    )
    assert estimates.mean().abs() < 3 * estimates.std() / math.sqrt(len(estimates))
    assert estimates.min() < 0


def test_grows_with_the_shift():
    shifts = [
        mk_mmd(samples(50), samples(60, seed=1) + shift).item() for shift in (0.0, 0.5, 1.0, 2.0)
    ]
    assert shifts == sorted(shifts)


def test_default_widths_ignore_a_common_scale():
    source, target = samples(9), samples(7, seed=1) + 1
    torch.testing.assert_close(mk_mmd(100 * source, 100 * target), mk_mmd(source, target))


@pytest.mark.parametrize(("common", "apart"), [(1000.0, 0.5), (-3e4, 0.5), (0.0, 1e4)])
def test_float32_keeps_its_digits_beside_an_offset(common, apart):
    source = (samples(40) + common).float()
    target = (samples(50, seed=1) + common + apart).float()
    exact = mk_mmd(source.double(), target.double(), widths=[0.5, 2.0])
    torch.testing.assert_close(
        mk_mmd(source, target, widths=[0.5, 2.0]).double(), exact, rtol=0, atol=1e-6
    )


def test_gradients():
    source, target = samples(3).requires_grad_(), samples(4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda s, t: mk_mmd(s, t, widths=[0.5, 2.0]), (source, target))


def test_coinciding_samples_give_a_finite_gradient():
    source = torch.zeros(4, 2, requires_grad=True)
    value = mk_mmd(source, torch.zeros(3, 2))
    value.backward()
    assert value.item() == 0.0
    assert source.grad.isfinite().all()


def test_kernel_far_from_the_origin_stays_below_one():
    far = samples(5).float() + 1e4
    assert gaussian_kernel(far, far, torch.tensor([1.0])).max() <= 1


def test_median_distance_of_coinciding_samples_counts_as_one():
    source, target = torch.zeros(3, 2), torch.tensor([[0.0, 0], [0, 0], [0, 2]])
    found = mk_mmd(source, target)
    assert found == mk_mmd(source, target, widths=WIDTH_FACTORS)
    assert found.isfinite()


@pytest.mark.parametrize("argument", ["source", "target"])
def test_refuses_a_single_sample(argument):
    arguments = {"source": samples(4), "target": samples(4), argument: samples(1)}
    with pytest.raises(
        ValueError,
        match=r"`source` and `target` must have shapes .* of at least 2, got .*\(1, 3\)",
    ):
        mk_mmd(**arguments)


def test_refuses_different_widths_of_features():
    with pytest.raises(ValueError, match=r"must have shapes .* got \[\(4, 3\), \(4, 5\)\]"):
        mk_mmd(samples(4, 3), samples(4, 5))


@pytest.mark.parametrize("widths", [[0.0], [-1.0, 1.0], []])
def test_refuses_kernel_widths_that_are_not_positive(widths):
    with pytest.raises(ValueError, match="`widths` must be positive, got "):
        mk_mmd(samples(4), samples(4), widths=widths)


def test_ensemble_targets_undo_the_start_at_zero():
    """A constant prediction must come out as it is, however often it was averaged; a new sample stays zero."""
    prediction, average, decay = (
        torch.tensor([[0.2, 0.8]]).double(),
        torch.zeros(1, 2).double(),
        0.6,
    )
    for t in range(1, 5):
        average = decay * average + (1 - decay) * prediction
        torch.testing.assert_close(ensemble_targets(average, torch.tensor([t]), decay), prediction)
    assert torch.equal(
        ensemble_targets(torch.zeros(1, 2), torch.tensor([0]), decay), torch.zeros(1, 2)
    )
