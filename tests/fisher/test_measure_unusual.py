"""Networks that few write, against plain autograd: chance in eval mode, hooks, nested tensors, half precision."""

import pytest
import torch
from torch import Tensor, nn

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.fisher import fisher_diagonal, per_sample_squared_norms
from tests.fisher.test_measure import empirical


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.hidden(x).tanh())

    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x)


class Noisy(Net):
    """Draws a sign in eval mode, too, unless it is given."""

    sign: float | None = None

    def hidden(self, x: Tensor) -> Tensor:
        drawn = torch.randint(2, ()) * 2.0 - 1
        return self.a(x) * (drawn if self.sign is None else self.sign)


class Blurred(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x + torch.randn_like(x))


class Halved(Net):
    """Switches to half precision inside of its forward pass."""

    def hidden(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.a(x).float()


class Nested(Net):
    """Sequences of several lengths in one tensor."""

    def hidden(self, x: Tensor) -> Tensor:
        lengths = (x[..., 0] > 0).sum(1) + 1
        sequences = [row[:n] for row, n in zip(x, lengths, strict=True)]
        nested = torch.nested.nested_tensor(sequences, layout=torch.jagged)
        return self.a(nested).to_padded_tensor(0.0).sum(1)


def norms_of(rows: dict[str, Tensor]) -> Tensor:
    return sum(g.flatten(1).square().sum(1) for g in rows.values())


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)


@pytest.mark.parametrize("options", [{}, {"engine": "loop"}, {"chunk_size": 1}], ids=str)
@pytest.mark.filterwarnings("ignore:The model's outputs for a sample depend .* or on chance")
def test_score_and_gradient_are_those_of_the_same_draw(batch, options):
    model = Noisy()
    expected = []
    for model.sign in (1.0, -1.0):
        expected.append(norms_of(empirical(model, *batch)))
    model.sign = None
    for seed in range(8):
        torch.manual_seed(seed)
        norms = per_sample_squared_norms(model, *batch, labels="empirical", **options)
        nearest = (torch.stack(expected) - norms).abs().amin(0)
        assert (nearest < 1e-5 * norms).all()


@pytest.mark.filterwarnings("ignore:The model's outputs for a sample depend")
def test_chance_is_named_where_torch_func_is_asked_for(batch):
    with pytest.raises(ValueError, match="or the model draws random numbers in eval mode"):
        per_sample_squared_norms(Blurred(), *batch, labels="empirical", engine="per_sample")


@pytest.mark.parametrize("engine", ["auto", "per_sample", "loop"])
def test_hooks_of_parameters_do_not_run_and_are_named(batch, engine):
    x, y = batch
    model = Net()
    expected = norms_of(empirical(model, x, y))
    calls: list[Tensor] = []
    model.a.weight.register_hook(lambda g: g * 0)
    model.a.weight.register_hook(calls.append)
    with pytest.warns(TaskInfoWarning, match=r"Hooks on a\.weight do not run in a measurement"):
        norms = per_sample_squared_norms(model, x, y, labels="empirical", engine=engine)
    torch.testing.assert_close(norms, expected)
    assert not calls
    model(x).sum().backward()
    assert len(calls) == 1  # they are there again, in their order
    assert not calls[0].any()


def test_several_scores_through_half_precision(batch):
    x, _ = batch
    got = fisher_diagonal(Halved(), x, labels="exact")
    expected = fisher_diagonal(Net(), x, labels="exact")
    for name, diagonal in expected.items():
        torch.testing.assert_close(got[name], diagonal, rtol=0.05, atol=0.01)


def test_nested_tensors_take_one_sample_after_the_other():
    torch.manual_seed(0)
    x, y = torch.randn(5, 6, 4), torch.randint(3, (5,))
    model = Nested()
    with pytest.warns(TaskInfoWarning, match="torch.func cannot run this model"):
        norms = per_sample_squared_norms(model, x, y, labels="empirical")
    torch.testing.assert_close(norms, norms_of(empirical(model, x, y)))
