"""The curvature of every structure belongs to the sum of the loss, and the scales are the best of the grid."""

import math

import pytest
import torch
from torch import nn

from lightning_taskinfo._progress import silent
from lightning_taskinfo.certificates import Prior
from lightning_taskinfo.certificates.certify import check_choices
from lightning_taskinfo.certificates.search import Search, choose_scales, curvatures_of
from lightning_taskinfo.certificates.subject import Subject
from lightning_taskinfo.distributions import diagonal_curvature
from lightning_taskinfo.fisher import fisher_diagonal, kronecker_factors
from lightning_taskinfo.functional.information import information_in_weights
from lightning_taskinfo.functional.pac_bayes import kl_bound
from tests.distributions.conftest import isotropic


@pytest.fixture
def seen(trained, data):
    """The 200 samples that the curvature with seed 3 is estimated from, and a generator for the labels."""
    g = torch.Generator().manual_seed(3)
    return data[0][torch.randperm(600, generator=g)[:200]], g


def curvature(trained, data, structure):
    return curvatures_of(Subject(trained, data, seed=3), [structure], samples=200)[structure]


def test_diagonal_and_isotropic(trained, data, seen):
    inputs, g = seen
    diagonal = fisher_diagonal(trained, inputs, generator=g)
    mean = torch.cat([h.flatten() for h in diagonal.values()]).mean().double()
    for name, block in curvature(trained, data, "diagonal").items():
        torch.testing.assert_close(block.eigenvalues, 600 * diagonal[name].double())
    for block in curvature(trained, data, "isotropic").values():
        torch.testing.assert_close(block.eigenvalues, (600 * mean).expand_as(block.eigenvalues))


@pytest.mark.parametrize("structure", ["neuron", "kron"])
def test_kronecker_factors(trained, data, seen, structure):
    """The whole curvature ``UΛUᵀ`` against the factors themselves."""
    inputs, g = seen
    factors = kronecker_factors(trained, inputs, generator=g)
    blocks = curvature(trained, data, structure)
    assert blocks.keys() == factors.keys()
    for name, of_parameter in factors.items():
        rows = of_parameter.rows.double()
        if structure == "neuron":
            rows = rows.diagonal().diag()
        columns = torch.ones(1, 1) if of_parameter.columns is None else of_parameter.columns
        expected = 600 * torch.kron(rows, columns.double())
        torch.testing.assert_close(whole_matrix(blocks[name]), expected, rtol=1e-5, atol=1e-5)


def test_the_curvature_of_a_neuron_is_that_of_its_inputs(trained, data):
    """Pitas's matrix of a layer's inputs, for each neuron times how strongly the loss feels it."""
    subject = Subject(trained, data, seed=3)
    block = curvatures_of(subject, ["neuron"], samples=600)["neuron"]["0.weight"]
    x = data[0].double()
    felt = block.eigenvalues.sum(1) / (x.T @ x).trace()
    expected = torch.kron(felt.diag(), x.T @ x)
    torch.testing.assert_close(whole_matrix(block), expected, rtol=1e-4, atol=1e-4)


def test_padding_has_no_part_in_kronecker_factors():
    """The block of a bias is exact: drawn labels give each token that counts a mean squared gradient of 1 - |p|²."""
    torch.manual_seed(0)
    n = 2000
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 2)).eval()
    tokens, labels = torch.randint(12, (n, 4)), torch.randint(2, (n, 4))
    labels[:, 2:] = -100
    subject = Subject(model, (tokens, labels), error="token")
    found = curvatures_of(subject, ["kron"], n)["kron"]["1.bias"].eigenvalues.sum()
    with torch.no_grad():
        p = model(tokens[:, :2]).softmax(-1)
    expected = (1 - p.square().sum(-1)).sum().item()
    # The square of a sum of two independent gradients has at most about its mean as standard deviation.
    assert found.item() == pytest.approx(expected, rel=3 / math.sqrt(n))


def whole_matrix(block):
    left, right = (
        torch.eye(side).double() if basis is None else basis.contiguous()
        for side, basis in zip(block.eigenvalues.shape, (block.left, block.right), strict=True)
    )
    basis = torch.kron(left, right)
    return basis @ torch.diag(block.eigenvalues.flatten()) @ basis.T


