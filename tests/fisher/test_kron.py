"""Kronecker factors against the sums that define them, written as loops, and against whole Fisher matrices."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_taskinfo.fisher import KroneckerFactors, fisher_diagonal, kron, kronecker_factors
from lightning_taskinfo.fisher.kron import as_factors, kronecker_sums
from lightning_taskinfo.fisher.measure import Request
from lightning_taskinfo.functional.likelihood import Gaussian
from tests.fisher import networks


def weighted_scores(outputs: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Probability and gradient of the log-likelihood for every label of one sample's logits ``[1, C]``."""
    p = outputs.softmax(-1)[0].detach()
    for c in range(len(p)):
        yield p[c].item(), F.one_hot(torch.tensor([c]), len(p)).double() - p


def by_place(
    model: nn.Module, inputs: Any, scores: Callable = weighted_scores
) -> dict[str, list[Tensor]]:
    """``[rows, columns]`` of every layer's weight, sample by sample, label by label and place by place.

    The gradient at a layer's output is that of zeros that are added to it.
    """
    rows, columns, places = defaultdict(float), defaultdict(float), defaultdict(int)
    layers = {
        n: m
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear | nn.Conv2d | nn.Embedding)
    }
    for x in inputs:
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def hook(name: str, seen: dict[str, Any] = seen) -> Callable:
            def add_zeros(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
                zeros = torch.zeros_like(output, requires_grad=True)
                seen[name] = args[0].detach(), zeros
                return output + zeros

            return add_zeros

        handles = [module.register_forward_hook(hook(name)) for name, module in layers.items()]
        outputs = model(x[None])
        for handle in handles:
            handle.remove()
        gradients = [
            (
                p,
                torch.autograd.grad(
                    outputs, [zeros for _, zeros in seen.values()], score, retain_graph=True
                ),
            )
            for p, score in scores(outputs)
        ]
        for i, (name, (a, _)) in enumerate(seen.items()):
            module = layers[name]
            if isinstance(module, nn.Conv2d):
                (a,) = F.unfold(
                    a, module.kernel_size, module.dilation, module.padding, module.stride
                )
                a = a.T
            elif isinstance(module, nn.Embedding):
                a = F.one_hot(a.flatten(), module.num_embeddings).double()
            for input_row in a.reshape(-1, a.shape[-1]):
                columns[name] += input_row.outer(input_row)
                places[name] += 1
            for p, by_layer in gradients:
                b = by_layer[i]
                b = (
                    b[0].flatten(1).T
                    if isinstance(module, nn.Conv2d)
                    else b.reshape(-1, b.shape[-1])
                )
                for output_row in b:
                    rows[name] += p * output_row.outer(output_row)
    factors = {name: [rows[name] / places[name], columns[name] / len(inputs)] for name in rows}
    for name in factors:
        if isinstance(
            layers[name], nn.Embedding
        ):  # a table is the transposed weight of a layer on one-hot inputs
            factors[name].reverse()
    return {f"{name}.weight".lstrip("."): parts for name, parts in factors.items()}


def sample_gradients(model: nn.Module, inputs: Any, name: str) -> Iterator[tuple[float, Tensor]]:
    """Probability and gradient of one parameter, for every sample and label."""
    parameter = dict(model.named_parameters())[name]
    for x in inputs:
        outputs = model(x[None])
        for p, score in weighted_scores(outputs):
            (g,) = torch.autograd.grad(
                outputs, [parameter], score, retain_graph=True, allow_unused=True
            )
            yield p, torch.zeros_like(parameter) if g is None else g


def block(model: nn.Module, inputs: Any, name: str) -> Tensor:
    """The parameter's block of the Fisher information, a whole matrix."""
    return sum(
        p * g.flatten().outer(g.flatten()) for p, g in sample_gradients(model, inputs, name)
    ) / len(inputs)


def dense(factors: KroneckerFactors) -> Tensor:
    rows, columns = (
        f if f is None or f.dim() == 2 else f.diag() for f in (factors.rows, factors.columns)
    )
    return rows if columns is None else torch.kron(rows, columns)


def assert_same(got: KroneckerFactors, rows: Tensor, columns: Tensor) -> None:
    """The product counts; how a number is shared among its factors does not."""
    torch.testing.assert_close(dense(got), torch.kron(rows, columns))


class Sequence(nn.Module):
    """Tokens, a position embedding, layer norm and a linear layer on sequences."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, padding_idx=padding_idx)
        self.position = nn.Parameter(torch.randn(1, 5, 4))
        self.norm = nn.LayerNorm(4)
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.table(tokens) + self.position)).tanh().mean(1))


def convolution(**arguments: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, **arguments),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        nn.LazyLinear(3),
    )


def images(n: int = 5, size: int = 8) -> Tensor:
    return torch.randn(n, 2, size, size, dtype=torch.float64)


CHAINS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (
        nn.Sequential(
            nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 20), nn.Sigmoid(), nn.Linear(20, 20)
        ),
        torch.randn(7, 5, dtype=torch.float64),
    ),
    "convolution": lambda: (convolution(), images()),
    "strided": lambda: (convolution(stride=2, padding=1, bias=False), images()),
    "dilated": lambda: (convolution(dilation=2, padding=(2, 1)), images()),
    "one_output": lambda: (
        nn.Sequential(nn.Conv2d(2, 1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)),
        images(),
    ),
}
OTHERS = {
    "sequence": lambda: (Sequence(), torch.randint(6, (7, 5))),
    "padded": lambda: (Sequence(padding_idx=2), torch.randint(6, (7, 5))),
    "functional": lambda: (networks.Functional(), torch.randn(7, 5, dtype=torch.float64)),
}


def prepared(make: Callable) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, inputs = make()
    model = model.double().eval()
    model(inputs)
    return model, inputs


def serve(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let BackPACK compute the factors, or our own code."""
    monkeypatch.setattr(kron, "_backpack_covers", lambda *_: way == "backpack")


@pytest.mark.parametrize("chunk_size", [3, None])
@pytest.mark.parametrize("name", [*CHAINS, *OTHERS])
def test_factors_are_the_sums_that_define_them(name, chunk_size, monkeypatch):
    model, inputs = prepared({**CHAINS, **OTHERS}[name])
    expected = by_place(model, inputs)
    for way in ("own", "backpack") if name in CHAINS else ("own",):
        serve(way, monkeypatch)
        factors = kronecker_factors(model, inputs, labels="exact", chunk_size=chunk_size)
        assert factors.keys() == dict(model.named_parameters()).keys()
        for parameter, (rows, columns) in expected.items():
            if name == "padded" and parameter == "table.weight":
                continue  # see below
            assert_same(factors[parameter], rows, columns)


def test_padding_does_not_count_in_a_table():
    model, inputs = prepared(OTHERS["padded"])
    table = kronecker_factors(model, inputs, labels="exact")["table.weight"]
    counts = torch.bincount(inputs.flatten(), minlength=6).double()
    counts[2] = 0
    torch.testing.assert_close(table.rows / table.rows.sum(), counts / counts.sum())
    exact = fisher_diagonal(model, inputs, labels="exact")["table.weight"].sum()
    assert 0.2 * exact < table.trace() < 5 * exact


@pytest.mark.parametrize("labels", ["sampled", "exact", "empirical"])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", Gaussian(std=0.3)], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_backpack_and_our_own_factors_agree(name, labels, likelihood, monkeypatch):
    model, inputs = prepared(CHAINS[name])
    targets = likelihood_targets(model(inputs), likelihood)

    def factors(way: str) -> dict[str, KroneckerFactors]:
        serve(way, monkeypatch)
        return kronecker_factors(
            model,
            inputs,
            targets,
            labels=labels,
            likelihood=likelihood,
            mc_samples=3,
            generator=torch.Generator().manual_seed(0),
            chunk_size=4,
        )

    ours, theirs = factors("own"), factors("backpack")
    for parameter, of_parameter in ours.items():
        torch.testing.assert_close(vars(of_parameter), vars(theirs[parameter]))


def likelihood_targets(outputs: Tensor, likelihood: Any) -> Tensor:
    if likelihood == "categorical":
        targets = torch.arange(len(outputs)) % 3
        targets[2] = -100  # a sample that does not count
        return targets
    return torch.rand_like(outputs.detach())


EXACT = {
    "mlp": CHAINS["mlp"],
    "one_position": lambda: (
        nn.Sequential(nn.Conv2d(2, 3, 4), nn.Flatten(), nn.Linear(3, 3)),
        images(size=4),
    ),
    "one_token": lambda: (
        nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 3)),
        torch.randint(6, (5, 1)),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_one_sample_at_one_place_is_exact(name):
    """Also where several labels count: the input is the same for all of them."""
    model, inputs = prepared(EXACT[name])
    factors = kronecker_factors(model, inputs[:1], labels="exact")
    for parameter in dict(model.named_parameters()):
        torch.testing.assert_close(dense(factors[parameter]), block(model, inputs[:1], parameter))


@pytest.mark.parametrize("name", ["strided", "sequence", "batch_norm"])
def test_the_block_of_a_vector_is_exact(name):
    made = {
        **CHAINS,
        **OTHERS,
        "batch_norm": lambda: (
            nn.Sequential(
                nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3)
            ),
            images(),
        ),
    }
    model, inputs = prepared(made[name])
    factors = kronecker_factors(model, inputs, labels="exact")
    vectors = [name for name, p in model.named_parameters() if p.dim() == 1]
    assert vectors
    for name in vectors:
        assert factors[name].columns is None
        torch.testing.assert_close(factors[name].rows, block(model, inputs, name))


