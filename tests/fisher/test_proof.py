"""What is shown about a model, and when it holds again; it never makes a later measurement wrong."""

import gc
import weakref
from functools import reduce

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo._observe import trainable_parameters
from lightning_taskinfo.fisher import per_sample_squared_norms, proof
from lightning_taskinfo.fisher.graph import Graph
from lightning_taskinfo.fisher.measure import _KNOWN
from lightning_taskinfo.fisher.proof import Prover
from tests.fisher.test_measure import empirical


class Changing(nn.Module):
    """A network whose way of computing hangs on things that no shape of an input or parameter shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.gate = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.way = "plain"

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        if self.way == "twice":
            h = self.b(self.b(h).tanh())
        elif self.way == "raw":
            h = h @ self.b.weight.T + self.b.bias
        elif self.way == "time first":
            h = self.b(h.transpose(0, 1)).transpose(0, 1)
        else:
            h = self.b(h)
        h = h + self.gate * h.mean(0)
        return self.c(h.tanh())[:, -1]


@pytest.fixture
def model() -> Changing:
    torch.manual_seed(0)
    return Changing().double()


def data(n: int, positions: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, positions, 4, dtype=torch.float64), torch.randint(3, (n,))


def check(model: nn.Module, n: int, positions: int = 6) -> None:
    x, y = data(n, positions)
    expected = sum(g.flatten(1).square().sum(1) for g in empirical(model, x, y).values())
    norms = per_sample_squared_norms(model, x, y, labels="empirical")
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
def test_other_numbers_of_samples(model, n):
    check(model, 8)
    check(model, n)


@pytest.mark.parametrize(
    "n", [6, 7]
)  # as many as there are positions, where shapes do not tell, and not
@pytest.mark.parametrize("way", ["twice", "raw", "time first"])
def test_another_way_through_the_same_modules(model, way, n):
    check(model, n)
    model.way = way
    check(model, n)
    model.way = "plain"
    check(model, n)


def test_samples_that_begin_to_depend_on_each_other(model):
    check(model, 7)
    model.gate.data.fill_(1.0)
    with pytest.warns(UserWarning, match="outputs for a sample depend on the others"):
        check(model, 7)  # the loop runs batches of one


def test_other_inputs_and_other_layers(model):
    check(model, 7)
    check(model, 7, positions=5)
    model.b = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 5)).double()
    check(model, 7, positions=5)


def test_a_parameter_that_is_frozen_or_tied_later(model):
    check(model, 7)
    model.a.weight.requires_grad_(False)
    check(model, 7)
    model.b.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
    model.d = nn.Linear(5, 5)
    model.d.weight = model.b.weight
    check(model, 7)


def test_a_model_is_not_kept_alive():
    model = Changing().double()
    check(model, 7)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def plan(model, x):
    alone, graph = (Graph(model(some), trainable_parameters(model)) for some in (x[:1], x))
    return Prover(graph, len(x), rounds=4, alone=alone.signature).plan()


def test_a_proof_is_used_again(model, monkeypatch):
    model.gate.data.fill_(1e-30)  # not zero, so that a gradient arrives everywhere
    model.way = "raw"

    def forward(x):
        return model.c(model.a(x).tanh())[:, -1]

    model.forward = forward
    x, y = data(7)
    for _ in range(2):  # shown for the first batch, and for the next
        expected = per_sample_squared_norms(model, x, y, labels="empirical")
    monkeypatch.setattr(Prover, "plan", None)
    torch.testing.assert_close(per_sample_squared_norms(model, x, y, labels="empirical"), expected)
    with pytest.raises(TypeError, match="not callable"):
        per_sample_squared_norms(model, *data(6), labels="empirical")


def test_no_proof_lasts_where_a_branch_has_no_gradient_or_mixes_a_little(model):
    x = data(7)[0]
    assert not plan(model, x).lasting  # the gate is zero
    model.gate.data.fill_(1e-12)
    assert not plan(model, x).lasting
    model.gate.data.fill_(1e-20)
    assert not plan(model, x).lasting


def test_no_proof_lasts_where_rows_are_moved():
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            i = x[:, 0].argsort()
            return self.c(self.a(x[i]).tanh()[i.argsort()])

    found = plan(Sorted().double(), torch.randn(7, 4, dtype=torch.float64))
    assert not found.lasting
    assert not found.unshown


class Padded(nn.Module):
    """Positions up to a length, which is the first feature; the layer sees them in some order of rows."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(4, 5), nn.Linear(5, 3)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        n, positions, _ = x.shape
        if self.order == "time first":
            h = self.a(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (positions, n)).transpose(0, 1)
        elif self.order == "between":  # rows of (half of the positions, sample, the other half)
            halves = x.unflatten(1, (2, -1)).transpose(0, 1)  # [2, N, T/2, D]
            h = self.a(halves.flatten(0, 2)).unflatten(0, halves.shape[:3])
            h = h.transpose(0, 1).flatten(1, 2)
        else:
            h = self.a(x.flatten(0, 1)).unflatten(0, (n, positions))
        mask = torch.arange(positions) < x[:, 0, :1]
        return self.c((h.tanh() * mask.unsqueeze(-1)).sum(1))


