"""Read-outs against a plain loop over folds, penalties and left-out samples; pooling against plain averages."""

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

from lightning_taskinfo.functional.readout import (
    RIDGES,
    held_out_readout,
    pooled,
    ridge,
    sharpened_brier,
    stratified_folds,
)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(x, y, penalty):
    """Ridge regression with an intercept, by the normal equations."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    gram = (x - mean_x).T @ (x - mean_x) + penalty * torch.eye(x.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, (x - mean_x).T @ (y - mean_y))
    return lambda new: mean_y + (new - mean_x) @ weights


def test_missed_share_squares_and_wrong_classes_are_those_of_a_loop_over_samples():
    features, classes = randn(30, 3), torch.arange(30) % 3
    features[:, 0] += classes
    columns = nn.functional.one_hot(classes).double()
    fold = torch.arange(30) // 10
    found = held_out_readout(features, columns, fold)
    predicted = found.predicted
    mean = torch.stack([columns[fold != k].mean(0) for k in fold])
    residuals = [
        sum((y - p) ** 2 for y, p in zip(*pair, strict=True))
        for pair in zip(columns, predicted, strict=True)
    ]
    baselines = [
        sum((y - m) ** 2 for y, m in zip(*pair, strict=True))
        for pair in zip(columns, mean, strict=True)
    ]
    share = sum(residuals) / sum(baselines)
    assert found.missed.item() == pytest.approx(share.item())
    assert found.squares.mean().item() == pytest.approx(share.item())
    assert found.squares[4].item() == pytest.approx((30 * residuals[4] / sum(baselines)).item())
    wrong = [float(p.argmax() != c) for p, c in zip(predicted, classes, strict=True)]
    assert found.wrong.tolist() == wrong
    assert 0 < sum(wrong) < 30
    resampled = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(4000):
        rows = torch.randint(30, (30,), generator=generator).tolist()
        resampled.append(sum(residuals[i] for i in rows) / sum(baselines[i] for i in rows))
    bootstrap = torch.stack(resampled).std().item()
    assert found.standard_error.item() == pytest.approx(bootstrap, rel=0.1)


@pytest.mark.parametrize("width", [3, 40], ids=["n>d", "n<d"])
def test_predictions_are_those_of_a_loop_over_folds_and_left_out_samples(width):
    features, folds = randn(30, width) + 1, 3
    labels = features[:, :2] @ randn(2, 2, seed=1) + 0.5 * randn(30, 2, seed=2)
    fold = torch.arange(30) % folds
    predicted = held_out_readout(features, labels, fold).predicted
    for k in range(folds):
        x, y = features[fold != k], labels[fold != k]
        penalties = RIDGES * (x - x.mean(0)).square().sum() / width
        left_out = []
        for penalty in penalties:
            others = [torch.arange(20) != i for i in range(20)]
            errors = [
                y[i] - fitted(x[kept], y[kept], penalty)(x[i]) for i, kept in enumerate(others)
            ]
            left_out.append(torch.stack(errors).square().sum())
        model = fitted(x, y, penalties[int(torch.stack(left_out).argmin())])
        torch.testing.assert_close(
            predicted[fold == k], model(features[fold == k]), rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("shape", [(20, 3), (4, 30)], ids=["n>d", "n<d"])
def test_features_that_repeat_or_are_constant_predict_as_without(shape):
    x, y = randn(*shape), randn(shape[0], 1, seed=1)
    x, y = x - x.mean(0), y - y.mean(0)
    zeros = torch.zeros(shape[0], shape[1]).double()
    with_zeros = ridge(torch.cat([x, zeros], 1), y, torch.cat([x, zeros], 1))
    assert with_zeros.isfinite().all()
    torch.testing.assert_close(ridge(zeros, y, zeros), torch.zeros_like(y))


def test_folds_have_equal_shares_of_each_class():
    labels = torch.tensor([0] * 10 + [1] * 5 + [2] * 5)[
        torch.randperm(20, generator=torch.Generator().manual_seed(0))
    ]
    fold = stratified_folds(labels, 5)
    for k in range(5):
        assert labels[fold == k].bincount().tolist() == [2, 1, 1]
    assert stratified_folds(torch.rand(7), 3).tolist() == [0, 1, 2, 0, 1, 2, 0]
    drawn = [stratified_folds(labels, 5, torch.Generator().manual_seed(k)) for k in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    for k in range(5):
        assert labels[drawn[2] == k].bincount().tolist() == [2, 1, 1]


def test_two_samples_of_a_class_are_not_held_out_against_whole_classes():
    """Classes that are easy to tell apart: what is left of the held-out one must not be outvoted by the others."""
    labels = torch.arange(10).repeat(2)
    assert stratified_folds(labels, 5).tolist() == [0] * 10 + [1] * 10
    features = 1.5 * randn(10, 8)[labels] + randn(20, 8, seed=1)
    columns = nn.functional.one_hot(labels).double()
    fold = stratified_folds(labels, 5)
    assert held_out_readout(features, columns, fold).wrong.mean() < 0.4
    uneven = (torch.arange(20) // 4) % 5
    assert held_out_readout(features, columns, uneven).wrong.mean() > 0.5


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_brier_scores_are_those_of_the_best_temperature(scale):
    classes = torch.arange(60) % 4
    columns = nn.functional.one_hot(classes).double()
    scores = scale * (columns + 0.7 * randn(60, 4))

    def mean_score(log_sharpness):
        said = (10.0**log_sharpness / scale * scores).softmax(1)
        return (said - columns).square().sum(1).mean().item()

    best = minimize_scalar(mean_score, bounds=(-3, 3), method="bounded").fun
    found = sharpened_brier(scores, columns)
    assert found.shape == (60,)
    assert best <= found.mean().item() < best + 0.002
    assert best < min(mean_score(-0.5), mean_score(1)) - 0.01  # the temperature matters
    torch.testing.assert_close(sharpened_brier(5 * scores + 3, columns), found)


def test_scores_that_say_nothing_have_the_brier_score_of_chance():
    columns = torch.eye(4).repeat(3, 1)
    same = sharpened_brier(torch.ones(12, 4), columns)
    torch.testing.assert_close(same, torch.full((12,), 0.75, dtype=torch.float64))
    against = sharpened_brier(-columns, columns)
    torch.testing.assert_close(against, same)  # no temperature turns them around


def test_small_features_are_only_flattened():
    for shape in ((2, 6), (2, 3, 2), (2, 3, 4, 5), (2,)):
        features = randn(*shape)
        assert torch.equal(pooled(features, 60), features.reshape(2, -1))


def test_images_are_averaged_over_the_finest_grid_that_fits():
    features = randn(2, 3, 8, 8)
    rows = pooled(features, 50)
    assert torch.allclose(rows, nn.functional.adaptive_avg_pool2d(features, 4).flatten(1))
    assert torch.allclose(pooled(features, 11), features.mean((2, 3)))
    last = features.movedim(1, -1)
    assert torch.allclose(pooled(last, 50), rows)


def test_sequences_are_averaged_over_positions_that_count():
    features = randn(2, 7, 5)
    torch.testing.assert_close(
        pooled(features, 12), torch.cat([features.mean(1), features.mean(2)], 1)
    )
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7])
    masked = pooled(features, 1000, mask=mask)
    torch.testing.assert_close(masked, torch.stack([features[0, :3].mean(0), features[1].mean(0)]))


@pytest.mark.parametrize("shape", [(50, 300), (50, 300, 2, 2)], ids=["rows", "channels"])
def test_what_does_not_fit_is_sketched_with_inner_products_kept_on_average(shape):
    features = randn(*shape)
    rows = pooled(features, 100)
    assert rows.shape == (50, 100)
    exact = features.flatten(2).mean(2) if features.ndim == 4 else features
    norms = exact.square().sum(1)
    off = (rows @ rows.T - exact @ exact.T)[~torch.eye(50).bool()]
    assert off.mean().abs() < 3 * off.std() / 50  # pairs
    assert (rows.square().sum(1) / norms).mean().item() == pytest.approx(1, abs=0.1)
    assert torch.equal(pooled(features[:1], 100), rows[:1])


def test_refuses_no_features():
    with pytest.raises(ValueError, match=r"`max_features` .*0"):
        pooled(torch.ones(2, 3), 0)
