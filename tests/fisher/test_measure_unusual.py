"""Networks that few write, against plain autograd: chance in eval mode, hooks, nested tensors, half precision."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm
from torch.utils.checkpoint import checkpoint

from lightning_taskinfo import TaskInfoWarning
from lightning_taskinfo.fisher import fisher_diagonal, gradient_gram, per_sample_squared_norms
from tests.fisher.networks import Overwriting
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


class Hooked(Net):
    """Masks gradients between a parameter and its use."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.mask = torch.arange(20.0).view(5, 4) % 3

    def hidden(self, x: Tensor) -> Tensor:
        weight = self.a.weight
        if self.how == "clamped":
            weight = weight.view_as(weight)
            weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
        elif self.how == "scaled":
            weight = weight * 1.0
            weight.register_hook(lambda g: g * self.mask)
        elif self.how == "viewed":
            weight = weight.view_as(weight)
            weight.register_hook(lambda g: g * self.mask)
        else:
            turned = weight.t()
            turned.register_hook(lambda g: g * self.mask.T)
            return x @ turned
        return nn.functional.linear(x, weight, self.a.bias)


class ByPlace(Net):
    """Treats rows by their place in the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.other = nn.Linear(4, 5)

    def hidden(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x))
        places = {"from the start": places, "from the end": len(x) - 1 - places}[self.how]
        usual = places.unsqueeze(1) % 2 == 0  # as the only row is
        return torch.where(usual, self.a(x), self.other(x))


def norms_of(rows: dict[str, Tensor]) -> Tensor:
    return sum(g.flatten(1).square().sum(1) for g in rows.values())


def compare(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Norms, diagonal and Gram matrix beside those of one sample after the other."""
    x = x.double()
    gradients = empirical(model, x, y)
    flat = torch.cat([g.flatten(1) for g in gradients.values()], 1)
    norms = per_sample_squared_norms(model, x, y, labels="empirical")
    torch.testing.assert_close(norms, flat.square().sum(1))
    for name, found in fisher_diagonal(model, x, y, labels="empirical").items():
        torch.testing.assert_close(found, gradients[name].square().mean(0))
    torch.testing.assert_close(gradient_gram(model, x, y), flat @ flat.T)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_parameters_without_entries_are_no_failure(batch):
    class Empty(Net):
        """A layer that reads no feature, and a shift and a scale without entries."""

        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(0, 5)
            self.shift, self.scale = (nn.Parameter(torch.ones(0)) for _ in range(2))

        def hidden(self, x: Tensor) -> Tensor:
            nothing = self.b(x[:, :0] * self.scale + self.shift)
            return self.a(x) + nothing

    compare(Empty().double(), *batch)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}], ids=str)
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


@pytest.mark.parametrize("kind", [Net, Nested])  # by the graph, and by plain backward passes
@pytest.mark.filterwarnings("ignore:The graph does not show")
def test_hooks_of_parameters_do_not_run_and_are_named(batch, kind):
    x, y = batch
    x = x.unsqueeze(1) if kind is Nested else x
    model = kind()
    expected = norms_of(empirical(model, x, y))
    calls: list[Tensor] = []
    model.a.weight.register_hook(lambda g: g * 0)
    model.a.weight.register_hook(calls.append)
    with pytest.warns(TaskInfoWarning, match=r"Hooks on a\.weight do not run in a measurement"):
        norms = per_sample_squared_norms(model, x, y, labels="empirical")
    torch.testing.assert_close(norms, expected)
    assert not calls
    model(x).sum().backward()
    assert len(calls) == 1  # they are there again, in their order
    assert not calls[0].any()


@pytest.mark.parametrize("how", ["scaled", "viewed", "turned", "clamped"])
@pytest.mark.parametrize("n", [1, 6])
def test_hooks_between_a_parameter_and_its_use_run(batch, how, n):
    x, y = batch[0][:n], batch[1][:n]
    model = Hooked(how)
    rows = empirical(model, x, y)
    for _ in range(2):  # with a proof that is made, and with one that is kept
        norms = per_sample_squared_norms(model, x, y, labels="empirical")
        torch.testing.assert_close(norms, norms_of(rows))
    diagonal = fisher_diagonal(model, x, y, labels="empirical")
    for name, g in rows.items():
        torch.testing.assert_close(diagonal[name], g.square().mean(0))
    gram = gradient_gram(model, x, y)
    flat = torch.cat([g.flatten(1) for g in rows.values()], 1)
    torch.testing.assert_close(gram, (flat @ flat.T).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["from the start", "from the end"])
