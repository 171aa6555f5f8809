"""Likelihoods against ``torch.distributions``; scores against autograd; roots against the Fisher of the outputs."""

import pytest
import torch
from torch import Tensor, distributions, nn

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.functional.likelihood import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    as_likelihood,
    output_scores,
)

VARIANCE = 0.3
CASES = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(std=VARIANCE**0.5),
}
SHAPES = [(4, 3), (4, 2, 3)]


def distribution(name: str, outputs: Tensor) -> distributions.Distribution:
    return {
        "categorical": lambda: distributions.Categorical(logits=outputs),
        "bernoulli": lambda: distributions.Bernoulli(logits=outputs),
        "gaussian": lambda: distributions.Normal(outputs, VARIANCE**0.5),
    }[name]()


def some_outputs(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def output_fisher(name: str, outputs: Tensor) -> Tensor:
    """Per sample, the covariance of the score, from the definition: ``[N, T·C, T·C]``."""
    if name == "categorical":
        p = outputs.softmax(-1)
        blocks = p.diag_embed() - p.unsqueeze(-1) * p.unsqueeze(-2)
    else:
        variance = (
            outputs.sigmoid() * (1 - outputs.sigmoid())
            if name == "bernoulli"
            else torch.full_like(outputs, 1 / VARIANCE)
        )
        blocks = variance.diag_embed()
    if outputs.dim() == 2:
        return blocks
    return torch.stack([torch.block_diag(*sample) for sample in blocks])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_log_prob_matches_torch_distributions(name, shape):
    outputs = some_outputs(shape)
    targets = CASES[name].sample(outputs, torch.Generator().manual_seed(1))
    expected = (
        distribution(name, outputs).log_prob(targets).flatten(1).sum(1)
        if len(shape) == 3 or name != "categorical"
        else distribution(name, outputs).log_prob(targets)
    )
    torch.testing.assert_close(CASES[name].log_prob(outputs, targets), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_the_score_is_the_gradient_of_log_prob(name, shape):
    outputs = some_outputs(shape).requires_grad_()
    targets = CASES[name].sample(outputs.detach())
    (expected,) = torch.autograd.grad(CASES[name].log_prob(outputs, targets).sum(), outputs)
    torch.testing.assert_close(CASES[name].score(outputs.detach(), targets), expected)


@pytest.mark.parametrize("shape", [*SHAPES, (4, 2)])
@pytest.mark.parametrize("name", CASES)
def test_roots_make_the_fisher_of_the_outputs(name, shape):
    outputs = some_outputs(shape)
    roots = torch.stack([root.flatten(1) for root in CASES[name].roots(outputs)])  # [R, N, T·C]
    torch.testing.assert_close(
        torch.einsum("rni,rnj->nij", roots, roots), output_fisher(name, outputs)
    )


def test_a_softmax_needs_one_root_less_than_it_has_classes():
    assert len(list(Categorical().roots(some_outputs((4, 3))))) == 2


def test_roots_are_finite_for_a_certain_class():
    outputs = torch.tensor([[200.0, 0.0, -200.0], [-200.0, 0.0, 200.0]])
    assert all(root.isfinite().all() for root in Categorical().roots(outputs))


@pytest.mark.parametrize("name", CASES)
def test_samples_have_the_moments_of_the_model(name):
    outputs = some_outputs((1, 3)).expand(20_000, 3)
    drawn = CASES[name].sample(outputs, torch.Generator().manual_seed(0)).double()
    model = distribution(name, outputs[0])
    if name == "categorical":
        drawn, mean = torch.nn.functional.one_hot(drawn.long(), 3).double(), model.probs
        error = (mean * (1 - mean) / len(drawn)).sqrt()
    else:
        mean, error = model.mean, model.stddev / len(drawn) ** 0.5
    assert ((drawn.mean(0) - mean).abs() < 4 * error).all()


@pytest.mark.parametrize("labels", ["sampled", "exact", "empirical"])
def test_ignored_targets_have_no_score(labels):
    outputs, targets = some_outputs((2, 3, 4)), torch.tensor([[1, -100, 2], [-100, -100, 0]])
    scores = list(output_scores(outputs, targets, labels=labels, likelihood=Categorical()))
    assert all((score[targets == -100] == 0).all() for score in scores)
    assert any((score[targets != -100] != 0).any() for score in scores)


@pytest.mark.parametrize("ignored", [0, 2, 3, 255])
def test_draws_count_where_they_equal_the_ignored_class(ignored):
    outputs = some_outputs((1, 4)).expand(20_000, 4)
    arguments = {"labels": "sampled", "likelihood": Categorical(ignore_index=ignored)}
    (scores,) = output_scores(
        outputs, None, generator=torch.Generator().manual_seed(0), **arguments
    )
    squares = torch.einsum("ni,nj->nij", scores, scores)
    error = squares.std(0) / len(squares) ** 0.5
    assert (
        (squares.mean(0) - output_fisher("categorical", outputs[:1])[0]).abs() < 4 * error
    ).all()


def test_no_class_without_probability_is_drawn():
    outputs = torch.tensor([-1e4, 0.0, -1e4, 1.0, -1e4]).expand(100_000, 5)
    assert set(Categorical().sample(outputs).unique().tolist()) == {1, 3}


def test_mc_samples_share_the_weight():
    outputs = some_outputs((4, 3))
    scores = list(
        output_scores(
            outputs,
            None,
            labels="sampled",
            likelihood=Categorical(),
            mc_samples=3,
            generator=torch.Generator().manual_seed(0),
        )
    )
    one = next(
        output_scores(
            outputs,
            None,
            labels="sampled",
            likelihood=Categorical(),
            generator=torch.Generator().manual_seed(0),
        )
    )
    assert len(scores) == 3
    torch.testing.assert_close(scores[0] * 3**0.5, one)


@pytest.mark.parametrize("shape", [(2, 4, 4, 4), (2, 4, 4)], ids=["images", "sequences"])
def test_classes_that_may_be_on_either_axis_are_warned_about(shape):
    with pytest.warns(
        TaskInfoWarning, match=r"Outputs \[2, 4, .* classes last; .*movedim\(1, -1\)"
    ):
        Categorical().check(torch.zeros(shape), torch.zeros(shape[:-1]).long())
    Categorical().check(torch.zeros(*shape[:-1], 3), torch.zeros(shape[:-1]).long())


def test_a_loss_is_no_likelihood():
    with pytest.raises(
        ValueError,
        match=r"`likelihood` must be .* got CrossEntropyLoss.*; an object must have log_prob",
    ):
        as_likelihood(nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "message"),
    [
        (Categorical(), torch.zeros(4, 1), None, r"with at least 2 classes, got \[4, 1\]"),
        (Categorical(), torch.zeros(4), None, "at least 2 classes"),
        (Categorical(), torch.zeros(4, 3), torch.rand(4), r"`targets` must be class indices .* set `likelihood` to"),
        (Categorical(), torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.long), r"got torch.int64 of shape \[4, 1\]"),
        (Categorical(), torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 5).long(), r"to the last axis.*movedim\(1, -1\)"),
        (Categorical(), torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 4).long(), r"got torch.*\[2, 4, 4\]; .*`batch_fn`"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([0, 3]), r"must lie in \[0, 3\).* got 3"),
        (Categorical(), torch.zeros(2, 3), torch.tensor([-1, 1]), r"must lie in \[0, 3\).* got -1"),
        (Bernoulli(), torch.zeros(2, 1), torch.tensor([[0], [2]]), r"`targets` must be in \[0, 1\], got 2"),
        (Gaussian(), torch.zeros(4, 1), torch.zeros(4), r"must have the outputs' shape \[4, 1\], got \[4\]"),
        (Bernoulli(), torch.zeros(4, 1), torch.zeros(4), r"would silently broadcast.*`forward_fn`.*squeeze\(-1\)"),
        (Bernoulli(), torch.zeros(4, 3), torch.zeros(4), r"squeeze\(-1\)`, or whatever picks"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(likelihood: Likelihood, outputs, targets, message):
    with pytest.raises(ValueError, match=message):
        likelihood.check(outputs, targets)


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian()])
def test_outputs_fit_where_there_are_no_targets(likelihood: Likelihood):
    likelihood.check(torch.zeros(4, 3), None)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"`std` must be positive, got 0.0"):
        Gaussian(std=0.0)
    with pytest.raises(
        ValueError,
        match=r"`likelihood` must be one of categorical, bernoulli, gaussian, got 'poisson'",
    ):
        as_likelihood("poisson")
    with pytest.raises(
        ValueError, match="`targets` must be given for `labels='empirical'`, got None"
    ):
        next(output_scores(torch.zeros(2, 3), None, labels="empirical", likelihood=Categorical()))
