"""Errors per class, token and sequence against loops, and certificates of networks that return ``[N, T, V]``."""

import pytest
import torch
from torch import nn

from lightning_taskinfo.certificates import Prior, certify
from lightning_taskinfo.certificates.subject import check_scores, differences, predictions
from lightning_taskinfo.functional.tail_bounds import betting_upper_bound
from tests.certificates.conftest import fit

QUICK = {"draws": 50, "betas": (0.1, 1.0)}


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_differences_of_sequences_are_those_of_a_loop(kind):
    g = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randint(2, (50, 4), generator=g) for _ in range(2))
    counted = torch.rand(50, 4, generator=g) < 0.5
    for one, found in enumerate(differences(ours, theirs, counted, kind).tolist()):
        wrong = [a != b for a, b, c in zip(ours[one], theirs[one], counted[one], strict=True) if c]
        expected = float(any(wrong)) if kind == "sequence" else sum(wrong) / max(1, len(wrong))
        assert found == pytest.approx(float(expected))


@pytest.mark.parametrize("kind", ["class", "token", "sequence"])
def test_the_triangle_inequality(kind):
    """The network's bound rests on it: from the labels, we are at most as far as they are, and we from them."""
    g = torch.Generator().manual_seed(1)
    shape = (500,) if kind == "class" else (500, 3)
    ours, theirs, labels = (torch.randint(-1, 3, shape, generator=g) for _ in range(3))
    counted = torch.rand(shape, generator=g) < 0.7
    left = differences(ours, labels, counted, kind)
    right = differences(theirs, labels, counted, kind) + differences(ours, theirs, counted, kind)
    assert (left <= right).all()


def test_a_score_that_is_no_number_is_no_class():
    assert predictions(torch.tensor([[1.0, torch.nan], [torch.inf, 0.0]])).tolist() == [-1, 0]


def sequences(n, seed, *, padded=False):
    """Labels tell whether a token's number is even; the last of four may be padding."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(12, (n, 4), generator=g)
    labels = tokens % 2 ^ (torch.rand(n, 4, generator=g) < 0.05).long()
    if padded:
        labels[:, 3] = torch.where(torch.rand(n, generator=g) < 0.5, -100, labels[:, 3])
    return tokens, labels


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, tokens):
        return self.head(self.table(tokens))


@pytest.fixture(scope="module")
def tagged():
    torch.manual_seed(0)
    start = Tagger()
    data = sequences(300, 0, padded=True)
    model = Tagger()
    model.load_state_dict(start.state_dict())

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(tokens).transpose(1, 2)

    fit(Flat(), data, steps=100)
    return model, data, Prior(start, "random initialisation")


@pytest.mark.parametrize("structure", ["auto", "kron"])
@pytest.mark.parametrize("error", ["token", "sequence"])
def test_a_network_of_tokens_is_certified(tagged, error, structure):
    model, data, prior = tagged
    held_out = sequences(200, 2, padded=True)
    unlabelled = sequences(400, 1, padded=True)
    found = certify(
        model,
        data,
        prior,
        error=error,
        structure=structure,
        unlabelled=unlabelled,
        held_out=held_out,
        **QUICK,
    )
    assert found.valid
    assert (found.n, found.error, found.test_set.n) == (300, error, 200)
    with torch.no_grad():
        wrong = (model(data[0]).argmax(-1) != data[1]) & (data[1] != -100)
        per_token = wrong.sum(1) / (data[1] != -100).sum(1)
        expected = per_token.mean() if error == "token" else wrong.any(1).double().mean()
        assert found.model_risk == pytest.approx(expected.item())
        wrong = (model(held_out[0]).argmax(-1) != held_out[1]) & (held_out[1] != -100)
    if error == "token":
        losses = wrong.sum(1) / (held_out[1] != -100).sum(1)
        assert found.test_set.bound == pytest.approx(betting_upper_bound(losses, 0.05).item())
    assert found.model_risk < found.bound < found.network.bound


def test_tokens_need_to_know_where_padding_is(tagged):
    model, data, prior = tagged
    inputs = sequences(400, 1)[0]
    with pytest.raises(ValueError, match=r"`unlabelled` .*-100"):
        certify(model, data, prior, error="token", unlabelled=inputs, **QUICK)
    whole = certify(model, data, prior, error="sequence", unlabelled=inputs, **QUICK)
    known = certify(
        model, data, prior, error="sequence", unlabelled=sequences(400, 1, padded=True), **QUICK
    )
    assert whole.network.disagreement >= known.network.disagreement


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({}, r"where `error` is 'class', .*\[N, C\].*got \[2, 4, 2\]"),
        ({"error": "word"}, "`error` .*got 'word'"),
        (
            {"error": "token", "forward_fn": lambda model, x: model(x)[:, 0]},
            r"`model` .*\[N, T, V\].*got \[2, 2\]",
        ),
    ],
)
def test_refusals(tagged, change, match):
    model, data, prior = tagged
    with pytest.raises(ValueError, match=match):
        certify(model, data, prior, **{**QUICK, **change})


def test_labels_beyond_the_scores_are_refused(tagged):
    model, (tokens, labels), prior = tagged
    with pytest.raises(ValueError, match=r"needs targets from 0 to 1, .*got 2"):
        certify(model, (tokens, labels.clamp(min=0) * 2), prior, error="token", **QUICK)


@pytest.mark.parametrize("error", ["token", "sequence"])
def test_labels_that_all_do_not_count_prove_nothing(error):
    targets = torch.full((4, 3), -100)
    with pytest.raises(ValueError, match="needs labels to count errors by, got none but -100"):
        check_scores(error, torch.randn(4, 3, 5), targets)
