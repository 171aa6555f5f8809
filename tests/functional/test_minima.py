"""Log-determinants against determinants, subsets against all of them, and the corner of dependent gradients."""

import itertools
import math

import pytest
import torch

from lightning_taskinfo.functional.minima import (
    local_minimum_summary,
    log_determinant,
    normalise_logits,
)


@pytest.fixture
def gram():
    j = torch.randn(7, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return j @ j.T


def test_log_determinant_is_the_logarithm_of_the_determinant(gram):
    torch.testing.assert_close(log_determinant(gram)[0], gram.det().log())
    stacked = torch.stack([gram, 2 * gram])
    torch.testing.assert_close(log_determinant(stacked)[0], stacked.det().log())


def test_log_determinant_is_accurate_where_determinants_overflow(gram):
    diagonal = torch.logspace(-9, 3, 200, dtype=torch.float64)
    torch.testing.assert_close(log_determinant(diagonal.diag())[0], diagonal.log().sum())
    assert log_determinant(1e80 * gram)[0].item() == pytest.approx(
        log_determinant(gram)[0].item() + 7 * 80 * math.log(10)
    )


def test_gradients_of_very_different_length_are_not_dependent(gram):
    scale = torch.logspace(-15, 0, 7, dtype=torch.float64)
    scaled = gram * scale.unsqueeze(1) * scale
    assert log_determinant(scaled)[0].item() == pytest.approx(
        log_determinant(gram)[0].item() + 2 * scale.log().sum().item()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dependent_gradients_give_minus_infinity(dtype):
    j = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=dtype).double()
    assert log_determinant(j @ j.T)[0].item() == -math.inf
    assert log_determinant(torch.zeros(3, 3))[0].item() == -math.inf


def test_all_subsets_by_a_loop(gram):
    """With every subset drawn many times, the mean tends to that over all subsets."""
    result = local_minimum_summary(
        gram, subset_size=3, draws=4000, generator=torch.Generator().manual_seed(0)
    )
    subsets = [gram[list(s)][:, list(s)] for s in itertools.combinations(range(7), 3)]
    gammas = torch.stack([xi.det().log() for xi in subsets])
    expected = {
        "gamma": gammas.mean(),
        "spectral_radius": torch.stack(
            [torch.linalg.matrix_norm(xi, 2) / 3 for xi in subsets]
        ).mean(),
        "frobenius": torch.stack(
            [torch.linalg.matrix_norm(xi).square() / 9 for xi in subsets]
        ).mean(),
        "trace": gram.trace() / 7,
    }
    assert (result.gamma - expected["gamma"]).abs() < 4 * result.gamma_standard_error
    assert result.gamma_standard_error.item() == pytest.approx(
        gammas.std().item() / math.sqrt(4000), rel=0.1
    )
    for name in ("spectral_radius", "frobenius", "trace"):
        assert getattr(result, name).item() == pytest.approx(expected[name].item(), rel=0.03), name


def test_the_whole_pool_needs_one_draw(gram):
    result = local_minimum_summary(gram.float(), subset_size=7, draws=1)
    assert result.gamma.dtype == torch.float64
    assert result.gamma.item() == pytest.approx(gram.det().log().item(), rel=1e-5)
    assert result.trace.item() == pytest.approx(gram.trace().item() / 7, rel=1e-5)
    assert result.gamma_standard_error.isnan()


def test_default_subsets_are_half_the_pool_and_at_most_100():
    small, large = (local_minimum_summary(2 * torch.eye(n), draws=2) for n in (10, 400))
    assert small.gamma.item() == pytest.approx(5 * math.log(2))
    assert large.gamma.item() == pytest.approx(100 * math.log(2))


def test_draws_repeat_with_the_generator(gram):
    def gamma(seed):
        return local_minimum_summary(
            gram, subset_size=3, generator=torch.Generator().manual_seed(seed)
        ).gamma.item()

    assert gamma(0) == gamma(0) != gamma(1)


def test_a_singular_subset_warns():
    with pytest.warns(
        UserWarning, match="The gradients of 3 samples span 1 directions only.* set `subset_size`"
    ):
        result = local_minimum_summary(torch.ones(6, 6))
    assert result.gamma.item() == -math.inf
    assert result.spectral_radius.item() == pytest.approx(1.0)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 3)])
def test_refuses_what_is_not_a_square_matrix(shape):
    with pytest.raises(ValueError, match=r"`gram` must be a square matrix, got shape \["):
        local_minimum_summary(torch.zeros(shape))


def test_refuses_numbers_out_of_range(gram):
    for size in (0, 8):
        with pytest.raises(
            ValueError, match=f"`subset_size` must lie between 1 and the 7 samples .*, got {size}"
        ):
            local_minimum_summary(gram, subset_size=size)
    with pytest.raises(ValueError, match="`draws` must be at least 1, got 0"):
        local_minimum_summary(gram, draws=0)


def test_normalised_logits_have_one_norm_and_keep_their_direction():
    logits = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    result = normalise_logits(logits)
    torch.testing.assert_close(result.norm(dim=-1), torch.full((2, 5), 25.0))
    torch.testing.assert_close(torch.cosine_similarity(result, logits, dim=-1), torch.ones(2, 5))
    torch.testing.assert_close(normalise_logits(1000 * logits), result)
    assert normalise_logits(torch.zeros(1, 3)).isfinite().all()