def padded(lengths: list[int]) -> tuple[Tensor, Tensor]:
    x, y = data(len(lengths))
    x[:, 0, 0] = torch.tensor(lengths)
    return x, y


@pytest.mark.parametrize("order", ["sample first", "time first", "between"])
@pytest.mark.parametrize(
    "first", [[1, 1, 1, 1, 1], [0, 0, 3, 0, 0], [2, 3, 1, 2, 2]], ids=["short", "one", "mixed"]
)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_rows_without_a_gradient_in_one_batch_count_in_the_next(order, first, chunk_size):
    torch.manual_seed(0)
    model = Padded(order).double()
    batches = [padded(first), padded([6, 6, 6, 6, 6])]
    if chunk_size:  # one measurement, whose chunks they are
        batches = [tuple(torch.cat(part) for part in zip(*batches, strict=True))]
    for x, y in batches:
        expected = sum(g.flatten(1).square().sum(1) for g in empirical(model, x, y).values())
        norms = per_sample_squared_norms(model, x, y, labels="empirical", chunk_size=chunk_size)
        torch.testing.assert_close(norms, expected, rtol=1e-9, atol=1e-12)


def test_proofs_last_for_the_usual_orders_of_rows_though_some_are_masked():
    x, _ = padded([2, 3, 1, 2, 2])
    for order, lasting in (("sample first", True), ("time first", True), ("between", False)):
        assert plan(Padded(order).double(), x).lasting == lasting, order


def test_no_proof_lasts_where_two_orders_of_rows_fit():
    """Of two samples with two rows each, the first and the last row: blocks and turns both fit."""
    x = torch.randn(2, 2, 4, dtype=torch.float64)
    x[:, 0, 0] = torch.tensor([1.0, 2.0])  # positions 0 of the one, and 0 and 1 of the other
    model = Padded("sample first").double()
    assert plan(model, x).lasting

    class Ends(Padded):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x.flatten(0, 1)).unflatten(0, x.shape[:2]).tanh()
            mask = torch.eye(2, dtype=x.dtype)[: len(x)]
            return self.c((h * mask.unsqueeze(-1)).sum(1))

    assert not plan(Ends("sample first").double(), x).lasting


class FirstToken(nn.Module):
    """A classifier by the first of the tokens: no gradient reaches those of the others behind the last exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h + h.mean(1, keepdim=True)
        rows = self.b(h.tanh().flatten(0, 1))
        return self.c(rows.unflatten(0, x.shape[:2])[:, 0].tanh())


@pytest.mark.parametrize(("n", "positions"), [(4, 5), (4, 9), (2, 7), (7, 197)])
def test_proofs_last_where_two_orders_agree_on_all_rows_that_count(n, positions):
    torch.manual_seed(0)
    model = FirstToken().double()
    assert plan(model, data(n, positions)[0]).lasting
    check(model, n, positions)
    check(model, n, positions)


def test_gradients_of_a_few_operations_are_held_together(model, monkeypatch):
    x, _ = data(7)
    model.gate.data.fill_(1.0)
    model.forward = lambda x: model.c(model.b(model.a(x)).tanh()).sum(1)
    expected = plan(model, x)
    monkeypatch.setattr(proof, "HELD", 1)
    held = []

    def backward(self, numbers, by_sample, run=Prover._backward):
        found = run(self, numbers, by_sample)
        held.append(len(found))
        return found

    monkeypatch.setattr(Prover, "_backward", backward)
    found = plan(model, x)
    assert max(held) == 1 < len(expected.places)
    assert {at.number: at.rows for at in found.places}.keys() == {
        at.number for at in expected.places
    }
    assert found.lasting
    assert not found.unshown


class Function(torch.autograd.Function):
    """Moves rows where only the function itself knows it."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx, b):
        (order,) = ctx.saved_tensors
        return b[order.argsort()], None