def test_each_draw_is_a_new_network_on_samples_from_everywhere(trained, data):
    """A loss that is the sample's place shows which samples were looked at; one of the outputs, which network."""
    place = torch.linspace(0, 1, 600)
    post = isotropic(trained, 0.1)
    looking = Subject(trained, (data[0], place), loss_fn=lambda _, targets: targets, seed=0)
    seen = torch.cat([looking.draw_losses(post, 64)[0] for _ in range(50)])
    assert abs(seen.mean().item() - 0.5) < 4 * place.std().item() / math.sqrt(len(seen))
    assert (seen.min().item(), seen.max().item()) == pytest.approx((0, 1), abs=0.01)
    subject = Subject(trained, data, loss_fn=lambda outputs, _: outputs.softmax(1)[:, 0], seed=0)
    one, two = (subject.draw_losses(post, 600)[0] for _ in range(2))  # all samples, in their order
    assert (one != two).double().mean() > 0.99


def test_a_loss_that_is_no_number_is_the_worst(trained, data):
    subject = Subject(trained, data, loss_fn=lambda outputs, _: outputs[:, 0] * math.nan, seed=0)
    assert subject.losses(slice(None))[0].eq(1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delta": 0.0}, r"`delta` must be in \(0, 1\), got 0\.0"),
        ({"delta": 1.0}, r"`delta` must be in \(0, 1\), got 1\.0"),
        ({"delta_draws": 0.0}, r"`delta_draws` must be in \(0, 1\), got 0\.0"),
        (
            {"delta": 0.5, "delta_draws": 0.5},
            r"`delta` and `delta_draws` must add up to less than 1, got 1\.0",
        ),
        ({"betas": [1.0, 0.0]}, r"`betas` must be positive, got 0\.0"),
    ],
)
def test_choices_out_of_their_range_are_refused_before_anything_is_measured(arguments, message):
    good = {"delta": 0.04, "delta_draws": 0.01, "draws": 1, "betas": [1.0]}
    check_choices(**good)
    with pytest.raises(ValueError, match=message):
        check_choices(**{**good, **arguments})


@pytest.mark.parametrize("size", [50.0, 0.2])
def test_scales_are_the_best_of_the_grid(trained, start, size):
    """Against a loop over the grid: the closed form picks what minimises ½tr(HΣ) + β·(KL + price).

    Where there is little curvature and no displacement, the price decides.
    """
    g = torch.Generator().manual_seed(3)
    h = {name: size * torch.rand(p.shape, generator=g) for name, p in start.named_parameters()}
    delta = {
        n: (size > 1) * (value - start.state_dict()[n]) for n, value in trained.state_dict().items()
    }
    grid, beta = (0.3, 0.01, 1.0, 0.1), 2.0
    distances = {name: part.double().square().sum().item() for name, part in delta.items()}
    by_layer, price = choose_scales(diagonal_curvature(h), distances, Prior(start, stds=grid), beta)

    def objective(layer, j):
        names = [name for name in h if name.startswith(layer)]
        parts = [
            information_in_weights(h[n], delta[n], prior_std=grid[j], beta=beta).objective()
            for n in names
        ]
        return sum(parts) + beta * math.log(math.pi**2 * (j + 1) ** 2 / 6)

    best = {layer: min(range(4), key=lambda j: objective(layer, j)) for layer in ("0", "2")}
    assert by_layer == {layer: grid[j] for layer, j in best.items()}
    assert price == pytest.approx(
        sum(math.log(math.pi**2 * (j + 1) ** 2 / 6) for j in best.values())
    )


def test_each_candidate_has_the_bound_of_its_own_risk_kl_and_price(trained, data, prior):
    subject = Subject(trained, data, seed=3)
    found = Search(subject, prior, curvatures_of(subject, ["isotropic", "neuron"]), 0.05)
    rows = found.rows([0.1, 10.0], silent)
    assert len({row.bound for row in rows}) == 4
    for row in rows:
        assert row.bound == kl_bound(row.risk, row.kl + row.price, 600, 0.05).item()
