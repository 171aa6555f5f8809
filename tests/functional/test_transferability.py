"""LogME against scipy's maximum, H-score against its definition and scikit-learn, LEEP and NCE against loops."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from sklearn.covariance import ledoit_wolf

from lightning_taskinfo.functional.transferability import (
    h_score,
    ledoit_wolf_shrinkage,
    leep,
    logme,
    nce,
)

SHAPES = [(24, 5), (24, 24), (12, 60)]
IDS = ["n>d", "n=d", "n<d"]


def task(n, d, classes=3, seed=0):
    """Features that know something about the labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    features = torch.randn(n, d, generator=generator, dtype=torch.float64)
    features[:, 0] += 2 * labels
    return features, labels


def best_evidence(features, column):
    """Maximise the density of a Gaussian vector over its two precisions, from two starting points."""
    n = len(column)

    def minus_log_density(precisions):
        alpha, beta = np.exp(precisions)
        covariance = features @ features.T / alpha + np.eye(n) / beta
        return -multivariate_normal.logpdf(column, np.zeros(n), covariance)

    starts = [(0, 1), (3, 3)]
    options = {"xatol": 1e-8, "fatol": 1e-10, "maxiter": 2000}
    found = [
        minimize(minus_log_density, start, method="Nelder-Mead", options=options)
        for start in starts
    ]
    return -min(result.fun for result in found)


@pytest.mark.parametrize(("n", "d"), SHAPES, ids=IDS)
def test_logme_is_the_best_evidence_that_scipy_finds(n, d):
    features, labels = task(n, d)
    columns = torch.nn.functional.one_hot(labels).double()
    expected = (
        np.mean([best_evidence(features.numpy(), column) for column in columns.T.numpy()]) / n
    )
    assert logme(features, labels).item() == pytest.approx(expected, abs=1e-7)


def test_logme_of_many_classes_is_that_of_their_columns():
    features, labels = task(60, 3, classes=20)
    columns = torch.nn.functional.one_hot(labels).double()
    one_by_one = [logme(features, column) for column in columns.T]
    torch.testing.assert_close(logme(features, labels), torch.stack(one_by_one).mean())


def test_logme_leaves_out_columns_of_equal_labels():
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(2, 40, 3, generator=generator)
    constant = torch.cat([labels, torch.full((40, 1), 2.0)], 1)
    torch.testing.assert_close(logme(features, constant), logme(features, labels))


def test_logme_of_real_labels():
    features, _ = task(30, 4)
    labels = features @ torch.tensor([[1.0, 0], [0, 2], [0, 0], [0, 0]]).double() + 0.3
    expected = (
        np.mean([best_evidence(features.numpy(), column) for column in labels.T.numpy()]) / 30
    )
    assert logme(features, labels).item() == pytest.approx(expected, abs=1e-7)
    assert logme(features, labels[:, 0]).item() == pytest.approx(
        best_evidence(features.numpy(), labels[:, 0].numpy()) / 30, abs=1e-7
    )


@pytest.mark.parametrize(("n", "d"), SHAPES, ids=IDS)
def test_scores_of_features_know_nothing_of_rotations_and_of_scale(n, d):
    features, labels = task(n, d)
    rotation = torch.linalg.qr(
        torch.randn(d, d, generator=torch.Generator().manual_seed(1)).double()
    )[0]
    for score in (logme, h_score):
        torch.testing.assert_close(
            score(3.0 * features @ rotation, labels), score(features, labels)
        )


def test_logme_stays_finite_where_features_fit_exactly_or_do_not_vary():
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    exact = torch.nn.functional.one_hot(labels).double()
    assert logme(exact, labels).isfinite()
    assert logme(exact, labels) > logme(exact + 0.1 * task(6, 3)[0], labels)
    zeros = torch.zeros(6, 3)
    noise_only = -0.5 * (math.log(2 * math.pi * 2 / 6) + 1)
    assert logme(zeros, labels).item() == pytest.approx(noise_only)


def covariances(features, labels):
    """The two covariances of the definition, by loops over samples and classes."""
    mean = features.mean(0)
    total = sum(torch.outer(x - mean, x - mean) for x in features) / len(features)
    between = torch.zeros_like(total)
    for label in labels.unique():
        rows = features[labels == label]
        deviation = rows.mean(0) - mean
        between += len(rows) / len(features) * torch.outer(deviation, deviation)
    return total, between


def test_h_score_is_its_definition():
    features, labels = task(40, 5)
    total, between = covariances(features, labels)
    expected = torch.trace(torch.linalg.inv(total) @ between)
    torch.testing.assert_close(h_score(features, labels), expected)