WHOLE = {
    "called_twice": (networks.Twice, lambda: torch.randn(6, 5).double(), "a.weight"),
    "position": (Sequence, lambda: torch.randint(6, (7, 5)), "position"),
    "grouped": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3)),
        lambda: images(size=4),
        "0.weight",
    ),
}


@pytest.mark.parametrize(("make", "inputs", "name"), WHOLE.values(), ids=WHOLE)
def test_any_other_matrix_has_the_factors_of_its_whole_gradients(make, inputs, name):
    model, inputs = prepared(lambda: (make(), inputs()))
    factors = kronecker_factors(model, inputs, labels="exact", chunk_size=4)[name]
    rows, columns, squares = 0.0, 0.0, 0.0
    for p, g in sample_gradients(model, inputs, name):
        g = g.squeeze(0).flatten(1)
        rows, columns, squares = (
            rows + p * g @ g.T,
            columns + p * g.T @ g,
            squares + p * g.square().sum(),
        )
    assert_same(factors, rows / len(inputs), columns / squares)
    torch.testing.assert_close(factors.trace(), squares / len(inputs))


def test_a_tied_table_has_the_trace_of_the_fisher():
    torch.manual_seed(0)
    model, tokens = networks.TiedModules(), torch.randint(7, (5, 6))
    factors = kronecker_factors(model, tokens, labels="exact")
    exact = fisher_diagonal(model, tokens, labels="exact")
    assert factors.keys() == exact.keys()
    torch.testing.assert_close(factors["embedding.weight"].trace(), exact["embedding.weight"].sum())