@pytest.mark.parametrize("n", [2, 3, 6, 7])
def test_samples_that_are_treated_by_their_place_are_measured_alone(how, n):
    torch.manual_seed(0)
    model, x, y = ByPlace(how), torch.randn(n, 4), torch.randint(3, (n,))
    expected = norms_of(empirical(model, x, y))
    with pytest.warns(TaskInfoWarning, match="its place in it"):
        norms = per_sample_squared_norms(model, x, y, labels="empirical")
    torch.testing.assert_close(norms, expected)


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
    with pytest.warns(TaskInfoWarning, match="nested tensors"):
        norms = per_sample_squared_norms(model, x, y, labels="empirical")
    torch.testing.assert_close(norms, norms_of(empirical(model, x, y)))


@pytest.mark.parametrize("labels", ["empirical", "exact"])
@pytest.mark.parametrize("times", [1, 2])
def test_functions_that_overwrite_what_they_have_saved(times, labels):
    torch.manual_seed(0)
    net = Overwriting(times).double()
    twin = copy.deepcopy(net)
    twin.fused = False
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    for n in (6, 1):
        for quantity in (per_sample_squared_norms, fisher_diagonal):
            found = quantity(net, x[:n], y[:n], labels=labels)
            torch.testing.assert_close(found, quantity(twin, x[:n], y[:n], labels=labels))
    torch.testing.assert_close(gradient_gram(net, x, y), gradient_gram(twin, x, y))


class Overwritten(torch.autograd.Function):
    """The sine, whose backward pass writes the gradient over what was saved."""

    @staticmethod
    def forward(ctx, w: Tensor) -> Tensor:
        ctx.save_for_backward(w.cos())
        return w.sin()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        saved.data.mul_(gradient)
        return saved


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_a_function_that_makes_a_weight_may_overwrite_what_it_has_saved(chunk_size):
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, Overwritten.apply(self.weight), self.bias)

    torch.manual_seed(0)
    net, x, y = Net(5, 3).double(), torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
    expected = [g.flatten(1).square().sum(1) for g in empirical(net, x, y).values()]
    norms = per_sample_squared_norms(net, x, y, labels="empirical", chunk_size=chunk_size)
    torch.testing.assert_close(norms, sum(expected))


class Scaled(torch.autograd.Function):
    """A product with a vector."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g: Tensor):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class WithFunction(nn.PReLU):
    """A function of the user's in place of the activation."""

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, self.weight)