@pytest.mark.parametrize(("n", "d"), SHAPES, ids=IDS)
def test_shrunk_h_score_has_the_covariance_of_scikit_learn(n, d):
    features, labels = task(n, d)
    shrunk, delta = ledoit_wolf(features.numpy())
    expected = torch.trace(
        torch.linalg.inv(torch.from_numpy(shrunk)) @ covariances(features, labels)[1]
    )
    assert ledoit_wolf_shrinkage(features).item() == pytest.approx(delta, rel=1e-9)
    if n <= d:
        torch.testing.assert_close(h_score(features, labels), expected)


def test_h_score_of_singular_features_is_that_of_their_range():
    features, labels = task(40, 3)
    repeated = torch.cat([features, features[:, :2], torch.ones(40, 1)], 1)
    torch.testing.assert_close(h_score(repeated, labels), h_score(features, labels))
    assert h_score(torch.ones(8, 2), torch.arange(8) % 2) == 0
    assert h_score(torch.ones(8, 20), torch.arange(8) % 2) == 0


def test_h_score_is_at_most_classes_less_one():
    features, labels = task(300, 4, classes=3)
    separated = features + 1e6 * torch.eye(4)[labels]
    assert h_score(separated, labels).item() == pytest.approx(2, abs=1e-6)


def source_head(n=60, z=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, z, generator=generator).softmax(1), torch.randint(
        3, (n,), generator=generator
    )


def test_leep_is_its_loop():
    theta, labels = source_head()
    theta[:, 3] = 0  # a source class that is never given
    theta = (theta / theta.sum(1, keepdim=True)).double()
    total = 0.0
    for n in range(60):
        likelihood = 0.0
        for z in range(4):
            mass = sum(theta[i, z].item() for i in range(60))
            same = sum(theta[i, z].item() for i in range(60) if labels[i] == labels[n])
            likelihood += 0.0 if mass == 0 else same / mass * theta[n, z].item()
        total += math.log(likelihood)
    assert leep(theta, labels).item() == pytest.approx(total / 60)


def test_nce_is_its_loop():
    theta, labels = source_head()
    source = theta.argmax(1) * 10  # classes need not follow one another
    total = 0.0
    for n in range(60):
        same_source = [i for i in range(60) if source[i] == source[n]]
        total += math.log(sum(labels[i] == labels[n] for i in same_source) / len(same_source))
    assert nce(source, labels).item() == pytest.approx(total / 60)


def test_leep_and_nce_lie_between_minus_the_entropy_and_zero():
    theta, labels = source_head()
    shares = labels.bincount() / 60
    entropy = -(shares * shares.log()).sum().item()
    for value in (leep(theta, labels), nce(theta.argmax(1), labels)):
        assert -entropy <= value <= 0


@pytest.mark.parametrize("score", [logme, h_score], ids=["logme", "h_score"])
def test_half_precision_is_computed_in_float64(score):
    features, labels = task(30, 4)
    low = features.half()
    assert score(low, labels).dtype == torch.float64
    torch.testing.assert_close(score(low, labels), score(low.double(), labels))


@pytest.mark.parametrize("score", [logme, h_score, leep], ids=["logme", "h_score", "leep"])
@pytest.mark.parametrize(
    ("features", "labels", "match"),
    [
        (torch.rand(4, 2), torch.zeros(4).long(), r"`labels` .*two classes.* \[0\]"),
        (torch.rand(4), torch.arange(4), r"` must have .*\[4\]"),
        (torch.rand(4, 2), torch.arange(3), r"\[4, 2\] for labels of shape \[3\]"),
        (torch.full((4, 2), math.nan), torch.arange(4), "finite, got 8"),
    ],
    ids=["one class", "no matrix", "another number", "nan"],
)
def test_refuses(score, features, labels, match):
    with pytest.raises(ValueError, match=match):
        score(features, labels)


def test_refuses_what_is_no_class_and_no_probability():
    labels = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"`probabilities` .*off by 1"):
        leep(torch.ones(2, 2), labels)
    with pytest.raises(ValueError, match=r"`probabilities` .*smallest of -1"):
        leep(torch.tensor([[-1.0, 2.0], [0.5, 0.5]]), labels)
    with pytest.raises(ValueError, match=r"`labels` .*float32"):
        h_score(torch.rand(2, 2), torch.rand(2))
    with pytest.raises(ValueError, match=r"`labels` .*differ, got 2"):
        logme(torch.rand(2, 2), torch.ones(2))
    with pytest.raises(ValueError, match=r"`source` .*float32"):
        nce(torch.rand(2), labels)
    with pytest.raises(ValueError, match=r"`source` .*2 labels.*3"):
        nce(torch.arange(3), labels)
    with pytest.raises(ValueError, match=r"`labels` .*two classes"):
        nce(torch.arange(2), torch.zeros(2).long())


@pytest.mark.parametrize("scale", [1e-25, 1e15, 1e20])
def test_logme_does_not_depend_on_the_scale_of_features(scale):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    labels = torch.arange(40) % 3
    torch.testing.assert_close(logme(scale * features, labels), logme(features, labels))