def by_product(h: Tensor, order: Tensor) -> Tensor:
    return torch.einsum("en,nd->ed", torch.eye(len(h), dtype=h.dtype)[order], h)


def by_batched_product(h: Tensor, order: Tensor) -> Tensor:
    """As many products as there are samples: sizes do not tell."""
    onehot = torch.eye(len(h), dtype=h.dtype)[order]
    several = torch.stack([onehot] * len(h)) @ torch.stack([h] * len(h))
    return several[0]


def by_product_with_a_vector(h: Tensor, order: Tensor) -> Tensor:
    return torch.stack([h.T @ row for row in torch.eye(len(h), dtype=h.dtype)[order]])


def by_product_of_a_vector(h: Tensor, order: Tensor) -> Tensor:
    onehot = torch.eye(len(h), dtype=h.dtype)[order]
    return torch.stack([onehot @ column for column in h.T], 1)


def by_selection(h: Tensor, order: Tensor) -> Tensor:
    return torch.stack([h[i] for i in order.tolist()])


def by_rolling(h: Tensor, order: Tensor) -> Tensor:
    return h.roll(-int(order[0]), 0)


def by_mask_and_sum(h: Tensor, order: Tensor) -> Tensor:
    mask = torch.eye(len(h), dtype=h.dtype)[order]
    return (mask.unsqueeze(-1) * h).sum(1)


def by_choice_and_sum(h: Tensor, order: Tensor) -> Tensor:
    mask = torch.eye(len(h), dtype=torch.bool)[order]
    return torch.where(mask.unsqueeze(-1), h, h.new_zeros(())).sum(1)


def by_filling_and_sum(h: Tensor, order: Tensor) -> Tensor:
    mask = torch.eye(len(h), dtype=torch.bool)[order]
    several = h.expand(len(h), *h.shape)
    return several.masked_fill(~mask.unsqueeze(-1), 0.0).sum(1)


def by_writing(h: Tensor, order: Tensor) -> Tensor:
    out = h.new_zeros(h.shape)
    for sample, place in enumerate(order.argsort().tolist()):  # where it writes, no setting tells
        out[place] = h[sample]
    return out


def by_sparse_product(h: Tensor, order: Tensor) -> Tensor:
    places = torch.stack([torch.arange(len(h)), order])
    ones = torch.ones(len(h), dtype=h.dtype)
    return torch.sparse_coo_tensor(places, ones, (len(h), len(h))) @ h


def others_far_below(h: Tensor, order: Tensor) -> Tensor:
    mask = torch.eye(len(h), dtype=torch.bool)[order]
    return h + torch.where(mask, 0.0, -1e9).unsqueeze(-1)


def by_largest(h: Tensor, order: Tensor) -> Tensor:
    return others_far_below(h, order).max(-2).values


def by_larger(h: Tensor, order: Tensor) -> Tensor:
    columns = others_far_below(h, order).unbind(1)
    return reduce(torch.maximum, columns)


def by_running_maximum(h: Tensor, order: Tensor) -> Tensor:
    return others_far_below(h, order).cummax(1).values[:, -1]


def by_rectifying(h: Tensor, order: Tensor) -> Tensor:
    return others_far_below(h + 2, order).relu().sum(1)


def by_pooling(h: Tensor, order: Tensor) -> Tensor:
    return nn.functional.adaptive_max_pool1d(others_far_below(h, order).mT, 1).squeeze(-1)


