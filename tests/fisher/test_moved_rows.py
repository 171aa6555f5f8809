"""Layers that see the samples in another order, or only some of them: no row is taken for another sample's."""

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.fisher import (
    FisherInformation,
    fisher_diagonal,
    fisher_trace,
    gradient_gram,
)
from tests.fisher.test_measure import empirical

pytestmark = pytest.mark.filterwarnings("ignore::lightning_taskinfo.TaskInfoWarning")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)


class Sorted(Layers):
    def forward(self, x: Tensor) -> Tensor:
        i = x[:, 0].argsort()
        return self.c(self.a(x[i]).tanh()[i.argsort()] + self.b(x))


class SortedAndPlain(Layers):
    def forward(self, x: Tensor) -> Tensor:
        i = x[:, 0].argsort()
        return self.c(self.a(x[i]).tanh()[i.argsort()] + self.a(x).sin() + self.b(x))


class Masked(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(x)
        m = x[:, 0] > 0
        h[m] = self.a(x[m])
        return self.c(h.tanh())


class Routed(Layers):
    """Both experts have as many rows as there are samples, and not one for each."""

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([x, x.sin()], 1).flatten(0, 1)
        first = x[:, 1:3].flatten() > 0
        h = rows.new_zeros(len(rows), 5)
        h[first], h[~first] = self.a(rows[first]), self.b(rows[~first])
        return self.c(h.tanh().view(len(x), 2, -1).sum(1))


class Spectral(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4)
        return self.c(self.a(x).tanh() + self.b(x))


def batch(n: int) -> tuple[Tensor, Tensor]:
    """Samples that mask nothing at first, and give as many rows to an expert as there are samples."""
    torch.manual_seed(1)
    x = torch.randn(n, 4, dtype=torch.float64)
    x[:8, 0].abs_()
    signs = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]]).repeat(n, 1)[:n]
    x[:, 1:3] = x[:, 1:3].abs() * signs
    return x, torch.randint(3, (n,))


@pytest.mark.parametrize("chunk_size", [None, 8])
@pytest.mark.parametrize("kind", [Sorted, SortedAndPlain, Masked, Routed, Spectral])
def test_trace_error_diagonal_and_gram_matrix(kind, chunk_size):
    torch.manual_seed(0)
    model = kind().double()
    x, y = batch(21)
    rows = empirical(model, x, y)
    flat = torch.cat([g.flatten(1) for g in rows.values()], 1)
    norms = flat.square().sum(1)
    metric = FisherInformation(labels="empirical", chunk_size=chunk_size)
    metric.update(model, x, y)
    estimate = metric.compute()
    torch.testing.assert_close(estimate.trace, norms.mean())
    torch.testing.assert_close(estimate.standard_error, norms.std() / math.sqrt(21))
    torch.testing.assert_close(gradient_gram(model, x, y, chunk_size=chunk_size), flat @ flat.T)
    diagonal = fisher_diagonal(model, x, y, labels="empirical", chunk_size=chunk_size)
    for name, g in rows.items():
        torch.testing.assert_close(diagonal[name], g.square().mean(0))


@pytest.mark.parametrize("chunk_size", [8, 4, 1])
def test_chunks_in_which_a_layer_sees_no_sample(chunk_size):
    torch.manual_seed(0)
    model = Masked().double()
    x, y = batch(21)
    x[8:16, 0] = -x[8:16, 0].abs()
    flat = torch.cat([g.flatten(1) for g in empirical(model, x, y).values()], 1)
    torch.testing.assert_close(gradient_gram(model, x, y, chunk_size=chunk_size), flat @ flat.T)


def test_more_samples_than_are_taken_at_once():
    torch.manual_seed(0)
    model = Masked().double()
    x, y = batch(1100)
    x[:600, 0].abs_()
    expected = fisher_trace(model, x, y, labels="empirical", chunk_size=1)
    torch.testing.assert_close(fisher_trace(model, x, y, labels="empirical"), expected)


@pytest.mark.parametrize("normed", [False, True])
def test_a_convolution_whose_bias_alone_is_seen(normed):
    torch.manual_seed(0)
    conv = nn.Conv1d(2, 3, 3, padding=1)
    if normed:
        nn.utils.parametrizations.weight_norm(conv, dim=2)
    else:
        conv.weight.requires_grad_(False)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)).double()
    x, y = torch.randn(4, 2, 5, dtype=torch.float64), torch.randint(3, (4,))
    rows = empirical(model, x, y)
    diagonal = fisher_diagonal(model, x, y, labels="empirical")
    for name, g in rows.items():
        torch.testing.assert_close(diagonal[name], g.square().mean(0))
    flat = torch.cat([g.flatten(1) for g in rows.values()], 1)
    torch.testing.assert_close(gradient_gram(model, x, y), flat @ flat.T)


def test_a_gram_matrix_with_a_parameter_of_one_number():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.gate = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.c(x) * self.gate

    torch.manual_seed(0)
    model, x, y = Scaled().double(), torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    flat = torch.cat([g.reshape(5, -1) for g in empirical(model, x, y).values()], 1)
    torch.testing.assert_close(gradient_gram(model, x, y), flat @ flat.T)


def test_yes_and_no_as_labels():
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.rand(5, 3) > 0.5
    found = fisher_trace(model, x, y, labels="empirical", likelihood="bernoulli")
    expected = fisher_trace(model, x, y.float(), labels="empirical", likelihood="bernoulli")
    torch.testing.assert_close(found, expected)


def test_what_was_found_in_one_way_of_calling_says_nothing_about_another():
    """Inputs that are centred before they reach the model mix the samples, where no graph shows it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3
    plain = [float(fisher_trace(model, x, y, labels="empirical")) for _ in range(2)]
    assert plain[0] == plain[1]
    with pytest.warns(TaskInfoWarning, match="depend on the others of its batch"):
        fisher_trace(
            model, x, y, labels="empirical", forward_fn=lambda model, x: model(x - x.mean(0))
        )
    assert float(fisher_trace(model, x, y, labels="empirical")) == plain[0]


def test_features_of_chunks_with_different_uses_are_not_mixed_up():
    """One sample uses a matrix once, the others twice: their gradients have another order of entries in between."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

        def forward(self, x):
            h = x @ self.matrix
            some = x[:, 0] > 0
            out = h.tanh().clone()
            out[some] = out[some] @ self.matrix
            return out

    torch.manual_seed(0)
    model = Twice()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 4
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    rows = empirical(model, x, y)["matrix"].reshape(5, -1)
    for chunk_size in (1, 2, None):
        torch.testing.assert_close(gradient_gram(model, x, y, chunk_size=chunk_size), rows @ rows.T)


def test_slices_of_one_parameter_in_different_chunks_are_not_mixed_up():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

        def forward(self, x):
            outputs = [row @ (self.matrix[:3] if row[0] > 0 else self.matrix[3:]).t() for row in x]
            return torch.stack(outputs)

    torch.manual_seed(0)
    model = Halves()
    x, y = torch.randn(4, 4, dtype=torch.float64), torch.arange(4) % 3
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    rows = empirical(model, x, y)["matrix"].reshape(4, -1)
    for chunk_size in (1, 2, None):
        torch.testing.assert_close(gradient_gram(model, x, y, chunk_size=chunk_size), rows @ rows.T)
