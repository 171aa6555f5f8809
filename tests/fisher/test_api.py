"""What the quantities mean: whose labels, which likelihood, in what precision, and what is refused."""

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from lightning_taskinfo import observing
from lightning_taskinfo.fisher import (
    FisherInformation,
    fisher_diagonal,
    fisher_trace,
    gradient_gram,
    per_sample_squared_norms,
)
from lightning_taskinfo.fisher.accumulators import inner_products
from lightning_taskinfo.functional.likelihood import (
    Categorical,
    Gaussian,
    NumberedDraws,
    output_scores,
)
from tests.fisher import networks as nets
from tests.fisher.test_measure import empirical, loop, make, total


def jacobian(model: nn.Module, inputs: Tensor) -> Tensor:
    """``[N, outputs, P]``, by forward calls of single samples."""
    weights = dict(model.named_parameters())
    rows = [
        jacrev(lambda w, x=x: functional_call(model, w, (x[None],))[0].flatten())(weights)
        for x in inputs
    ]
    return torch.stack(
        [torch.cat([part.flatten(1) for part in row.values()], 1) for row in rows]
    ).detach()


def exact(model: nn.Module, inputs: Tensor, output_fisher: Tensor) -> Tensor:
    """Diagonal ``[P]`` of ``mean JᵀΛJ``, all in full."""
    J = jacobian(model, inputs)
    return torch.einsum("nop,noq,nqp->p", J, output_fisher, J) / len(inputs)


def flat(diagonal: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in diagonal.values()])


@pytest.mark.parametrize("case", ["functional", "conv2d", "batch norm", "attention"])
def test_exact_categorical_is_the_expectation_over_classes(case):
    model, inputs, _ = make(case)
    p = model(inputs).softmax(-1).detach()
    expected = exact(model, inputs, p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1))
    torch.testing.assert_close(
        flat(fisher_diagonal(model, inputs, labels="exact", chunk_size=3)), expected
    )


def test_exact_tokens_add_up():
    model, inputs, _ = make("sequence")
    p = model(inputs).softmax(-1).detach()  # [N, T, C]
    blocks = p.diag_embed() - p.unsqueeze(-1) * p.unsqueeze(-2)
    expected = exact(model, inputs, torch.stack([torch.block_diag(*sample) for sample in blocks]))
    torch.testing.assert_close(flat(fisher_diagonal(model, inputs, labels="exact")), expected)


def test_gaussian_is_the_jacobian_squared_over_the_variance():
    model, inputs, _ = make("functional")
    expected = jacobian(model, inputs).square().sum(1).mean(0) / 0.2
    torch.testing.assert_close(
        flat(fisher_diagonal(model, inputs, labels="exact", likelihood=Gaussian(std=0.2**0.5))),
        expected,
    )


def test_bernoulli():
    model, inputs, _ = make("functional")
    p = model(inputs).sigmoid().detach()
    expected = exact(model, inputs, (p * (1 - p)).diag_embed())
    torch.testing.assert_close(
        flat(fisher_diagonal(model, inputs, labels="exact", likelihood="bernoulli")), expected
    )


def test_softmax_regression_in_closed_form():
    torch.manual_seed(0)
    model, x = nn.Linear(5, 4, bias=False).double(), torch.randn(30, 5, dtype=torch.float64)
    p = model(x).softmax(-1)
    expected = (x.square().sum(1) * (1 - p.square().sum(1))).mean()
    torch.testing.assert_close(fisher_trace(model, x, labels="exact"), expected.detach())


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_sampled_labels_are_unbiased(likelihood):
    model, inputs, _ = make("functional")
    g = torch.Generator().manual_seed(0)
    draws = torch.stack(
        [
            per_sample_squared_norms(model, inputs, likelihood=likelihood, generator=g).mean()
            for _ in range(400)
        ]
    )
    expected = fisher_trace(model, inputs, labels="exact", likelihood=likelihood)
    assert (draws.mean() - expected).abs() < 4 * draws.std() / len(draws) ** 0.5