def by_unpooling(h: Tensor, order: Tensor) -> Tensor:
    places = order.argsort().expand(h.shape[1], -1)
    return nn.functional.max_unpool1d(h.T, places, 1, 1).T


def by_grid(h: Tensor, order: Tensor) -> Tensor:
    places = (2 * order + 1) / len(h) - 1
    grid = torch.stack([places, torch.zeros(len(h))], 1).to(h.dtype)
    moved = nn.functional.grid_sample(
        h.T[None, :, None], grid[None, None], mode="nearest", align_corners=False
    )
    return moved[0, :, 0].T


def by_power(h: Tensor, order: Tensor) -> Tensor:
    """Add up all samples, the others to the power of zero."""
    mask = torch.eye(len(h), dtype=h.dtype)[order]
    return (h ** mask.unsqueeze(-1)).sum(1) - len(h) + 1


class Moving(nn.Module):
    """Layers that see the samples in an order that the inputs tell."""

    def __init__(self, move) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.move = move

    def forward(self, x: Tensor) -> Tensor:
        start = int(x[:, 0].argmin())
        order = torch.arange(start, start + len(x)) % len(x)
        h = self.b(self.move(self.a(x).tanh(), order)).sin()
        return self.c(self.move(h, order.argsort()))


MOVES = {
    "product": by_product,
    "batched product": by_batched_product,
    "product with a vector": by_product_with_a_vector,
    "product of a vector": by_product_of_a_vector,
    "selection": by_selection,
    "rolling": by_rolling,
    "function": Function.apply,
    "mask and sum": by_mask_and_sum,
    "choice and sum": by_choice_and_sum,
    "filling and sum": by_filling_and_sum,
    "writing": by_writing,
    "sparse product": by_sparse_product,
    "largest": by_largest,
    "larger": by_larger,
    "running maximum": by_running_maximum,
    "rectifying": by_rectifying,
    "pooling": by_pooling,
    "unpooling": by_unpooling,
    "grid": by_grid,
}


def rolled(first: int, n: int = 5) -> tuple[Tensor, Tensor]:
    """Samples of which the layers see this one first."""
    x, y = torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))
    x[:, 0] = 1 + torch.arange(n)
    x[first, 0] = 0.0
    return x, y