@pytest.mark.parametrize("size", [5, 12])
def test_the_trace_of_a_convolution_is_near_that_of_the_fisher(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    inputs = torch.randn(64, 2, size, size)
    model(inputs)
    trace = kronecker_factors(model, inputs, labels="exact")["0.weight"].trace()
    exact = fisher_diagonal(model, inputs, labels="exact")["0.weight"].sum()
    assert trace.item() == pytest.approx(exact.item(), rel=0.15)


@pytest.mark.filterwarnings("ignore::UserWarning")  # about engines that are slower
def test_samples_of_another_kind_are_measured_by_their_whole_gradients():
    """Rows that are sorted in the second chunk only: the factors of all samples are of one kind, and right."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if (x[:, 0] > 0).all():
                return self.c(self.a(x).tanh())
            order = x[:, 1].argsort()
            return self.c(self.a(x[order]).tanh()[order.argsort()])

    torch.manual_seed(1)
    model, inputs = Routed().double(), torch.randn(12, 5, dtype=torch.float64)
    inputs[:, 0] = inputs[:, 0].abs() * torch.tensor([1.0] * 6 + [-1.0] * 6)
    factors = kronecker_factors(model, inputs, labels="exact", chunk_size=6)
    torch.testing.assert_close(factors["a.bias"].rows, block(model, inputs, "a.bias"))
    kinds = [
        block(model, inputs, "a.weight").trace(),
        torch.kron(*by_place(model, inputs)["a.weight"]).trace(),
    ]
    assert any(torch.isclose(factors["a.weight"].trace(), kind) for kind in kinds)


class Kept(nn.Module):
    """A layer that sees the frames of each sample whose first number is positive."""

    def __init__(self, layer: nn.Module, *position: int) -> None:
        super().__init__()
        self.layer, self.c, self.position = layer, nn.Linear(4, 3), position

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, :, 0] > 0
        rows = x[kept].reshape(-1, 5, *self.position)
        h = x.new_zeros(*kept.shape, 4)
        h[kept] = self.layer(rows).flatten(1).tanh()
        return self.c(h.sum(1))


def test_a_convolution_of_one_position_has_the_factors_of_a_linear_layer_where_samples_have_unlike_numbers_of_rows():
    torch.manual_seed(0)
    linear, conv = Kept(nn.Linear(5, 4)).double(), Kept(nn.Conv1d(5, 4, 1), 1).double()
    for own, given in zip(conv.parameters(), linear.parameters(), strict=True):
        own.data.copy_(given.view_as(own))
    inputs = torch.randn(4, 6, 5, dtype=torch.float64)
    inputs[:, :, 0] = torch.where(torch.arange(6) < torch.tensor([[6], [1], [2], [1]]), 1.0, -1.0)
    found, expected = (
        kronecker_factors(net, inputs, labels="exact")["layer.weight"] for net in (conv, linear)
    )
    torch.testing.assert_close(found.rows, expected.rows)
    torch.testing.assert_close(found.columns, expected.columns)


@pytest.mark.parametrize("way", ["own", "backpack"])
def test_long_sides_keep_their_diagonal(way, monkeypatch):
    serve(way, monkeypatch)
    model, inputs = prepared(CHAINS["mlp"])
    whole = kronecker_factors(model, inputs, labels="exact")
    monkeypatch.setattr(kron, "MAX_SIDE", 4)
    short = kronecker_factors(model, inputs, labels="exact")
    assert short["2.weight"].rows.shape == (20,)
    for name, factors in short.items():
        torch.testing.assert_close(factors.diagonals(), whole[name].diagonals())
        torch.testing.assert_close(factors.trace(), whole[name].trace())


def test_sampled_factors_are_unbiased_and_follow_the_generator():
    model, inputs = prepared(CHAINS["mlp"])
    g, state = torch.Generator().manual_seed(0), torch.get_rng_state()
    draws = torch.stack(
        [kronecker_factors(model, inputs, generator=g)["4.weight"].trace() for _ in range(100)]
    )
    expected = kronecker_factors(model, inputs, labels="exact")["4.weight"].trace()
    assert (draws.mean() - expected).abs() < 4 * draws.std() / len(draws) ** 0.5
    again = kronecker_factors(model, inputs, generator=torch.Generator().manual_seed(0))[
        "4.weight"
    ].trace()
    assert draws[0] == again
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("way", ["own", "backpack"])
def test_the_model_is_left_alone(way, monkeypatch):
    serve(way, monkeypatch)
    model, inputs = prepared(CHAINS["mlp"])
    model.train()
    kronecker_factors(model, inputs)
    assert model.training
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    assert all(p.grad is None and not hasattr(p, "kflr") for p in model.parameters())


def test_frozen_weights_and_unused_ones():
    model = nn.ModuleDict(
        {"used": nn.Linear(3, 3), "frozen": nn.Linear(3, 3), "unused": nn.Linear(2, 2)}
    )
    model["frozen"].requires_grad_(False)
    factors = kronecker_factors(
        model, torch.randn(4, 3), forward_fn=lambda m, x: m["frozen"](m["used"](x)), labels="exact"
    )
    assert [*factors] == ["used.weight", "used.bias", "unused.weight", "unused.bias"]
    assert factors["used.weight"].trace() > 0
    assert factors["unused.weight"].trace() == factors["unused.bias"].trace() == 0


def test_half_precision_is_measured_in_float32():
    model, inputs = prepared(CHAINS["convolution"])
    model, inputs = model.bfloat16(), inputs.bfloat16()
    half = kronecker_factors(model, inputs, labels="exact")
    full = kronecker_factors(model.float(), inputs.float(), labels="exact")
    for name, factors in half.items():
        assert factors.rows.dtype == torch.float32
        torch.testing.assert_close(vars(factors), vars(full[name]))


class Between(nn.Module):
    """Two layers, with something between or behind them that BackPACK does not see."""

    def __init__(self, how: Callable[[Tensor], Tensor], behind: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.how, self.behind = nn.Linear(4, 4), nn.Linear(4, 4), how, behind

    def forward(self, x: Tensor) -> Tensor:
        if self.behind:
            return self.how(self.b(self.a(x)))
        return self.b(self.how(self.a(x)))


NOT_CHAINS = {
    "operation": Between(torch.tanh),
    "in_place": Between(lambda h: h.mul_(2)),
    "in_place_behind": Between(lambda h: h.mul_(2), behind=True),
    "another_order": Between(lambda h: h.flip(1)),
    "unknown_layer": nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)),
    "in_place_layer": nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "norm": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
    "twice": nn.Sequential(*[nn.Linear(4, 4)] * 2),
    "raw": networks.Raw(),
    "sequence": nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 4), nn.Flatten()),
    "hooked": nn.utils.weight_norm(nn.Linear(4, 4)),
    "frozen": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)),
}


@pytest.mark.parametrize("name", NOT_CHAINS)
def test_backpack_is_not_asked_for_what_it_would_get_wrong(name, monkeypatch):
    model = NOT_CHAINS[name]
    torch.manual_seed(0)
    inputs = torch.randn(4, 5 if name == "raw" else 4)
    monkeypatch.setattr(kron, "_add_by_backpack", pytest.fail)
    assert kronecker_factors(model, inputs)


def test_backpack_is_asked_for_what_it_serves(monkeypatch):
    asked = []
    monkeypatch.setattr(kron, "_add_by_backpack", lambda *_: asked.append(1))
    for make in CHAINS.values():
        kronecker_factors(*prepared(make))
    assert len(asked) == len(CHAINS)


def test_without_backpack(monkeypatch):
    model, inputs = prepared(CHAINS["mlp"])
    with_it = kronecker_factors(model, inputs, labels="exact")
    monkeypatch.setitem(sys.modules, "backpack", None)  # what makes an import fail
    for name, factors in kronecker_factors(model, inputs, labels="exact").items():
        torch.testing.assert_close(vars(factors), vars(with_it[name]))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"labels": "true"}, "`labels` must be .* got 'true'"),
        ({"labels": "empirical"}, "`targets` must be given"),
    ],
    ids=str,
)
def test_refusals(arguments, match):
    model, inputs = prepared(CHAINS["mlp"])
    with pytest.raises((ValueError, TypeError), match=match):
        kronecker_factors(model, inputs, **arguments)


@pytest.mark.parametrize("name", ["strided", "sequence"])
def test_factors_of_several_processes_are_those_of_all_samples(name):
    model, inputs = prepared({**CHAINS, **OTHERS}[name])
    request = Request(labels="exact")
    parts = [kronecker_sums(model, some, None, request) for some in (inputs[:2], inputs[2:])]
    others = [part for sums in parts[1].by_name.values() for part in vars(sums).values()]
    summed = parts[0].summed(lambda mine: mine + others.pop(0))
    for parameter, factors in kronecker_factors(model, inputs, labels="exact").items():
        found = as_factors(summed, len(inputs))[parameter]
        torch.testing.assert_close(vars(found), vars(factors))
        expected = torch.linalg.eigvalsh(dense(factors))
        eigenvalues = found.eigen()[0].flatten().sort().values
        torch.testing.assert_close(eigenvalues, expected, atol=1e-10, rtol=1e-6)


def test_an_activation_that_is_used_twice_takes_our_own_factors():
    torch.manual_seed(0)
    relu = nn.ReLU()
    twice = nn.Sequential(nn.Linear(3, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 2))
    apart = nn.Sequential(*twice[:3], nn.ReLU(), twice[4])
    x, y = torch.randn(5, 3), torch.arange(5) % 2
    options = {"labels": "empirical"}
    found = kronecker_factors(twice, x, y, **options)
    for name, factors in kronecker_factors(apart, x, y, **options).items():
        torch.testing.assert_close(found[name].trace(), factors.trace())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)], ids=str)
def test_a_parameter_without_entries_has_empty_factors(shape):
    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 3)
            self.empty = nn.Parameter(torch.ones(shape))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.empty.sum())

    factors = kronecker_factors(Net(), torch.randn(4, 5))
    assert factors["empty"].trace() == 0
    assert factors["weight"].trace() > 0
