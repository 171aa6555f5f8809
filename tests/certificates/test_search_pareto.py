"""The trade-off of risk and complexity: its rows, the oracle's limit, and the picture."""

import math

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from lightning_taskinfo.certificates import Candidate, Prior, pareto_front
from lightning_taskinfo.certificates.search import Search, curvatures_of
from lightning_taskinfo.certificates.subject import Subject
from lightning_taskinfo.functional.pac_bayes import kl_bound, oracle_complexity
from lightning_taskinfo.plotting import plot_pareto

BETAS = (0.1, 1.0, 10.0)


@pytest.fixture(scope="module")
def rows(trained, data, start):
    prior = Prior(start, origin="random initialisation")
    return pareto_front(trained, data, prior, betas=BETAS, structure=("isotropic", "diagonal"))


def test_a_row_for_each_structure_and_beta(rows):
    names = ["isotropic"] * 3 + ["diagonal"] * 3 + ["oracle"] * 3
    assert [(row.structure, row.beta) for row in rows] == list(zip(names, 3 * BETAS, strict=True))
    for row in rows:
        assert row.bound == kl_bound(row.risk, row.kl + row.price, 600, 0.04).item()


def test_more_weight_on_the_kl_buys_less_of_it(rows):
    for name in ("isotropic", "diagonal", "oracle"):
        kls = [row.kl for row in rows if row.structure == name]
        assert kls == sorted(kls, reverse=True)


def test_the_oracle_is_lemma_4_2_of_the_diagonal_curvature(trained, data, start):
    subject = Subject(trained, data, seed=0)
    diagonal = curvatures_of(subject, ["diagonal"], 600)["diagonal"]
    diagonal[0].eigenvalues[0, 0] = 0.0  # a weight that the loss does not feel
    h = torch.cat([block.eigenvalues.flatten() for block in diagonal])
    delta = torch.cat(
        [(p - start.state_dict()[n]).detach().flatten() for n, p in trained.named_parameters()]
    )
    expected = oracle_complexity(h, delta, beta=2.0)
    search = Search(subject, Prior(start), {"diagonal": diagonal}, delta=0.04)
    post, kl, price, _ = search.propose("oracle", 2.0)
    assert (kl, price) == (pytest.approx(expected.kl.item()), 0.0)
    felt = h > 0
    variances = torch.cat([block.eigenvalues.flatten() for block in post.blocks])
    torch.testing.assert_close(variances[felt], expected.post_variance[felt])
    assert not variances[~felt].any()


def test_one_structure_goes_by_its_name(trained, data, prior):
    rows = pareto_front(trained, data, prior, betas=[1.0], structure="isotropic")
    assert [row.structure for row in rows] == ["isotropic", "oracle"]


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ("nueron", "`structure` .*got 'nueron'"),
        ((), "`structure` must name at least one structure"),
    ],
)
def test_refuses_what_is_no_structure(trained, data, structure, message):
    with pytest.raises(ValueError, match=message):
        pareto_front(trained, data, structure=structure)


def test_the_picture_shows_the_rows(rows, tmp_path):
    figure, ax = plot_pareto(rows, 600)
    lines = {line.get_label(): line.get_xydata() for line in ax.get_lines()}
    row = min((row for row in rows if row.structure == "diagonal"), key=lambda row: row.kl)
    x = (row.kl + row.price + math.log(2 * math.sqrt(600) / 0.04)) / 600
    assert lines["diagonal"][0].tolist() == pytest.approx([x, 1 - row.risk])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "isotropic",
        "diagonal",
        "oracle",
    ]
    figure.savefig(tmp_path / "pareto.png")
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_a_point_on_a_grey_line_has_that_bound():
    """Each grey line holds the points whose bound is its label."""
    ax = Figure().subplots()
    plot_pareto([Candidate("diagonal", 1.0, 0.1, 50.0, 1.0, 0.4, {})], 1000, ax=ax)
    grey = [line.get_xydata() for line in ax.get_lines() if line.get_label().startswith("_")]
    bounds = [
        kl_bound(1 - y, 1000 * x - math.log(2 * math.sqrt(1000) / 0.04), 1000, 0.04)
        for x, y in (g[9] for g in grey)
    ]
    assert [bound.item() for bound in bounds] == pytest.approx([0.05, 0.1, 0.2, 0.3, 0.5], abs=1e-6)


def test_padding_has_no_part_in_kronecker_factors():
    """The block of a bias is exact: drawn labels give each token that counts a mean squared gradient of 1 - |p|²."""
    torch.manual_seed(0)
    n = 2000
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 2)).eval()
    tokens, labels = torch.randint(12, (n, 4)), torch.randint(2, (n, 4))
    labels[:, 2:] = -100
    subject = Subject(model, (tokens, labels), error="token")
    blocks = curvatures_of(subject, ["kron"], n)["kron"]
    (found,) = (block.eigenvalues.sum() for block in blocks if block.names == ("1.bias",))
    with torch.no_grad():
        p = model(tokens[:, :2]).softmax(-1)
    expected = (1 - p.square().sum(-1)).sum().item()
    # The square of a sum of two independent gradients has at most about its mean as standard deviation.
    assert found.item() == pytest.approx(expected, rel=3 / math.sqrt(n))