def compare(model: nn.Module, x: Tensor, y: Tensor) -> None:
    expected = sum(g.flatten(1).square().sum(1) for g in empirical(model, x, y).values())
    norms = per_sample_squared_norms(model, x, y, labels="empirical")
    torch.testing.assert_close(norms, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("n", [2, 5])
def test_no_proof_lasts_where_rows_may_move_by_their_values(move, n):
    """Several batches are in order, so that shapes and proofs are those of a network that moves nothing."""
    torch.manual_seed(0)
    model = Moving(MOVES[move]).double()
    for first in (0, 0, 0, 1, n - 1, 0):
        compare(model, *rolled(first, n))


def test_rows_that_move_in_a_way_that_no_operation_tells_are_found_out():
    torch.manual_seed(0)
    model = Moving(by_power).double()
    compare(model, *rolled(0))
    with pytest.warns(TaskInfoWarning, match="b.bias, b.weight, which the batches before"):
        compare(model, *rolled(3))
    for first in (0, 0, 0, 4, 2):  # nothing is kept any more, whatever the next ones look like
        compare(model, *rolled(first))


@pytest.mark.parametrize("pool", [nn.MaxPool1d(2), nn.AdaptiveMaxPool1d(3)])
def test_proofs_last_for_networks_that_pool(pool):
    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.max(-1).values

    torch.manual_seed(0)
    layers = nn.Conv1d(2, 4, 3), nn.ReLU(), pool, nn.ReLU6(), Largest(), nn.Linear(4, 3)
    model = nn.Sequential(*layers).double()
    for _ in range(3):
        compare(model, torch.randn(5, 2, 8, dtype=torch.float64), torch.randint(3, (5,)))
    assert len(_KNOWN[model].plans.kept) == 1


def test_proofs_are_made_again_ever_more_rarely(model, monkeypatch):
    made = []
    plan = Prover.plan
    monkeypatch.setattr(Prover, "plan", lambda prover: made.append(len(used)) or plan(prover))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    used: list[int] = []
    for number in range(20):
        used.append(number)
        per_sample_squared_norms(model, torch.randn(5, 4, dtype=torch.float64))
    assert made == [1, 2, 5, 17]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_proofs_last_for_attention(implementation):
    heads, positions = 2, 3

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.c = nn.Linear(4, 12), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            q, k, v = parts.unbind()
            if implementation == "sdpa":
                h = nn.functional.scaled_dot_product_attention(q, k, v)
            else:
                h = (q @ k.mT).softmax(-1) @ v
            return self.c(h.transpose(1, 2).flatten(2))[:, 0]

    torch.manual_seed(0)
    assert plan(Attending().double(), torch.randn(4, positions, 4, dtype=torch.float64)).lasting


def test_only_a_few_plans_are_kept(monkeypatch):
    monkeypatch.setattr(proof, "PLANS", 8)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for n in range(2, 15):
        per_sample_squared_norms(model, torch.randn(n, 4, dtype=torch.float64))
    assert len(_KNOWN[model].plans.kept) == 8


def test_the_graph_serves_it_all_the_same(model):
    x, y = data(7)
    for _ in range(2):
        per_sample_squared_norms(model, x, y)  # without a warning


class Double(TorchDispatchMode):
    """Notes the size of the largest float64 tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype == torch.float64:
            self.largest = max(self.largest, made.numel())
        return made


def test_a_proof_needs_no_more_precision_than_the_outputs_have():
    """The outputs of a language model have a column for each word: a copy of them in float64 is large."""
    model = nn.Linear(4, 100)
    graph = Graph(model(torch.randn(7, 4)), trainable_parameters(model))
    with Double() as made:
        Prover(graph, 7, rounds=4).plan()
    assert made.largest < 100  # norms by operation


class ComputedFromEachOther(nn.Module):
    """An operation that takes a weight, and another one that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.weight, x, self.weight.exp()) + torch.addcmul(
            x, self.weight, self.weight
        )


@pytest.mark.filterwarnings("ignore:The graph does not show")
@pytest.mark.parametrize("n", [1, 5])
def test_inputs_of_an_operation_that_are_computed_from_each_other_count_once(n):
    torch.manual_seed(0)
    model = ComputedFromEachOther()
    x, y = torch.randn(n, 3, dtype=torch.float64), torch.arange(n) % 3
    rows = empirical(model, x, y)["weight"]
    torch.testing.assert_close(
        per_sample_squared_norms(model, x, y, labels="empirical"), rows.square().sum(1)
    )