@pytest.mark.parametrize("labels", ["empirical", "exact"])
@pytest.mark.parametrize("kind", [nn.PReLU, WithFunction])
def test_checkpointed_operations_that_only_run_backward_as_a_whole(batch, kind, labels):
    net = nn.Sequential(nn.Linear(4, 5), kind(5), nn.Linear(5, 3)).double()
    x, y = batch[0].double(), batch[1]

    def again(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    for quantity in (per_sample_squared_norms, fisher_diagonal):
        with pytest.warns(TaskInfoWarning, match=r"gradients of 1.weight belong to"):
            found = quantity(net, x, y, labels=labels, forward_fn=again)
        torch.testing.assert_close(found, quantity(net, x, y, labels=labels))


def test_checkpointing_that_is_switched_on_later(batch):
    class Switched(Net):
        on = False

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(self.a, nn.PReLU(5))

        def hidden(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False) if self.on else self.body(x)

    net = Switched().double()
    x = batch[0].double()
    expected = [fisher_diagonal(net, x, labels="exact") for _ in range(3)]
    net.on = True
    for _ in range(3):
        with pytest.warns(TaskInfoWarning, match=r"gradients of body.1.weight belong to") as warned:
            found = fisher_diagonal(net, x, labels="exact")
        assert len(warned) == 1
        torch.testing.assert_close(found, expected[0])


class HalfDeep(nn.Module):
    """Many layers in half precision, whose gradients are rounded often."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(5, 32)]
        for _ in range(20):
            layers += [nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU()]
        self.net, self.dtype = nn.Sequential(*layers, nn.Linear(32, 3)), dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            return self.net(x).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_samples_in_half_precision_keep_their_rows(dtype):
    """More of them than there are powers of two to tell them by.

    The reference has the outputs of the same batch: those of a sample alone are rounded in another way on some
    processors, and activations that flip change a gradient by a quarter.
    """
    model = HalfDeep(dtype)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(512, 5, generator=generator), torch.arange(512) % 3
    found = per_sample_squared_norms(model, x, y, labels="empirical")
    losses = cross_entropy(model(x), y, reduction="none")
    for loss, norm in zip(losses[:64], found, strict=False):
        gradients = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        expected = sum(g.square().sum() for g in gradients)
        torch.testing.assert_close(norm, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("how", ["sign", "unit"])
def test_hooks_whose_gradient_knows_no_scale_are_no_single_sample(batch, how):
    class Scaled(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h.register_hook(
                lambda g: g.sign() if how == "sign" else g / (g.norm(dim=1, keepdim=True) + 1e-12)
            )
            return h

    compare(Scaled().double(), *batch)


class ByBatch(Net):
    """Treats a sample by the others of its batch, but not the first one, and knows no order."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def hidden(self, x: Tensor) -> Tensor:
        if self.how == "better half":
            better = x[:, 0] >= x[:, 0].median()
            return self.a(x) * (1 + better.unsqueeze(1))
        norms = x.norm(dim=1, keepdim=True)
        return self.a(x * (1.2 * norms.median() / norms).clamp(max=1))


@pytest.mark.parametrize("how", ["better half", "outliers"])
def test_samples_that_are_treated_by_their_batch_are_measured_alone(how):
    generator = torch.Generator().manual_seed(1)
    model = ByBatch(how).double()
    for _ in range(10):
        x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
        with pytest.warns(TaskInfoWarning, match="depend on the others of its batch"):
            compare(model, x, torch.arange(12) % 3)


@pytest.mark.parametrize(("dtype", "alone"), [(torch.float32, False), (torch.float64, True)])
def test_rounding_of_a_part_in_float32_is_no_influence_of_the_batch(batch, dtype, alone):
    class Rounded(Net):
        def hidden(self, x: Tensor) -> Tensor:
            scale = 1 + len(x) * 2.0**-23  # as the sums of another kernel
            return (self.a(x).to(dtype) * scale).double()

    x, y = batch[0].double(), batch[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TaskInfoWarning)
        per_sample_squared_norms(Rounded().double(), x, y, labels="empirical")
    assert any("each sample is measured alone" in str(w.message) for w in caught) == alone


class Force(Net):
    """Puts out gradients of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.c(self.a(x).tanh()).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0][:, :3]


def test_networks_that_take_gradients_themselves(batch):
    compare(Force().double(), *batch)


class Kept(torch.autograd.Function):
    """Multiplies by a tensor that it keeps in its context, or stretched, and overwrites or forgets it."""

    @staticmethod
    def forward(ctx, x: Tensor, how: str) -> Tensor:
        ctx.how, ctx.factor = how, x.cos()
        if how == "stretched":
            ctx.save_for_backward(x.new_full((1,), 0.5).expand(x.shape))
        elif how == "counted":
            ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx, g: Tensor):
        if ctx.how == "stretched":
            return g * ctx.saved_tensors[0], None
        if ctx.how == "counted":
            (factor,) = ctx.saved_tensors
            return factor.mul_(g), None
        factor = ctx.factor
        if ctx.how == "forgotten":
            ctx.factor = None
            return g * factor, None
        return factor.mul_(g).clone(), None


@pytest.mark.parametrize("how", ["stretched", "counted", "forgotten", "overwritten"])
def test_functions_keep_what_they_have_in_their_context(batch, how):
    class WithFunction(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return Kept.apply(self.a(x), how)

    model = WithFunction().double()
    for _ in range(2):
        compare(model, *batch)


class Stem(nn.Module):
    """Pixels of a normed map as tokens, whose gradients come back transposed; ``ended`` by a function of the user's."""

    def __init__(self, norm: nn.Module, *, ended: bool) -> None:
        super().__init__()
        conv = nn.Conv3d if isinstance(norm, nn.BatchNorm3d) else nn.Conv2d
        self.a, self.norm, self.c = conv(2, 4, 3), norm, nn.Linear(4, 3)
        self.ended = ended

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.a(x)).flatten(2).transpose(1, 2)
        outputs = self.c(layer_norm(tokens, (4,))).mean(1)
        return Kept.apply(outputs, "stretched") if self.ended else outputs


@pytest.mark.parametrize("ended", [False, True], ids=["by uses", "by plain autograd"])
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm2d(4),
        lambda: nn.BatchNorm3d(4),
        lambda: nn.InstanceNorm2d(4, affine=True),
    ],
    ids=["batch", "batch 3d", "instance"],
)
def test_a_map_of_one_sample_has_the_gradients_that_it_has_among_others(norm, ended):
    """Which PyTorch's own backward pass gets wrong on a CPU: so the reference is of a whole batch."""
    torch.manual_seed(0)
    model = Stem(norm(), ended=ended).double().eval()
    size = (6,) * (model.a.weight.dim() - 2)
    x, y = torch.randn(3, 2, *size, dtype=torch.float64), torch.arange(3)
    losses = cross_entropy(model(x), y, reduction="none")
    expected = []
    for loss in losses:
        found = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        expected.append(torch.stack([g.square().sum() for g in found]).sum())
    for chunk_size in (None, 2, 1):
        norms = per_sample_squared_norms(model, x, y, labels="empirical", chunk_size=chunk_size)
        torch.testing.assert_close(norms, torch.stack(expected))
    exact = per_sample_squared_norms(model, x, labels="exact")
    alone = per_sample_squared_norms(model, x, labels="exact", chunk_size=1)
    torch.testing.assert_close(alone, exact)