def test_mc_samples_divide_the_variance():
    model, inputs, _ = make("functional")
    inputs = inputs[:1].expand(
        3000, -1
    )  # one sample many times: independent draws of the same quantity
    one, four = (
        per_sample_squared_norms(
            model, inputs, mc_samples=m, generator=torch.Generator().manual_seed(0)
        ).var()
        for m in (1, 4)
    )
    # An estimated variance has a relative standard error of about √(2/N) or a little more: 4 of them on each side.
    assert abs(one / four / 4 - 1) < 4 * 2 * (2 / 3000) ** 0.5


def test_draws_follow_the_generator_alone():
    model, inputs, _ = make("functional")
    first, again, other = (
        per_sample_squared_norms(model, inputs, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_measured_in_float32(dtype):
    model, inputs, targets = make("batch norm", torch.float32)
    model.to(dtype)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    halves = inputs.to(dtype)
    diagonal = fisher_diagonal(model, halves, targets, labels="empirical")
    trace = fisher_trace(model, halves, targets, labels="empirical")
    assert all(
        torch.equal(t, before[name]) and t.dtype == before[name].dtype
        for name, t in model.state_dict().items()
    )
    expected = empirical(model.float(), halves.float(), targets)
    for name, g in expected.items():
        torch.testing.assert_close(diagonal[name], g.square().mean(0), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        trace, total({k: g.square().mean(0) for k, g in expected.items()}), rtol=1e-5, atol=0
    )


@pytest.mark.filterwarnings("ignore:Outputs .* are read with the classes last")
def test_padded_tokens_count_for_nothing():
    model, inputs, targets = make("sequence")
    targets[:, -1] = -100
    rows = loop(
        model,
        inputs,
        lambda out, n: nn.functional.cross_entropy(
            out[0], targets[n], ignore_index=-100, reduction="sum"
        ),
    )
    diagonal = fisher_diagonal(model, inputs, targets, labels="empirical")
    for name, g in rows.items():
        torch.testing.assert_close(diagonal[name], g.square().mean(0), rtol=1e-9, atol=1e-12)
    shorter = fisher_diagonal(
        model, inputs[:, :-1], labels="exact"
    )  # tokens do not see each other here
    torch.testing.assert_close(
        flat(fisher_diagonal(model, inputs, targets, labels="exact")), flat(shorter)
    )


def test_a_tuple_and_a_dict_go_through_forward_fn():
    torch.manual_seed(0)
    model = nets.Pair().double()
    batch, targets = {"x": torch.randn(6, 5, dtype=torch.float64)}, torch.randint(3, (6,))
    expected = []
    for n in range(6):
        model.zero_grad()
        nn.functional.cross_entropy(
            model({"x": batch["x"][n : n + 1]})[1], targets[n : n + 1]
        ).backward()
        expected.append(torch.cat([p.grad.flatten() for p in model.parameters()]).square().sum())
    norms = per_sample_squared_norms(
        model, batch, targets, labels="empirical", forward_fn=lambda m, b: m(b)[1]
    )
    torch.testing.assert_close(norms, torch.stack(expected))
    with pytest.raises(ValueError, match=r"got tuple of .*`forward_fn`"):
        fisher_trace(model, batch)


@pytest.mark.parametrize("case", ["conv2d", "attention", "linear"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_more_than_fits_is_measured_in_several_passes(monkeypatch, case, chunk_size):
    model, inputs, targets = make(case)
    whole = gradient_gram(model, inputs, targets)
    monkeypatch.setattr("lightning_taskinfo.fisher.accumulators.ROOM", 0)
    torch.testing.assert_close(gradient_gram(model, inputs, targets, chunk_size=chunk_size), whole)


@pytest.mark.parametrize("observed", [True, False])
@pytest.mark.parametrize("numbered", [True, False])
def test_labels_are_the_same_in_all_passes(monkeypatch, observed, numbered):
    model, inputs, _ = make("linear")
    torch.manual_seed(0)

    def gram() -> Tensor:
        likelihood = NumberedDraws(Categorical(), seed=1, total=10) if numbered else "categorical"
        with observing(model) if observed else nullcontext():
            return gradient_gram(
                model, inputs, labels="sampled", likelihood=likelihood, chunk_size=4
            )

    whole = gram()
    monkeypatch.setattr("lightning_taskinfo.fisher.accumulators.ROOM", 0)
    torch.testing.assert_close(gram(), whole)


def test_gram_of_float32_gradients_is_close_to_that_of_float64():
    model, inputs, targets = make("attention", torch.float32)
    single = gradient_gram(model, inputs, targets)
    double = gradient_gram(model.double(), inputs.double(), targets)
    assert single.dtype == torch.float64
    lengths = double.diagonal().sqrt()
    assert ((single - double).abs() < 1e-6 * lengths.outer(lengths)).all()


def test_many_inner_products_add_up_in_float64():
    x = torch.full((2, 1 << 20), 0.7)  # a sum of all in float32 is off by 1e-3
    expected = (1 << 20) * x[0, 0].double() ** 2
    assert (inner_products(x) / expected - 1).abs().max() < 2e-6


@pytest.mark.parametrize(
    "width", [10, 1024, 5000]
)  # parts of a block of columns, one block, several
@pytest.mark.parametrize(
    "rows", [3, 1500]
)  # products of several blocks at once, of one block at a time
def test_inner_products_of_any_width(rows, width):
    x = torch.randn(rows, width)
    expected = x.double() @ x.double().T
    lengths = expected.diagonal().sqrt()
    assert ((inner_products(x) - expected).abs() < 1e-6 * lengths.outer(lengths)).all()


def test_what_takes_the_loop_is_named_once():
    model, inputs, targets = make("embedding by frequency")
    with pytest.warns(UserWarning, match="The graph does not show") as record:
        fisher_trace(model, inputs, targets, labels="empirical", chunk_size=3)
    (warning,) = record
    named = r"gradients of 0.weight belong to \(EmbeddingBackward0\): each sample takes a backward"
    assert re.search(named, str(warning.message))


def test_an_unused_parameter_has_no_fisher():
    model = nets.Functional().double()
    model.extra = nn.Linear(2, 2)
    diagonal = fisher_diagonal(model, torch.randn(4, 5, dtype=torch.float64))
    assert diagonal["extra.weight"].shape == (2, 2)
    assert not diagonal["extra.weight"].any()


def test_the_model_comes_back_as_it_was():
    model, inputs, targets = make("dropout")
    model.train()
    model[0].weight.grad = kept = torch.ones_like(model[0].weight)
    state, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    fisher_trace(model, inputs, targets, generator=torch.Generator().manual_seed(0))
    fisher_diagonal(
        model, inputs, targets, chunk_size=1, generator=torch.Generator().manual_seed(0)
    )
    assert all(module.training for module in model.modules())
    assert model[0].weight.grad is kept
    assert (kept == 1).all()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


def test_works_inside_inference_mode():
    model, inputs, targets = make("functional")
    expected = fisher_trace(model, inputs, targets, labels="empirical")
    with torch.inference_mode():
        torch.testing.assert_close(
            fisher_trace(model, inputs.clone(), targets.clone(), labels="empirical"), expected
        )


def test_batch_norm_in_train_mode_is_refused():
    model, inputs, _ = make("batch norm")
    with pytest.raises(ValueError, match=r"BatchNorm '1' is in train mode.* call `model.eval\(\)`"):
        fisher_trace(model.train(), inputs)
    model[1] = nn.BatchNorm2d(4, track_running_stats=False).double()
    with pytest.raises(ValueError, match="normalises with the statistics of the batch"):
        fisher_trace(model.eval(), inputs)


def test_an_input_changed_in_place_gives_no_number():
    model = nets.Spoiled().double()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fisher_trace(model, torch.randn(4, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": "true"}, "`labels` must be one of sampled, exact, empirical, got 'true'"),
        (
            {"likelihood": "poisson"},
            "`likelihood` must be one of categorical, bernoulli, gaussian, got 'poisson'",
        ),
        ({"mc_samples": 0}, "`mc_samples` must be at least 1, got 0"),
        ({"chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
        ({"labels": "empirical"}, "`targets` must be given for `labels='empirical'`, got None"),
        (
            {"targets": torch.zeros(3, dtype=torch.long)},
            r"`targets` must have one entry per sample \(7\), got 3",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    model, inputs, _ = make("functional")
    with pytest.raises(ValueError, match=message):
        fisher_trace(model, inputs, **arguments)


def test_bad_models_and_inputs_are_named():
    model, inputs, _ = make("functional")
    for found, nothing in {"list without tensors": [], "ndarray": inputs.numpy()}.items():
        with pytest.raises(
            ValueError, match=f"`inputs` must be a tensor, or a tuple, .* of tensors, got {found}"
        ):
            fisher_trace(model, nothing)
    with pytest.raises(ValueError, match="`targets` must be a tensor, got 'exact'"):
        fisher_trace(model, inputs, "exact")
    with pytest.raises(ValueError, match="`targets` must be a tensor, got 'exact'"):
        FisherInformation().update(model, inputs, "exact")
    with pytest.raises(ValueError, match=r"got \[3, 7\]"):
        fisher_trace(model, [inputs, inputs[:3]])
    with pytest.raises(
        ValueError,
        match=r"`model` must return one row of outputs a sample: expected \[7, ...\] for 7",
    ):
        fisher_trace(model, inputs, forward_fn=lambda m, x: m(x).mean(0, keepdim=True))
    with pytest.raises(
        ValueError,
        match=r"`labels` must be 'empirical' or 'sampled', and .* for a Gram matrix .* got 'exact'",
    ):
        gradient_gram(model, inputs, labels="exact")
    with pytest.raises(ValueError, match=r"`mc_samples` must be 1 for a Gram matrix .* and 2"):
        gradient_gram(model, inputs, labels="sampled", mc_samples=2)
    with pytest.raises(
        ValueError, match="`model` must return outputs that depend on its trainable parameters"
    ):
        fisher_trace(model, inputs, forward_fn=lambda m, x: m(x).detach())
    sharded = nets.Functional().double()
    sharded.a.weight.full_tensor = lambda: None  # what a parameter of `fully_shard` has
    with pytest.raises(
        ValueError,
        match=r"must be sharded by `fully_shard` alone, got 'a.weight' sharded in another",
    ):
        fisher_trace(sharded, inputs)
    with pytest.raises(
        ValueError, match="`model` must have a parameter with `requires_grad=True`, got none"
    ):
        fisher_trace(model.requires_grad_(False), inputs)


def test_ignore_index_is_an_option_of_the_likelihood():
    model, inputs, targets = make("functional")
    targets[0] = 99
    norms = per_sample_squared_norms(
        model, inputs, targets, labels="empirical", likelihood=Categorical(ignore_index=99)
    )
    assert norms[0] == 0
    assert (norms[1:] > 0).all()


class Cubed(torch.autograd.Function):
    """An operation whose backward pass vmap cannot run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(3 * ctx.saved_tensors[0].numpy() ** 2 * g.numpy())


class Cubic(nets.Functional):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(Cubed.apply(self.b(Cubed.apply(self.a(x)))))


def squares_of_one(model: nn.Module, inputs: Tensor) -> Tensor:
    """Squared gradients ``[P]`` of one sample, added up over one backward pass after the other."""
    parameters = [*model.parameters()]
    outputs = model(inputs)
    squares = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for score in output_scores(outputs, None, labels="exact", likelihood=Categorical()):
        found = torch.autograd.grad(outputs, parameters, score, retain_graph=True)
        squares += torch.cat([g.flatten() for g in found]).square()
    return squares


@pytest.mark.parametrize(
    "case",
    [
        "attention", "checkpoint", "conv1d stride", "conv2d", "conv2d depthwise", "conv2d groups", "conv2d one channel",
        "conv2d ghost", "conv2d whole", "frames", "batch norm", "sequence", "module twice", "tied, padded",
        "inplace residual", "cubic",
    ],
)  # fmt: skip
def test_several_scores_at_once(case):
    model, inputs, _ = make("functional" if case == "cubic" else case)
    model = Cubic().double() if case == "cubic" else model
    close = {"rtol": 1e-9, "atol": 1e-12}
    squares = [squares_of_one(model, inputs[n : n + 1]) for n in range(len(inputs))]
    diagonal = fisher_diagonal(model, inputs, labels="exact")
    torch.testing.assert_close(flat(diagonal), torch.stack(squares).mean(0), **close)
    norms = per_sample_squared_norms(model, inputs, labels="exact")
    torch.testing.assert_close(norms, torch.stack(squares).sum(1), **close)