class Shared(nn.Module):
    """A weight that an operation takes, beside something that was computed from it and from samples."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.rand(4) + 0.5)
        self.c = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.how(x * self.weight, self.weight))


SHARED = {
    "divided": lambda h, w: h.tanh() / w,
    "power": lambda h, w: (h.abs() + 0.1) ** w,
    "largest": torch.maximum,
    "chosen": lambda h, w: torch.where(h > 0, h, w.expand_as(h)),
    "added product": lambda h, w: torch.addcmul(h, h.sin(), w, value=0.5),
    "added": lambda h, w: h.tanh() + w,
    "product": lambda h, w: h.tanh() * w,
}


@pytest.mark.filterwarnings("ignore:The graph does not show")
@pytest.mark.parametrize("how", SHARED)
@pytest.mark.parametrize("n", [1, 5])
def test_a_weight_that_comes_to_an_operation_on_two_ways_counts_once(how, n):
    torch.manual_seed(0)
    compare(Shared(SHARED[how]).double(), *rolled(0, n))


DERIVED = {
    "standardised": lambda w: (w - w.mean(0)) / w.std(0),
    "of length one": lambda w: w / w.norm(dim=0, keepdim=True),
    "gated": lambda w: w * w.sigmoid(),
    "power": lambda w: w.abs() ** w.tanh(),
}


@pytest.mark.parametrize("how", DERIVED)
@pytest.mark.parametrize("n", [1, 5])
def test_a_weight_that_is_computed_from_itself_twice_counts_once(how, n):
    class Derived(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ DERIVED[how](self.weight)

    torch.manual_seed(0)
    compare(Derived().double(), *rolled(0, n))


def test_rows_of_a_batch_that_is_read_as_a_sequence_are_measured_alone():
    """Forgotten ``batch_first``: the first sample depends on no other, the last on all."""

    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.c = nn.LSTM(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.lstm(x)[0].mean(1))

    torch.manual_seed(0)
    with pytest.warns(TaskInfoWarning, match="depend on the others of its batch"):
        compare(Forgotten().double(), *data(5))


def test_a_weight_that_is_held_elsewhere_too():
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(
                4, 3, scale_grad_by_freq=True
            )  # which the graph does not show
            self.held = [self.table.weight]

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x).mean(1) @ self.held[0].T

    torch.manual_seed(0)
    model, x, y = Held().double(), torch.randint(4, (5, 3)), torch.randint(4, (5,))
    with pytest.warns(TaskInfoWarning, match="each sample takes a backward pass of its own"):
        compare(model, x, y)


def test_a_sparse_bag_of_embeddings():
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.c = nn.EmbeddingBag(6, 4, mode="sum", sparse=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.bag(x).tanh())

    torch.manual_seed(0)
    model, x, y = Bag().double(), torch.randint(6, (5, 3)), torch.randint(3, (5,))
    norms = per_sample_squared_norms(model, x, y, labels="empirical")
    model.bag.sparse = False
    rows = empirical(model, x, y)
    torch.testing.assert_close(norms, sum(g.flatten(1).square().sum(1) for g in rows.values()))


def test_a_hook_that_refuses_infinite_gradients_is_no_failure():
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            if h.requires_grad:
                h.register_hook(self.check)
            return self.c(h)

        def check(self, gradient: Tensor) -> None:
            if not bool(gradient.isfinite().all()):
                raise ValueError("not finite")

    torch.manual_seed(0)
    model = Watched().double()
    for _ in range(3):
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
        per_sample_squared_norms(model, x, y, labels="empirical")
    with torch.autograd.detect_anomaly(check_nan=True):
        per_sample_squared_norms(nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,)))


def test_a_table_that_is_normed_before_it_is_looked_up():
    """Samples that share no entry give each row of the table to one of them, which is no other way of moving rows."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items, self.c = nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(nn.functional.normalize(self.items, dim=1)[x])

    torch.manual_seed(0)
    model, y = Normed().double(), torch.tensor([0, 1, 2])
    for items in ([1, 1, 4], [5, 2, 3], [8, 0, 4], [7, 7, 7]):
        compare(model, torch.tensor(items), y)
    assert len(_KNOWN[model].plans.kept) == 1


def test_parts_of_a_weight_that_no_gradient_reaches():
    """The first forget gate of an LSTM meets a state of zeros: it need not be told apart by sample."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Parameter(torch.randn(3, 4))
            self.lstm, self.c = nn.LSTM(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            prompt, _ = self.lstm(self.start)
            return self.c(x) @ prompt

    torch.manual_seed(0)
    model = Prompted().double()
    for _ in range(3):
        compare(model, torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,)))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_matrix_of_learned_edges(layout):
    """Graphs of four nodes, as one: attention over edges is a sparse matrix that has gradients."""

    class Attended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.edge, self.c = nn.Linear(3, 4), nn.Linear(8, 1), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).flatten(0, 1)
            node = torch.arange(len(h))
            source = node ^ 1
            weight = self.edge(torch.cat([h, h[source]], 1)).squeeze(1)
            if layout == torch.sparse_coo:
                places = torch.stack([node, source])
                edges = torch.sparse_coo_tensor(places, weight, (len(h), len(h)))
            else:
                ends = torch.arange(len(h) + 1)
                edges = torch.sparse_csr_tensor(ends, source, weight, (len(h), len(h)))
            h = torch.sparse.mm(edges, h).view(len(x), 4, 4)
            return self.c(h.tanh().sum(1))

    torch.manual_seed(0)
    model = Attended().double()
    for _ in range(3):
        compare(model, torch.randn(5, 4, 3, dtype=torch.float64), torch.randint(3, (5,)))
